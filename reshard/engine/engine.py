"""What does a training script see?

::

    engine = ZeroEngine(model, lambda groups: AdamW(groups, lr=3e-4), stage=3)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        info = engine.step()

Called, the engine is the model. ``backward`` is one micro-batch: its gradients are summed over the
ranks at once. ``step`` divides by the number of micro-batches of all ranks, clips, and steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from reshard.engine.account import Account
from reshard.engine.build import build
from reshard.engine.failures import EngineError
from reshard.engine.gathered import What, Write, full_state_dict, gathered
from reshard.engine.intake import Usage
from reshard.engine.optimizer import Factory, Groups
from reshard.engine.precision import Precision
from reshard.engine.residency import Resident
from reshard.engine.saved import Handles
from reshard.engine.stepping import StepInfo, step
from reshard.engine.units import UnitRule
from reshard.errors import RequestError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from reshard.engine.explain import Explanation
    from reshard.engine.topology import Groups as RankGroups


class ZeroEngine(Account):
    """A model, its optimizer, and how both are divided over the ranks.

    All ranks make it with the same model and settings, and afterwards make the same calls. Initial
    parameters and buffers become those of rank 0. Parameters are written in :meth:`gathered`: at
    stage 3 a write through ``.data`` elsewhere is lost, and not always noticed.

    Parameters
    ----------
    model
        Any module. Its parameters keep their identity; their values move into flats.
    optimizer
        Makes the optimizer of parameter groups. Any elementwise one will do.
    groups
        Parameter groups as torch has them (parameters, names or patterns, with settings), or a
        function of the model that returns them; by default one group.
    stage
        0: everything is whole. 1: masters and optimizer state are divided. 2: gradients too.
        3: parameters too.
    units
        Which parameters travel together; see :data:`reshard.engine.units.UnitRule`.
    mesh
        A device mesh with the axis ``shard``, or ``replicate`` and ``shard``, or the groups of a
        :class:`~reshard.engine.topology.Topology`; by default all ranks divide one copy. With the
        groups of a pipeline the model is this rank's stage (see :meth:`pipelined`).
    prefetch
        How many units are gathered ahead at stage 3.
    precision
        Element types; by default those of the model.
    clip_norm
        The longest gradient that isn't shortened; ``None`` doesn't measure it.

    Raises
    ------
    UnsupportedError
        If the optimizer isn't elementwise, or a parameter isn't a dense tensor.
    InconsistentError
        If ranks made different engines.
    RequestError
        If an argument makes no sense.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Factory,
        *,
        stage: int,
        groups: Groups = None,
        units: UnitRule = "auto",
        mesh: DeviceMesh | RankGroups | None = None,
        prefetch: int = 1,
        precision: Precision | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self.module = model
        self._core = build(
            model, optimizer, groups, stage, units, mesh, prefetch, precision or Precision(),
            clip_norm,
        )  # fmt: skip
        self._sync = True
        self._broken: str | None = None
        # An engine that is dropped, not closed, leaves no thread behind.
        weakref.finalize(self, self._core.ranks.retire).atexit = False
        self._handles = Handles(self._core.residency) if self._core.residency else None
        for resident, usage in zip(self._core.residents, self._usages(), strict=True):
            self._watch(resident, usage)

    # -- training --------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        self._ready("forward")
        residency = self._core.residency
        if residency is None:
            return self.module(*args, **kwargs)
        learns = torch.is_grad_enabled()
        residency.begin("forward")
        try:
            with self._saving_handles():
                result = self.module(*args, **kwargs)
            residency.end(keep=learns)
        except Exception:
            residency.abandon()
            raise
        return result

    def backward(self, loss: Tensor, *, retain_graph: bool = False, partial: bool = False) -> None:
        """Compute the gradients of a micro-batch and sum them over the ranks.

        Parameters
        ----------
        loss
            One element. It is scaled by the loss scale, not by the number of micro-batches:
            ``step`` takes the mean over the micro-batches of all ranks.
        retain_graph
            Whether another backward through the same graph follows.
        partial
            Whether another loss of the same micro-batch follows, so that this one isn't counted.

        Raises
        ------
        RequestError
            If the loss has no graph or more than one element.
        """
        self._ready("backward")
        given: Any = loss
        if not isinstance(given, Tensor) or given.numel() != 1:
            kind = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise RequestError(f"the loss is {kind}; it must be a tensor with one element")
        if loss.grad_fn is None:
            raise RequestError(
                "the loss has no graph to go back through",
                hint="compute it from engine(...) with gradients enabled, then call backward",
            )
        core = self._core
        scale = core.scale.value
        scaled: Any = loss if scale == 1.0 else loss * scale
        hook = scaled.register_hook(core.reducer.outermost)
        try:
            self._begin_backward(partial=partial)
            with self._saving_handles():  # what is recomputed is saved once more
                scaled.backward(retain_graph=retain_graph)
            self._end_backward(partial=partial)
        except BaseException as error:
            self._fail("backward", error)
            core.reducer.abandon()
            if core.residency is not None:
                core.residency.abandon()
            raise
        finally:
            hook.remove()

    def pipelined(self) -> Module:
        """The engine as the module of a stage of ``torch.distributed.pipelining``.

        ``PipelineStage(engine.pipelined(), ...)`` with the pipeline's group; the engine's ``mesh``
        is the :class:`~reshard.engine.topology.Groups` of a topology with as many stages, one on
        each rank. Every backward of the schedule is a micro-batch; ``step()`` follows it. The
        schedule's own division of gradients by the number of micro-batches finds nothing to divide.

        Schedules that split a backward in two (zero bubble) aren't supported.
        """
        from reshard.engine.pipeline import Stage

        core = self._core
        last = core.ranks.part == core.ranks.parts - 1

        def begin() -> None:
            self._ready("backward")
            self._begin_backward(partial=False)
            core.reducer.outermost(None)

        def end() -> None:
            try:
                self._end_backward(partial=False)
            except BaseException as error:
                self._fail("backward", error)
                raise

        return Stage(self.module, self, begin, end, lambda: core.scale.value if last else 1.0)

    def step(self) -> StepInfo:
        """Divide the summed gradients by the number of micro-batches, clip, and step.

        Raises
        ------
        RequestError
            If no backward came before.
        RanksDisagree
            If the ranks took different numbers of backwards.
        """
        self._ready("step")
        core = self._core
        if not core.micro_batches:
            raise RequestError(
                "step() was called, but no backward has been counted since the last step",
                hint="call engine.backward(loss) first",
            )
        residency = core.residency
        try:
            if residency is not None:
                residency.release_all()
            norm, skipped = step(core)
        except BaseException as error:
            self._fail("step", error)
            raise
        core.reducer.clear()
        core.ranks.rest()
        core.steps += 1
        core.micro_batches = 0
        peak = sum(holding.bounds[-1] for holding in core.holdings)
        if residency is not None:
            peak = residency.peak
            residency.next_step()
        return StepInfo(core.steps, norm, skipped, core.scale.value, core.ranks.sent(), peak)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the backwards inside on this rank.

        They stay whole in ``.grad``, in the parameters' type, and go with the next backward
        outside, or with the step: less communication for the price of a whole gradient. Every
        backward counts as a micro-batch all the same.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def close(self) -> None:
        """Wait for the last save and end the engine's threads; all ranks call this.

        The model's parameters stay as they are: at stage 3 released, so take what is still wanted
        (``full_state_dict()``) before. Afterwards everything that needs other ranks is refused.

        Raises
        ------
        ReshardError
            The error of the last save beside the training, if nobody has met it yet.
        """
        try:
            self.saving.settle()
        finally:
            self._closed = True
            self._core.ranks.close()

    # -- whole parameters ------------------------------------------------------------------------

    def gathered(self, what: What = None, *, write: Write = None) -> AbstractContextManager[None]:
        """Have parameters whole inside a ``with``, on all ranks.

        Parameters
        ----------
        what
            Modules, parameters or their names; ``None`` for all.
        write
            ``"rank0"``: what rank 0 writes is taken over by all. ``"all"``: every rank writes the
            same. ``None``: the parameters are only read.

        Raises
        ------
        ParameterWrittenError
            If parameters were written that are only read.
        """
        self._ready("gathered")
        return gathered(self._core, what, write)

    def full_state_dict(self, *, masters: bool = False, rank0: bool = False) -> dict[str, Any]:
        """Copy the model's whole state, with all (also tied) names; plain torch loads it.

        Parameters
        ----------
        masters
            Whether trained parameters are given in the masters' type instead of their own.
        rank0
            Whether only rank 0 gets it; the others take part and get an empty one.
        """
        self._ready("full_state_dict")
        return full_state_dict(self._core, masters=masters, rank0=rank0)

    def explain(self) -> Explanation:
        """What is where, how many bytes it takes, and what a step sends."""
        from reshard.engine.explain import explain

        return explain(self._core)

    @property
    def loss_scale(self) -> float:
        """What the next loss is scaled by."""
        return self._core.scale.value

    # -- inside ----------------------------------------------------------------------------------

    def _ready(self, what: str) -> None:
        if self._closed:
            raise RequestError(f"{what} was called, but the engine was closed")
        if self._broken is not None:
            raise RequestError(
                f"{what} was called after {self._broken}; the state may be incomplete",
                hint="make a new engine and load the last checkpoint",
            )
        if self._core.busy:
            raise RequestError(f"{what} was called while {self._core.busy}")

    def _begin_backward(self, *, partial: bool) -> None:
        core = self._core
        core.reducer.begin(sync=self._sync, partial=partial)
        if core.residency is not None:
            core.residency.begin("backward")

    def _end_backward(self, *, partial: bool) -> None:
        core = self._core
        if core.residency is not None:
            core.residency.end()
        core.reducer.end()
        core.ranks.rest()
        core.micro_batches += not partial

    def _fail(self, what: str, error: BaseException) -> None:
        """Remember that the state may be torn, and tell the ranks that wait for this one."""
        self._broken = f"a {what} failed with {type(error).__name__}"
        if not isinstance(error, EngineError):
            self._core.ranks.all.fail(error)

    def _saving_handles(self) -> AbstractContextManager[Any]:
        if self._handles is None:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._handles.pack, self._handles.unpack)

    def _usages(self) -> list[Usage]:
        """The use of each unit; one that has no gradients gets a spare one."""
        by_holding = {id(i.holding): i.usage for i in self._core.reducer.intakes}
        usages: list[Usage] = []
        for resident in self._core.residents:
            known = [by_holding[id(h)] for h in resident.holdings if id(h) in by_holding]
            usages.append(known[0] if known else Usage(tied=False))
        return usages

    def _watch(self, resident: Resident, usage: Usage) -> None:
        """Have a unit's module say when it runs. A copy of the module (deepcopy) says nothing."""
        residency, reducer = self._core.residency, self._core.reducer
        module = resident.unit.module

        def before(running: Module, _: Any) -> None:
            if running is not module:
                return
            if not reducer.inside:
                usage.ran += 1
            if residency is not None:
                residency.enter(resident)

        def after(running: Module, _: Any, __: Any) -> None:
            if running is module and residency is not None:
                residency.leave(resident)

        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after, always_call=True)
