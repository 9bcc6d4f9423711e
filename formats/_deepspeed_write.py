"""How is a checkpoint written that DeepSpeed itself resumes from?

The state of the source (``_deepspeed_write_state``) is laid out in flat groups
(``_deepspeed_write_groups``); the pickles of all ranks' files are made
(``_deepspeed_write_optimizer``, ``_deepspeed_write_model``), so that it is known where in each
file its storages lie; the executor fills them; at last headers and checksums are written, and the
file ``latest``, without which DeepSpeed finds nothing.

Files of ranks that differ in nothing but payload share one :class:`Blueprint`, and none is kept:
making one again costs less than holding thousands.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.commit import write_file
from reshard.dtypes import DType
from reshard.errors import RequestError
from reshard.format import Draft, Loss, Request
from reshard.formats._deepspeed_write_groups import Flat, Rules, lay_out
from reshard.formats._deepspeed_write_layers import Layer, layer_file
from reshard.formats._deepspeed_write_losses import losses_of
from reshard.formats._deepspeed_write_model import frozen_spaces, model_file
from reshard.formats._deepspeed_write_optimizer import optimizer_file
from reshard.formats._deepspeed_write_ranks import ModelRank
from reshard.formats._deepspeed_write_state import BFLOAT16, State, gather, section
from reshard.formats._torch_sheet import Blueprint, Sheet, Slice, Whole
from reshard.layout import Entry, FlatSpace, Layout
from reshard.manifest import Manifest
from reshard.partition import Replicated
from reshard.ruler import Ints, ints
from reshard.store import EntryStore, File, Regions, ShardStore, Store

if TYPE_CHECKING:
    from reshard.execute import Result

TAG = re.compile(r"[A-Za-z0-9][\w.\-]*", re.ASCII)
"""Names of tags: one path component, without what DeepSpeed's own globbing would expand."""

KEPT = 8
"""Blueprints that are kept for the next files."""


def draft(source: Manifest, request: Request, target: Path) -> Draft:
    """Lay out a DeepSpeed checkpoint.

    Parameters
    ----------
    source
        The checkpoint that it is made of, of any format that has parameter groups.
    request
        World size, stage, element type of the weights, tag.
    target
        The folder: gets ``latest`` and a folder named by the tag.

    Raises
    ------
    UnsupportedError
        If DeepSpeed couldn't resume from what the source holds.
    RequestError
        If the tag can't be a folder's name.
    InconsistentError
        If tensors of one parameter group don't fit together.
    """
    state = gather(source, request)
    book = Book.of(state, tag_of(source, request))
    manifest = _Assembly(state, book).manifest(target)
    losses, proofs = losses_of(state, manifest, book.lost)
    origin = {k: v for k, v in state.origin.items() if k in manifest.tensors}
    casts = {
        key
        for key, tensor in manifest.tensors.items()
        if tensor.dtype != source.tensors[origin.get(key, key)].dtype
    }
    return Draft(
        manifest=manifest,
        finish=lambda folder, result: finish(book, manifest, folder, result),
        origin=origin,
        casts=frozenset(casts),
        proofs=proofs,
        losses=losses,
    )


def tag_of(source: Manifest, request: Request) -> str:
    """The name of the checkpoint inside the target's folder.

    Raises
    ------
    RequestError
        If one was asked for that can't be a folder's name.
    """
    if request.tag is not None:
        if not _is_tag(request.tag):
            raise RequestError(
                f"{request.tag!r} can't be a tag",
                hint="use letters, digits, '.', '_' and '-'; 'latest' is taken",
            )
        return request.tag
    own = section(source.objects, "deepspeed").get("tag")
    if isinstance(own, str) and _is_tag(own.removesuffix("_universal")):
        return own.removesuffix("_universal")
    step = source.objects.get("step")
    return f"global_step{step if isinstance(step, int) else 0}"


def _is_tag(text: str) -> bool:
    return TAG.fullmatch(text) is not None and text not in ("latest", "latest_universal")


