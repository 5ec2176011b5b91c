"""TextDecoder: pieces join to what decoding everything gives, and no piece shows half a character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tinyloop_py.text_decoder import TextDecoder


@pytest.fixture(scope="module")
def byte_tokenizer():
    """A token a byte: every character outside ASCII is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def pieces_of(tokenizer, ids, **options):
    stream = TextDecoder(tokenizer, **options)
    return [*(stream.push(i) for i in ids), stream.flush()]


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_pieces_join_to_the_text(byte_tokenizer, text):
    pieces = pieces_of(byte_tokenizer, byte_tokenizer.encode(text).ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_join_to_the_full_decoding(byte_tokenizer, ids):
    assert "".join(pieces_of(byte_tokenizer, ids)) == byte_tokenizer.decode(ids)


def test_a_dangling_lead_byte_comes_at_the_end(byte_tokenizer):
    ids = byte_tokenizer.encode("\N{GRINNING FACE}\u4f60").ids
    pieces = pieces_of(byte_tokenizer, ids[:-1])
    assert pieces[:4] == ["", "", "", "\N{GRINNING FACE}"]
    assert pieces[-1] == "\ufffd" and pieces[4:-1] == ["", ""]


def test_special_tokens_are_shown_only_where_asked(byte_tokenizer):
    ids = [*byte_tokenizer.encode("ab").ids, byte_tokenizer.token_to_id("<|end|>")]
    assert "".join(pieces_of(byte_tokenizer, ids)) == "ab"
    assert "".join(pieces_of(byte_tokenizer, ids, skip_special_tokens=False)) == "ab<|end|>"
