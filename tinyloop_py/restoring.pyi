from os import PathLike

from .pool import PrefixPool
from .prefix_cache import PrefixCache

class Restoring:
    def load_prefix_cache(self, path: str | PathLike[str], *, rebuild: bool = False) -> PrefixCache: ...
    def load_pool(self, path: str | PathLike[str], *, rebuild: bool = False) -> PrefixPool: ...
