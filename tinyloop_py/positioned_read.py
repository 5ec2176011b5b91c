"""Reading a file's bytes at a place, without a mapping: one that another process cuts short is an error, not a SIGBUS."""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import FormatError

CHUNK_NBYTES = 1 << 20  # summed while they are in the cache


def read_array(fd: int, dtype: npt.DTypeLike, n: int, offset: int, what: str, memory: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[Any]:
    """`n` elements from `offset` on, in `memory` where given; FormatError names `what` where the file ends before."""
    values = np.empty(n, dtype) if memory is None else memory[: n * np.dtype(dtype).itemsize].view(dtype)
    _fill(fd, values.view(np.uint8).data, offset, what)
    return values


def read_summed(fd: int, memory: npt.NDArray[np.uint8], offset: int, what: str) -> int:
    """Fills memory from `offset` on and gives the CRC-32 of it; errors as `read_array`."""
    view, crc = memory.data, 0
    for start in range(0, len(view), CHUNK_NBYTES):
        piece = view[start : start + CHUNK_NBYTES]
        _fill(fd, piece, offset + start, what)
        crc = zlib.crc32(piece, crc)
    return crc


def crc32_at(fd: int, nbytes: int, offset: int, what: str) -> int:
    """The CRC-32 of a stretch of the file, read piece by piece."""
    buffer = memoryview(bytearray(min(nbytes, CHUNK_NBYTES)))
    crc = 0
    for start in range(0, nbytes, CHUNK_NBYTES):
        piece = buffer[: min(CHUNK_NBYTES, nbytes - start)]
        _fill(fd, piece, offset + start, what)
        crc = zlib.crc32(piece, crc)
    return crc


def _fill(fd: int, view: memoryview, offset: int, what: str) -> None:
    while len(view):
        n = os.preadv(fd, [view], offset)
        if n == 0:
            raise FormatError(f"{what} ends early; the file was changed while it was read")
        view, offset = view[n:], offset + n
