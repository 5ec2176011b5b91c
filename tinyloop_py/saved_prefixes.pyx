"""Prefixes to and from a file: each span once, page by page in the canonical layout, with the last token's hidden rows.

What a file holds is checked whole before a model takes it: its fingerprint, its checksums, and that every page is there that a
call may read.
"""

import math
import os

import numpy as np

from libc.stdint cimport int32_t, int64_t

from .abi cimport TL_PAGE_POSITIONS, TL_STAGE_CORE
from .context cimport PackedMatrix
from .engine cimport Engine
from .kv_prefix cimport PAGES_KV, PAGES_OPERANDS, KvPrefix, Span
from .kv_transfer cimport canonical_page, export_pages, import_pages
from .loaded_model cimport LoadedModel
from .pages cimport KvStore
from .tokens cimport c_check_vocab

from .errors import FormatError
from .fingerprint import REBUILT, differences
from .safetensors_header import ITEM_NBYTES
from .saved_contents import FORMAT, VERSION, Contents, SavedEntry, SavedSpan, check_pages, check_spans, read_contents
from .tensor_file import NUMPY_TYPES, TensorFile, TensorFileWriter

cdef int64_t GROUP_NBYTES = 1 << 23  # copied at a time


def save_prefixes(LoadedModel model, path, str kind, list prefixes, list places, dict pool, str notes=None):
    """Writes prefixes into a file.

    Parameters
    ----------
    model : LoadedModel or None
        Whose they are; None where there are none.
    prefixes : list of (tokens, KvPrefix)
    places : list of dict
        Of each: the fields of SavedEntry that are a pool's.
    notes
        A text of the caller's, under a key of its own in the metadata.
    """
    cdef dict numbers = {}
    cdef dict n_valid = {}  # of partly filled pages
    cdef KvPrefix prefix
    entries, tensors = [], {}
    for i, ((tokens, prefix), place) in enumerate(zip(prefixes, places)):
        spans = tuple([numbers.setdefault(span, len(numbers)) for span in prefix.spans])
        tail = None if prefix.tail is None else numbers.setdefault(prefix.tail, len(numbers))
        n_valid[tail] = prefix.n_tokens % TL_PAGE_POSITIONS
        entries.append(SavedEntry(prefix.n_tokens, prefix.loops, prefix.window, spans, tail, **place))
        tensors[f"entry.{i}.tokens"] = ("I32", (prefix.n_tokens,))
        tensors[f"entry.{i}.final_x"] = ("F32", np.shape(prefix.final_x))
        tensors[f"entry.{i}.boundary_x"] = ("F32", np.shape(prefix.boundary_x))
    described = [describe(span) for span in numbers]
    for i, span in enumerate(numbers):
        for stage, first in described[i].first_held.items():
            for what, (dtype, shape) in canonical_page(model._engine, stage, (<Span>span).kind).items():
                tensors[f"span.{i}.{stage}.{what}"] = (dtype, (described[i].n_pages - first, *shape))
    contents = Contents(kind, None if model is None else model._fingerprint(), described, entries, pool)
    text = {"format": FORMAT, "version": VERSION, "contents": contents.to_json()}
    with TensorFileWriter(path, tensors, text if notes is None else {**text, "notes": notes}) as file:
        for i, span in enumerate(numbers):
            write_span(model._engine, file, span, described[i], i, n_valid.get(i, TL_PAGE_POSITIONS))
        for i, (tokens, prefix) in enumerate(prefixes):
            file.append(f"entry.{i}.tokens", np.asarray(tokens, np.int32))
            file.append(f"entry.{i}.final_x", np.asarray(prefix.final_x))
            file.append(f"entry.{i}.boundary_x", np.asarray(prefix.boundary_x))


cdef object describe(Span span):
    cdef int stage, first
    first_held = {}
    for stage in range(span.first_stage, span.first_stage + span.n_stages):
        first = span.n_pages
        while first > 0 and span.page(stage, first - 1) >= 0:
            first -= 1
        if first < span.n_pages:
            first_held[stage] = first
    return SavedSpan(span.first_page, span.n_pages, span.n_stages, first_held)


