"""Which files make up a DeepSpeed checkpoint, and whose are they?

DeepSpeed names files by rank (``deepspeed/runtime/engine.py``, ``_get_zero_ckpt_name``,
``_get_ckpt_name``, ``_get_expert_ckpt_name`` and ``pipe/module.py``, ``ckpt_layer_path``, of
0.19.8). Ranks are sorted as numbers: rank 10 comes after 9.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import CorruptError, InconsistentError, NotFoundError

_OPTIM = re.compile(r"((?:bf16|fp16)_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"layer_(-?\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_TAG = re.compile(r"[A-Za-z0-9][\w.\-]*")


@dataclass(frozen=True, slots=True)
class Names:
    """The files of one checkpoint.

    Parameters
    ----------
    root
        The tag's folder.
    optim
        (mp, dp) to the optimizer's file.
    model
        mp to the model's file, stages 0 to 2.
    model3
        (mp, dp) to the model's file, stage 3.
    layers
        (layer, tensor rank) to a pipeline layer's file.
    experts
        (layer, expert, mp) to an expert's file.
    universal
        Whether there is a ``zero`` folder with a folder a parameter.
    """

    root: Path
    optim: Mapping[tuple[int, int], Path]
    model: Mapping[int, Path]
    model3: Mapping[tuple[int, int], Path]
    layers: Mapping[tuple[int, int], Path]
    experts: Mapping[tuple[int, int, int], Path]
    universal: bool

    @property
    def any(self) -> bool:
        """Whether it is a checkpoint at all."""
        return bool(self.optim or self.model or self.model3 or self.universal)


def names(root: Path) -> Names:
    """List the files of a tag's folder.

    Raises
    ------
    InconsistentError
        If optimizer files of several element types stand side by side.
    """
    optim: dict[tuple[int, int], Path] = {}
    model: dict[int, Path] = {}
    model3: dict[tuple[int, int], Path] = {}
    layers: dict[tuple[int, int], Path] = {}
    experts: dict[tuple[int, int, int], Path] = {}
    for path in sorted(root.iterdir()):
        if found := _OPTIM.fullmatch(path.name):
            key = (int(found[3]), int(found[2]))
            if key in optim:
                raise InconsistentError(
                    f"{optim[key].name} and {path.name} are both of rank {key[1]}",
                    where=root,
                    hint="two runs were saved into one folder; remove the files of one of them",
                )
            optim[key] = path
        elif found := _MODEL.fullmatch(path.name):
            model[int(found[1])] = path
        elif found := _MODEL3.fullmatch(path.name):
            model3[int(found[2]), int(found[1])] = path
        elif found := _LAYER.fullmatch(path.name):
            layers[int(found[1]), int(found[2] or 0)] = path
        elif found := _EXPERT.fullmatch(path.name):
            experts[int(found[1]), int(found[2]), int(found[3])] = path
    universal = (root / "zero").is_dir()
    return Names(
        root,
        dict(sorted(optim.items())),
        dict(sorted(model.items())),
        dict(sorted(model3.items())),
        dict(sorted(layers.items())),
        dict(sorted(experts.items())),
        universal,
    )


def looks_like_tag(path: Path) -> bool:
    """Whether a folder holds files named as DeepSpeed names them (names only)."""
    if not path.is_dir():
        return False
    if (path / "zero").is_dir() and any((path / "zero").iterdir()):
        return True
    patterns = (_OPTIM, _MODEL, _MODEL3)
    return any(p.fullmatch(f.name) for f in path.iterdir() for p in patterns)


def find_tag(path: Path) -> tuple[Path, tuple[Path, ...]] | None:
    """The checkpoint at a path: a tag's folder, or the one that ``latest`` names in its parent.

    Returns
    -------
    root, others
        The tag's folder and the other ones beside it; ``None`` if there is none.

    Raises
    ------
    NotFoundError
        If ``latest`` names a folder that isn't there.
    CorruptError
        If it names something that isn't a folder's name.
    """
    if not path.is_dir():
        return None
    if looks_like_tag(path):
        return path, ()
    tags = sorted((p for p in path.iterdir() if looks_like_tag(p)), key=_number)
    latest = path / "latest"
    if latest.is_file():
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
        if not _TAG.fullmatch(tag):
            raise CorruptError(f"names {tag[:80]!r}, which is no folder's name", where=latest)
        chosen = path / tag
        if chosen not in tags:
            raise NotFoundError(
                f"names the checkpoint {tag!r}, which is not there",
                where=latest,
                hint="there are: " + (", ".join(t.name for t in tags) or "none"),
            )
        return chosen, tuple(t for t in tags if t != chosen)
    if not tags:
        return None
    return tags[-1], tuple(tags[:-1])


def _number(path: Path) -> tuple[bool, int, str]:
    digits = re.findall(r"\d+", path.name)
    universal = path.name.endswith("_universal")
    return (not universal, int(digits[-1]) if digits else -1, path.name)
