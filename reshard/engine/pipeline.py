"""How does an engine train a stage of ``torch.distributed.pipelining``?

A schedule calls a module and goes back through what it returned; it knows of no engine. So the
engine stands in for the module: its outputs carry a hook that begins a backward of the engine when
the first gradient comes, and autograd calls back when it is through. Each backward is a
micro-batch, as with ``engine.backward``; ``engine.step()`` follows the schedule's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from reshard.engine.inner import after_backward, backward_number, reaches

__all__ = ["Stage"]


class Stage(Module):
    """The module that a pipeline's stage is made of; see ``ZeroEngine.pipelined``.

    Parameters
    ----------
    module
        The model: parameters and buffers are its own.
    run
        Runs the model as the engine does.
    begin, end
        Called around each backward.
    scale
        What gradients are multiplied with where they come in.
    """

    def __init__(
        self,
        module: Module,
        run: Callable[..., Any],
        begin: Callable[[], None],
        end: Callable[[], None],
        scale: Callable[[], float],
    ) -> None:
        super().__init__()
        self.module = module
        self._run, self._begin, self._end, self._scale = run, begin, end, scale
        self._trained = next(p for p in module.parameters() if p.requires_grad)
        self._inside: int | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; what it returns begins a backward."""
        found = self._run(*args, **kwargs)
        for value in _tensors(found):
            if value.requires_grad and not isinstance(value, Parameter):
                hooked: Any = value
                hooked.register_hook(self._arrived)
        return found

    def _arrived(self, gradient: Tensor) -> Tensor:
        """A gradient comes in: the backward's first begins it."""
        if self._inside != backward_number():
            if not reaches(self._trained):  # the schedule only asks for the shapes of gradients
                return gradient
            self._begin()
            self._inside = backward_number()
            after_backward(self._finished)
        scale = self._scale()
        return gradient if scale == 1.0 else gradient * scale

    def _finished(self) -> None:
        self._inside = None
        self._end()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
