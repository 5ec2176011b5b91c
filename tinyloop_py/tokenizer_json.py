"""A model's tokenizer as text: the JSON of the `tokenizers` library."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from .errors import FormatError
from .strict_json import load_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(text: str) -> Tokenizer:
    """The tokenizer of a JSON text; ValueError where the library refuses it."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exceptions, and PanicException, which is none
        raise ValueError(f"the tokenizer cannot be read: {error}") from None


def stored_tokenizer(text: str, path: str) -> Tokenizer:
    """The tokenizer that the model file `path` holds; FormatError where it cannot be read."""
    try:
        return load_tokenizer(text)
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from None


def tokenizer_text(tokenizer: Tokenizer | str, vocab_size: int) -> str:
    """The JSON of a tokenizer (or of its JSON), without white space and without truncation and padding.

    Raises ValueError where it cannot be read or has a token id that the model lacks, TypeError where it is neither.
    """
    if not isinstance(tokenizer, str) and not callable(getattr(tokenizer, "to_str", None)):
        hint = "; a transformers tokenizer has it as backend_tokenizer" if hasattr(tokenizer, "backend_tokenizer") else ""
        raise TypeError(f"tokenizer must be a tokenizers.Tokenizer, its JSON as str, or None, got {type(tokenizer).__name__}{hint}")
    text = tokenizer if isinstance(tokenizer, str) else tokenizer.to_str()
    fields = load_object(text, "the tokenizer")
    fields["truncation"] = fields["padding"] = None  # settings of a training run: they would cut or fill prompts
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    vocabulary = load_tokenizer(text).get_vocab(with_added_tokens=True)
    if vocabulary and (last := max(vocabulary.values())) >= vocab_size:
        raise ValueError(f"the tokenizer has token id {last}, the model's vocab_size is {vocab_size}")
    return text