cdef int write_span(Engine engine, object file, Span span, object described, int number, int n_valid) except -1:
    """The pages of a span; of a partly filled one, what other calls left behind its tokens is not written."""
    cdef int stage, first, n, group
    for stage, first in described.first_held.items():
        page = canonical_page(engine, stage, span.kind)
        group = max(1, GROUP_NBYTES // sum([math.prod(shape) * ITEM_NBYTES[dtype] for dtype, shape in page.values()]))
        arrays = [np.empty((min(group, span.n_pages - first), *shape), NUMPY_TYPES[dtype]) for dtype, shape in page.values()]
        while first < span.n_pages:
            n = min(group, span.n_pages - first)
            arrays = [array[:n] for array in arrays]
            export_pages(engine, span, stage, first, arrays)
            if n_valid < TL_PAGE_POSITIONS:
                for array in arrays:
                    blank(engine, stage, array, n_valid)
            for what, array in zip(page, arrays):
                file.append(f"span.{number}.{stage}.{what}", array)
            first += n
    return 0


cdef int blank(Engine engine, int stage, object pages, int first) except -1:
    """Zeros at the positions from `first` on."""
    cdef int part = min(stage, TL_STAGE_CORE)
    cdef PackedMatrix weight
    if pages.ndim > 2:
        pages[:, :, :, first:] = 0
        return 0
    c, at = engine.config, 0
    for layer in range((c.n_prelude, c.n_coda, c.n_core)[part]):  # operands: of every layer 16 rows
        weight = engine.plan.weights.matrices[f"{('prelude', 'coda', 'core')[part]}.{layer}.qkv"]
        row = engine.runner.operand_row_nbytes(&weight.matrix)
        pages[:, at + first * row : at + TL_PAGE_POSITIONS * row] = 0
        at += TL_PAGE_POSITIONS * row
    return 0


def load_prefixes(LoadedModel model, path, str kind, bint rebuild):
    """What `save_prefixes` wrote, as the model's own.

    Parameters
    ----------
    rebuild
        Where only KV mode or numerics differ: run the tokens again instead of refusing the file.

    Returns
    -------
    (Contents, list of (tokens, KvPrefix), notes or None)

    Raises
    ------
    FormatError
        The file is damaged, or of another format.
    ValueError
        It was saved by another model; the text says what differs.
    OutOfMemoryError
        Memory or the kv_budget does not suffice.
    """
    path = os.fsdecode(path)
    try:
        with TensorFile(path, FORMAT, VERSION) as file:
            loaded = read_file(model, file, path, kind, rebuild)  # returned from in here, Cython would leak it where leaving the block raises
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    return loaded


cdef tuple read_file(LoadedModel model, object file, object path, str kind, bint rebuild):
    contents = read_contents(file.text.get("contents", ""), kind)
    notes = file.text.get("notes")
    if not contents.entries:
        return contents, [], notes
    differs = differences(contents.fingerprint, model._fingerprint())
    if differs and not (rebuild and all([part in REBUILT for part in differs])):
        raise ValueError(refusal(path, differs))
    tokens = [read_tokens(model, file, entry, i) for i, entry in enumerate(contents.entries)]
    if differs:
        return contents, list(zip(tokens, build_again(model._engine, contents.entries, tokens))), notes
    return contents, list(zip(tokens, read_prefixes(model._engine, file, contents))), notes


cdef str refusal(object path, dict differs):
    text = f"{path} was saved by another model: " + "; ".join(differs.values())
    if all([part in REBUILT for part in differs]):
        text += ". Its keys and values would not be those of this model; rebuild=True runs its tokens again instead"
    return text


cdef object read_tokens(LoadedModel model, object file, object entry, int number):
    tokens = np.array(file.read(f"entry.{number}.tokens", "I32", (entry.n_tokens,)))
    cdef const int32_t[::1] view = tokens
    if c_check_vocab(&view[0], view.shape[0], model.config.vocab_size) >= 0:
        raise FormatError("an entry has a token id outside the vocabulary")
    if entry.n_tokens > model.max_seq_len or entry.loops > model.config.max_loops:
        raise ValueError(
            f"{file.path}: an entry has {entry.n_tokens} tokens at loops = {entry.loops}; this model has max_seq_len = {model.max_seq_len} and "
            f"max_loops = {model.config.max_loops}"
        )
    return tokens


cdef list build_again(Engine engine, object entries, list tokens):
    """Every prefix run again, each from the longest that it starts with."""
    built = {}
    for i in sorted(range(len(tokens)), key=lambda i: len(tokens[i])):
        key, base = (entries[i].loops, entries[i].cache_window, entries[i].namespace), None
        for j, prefix in built.items():
            n = len(tokens[j])
            if (entries[j].loops, entries[j].cache_window, entries[j].namespace) == key and np.array_equal(tokens[i][:n], tokens[j]):
                base = prefix  # later ones are longer
        built[i] = engine.build_prefix(tokens[i], entries[i].loops, entries[i].cache_window, base)
    return [built[i] for i in range(len(tokens))]


cdef list read_prefixes(Engine engine, object file, object contents):
    """The prefixes with the pages in the file; on an error none of them stays."""
    cdef KvStore store = engine.plan.store
    cdef int64_t promised = 0
    cdef int kind = PAGES_OPERANDS if engine.plan.keeps_operands else PAGES_KV
    c = engine.config
    n_layers = (c.n_prelude, c.n_coda, c.n_core)
    for entry in contents.entries:
        check_pages(entry, contents.spans, engine.part_windows(entry.cache_window), n_layers)
    check_spans(contents)
    for span in contents.spans:
        for stage, first in span.first_held.items():
            promised += (span.n_pages - first) * store.page_nbytes(min(stage, TL_STAGE_CORE) + 3 * kind)
    store.reserve(promised)
    spans, scratch = [], {}
    try:
        for i, described in enumerate(contents.spans):
            span = Span(store, described.first_page, described.n_pages, described.n_stages, kind)
            spans.append(span)
            for stage, first in described.first_held.items():
                n = described.n_pages - first
                page = canonical_page(engine, stage, kind)
                arrays = [read_pages(file, f"span.{i}.{stage}.{what}", dtype, (n, *shape), what, scratch) for what, (dtype, shape) in page.items()]
                import_pages(engine, span, stage, first, arrays)
                store.unreserve(n * store.page_nbytes(min(stage, TL_STAGE_CORE) + 3 * kind))
                promised -= n * store.page_nbytes(min(stage, TL_STAGE_CORE) + 3 * kind)
    finally:
        store.unreserve(promised)
    return [read_prefix(engine, file, entry, i, spans) for i, entry in enumerate(contents.entries)]


cdef object read_pages(object file, str name, str dtype, tuple shape, str what, dict scratch):
    """A tensor in memory that is used again for the next one of its kind: new memory would cost as much as reading."""
    cdef int64_t nbytes = math.prod(shape) * ITEM_NBYTES[dtype]
    if what not in scratch or scratch[what].size < nbytes:
        scratch[what] = np.empty(nbytes, np.uint8)
    return file.read(name, dtype, shape, scratch[what])


cdef KvPrefix read_prefix(Engine engine, object file, object entry, int number, list spans):
    cdef KvPrefix prefix = KvPrefix.__new__(KvPrefix)
    cdef int dim = engine.config.dim
    prefix.store = engine.plan.store
    prefix.kind = PAGES_OPERANDS if engine.plan.keeps_operands else PAGES_KV
    prefix.n_tokens, prefix.loops, prefix.window = entry.n_tokens, entry.loops, entry.cache_window
    prefix.spans = tuple([spans[i] for i in entry.spans])
    prefix.tail = None if entry.tail is None else spans[entry.tail]
    prefix.final_x = np.array(file.read(f"entry.{number}.final_x", "F32", (dim,)))
    prefix.boundary_x = np.array(file.read(f"entry.{number}.boundary_x", "F32", (entry.loops, dim)))
    return prefix
