"""What does a rank hold of a flat?

The **whole**, one buffer whose storage the parameters share, and what it **owns**: the values that
last, in the master's type. Where the whole stays and needs no wider master (stages 0 to 2 in plain
fp32), what it owns is a view of it. At stage 3 the whole comes and goes: its storage is resized,
so that every view of it stays right. A storage that somebody else still looks at isn't given up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from reshard.engine.flat import Flat, Piece
from reshard.engine.inner import uses
from reshard.engine.released import Home, Released
from reshard.errors import ReshardError

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def master_type(dtype: torch.dtype) -> torch.dtype:
    """The element type that parameters of ``dtype`` are stepped in."""
    return _WIDER.get(dtype, dtype)


class ParameterWrittenError(ReshardError):
    """A parameter was changed where the change would be lost, or differ between ranks."""

    exit_code = 6
    kind = "request"


class Holding:
    """A flat's tensors on this rank.

    Parameters
    ----------
    flat
        How the parameters lie.
    parameters
        They, in the order of the entries; their values move into the buffer.
    dtype
        Their element type from now on.
    shard, shards
        Which slice is this rank's, of how many.
    owns_all
        Whether the rank keeps and steps all elements (stage 0) or its slice.
    share
        Called with the initial values, to make them those of rank 0.
    """

    __slots__ = (
        "_baseline", "_marks", "bounds", "dtype", "flat", "gaps", "high", "low", "own",
        "parameters", "pieces", "present", "storage", "whole",
    )  # fmt: skip

    def __init__(
        self,
        flat: Flat,
        parameters: Sequence[Parameter],
        dtype: torch.dtype,
        shard: int,
        shards: int,
        *,
        owns_all: bool,
        share: Callable[[Tensor], None],
    ) -> None:
        self.flat, self.dtype, self.parameters = flat, dtype, tuple(parameters)
        self.bounds = flat.bounds(shards)
        self.low, self.high = self.bounds[shard : shard + 2]
        self.gaps = flat.gaps(shards)
        if owns_all:
            self.pieces: tuple[Piece, ...] = tuple(
                Piece(i, e.offset, e.end, 0) for i, e in enumerate(flat.entries) if e.numel
            )
        else:
            self.pieces = flat.pieces(shard, shards)
        kept = master_type(dtype) if flat.trained else dtype
        values = torch.zeros(self.bounds[-1], dtype=kept, device=self.parameters[0].device)
        for entry, parameter in zip(flat.entries, self.parameters, strict=True):
            values[entry.offset : entry.end].copy_(parameter.detach().reshape(-1))
        share(values)
        self.whole = values if kept == dtype else values.to(dtype)
        self.own = values if owns_all else values[self.low : self.high]
        if kept != dtype:
            self.own = self.own.clone()
        for entry, parameter in zip(flat.entries, self.parameters, strict=True):
            parameter.data = self.whole[entry.offset : entry.end].view(entry.shape)
        del values
        self.storage = self.whole.untyped_storage()
        self.present = True
        self.accept()
        self._baseline = self._uses()

    # -- the whole -------------------------------------------------------------------------------

    @property
    def run(self) -> Tensor:
        """The run of the whole that is this rank's."""
        return self.whole[self.low : self.high]

    def part_with(self, home: Home) -> None:
        """Keep the slice apart from the whole, which may then be given up (stage 3)."""
        if self.own.untyped_storage().data_ptr() == self.storage.data_ptr():
            self.own = self.own.clone()
        for parameter in self.parameters:
            parameter.home = home  # type: ignore[attr-defined]
        self._baseline = self._uses()

    def fill(self) -> None:
        """Bring this rank's run of the whole up to date with what it owns."""
        whole = self.run if self.own.numel() == self.high - self.low else self.whole
        if whole.data_ptr() != self.own.data_ptr():
            whole.copy_(self.own)

    def make_room(self) -> None:
        """Give the whole its bytes back; what they hold is for a gather to say."""
        size = self.bounds[-1] * self.whole.element_size()
        if self.storage.nbytes() != size:  # torch would move it otherwise
            self.storage.resize_(size)

    def appear(self) -> None:
        """Make the parameters plain ones again: the whole is filled."""
        for parameter in self.parameters:
            parameter.__class__ = Parameter
        self.present = True
        self.accept()

    def vanish(self) -> None:
        """Make the parameters released ones; the bytes are still there."""
        self.check_unwritten()
        for parameter in self.parameters:
            parameter.__class__ = Released
        self.present = False

    def drop(self) -> None:
        """Give the bytes of the whole up."""
        assert not self.present
        self.storage.resize_(0)

    @property
    def lent(self) -> bool:
        """Whether anybody but the parameters looks at the whole."""
        return self._uses() > self._baseline

    def _uses(self) -> int:
        return uses(self.storage)

    # -- what users may do to it -----------------------------------------------------------------

    def accept(self) -> None:
        """Take the present state of the parameters as the engine's own doing."""
        self._marks = [(p._version, p.data_ptr()) for p in self.parameters]

    @property
    def written(self) -> list[str]:
        """The parameters that were written or moved by anybody else."""
        if not self.present:
            return []
        now = [(p._version, p.data_ptr()) for p in self.parameters]
        if now == self._marks:
            return []
        pairs = zip(self.flat.entries, self._marks, now, strict=True)
        return [entry.name for entry, before, after in pairs if before != after]

    def check_unwritten(self) -> None:
        """Refuse a change that nobody announced.

        Raises
        ------
        ParameterWrittenError
            If a parameter was written or moved.
        """
        if names := self.written:
            raise ParameterWrittenError(
                "the parameter was written or replaced outside of engine.gathered(...)",
                where=", ".join(names),
                hint="write parameters inside `with engine.gathered(write=...)`; move and cast "
                "the model before the engine is made",
            )

    def check_kept(self) -> None:
        """Refuse what was written through ``.data``, which leaves no other trace.

        Only in the run of the whole that is this rank's own. It must be filled.

        Raises
        ------
        ParameterWrittenError
            If the run isn't what this rank owns.
        """
        own = self.own.to(self.dtype)
        if not torch.equal(self.run.view(torch.uint8), own.view(torch.uint8)):
            names = {self.flat.entries[piece.entry].name for piece in self.pieces}
            raise ParameterWrittenError(
                "a parameter was written through .data outside of engine.gathered(...)",
                where=f"one of {', '.join(sorted(names))}",
                hint="write parameters inside `with engine.gathered(write=...)`",
            )

    def take_back(self) -> None:
        """Take what was written into the whole into what this rank owns.

        Where the parameters are narrower than the master, an element that still is the rounded
        master keeps the master's digits.
        """
        whole = self.run if self.own.numel() == self.high - self.low else self.whole
        if whole.data_ptr() != self.own.data_ptr():
            self.own.copy_(torch.where(self.own.to(self.dtype) == whole, self.own, whole))
        self.accept()

    def views(self, buffer: Tensor) -> list[Tensor]:
        """A buffer as long as the whole, as the parameters lie in it."""
        return [buffer[e.offset : e.end].view(e.shape) for e in self.flat.entries]
