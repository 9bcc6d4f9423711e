"""Does each row get what was made of it, in order, whether threads are used or not?"""

from __future__ import annotations

import threading
import time

import pytest

from reshard import side_by_side as module
from reshard.side_by_side import side_by_side


@pytest.mark.parametrize("portion", [1, 3, 100])
@pytest.mark.parametrize("waiting", [False, True])
def test_all_rows_in_their_order(portion: int, waiting: bool) -> None:
    used = set()

    def make(row: int) -> int:
        used.add(threading.current_thread())
        if waiting:
            time.sleep(module.PATIENCE)
        return row * row

    assert side_by_side(make, range(10), portion=portion) == [n * n for n in range(10)]
    assert (len(used) > 1) == (waiting and portion < 10)


def test_nothing_to_do() -> None:
    assert side_by_side(str, []) == []


@pytest.mark.parametrize("bad", [0, 9])
def test_an_error_of_any_row_is_raised(bad: int) -> None:
    def make(row: int) -> int:
        time.sleep(module.PATIENCE)
        if row == bad:
            raise ValueError(row)
        return row

    with pytest.raises(ValueError, match=str(bad)):
        side_by_side(make, range(10))
