"""The tokenizer of a GGUF file, rebuilt from its tokenizer.ggml fields: byte-level BPE and SentencePiece BPE.

Text is split as llama.cpp splits it for the same `tokenizer.ggml.pre`, which for the kinds listed is how the models' own
tokenizers do. Anything else is refused by name, since a tokenizer that is nearly right is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import FormatError
from ..strict_json import is_int, shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
SPACE = "▁"  # SentencePiece's stand-in for a space

_CONTRACTIONS, _ANY_CASE = "'s|'t|'re|'ve|'m|'ll|'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = _CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _ANY_CASE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class Splitting:
    """How a byte-level BPE cuts text before merging."""

    patterns: tuple[str, ...]  # applied one after another, each match and each rest a piece of its own
    ignore_merges: bool = False  # a piece that is a token stays one
    add_bos: bool = False  # where the file doesn't say
    nfc: bool = False


SPLITTINGS = {
    "default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": Splitting((_GPT2,)),
    "smollm": Splitting((r"\p{N}", _GPT2)),
    "qwen2": Splitting((_QWEN2,), nfc=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), Splitting((_LLAMA3,), ignore_merges=True, add_bos=True)),
}


def gguf_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the fields of a GGUF file describe; FormatError names what is unknown or damaged."""
    kind = fields.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise FormatError(f"tokenizer.ggml.model is {shown(kind)}, supported are {', '.join(builders)}; --no-tokenizer converts without one")
    tokens = _texts(fields, "tokenizer.ggml.tokens")
    vocab = {token or f"[EMPTY_{i}]": i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab.get(token) != i and token)
        raise FormatError(f"tokenizer.ggml.tokens holds {shown(twice)} twice")
    types = fields.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise FormatError(f"tokenizer.ggml.token_type is {shown(types)}, expected one for each of {len(tokens)} tokens")
    try:
        tokenizer = builders[kind](fields, vocab, types)
    except FormatError:
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise FormatError(f"the tokenizer cannot be rebuilt: {error}") from None
    _add_whole_tokens(tokenizer, vocab, types)
    return tokenizer


def _byte_level(fields: Mapping[str, Any], vocab: dict[str, int], types: Sequence[int]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = fields.get("tokenizer.ggml.pre")
    splitting = SPLITTINGS.get(pre) if isinstance(pre, str) else None
    if splitting is None:
        raise FormatError(f"tokenizer.ggml.pre is {shown(pre)}, supported are {', '.join(SPLITTINGS)}; --no-tokenizer converts without a tokenizer")
    merges = [_pair(merge) for merge in _texts(fields, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=splitting.ignore_merges))
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    _add_ends(tokenizer, fields, list(vocab), splitting.add_bos, None, None)
    return tokenizer


def _sentencepiece(fields: Mapping[str, Any], vocab: dict[str, int], types: Sequence[int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        if fields.get(key):
            raise FormatError(f"{key} is set, which is not supported; --no-tokenizer converts without a tokenizer")
    merges = _merges_by_score(vocab, types, fields.get("tokenizer.ggml.scores"))
    tokens = list(vocab)
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
    unk_token = tokens[unknown] if is_int(unknown) and 0 <= unknown < len(tokens) else None
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    prefixed = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    _add_ends(tokenizer, fields, tokens, True, 1, 2)
    return tokenizer


def _merges_by_score(vocab: dict[str, int], types: Sequence[int], scores: Any) -> list[tuple[str, str]]:
    """Every way to form a token out of two others, best score first: SentencePiece merges the pair whose result scores best."""
    if not isinstance(scores, list) or len(scores) != len(vocab):
        raise FormatError(f"tokenizer.ggml.scores is {shown(scores)}, expected one for each of {len(vocab)} tokens")
    merges = []
    formed: dict[float, str] = {}
    for (token, token_id), score in zip(vocab.items(), scores, strict=True):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
        if pairs and types[token_id] == NORMAL and formed.setdefault(score, token) != token:
            raise FormatError(f"tokenizer.ggml.scores ranks {shown(formed[score])} and {shown(token)} alike, so the order of merges is not known")
        merges += [(score, left, right) for left, right in sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _add_whole_tokens(tokenizer: Tokenizer, vocab: Mapping[str, int], types: Sequence[int]) -> None:
    """Control, unknown and user-defined tokens are matched in the text before anything else."""
    from tokenizers import AddedToken

    special = [AddedToken(token, special=True, normalized=False) for token, i in vocab.items() if types[i] in (UNKNOWN, CONTROL)]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token, i in vocab.items() if types[i] == USER_DEFINED])


def _add_ends(tokenizer: Tokenizer, fields: Mapping[str, Any], tokens: list[str], add_bos: bool, bos_id: int | None, eos_id: int | None) -> None:
    from tokenizers.processors import TemplateProcessing

    def end(flag: str, default: bool, key: str, default_id: int | None) -> list[tuple[str, int]]:
        if not fields.get(f"tokenizer.ggml.{flag}", default):
            return []
        token_id = fields.get(f"tokenizer.ggml.{key}", default_id)
        if not is_int(token_id) or not 0 <= token_id < len(tokens):
            raise FormatError(f"tokenizer.ggml.{flag} is set, but {key} is {shown(token_id)}")
        return [(tokens[token_id], token_id)]

    bos, eos = end("add_bos_token", add_bos, "bos_token_id", bos_id), end("add_eos_token", False, "eos_token_id", eos_id)
    if bos or eos:
        template = [f"{text}:0" for text, _ in bos] + ["$A:0"] + [f"{text}:0" for text, _ in eos]
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[*bos, *eos])


def _pair(merge: str) -> tuple[str, str]:
    """The two halves of a merge; the first may begin with a space."""
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _texts(fields: Mapping[str, Any], key: str) -> list[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise FormatError(f"{key} is {'missing' if value is None else shown(value)}, expected a list of texts")
    return value