@dataclass(frozen=True, slots=True)
class Page:
    """One file of the target.

    Parameters
    ----------
    path
        Relative to the target.
    rank
        The data-parallel rank whose slices lie in it.
    make
        Gives its blueprint.
    """

    path: str
    rank: int
    make: Callable[[], Blueprint]


@dataclass(frozen=True, slots=True, eq=False)
class Book:
    """The files of the target.

    Parameters
    ----------
    tag
        Name of their folder.
    pages
        The files, in order.
    flats
        The flat groups of each model-parallel rank.
    lost
        Filled with what can't be carried, once all pages were made.
    """

    tag: str
    pages: tuple[Page, ...]
    flats: tuple[tuple[Flat, ...], ...]
    lost: dict[str, Loss] = field(default_factory=dict[str, Loss])

    @classmethod
    def of(cls, state: State, tag: str) -> Book:
        """List the files of a state."""
        kind = state.dtype.itemsize
        rules = Rules.of(state.config, state.stage, state.world, kind, state.bf16_optimizer)
        flats = tuple(
            tuple(
                flat
                for group in rank.groups
                for flat in lay_out(
                    rules,
                    group.index,
                    group.params,
                    group.states,
                    rank.coords,
                    degree=group.degree,
                    block=group.block,
                )
            )
            for rank in state.ranks
        )
        lost: dict[str, Loss] = {}
        pages = [
            page
            for rank, some in zip(state.ranks, flats, strict=True)
            for pages in (_models(state, rank, some, lost), _optimizers(state, rules, rank, some))
            for page in pages
        ]
        pages += [_layer(state, layer, OrderedDict) for layer in state.layers]
        pages += [_layer(state, expert, dict) for expert in state.experts]
        named = [Page(f"{tag}/{p.path}", p.rank, p.make) for p in pages]
        return cls(tag, tuple(named), flats, lost)


def _models(
    state: State, rank: ModelRank, flats: tuple[Flat, ...], lost: dict[str, Loss]
) -> Iterator[Page]:
    @lru_cache(KEPT)
    def make(first: bool, of: int) -> Blueprint:
        sheet = Sheet()
        value = model_file(
            state,
            rank,
            [flat for flat in flats if flat.shard(0) is not None],
            sheet,
            first=first,
            of=of,
            lost=lambda loss: lost.update({loss.what: loss}),
        )
        return Blueprint.of(value, sheet)

    mp = f"mp_rank_{rank.mp:02d}_model_states.pt"
    if state.stage != 3:
        yield Page(mp, 0, partial(make, True, 0))
        return
    several = bool(section(section(state.source.objects, "per_rank"), "client"))
    for dp in range(state.world):
        of = dp % state.source.layout.world if several else 0
        yield Page(f"zero_pp_rank_{dp}_{mp}", dp, partial(make, dp == 0, of))


def _layer(state: State, layer: Layer, kind: Callable[[Mapping[str, Any]], object]) -> Page:
    def make() -> Blueprint:
        sheet = Sheet()
        return Blueprint.of(kind(layer_file(layer, state.kind, state.source, sheet)), sheet)

    return Page(layer.path, 0, make)


def _optimizers(
    state: State, rules: Rules, rank: ModelRank, flats: tuple[Flat, ...]
) -> Iterator[Page]:
    @lru_cache(1)
    def make(dp: int) -> Blueprint:
        sheet = Sheet()
        return Blueprint.of(optimizer_file(state, rules, flats, dp, sheet), sheet)

    prefix = "bf16_" if state.dtype == BFLOAT16 else ""
    for dp in range(state.world):
        path = f"{prefix}zero_pp_rank_{dp}_mp_rank_{rank.mp:02d}_optim_states.pt"
        yield Page(path, dp, partial(make, 0 if state.stage == 3 else dp))


@dataclass(slots=True)
class _Column:
    """Entries of one state and type, and where they lie."""

    entries: list[Entry] = field(default_factory=list[Entry])
    files: list[int] = field(default_factory=list[int])
    offsets: list[int] = field(default_factory=list[int])


