from typing import Any

import numpy as np
import numpy.typing as npt

from .engine import Engine
from .kv_prefix import KvPrefix
from .tensor_file import NUMPY_TYPES as NUMPY_TYPES

def export_kv(engine: Engine, prefix: KvPrefix) -> dict[int, tuple[int, npt.NDArray[Any], npt.NDArray[Any]]]: ...
def export_operands(engine: Engine, stage: int, page: int) -> npt.NDArray[np.uint8]: ...
def import_operands(engine: Engine, stage: int, page: int, operands: npt.NDArray[np.uint8]) -> None: ...
