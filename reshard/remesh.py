"""What is a checkpoint's layout at another degree of tensor parallelism?

How a tensor is cut says along which dim: the parts that the ranks of the tensor axis hold stand
side by side there. Joined and cut in another number of equal parts they make the layout that a
format's writer is shown as the source's. No byte moves: the plan still reads the true source.

A parameter of several parts stacked in one (gate and up projections, say) is cut part by part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from reshard.box import Box, Shape
from reshard.errors import RequestError, UnsupportedError
from reshard.layout import AXES, Entry, FlatSpace, Layout
from reshard.manifest import NO_REGIONS, Manifest

TENSOR = "tensor"


def check_mesh(mesh: Mapping[str, int]) -> None:
    """Refuse sizes of axes that no target has.

    Raises
    ------
    RequestError
        For an unknown axis, or a size below 1.
    """
    for axis, size in mesh.items():
        if axis not in AXES:
            raise RequestError(f"a mesh has no axis {axis!r}", hint=f"axes: {', '.join(AXES)}")
        if size < 1:
            raise RequestError(
                f"an axis {axis} of size {size} makes no sense", hint="give 1 or more"
            )


def remeshed(manifest: Manifest, mesh: Mapping[str, int]) -> Manifest:
    """A manifest as a writer is to see it, so that the target has axes of these sizes.

    Parameters
    ----------
    manifest
        The source.
    mesh
        Sizes of axes; those that aren't named stay. ``shard`` and ``expert`` are the writer's.

    Returns
    -------
    Manifest
        The same tensors; where the tensor axis changes, without what says where they lie.

    Raises
    ------
    RequestError
        If another size of an axis can't be made, or parts can't be cut evenly.
    UnsupportedError
        If nothing says how parts fit together.
    """
    before = manifest.layout.mesh
    _check_others(manifest, mesh)
    degree, want = before.get(TENSOR, 1), mesh.get(TENSOR)
    if want is None or want == degree:
        return manifest
    if degree == 1:
        raise RequestError(
            f"tensor={want} can't be made: the source isn't cut over a tensor axis, so nothing "
            "says along which dim each tensor is to be cut",
            where=manifest.root,
            hint="leave tensor out of the mesh",
        )
    spaces = _Cutter(manifest, degree, want).spaces()
    sizes = {axis: n for axis, n in before.items() if axis != TENSOR}
    layout = Layout(
        tuple(spaces), sizes | ({TENSOR: want} if want > 1 else {}), manifest.layout.stage
    )
    return replace(manifest, layout=layout, stores={}, files=(), regions=NO_REGIONS)


def _check_others(manifest: Manifest, mesh: Mapping[str, int]) -> None:
    stages = manifest.layout.mesh.get("pipeline", 1)
    why = {
        "pipeline": (stages, f"the source has {stages}, and layers don't move between stages"),
        "replicate": (1, "replicas hold the same state, which is stored once and serves them all"),
    }
    for axis, (size, reason) in why.items():
        if mesh.get(axis, size) != size:
            raise RequestError(
                f"{axis}={mesh[axis]} can't be made: {reason}",
                where=manifest.root,
                hint=f"leave {axis} out of the mesh",
            )


class _Cutter:
    """Cuts the spaces of a layout anew.

    Parameters
    ----------
    manifest
        The source.
    degree, want
        Sizes of the tensor axis before and after.
    """

    def __init__(self, manifest: Manifest, degree: int, want: int) -> None:
        self._manifest = manifest
        self._degree, self._want = degree, want

    def spaces(self) -> list[FlatSpace]:
        """The spaces of the target's layout."""
        found: list[FlatSpace] = []
        for alike in self._alike():
            if len(alike) == 1 and TENSOR not in alike[0].coords:
                found += alike
                continue
            for index in range(self._want):
                found.append(self._space(alike, index))
        return found

    def _alike(self) -> list[list[FlatSpace]]:
        """Spaces that differ in their index on the tensor axis alone, in its order."""
        groups: dict[object, list[FlatSpace]] = {}
        before: Counter[object] = Counter()  # spaces of a kind at one place
        for space in self._manifest.layout.spaces:
            index = space.coords.get(TENSOR)
            if index is None:
                groups[space.name] = [space]
                continue
            rest = tuple(sorted((a, i) for a, i in space.coords.items() if a != TENSOR))
            kind = (space.group, tuple(space.states.items()), rest)
            groups.setdefault((kind, before[kind, index]), []).append(space)
            before[kind, index] += 1
        return [sorted(some, key=lambda s: s.coords.get(TENSOR, 0)) for some in groups.values()]

    def _space(self, alike: Sequence[FlatSpace], index: int) -> FlatSpace:
        first = alike[0]
        names = [[entry.name for entry in space.entries] for space in alike]
        if len(alike) != self._degree or any(some != names[0] for some in names):
            raise UnsupportedError(
                f"the {self._degree} ranks of the tensor axis hold different tensors "
                f"({first.name}), so nothing says how their parts fit together",
                where=self._manifest.root,
                hint="leave tensor out of the mesh",
            )
        rows = zip(*(space.entries for space in alike), strict=True)
        entries = tuple(self._entry(parts, index) for parts in rows)
        coords = {axis: i for axis, i in first.coords.items() if axis != TENSOR}
        stem = first.name.removesuffix(f".{TENSOR}0")
        if self._want > 1:
            coords[TENSOR] = index
        return replace(
            first,
            name=f"{stem}.{TENSOR}{index}of{self._want}",
            entries=entries,
            coords=coords,
        )

    def _entry(self, parts: Sequence[Entry], index: int) -> Entry:
        """Part ``index`` of what some parts make up side by side."""
        first = parts[0]
        boxes = [part.region for part in parts]
        if all(box == boxes[0] for box in boxes):
            return first
        dim = _side_by_side(boxes)
        if dim is None or any(part.shape != first.shape for part in parts):
            raise UnsupportedError(
                f"the parts of {first.name} don't stand side by side",
                where=self._manifest.root,
                hint="leave tensor out of the mesh",
            )
        low, high = boxes[0].start[dim], boxes[-1].stop[dim]
        size, left = divmod(high - low, self._want)
        if left:
            raise RequestError(
                f"{first.name} {list(first.shape)} can't be cut over tensor={self._want}: "
                f"{high - low} isn't a multiple of it (dim {dim})",
                where=self._manifest.root,
            )
        low += index * size
        box = Box(_with(boxes[0].start, dim, low), _with(boxes[0].stop, dim, low + size))
        return Entry(first.name, first.shape, None if box.covers(first.shape) else box)


def _side_by_side(boxes: Sequence[Box]) -> int | None:
    """The dim along which boxes follow each other; ``None`` if there is no such."""
    first, second = boxes[:2]
    ends = zip(first.start, first.stop, second.start, second.stop, strict=True)
    differing = [dim for dim, (a, b, c, d) in enumerate(ends) if (a, b) != (c, d)]
    if len(differing) != 1:
        return None
    dim = differing[0]
    end = first.start[dim]
    for box in boxes:
        moved = Box(_with(box.start, dim, first.start[dim]), _with(box.stop, dim, first.stop[dim]))
        if moved != first or box.start[dim] != end:
            return None
        end = box.stop[dim]
    return dim


def _with(index: Shape, dim: int, value: int) -> Shape:
    return (*index[:dim], value, *index[dim + 1 :])
