"""A checksum put together from pieces is that of the whole, whatever the pieces and their order."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from reshard import digest
from reshard.digest import CRC32, CRC64NVME, Algorithm, Sums, rows_crc

ALGORITHMS = [CRC64NVME, CRC32]
both = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)

# A piece of a message: which one, where it begins, its bytes.
Piece = tuple[int, int, bytes]
# Lengths on both sides of the switch between the library's combine and numpy, and of a chunk.
LENGTHS = [0, 1, 2, digest._FEW - 1, digest._FEW, 300, digest._CHUNK, 2 * digest._CHUNK + 7]


def bitwise(algorithm: Algorithm, data: bytes) -> int:
    """The textbook's CRC, a bit at a time."""
    register = algorithm.ones
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (algorithm.polynomial if register & 1 else 0)
    return register ^ algorithm.ones


def random_crcs(algorithm: Algorithm, count: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.integers(0, algorithm.ones, count, dtype=np.uint64, endpoint=True)


def library_shift(algorithm: Algorithm, crcs: np.ndarray, lengths: np.ndarray) -> list[int]:
    pairs = zip(crcs.tolist(), lengths.tolist(), strict=True)
    return [algorithm.combine(crc, 0, length) for crc, length in pairs]


@st.composite
def messages_in_pieces(draw: st.DrawFn) -> tuple[list[bytes], list[Piece]]:
    """Some messages with runs of zeros in them, and a tiling of each, all in a random order."""
    part = st.one_of(st.binary(max_size=20), st.integers(0, 40).map(bytes))
    parts = draw(st.lists(st.lists(part, max_size=12), min_size=1, max_size=5))
    pieces: list[Piece] = []
    for message, tiles in enumerate(parts):
        start = 0
        for tile in tiles:
            pieces.append((message, start, tile))
            start += len(tile)
    return [b"".join(tiles) for tiles in parts], draw(st.permutations(pieces))


def add_pieces(sums: Sums, pieces: list[Piece]) -> None:
    """All pieces in at most two calls: those that are all zeros by their length alone."""
    crc_of = sums.algorithm.function()
    zeros = [piece for piece in pieces if not any(piece[2])]
    others = [piece for piece in pieces if any(piece[2])]
    message, start, nbytes = columns(others)
    sums.add(message, start, nbytes, np.array([crc_of(data) for _, _, data in others], np.uint64))
    sums.add_zeros(*columns(zeros))


def columns(pieces: list[Piece]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = np.array([(which, start, len(data)) for which, start, data in pieces], np.int64)
    message, start, nbytes = table.reshape(-1, 3).T
    return message, start, nbytes


def sizes_of(messages: list[bytes]) -> np.ndarray:
    return np.array([len(message) for message in messages], np.int64)


@pytest.mark.parametrize(
    ("algorithm", "check"), [(CRC64NVME, 0xAE8B14860A799888), (CRC32, 0xCBF43926)]
)
def test_check_values_of_the_standards(algorithm: Algorithm, check: int) -> None:
    assert algorithm.of(b"123456789") == check
    assert bitwise(algorithm, b"123456789") == check


@both
@given(data=st.binary(max_size=300))
def test_of_is_the_textbook_crc(algorithm: Algorithm, data: bytes) -> None:
    assert algorithm.of(data) == algorithm.function()(data) == bitwise(algorithm, data)
    assert algorithm.of(data[100:], algorithm.of(data[:100])) == algorithm.of(data)


@given(data=st.binary(max_size=300))
def test_crc32_is_that_of_zlib(data: bytes) -> None:
    assert CRC32.of(data) == zlib.crc32(data)


@both
@pytest.mark.parametrize(
    "view", [bytearray, memoryview, np.frombuffer, lambda data: np.frombuffer(data, "<f4")]
)
def test_any_contiguous_buffer_is_summed(
    algorithm: Algorithm, view: Callable[[bytes], bytes]
) -> None:
    data = bytes(range(64)) * 3
    assert algorithm.of(view(data)) == algorithm.of(data)


@both
def test_a_strided_view_is_refused_rather_than_summed_as_something_else(
    algorithm: Algorithm,
) -> None:
    with pytest.raises((ValueError, BufferError)):
        algorithm.of(np.zeros(8, np.uint8)[::2])


@both
@given(first=st.binary(max_size=50), second=st.binary(max_size=50))
def test_combine_joins_two_pieces(algorithm: Algorithm, first: bytes, second: bytes) -> None:
    joined = algorithm.combine(algorithm.of(first), algorithm.of(second), len(second))
    assert joined == algorithm.of(first + second)


@both
@pytest.mark.parametrize("nbytes", [0, 1, 2, 7, 64, 1000, 70_001])
def test_zeros_is_the_checksum_of_zeros(algorithm: Algorithm, nbytes: int) -> None:
    assert algorithm.zeros(nbytes) == algorithm.of(bytes(nbytes))


@both
@given(first=st.integers(0, 2**45), second=st.integers(0, 2**45))
def test_zeros_of_more_than_fits_in_memory_join_too(
    algorithm: Algorithm, first: int, second: int
) -> None:
    joined = algorithm.combine(algorithm.zeros(first), algorithm.zeros(second), second)
    assert joined == algorithm.zeros(first + second)


@both
@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("bits", [1, 9, 32, 45, 62])
def test_shift_is_the_combine_of_the_library(algorithm: Algorithm, count: int, bits: int) -> None:
    crcs = random_crcs(algorithm, count)
    lengths = np.random.default_rng(1).integers(0, 2**bits, count)
    shifted = algorithm.shift(crcs, lengths)
    assert shifted.dtype == np.uint64
    some = slice(None, None, max(1, count // 200))
    assert shifted[some].tolist() == library_shift(algorithm, crcs[some], lengths[some])


@both
@pytest.mark.parametrize("exponent", [0, 3, 4, 17, 40, 45, 61])
def test_shift_by_one_power_of_two_for_all(algorithm: Algorithm, exponent: int) -> None:
    crcs = random_crcs(algorithm, 500)
    lengths = np.full(500, 2**exponent)
    assert algorithm.shift(crcs, lengths).tolist() == library_shift(algorithm, crcs, lengths)


@both
def test_shift_leaves_its_arguments_alone(algorithm: Algorithm) -> None:
    crcs = random_crcs(algorithm, 500)
    lengths = np.arange(500) * 1000
    before = crcs.copy(), lengths.copy()
    for source in (crcs, crcs[::-1]), (lengths, lengths[::-1]):
        for array in source:
            array.flags.writeable = False
    assert algorithm.shift(crcs, np.zeros_like(lengths)) is not crcs
    backwards = algorithm.shift(crcs[::-1], lengths[::-1])
    assert backwards[::-1].tolist() == algorithm.shift(crcs, lengths).tolist()
    assert np.array_equal(crcs, before[0])
    assert np.array_equal(lengths, before[1])


def test_shift_takes_checksums_of_32_bits() -> None:
    crcs = random_crcs(CRC32, 500)
    lengths = np.arange(500)
    narrow = CRC32.shift(crcs.astype(np.uint32), lengths)
    assert narrow.tolist() == CRC32.shift(crcs, lengths).tolist()
    assert narrow.tolist() == [isal_zlib.crc32_combine(int(c), 0, n) for n, c in enumerate(crcs)]


@both
@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int32, np.uint64])
def test_shift_takes_lengths_of_any_integer_type(algorithm: Algorithm, kind: type) -> None:
    crcs = random_crcs(algorithm, 500)
    lengths = np.arange(500) % 128
    shifted = algorithm.shift(crcs, lengths.astype(kind))
    assert shifted.tolist() == library_shift(algorithm, crcs, lengths)


@pytest.mark.parametrize("count", [1, 1000])
def test_shift_refuses_what_is_no_checksum_or_length(count: int) -> None:
    with pytest.raises(AssertionError, match="not a crc32"):
        CRC32.shift(np.full(count, 2**32, np.uint64), np.zeros(count, np.int64))
    with pytest.raises(AssertionError, match="negative"):
        CRC32.shift(np.zeros(count, np.uint64), np.full(count, -1))


@both
@given(case=messages_in_pieces())
def test_sums_of_pieces_are_those_of_the_wholes(
    algorithm: Algorithm, case: tuple[list[bytes], list[Piece]]
) -> None:
    messages, pieces = case
    sums = Sums(algorithm, sizes_of(messages))
    add_pieces(sums, pieces)
    wanted = [algorithm.of(message) for message in messages]
    assert sums.values().tolist() == wanted
    assert [sums.value(message) for message in range(len(messages))] == wanted
    assert np.array_equal(sums.covered, sums.sizes)


@both
@given(case=messages_in_pieces())
def test_pieces_one_by_one_add_up_to_the_same(
    algorithm: Algorithm, case: tuple[list[bytes], list[Piece]]
) -> None:
    messages, pieces = case
    sums = Sums(algorithm, sizes_of(messages))
    for message, start, data in pieces:
        sums.add_one(message, start, len(data), algorithm.of(data))
    assert sums.values().tolist() == [algorithm.of(message) for message in messages]


@both
def test_many_pieces_at_once(algorithm: Algorithm) -> None:
    data = random.Random(0).randbytes(60_000)
    cuts = np.unique(np.random.default_rng(0).integers(0, len(data), 9000))
    starts, ends = np.append(0, cuts), np.append(cuts, len(data))
    crcs = [algorithm.of(data[start:end]) for start, end in zip(starts, ends, strict=True)]
    order = np.random.default_rng(1).permutation(starts.size)
    sums = Sums(algorithm, np.array([0, len(data)]))
    message = np.ones(starts.size, np.int64)
    sums.add(message, starts[order], (ends - starts)[order], np.array(crcs, np.uint64)[order])
    assert sums.values().tolist() == [0, algorithm.of(data)]


@both
def test_a_message_of_32_tebibytes(algorithm: Algorithm) -> None:
    """Bytes "head" at its start and "tail" at its end: by the combine rule and by Sums."""
    size, gap = 2**45, 2**45 - 8
    head, tail = algorithm.of(b"head"), algorithm.of(b"tail")
    wanted = algorithm.combine(algorithm.combine(head, algorithm.zeros(gap), gap), tail, 4)
    sums = Sums(algorithm, np.array([size]))
    sums.add_zeros(np.array([0]), np.array([4]), np.array([gap]))
    sums.add_one(0, size - 4, 4, tail)
    sums.add_one(0, 0, 4, head)
    assert sums.value(0) == wanted


@both
def test_empty_messages_and_empty_pieces(algorithm: Algorithm) -> None:
    nothing = np.zeros(0, np.int64)
    sums = Sums(algorithm, np.array([0, 1]))
    sums.add(nothing, nothing, nothing, np.zeros(0, np.uint64))
    sums.add_zeros(nothing, nothing, nothing)
    sums.add_one(0, 0, 0, algorithm.of(b""))
    sums.add_zeros(np.array([1, 1]), np.array([0, 1]), np.array([0, 0]))
    assert sums.covered.tolist() == [0, 0]
    sums.add_one(1, 0, 1, algorithm.of(b"x"))
    assert sums.values().tolist() == [algorithm.of(b""), algorithm.of(b"x")]
    assert Sums(algorithm, nothing).values().tolist() == []


@both
@pytest.mark.parametrize("shared", [True, False], ids=["one object", "merged"])
def test_threads_add_to_one_object_or_merge_theirs(algorithm: Algorithm, shared: bool) -> None:
    generator = random.Random(2)
    messages = [generator.randbytes(generator.randrange(4000)) for _ in range(20)]
    pieces = [
        (which, start, message[start : start + 97])
        for which, message in enumerate(messages)
        for start in range(0, len(message), 97)
    ]
    generator.shuffle(pieces)
    total = Sums(algorithm, sizes_of(messages))
    gate = threading.Barrier(8)

    def work(own: list[Piece]) -> None:
        gate.wait()
        for begin in range(0, len(own), 5):
            sums = total if shared else Sums(algorithm, sizes_of(messages))
            add_pieces(sums, own[begin : begin + 5])
            if not shared:
                total.merge(sums)

    threads = [threading.Thread(target=work, args=(pieces[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total.values().tolist() == [algorithm.of(message) for message in messages]


@both
def test_a_process_can_send_its_sums_to_another(algorithm: Algorithm) -> None:
    mine, theirs = (Sums(algorithm, np.array([9])) for _ in range(2))
    mine.add_one(0, 4, 5, algorithm.of(b"56789"))
    theirs.add_one(0, 0, 4, algorithm.of(b"1234"))
    mine.merge(pickle.loads(pickle.dumps(theirs)))
    assert mine.value(0) == algorithm.of(b"123456789")


def test_a_checksum_is_not_given_before_its_message_is_covered() -> None:
    sums = Sums(CRC64NVME, np.array([0, 9]))
    sums.add_one(1, 0, 4, CRC64NVME.of(b"1234"))
    assert sums.value(0) == 0
    with pytest.raises(AssertionError, match="message 1: 4 of 9"):
        sums.value(1)
    with pytest.raises(AssertionError, match="1 messages are not covered, such as 1"):
        sums.values()


@pytest.mark.parametrize(
    ("message", "start", "nbytes"), [(-1, 0, 1), (0, -1, 1), (0, 9, 1), (0, 3, -1), (0, 2, 8)]
)
def test_pieces_outside_a_message_are_refused(message: int, start: int, nbytes: int) -> None:
    sums = Sums(CRC32, np.array([9, 9]))
    one = np.array([message]), np.array([start]), np.array([nbytes])
    with pytest.raises(AssertionError):
        sums.add(*one, np.zeros(1, np.uint64))
    with pytest.raises(AssertionError):
        sums.add_zeros(*one)
    with pytest.raises(AssertionError):
        sums.add_one(message, start, nbytes, 0)
    assert sums.covered.tolist() == [0, 0]


def test_sums_of_other_messages_or_another_algorithm_do_not_merge() -> None:
    sums = Sums(CRC32, np.array([9]))
    for other in (Sums(CRC32, np.array([8])), Sums(CRC64NVME, np.array([9])), sums):
        with pytest.raises(AssertionError):
            sums.merge(other)


@both
@given(
    count=st.integers(0, 150), width=st.integers(0, 9), gap=st.integers(0, 9), tail=st.integers(0)
)
def test_rows_add_what_they_would_one_by_one(
    algorithm: Algorithm, count: int, width: int, gap: int, tail: int
) -> None:
    tail %= 2**40
    rows = np.random.default_rng(count).integers(0, 256, (count, width), dtype=np.uint8)
    wanted, pitch = 0, width + gap
    for row in range(count):
        after = (count - 1 - row) * pitch + gap + tail if row < count else 0
        wanted ^= algorithm.combine(algorithm.of(rows[row]), 0, after)
    assert rows_crc(algorithm, rows, count, width, pitch, gap + tail) == wanted


@both
@pytest.mark.parametrize("cut", [0, 1, 8, 30, 64])
def test_two_slices_of_columns_make_a_matrix(algorithm: Algorithm, cut: int) -> None:
    height, pitch = 333, 64
    matrix = np.random.default_rng(0).integers(0, 256, (height, pitch), dtype=np.uint8)
    left, right = matrix[:, :cut].tobytes(), matrix[:, cut:].tobytes()
    whole = rows_crc(algorithm, left, height, cut, pitch, pitch - cut)
    whole ^= rows_crc(algorithm, right, height, pitch - cut, pitch, 0)
    assert whole == algorithm.of(matrix)

    sums = Sums(algorithm, np.array([matrix.size]))
    ends = (height - 1) * pitch + cut, matrix.size
    for rows, end, width in zip((left, right), ends, (cut, pitch - cut), strict=True):
        crc = rows_crc(algorithm, rows, height, width, pitch, 0)
        if rows:
            sums.add_one(0, end - len(rows), len(rows), crc)
    assert sums.value(0) == algorithm.of(matrix)


def test_hex_keeps_leading_zeros() -> None:
    assert CRC64NVME.hex(0xAE8B14860A799888) == "ae8b14860a799888"
    assert CRC64NVME.hex(0xA) == "000000000000000a"
    assert CRC32.hex(0) == "00000000"
    with pytest.raises(AssertionError):
        CRC32.hex(2**32)


def test_an_algorithm_is_a_constant() -> None:
    with pytest.raises(FrozenInstanceError):
        CRC32.width = 64  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(CRC32)) == CRC32


def test_the_import_is_light() -> None:
    script = (
        "import sys, reshard.digest as digest\n"
        "names = {'awscrt', '_awscrt', 'isal', 'torch'}\n"
        "assert not names & set(sys.modules), names & set(sys.modules)\n"
        "digest.CRC32.of(b'a'), digest.CRC64NVME.of(b'a')\n"
        "assert {'awscrt', 'isal'} <= set(sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
