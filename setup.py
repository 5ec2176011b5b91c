"""Builds the Cython extensions and the native libraries; build_native.py has the options and the search for nvcc."""

import json
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from Cython.Build import cythonize  # noqa: E402

import build_native  # noqa: E402

DEBUG = build_native.is_on("TINYLOOP_DEBUG")
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "cdivision": True,
    "binding": True,  # functions show their signatures by themselves: none is written into docstrings
}


def extensions() -> list[Extension]:
    """One extension per .pyx file; the generated C of a debug build lies apart, since only the directives differ."""
    flags = ["-O1", "-g"] if DEBUG else ["-O2", "-g0", "-fvisibility=hidden"]  # Python's own flags have -g: most of a module's size
    modules = [
        Extension(
            f"tinyloop_py.{path.stem}", [str(path.relative_to(ROOT))],
            include_dirs=["include"], depends=["include/tinyloop.h"], extra_compile_args=[*flags, "-Wno-discarded-qualifiers"],
        )
        for path in sorted((ROOT / "tinyloop_py").glob("*.pyx"))
    ]  # fmt: skip
    build = "build/cython-debug" if DEBUG else "build/cython"
    with build_native.same_files_keep_their_time(ROOT / build):
        return cythonize(modules, build_dir=build, compiler_directives=DIRECTIVES, nthreads=build_native.n_cores())


class BuildEverything(build_ext):
    """build_ext, and the native libraries beside the package."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or build_native.n_cores()

    def run(self) -> None:
        package = (ROOT if self.inplace else Path(self.build_lib).resolve()) / "tinyloop_py"
        self.force = self.force or self._was_debug(package) != DEBUG
        super().run()
        try:
            build_native.build_all(lib=package / "lib")
        except build_native.BuildError as error:
            raise SystemExit(f"tinyloop: {error}") from None

    @staticmethod
    def _was_debug(package: Path) -> bool:
        """Whether what is in the package was built with bounds checks; its time alone would not tell."""
        try:
            return bool(json.loads((package / "lib" / build_native.BUILD_INFO).read_text())["debug"])
        except (OSError, ValueError, KeyError):
            return False


if __name__ == "__main__":  # processes that cythonize starts may read this file
    setup(ext_modules=extensions(), cmdclass={"build_ext": BuildEverything})
