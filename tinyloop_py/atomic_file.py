"""AtomicFile: a file that takes its name only when it is complete."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import shutil
import stat
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

PathLike = str | bytes | os.PathLike[str] | os.PathLike[bytes]
_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a character device", stat.S_IFBLK: "a block device", stat.S_IFSOCK: "a socket",
}  # fmt: skip


def file_kind(mode: int) -> str | None:
    """What a file of this `st_mode` is, None for a regular one."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no regular file")


def check_replaceable(path: PathLike) -> None:
    """OSError where `path` is there and is no regular file: a new file that took its name would remove a FIFO or a device."""
    try:
        kind = file_kind(os.stat(path).st_mode)
    except FileNotFoundError:
        return
    if kind is not None:
        code = errno.EISDIR if kind == "a folder" else errno.EINVAL
        raise OSError(code, f"cannot write a file over {kind}; name a new or a regular file", os.fsdecode(path))


class AtomicFile:
    """A new file of a known size, written anywhere in any order, that replaces `path` on `commit`.

    It lies beside `path` without a name (where the file system has such files, else under a temporary one), with its space
    reserved at once, so that a full disk shows before any work is done. Until `commit` returns, what `path` held stays as it
    was; `abort`, leaving the ``with`` block without `commit`, or a killed process removes the new file.

    Raises
    ------
    FileNotFoundError, IsADirectoryError, OSError
        The folder does not exist, `path` is a folder, FIFO, device or socket, or the space does not suffice (``errno.ENOSPC``).
    """

    def __init__(self, path: PathLike, nbytes: int) -> None:
        self.path = os.fsdecode(path)
        self._target = os.path.realpath(self.path)  # a link keeps pointing where it does
        folder, name = os.path.split(self._target)
        if not os.path.isdir(folder):
            raise FileNotFoundError(errno.ENOENT, "the folder to write into does not exist", os.path.dirname(self.path) or folder)
        check_replaceable(self.path)
        self._temporary = os.path.join(folder, f".{name}.{secrets.token_hex(6)}.tmp")
        self._file: io.FileIO | None = None  # it owns the descriptor: closed once, whatever comes in between
        try:
            self._file = _open_nameless(folder)
            self._nameless = self._file is not None
            if self._file is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
                self._file = io.FileIO(os.open(self._temporary, flags, 0o666), "r+b")
            if os.path.exists(self._target):  # no reader more than before
                os.fchmod(self._fd, stat.S_IMODE(os.stat(self._target).st_mode))
            _reserve(self._fd, nbytes)
        except OSError as error:
            self.abort()
            if error.errno != errno.ENOSPC:
                raise
            free = shutil.disk_usage(folder).free
            raise OSError(errno.ENOSPC, f"not enough space: {nbytes} bytes are needed, {free} are free", self.path) from None
        except BaseException:
            self.abort()
            raise

    @property
    def _fd(self) -> int:
        assert self._file is not None
        return self._file.fileno()

    def write(self, offset: int, data: bytes | npt.NDArray[Any]) -> None:
        """Put `data` at `offset`."""
        view = memoryview(data) if isinstance(data, bytes) else np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        while len(view):
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def commit(self) -> None:
        """Bring the file to disk and give it its name."""
        os.fsync(self._fd)
        if self._nameless:
            os.link(_by_fd(self._fd), self._temporary, src_dir_fd=self._fd)  # with a folder, os.link follows the link that the path is
        check_replaceable(self._target)  # hours may have passed since the first check
        os.replace(self._temporary, self._target)
        self.abort()
        folder = os.open(os.path.dirname(self._target), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def abort(self) -> None:
        """Remove the temporary file; nothing happens after `commit`."""
        if self._file is not None:
            self._file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)

    def __del__(self) -> None:
        """One that nobody came to hold, as after an interrupt."""
        if hasattr(self, "_file"):
            self.abort()

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()


def _open_nameless(folder: str) -> io.FileIO | None:
    """A file that is gone when it is closed unless it gets a name; None where there is no such thing."""
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        file = io.FileIO(os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o666), "r+b")
    except OSError:
        return None
    if os.path.exists(_by_fd(file.fileno())):
        return file
    file.close()  # without /proc nothing could give it a name
    return None


def _by_fd(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


def _reserve(fd: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            if nbytes:
                os.posix_fallocate(fd, 0, nbytes)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    os.ftruncate(fd, nbytes)
