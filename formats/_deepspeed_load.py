"""What do the pickles of a DeepSpeed checkpoint say, and do the ranks agree?

Every rank's file is opened (headers and pickle only), and what must be the same on all ranks is
compared: world size, stage, version, configuration, parameter groups. Faults that DeepSpeed's own
tools pass over in silence are errors here: a missing rank, a rank of another world size, a rank
of another run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from reshard.errors import CorruptError, IncompleteError, InconsistentError, UnsupportedError
from reshard.formats._deepspeed_experts import Expert, are_counts, check_files
from reshard.formats._deepspeed_names import Names
from reshard.pickle_stubs import Record
from reshard.side_by_side import side_by_side
from reshard.torchfile import TorchFile, open_torch_file

_PACKAGE = "deepspeed.runtime."
KNOWN: dict[str, type[Record]] = dict.fromkeys(
    (
        _PACKAGE + "fp16.loss_scaler.LossScaler",
        _PACKAGE + "fp16.loss_scaler.DynamicLossScaler",
        _PACKAGE + "zero.config.ZeroStageEnum",
        _PACKAGE + "zero.offload_config.OffloadDeviceEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    ),
    Record,
)
"""Classes that DeepSpeed itself puts in its files; others come from the training script."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """One opened file.

    Parameters
    ----------
    file
        The torch file.
    data
        Its top-level dict.
    mp, dp
        Index on the model (pipeline x tensor) and data axes.
    """

    file: TorchFile
    data: Mapping[str, Any]
    mp: int
    dp: int

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.file.path


@dataclass(frozen=True)
class Checkpoint:
    """All opened files of a checkpoint.

    Parameters
    ----------
    names
        The files.
    stage
        ZeRO stage, 0 where there is none.
    world
        Data-parallel world size.
    pipeline, tensor
        Sizes of these axes.
    models
        (mp, dp) to the model's file; at stages 0 to 2 all are at dp 0.
    optims
        (mp, dp) to the optimizer's file.
    experts
        (MoE layer, expert, mp) to the expert's file.
    """

    names: Names
    stage: int
    world: int
    pipeline: int
    tensor: int
    models: Mapping[tuple[int, int], Loaded]
    optims: Mapping[tuple[int, int], Loaded]
    experts: Mapping[tuple[int, int, int], Loaded] = field(
        default_factory=dict[tuple[int, int, int], Loaded]
    )

    @property
    def first(self) -> Loaded:
        """The first model file."""
        return self.models[0, 0]

    @property
    def mps(self) -> range:
        """The indices of the model axis."""
        return range(self.pipeline * self.tensor)

    @cached_property
    def moe_layers(self) -> dict[str, int]:
        """The modules that hold the experts of each MoE layer, in order, and how many they are."""
        found: dict[str, int] = {}
        for (_, expert, _), loaded in self.experts.items():
            for name in loaded.data:
                layer = expert_in(loaded, str(name), expert).layer
                found[layer] = max(found.get(layer, 0), expert + 1)
        return found

    def experts_of(self, layer: str) -> int:
        """How many experts a MoE layer has.

        Raises
        ------
        IncompleteError
            If it has no files of experts.
        """
        count = self.moe_layers.get(layer)
        if count is None:
            raise IncompleteError(
                f"{layer} has experts, and there is no file of them", where=self.names.root
            )
        return count


def load_one(path: Path, mp: int, dp: int) -> Loaded:
    """Open one file, whose value must be a dict."""
    file = open_torch_file(path, known=KNOWN)
    if not isinstance(file.value, Mapping):
        raise CorruptError("doesn't hold a dict at its top level", where=path)
    return Loaded(file, file.value, mp, dp)


def load_all(jobs: Iterable[tuple[Path, int, int]]) -> dict[tuple[int, int], Loaded]:
    """Open several files of ranks."""
    return {(one.mp, one.dp): one for one in _load_list(jobs)}


def _load_list(jobs: Iterable[tuple[Path, int, int]]) -> list[Loaded]:
    return side_by_side(lambda row: load_one(*row), list(jobs))


def load(names: Names) -> Checkpoint:
    """Open all files of a checkpoint and check that they belong together.

    Raises
    ------
    IncompleteError
        If a rank's file is missing.
    InconsistentError
        If ranks disagree.
    """
    optims = load_all((path, *key) for key, path in names.optim.items())
    if names.model3:
        models = load_all((path, *key) for key, path in names.model3.items())
    else:
        models = load_all((path, mp, 0) for mp, path in names.model.items())
    if not models:
        raise IncompleteError("no model file (…_model_states.pt) is there", where=names.root)
    first = models[min(models)]
    world = _world(names, first, optims)
    pipeline, tensor = _degrees(first, names, max(mp for mp, _ in models) + 1)
    stage = _stage(first, optims)
    _all_there(names, pipeline * tensor, world, stage, models, optims)
    _agree(models, optims)
    experts = _experts(names, models)
    return Checkpoint(names, stage, world, pipeline, tensor, models, optims, experts)


def _experts(
    names: Names, models: Mapping[tuple[int, int], Loaded]
) -> dict[tuple[int, int, int], Loaded]:
    """Open the files of all experts, each of which must be there."""
    for (mp, dp), model in models.items():
        counts = model.data.get("num_experts")
        known = counts is None or are_counts(counts)
        if model.data.get("ds_autoep_layers") or not known:
            raise UnsupportedError(
                "keeps its experts in a way that isn't supported (AutoEP, or that of DeepSpeed's "
                "first releases)",
                where=model.path,
                hint="checkpoints of deepspeed.moe.layer.MoE as it is now can be read",
            )
        if counts is not None and dp == 0:
            check_files(names, mp, counts)
    loaded = _load_list((path, mp, 0) for (_, _, mp), path in names.experts.items())
    return dict(zip(names.experts, loaded, strict=True))


def expert_in(loaded: Loaded, name: str, expert: int) -> Expert:
    """The name of a tensor in an expert's file, taken apart.

    Raises
    ------
    CorruptError
        If it is of another expert, or of none.
    """
    found = Expert.parse(name)
    if found is None or found.index != expert:
        raise CorruptError(f"holds {name}, which isn't of expert {expert}", where=loaded.path)
    return found


def optimizer_dict(loaded: Loaded) -> Mapping[str, Any]:
    """The ``optimizer_state_dict`` of an optimizer file."""
    found = loaded.data.get("optimizer_state_dict")
    if not isinstance(found, Mapping):
        raise CorruptError("holds no 'optimizer_state_dict'", where=loaded.path)
    return found


def stage_of(optimizer: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """The ZeRO stage that an optimizer file was written at.

    BF16_Optimizer (bf16 with fp32 accumulation) writes none; it is a stage-1 layout.
    """
    found = optimizer.get("zero_stage")
    if isinstance(found, Record) and found.args:
        found = found.args[0]
    if found is None:
        zero = config.get("zero_optimization")
        found = zero.get("stage", 1) if isinstance(zero, Mapping) else 1
    return int(found) if isinstance(found, int) else -1


def config_of(loaded: Loaded) -> Mapping[str, Any]:
    """The DeepSpeed configuration that a file carries (empty where there is none)."""
    found = loaded.data.get("ds_config")
    return found if isinstance(found, Mapping) else {}


def _stage(first: Loaded, optims: Mapping[tuple[int, int], Loaded]) -> int:
    if not optims:
        return 0
    any_optim = optims[min(optims)]
    stage = stage_of(optimizer_dict(any_optim), config_of(any_optim) or config_of(first))
    if stage not in (1, 2, 3):
        raise UnsupportedError(f"says ZeRO stage {stage}", where=any_optim.path)
    return stage


def _world(names: Names, first: Loaded, optims: Mapping[tuple[int, int], Loaded]) -> int:
    said = first.data.get("dp_world_size")
    if isinstance(said, int) and said >= 1:
        return said
    ranks = [dp for _, dp in (*names.optim, *names.model3)]
    return max(ranks, default=0) + 1


def _degrees(first: Loaded, names: Names, count: int) -> tuple[int, int]:
    """Sizes of the pipeline and tensor axes; mp index = pipeline index * tensor + tensor index."""
    said = first.data.get("checkpoint_parallel_dimensions")
    if isinstance(said, Mapping):
        pipeline, tensor = said.get("pp_degree", 1), said.get("tp_degree", 1)
        if isinstance(pipeline, int) and isinstance(tensor, int) and pipeline * tensor >= count:
            return pipeline, tensor
    size = first.data.get("mp_world_size")
    total = max(count, size if isinstance(size, int) else 1)
    if names.layers:
        tensor = max(t for _, t in names.layers) + 1
        return max(1, total // tensor), tensor
    return 1, total


def _all_there(
    names: Names,
    mps: int,
    world: int,
    stage: int,
    models: Mapping[tuple[int, int], Loaded],
    optims: Mapping[tuple[int, int], Loaded],
) -> None:
    prefix = next((p.name.partition("zero_pp")[0] for p in names.optim.values()), "")
    for mp in range(mps):
        for dp in range(world):
            if stage and (mp, dp) not in optims:
                name = f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"
                raise _missing(names, dp, world, name)
            if stage == 3 and (mp, dp) not in models:
                name = f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt"
                raise _missing(names, dp, world, name)
        if stage != 3 and (mp, 0) not in models:
            raise IncompleteError(f"mp_rank_{mp:02d}_model_states.pt is missing", where=names.root)
    for (mp, dp), loaded in (*models.items(), *optims.items()):
        if mp >= mps or dp >= world:
            raise InconsistentError(
                f"is of rank {dp} (model rank {mp}), but the checkpoint was written by {world} "
                f"data-parallel rank(s) and {mps} model rank(s)",
                where=loaded.path,
                hint="files of an earlier run at another world size were left in the folder",
            )


def _missing(names: Names, dp: int, world: int, name: str) -> IncompleteError:
    return IncompleteError(
        f"rank {dp} of {world} is missing: there is no {name}",
        where=names.root,
        hint="copy the missing file into the folder; nothing can stand in for it",
    )


_MODEL_KEYS = ("dp_world_size", "mp_world_size", "global_steps", "ds_version", "skipped_steps")
_OPTIM_KEYS = ("partition_count", "zero_stage", "clip_grad", "dynamic_loss_scale")


def _agree(
    models: Mapping[tuple[int, int], Loaded], optims: Mapping[tuple[int, int], Loaded]
) -> None:
    if models:
        first = models[min(models)]
        for loaded in models.values():
            for key in _MODEL_KEYS:
                _same(first, loaded, key, first.data.get(key), loaded.data.get(key))
    if not optims:
        return
    first = optims[min(optims)]
    model = models[min(models)] if models else first
    for loaded in optims.values():
        _same(model, loaded, "ds_version", model.data.get("ds_version"), _version(loaded))
        _same(model, loaded, "ds_config", config_of(model), config_of(loaded))
        ours, theirs = optimizer_dict(first), optimizer_dict(loaded)
        _same(first, loaded, "the keys of the optimizer's state", set(ours), set(theirs))
        for key in _OPTIM_KEYS:
            if not (key == "partition_count" and loaded.mp != first.mp):
                _same(first, loaded, key, _bare(ours.get(key)), _bare(theirs.get(key)))


def _version(loaded: Loaded) -> object:
    return loaded.data.get("ds_version", optimizer_dict(loaded).get("ds_version"))


def _bare(value: object) -> object:
    return (value.qualname, value.args) if isinstance(value, Record) else value


def _same(first: Loaded, other: Loaded, key: str, ours: object, theirs: object) -> None:
    if ours == theirs:
        return
    if key in ("ds_config", "the keys of the optimizer's state"):
        ours, theirs = _difference(ours, theirs)
    raise InconsistentError(
        f"{key} is {theirs!r:.200}, but {ours!r:.200} in {first.path.name}",
        where=other.path,
        hint="the files are of different runs; put the right one in its place",
    )


def _difference(ours: Any, theirs: Any) -> tuple[Any, Any]:
    """The first part in which two values differ."""
    if isinstance(ours, set) and isinstance(theirs, set):
        return sorted(map(str, ours - theirs)), sorted(map(str, theirs - ours))
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in (*ours, *theirs):
            if ours.get(key) != theirs.get(key):
                mine, other = _difference(ours.get(key), theirs.get(key))
                return {key: mine}, {key: other}
    return ours, theirs
