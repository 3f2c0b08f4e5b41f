"""Reading a box out of an array that lies in a file, touching only the bytes that the box needs.

Reads go straight into the result (`preadv`), so a file never becomes part of the process's memory:
what a host holds while it loads is the slices that it asked for and nothing else.
"""

import errno
import math
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from jaxgen_checkpoints.errors import CheckpointError, RefusedInput

# Rows up to this size are read whole even if only a part of each is wanted: a system call per piece
# would cost more than the bytes, which the kernel reads ahead anyway.
_SMALL_ROW = 16 * 1024
_SCRATCH = 4 * 1024 * 1024
# Linux moves at most 2 GiB - 4 KiB in one call.
_LARGEST_READ = 1 << 30


def regular_file_size(path: Path, *, error: type[RefusedInput] = CheckpointError) -> int:
    """Size in bytes of the regular file at `path` (links are followed).

    Raises `error` if it is missing, a folder, a link to itself, a pipe or device, or unreadable.
    """
    try:
        status = path.stat()
    except OSError as fault:
        raise error(f"{path}: {_reason(fault)}") from fault
    except ValueError as fault:  # a NUL character in the name
        raise error(f"{path!s:.200}: not a file name ({fault})") from fault
    if stat.S_ISDIR(status.st_mode):
        raise error(f"{path}: expected a file, got a folder")
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{path}: expected a regular file, got a pipe, socket or device")
    if not os.access(path, os.R_OK):
        raise error(f"{path}: may not be read; check its permissions")
    return status.st_size


def read_range(path: Path, begin: int, count: int) -> bytes:
    """The `count` bytes of the file from `begin` on; `CheckpointError` if it holds fewer."""
    buffer = np.empty(count, np.uint8)
    with _opened(path) as file:
        _read_into(file, path, buffer, begin)
    return buffer.tobytes()


def read_box(
    path: Path,
    begin: int,
    shape: tuple[int, ...],
    dtype: np.dtype,
    bounds: tuple[tuple[int, int], ...],
) -> np.ndarray:
    """Read `array[start:stop, ...]` of the C-ordered array of `shape` at byte `begin`.

    `bounds` holds one (start, stop) per axis, within the shape. Returns a fresh array of
    shape [stop - start per axis]. Raises `CheckpointError` if the file ends before the box does.
    """
    result = np.empty(tuple(stop - start for start, stop in bounds), dtype)
    if result.size:
        with _opened(path) as file:
            _fill(file, path, result, begin, shape, bounds)
    return result


def _fill(
    file: int,
    path: Path,
    result: np.ndarray,
    begin: int,
    shape: tuple[int, ...],
    bounds: tuple[tuple[int, int], ...],
) -> None:
    """Fill the C-contiguous `result` with the box; calls itself per index of the leading axis."""
    row = result.dtype.itemsize * math.prod(shape[1:])
    if all(bound == (0, size) for bound, size in zip(bounds[1:], shape[1:], strict=True)):
        _read_into(file, path, result, begin + (bounds[0][0] * row if bounds else 0))
        return
    first, last = bounds[0]
    if row > _SMALL_ROW:
        for i in range(first, last):
            _fill(file, path, result[i - first], begin + i * row, shape[1:], bounds[1:])
        return
    inner = tuple(slice(start, stop) for start, stop in bounds[1:])
    step = max(1, _SCRATCH // row)
    for i in range(first, last, step):
        rows = np.empty((min(step, last - i), *shape[1:]), result.dtype)
        _read_into(file, path, rows, begin + i * row)
        result[i - first : i - first + len(rows)] = rows[:, *inner]


def _read_into(file: int, path: Path, target: np.ndarray, begin: int) -> None:
    """Fill the C-contiguous `target` with the bytes of the file from `begin` on."""
    view = memoryview(target.reshape(-1).view(np.uint8))
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done : done + _LARGEST_READ]], begin + done)
        if count == 0:
            raise CheckpointError(
                f"{path}: expected {len(view)} bytes from byte {begin} on, got {done}: the file "
                "became shorter while it was being read"
            )
        done += count


@contextmanager
def _opened(path: Path) -> Generator[int]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as fault:
        raise CheckpointError(f"{path}: {_reason(fault)}") from fault
    try:
        yield file
    except OSError as fault:
        raise CheckpointError(f"{path}: {_reason(fault)}") from fault
    finally:
        os.close(file)


def _reason(fault: OSError) -> str:
    match fault.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return "no such file"
        case errno.ELOOP:
            return "a symbolic link that leads to itself"
        case errno.EACCES | errno.EPERM:
            return "may not be read; check its permissions"
    return f"cannot be read ({fault.strerror or fault})"
