from .atomic_file import PathLike
from .loaded_model import LoadedModel
from .pool import PrefixPool

ARGUMENTS: tuple[str, ...]

def save_pool(pool: PrefixPool, path: PathLike) -> None: ...
def load_pool(model: LoadedModel, path: PathLike, rebuild: bool) -> PrefixPool: ...
