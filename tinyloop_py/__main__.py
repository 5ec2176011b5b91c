"""`python -m tinyloop_py [--json]`: the diagnosis, for the start of a bug report."""

import argparse
import json
import os
import sys

from .diagnosis import as_text, diagnose


def main() -> None:
    """Print the diagnosis."""
    parser = argparse.ArgumentParser(prog="python -m tinyloop_py", description="Print what a bug report about tinyloop should start with.")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    as_json = parser.parse_args().json
    report = diagnose()
    try:
        print(json.dumps(report, indent=1) if as_json else as_text(report), flush=True)
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
