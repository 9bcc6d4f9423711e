"""How is a checkpoint converted: opened, checked, planned, moved and committed?

One function a verb. Everything that can be refused is refused before a byte is written; what is
written goes into a staging folder and is renamed when it is whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from reshard.commit import Staging, check_target
from reshard.coverage import check
from reshard.dtypes import dtype as dtype_named
from reshard.errors import InconsistentError, RequestError, TargetError, UnsupportedError
from reshard.execute import Options, Result, execute
from reshard.format import Casts, Draft, Format, Loss, Request
from reshard.identity import Mark, identity, marks, stored_files
from reshard.journal import Journal
from reshard.layout import MASTER, PARAM, TensorKey
from reshard.manifest import Manifest
from reshard.plan import Plan
from reshard.record import Recorder
from reshard.remesh import check_mesh, remeshed
from reshard.rename import Rule, renamed
from reshard.replicas import check_small
from reshard.report import Report, report
from reshard.resume import earlier
from reshard.stored import brief

if TYPE_CHECKING:
    from reshard.dtypes import DType

Replicas = Literal["equal", "first"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of a conversion.

    Parameters
    ----------
    format
        Name of the target's format; ``None`` for the source's where that can be written, else
        the native one.
    from_world
        What the caller believes the source's world size to be; checked.
    world, stage
        Of the target; ``None`` for the source's.
    mesh
        Sizes of axes of the target: ``shard`` is the world size, ``expert`` the degree of expert
        parallelism, ``tensor`` that of tensor parallelism (:mod:`reshard.remesh`).
    rename, unwrap
        Other names for tensors, of which all else speaks: :func:`~reshard.rename.renamed`.
    dtype, keep
        Cast the weights to this type, except names that match one of these globs.
    state, optimizer, max_shard_bytes, tag, expert_parallel
        See :class:`~reshard.format.Request`.
    drop
        Globs of losses that are accepted.
    replicas
        ``"equal"``: copies of one tensor are read and proved equal; ``"first"``: the first counts.
    derived
        Whether 16-bit weights are proved to be the rounding of their masters.
    """

    format: str | None = None
    from_world: int | None = None
    world: int | None = None
    stage: int | None = None
    mesh: Mapping[str, int] = field(default_factory=dict[str, int])
    dtype: str | None = None
    keep: tuple[str, ...] = ()
    state: str | None = None
    optimizer: bool = False
    max_shard_bytes: int | None = None
    tag: str | None = None
    expert_parallel: int | None = None
    rename: tuple[Rule, ...] = ()
    unwrap: bool = False
    drop: tuple[str, ...] = ()
    replicas: Replicas = "equal"
    derived: bool = True

    def request(self) -> Request:
        """The part that a format's writer is asked."""
        cast: DType | None = None if self.dtype is None else dtype_named(self.dtype)
        check_mesh(self.mesh)
        return Request(
            world=self._size("shard", self.world, "--to"),
            stage=self.stage,
            casts=Casts(cast, self.keep),
            state=self.state,
            optimizer=self.optimizer,
            max_shard_bytes=self.max_shard_bytes,
            tag=self.tag,
            expert_parallel=self._size("expert", self.expert_parallel, "--expert-parallel"),
        )

    def _size(self, axis: str, other: int | None, option: str) -> int | None:
        """The size of an axis, which may be said in two ways."""
        size = self.mesh.get(axis, other)
        if other is not None and size != other:
            raise RequestError(
                f"the mesh says {axis}={size} and {option} says {other}",
                hint="leave one of them out",
            )
        return size


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A conversion that was checked and planned, and not begun."""

    source: Manifest
    target: Path
    draft: Draft
    plan: Plan
    options: Options
    report: Report = field(repr=False)

    def run(self) -> Report:
        """Move the bytes and commit; what an earlier run of the same has done isn't done again.

        What is complete stays for a later run if this one is interrupted, or if the system was
        in the way: no space, a disk or a file server that fails. After any other error nothing
        stays.

        Raises
        ------
        ReshardError
            If anything is wrong; the target's path is untouched then.
        """
        begin = time.perf_counter()
        _check_space(self.report, self.target)
        staging = Staging(self.target, single_file=self.draft.single_file)
        staging.begin(keep=self.options.resume)
        recorder: Recorder | None = None
        try:
            seen = marks(self.source)
            recorder = self._recorder(staging, seen)
            before = recorder.nbytes
            with recorder:
                result: Result = execute(self.plan, staging.path, self.options, recorder)
            self._check_unchanged(seen)
            self.draft.finish(staging.path, result)
            staging.commit(sync=self.options.sync)
        except BaseException as error:
            self._stop(staging, recorder, error)
            raise
        seconds = time.perf_counter() - begin
        return replace(
            self.report,
            done=True,
            seconds=seconds,
            moved_bytes=result.nbytes,
            resumed_bytes=before,
            regions_checked=result.regions_checked,
        )

    def _recorder(self, staging: Staging, seen: Sequence[Mark]) -> Recorder:
        """Go on from what an earlier run has completed, or begin anew."""
        options = self.options
        who = identity(self.plan, seen, verify=options.verify)
        found = earlier(self.plan, staging.path, staging.journal, who, options)
        kept = found.kept
        if not found.lines:
            staging.clear()
        if found.why_not is not None:
            self._tell(f"what an earlier run has done is void, {found.why_not}: beginning anew")
        elif kept.nbytes:
            more = f", {begun} more in part" if (begun := len(kept.begun())) else ""
            files = len(self.plan.files)
            self._tell(f"resuming: {len(kept.files)} of {files} files are complete{more}")
            if options.progress is not None:
                options.progress(kept.nbytes)
        journal = Journal(staging.journal, who, found.lines)
        return Recorder(self.plan, staging.path, journal, kept, sync=options.sync)

    def _stop(self, staging: Staging, recorder: Recorder | None, error: BaseException) -> None:
        """Keep what is complete, if it can be of use."""
        if recorder is None:
            staging.leave()  # as it was found
        elif recorder.nbytes and _may_pass(error) and staging.leave():
            self._tell(
                f"what is complete stays in {staging.folder}: the same command goes on from there"
            )
        else:
            staging.abandon()

    def _tell(self, text: str) -> None:
        if self.options.notice is not None:
            self.options.notice(text)

    def _check_unchanged(self, seen: Sequence[Mark]) -> None:
        """Refuse to commit what was read of files that were written to meanwhile."""
        files = stored_files(self.source)
        for file, before, now in zip(files, seen, marks(self.source), strict=True):
            if before[:3] != now[:3]:  # a new name or new permissions don't matter
                raise InconsistentError(
                    "was changed while it was read",
                    where=file,
                    hint="begin again when nothing writes to the checkpoint any more",
                )


def planned(
    manifest: Manifest,
    target: str | os.PathLike[str],
    wanted: Wanted,
    options: Options,
    formats: Mapping[str, Format],
) -> Job:
    """Check and plan a conversion; nothing is written.

    Parameters
    ----------
    manifest
        The source.
    target
        Where the target will stand.
    wanted, options
        What is asked for, and how to move bytes.
    formats
        The formats that there are, by name.

    Raises
    ------
    ReshardError
        If the source is damaged, or what is wanted doesn't fit it, or the target exists.
    """
    place = Path(target)
    check(manifest)
    check_target(place)
    _check_from(manifest, wanted)
    manifest = renamed(manifest, wanted.rename, unwrap=wanted.unwrap)
    draft = _draft(remeshed(manifest, wanted.mesh), wanted, place, formats)
    _check_axes(draft, wanted)
    _check_losses(manifest, draft, wanted)
    proofs = (*draft.proofs, *_derived(manifest, draft)) if wanted.derived else ()
    plan = Plan(
        manifest,
        draft.manifest,
        origin=draft.origin,
        casts=draft.casts,
        proofs=tuple(dict.fromkeys(proofs)) if options.verify else (),
        replicas=wanted.replicas,
    )
    check_small(plan, options)
    return Job(manifest, place, draft, plan, options, report(plan, draft, place, options))


def _check_from(manifest: Manifest, wanted: Wanted) -> None:
    world = manifest.layout.world
    if wanted.from_world is not None and wanted.from_world != world:
        raise RequestError(
            f"was written by {world} rank(s), not by {wanted.from_world} as --from says",
            where=manifest.root,
            hint=f"leave --from out, or say --from {world} if this is the checkpoint you mean",
        )


def _draft(
    manifest: Manifest, wanted: Wanted, target: Path, formats: Mapping[str, Format]
) -> Draft:
    request = wanted.request()
    if wanted.format is not None:
        chosen = formats.get(wanted.format)
        known = ", ".join(n for n, f in formats.items() if f.writes)
        if chosen is None:
            raise RequestError(f"there is no format {wanted.format!r}", hint=f"writable: {known}")
        if not chosen.writes:
            raise UnsupportedError(
                f"{chosen.name} can be read, but not written", hint=f"writable: {known}"
            )
        return chosen.draft(manifest, request, target)
    own = formats.get(manifest.format)
    if own is not None and own.writes and (own.sharded or request.world is None):
        try:
            return own.draft(manifest, request, target)
        except UnsupportedError:
            if own.name == "native":
                raise
    return formats["native"].draft(manifest, request, target)


def _check_axes(draft: Draft, wanted: Wanted) -> None:
    """Refuse a mesh that the target's format has no axes for."""
    made = draft.manifest.layout.mesh
    for axis, size in wanted.mesh.items():
        if made.get(axis, 1) != size:
            raise RequestError(
                f"{axis}={size} can't be made: the format {draft.manifest.format} would have "
                f"{axis}={made.get(axis, 1)}",
                hint=f"leave {axis} out of the mesh, or choose another --format",
            )


