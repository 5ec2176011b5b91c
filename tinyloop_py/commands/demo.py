"""tinyloop demo: several tenants, one looped model, one prefix pool."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

from .generate import add_model_options, open_from

N_TIMINGS = 5  # starts that a time to first token is the median of
SAMPLING = {"temperature": 0.0, "repetition_penalty": 1.1}  # greedy: every run prints the same answers


class Tenant(NamedTuple):
    """Who answers: a system prompt and an exchange that shows how."""

    name: str
    system: str
    example: tuple[str, str]
    questions: tuple[str, ...]


TENANTS = (
    Tenant(
        "storyteller",
        "You are Mia, a friendly storyteller for children. You tell short stories about animals, the sea and the forest, and they end well.",
        (
            "Tell me a story about a lost kite.",
            "A red kite flew over the hill and got lost in a tree. A kind owl untied its string, and the wind took it home.",
        ),
        ("Tell me a story about a brave mouse who finds a golden key.", "Tell me a story about a little boat."),
    ),
    Tenant(
        "teacher",
        "You are a science teacher. Use simple words, and explain one thing at a time.",
        ("Why does ice float?", "Ice is lighter than water. That is why it stays on top."),
        ("Why is the sky blue?", "What is gravity?"),
    ),
    Tenant(
        "gardener",
        "You are Tom, the patient gardener at Green Hill. Keep your answers short, and say what to do first.",
        ("When should I water my roses?", "Water your roses early in the morning, when the air is cool."),
        ("How do I grow tomatoes?", "What does a plant need to grow?"),
    ),
    Tenant(
        "cook",
        "You are Clara, a cheerful cook. You like simple meals with few things in them.",
        ("What can I make with eggs?", "You can make an omelette with cheese and herbs."),
        ("How do I cook rice?", "How do I make a tomato soup?"),
    ),
)
DEPTHS = (1, 2, 4, 8)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "demo",
        help="see a looped model answer several tenants through a prefix pool",
        description="Register the prefixes of several tenants, answer requests for them through the pool, and show what it saves. Runs the looped "
        "model that comes with tinyloop.",
    )
    parser.add_argument("--model", default="demo", help="another model of the same text format (default: the one that comes with tinyloop)")
    parser.add_argument("-n", "--max-tokens", type=int, default=80, help="most tokens of an answer (default %(default)s)")
    parser.add_argument("--loops", type=int, help="depth (default: the model's)")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer every tenant's questions with and without the pool."""
    import tinyloop_py as tl

    with open_from(args) as model:
        show = Show(model, model.config.default_loops if args.loops is None else args.loops, args.max_tokens)
        show.check()
        print(
            f"A looped model: {model.config.n_core} layers, run {show.loops} times a token; {model.nbytes / 1e6:.1f} MB of weights, "
            f"{model.config.vocab_size} token ids, on {model.numerics_id.split('/')[0]}, {model.threads} thread{'s' * (model.threads > 1)}."
        )
        pool = tl.PrefixPool(capacity=16)
        prefixes = {tenant: show.encode(tenant_prefix(tenant)) for tenant in TENANTS}
        begin = time.perf_counter()
        for tokens in prefixes.values():
            model.register_prefix(pool, tokens, show.loops)
        seconds = time.perf_counter() - begin
        sizes = ", ".join(f"{tenant.name} {len(tokens)}" for tenant, tokens in prefixes.items())
        print(f"Registered {pool.size()} prefixes in {1e3 * seconds:.0f} ms ({sizes} tokens; {pool.nbytes / 1e6:.1f} MB of KV).\n")

        saved = [show.request(pool, tenant, prefixes[tenant], question) for question, tenant in requests()]
        stats = pool.stats()
        print(
            f"The pool: {stats.hits} hits in {stats.queries} queries ({len(saved)} answers, each started {N_TIMINGS} times more to time it), "
            f"{stats.matched_tokens} tokens matched, {stats.prefilled_tokens} run; "
            f"time to first token {median(saved):.1f} times as fast (median). Every answer was the same with and without it."
        )
        show.depths(pool, TENANTS[1], prefixes[TENANTS[1]])
    return 0


def tenant_prefix(tenant: Tenant) -> str:
    """What all of a tenant's requests start with, in the format that the demo model was trained on."""
    question, answer = tenant.example
    return f"<|system|>{tenant.system}<|end|><|user|>{question}<|end|><|assistant|>{answer}<|end|>"


def as_turn(question: str) -> str:
    """A question, and the start of its answer."""
    return f"<|user|>{question}<|end|><|assistant|>"


