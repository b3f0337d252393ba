"""What our imports cost beside ``import msgspec``: ratios, best of 20 each, in turns.

Exits 1 if ``import rl_staleness`` costs more than ``LIMIT`` times as much. Its names are loaded
when they are first asked for: the second line says what all of them cost.
"""

from __future__ import annotations

import subprocess
import sys

LIMIT = 2.5
ROUNDS = 20
BASE = "import msgspec"
OURS = ("import rl_staleness", "from rl_staleness import *")
TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def seconds(statement: str) -> float:
    """Seconds that one fresh interpreter takes for a statement, without its own start."""
    command = [sys.executable, "-c", TIMED.format(statement)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    rounds = [[seconds(statement) for statement in (BASE, *OURS)] for _ in range(ROUNDS)]
    base, *ours = (min(column) for column in zip(*rounds, strict=True))
    for statement, best in zip(OURS, ours, strict=True):
        print(f"{statement}: {best / base:.2f} x {BASE} ({best * 1e3:.1f} of {base * 1e3:.1f} ms)")
    print(f"limit of the first: {LIMIT}")
    return int(ours[0] > LIMIT * base)


if __name__ == "__main__":
    sys.exit(main())