def _check_losses(manifest: Manifest, draft: Draft, wanted: Wanted) -> None:
    lost = [loss for loss in draft.losses if not loss.harmless and not _matches(loss, wanted.drop)]
    if lost:
        inside = {name: _inside(value) for name, value in manifest.objects.items()}
        lines = "\n".join(f"  {o.what}{inside.get(o.what, '')}: {o.why}" for o in lost[:20])
        more = f"\n  and {len(lost) - 20} more" if len(lost) > 20 else ""
        raise RequestError(
            f"the target can't hold all of the checkpoint:\n{lines}{more}",
            where=manifest.root,
            hint="go on without them with --drop GLOB, or choose another --format",
        )


def _inside(value: object, most: int = 6) -> str:
    """What somebody would lose who lets an object go: the names in it."""
    if not isinstance(value, Mapping) or not value:
        return ""
    names = [str(key) if str(key).isidentifier() else brief(key) for key in value]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f" ({', '.join(names[:most])}{more})"


def _matches(loss: Loss, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(loss.what, glob) for glob in globs)


def _derived(manifest: Manifest, draft: Draft) -> list[tuple[TensorKey, TensorKey]]:
    """Weights that can be proved against the masters which the target is made of.

    Where the source has recorded a digest of both, they are proved by that already.
    """
    pairs = []
    made_of = dict.fromkeys(draft.origin.get(k, k) for k in draft.manifest.tensors)
    for key in made_of:
        name, state = key
        weight = (name, PARAM)
        recorded = {key, weight} <= manifest.digests.keys()
        if state == MASTER and weight in manifest.tensors and not recorded:
            pairs.append((weight, key))
    return pairs


def _may_pass(error: BaseException) -> bool:
    """Whether the same command can succeed later, with the same source and target."""
    passing = (KeyboardInterrupt, OSError, MemoryError)
    return isinstance(error, passing) or isinstance(error.__cause__, OSError)


def _check_space(planned: Report, target: Path) -> None:
    if planned.disk_free is not None and planned.disk_needed > planned.disk_free:
        raise TargetError(
            f"the target needs {planned.disk_needed} bytes and {planned.disk_free} are free",
            where=target,
            hint="free some space, or choose a target on another disk; nothing was written",
        )
