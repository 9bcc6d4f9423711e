"""How is state saved beside the training?

The slices are copied into memory that is kept from save to save, and training goes on; a thread
writes the copies. :class:`Area` is that memory. :class:`Running` is a save that may still be under
way: whoever waits for it, or begins the next save, meets its error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Bytes = NDArray[np.uint8]

ALIGN = 64
"""Bytes to whose multiples copies are aligned."""

PAGE = 4096
"""Bytes of the smallest page of memory."""


class Area:
    """Memory for a copy of the slices; it only grows, and is page-locked for a GPU."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._touching: threading.Thread | None = None

    def touch(self, tensors: Sequence[Tensor]) -> None:
        """Have the memory for copies of such tensors ready soon; a thread sees to it.

        Each page of new memory is cleared by the kernel when it is first written, which takes
        several times as long as the copy.
        """
        begins, on_device = _places(tensors)

        def work() -> None:
            memory = self._reserve(begins[-1], pinned=on_device)
            for low in range(0, memory.numel(), PAGE * 1024):  # not for long without the lock
                memory[low : low + PAGE * 1024 : PAGE] = 0

        self._wait()
        self._touching = threading.Thread(target=work, name="reshard-touch", daemon=True)
        self._touching.start()

    def _wait(self) -> None:
        if self._touching is not None:
            self._touching.join()
            self._touching = None

    def copy(self, tensors: Sequence[Tensor]) -> list[Bytes]:
        """Copy 1-D tensors; the copies stand until the next call.

        Returns
        -------
        list of ndarray
            Their bytes.
        """
        import torch

        self._wait()
        begins, on_device = _places(tensors)
        memory = self._reserve(begins[-1], pinned=on_device)
        found = []
        for tensor, begin in zip(tensors, begins, strict=False):
            size = tensor.nbytes
            target = memory[begin : begin + size]
            if size:
                target.copy_(tensor.detach().view(torch.uint8), non_blocking=on_device)
            found.append(target.numpy())
        if on_device:
            torch.cuda.synchronize()
        return found

    def _reserve(self, nbytes: int, *, pinned: bool) -> Tensor:
        import torch

        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = None  # let go of the old one first
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return self._memory


def _places(tensors: Sequence[Tensor]) -> tuple[list[int], bool]:
    """Where each copy begins, and last where they end; and whether any tensor isn't here."""
    sizes = [-(-tensor.nbytes // ALIGN) * ALIGN for tensor in tensors]
    begins: list[int] = np.cumsum([0, *sizes]).tolist()
    return begins, any(tensor.device.type != "cpu" for tensor in tensors)


class Running:
    """A save: what :func:`reshard.engine.save.save` returns.

    Parameters
    ----------
    path
        Where the checkpoint will be.
    work
        Writes it. Called at once, or in a thread.
    blocking
        Which of the two.
    """

    def __init__(self, path: Path, work: Callable[[], None], *, blocking: bool) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if blocking:
            work()
            return
        # Not a daemon: a script that ends has its checkpoint.
        self._thread = threading.Thread(target=self._run, args=(work,), name="zreshard-save")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by wait(), in the caller's thread
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is there.

        Raises
        ------
        ReshardError
            What went wrong, on whichever rank; it is raised once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.path


class Saving:
    """What an engine keeps between its saves.

    Attributes
    ----------
    area
        Memory for copies.
    running
        The last save, if it may still be under way or has an error to tell.
    """

    def __init__(self) -> None:
        self.area = Area()
        self.running: Running | None = None

    def settle(self) -> None:
        """Wait for the last save.

        Raises
        ------
        ReshardError
            Its error, if nobody has met that yet.
        """
        running, self.running = self.running, None
        if running is not None:
            running.wait()
