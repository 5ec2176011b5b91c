"""The file that a server's pool comes from and goes to, with what the pool itself does not know: which prefixes nobody asked for."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import FormatError
from ..pool import PrefixPool
from ..pool_report import PrefixEntry
from ..saved_pool import fill_pool, save_pool
from ..strict_json import load_object
from .folder_lock import locked_folder
from .prefix_id import prefix_id

if TYPE_CHECKING:
    from ..model import Model

logger = logging.getLogger("tinyloop.serve")
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
            with locked_folder(os.path.dirname(os.path.realpath(self.path))):
                if _identity(self.path) not in (None, self._loaded):
                    logger.error("the pool is not saved: %s has changed since the start, by another server perhaps", self.path)
                    return False
                with _private():
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


@contextlib.contextmanager
def _private() -> Iterator[None]:
    """New files are their owner's alone: a pool holds what its tenants wrote."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _identity(path: str) -> _Identity:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
