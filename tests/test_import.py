"""`import tinyloop_py`: what it needs, what it leaves alone, and what it says where something is missing."""

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from models import CONFIGS, random_model

import tinyloop_py as tl

PACKAGE = Path(tl.__file__).parent
OPTIONAL = ("torch", "transformers", "gguf", "rich", "safetensors", "tokenizers", "cuda")


def python(code: str, folder: Path, *options: str, **variables: object) -> str:
    """Standard output of a program in a fresh process that runs in `folder`."""
    env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, env=env, cwd=folder, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "m.tinyloop"
    tl.save_model(path, CONFIGS["loop_bare"], random_model(CONFIGS["loop_bare"]))
    return path


@pytest.fixture
def copy(tmp_path):
    """A copy of the package in a folder of its own, to take files out of."""
    shutil.copytree(PACKAGE, tmp_path / "copy" / "tinyloop_py", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "copy"


def test_nothing_heavy_is_imported(tmp_path):
    loaded = python(f"import sys, tinyloop_py; print(*[n for n in {OPTIONAL} if n in sys.modules])", tmp_path, PYTHONPATH=PACKAGE.parent)
    assert loaded.split() == []


def test_optional_packages_may_be_missing(tmp_path, model_file):
    """A finder that refuses them stands for an environment without them."""
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
import tinyloop_py as tl
with tl.Model({str(model_file)!r}, 32) as model:
    print(len(model.generate([1, 2], 3, stop_tokens=())), model.tokenizer)
"""
    assert python(code, tmp_path, PYTHONPATH=PACKAGE.parent) == "5 None\n"


def test_no_gpu_and_no_driver_are_needed(tmp_path, model_file):
    code = f"import tinyloop_py as tl; print(tl.Model({str(model_file)!r}, 32).device)"
    assert python(code, tmp_path, PYTHONPATH=PACKAGE.parent, CUDA_VISIBLE_DEVICES="") == "cpu\n"


def test_without_native_libraries_a_model_says_how_to_build_them(copy, model_file):
    shutil.rmtree(copy / "tinyloop_py" / "lib")
    code = f"""
import tinyloop_py as tl
assert tl.__file__.startswith({str(copy)!r}), tl.__file__
pool = tl.PrefixPool()
for device in ("auto", "cpu", "cuda"):
    try:
        tl.Model({str(model_file)!r}, 32, device=device)
    except RuntimeError as error:
        print(error)
"""
    lines = python(code, copy).splitlines()
    assert len(lines) == 3
    for line in lines:
        assert "is missing from" in line and "python -m tinyloop_py" in line and "reinstall" in line
    assert "libtinyloop_cpu.so" in lines[0] and "libtinyloop.so" in lines[2]


def test_a_source_folder_says_that_it_is_one(copy):
    for module in (copy / "tinyloop_py").glob("*.so"):
        module.unlink()
    code = "try:\n    import tinyloop_py\nexcept ImportError as error:\n    print(error)"
    text = python(code, copy, "-S", PYTHONPATH="")  # -S: where tinyloop is not installed
    assert "source folder" in text and "pip install -e ." in text and "tinyloop_py." in text


def test_in_a_source_folder_the_installed_package_is_used(copy):
    """README's commands and `python -m tinyloop_py` are typed in a clone, whose folder Python looks at first."""
    for module in (copy / "tinyloop_py").glob("*.so"):
        module.unlink()
    code = "import tinyloop_py as tl, tinyloop_py.native as n; print(n.__file__, tl.PrefixPool().size())"
    assert python(code, copy, PYTHONPATH=PACKAGE.parent) == f"{PACKAGE / 'native.py'} 0\n"


def test_public_names():
    assert sorted(tl.__all__) == tl.__all__
    for name in tl.__all__:
        assert getattr(tl, name) is not None
    assert isinstance(tl.__version__, str)


def test_help_shows_a_signature_once_and_every_method_its_text():
    """Cython's embedded signatures stood in the docstrings, below those that Python shows by itself."""
    methods = {}
    for kind in (tl.Model, tl.PrefixPool, tl.PrefixCache, tl.ResumeHandle, tl.TokenStream, tl.TextStream):
        assert kind.__doc__ and "--" not in kind.__doc__.splitlines()
        methods |= {
            f"{kind.__name__}.{name}": getattr(kind, name) for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))
        }
    assert {"Model.generate", "PrefixPool.match", "ResumeHandle.extend"} <= set(methods)
    for name, method in methods.items():
        assert method.__doc__ and "(self" not in method.__doc__ and " self" not in method.__doc__.splitlines()[0], name
        assert "self" in inspect.signature(method).parameters, name


def test_installed_files():
    """What a user's type checker, other Cython code and the runtime look for lies in the package."""
    assert (PACKAGE / "py.typed").is_file()
    for module in PACKAGE.glob("*.pxd"):
        if module.stem != "abi":
            assert (PACKAGE / f"{module.stem}.pyi").is_file(), module.stem
    assert (PACKAGE / "lib" / "libtinyloop_cpu.so").is_file() and (PACKAGE / "lib" / "build.json").is_file()


def test_threads_and_subprocesses_see_numpy_as_it_was(tmp_path):
    """Importing changes no global state: float modes, warnings, error handling."""
    before = np.geterr()
    code = "import numpy as np; a = np.geterr(); import tinyloop_py; assert np.geterr() == a; print(np.float32(1e-38) * np.float32(0.01) > 0)"
    assert python(code, tmp_path, PYTHONPATH=PACKAGE.parent) == "True\n"
    assert np.geterr() == before