def requests() -> Iterator[tuple[str, Tenant]]:
    """The tenants' questions, taking turns."""
    for questions in zip(*(tenant.questions for tenant in TENANTS), strict=True):
        yield from zip(questions, TENANTS, strict=True)


class Show:
    """Answers requests and prints them."""

    def __init__(self, model: Any, loops: int, max_tokens: int) -> None:
        self.model, self.loops, self.max_tokens = model, loops, max_tokens
        if model.tokenizer is None:
            raise ValueError(f"{model.path} has no tokenizer, and the demo speaks text; give another --model")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.model.tokenizer.encode(text).ids
        return ids

    def check(self) -> None:
        """ValueError where an option leaves no room for the requests: before any work."""
        if self.max_tokens < 1:
            raise ValueError(f"--max-tokens is {self.max_tokens}, expected 1 or more")
        if not 1 <= self.loops <= self.model.config.max_loops:
            raise ValueError(f"--loops is {self.loops}, expected 1 to {self.model.config.max_loops}")
        longest = max(len(self.encode(tenant_prefix(tenant) + as_turn(question))) for question, tenant in requests())
        if longest + self.max_tokens > self.model.max_seq_len:
            raise ValueError(
                f"--max-seq-len is {self.model.max_seq_len}, the longest request takes {longest} tokens and --max-tokens {self.max_tokens} more"
            )

    def start(self, prompt: list[int], pool: Any, loops: int | None = None, max_tokens: int | None = None) -> Any:
        n = self.max_tokens if max_tokens is None else max_tokens
        return self.model.generate_stream(prompt, n, loops or self.loops, pool=pool, top_k=0, **SAMPLING)

    def first_token_seconds(self, prompt: list[int], pools: tuple[Any, ...]) -> list[float]:
        """Median time to the first token with each pool (None: without), alternating."""
        seconds: list[list[float]] = [[] for _ in pools]
        for _ in range(N_TIMINGS):
            for pool, times in zip(pools, seconds, strict=True):
                begin = time.perf_counter()
                next(self.start(prompt, pool, max_tokens=1))
                times.append(time.perf_counter() - begin)
        return [median(times) for times in seconds]

    def answer(self, prompt: list[int], pool: Any, loops: int | None = None) -> tuple[list[int], int, str]:
        """Print an answer as it comes; (its tokens, prompt tokens that came from the pool, tokens per second after the first, if any)."""
        from ..text_decoder import TextDecoder

        decoder = TextDecoder(self.model.tokenizer)
        stream = self.start(prompt, pool, loops)
        begin = time.perf_counter()
        tokens = []
        for token in stream:
            tokens.append(token)
            sys.stdout.write(decoder.push(token).replace("\n", "\n  "))
            sys.stdout.flush()
        seconds = time.perf_counter() - begin
        print(decoder.flush() + (" ..." if stream.finish_reason == "length" else ""))
        return tokens, stream.cached_tokens, f"{(len(tokens) - 1) / seconds:,.0f} tokens/s" if len(tokens) > 1 else ""

    def request(self, pool: Any, tenant: Tenant, prefix: list[int], question: str) -> float:
        """Answer through the pool, check the answer against one without it, and say what the pool saved; returns the speed-up."""
        prompt = prefix + self.encode(as_turn(question))
        sys.stdout.write(f"{tenant.name}: {question}\n  ")
        tokens, n_matched, rate = self.answer(prompt, pool)
        if tokens != list(self.start(prompt, None)):
            raise RuntimeError(f"the pool changed the answer to {question!r}: please report this with what `python -m tinyloop_py` prints")
        warm, cold = self.first_token_seconds(prompt, (pool, None))
        print(
            f"  [{n_matched} of {len(prompt)} prompt tokens from the pool; first token after {1e3 * warm:.2f} ms, "
            f"without the pool {1e3 * cold:.2f} ms{rate and '; '}{rate}]\n"
        )
        return cold / warm

    def depths(self, pool: Any, tenant: Tenant, prefix: list[int]) -> None:
        """One question at several depths."""
        question = tenant.questions[0]
        print(f"\nDepth is an argument of every call. {tenant.name}: {question}")
        for loops in (n for n in DEPTHS if n <= self.model.config.max_loops):
            sys.stdout.write(f"  {loops} loop{'s' * (loops > 1)}: ")
            *_, rate = self.answer(prefix + self.encode(as_turn(question)), pool, loops)
            print(f"  [{rate}]" if rate else "")
