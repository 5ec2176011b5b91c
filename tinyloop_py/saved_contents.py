"""What a file of saved prefixes says of itself, beside its arrays: entries, and the spans of pages that they share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import FormatError
from .strict_json import is_int, load_object, shown

FORMAT = "tinyloop-kv"
VERSION = "1"
PAGE = 16
_MOST = 2**31 - 1


@dataclass(frozen=True)
class SavedSpan:
    """A run of pages: of each stage listed, those from an index on are in the file (a window lets early ones go)."""

    first_page: int
    n_pages: int
    n_stages: int
    first_held: dict[int, int]  # stage -> index inside the span


@dataclass(frozen=True)
class SavedEntry:
    """A prefix: its place in a pool, and the spans that hold its pages."""

    n_tokens: int
    loops: int
    cache_window: int
    spans: tuple[int, ...]  # of full pages, in order
    tail: int | None  # of the partly filled page
    namespace: str | None = None
    pinned: bool = False
    hits: int = 0
    serial: int = 0  # order of registration

    @property
    def all_spans(self) -> tuple[int, ...]:
        """Those of full pages and of the partly filled one."""
        return self.spans if self.tail is None else (*self.spans, self.tail)


@dataclass(frozen=True)
class Contents:
    """Everything but the arrays."""

    kind: str  # "pool" or "prefix cache"
    fingerprint: dict[str, Any] | None  # None where nothing is in it
    spans: list[SavedSpan] = field(default_factory=list)
    entries: list[SavedEntry] = field(default_factory=list)  # of a pool: the next to be evicted first
    pool: dict[str, Any] = field(default_factory=dict)  # its arguments

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))


def read_contents(text: str, kind: str) -> Contents:
    """`Contents.to_json`'s text of a file of this kind; FormatError where it is anything else."""
    value = load_object(text, "the metadata's contents")
    if set(value) != {"kind", "fingerprint", "spans", "entries", "pool"}:
        raise FormatError(f"the metadata's contents have the fields {shown(sorted(value))}")
    if value["kind"] != kind:
        raise FormatError(f"it holds a {shown(value['kind'])}, expected a {kind!r}; load_pool and load_prefix_cache each read their own")
    if not isinstance(value["pool"], dict) or not isinstance(value["fingerprint"], dict | None):
        raise FormatError("the metadata's pool and fingerprint must be objects")
    spans = [_span(v) for v in _list(value["spans"], "spans")]
    entries = [_entry(v, len(spans)) for v in _list(value["entries"], "entries")]
    if entries and value["fingerprint"] is None:
        raise FormatError("the metadata lacks the fingerprint")
    return Contents(kind, value["fingerprint"], spans, entries, value["pool"])


def check_pages(entry: SavedEntry, spans: Sequence[SavedSpan], part_windows: Sequence[int], n_layers: Sequence[int]) -> None:
    """FormatError unless every page that a call may read is there; of prelude, coda and core: their windows and layers."""
    stages = [stage for stage in range(2 + entry.loops) if n_layers[min(stage, 2)]]
    n_full = entry.n_tokens // PAGE
    held = [spans[i] for i in entry.spans]
    ends = [span.first_page + span.n_pages for span in held]
    if any(span.n_stages != 2 + entry.loops for span in held) or any(a != b.first_page for a, b in zip(ends, held[1:], strict=False)):
        raise FormatError("the spans of an entry do not follow each other")
    if held and ends[-1] != n_full:
        raise FormatError("the spans of an entry do not end with its full pages")
    for stage in stages:
        window = part_windows[min(stage, 2)]
        needed = max(0, entry.n_tokens - window + 1) // PAGE if window else 0
        if needed < n_full and (not held or held[0].first_page > needed):
            raise FormatError("an entry lacks pages")
        for span in held:
            last = span.first_page + span.n_pages
            if needed < last and span.first_page + span.first_held.get(stage, span.n_pages) > max(needed, span.first_page):
                raise FormatError(f"an entry lacks pages of stage {stage}")
    if any(stage not in stages for i in entry.all_spans for stage in spans[i].first_held):
        raise FormatError("a span has pages of a stage that the model lacks")
    if (entry.tail is not None) != (entry.n_tokens % PAGE > 0):
        raise FormatError("an entry lacks its partly filled page, or has one too many")
    if entry.tail is not None:
        tail = spans[entry.tail]
        if (tail.first_page, tail.n_pages, tail.n_stages) != (n_full, 1, 2 + entry.loops) or any(tail.first_held.get(s, 1) for s in stages):
            raise FormatError("an entry's partly filled page is of another shape")


def check_spans(contents: Contents) -> None:
    """FormatError unless every span belongs to an entry, whose checks bound it."""
    if {i for entry in contents.entries for i in entry.all_spans} != set(range(len(contents.spans))):
        raise FormatError("a span belongs to no entry")


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"the metadata's {what} must be a list")
    return value


def _int(value: Any, what: str, least: int = 0, most: int = _MOST) -> int:
    if not is_int(value) or not least <= value <= most:
        raise FormatError(f"{what} is {shown(value)}, expected an integer from {least} to {most}")
    return int(value)


def _fields(value: Any, kind: type[Any]) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(kind)}
    if not isinstance(value, dict) or set(value) != names:
        raise FormatError(f"the metadata has {shown(value)} where {', '.join(sorted(names))} are expected")
    return value


def _is_stage(text: str, n_stages: int) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 11 and int(text) < n_stages


def _span(value: Any) -> SavedSpan:
    v = _fields(value, SavedSpan)
    n_pages, n_stages = _int(v["n_pages"], "n_pages of a span", 1), _int(v["n_stages"], "n_stages of a span", 3)
    if not isinstance(v["first_held"], dict) or not all(_is_stage(stage, n_stages) for stage in v["first_held"]):
        raise FormatError("first_held of a span must map its stages to pages")
    first_held = {int(stage): _int(first, "first_held of a span", 0, n_pages - 1) for stage, first in v["first_held"].items()}
    return SavedSpan(_int(v["first_page"], "first_page of a span"), n_pages, n_stages, first_held)


def _entry(value: Any, n_spans: int) -> SavedEntry:
    v = _fields(value, SavedEntry)
    if not (v["namespace"] is None or isinstance(v["namespace"], str)) or not isinstance(v["pinned"], bool):
        raise FormatError(f"an entry's namespace is {shown(v['namespace'])} and its pin {shown(v['pinned'])}")
    return SavedEntry(
        n_tokens=_int(v["n_tokens"], "n_tokens of an entry", 1),
        loops=_int(v["loops"], "loops of an entry", 1),
        cache_window=_int(v["cache_window"], "cache_window of an entry"),
        spans=tuple(_int(i, "a span of an entry", 0, n_spans - 1) for i in _list(v["spans"], "spans of an entry")),
        tail=None if v["tail"] is None else _int(v["tail"], "the tail of an entry", 0, n_spans - 1),
        namespace=v["namespace"],
        pinned=v["pinned"],
        hits=_int(v["hits"], "hits of an entry", 0, 2**62),
        serial=_int(v["serial"], "serial of an entry", 0, 2**62),
    )
