"""The examples of the documentation run: the Python blocks of a page in order, in one namespace."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # ```python no-run: one that needs what is not here
PAGES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if BLOCK.search(p.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for number, block in enumerate(BLOCK.findall(page.read_text()), 1):
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    names["model"].close()


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
