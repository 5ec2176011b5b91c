"""PrefixCache: the KV of one prefix, for any number of calls that begin with it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .atomic_file import PathLike
from .saved_prefixes import save_prefixes

if TYPE_CHECKING:
    from typing_extensions import Self

    from .kv_prefix import KvPrefix
    from .loaded_model import LoadedModel


class PrefixCache:
    """The KV of `tokens` at one depth and window; made by `Model.build_prefix_cache`.

    A context manager. Calls share its pages, so it costs a call no copy, and closing it while one runs is safe: pages go when
    their last holder lets go. It serves the model that built it, until that is closed.
    """

    def __init__(self, model: LoadedModel, prefix: KvPrefix, tokens: npt.NDArray[np.int32]) -> None:
        self._model = model
        self._prefix: KvPrefix | None = prefix
        self._tokens = tokens
        self._loops = prefix.loops
        self._cache_window = prefix.window

    def __len__(self) -> int:
        return len(self.tokens)

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.nbytes:,} bytes"
        return f"<tinyloop.PrefixCache {len(self)} tokens, loops={self.loops}, cache_window={self.cache_window}, {state}>"

    def close(self) -> None:
        """Let go of the pages; those that no one else holds are free at once. Idempotent."""
        self._prefix = None

    def save(self, path: PathLike) -> None:
        """Write it into a file that `Model.load_prefix_cache` takes back, in another process too.

        The file takes its name when it is complete. RuntimeError where the cache or its model is closed.
        """
        prefix = self._open_for(self._model)
        save_prefixes(self._model, path, "prefix cache", [(self.tokens, prefix)], [{}], {})

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Its token ids, int32 (n_tokens,), read-only."""
        return self._tokens

    @property
    def loops(self) -> int:
        """The depth that it was run at, and serves."""
        return self._loops

    @property
    def cache_window(self) -> int:
        """The window that it was run with, and serves; 0 for none."""
        return self._cache_window

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its model was."""
        return self._prefix is None or self._model.closed

    @property
    def nbytes(self) -> int:
        """Bytes of its pages and hidden rows, shared ones included; 0 once closed."""
        return 0 if self._prefix is None or self.closed else self._prefix.nbytes

    def _open_for(self, model: LoadedModel) -> KvPrefix:
        """The KV for a call of `model`."""
        if self._prefix is None:
            raise RuntimeError("the prefix cache is closed; build it again with build_prefix_cache")
        if self._model is not model:
            raise ValueError(
                f"the prefix cache was built by another model ({self._model!r}) than this one ({model!r}); "
                "each model, KV mode and reopened file needs its own: build it with this model's build_prefix_cache"
            )
        return self._prefix
