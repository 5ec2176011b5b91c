"""Builds the Cython extensions and the native libraries; options and search paths are in build_native.py."""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from Cython.Build import cythonize  # noqa: E402

DEBUG = os.environ.get("TINYLOOP_DEBUG", "0") not in ("", "0")
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "cdivision": True,
    "embedsignature": True,
    "binding": True,
}


def extensions() -> list[Extension]:
    flags = ["-O0", "-g"] if DEBUG else ["-O2"]
    return [
        Extension(f"tinyloop_py.{path.stem}", [str(path.relative_to(ROOT))], include_dirs=["include"], extra_compile_args=flags)
        for path in sorted((ROOT / "tinyloop_py").glob("*.pyx"))
    ]


setup(ext_modules=cythonize(extensions(), compiler_directives=DIRECTIVES))
