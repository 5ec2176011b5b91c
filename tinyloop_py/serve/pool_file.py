"""The file that a server's pool comes from and goes to, with what the pool itself does not know: which prefixes nobody asked for."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import FormatError
from ..pool import PrefixPool
from ..pool_report import PrefixEntry
from ..saved_pool import fill_pool, save_pool
from ..strict_json import load_object
from .prefix_id import prefix_id

try:
    import fcntl
except ModuleNotFoundError:  # not a POSIX system: saves are not kept apart
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from ..model import Model

logger = logging.getLogger("tinyloop.serve")
LOCK_SECONDS = 60.0
_Identity = tuple[int, int, int] | None  # of a file's content; None where there is none


class PoolFile:
    """A pool's place on disk.

    What is there is never written over unless this run has loaded it: neither a file that could not be used nor one that
    another process has put there meanwhile.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.refused = False  # what is there could not be used: nothing is saved
        self._loaded: _Identity = None

    def load(self, model: Model, pool: PrefixPool) -> list[PrefixEntry]:
        """Fill an empty pool; the automatic ones of its entries, in the order of their use.

        Raises OSError, ValueError or RuntimeError for what cannot be used; the pool may then have a part of it.
        """
        self._loaded = _identity(self.path)
        if self._loaded is None:
            return []
        self.refused = True
        automatic = _parse(fill_pool(model, self.path, pool))
        entries = {prefix_id(e.namespace, e.loops, e.cache_window, e.tokens): e for e in pool.entries()}
        self.refused = False
        return [entries[name] for name in automatic if name in entries]  # a smaller pool than the one that was saved has not all of them

    def save(self, pool: PrefixPool, automatic: Sequence[str]) -> bool:
        """Write the pool, and the ids of its automatic entries; whether it was done. What is wrong goes to the log."""
        try:
            with _alone(os.path.dirname(os.path.realpath(self.path))):
                if _identity(self.path) != self._loaded:
                    logger.error("the pool is not saved: %s has changed since the start, by another server perhaps", self.path)
                    return False
                save_pool(pool, self.path, json.dumps({"automatic": list(automatic)}))
        except (OSError, ValueError, RuntimeError) as error:
            logger.error("the pool is not saved: %s", error)
            return False
        return True


def check_pool_path(path: str) -> None:
    """OSError where a pool could never be saved, so that it shows at the start and not at the end."""
    if not Path(path).resolve().parent.is_dir():
        raise FileNotFoundError(f"--pool-file {path}: its folder does not exist")
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"--pool-file {path}: expected a file, or a name that is free")


def _parse(notes: str | None) -> list[str]:
    """The ids of automatic entries; a pool that no server saved has none."""
    if notes is None:
        return []
    fields = load_object(notes, "the server's notes")
    automatic = fields.get("automatic")
    if set(fields) != {"automatic"} or not isinstance(automatic, list) or not all(isinstance(name, str) for name in automatic):
        raise FormatError("the server's notes are not a list of its automatic prefixes")
    return automatic


def _identity(path: str) -> _Identity:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def _alone(folder: str) -> Iterator[None]:
    """One server at a time saves into a folder, so that two that end together do not write over each other."""
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
