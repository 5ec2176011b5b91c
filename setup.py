"""Builds the Cython extensions and the native libraries; build_native.py has the options and the search for nvcc."""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from Cython.Build import cythonize  # noqa: E402

import build_native  # noqa: E402

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
    """One extension per .pyx file."""
    flags = ["-O0", "-g"] if DEBUG else ["-O2", "-fvisibility=hidden"]
    return [
        Extension(f"tinyloop_py.{path.stem}", [str(path.relative_to(ROOT))], include_dirs=["include"], extra_compile_args=flags)
        for path in sorted((ROOT / "tinyloop_py").glob("*.pyx"))
    ]


class BuildEverything(build_ext):
    """build_ext, and the native libraries beside the package."""

    def run(self) -> None:
        super().run()
        package = ROOT / "tinyloop_py" if self.inplace else Path(self.build_lib) / "tinyloop_py"
        try:
            build_native.build_all(Path(self.build_temp).resolve() / "native", package.resolve() / "lib")
        except build_native.BuildError as error:
            raise SystemExit(f"tinyloop: {error}") from None


setup(ext_modules=cythonize(extensions(), compiler_directives=DIRECTIVES, annotate=False), cmdclass={"build_ext": BuildEverything})