class _Assembly:
    """Gathers where payload lies in all files."""

    def __init__(self, state: State, book: Book) -> None:
        self._state = state
        self._book = book
        self._spaces = {flat.space.name: flat.space for some in book.flats for flat in some}
        if state.stage == 3:
            for rank in state.ranks:
                self._spaces |= {space.name: space for space, _ in frozen_spaces(state, rank)}
        self._shards = {
            (name, kind): (np.zeros(space.shards, np.int64), np.zeros(space.shards, np.int64))
            for name, space in self._spaces.items()
            for kind in space.states
        }
        self._columns: dict[tuple[str, DType], _Column] = {}
        self._files: list[File] = []
        self._regions: list[tuple[int, int, int, int | None, str]] = []

    def manifest(self, target: Path) -> Manifest:
        """Make all pages, and a manifest of them."""
        for index, page in enumerate(self._book.pages):
            blueprint = page.make()
            self._files.append(File(page.path, blueprint.nbytes))
            for key, payload in blueprint.payload.items():
                offset, nbytes = blueprint.layout.offset(key), blueprint.sizes[key]
                if nbytes:
                    self._regions.append((index, offset, nbytes, None, f"data/{key}"))
                if isinstance(payload, Slice):
                    space = self._spaces[payload.space]
                    shard = (page.rank - space.shard_start) // space.shard_step
                    files, offsets = self._shards[payload.space, payload.state]
                    files[shard], offsets[shard] = index, offset
                else:
                    self._whole(payload, index, offset)
        spaces, stores = self._layout()
        source = self._state.source
        experts = max((g.degree for r in self._state.ranks for g in r.groups), default=1)
        axes = {
            "pipeline": self._state.pipeline,
            "tensor": self._state.tensor,
            "expert": experts,
        }
        mesh = {"shard": self._state.world, **{a: n for a, n in axes.items() if n > 1}}
        return Manifest(
            format="deepspeed",
            root=target,
            layout=Layout(tuple(spaces), mesh, self._state.stage),
            files=tuple(self._files),
            stores=stores,
            groups=self._state.groups,
            aliases=source.aliases,
            objects=source.objects,
            regions=Regions.of("crc32", self._regions),
        )

    def _whole(self, payload: Whole, file: int, offset: int) -> None:
        column = self._columns.setdefault((payload.state, payload.dtype), _Column())
        for entry in payload.entries:
            column.entries.append(entry)
            column.files.append(file)
            column.offsets.append(offset)
            offset += payload.dtype.nbytes(entry.numel)

    def _layout(self) -> tuple[list[FlatSpace], dict[tuple[str, str], Store]]:
        spaces = list(self._spaces.values())
        stores: dict[tuple[str, str], Store] = {}
        for space in spaces:
            for state in space.states:
                stores[space.name, state] = _store(space, *self._shards[space.name, state])
        for (state, kind), column in self._columns.items():
            space = FlatSpace(
                name=f"{state}.{kind}",
                entries=tuple(column.entries),
                partition=Replicated(1),
                states={state: kind},
            )
            spaces.append(space)
            stores[space.name, state] = EntryStore(ints(column.files), ints(column.offsets))
        return spaces, stores


def _store(space: FlatSpace, files: Ints, offsets: Ints) -> Store:
    if space.numel:
        return ShardStore.per_shard(space.ruler.part, files, offsets)
    count = len(space.entries)  # without elements it has no padding either
    return EntryStore(np.repeat(files[:1], count), np.repeat(offsets[:1], count))


def finish(book: Book, manifest: Manifest, folder: Path, result: Result) -> None:
    """Write headers, pickles and checksums of all files, then ``latest``."""
    regions = manifest.regions
    ends = np.searchsorted(regions.files, np.arange(len(book.pages) + 1))
    for index, page in enumerate(book.pages):
        rows = slice(int(ends[index]), int(ends[index + 1]))
        offsets, values = regions.offsets[rows].tolist(), result.regions[rows].tolist()
        page.make().finish_file(folder / page.path, dict(zip(offsets, values, strict=True)))
    write_file(folder / "latest", book.tag.encode("ascii"))
