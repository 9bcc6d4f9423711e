"""Do copies of a tensor differ? Small ones are read before anything is written.

Buffers that each rank saved often differ, and hours of copying shouldn't end with that news. So
small copies are compared first, which takes moments; large ones are compared on the way, when
their bytes pass by anyway (:mod:`reshard.verdict`).
"""

from __future__ import annotations

from dataclasses import replace

from reshard.errors import InconsistentError
from reshard.execute import Options, execute
from reshard.layout import Layout, TensorKey
from reshard.manifest import Manifest
from reshard.plan import Plan

SMALL = 1 << 20
"""Bytes of the largest tensor whose copies are compared first."""

BUDGET = 64 << 20
"""Bytes of copies that are read for it at most; the smallest tensors come first."""

COPIES = 10_000
"""How many copies are read for it at most: each costs a file server a request or two."""


def check_small(plan: Plan, options: Options) -> None:
    """Compare the small replicas that a plan would prove equal.

    Raises
    ------
    InconsistentError
        If some differ.
    CorruptError
        If some are damaged, or aren't what was recorded when they were written.
    """
    keys = _small(plan)
    if not keys:
        return
    source = plan.source
    nothing = Manifest(source.format, source.root, Layout((), source.layout.mesh), (), {})
    proofs = Plan(source, nothing, proofs=[(key, key) for key in keys])
    quick = replace(options, verify=False, progress=None)
    try:
        execute(proofs, source.root, quick)
    except InconsistentError:
        if options.verify:  # is it damage? checksums are of more bytes than these
            execute(proofs, source.root, replace(quick, verify=True))
        raise


def _small(plan: Plan) -> list[TensorKey]:
    """Tensors of the source with small replicas, as many as may be read."""
    if not plan.join.equal:
        return []
    found = []
    for key, _ in plan.join.same:
        tensor = plan.source.tensors[key]
        copies = len(plan.join.covers_of(tensor))
        if copies > 1 and tensor.nbytes <= SMALL:
            found.append((tensor.nbytes, copies, key))
    chosen, nbytes, reads = [], 0, 0
    for size, copies, key in sorted(found):
        nbytes, reads = nbytes + size * copies, reads + copies
        if nbytes > BUDGET or reads > COPIES:
            break
        chosen.append(key)
    return chosen
