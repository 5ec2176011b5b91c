from .atomic_file import PathLike
from .pool import PrefixPool
from .prefix_cache import PrefixCache

class Restoring:
    def load_prefix_cache(self, path: PathLike, *, rebuild: bool = False) -> PrefixCache: ...
    def load_pool(self, path: PathLike, *, rebuild: bool = False) -> PrefixPool: ...
