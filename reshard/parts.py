"""What does each file of a checkpoint hold: which rows of which stores?

A row of a store is a chunk, or an entry where each is an extent of its own. The rows of all
stores stand in columns sorted by their files, so that a file's are found by two searches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from reshard.ruler import Ints, ints
from reshard.store import Store


class Parts:
    """The rows of some stores, by file.

    Parameters
    ----------
    stores
        The stores.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self._rows = [np.argsort(store.files, kind="stable") for store in stores]
        empty = np.zeros((5, 0), np.int64)
        found = [
            _parts(index, rows, store.files[rows])
            for index, (store, rows) in enumerate(zip(stores, self._rows, strict=True))
        ]
        columns = np.concatenate([empty, *found], axis=1)
        order = np.argsort(columns[0], kind="stable")
        self._file, self._store, self._low, self._high, self._first = columns[:, order]

    def of(self, file: int) -> Iterator[tuple[int, Ints]]:
        """The stores that have rows in a file: index of the store, and the rows."""
        low, high = np.searchsorted(self._file, (file, file + 1)).tolist()
        for part in range(low, high):
            store = int(self._store[part])
            yield store, self._rows[store][self._low[part] : self._high[part]]

    def ordered(self, kind: Sequence[int], files: int) -> list[int]:
        """All files, those that hold the same row of stores of one kind after each other.

        Parameters
        ----------
        kind
            The kind of each store.
        files
            How many files there are.
        """
        file, heads = np.unique(self._file, return_index=True)
        first = np.zeros((2, files), np.int64)
        first[:, file] = self._first[heads], ints(kind)[self._store[heads]]
        order: list[int] = np.lexsort(first).tolist()
        return order


def _parts(store: int, rows: Ints, files: Ints) -> Ints:
    """Columns of a store whose rows are sorted by file.

    They are the file, the store, the first and the end of the sorted rows, and the first row.
    """
    low = np.flatnonzero(np.diff(files, prepend=-1))
    high = np.flatnonzero(np.diff(files, append=-1)) + 1
    return ints([files[low], np.full_like(low, store), low, high, rows[low]])
