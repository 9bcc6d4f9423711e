"""Did it go well on every rank?

Work that each rank does for itself, and that counts only if all of them can do it: what goes wrong
on one rank is raised on all, so that none goes on alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reshard import errors
from reshard.engine.state import NotAtSafePoint
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from reshard.engine.state import Stateful


def together(engine: Stateful, label: str, work: Callable[[], Any]) -> list[Any]:
    """Do some work on every rank.

    Parameters
    ----------
    engine
        Of which all ranks call this.
    label
        What it is about.
    work
        This rank's part; what it returns must be JSON-able and small.

    Returns
    -------
    list
        What each rank's work returned, in rank order.

    Raises
    ------
    ReshardError
        What another rank's work raised, with its rank.
    Exception
        What this rank's own work raised.
    """
    own: Exception | None = None
    mine: dict[str, Any] = {}
    try:
        mine["done"] = work()
    except Exception as error:  # noqa: BLE001 - raised below, when all ranks know of it
        own = error
        mine["failed"] = packed(error)
    said = engine.exchange(mine, label)
    if own is not None:
        raise own
    for rank, one in enumerate(said):
        if "failed" in one:
            raise unpacked(one["failed"], rank)
    return [one["done"] for one in said]


def packed(error: BaseException) -> dict[str, Any]:
    """An error as plain data."""
    if isinstance(error, ReshardError):
        kind = type(error).__name__
        return {"kind": kind, "what": error.what, "where": error.where, "hint": error.hint}
    return {"kind": "", "what": f"{type(error).__name__}: {error}", "where": None, "hint": None}


def unpacked(data: dict[str, Any], rank: int) -> ReshardError:
    """Another rank's error, of its own kind, with the rank that met it."""
    kinds: dict[str, Any] = {**vars(errors), NotAtSafePoint.__name__: NotAtSafePoint}
    kind = kinds.get(data["kind"], ReshardError)
    where = f"rank {rank}" if data["where"] is None else f"rank {rank}: {data['where']}"
    found: ReshardError = kind(data["what"], where=where, hint=data["hint"])
    return found
