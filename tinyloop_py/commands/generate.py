"""tinyloop generate MODEL [PROMPT]: continue a text, printing it as it comes."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

DEMO = "demo"  # stands for the model that comes with the package


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "generate", help="continue a text", description="Continue a text, printing it as it comes; what it cost goes to stderr."
    )
    parser.add_argument("model", metavar="MODEL", help=f"a .tinyloop file, or '{DEMO}' for the one that comes with tinyloop")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text to continue; read from standard input where left out")
    parser.add_argument("--ids", action="store_true", help="PROMPT is token ids, and so is the output")
    parser.add_argument("-n", "--max-tokens", type=int, default=128, help="most tokens to draw (default %(default)s)")
    parser.add_argument("--loops", type=int, help="depth (default: the model's)")
    add_sampling(parser)
    parser.add_argument("--window", type=int, default=0, help="sliding window of attention in positions, 0 for none")
    parser.add_argument("--special", action="store_true", help="show special tokens")
    add_model_options(parser)
    parser.set_defaults(run=run)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Declare how tokens are drawn."""
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default %(default)s)")
    parser.add_argument("--top-k", type=int, default=50, help="0 is off (default %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 is off")
    parser.add_argument("--min-p", type=float, default=0.0, help="0 is off")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="1 is off")
    parser.add_argument("--seed", type=int, help="the same seed draws the same tokens")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Declare how a model is opened."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    parser.add_argument("--kv-mode", help="how KV is held: fp16, bf16, fp32, int8, int4 or h (default: fp16, or what the environment says)")
    parser.add_argument("--max-seq-len", type=int, default=2048, help="most tokens of prompt and output (default %(default)s)")


def model_path(name: str) -> str:
    """The file of a model that the command line names."""
    import tinyloop_py as tl

    return os.fspath(tl.demo_model()) if name == DEMO else name


def open_from(args: argparse.Namespace) -> Any:
    """The model that the options name."""
    import tinyloop_py as tl

    return tl.Model(model_path(args.model), args.max_seq_len, device=args.device, threads=args.threads, kv_mode=args.kv_mode)


def run(args: argparse.Namespace) -> int:
    """Generate and print."""
    with open_from(args) as model:
        text = checked_text(args.prompt) if args.prompt is not None else read_stdin()
        prompt, show, finish = (_id_mode if args.ids else _text_mode)(model, text, args.special)
        begin = time.perf_counter()
        stream = model.generate_stream(
            prompt, args.max_tokens, args.loops, args.temperature, args.top_k, args.window, top_p=args.top_p, min_p=args.min_p,
            repetition_penalty=args.repetition_penalty, seed=args.seed,
        )  # fmt: skip
        first = time.perf_counter()
        n = 0
        for n, token in enumerate(stream, 1):  # noqa: B007
            print(show(token), end="", flush=True)
        print(finish(), flush=True)
        seconds = time.perf_counter() - first
        rate = f", {(n - 1) / seconds:.0f} tokens/s" if n > 1 else ""
        print(f"{len(prompt)} + {n} tokens, first after {1e3 * (first - begin):.1f} ms{rate}; {stream.finish_reason}", file=sys.stderr)
    return 0


def read_stdin() -> str:
    """The text on standard input; ValueError where it is not UTF-8."""
    try:
        return checked_text(sys.stdin.read(), "standard input")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not valid UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}") from None


def checked_text(text: str, what: str = "the prompt") -> str:
    """The text; ValueError where it stands for bytes that are no UTF-8, which Python keeps as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is not valid UTF-8 at character {error.start}") from None
    return text


def _id_mode(model: Any, text: str, special: bool) -> tuple[list[int], Callable[[int], str], Callable[[], str]]:
    words = [word for word in re.split(r"[\s,]+", text) if word]
    if bad := [word for word in words if not re.fullmatch(r"\d{1,10}", word)]:
        raise ValueError(f"--ids: {bad[0]!r} is no token id; expected numbers between spaces or commas")
    return [int(word) for word in words], lambda token: f"{token} ", lambda: ""


def _text_mode(model: Any, text: str, special: bool) -> tuple[list[int], Callable[[int], str], Callable[[], str]]:
    from ..text_decoder import TextDecoder

    if model.tokenizer is None:
        raise ValueError("the model file has no tokenizer; give token ids with --ids")
    prompt = model.tokenizer.encode(text).ids
    if not prompt:
        raise ValueError("the prompt is empty; give at least one word")
    decoder = TextDecoder(model.tokenizer, skip_special_tokens=not special, context=prompt[-8:])
    return prompt, decoder.push, decoder.flush
