"""The `tinyloop` command. Every subcommand is a module of `commands` with `add_parser(subparsers)` and `run(args) -> int`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import __version__
from .commands import convert, demo, generate, info, key, serve

COMMANDS = (demo, generate, convert, info, serve, key)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand: 0, or 1 after one line on stderr, or 2 for wrong usage."""
    _open_missing_streams()
    parser = argparse.ArgumentParser(prog="tinyloop", description="Looped language models inside a Python process.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    try:
        args, rest = parser.parse_known_args(argv)
        if rest and not _take_prompt(args, rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
    except SystemExit as stop:  # argparse's own: 0 after --help, 2 after wrong usage
        return stop.code if isinstance(stop.code, int) else 2
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("tinyloop: interrupted", file=sys.stderr)
        return 130
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        print("tinyloop: error:", " ".join(str(error).split()), file=sys.stderr)
        return 1


def _open_missing_streams() -> None:
    """Puts the null device where a standard stream was closed (`>&-`) and Python has None, before a file of ours takes its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _take_prompt(args: argparse.Namespace, rest: list[str]) -> bool:
    """Whether what argparse left over is the prompt: one that follows an option, it takes for missing."""
    words = rest[1:] if rest[0] == "--" else rest
    if getattr(args, "prompt", "") is not None or len(words) != 1 or (words is rest and words[0].startswith("-")):
        return False
    args.prompt = words[0]
    return True


if __name__ == "__main__":
    sys.exit(main())
