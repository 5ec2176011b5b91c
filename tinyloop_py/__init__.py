"""tinyloop: looped language models inside a Python process, with a prefix pool whose hits never change an answer."""

import sys as _sys
from importlib.machinery import PathFinder as _PathFinder
from importlib.metadata import PackageNotFoundError as _NotFound
from importlib.metadata import version as _version
from pathlib import Path as _Path

_folder = _Path(__file__).resolve().parent
if not any(_folder.glob("engine.*.so")):
    # Python started in a clone finds the source folder first, which has nothing compiled: go on with the installed package.
    _spec = _PathFinder.find_spec("tinyloop_py", [p for p in _sys.path if _Path(p).resolve() != _folder.parent])
    __path__ = list((_spec and _spec.submodule_search_locations) or __path__)

try:
    from .beam import Beam
    from .config import ModelConfig
    from .errors import FormatError, OutOfMemoryError, PoolFullError
    from .model import Model
    from .model_writer import save_model
    from .pool import PrefixPool
    from .pool_report import PoolStats, PrefixEntry
    from .prefix_cache import PrefixCache
    from .resume_handle import ResumeHandle
    from .resume_report import ResumeStats
    from .text_stream import TextStream
    from .token_logprobs import TokenLogprobs
    from .token_stream import TokenStream
    from .weights import WeightTensor
except ModuleNotFoundError as _error:
    if not (_error.name or "").startswith("tinyloop_py."):
        raise
    raise ImportError(
        f"{_folder} lacks the compiled module {_error.name}: it is tinyloop's source folder, not an installed package. "
        "Start Python in another folder, or install in place with `pip install -e .`"
    ) from None

try:
    __version__ = _version("tinyloop")
except _NotFound:  # run from a source tree
    __version__ = "0+unknown"

__all__ = [
    "Beam",
    "FormatError",
    "Model",
    "ModelConfig",
    "OutOfMemoryError",
    "PoolFullError",
    "PoolStats",
    "PrefixCache",
    "PrefixEntry",
    "PrefixPool",
    "ResumeHandle",
    "ResumeStats",
    "TextStream",
    "TokenLogprobs",
    "TokenStream",
    "WeightTensor",
    "demo_model",
    "save_model",
]


def demo_model() -> _Path:
    """Path of the looped model that comes with the package: small English stories and answers (docs/demo-model)."""
    return _Path(__path__[0]) / "models" / "demo.tinyloop"
