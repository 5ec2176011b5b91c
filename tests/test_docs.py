"""The examples of the documentation run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from models import CONFIGS, random_tokens
from runtime import open_model

import tinyloop_py as tl

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = ("beam-search", "persistence", "resume")  # each goes on from `model` and `prompt`


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page(backend, page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.M | re.S)
    assert examples
    with open_model(backend, "shipped", "bf16", max_seq_len=256) as model:
        names = {"tl": tl, "model": model, "prompt": random_tokens(CONFIGS["shipped"], 40)}
        for example in examples:
            exec(compile(example, f"docs/{page}.md", "exec"), names)
