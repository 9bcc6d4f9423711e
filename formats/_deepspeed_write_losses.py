"""What does a DeepSpeed checkpoint not hold of its source, and what of that is no loss?

No loss are 16-bit weights at stage 3: DeepSpeed rounds the masters again when it loads, and it is
proved that this gives the same. Neither are the script's values of ranks that the target hasn't
got: leaving them out was asked for with the world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reshard.format import AS_WRITTEN, Loss
from reshard.formats._deepspeed_write_state import State, section
from reshard.layout import CLIENT, MASTER, PARAM, TensorKey, key_text
from reshard.manifest import Manifest
from reshard.plain import TensorRef, walk

OBJECTS = frozenset(("step", "scheduler", "client", "per_rank", "deepspeed"))
"""Parts of the state that isn't tensors which have a place in DeepSpeed's files."""

Proofs = tuple[tuple[TensorKey, TensorKey], ...]


def losses_of(
    state: State, target: Manifest, carried: Mapping[str, Loss]
) -> tuple[tuple[Loss, ...], Proofs]:
    """What the target won't hold, and which weights must be proved to be rounded masters.

    Parameters
    ----------
    state
        What goes into the files.
    target
        The target.
    carried
        What was found while the files were made.
    """
    losses = dict(carried)
    proofs: list[tuple[TensorKey, TensorKey]] = []
    for loss in (*_tensors(state, target, proofs), *_objects(state), *_notes(state, carried)):
        losses.setdefault(loss.what, loss)
    return tuple(losses.values()), tuple(proofs)


def _tensors(
    state: State, target: Manifest, proofs: list[tuple[TensorKey, TensorKey]]
) -> Iterator[Loss]:
    source = state.source
    used = {state.origin.get(key, key) for key in target.tensors}
    left = set(_of_other_ranks(state))
    for key in source.tensors:
        name, kind = key
        if key in used or key in left:
            continue
        if kind == PARAM and state.stage == 3 and (name, MASTER) in used:
            proofs.append((key, (name, MASTER)))
            yield Loss(key_text(key), "at stage 3 it is made by rounding of the master", True)
        else:
            yield Loss(key_text(key), "DeepSpeed's files have no place for it")


def _differing(state: State) -> Mapping[str, list[object]]:
    return section(section(state.source.objects, "per_rank"), "client")


def _first_left(state: State) -> int:
    """The first of the source's ranks whose own values the target doesn't take."""
    return min(state.world, state.source.layout.world) if state.stage == 3 else 1


def _of_other_ranks(state: State) -> Iterator[TensorKey]:
    """Tensors among the script's values of ranks that are left out."""
    for values in _differing(state).values():
        for _, value in walk(values[_first_left(state) :]):
            if isinstance(value, TensorRef):
                yield value.key


def _objects(state: State) -> Iterator[Loss]:
    first = _first_left(state)
    for key, values in _differing(state).items():
        if len(values) > first:
            yield Loss(
                f"{CLIENT}:{key}",
                f"the target has no place for the values of ranks {first} to {len(values) - 1}",
                True,
            )
    objects = state.source.objects
    for key in objects:
        if key not in OBJECTS and not key.endswith(AS_WRITTEN):
            yield Loss(key, "DeepSpeed's files have no place for it")
    for key in section(objects, "per_rank"):
        if key != CLIENT:
            yield Loss(f"per_rank/{key}", "DeepSpeed's files have no place for it")


def _notes(state: State, carried: Mapping[str, Loss]) -> Iterator[Loss]:
    """What the reader left out, but for the holes that were found in the script's own state."""
    for note in state.source.notes:
        if note.kind == "left-out" and f"{CLIENT}:{note.where}" not in carried:
            yield Loss(note.where, note.text)
