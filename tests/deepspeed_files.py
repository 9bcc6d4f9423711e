"""DeepSpeed's files read with torch alone, and put together by the plainest code.

The pickles are loaded by ``torch.load``, with inert stand-ins for the classes of DeepSpeed.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import types
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")


class Stub:
    """An object of a class of DeepSpeed: its name, arguments and attributes."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class _Unpickler(pickle.Unpickler):
    stubs: Mapping[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if not module.startswith("deepspeed"):
            return super().find_class(module, name)
        made = type(name, (Stub,), {"__module__": module})
        return _KNOWN.setdefault(f"{module}.{name}", made)


_KNOWN: dict[str, type] = {}


@lru_cache(256)
def load(path: Path) -> Any:
    """What a file holds; no file of these tests changes once it is written."""
    fake = types.ModuleType("pickle_with_stubs")
    fake.Unpickler = _Unpickler  # type: ignore[attr-defined]
    fake.load = lambda file, **_: _Unpickler(file).load()  # type: ignore[attr-defined]
    return torch.load(io.BytesIO(path.read_bytes()), weights_only=False, pickle_module=fake)


def folder_of(root: Path) -> Path:
    return root / (root / "latest").read_text()


def ranks_of(folder: Path, pattern: str) -> list[Any]:
    """The files that match, in the order of the first number of the pattern."""
    found = [(m, p) for p in folder.iterdir() if (m := re.fullmatch(pattern, p.name))]
    return [load(p) for _, p in sorted(found, key=lambda row: int(row[0][1]))]


def models_of(folder: Path, mp: int = 0) -> list[Any]:
    return ranks_of(folder, rf"zero_pp_rank_(\d+)_mp_rank_{mp:02}_model_states\.pt") or [
        load(folder / f"mp_rank_{mp:02}_model_states.pt")
    ]


def optimizers_of(folder: Path, mp: int = 0) -> list[Any]:
    pattern = rf"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_{mp:02}_optim_states\.pt"
    return [found["optimizer_state_dict"] for found in ranks_of(folder, pattern)]


def whole_of(folder: Path, mp: int = 0) -> dict[str, Any]:
    """All tensors of one model rank, put together: ``fp32.<name>``, ``exp_avg.<name>``, …"""
    models, optimizers = models_of(folder, mp), optimizers_of(folder, mp)
    three = "fp32_flat_groups" in optimizers[0]
    found: dict[str, Any] = {}
    experts = experts_of(folder)
    found.update({f"lp.{name}": value for one in experts.values() for name, value in one.items()})
    for index, shapes in enumerate(models[0]["param_shapes"]):
        for block, degree, some in blocks_of(models[0], optimizers, index):
            parts = [parts_of(o, index, three) for o in some]
            for state in parts[0]:
                rows = [p[state] for p in parts]
                flats = _split3(shapes, rows) if three else _split12(shapes, rows, some[0], index)
                for name, flat in flats:
                    found[f"{state}.{_global(name, block, degree, experts)}"] = flat
    for name, value in (models[0]["module"] or {}).items():
        kind = "buffer" if name in models[0]["buffer_names"] else "lp"
        if value.numel() or not three:
            found[f"{kind}.{name}"] = value
    if three:
        for name, shape in models[0]["frozen_param_shapes"].items():
            pieces = [m["frozen_param_fragments"][name] for m in models]
            found[f"lp.{name}"] = torch.cat(pieces)[: math.prod(shape)].view(shape)
    return found


def experts_of(folder: Path) -> dict[tuple[int, int], Any]:
    """The files of experts: (layer, expert) to names and tensors."""
    pattern = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_00_model_states\.pt")
    found = [(m, p) for p in folder.iterdir() if (m := pattern.fullmatch(p.name))]
    return {(int(m[1]), int(m[2])): load(p) for m, p in found}


def blocks_of(model: Any, optimizers: list[Any], index: int) -> Iterator[tuple[int, int, Any]]:
    """(block of experts, how many blocks there are, the optimizers that hold it) of a group."""
    count = optimizers[0]["partition_count"]
    count = count[index] if isinstance(count, list) else count
    degree = len(optimizers) // count
    for block in range(degree):
        if model["ds_config"].get("use_data_before_expert_parallelism"):
            yield block, degree, optimizers[block * count : (block + 1) * count]
        else:
            yield block, degree, optimizers[block::degree]


def _global(name: str, block: int, degree: int, experts: dict[tuple[int, int], Any]) -> str:
    """The name among all experts of what a rank calls a parameter."""
    found = re.fullmatch(r"(.*deepspeed_experts\.)(\d+)(\..*)", name)
    if found is None:
        return name
    every = {key for key, one in experts.items() if any(n.startswith(found[1]) for n in one)}
    return f"{found[1]}{block * (len(every) // degree) + int(found[2])}{found[3]}"


def parts_of(optimizer: Any, index: int, three: bool) -> dict[str, Any]:
    """The tensors of a flat group on one rank."""
    base = optimizer["optimizer_state_dict" if three else "base_optimizer_state"]
    masters = optimizer["fp32_flat_groups" if three else "single_partition_of_fp32_groups"]
    states = base["state"].get(index, {})
    found = {k: v for k, v in states.items() if torch.is_tensor(v) and v.ndim}
    master = masters[index].detach()
    missing = len(found["exp_avg"]) - len(master)
    found["fp32"] = torch.cat([master, torch.zeros(missing)])
    return found


def _split12(shapes: Any, parts: list[Any], optimizer: Any, index: int) -> Iterator[Any]:
    flat, at = torch.cat(parts), 0
    assert len(flat) % (2 * len(parts)) == 0
    known = optimizer.get("param_alignment_paddings")
    paddings = known[index] if known else [0] * len(shapes)
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        yield name, flat[at : at + math.prod(shape)].view(shape)
        at += math.prod(shape)
        assert not flat[at : at + padding].any()
        at += padding
    assert len(flat) - at < 2 * len(parts)
    assert not flat[at:].any()


def _split3(shapes: Any, parts: list[Any]) -> Iterator[Any]:
    at = 0
    for name, shape in shapes.items():
        size = -(-math.prod(shape) // len(parts))
        joined = torch.cat([p[at : at + size] for p in parts])
        assert not joined[math.prod(shape) :].any()
        yield name, joined[: math.prod(shape)].view(shape)
        at += size
    assert all(len(p) == at for p in parts)


def same_bits(one: Any, other: Any) -> bool:
    bits = torch.uint8
    return bool(
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.reshape(-1).view(bits), other.reshape(-1).view(bits))
    )


def real_truth(path: Path) -> Iterator[tuple[str, Any]]:
    """What a live rank held."""
    from safetensors import safe_open

    with safe_open(path, "pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - not a mapping
            yield key, tensors.get_tensor(key)


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two loaded values differ; the order of keys doesn't count."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if not same_bits(one, other) or one.requires_grad != other.requires_grad:
            yield path
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        yield from (f"{path}/{k}" for k in set(one) ^ set(other))
        for key in set(one) & set(other):
            yield from differences(one[key], other[key], f"{path}/{key}")
    elif type(one) is not type(other):
        yield path
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            yield path
        for index, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, f"{path}/{index}")
    elif one != other:
        yield path
