"""stream_text and stop strings: what is shown is what the tokens say, up to the stop string and nothing of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CONFIGS, random_model
from runtime import open_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import tinyloop_py as tl
from tinyloop_py.stop_text import StopText

CONFIG = CONFIGS["shipped"]  # 259 ids: 256 bytes, <|end|> and two that the tokenizer lacks
PROMPT = "Once upon a time, \N{GRINNING FACE}"
SAMPLED = {"temperature": 1.0, "top_k": 0, "logit_bias": {257: float("-inf"), 258: float("-inf")}, "stop_tokens": ()}


def byte_tokenizer():
    """A token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "bytes.tinyloop"
    tl.save_model(path, CONFIG, random_model(CONFIG), byte_tokenizer(), stop_ids=(256,))
    return path


@pytest.fixture
def model(backend, file):
    with tl.Model(file, 512, device=backend) as model:
        yield model


def letters(model, text):
    """A bias that leaves only the tokens of a text to draw."""
    ids = set(model.tokenizer.encode(text).ids)
    return {i: float("-inf") for i in range(CONFIG.vocab_size) if i not in ids}


# ---- the text


@pytest.mark.parametrize("seed", range(5))
def test_pieces_join_to_the_text_of_the_new_tokens(model, seed):
    ids = model.tokenizer.encode(PROMPT).ids
    want = model.generate(ids, 60, 1, seed=seed, **SAMPLED)[len(ids) :]
    for prompt in (PROMPT, ids):
        stream = model.stream_text(prompt, 60, 1, seed=seed, **SAMPLED)
        pieces = list(stream)
        assert "".join(pieces) == model.tokenizer.decode(want) and all(pieces)
        assert (stream.tokens, stream.finish_reason, stream.stop_string, stream.seed) == (want, "length", None, seed)
        assert next(stream, None) is None


def test_28_characters_of_several_tokens_come_whole(model):
    text = "\N{GRINNING FACE}\u4f60\u00e9a"
    stream = model.stream_text(PROMPT, 200, 1, temperature=5.0, top_k=0, seed=3, logit_bias=letters(model, text), stop_tokens=())
    pieces = list(stream)
    assert "".join(pieces) == model.tokenizer.decode(stream.tokens)
    whole = [piece for piece in pieces if piece in "\N{GRINNING FACE}\u4f60\u00e9"]
    assert "a" in "".join(pieces) and len(pieces) < 200
    assert whole or "\ufffd" in "".join(pieces)  # random bytes: characters are rare, and what is broken is shown as such


def test_the_stop_token_has_no_text(model):
    bias = {**letters(model, "ab"), 256: 0.0}
    for skip in (True, False):
        stream = model.stream_text("a", 200, 1, temperature=50.0, top_k=0, seed=1, logit_bias=bias, skip_special_tokens=skip)
        text = "".join(stream)
        assert set(text) <= {"a", "b"} and stream.finish_reason == "stop"
        assert stream.tokens[-1] == 256 and text == model.tokenizer.decode(stream.tokens[:-1])


def test_special_tokens_are_shown_where_asked(model):
    bias = {**letters(model, "ab"), 256: 0.0}
    how = {"temperature": 50.0, "top_k": 0, "seed": 1, "logit_bias": bias, "stop_tokens": ()}
    shown, hidden = ("".join(model.stream_text("a", 40, 1, skip_special_tokens=skip, **how)) for skip in (False, True))
    assert "<|end|>" in shown and shown.replace("<|end|>", "") == hidden


def test_a_first_token_keeps_its_space():
    """A tokenizer that drops the space of the first word: a continuation has it all the same."""
    from tinyloop_py.text_decoder import TextDecoder

    tokenizer = Tokenizer(models.WordLevel({"\u2581Once": 0, "\u2581upon": 1, "\u2581a": 2, "?": 3}, unk_token="?"))
    tokenizer.decoder = decoders.Metaspace()
    decoder = TextDecoder(tokenizer, context=[0])
    assert [decoder.push(1), decoder.push(2), decoder.flush()] == [" upon", " a", ""]
    assert TextDecoder(tokenizer).push(1) == "upon"


def test_pool_logprobs_and_cancelling(model):
    ids, pool = model.tokenizer.encode(PROMPT).ids, tl.PrefixPool()
    model.register_prefix(pool, ids[:10], 1)
    how = {**SAMPLED, "logit_bias": letters(model, "abc")}
    with model.stream_text(PROMPT, 30, 1, pool=pool, logprobs=2, seed=1, **how) as stream:
        assert stream.cached_tokens == 10
        next(stream)
        assert [record.token for record in stream.logprobs] == stream.tokens
        assert repr(stream) == f"<tinyloop.TextStream {len(stream.tokens)} new tokens, running>"
    assert stream.finish_reason == "cancelled" and next(stream, None) is None and "cancelled" in repr(stream)
    pool.clear()
    assert model.kv_nbytes == 0


def test_errors(model, backend):
    for arguments, error, text in (
        ({"prompt": ""}, ValueError, "prompt is empty"),
        ({"stop": ""}, ValueError, "stop holds an empty string"),
        ({"stop": ["a", 3]}, TypeError, "stop holds a int"),
        ({"prompt": 3}, TypeError, "prompt"),
    ):
        with pytest.raises(error, match=text):
            model.stream_text(**{"prompt": "a", **arguments})
    with open_model(backend, "shipped") as bare, pytest.raises(ValueError, match="has no tokenizer"):
        bare.stream_text("a")
    model.close()
    with pytest.raises(RuntimeError, match=r"^tinyloop.Model is closed; cannot call stream_text$"):
        model.stream_text("a")


# ---- stop strings


@pytest.mark.parametrize("stop", ["ab", "aab", ["ba", "bbb"], ["abba"], "zz"])
def test_a_stop_string_ends_the_text_before_it(model, stop):
    how = {"loops": 1, "temperature": 50.0, "top_k": 0, "seed": 8, "logit_bias": letters(model, "ab"), "stop_tokens": ()}
    free = "".join(model.stream_text("a", 80, **how))
    stops = [stop] if isinstance(stop, str) else stop
    cut = min((free.find(s) + len(s), s) for s in stops if s in free) if any(s in free for s in stops) else None
    stream = model.stream_text("a", 80, stop=stop, **how)
    text = "".join(stream)
    if cut is None:
        assert (text, stream.finish_reason, stream.stop_string) == (free, "length", None)
    else:
        end, found = cut
        assert (text, stream.finish_reason, stream.stop_string) == (free[: end - len(found)], "stop", found)
        assert len(stream.tokens) == end and model.kv_nbytes == 0  # a token a letter: nothing was drawn past it


def reference(text, stops):
    """The first end of a stop string, the longest of those that end there."""
    ends = [(end, -len(s), s) for s in stops for end in range(len(s), len(text) + 1) if text[:end].endswith(s)]
    return (text, None) if not ends else (text[: min(ends)[0] - len(min(ends)[2])], min(ends)[2])


@settings(deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_text_does_not_depend_on_the_pieces(pieces, stops):
    whole, found = reference("".join(pieces), stops)
    text, shown, n_given = StopText(stops), "", 0
    for piece in pieces:
        shown += text.push(piece)
        n_given += len(piece)
        assert whole.startswith(shown)
        if text.found is None:  # no more is held back than a stop string may need
            assert n_given - len(shown) < max(map(len, stops), default=1)
    shown += text.flush()
    assert (shown, text.found) == (whole, found)
    if found is not None:
        assert text.push("more") == text.flush() == ""
