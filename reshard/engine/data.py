"""Which samples and which random numbers does a rank get, also after a resume on other ranks?

**Samples.** Training reads one endless stream of samples: epoch after epoch, each a permutation of
all samples. A micro-batch is a run of the stream, and rank r of P takes the micro-batches
j x P + r. So what all ranks have read between two steps is a beginning of the stream, whatever P
is: its length is the whole position, and a resume goes on exactly behind it.

**Random numbers.** On as many ranks as before, each rank's generators go on where they stood. On
another number each rank begins a stream of its own, a function of (seed, step, rank): distinct,
and the same in every resume. What must not depend on P at all (dropout, where a resume shall give
the very same numbers) is seeded by :func:`seed_of` with the index of the micro-batch.

The functions behind it are 64-bit mixing steps that stand here in full, so that a checkpoint means
the same samples with every version of every library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.errors import CorruptError, RequestError

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_ROUNDS = 6


def mix(words: Words) -> Words:
    """Scatter 64-bit words: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def seed_of(*parts: int) -> int:
    """A seed that is a function of some integers, and of their order.

    ``torch.manual_seed(seed_of(seed, step, index))`` before micro-batch ``index`` (j x P + rank)
    gives it the same random numbers on any number of ranks.

    Returns
    -------
    int
        From 0, below 2^63.
    """
    state = 0x9E3779B97F4A7C15
    for part in parts:
        word = np.array([(state + (part & _MASK)) & _MASK], np.uint64)
        state = (int(mix(word)[0]) * 0x9E3779B97F4A7C15 + 1) & _MASK
    return int(mix(np.array([state], np.uint64))[0]) >> 1


def permuted(index: Ints, count: int, key: int) -> Ints:
    """Where a permutation of ``range(count)`` takes some indices.

    A Feistel network over the next even number of bits, walked on until it lands below ``count``:
    no table, so that an epoch of any size costs no memory.

    Parameters
    ----------
    index
        From 0, below ``count``.
    count
        How many there are.
    key
        Which permutation.
    """
    half = max(1, -(-max(count - 1, 1).bit_length() // 2))
    bits, low = np.uint64(half), np.uint64((1 << half) - 1)
    keys = np.array([seed_of(key, turn) for turn in range(_ROUNDS)], np.uint64)
    found = np.array(index, np.uint64, ndmin=1)
    todo = np.arange(found.size)
    while todo.size:
        left, right = found[todo] >> bits, found[todo] & low
        for word in keys:
            left, right = right, left ^ (mix(right + word) & low)
        found[todo] = (left << bits) | right
        todo = todo[found[todo] >= count]
    return found.astype(np.int64).reshape(np.shape(index))


@dataclass(frozen=True, slots=True)
class Position:
    """A beginning of the stream: what all ranks together have read.

    Parameters
    ----------
    read
        Samples.
    count
        Samples of an epoch.
    seed
        Of the permutations.
    shuffle
        Whether epochs are permuted at all.
    """

    read: int
    count: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.read < 0 or self.count < 1:
            raise RequestError(f"{self.read} samples read of epochs of {self.count}")

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self.read // self.count

    def samples(self, begin: int, end: int) -> Ints:
        """The samples at places ``[begin, end)`` of the stream."""
        epoch, index = np.divmod(np.arange(begin, end, dtype=np.int64), self.count)
        if not self.shuffle or not index.size:
            return index
        for one in range(int(epoch[0]), int(epoch[-1]) + 1):
            here = epoch == one
            index[here] = permuted(index[here], self.count, seed_of(self.seed, one))
        return index

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    @classmethod
    def from_plain(cls, data: Any) -> Position:
        """What :meth:`to_plain` gave.

        Raises
        ------
        CorruptError
            If it isn't that.
        """
        kinds = {"read": int, "count": int, "seed": int, "shuffle": bool}
        good = isinstance(data, Mapping) and {k: type(v) for k, v in data.items()} == kinds
        if not good:
            raise CorruptError(f"the data position is {data!r:.80}")
        return cls(**data)


class Samples:
    """The micro-batches of one rank: iterate it for arrays of sample indices.

    Parameters
    ----------
    count
        Samples of the data set.
    size
        Samples of a micro-batch.
    rank, world
        This rank, and how many there are.
    seed
        Of the permutations.
    shuffle
        Whether each epoch has an order of its own.

    Examples
    --------
    >>> first, second = Samples(10, 2, rank=0, world=2), Samples(10, 2, rank=1, world=2)
    >>> sorted(int(i) for s in (first, second) for i in next(iter(s)))  # doctest: +SKIP
    """

    def __init__(
        self,
        count: int,
        size: int,
        *,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if not 0 <= rank < world or size < 1:
            raise RequestError(f"micro-batches of {size} for rank {rank} of {world}")
        self.size, self.rank, self.world = size, rank, world
        self._start = Position(0, count, seed, shuffle)
        self._taken = 0

    @property
    def position(self) -> Position:
        """What all ranks have read, when each has taken as many micro-batches as this one."""
        return replace(self._start, read=self._start.read + self._taken * self.world * self.size)

    def resume(self, position: Position) -> None:
        """Go on behind a position.

        Raises
        ------
        RequestError
            If it is of other data.
        """
        if position.count != self._start.count:
            raise RequestError(
                f"the position is one in {position.count} samples, and there are "
                f"{self._start.count}",
                hint="a permutation of other data would leave samples out and repeat others",
            )
        self._start, self._taken = position, 0

    def __iter__(self) -> Iterator[Ints]:
        while True:
            yield self.take()

    def take(self) -> Ints:
        """The samples of the next micro-batch."""
        begin = self._start.read + (self._taken * self.world + self.rank) * self.size
        self._taken += 1
        return self._start.samples(begin, begin + self.size)
