"""Registers and spills of every kernel, from what nvcc printed under -Xptxas -v; other lines, warnings among them, as they are.

Usage: kernel_report.py LOG
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

NOISE = re.compile(r"^ptxas info|^\s*\d+ bytes stack frame|^$")


def demangled(name: str) -> str:
    """The function's own name, without its parameters."""
    lengths = re.findall(r"(\d+)([A-Za-z_]\w*)", name)
    parts = [text[: int(n)] for n, text in lengths if int(n) <= len(text)]
    return parts[-1] if parts else name


def main(path: str) -> int:
    """Print the report."""
    worst: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # target -> kernels, most registers
    spills, kernel, target = [], "", ""
    for line in Path(path).read_text(errors="replace").splitlines():
        if found := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
            kernel, target = found[1], found[2]
        elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            if int(found[1]) or int(found[2]):
                spills.append(f"{target} {demangled(kernel)}: {found[1]} bytes of spill stores, {found[2]} of loads ({kernel})")
        elif found := re.search(r"Used (\d+) registers", line):
            worst[target][0] += 1
            worst[target][1] = max(worst[target][1], int(found[1]))
        elif not NOISE.search(line):
            print(line)
    for target, (n, registers) in sorted(worst.items()):
        print(f"{target}: {n} kernels, at most {registers} registers")
    if worst:
        print("\n".join(spills) or "no kernel spills")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
