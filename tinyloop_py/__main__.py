"""`python -m tinyloop_py [--json]`: the diagnosis, for the start of a bug report."""

import argparse
import json

from .diagnosis import as_text, diagnose


def main() -> None:
    """Print the diagnosis."""
    parser = argparse.ArgumentParser(prog="python -m tinyloop_py", description="Print what a bug report about tinyloop should start with.")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    report = diagnose()
    print(json.dumps(report, indent=1) if parser.parse_args().json else as_text(report))


if __name__ == "__main__":
    main()
