"""The examples of the documentation run: the Python blocks of a page in order, in one namespace, on a small random model."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from models import CONFIGS, random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import tinyloop_py as tl

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = ("streaming.md", "prefix-cache.md", "batch.md", "sampling.md")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A model file with a tokenizer that has a token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("docs") / "demo.tinyloop"
    tl.save_model(path, CONFIGS["shipped"], random_model(CONFIGS["shipped"]), tokenizer)
    return path


@pytest.mark.parametrize("page", PAGES)
def test_examples(page, demo, monkeypatch):
    monkeypatch.setattr(tl, "demo_model", lambda: demo)
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    names = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for number, block in enumerate(blocks, 1):
            exec(compile(block, f"{page}, block {number}", "exec"), names)
    names["model"].close()
