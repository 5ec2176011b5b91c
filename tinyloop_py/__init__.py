"""tinyloop: looped language models inside a Python process, with a prefix pool whose hits never change an answer."""

from importlib.metadata import PackageNotFoundError as _NotFound
from importlib.metadata import version as _version
from pathlib import Path as _Path

try:
    from .config import ModelConfig
    from .errors import FormatError, OutOfMemoryError, PoolFullError
    from .model import Model
    from .model_writer import save_model
    from .pool import PrefixPool
    from .pool_report import PoolStats, PrefixEntry
    from .weights import WeightTensor
except ModuleNotFoundError as _error:
    if not (_error.name or "").startswith("tinyloop_py."):
        raise
    raise ImportError(
        f"{_Path(__file__).parent} lacks the compiled module {_error.name}: it is tinyloop's source folder, not an installed package. "
        "Start Python in another folder, or install in place with `pip install -e .`"
    ) from None

try:
    __version__ = _version("tinyloop")
except _NotFound:  # run from a source tree
    __version__ = "0+unknown"

__all__ = [
    "FormatError",
    "Model",
    "ModelConfig",
    "OutOfMemoryError",
    "PoolFullError",
    "PoolStats",
    "PrefixEntry",
    "PrefixPool",
    "WeightTensor",
    "demo_model",
    "save_model",
]


def demo_model() -> _Path:
    """Path of the looped model that comes with the package: small English stories and answers (docs/demo-model)."""
    return _Path(__file__).resolve().parent / "models" / "demo.tinyloop"
