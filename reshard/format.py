"""What is a format, and what does it have to say?

A format is one file in ``formats/`` with an object ``FORMAT`` that follows :class:`Format`. It
answers three questions: is there a checkpoint of mine at this path, what does it hold
(:class:`~reshard.manifest.Manifest`), and how would I write this one (:class:`Draft`)? It never
moves payload: the plan and the executor do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from reshard.dtypes import FLOATS, DType
from reshard.layout import BUFFER, CLIENT, MASTER, PARAM, TensorKey
from reshard.manifest import Manifest

if TYPE_CHECKING:
    from reshard.execute import Result


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that a format recognised.

    Parameters
    ----------
    root
        The checkpoint itself: a folder or a file (it may lie below the path that was given).
    others
        Other checkpoints of the same format beside it (other tags, other steps).
    parts
        Names of formats whose files, where they are found in the same place, are by convention
        parts of this checkpoint, and no checkpoints of their own.
    """

    root: Path
    others: tuple[Path, ...] = ()
    parts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Casts:
    """Which tensors change their element type.

    Weights (``param``, and ``master`` where masters are exported as weights) that are floats are
    cast; masters kept as optimizer state, moments, buffers and client tensors never are.

    Parameters
    ----------
    dtype
        The type to cast to, or ``None`` to keep each tensor's own.
    keep
        Globs of names that keep their type.
    """

    dtype: DType | None = None
    keep: tuple[str, ...] = ()

    def of(self, name: str, own: DType) -> DType:
        """The type that weights of that name and type are written in."""
        if self.dtype is None or own.name not in FLOATS:
            return own
        if any(fnmatchcase(name, glob) for glob in self.keep):
            return own
        return self.dtype


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a writer.

    Parameters
    ----------
    world, stage
        Size of the shard axis and ZeRO stage of the target; ``None`` for the source's own.
    casts
        Element types.
    state
        For formats that hold one weight a name: which state is written as the weights
        (``None``: the masters if there are any, else the parameters).
    optimizer
        For such formats: whether optimizer state is written too.
    max_shard_bytes
        For formats that cut weights in files: the most that a file holds.
    tag
        For formats that keep several checkpoints in a folder: the name of this one.
    expert_parallel
        Degree of expert parallelism of the target; ``None`` for the source's own.
    """

    world: int | None = None
    stage: int | None = None
    casts: Casts = field(default_factory=Casts)
    state: str | None = None
    optimizer: bool = False
    max_shard_bytes: int | None = None
    tag: str | None = None
    expert_parallel: int | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """Something of the source that the target won't hold.

    Parameters
    ----------
    what
        A name that ``--drop`` can match: ``state:name``, or a key of the non-tensor state.
    why
        Why the target can't or won't hold it.
    harmless
        Whether nothing is lost: it can be made again from what is kept (and that is proved),
        or it was asked to be left out.
    """

    what: str
    why: str
    harmless: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A target before its payload is written.

    Parameters
    ----------
    manifest
        The target: its files with their final sizes, and where the payload lies in them.
    finish
        Called with the staging folder and the executor's result when all payload is there:
        writes headers and metadata, the commit marker last.
    origin, casts, proofs
        As for :class:`~reshard.plan.Plan`.
    losses
        What the target won't hold.
    single_file
        Whether the target is one file, not a folder (its ``files`` has one path).
    """

    manifest: Manifest
    finish: Callable[[Path, Result], None]
    origin: Mapping[TensorKey, TensorKey] = field(default_factory=dict)
    casts: frozenset[TensorKey] = frozenset()
    proofs: Sequence[tuple[TensorKey, TensorKey]] = ()
    losses: tuple[Loss, ...] = ()
    single_file: bool = False


class Format(Protocol):
    """A checkpoint format."""

    @property
    def name(self) -> str:
        """What ``--format`` calls it."""
        ...

    @property
    def title(self) -> str:
        """One line about it."""
        ...

    @property
    def writes(self) -> bool:
        """Whether :meth:`draft` can be called."""
        ...

    @property
    def sharded(self) -> bool:
        """Whether it keeps a layout: whether a world size means something to it."""
        ...

    def detect(self, path: Path) -> Found | None:
        """Find a checkpoint of this format at a path, looking at names and first bytes only."""
        ...

    def open(self, root: Path) -> Manifest:
        """Read what a checkpoint says of itself; no payload."""
        ...

    def draft(self, source: Manifest, request: Request, target: Path) -> Draft:
        """Lay out a target for a source's state.

        ``target`` is where it will stand in the end (some formats choose by its ending).
        """
        ...


AS_WRITTEN = ".as_written"
"""How the names of a manifest's objects end that say how a format wrote what it held (its names of
keys, an order): no state, so that another format may leave them out without a loss."""

WEIGHT_STATES = (MASTER, PARAM)
"""States that can be exported as the weights, best first."""


def weights_state(source: Manifest, request: Request) -> str | None:
    """Which state is exported as the weights: the asked one, or the best that is there."""
    if request.state is not None:
        return request.state
    return next((s for s in WEIGHT_STATES if s in source.states), None)


def optimizer_states(source: Manifest) -> tuple[str, ...]:
    """States of the optimizer other than the masters."""
    fixed = {PARAM, MASTER, BUFFER, CLIENT}
    return tuple(s for s in source.states if s not in fixed)
