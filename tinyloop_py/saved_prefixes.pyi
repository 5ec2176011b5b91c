from typing import Any

import numpy as np
import numpy.typing as npt

from .atomic_file import PathLike
from .kv_prefix import KvPrefix
from .loaded_model import LoadedModel
from .saved_contents import Contents

_Prefix = tuple[npt.NDArray[np.int32], KvPrefix]

def save_prefixes(
    model: LoadedModel | None,
    path: PathLike,
    kind: str,
    prefixes: list[_Prefix],
    places: list[dict[str, Any]],
    pool: dict[str, Any],
    notes: str | None = None,
) -> None: ...
def load_prefixes(model: LoadedModel, path: PathLike, kind: str, rebuild: bool) -> tuple[Contents, list[_Prefix], str | None]: ...
