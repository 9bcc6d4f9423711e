"""What was made lately is made once, also where several threads ask for it, and then forgotten."""

from __future__ import annotations

import threading

import pytest

from reshard.recent import Recent


def test_the_last_few_are_kept():
    recent, made = Recent(2), []

    def get(key: str) -> str:
        return recent.get(key, lambda: made.append(key) or key)

    for key in "aabab":
        assert get(key) == key
    assert made == ["a", "b"]
    get("c")  # in the place of "a", which was asked for before "b"
    get("b")
    assert made == ["a", "b", "c"]
    get("a")
    assert made == ["a", "b", "c", "a"]


def test_threads_wait_for_what_is_being_made():
    recent, made, ready = Recent(1), [], threading.Barrier(4)

    def make() -> int:
        made.append(threading.get_ident())
        return len(made)

    def work(found: list[int]) -> None:
        ready.wait()
        found.append(recent.get("key", make))

    found: list[int] = []
    threads = [threading.Thread(target=work, args=(found,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found, len(made)) == ([1] * 4, 1)


def test_what_fails_is_made_again():
    recent = Recent(1)
    with pytest.raises(ZeroDivisionError):
        recent.get("key", lambda: 1 / 0)
    assert recent.get("key", lambda: 1) == 1
