"""How does the engine say that the ranks can't go on together?"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.errors import ReshardError

__all__ = ["EngineError", "RankFailed", "RanksDisagree"]


class EngineError(ReshardError):
    """The ranks can't go on together; `ranks` says what each of them was doing.

    Parameters
    ----------
    what
        One sentence: what is wrong.
    ranks
        What each rank was doing, by its number.
    hint
        What to do about it.
    """

    kind = "ranks"

    def __init__(
        self, what: str, *, ranks: Mapping[int, str] | None = None, hint: str | None = None
    ) -> None:
        self.ranks = dict(ranks or {})
        lines = [what, *(f"  rank {rank}: {doing}" for rank, doing in sorted(self.ranks.items()))]
        super().__init__("\n".join(lines), hint=hint)


class RanksDisagree(EngineError):  # noqa: N818 - said as a sentence
    """The ranks wait for different things, so that none of them could ever go on."""

    kind = "ranks-disagree"


class RankFailed(EngineError):  # noqa: N818 - said as a sentence
    """A rank failed or left; the others can't go on without it."""

    kind = "rank-failed"
