"""What ``import rl_staleness`` costs beside ``import msgspec``: a ratio, best of 20 each, in turns.

Exits 1 above ``LIMIT``.
"""

from __future__ import annotations

import subprocess
import sys

LIMIT = 2.5
ROUNDS = 20
TIMED = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def import_seconds(module: str) -> float:
    """Seconds that one fresh interpreter takes for the import, without its own start."""
    command = [sys.executable, "-c", TIMED.format(module)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    pairs = [(import_seconds("msgspec"), import_seconds("rl_staleness")) for _ in range(ROUNDS)]
    msgspec, ours = (min(seconds) for seconds in zip(*pairs, strict=True))
    print(
        f"import: rl_staleness {ours * 1e3:.1f} ms, msgspec {msgspec * 1e3:.1f} ms, "
        f"ratio {ours / msgspec:.2f} (limit {LIMIT})"
    )
    return int(ours > LIMIT * msgspec)


if __name__ == "__main__":
    sys.exit(main())
