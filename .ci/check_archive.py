"""Whether a source archive holds every tracked file that building, testing and reading the package needs, and nothing built.

Usage: check_archive.py ARCHIVE
"""

from __future__ import annotations

import subprocess
import sys
import tarfile

NOT_SHIPPED = (".ci/", ".git")


def main(path: str) -> int:
    """Print what is missing or too much; 1 if anything is."""
    with tarfile.open(path) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    missing = [name for name in tracked if name not in held and not name.startswith(NOT_SHIPPED)]
    built = [name for name in held if name.endswith((".so", ".o", ".c", ".pyc")) or name.startswith("build/")]
    for name in missing:
        print(f"{name} is tracked and not in the archive")
    for name in built:
        print(f"{name} is built and in the archive")
    return 1 if missing or built else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
