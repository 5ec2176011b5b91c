"""A folder whose files one process at a time replaces."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

try:
    import fcntl
except ModuleNotFoundError:  # not a POSIX system: writers are not kept apart
    fcntl = None  # type: ignore[assignment]

LOCK_SECONDS = 60.0


@contextlib.contextmanager
def locked_folder(folder: str) -> Iterator[None]:
    """One of those who ask for it at a time, so that two that read a file and replace it do not undo each other's work."""
    if fcntl is None:
        yield
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(f"another process has kept {folder} locked for {LOCK_SECONDS:g} s") from None
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(fd)
