"""Which tensor of the model is a key of a Megatron-Core checkpoint, and which state of it?

``optimizer.state.<state>.<key>`` is a state of the optimizer; ``param`` (``fp32_param`` up to
0.12) are the fp32 masters. Everything else is the model's. ``decoder.layers.<rest>`` without a
number is all layers, with an axis for them in front: each becomes a tensor
``decoder.layers.N.<rest>``. The two halves of a gated MLP, which are keys of their own where layers
are (``weight_w`` and ``weight_v``), become one tensor again: the gate above.

Names are the checkpoint's: ``self_attention.linear_qkv.layer_norm_weight`` is what a model without
Transformer Engine calls ``input_layernorm.weight``, and ``mlp.linear_fc1.layer_norm_weight`` its
``pre_mlp_layernorm.weight``.

Source: Megatron-Core 0.8 to 0.19, ``transformer/transformer_block.py``, ``transformer/mlp.py``
(``apply_swiglu_sharded_factory``) and ``dist_checkpointing/optimizer.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from reshard.errors import IncompleteError, InconsistentError
from reshard.formats._megatron_parts import Part, joined, layers
from reshard.layout import MASTER, PARAM, TensorKey, key_text

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
STACK = re.compile(r"((?:.+\.)?(?:decoder|encoder)\.layers\.)(?!\d+\.)(.+)")
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias)\d*)_([wv])")
_MASTERS = ("param", "fp32_param")
_LIKE_WEIGHTS = (MASTER, "exp_avg", "exp_avg_sq")


def named(parts: Iterable[Part], where: Path) -> dict[TensorKey, Part]:
    """The tensors by name and state.

    Raises
    ------
    IncompleteError
        If a layer or half of a tensor is missing, or a state that other parameters have.
    InconsistentError
        If two keys mean one tensor.
    """
    found: dict[TensorKey, Part] = {}
    for part in parts:
        name, state = part.key, PARAM
        if (optimizer := _STATE.fullmatch(part.key)) is not None:
            state, name = optimizer[1], optimizer[2]
            state = MASTER if state in _MASTERS else state
        for one, of_layer in _unstacked(name, part, where):
            if (one, state) in found:
                raise InconsistentError(
                    f"{key_text((one, state))} is stored under two keys: {part.key} and "
                    f"{found[one, state].key}",
                    where=where,
                )
            found[one, state] = of_layer
    return _whole(found, where)


def _unstacked(name: str, part: Part, where: Path) -> Iterable[tuple[str, Part]]:
    stack = STACK.fullmatch(name)
    if stack is None or not part.shape:
        yield name, part
        return
    found = layers(part)
    missing = [n for n in range(part.shape[0]) if n not in found]
    if missing:
        raise IncompleteError(
            f"{part.key} has {part.shape[0]} layers, and nothing of layer {missing[0]} is in a "
            "file",
            where=where,
            hint="metadata were lost: save or copy the checkpoint again",
        )
    for number, of_layer in found.items():
        yield f"{stack[1]}{number}.{stack[2]}", of_layer


def _whole(found: dict[TensorKey, Part], where: Path) -> dict[TensorKey, Part]:
    """Join the halves of gated MLPs."""
    result: dict[TensorKey, Part] = {}
    for (name, state), part in found.items():
        half = _HALF.fullmatch(name)
        if half is None:
            result[name, state] = part
            continue
        base, which = half[1], half[2]
        other = found.get((f"{base}_{'v' if which == 'w' else 'w'}", state))
        if other is None:
            raise IncompleteError(
                f"{part.key} is half of a gated MLP, and the other half is missing", where=where
            )
        if other.shape != part.shape or other.dtype != part.dtype or not part.shape:
            raise InconsistentError(
                f"the halves {part.key} {list(part.shape)} and {other.key} {list(other.shape)} "
                "don't fit together",
                where=where,
            )
        if (base, state) in found:
            raise InconsistentError(f"{base} is stored whole and in halves", where=where)
        if which == "w":
            result[base, state] = joined(part, other, base)
    return result


LAYER = re.compile(r"((?:.+\.)?(?:decoder|encoder)\.layers\.)(\d+)\.(.+)")


def is_plain(name: str) -> bool:
    """Whether a name is read as itself, and not as a state, all layers, a half, or an object."""
    special = (_STATE, STACK, _HALF)
    bucket = name.startswith("optimizer.") or ".optimizer.distributed." in name
    return not (bucket or "/shard_" in name or any(p.fullmatch(name) for p in special))


def check_states(found: dict[TensorKey, Part], where: Path) -> list[str]:
    """See that no parameter has fewer of the optimizer's states than others.

    Returns
    -------
    list of str
        Tensors of the model that have none, if others have.

    Raises
    ------
    IncompleteError
        If one has, or if its weight is missing.
    InconsistentError
        If the masters or moments have another shape than the weight.
    """
    states: dict[str, set[str]] = {}
    for name, state in found:
        if state != PARAM:
            states.setdefault(name, set()).add(state)
    every = set[str]().union(*states.values())
    for name, has in states.items():
        weight = found.get((name, PARAM))
        if weight is None:
            raise IncompleteError(
                f"the optimizer has state of {name}, which the model lacks", where=where
            )
        if every - has:
            raise IncompleteError(
                f"the optimizer's state of {name} lacks {', '.join(sorted(every - has))}, which "
                "others have",
                where=where,
                hint="keys were lost from the metadata: save or copy the checkpoint again",
            )
        for state in sorted(has):
            shape = found[name, state].shape
            if state in _LIKE_WEIGHTS and shape != weight.shape:
                raise InconsistentError(
                    f"{key_text((name, state))} is {list(shape)}, and the weight is "
                    f"{list(weight.shape)}",
                    where=where,
                )
    return [n for n, state in found if state == PARAM and n not in states] if states else []
