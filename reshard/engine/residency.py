"""Which units are gathered now, which next?

A unit is gathered because something needs it: a hook of its module, a value that autograd saved,
or a read of a released parameter. All ranks must gather in one order, so a pass (a forward or a
backward) follows a **route**, the order of uses that all ranks agreed on. A need walks the route
up to the unit, and what the rank skipped is gathered on the way; the end of the pass walks the
rest. Which unit gives way is a function of the walk alone, hence the same on all ranks: the one
that was used longest ago. One that still runs, or that somebody looks at, keeps its bytes a
little longer, which no other rank notices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from reshard.engine.holding import Holding
from reshard.engine.units import Unit

if TYPE_CHECKING:
    from reshard.engine.transport import Pending, Transport

Pass = Literal["forward", "backward"]


class Resident:
    """A unit that comes and goes.

    Parameters
    ----------
    unit
        The unit.
    holdings
        Its flats on this rank.
    number
        Its position among the units.
    """

    __slots__ = (
        "elements", "filled", "holdings", "number", "outside", "owner", "pending", "present",
        "running", "unit",
    )  # fmt: skip

    def __init__(self, unit: Unit, holdings: Sequence[Holding], number: int) -> None:
        self.unit, self.holdings, self.number = unit, tuple(holdings), number
        self.elements = sum(holding.bounds[-1] for holding in holdings)
        self.pending: list[Pending] | None = None
        self.present = True  # plain parameters
        self.filled = True  # bytes
        self.running = 0
        self.outside = False  # gathered for somebody outside of a pass
        self.owner: Residency | None = None

    def fetch(self) -> None:
        """See :class:`reshard.engine.released.Home`."""
        assert self.owner is not None
        self.owner.need(self)

    def fetched(self) -> None:
        """See :class:`reshard.engine.released.Home`."""
        assert self.owner is not None
        self.owner.settle()


class Residency:
    """The units of a rank at stage 3.

    Parameters
    ----------
    residents
        All units, the root first; they are released here.
    transport
        The group over which slices lie.
    prefetch
        How many units are gathered ahead.
    """

    def __init__(self, residents: Sequence[Resident], transport: Transport, prefetch: int) -> None:
        self.residents, self.transport, self.prefetch = tuple(residents), transport, prefetch
        self.root = self.residents[0]
        self.budget = (1 + prefetch) * max((r.elements for r in self.residents[1:]), default=0)
        order = list(self.residents[1:])
        self.routes: dict[Pass, list[Resident]] = {"forward": order, "backward": order[::-1]}
        self.uses: dict[Pass, list[Resident]] = {}
        self.live = self.peak = sum(r.elements for r in self.residents)
        self._rooted = False
        self._recent: dict[Resident, None] = {}
        self._late: set[Resident] = set()
        self._pass: Pass | None = None
        self._noted: list[Resident] | None = None
        self._position = 0
        self._last: Resident | None = None
        for resident in self.residents:
            resident.owner = self
            for holding in resident.holdings:
                holding.part_with(resident)
            self._release(resident)
        self.peak = self.live

    # -- passes ----------------------------------------------------------------------------------

    @property
    def inside(self) -> bool:
        """Whether a pass is under way."""
        return self._pass is not None

    def begin(self, kind: Pass) -> None:
        """Start a pass: the root is gathered, and the first units of the route are on their way."""
        assert self._pass is None, self._pass
        self._pass, self._position, self._last = kind, 0, None
        self._noted = self.uses.setdefault(kind, []) if kind not in self.uses else None
        if not self._rooted:
            self._rooted = True
            self._start(self.root)
        self._look_ahead()
        self._finish(self.root)

    def end(self, *, keep: bool = False) -> None:
        """End a pass: what this rank skipped is gathered after all, then everything is released.

        Parameters
        ----------
        keep
            Whether the units that were used last stay, because a backward will follow.
        """
        assert self._pass is not None
        for resident in self.routes[self._pass][self._position :]:
            self._use(resident)
        self._pass = self._last = self._noted = None
        if not keep:
            self.release_all()

    def abandon(self) -> None:
        """Forget a pass that failed; nothing of it is waited for."""
        self._pass = self._last = self._noted = None
        for resident in self.residents:
            resident.running = 0

    def release_all(self) -> None:
        """Release every unit that nobody looks at."""
        self._recent.clear()
        self._rooted = False
        for resident in self.residents:
            self._release(resident)
            if resident.filled:  # somebody still looks at it; what it holds will soon be old
                self._check(resident)

    # -- needs -----------------------------------------------------------------------------------

    def need(self, resident: Resident) -> None:
        """Have a unit gathered when this returns."""
        if resident is self._last and resident.present:
            return
        if self._kept(resident) and (self._pass is None or resident is self.root):
            self._finish(resident)
            return
        if self._pass is None:
            self._start(resident)
            self._finish(resident)
            self._late.add(resident)
            resident.outside = True
            return
        self._last = resident
        if self._noted is not None:
            self._noted.append(resident)
        self._walk(resident)
        self._finish(resident)

    def enter(self, resident: Resident) -> None:
        """A unit's module begins to run."""
        self.need(resident)
        resident.running += 1

    def leave(self, resident: Resident) -> None:
        """A unit's module has run."""
        resident.running = max(0, resident.running - 1)
        if self._pass is None and not resident.running and not self._kept(resident):
            self._late.add(resident)
            self.settle()

    def _kept(self, resident: Resident) -> bool:
        """Whether a unit is gathered by what all ranks did alike."""
        return self._rooted if resident is self.root else resident in self._recent

    def settle(self) -> None:
        """Release what should have been released already, where that is possible now."""
        for resident in list(self._late):
            self._release(resident)

    def _walk(self, resident: Resident) -> None:
        """Use what the route has up to a unit; a unit that it doesn't have is used at once."""
        assert self._pass is not None
        route = self.routes[self._pass]
        try:
            found = route.index(resident, self._position)
        except ValueError:
            self._use(resident)
            return
        for skipped in route[self._position : found]:
            self._use(skipped)
        self._position = found + 1
        self._use(resident)
        self._look_ahead()
        if self._pass == "backward" and self._position == len(route):
            self._leave_alone(resident)

    def _leave_alone(self, resident: Resident) -> None:
        """Release all others: a backward has come to its last unit."""
        for other in [one for one in self._recent if one is not resident]:
            del self._recent[other]
            self._release(other)

    def _look_ahead(self) -> None:
        """Gather the next units of the route."""
        assert self._pass is not None
        ahead: dict[Resident, None] = {}
        for resident in self.routes[self._pass][self._position :]:
            if len(ahead) == self.prefetch:
                break
            if resident is not self._last:
                ahead[resident] = None
        for resident in ahead:
            self._use(resident)
        if self._last in self._recent:  # what is ahead gives way before what is needed now
            self._recent[self._last] = self._recent.pop(self._last)

    def _use(self, resident: Resident) -> None:
        """Make a unit the most recent; others give way."""
        if resident in self._recent:
            del self._recent[resident]
        else:
            room = self.budget - resident.elements
            while self._recent and sum(r.elements for r in self._recent) > room:
                oldest = next(iter(self._recent))
                del self._recent[oldest]
                self._release(oldest)
            self._start(resident)
        self._recent[resident] = None

    # -- bytes -----------------------------------------------------------------------------------

    def _start(self, resident: Resident) -> None:
        """Issue the gathers of a unit."""
        if resident.pending is not None:
            return
        self.settle()
        self._late.discard(resident)
        if not resident.filled:
            self.live += resident.elements
            self.peak = max(self.peak, self.live)
        resident.filled, resident.pending = True, []
        for holding in resident.holdings:
            holding.make_room()
            holding.fill()
            resident.pending.append(
                self.transport.gather(holding.whole, holding.bounds, holding.flat.name)
            )

    def _finish(self, resident: Resident) -> None:
        """Wait for the gathers of a unit."""
        if resident.pending is None:
            return
        for pending in resident.pending:
            pending.wait()
        resident.pending = None
        if not resident.present:
            resident.present = True
            for holding in resident.holdings:
                holding.appear()

    def _release(self, resident: Resident) -> None:
        """Release a unit now, or as soon as it doesn't run and nobody looks at it."""
        if not resident.filled:
            return
        self._finish(resident)
        self._late.add(resident)
        if resident.running:
            return
        if resident is self._last:
            self._last = None
        if resident.present:
            resident.present = False
            for holding in resident.holdings:
                holding.vanish()
        if any(holding.lent for holding in resident.holdings):
            return
        self._late.discard(resident)
        self._check(resident)
        for holding in resident.holdings:
            holding.drop()
        resident.filled = False
        self.live -= resident.elements

    def _check(self, resident: Resident) -> None:
        """See that who looked at a unit outside of a pass has written nothing that gets lost."""
        outside, resident.outside = resident.outside, False
        if outside:
            for holding in resident.holdings:
                holding.check_kept()

    # -- the order that all ranks agree on -------------------------------------------------------

    @property
    def routes_fit(self) -> bool:
        """Whether this step's uses were those of the routes."""
        return all(uses == self.routes[kind] for kind, uses in self.uses.items())

    def noted(self) -> dict[str, list[int]]:
        """What was used in this step as plain data, for the other ranks."""
        return {kind: [r.number for r in uses] for kind, uses in self.uses.items()}

    def agree(self, noted: Iterable[dict[str, list[int]]]) -> None:
        """Take the uses as routes where all ranks noted the same."""
        said = list(noted)
        kinds: tuple[Pass, ...] = ("forward", "backward")
        for kind in kinds:
            first = said[0].get(kind)
            if first and all(other.get(kind) == first for other in said):
                self.routes[kind] = [self.residents[number] for number in first]

    def next_step(self) -> None:
        """Begin to note anew."""
        self.uses = {}
        self.peak = self.live
