"""tinyloop convert SRC DST: a Hugging Face folder or a GGUF file becomes a `.tinyloop` file."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator

from ..weights import STORED


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "convert", help="convert a Hugging Face folder or a GGUF file",
        description="Convert a Hugging Face folder (Ouro, Nanbeige4.2, Huginn; Llama, Mistral, Qwen2, Qwen3, SmolLM2, SmolLM3) or a GGUF file "
        "(architecture llama).",
    )  # fmt: skip
    parser.add_argument("src", metavar="SRC", help="folder with config.json and safetensors, or a GGUF file")
    parser.add_argument("dst", metavar="DST", help="the .tinyloop file to write; an existing one is replaced when the new one is complete")
    parser.add_argument("--dtype", choices=list(STORED), help="type of the matrices (default: the source's own; bf16 where that is quantised)")
    parser.add_argument("--group-size", type=int, metavar="N", help="with int8: columns that share a scale, a multiple of 64 (default 64; 0 = a row)")
    parser.add_argument("--loops", type=int, metavar="N", help="default depth to record (default: that of training; plain models: 1)")
    parser.add_argument("--max-loops", type=int, metavar="N", help="greatest depth to record (default: 4 times training's; plain models: 1)")
    parser.add_argument("--no-tokenizer", action="store_true", help="convert without tokenizer and chat template")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert and say what was written."""
    from ..convert import convert
    from ..model_file import open_model_file
    from .info import human_bytes

    group_size = 64 if args.group_size is None and args.dtype == "int8" else args.group_size or None
    with _progress_bar(os.path.basename(os.path.normpath(args.src))) as progress:
        convert(
            args.src, args.dst, dtype=args.dtype, group_size=group_size, loops=args.loops, max_loops=args.max_loops,
            tokenizer=not args.no_tokenizer, progress=progress,
        )  # fmt: skip
    with open_model_file(args.dst) as file:
        types = sorted({file.tensor(name).dtype for name in file.names if file.tensor(name).n_rows > 1})
        print(f"wrote {args.dst}: {human_bytes(file.nbytes)}, {', '.join(types)}, max_loops {file.config.max_loops}")
    return 0


@contextlib.contextmanager
def _progress_bar(title: str) -> Iterator[Callable[[int, int, str], None] | None]:
    """A callback for `convert` that moves a bar on stderr; None where that is no terminal or rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    except ModuleNotFoundError:
        yield None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    name_column = TextColumn("{task.fields[name]}")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), name_column)
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(title, total=None, name="")

    def show(done: int, total: int, name: str) -> None:
        bar.start()  # with the first block: an error before it stays one line
        bar.update(task, completed=done, total=total, name=name)

    try:
        yield show
    finally:
        bar.stop()
