"""The documentation: its examples run (a page's Python blocks in order, in one namespace), its links lead somewhere, no public name lacks."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import tinyloop_py as tl

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # ```python no-run: one that needs what is not here
ALL_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [p for p in ALL_PAGES if BLOCK.search(p.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for number, block in enumerate(BLOCK.findall(page.read_text()), 1):
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    names["model"].close()


def anchors(page):
    """What GitHub calls the headings of a page."""
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)}


def test_links_lead_somewhere():
    n_anchors = 0
    for page in ALL_PAGES:
        for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link):
            led = page.parent / target if target else page
            assert led.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(led), f"{page.name}: {target}#{anchor}"
            n_anchors += bool(anchor)
    assert n_anchors


def test_readme_leads_to_every_page():
    linked = set(re.findall(r"\]\(([^)#\s]+)", (ROOT / "README.md").read_text()))
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= linked


def test_every_public_name_is_documented():
    """The names of the package, and the methods and properties of what its calls return, stand in some page."""
    text = "\n".join(page.read_text() for page in ALL_PAGES)
    names = {name: [] for name in tl.__all__}
    for kind in (tl.Model, tl.PrefixPool, tl.PrefixCache, tl.ResumeHandle, tl.TokenStream, tl.TextStream):
        names[kind.__name__] = [name for name in dir(kind) if not name.startswith("_") and name != "model_key"]
    assert "generate_with_pool" in names["Model"]
    for owner, members in names.items():
        missing = [name for name in (owner, *members) if not re.search(rf"\b{name}\b", text)]
        assert not missing, f"{owner}: {missing}"


def test_nothing_is_installed_from_the_project_that_has_our_name_on_pypi():
    places = [*ALL_PAGES, *(ROOT / "docs").rglob("*.service"), *(p for p in (ROOT / "tinyloop_py").rglob("*.py*") if p.suffix in (".py", ".pyx"))]
    assert len(places) > 50
    for page in places:
        assert not re.search(r"pip install (-\S+ )*[\"']?tinyloop\b", page.read_text()), page
