from typing import Any

import numpy.typing as npt

from .engine import Engine
from .sequence import KvPrefix

def export_kv(engine: Engine, prefix: KvPrefix) -> dict[int, tuple[int, npt.NDArray[Any], npt.NDArray[Any]]]: ...
def export_page(engine: Engine, stage: int, page: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...
