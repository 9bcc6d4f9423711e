"""How is the checksum of a whole put together from checksums of its pieces, in any order?

A CRC is linear over GF(2). With both its initial value and its final mask all ones, as in
CRC-64/NVME and in the CRC-32 of zip, joining two pieces is ::

    crc(A || B) = shift(crc(A), len(B)) ^ crc(B)

where ``shift(c, n)`` multiplies ``c`` by x^(8n) modulo the polynomial. So when pieces tile a
message exactly, its CRC is the XOR of ``shift(crc(piece), bytes that follow the piece)``,
whatever the order in which they come: :class:`Sums` keeps one XOR a message. A run of n zeros has
the CRC ``shift(ones, n) ^ ones``, without a byte being read.

The bytes themselves are summed by libraries (awscrt, isal), which are imported on first use. Many
shifts at once are done here, with numpy, by table: see :func:`_digit_table`.

Sources: CRC-64/NVME is in the NVM Express NVM Command Set Specification (64b CRC), CRC-32 in
PKWARE's APPNOTE.TXT, 4.4.7; the combine rule is that of zlib's ``crc32_combine``.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing_extensions import Buffer as AnyBuffer

    # numpy's type stubs tell of an array's buffer only from Python 3.12 on.
    Buffer: TypeAlias = AnyBuffer | npt.NDArray[Any]

Integers: TypeAlias = npt.NDArray[np.integer[Any]]
Int64s: TypeAlias = npt.NDArray[np.int64]
Uint64s: TypeAlias = npt.NDArray[np.uint64]
Unsigneds: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

_DIGIT_BITS = 4  # 16 x 256 entries of 8 bytes: the table of one byte position fits a L1 cache
_CHUNK = 8192  # elements at once: 1 MiB of scratch; fewer are slower, more hardly faster
_FEW = 48  # below this, a call of the library for each element beats numpy's fixed costs


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A reflected CRC whose initial value and final mask are all ones.

    Use the two instances :data:`CRC64NVME` and :data:`CRC32`.

    Parameters
    ----------
    name
        ``"crc64nvme"`` or ``"crc32"``: also its name in a manifest.
    width
        Bits, a multiple of 8, at most 64.
    polynomial
        The bit-reversed polynomial without its leading term: the highest bit is x^0.
    """

    name: str
    width: int
    polynomial: int

    @property
    def ones(self) -> int:
        """All ones: the initial value, the final mask, and the largest checksum."""
        return (1 << self.width) - 1

    def of(self, data: Buffer, crc: int = 0) -> int:
        """Checksum of some bytes, or of what ``crc`` sums already followed by them.

        Releases the GIL while it reads, when there is more than a little to read.

        Parameters
        ----------
        data
            Any C-contiguous buffer. (An array of a type that the buffer protocol doesn't know,
            such as bfloat16, goes in as its ``uint8`` view.)
        crc
            Checksum of the bytes before; 0 is the checksum of none.
        """
        return _library(self.name)[0](data, crc)

    def function(self) -> Callable[..., int]:
        """The library's own function, for a hot loop."""
        return _library(self.name)[0]

    def combine(self, first: int, second: int, second_nbytes: int) -> int:
        """Checksum of two pieces one after the other, from theirs and the second's length."""
        return _library(self.name)[1](first, second, second_nbytes)

    def zeros(self, nbytes: int) -> int:
        """Checksum of ``nbytes`` zero bytes, in O(log nbytes)."""
        return self.combine(self.ones, 0, nbytes) ^ self.ones

    def shift(self, crcs: Unsigneds, nbytes_after: Integers) -> Uint64s:
        """Multiply each checksum by x^(8 * n): move a piece to n bytes before the end.

        Parameters
        ----------
        crcs
            Checksums, shape [n].
        nbytes_after
            How many bytes follow each piece, shape [n], none negative.

        Returns
        -------
        ndarray of uint64
            Shape [n], a new array.
        """
        after = np.asarray(nbytes_after, np.int64)
        assert crcs.ndim == 1
        assert crcs.shape == after.shape
        assert crcs.max(initial=0) <= self.ones, f"not a {self.name}"
        assert after.min(initial=0) >= 0, "a negative length"
        if crcs.size < _FEW:
            combine = _library(self.name)[1]
            pairs = zip(crcs.tolist(), after.tolist(), strict=True)
            return np.array([combine(crc, 0, nbytes) for crc, nbytes in pairs], dtype=np.uint64)
        shifted = np.empty(crcs.shape, dtype=np.uint64)
        # Made once: memory that is new to the process costs as much as the look-ups.
        scratch = np.empty((2, self.width // 8 * min(crcs.size, _CHUNK)), dtype=np.uint64)
        for begin in range(0, crcs.size, _CHUNK):
            part = slice(begin, begin + _CHUNK)
            shifted[part] = _shift_chunk(self, crcs[part], after[part], scratch)
        return shifted

    def hex(self, crc: int) -> str:
        """The checksum as lower-case hexadecimal digits, always ``width // 4`` of them."""
        assert 0 <= crc <= self.ones, f"not a {self.name}: {crc:#x}"
        return f"{crc:0{self.width // 4}x}"


CRC64NVME = Algorithm("crc64nvme", 64, 0x9A6C9329AC4BC9B5)
CRC32 = Algorithm("crc32", 32, 0xEDB88320)


class Sums:
    """Checksums of several messages of known lengths, from pieces that come in any order.

    Every piece is added once; a message's checksum is there when its pieces cover it. Only
    lengths are counted, so that the pieces tile the message (that none overlap) is for their
    giver to prove: if two overlap and the count still comes out right, then the checksum is wrong.

    Threads may add to one object, or each fill its own and merge them; processes may send theirs
    to one another by pickle.

    Parameters
    ----------
    algorithm
        Which checksum.
    sizes
        Lengths of the messages in bytes, shape [messages].

    Attributes
    ----------
    sizes, covered
        Length of each message and how much of it has been added, in bytes, int64 [messages].
    """

    __slots__ = ("_partial", "algorithm", "covered", "sizes")

    def __init__(self, algorithm: Algorithm, sizes: Integers) -> None:
        self.algorithm = algorithm
        self.sizes: Int64s = np.array(sizes, dtype=np.int64, ndmin=1)
        assert self.sizes.ndim == 1
        assert np.all(self.sizes >= 0)
        self.covered: Int64s = np.zeros_like(self.sizes)
        self._partial: Uint64s = np.zeros(self.sizes.shape, dtype=np.uint64)

    def add(self, message: Integers, start: Integers, nbytes: Integers, crcs: Unsigneds) -> None:
        """Add pieces: bytes [start, start + nbytes) of a message, with their checksums.

        Parameters
        ----------
        message
            Which message each piece belongs to, shape [pieces].
        start, nbytes
            Where each piece begins in its message, and its length, shape [pieces].
        crcs
            Checksum of each piece, shape [pieces].
        """
        message, nbytes = np.asarray(message, np.int64), np.asarray(nbytes, np.int64)
        assert message.min(initial=0) >= 0, "no such message"
        assert min(start.min(initial=0), nbytes.min(initial=0)) >= 0, "not an interval"
        after = self.sizes[message] - np.asarray(start, np.int64) - nbytes
        assert after.min(initial=0) >= 0, "a piece past the message's end"
        shifted = self.algorithm.shift(crcs, after)
        with _apply:
            np.bitwise_xor.at(self._partial, message, shifted)
            np.add.at(self.covered, message, nbytes)

    def add_one(self, message: int, start: int, nbytes: int, crc: int) -> None:
        """Add one piece: as :meth:`add`, without the fixed cost of arrays."""
        after = int(self.sizes[message]) - start - nbytes
        assert min(message, start, nbytes, after) >= 0, "not an interval of a message"
        shifted = np.uint64(self.algorithm.combine(crc, 0, after))
        with _apply:
            self._partial[message] ^= shifted
            self.covered[message] += nbytes

    def add_zeros(self, message: Integers, start: Integers, nbytes: Integers) -> None:
        """Add pieces that are known to be all zeros, such as padding; as :meth:`add`."""
        ones = np.full(nbytes.shape, self.algorithm.ones, dtype=np.uint64)
        self.add(message, start, nbytes, self.algorithm.shift(ones, nbytes) ^ ones)

    def merge(self, other: Sums) -> None:
        """Add all that another object over the same messages has."""
        assert other is not self, "every piece counts once"
        assert self.algorithm == other.algorithm
        assert np.array_equal(self.sizes, other.sizes)
        with _apply:
            self._partial ^= other._partial
            self.covered += other.covered

    def anew(self) -> Sums:
        """Another object over the same messages, with nothing in it."""
        other = Sums.__new__(Sums)
        other.algorithm, other.sizes = self.algorithm, self.sizes
        other.covered = np.zeros(self.sizes.shape, dtype=np.int64)
        other._partial = np.zeros(self.sizes.shape, dtype=np.uint64)
        return other

    def rows(self) -> tuple[Int64s, Int64s, Uint64s]:
        """What has been added: messages, bytes added to each, and what they add to its checksum.

        Messages without any are left out, so that few rows tell of a few pieces.
        """
        some = np.flatnonzero(self.covered)
        return some, self.covered[some], self._partial[some]

    def add_rows(self, message: Integers, nbytes: Integers, partial: Unsigneds) -> None:
        """Add what :meth:`rows` of another object over the same messages gave."""
        with _apply:
            self._partial[message] ^= partial
            self.covered[message] += nbytes

    def value(self, message: int) -> int:
        """Checksum of one message, which must be covered."""
        assert self.covered[message] == self.sizes[message], (
            f"message {message}: {self.covered[message]} of {self.sizes[message]} bytes added"
        )
        return int(self._partial[message])

    def values(self) -> Uint64s:
        """Checksums of all messages, which must be covered; uint64 [messages], a copy."""
        bad = np.flatnonzero(self.covered != self.sizes)
        assert bad.size == 0, f"{bad.size} messages are not covered, such as {bad[0]}"
        return self._partial.copy()


# One lock for all: it is held for a moment, two objects merged into each other can't deadlock,
# and an object without a lock of its own can be pickled.
_apply = threading.Lock()


def rows_crc(
    algorithm: Algorithm, rows: Buffer, count: int, width: int, pitch: int, nbytes_after: int
) -> int:
    """What rows that stand apart in a message add to its checksum, such as a slice of columns.

    The XOR over the rows of ``shift(crc(row), bytes that follow the row in the message)``.

    With ``nbytes_after=0`` it goes into :meth:`Sums.add` as one piece of ``count * width`` bytes
    that ends where the last row ends: only the end of a piece and its length count there.

    Parameters
    ----------
    rows
        The rows one after the other, C-contiguous, ``count * width`` bytes.
    count, width
        How many rows, and the bytes of each.
    pitch
        Bytes from the start of a row to the start of the next one in the message.
    nbytes_after
        Bytes of the message that follow the last row.
    """
    view = memoryview(cast("AnyBuffer", rows))
    assert count >= 0
    assert 0 <= width <= pitch
    assert view.nbytes == count * width
    if view.nbytes == 0:
        return 0
    crc_of = algorithm.function()
    if width == pitch:
        return algorithm.combine(crc_of(view), 0, nbytes_after)
    view = view.cast("B")
    found = [crc_of(view[begin : begin + width]) for begin in range(0, count * width, width)]
    return algorithm.combine(_join_evenly(algorithm, found, pitch), 0, nbytes_after)


def _join_evenly(algorithm: Algorithm, crcs: list[int], pitch: int) -> int:
    """XOR of the crcs, each shifted by ``pitch`` once for every one that follows it."""
    joined = np.array(crcs, dtype=np.uint64)
    while joined.size > 2 * _FEW:  # neighbours, two by two
        if joined.size % 2:
            joined = np.concatenate([np.zeros_like(joined[:1]), joined])  # adds nothing
        firsts, seconds = joined[0::2], joined[1::2]
        joined = algorithm.shift(firsts, np.full(firsts.shape, pitch)) ^ seconds
        pitch *= 2
    combine = _library(algorithm.name)[1]
    total = 0
    for crc in joined.tolist():
        total = combine(total, crc, pitch)
    return total


@functools.cache
def _library(name: str) -> tuple[Callable[..., int], Callable[[int, int, int], int]]:
    """The library's ``crc(data, previous)`` and ``combine(first, second, second_nbytes)``."""
    if name == CRC64NVME.name:
        checksums = importlib.import_module("awscrt.checksums")
        return checksums.crc64nvme, checksums.combine_crc64nvme
    assert name == CRC32.name
    isal_zlib = importlib.import_module("isal.isal_zlib")
    return isal_zlib.crc32, isal_zlib.crc32_combine


def _shift_chunk(
    algorithm: Algorithm, crcs: Unsigneds, nbytes_after: Int64s, scratch: Uint64s
) -> Uint64s:
    """Multiply by x^(8n) one digit of n after another, for a chunk of elements."""
    positions = algorithm.width // 8
    words = crcs.astype("<u8")
    octets = words.view(np.uint8).reshape(words.size, 8)[:, :positions].T
    bases = np.arange(positions, dtype=np.int64)[:, np.newaxis] << (_DIGIT_BITS + 8)
    index, looked_up = scratch[:, : positions * words.size].reshape(2, positions, words.size)
    index = index.view(np.int64)
    mask = (1 << _DIGIT_BITS) - 1
    used = int(np.bitwise_or.reduce(nbytes_after))
    for digit in range(-(-used.bit_length() // _DIGIT_BITS)):
        low = digit * _DIGIT_BITS
        if used >> low & mask == 0:
            continue
        np.copyto(index, octets)
        index |= (nbytes_after >> low & mask) << 8
        index |= bases
        # No index is out of range; any mode but "raise" lets numpy write straight into `out`.
        _digit_table(algorithm, digit).take(index, out=looked_up, mode="clip")
        np.bitwise_xor.reduce(looked_up, axis=0, out=words)
    return words


@functools.cache
def _digit_table(algorithm: Algorithm, digit: int) -> Uint64s:
    """Products of each byte of a checksum and of each value of a digit of a length.

    A product is the XOR of the products of the checksum's bytes, and x^(8n) is the product of
    x^(8 * value * 16^digit) over the digits of n: a few look-ups per digit multiply by any x^(8n).

    Returns
    -------
    ndarray of uint64
        Flat, of shape [width // 8 byte positions, 16 digit values, 256 byte values].
    """
    step = _byte_power(algorithm, digit * _DIGIT_BITS)
    powers = [1 << (algorithm.width - 1)]
    while len(powers) < 1 << _DIGIT_BITS:
        powers.append(_multiply(algorithm, powers[-1], step))
    product = np.array(powers, dtype=np.uint64)
    of_bit = np.empty((algorithm.width, product.size), dtype=np.uint64)
    one, polynomial = np.uint64(1), np.uint64(algorithm.polynomial)
    for bit in reversed(range(algorithm.width)):  # from x^0 on, each the last one times x
        of_bit[bit] = product
        product = (product >> one) ^ (product & one) * polynomial
    by_position = of_bit.reshape(algorithm.width // 8, 8, product.size, 1)
    table = np.zeros((algorithm.width // 8, product.size, 256), dtype=np.uint64)
    for bit in range(8):
        table[:, :, 1 << bit : 2 << bit] = table[:, :, : 1 << bit] ^ by_position[:, bit]
    return table.reshape(-1)


@functools.cache
def _byte_power(algorithm: Algorithm, doublings: int) -> int:
    """x^(8 * 2^doublings)."""
    if doublings == 0:
        return 1 << (algorithm.width - 1 - 8)
    root = _byte_power(algorithm, doublings - 1)
    return _multiply(algorithm, root, root)


def _multiply(algorithm: Algorithm, first: int, second: int) -> int:
    """Product of two polynomials modulo that of the algorithm; the highest bit is x^0."""
    product = 0
    for bit in reversed(range(algorithm.width)):
        if second >> bit & 1:
            product ^= first
        first = first >> 1 ^ (algorithm.polynomial if first & 1 else 0)
    return product
