"""Fuzz one target for a while, led by the lines of this library that the inputs reach.

    python -m tests.fuzz trace|resume|server|client [--seconds 60] [--seed N] [--corpus FOLDER]

It needs atheris (``pip install atheris``), which the tests do not. An input that breaks a promise
is written to ``crash-*`` in the working directory; ``--again FILE`` runs it once more.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.fuzz.mutations import mutated


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("target", choices=["trace", "resume", "server", "client"])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 2**31))
    parser.add_argument("--corpus", type=Path, help="inputs that reached something new are kept")
    parser.add_argument("--again", type=Path, help="run this input and no other")
    arguments = parser.parse_args()
    logging.lastResort = None
    if arguments.again is not None:
        targets = importlib.import_module("tests.fuzz.targets")
        with tempfile.TemporaryDirectory() as folder:
            targets.TARGETS[arguments.target](arguments.again.read_bytes(), Path(folder))
        return
    print(f"--seed {arguments.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        _fuzz(arguments, Path(scratch))


def _fuzz(arguments: argparse.Namespace, scratch: Path) -> None:
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["rl_staleness"]):
        targets = importlib.import_module("tests.fuzz.targets")
    corpus = arguments.corpus or scratch / "corpus"
    folder = scratch / "folder"
    for each in (corpus, folder):
        each.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(targets.SEEDS[arguments.target]):
        (corpus / f"seed-{number}").write_bytes(seed)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        return mutated(bytes(data), chance, largest=most)

    options = [
        f"-max_total_time={arguments.seconds}",
        f"-seed={arguments.seed}",
        "-max_len=20000",
        "-len_control=0",
        "-rss_limit_mb=4096",
        "-timeout=120",
    ]
    run = targets.TARGETS[arguments.target]
    atheris.Setup(
        [sys.argv[0], *options, str(corpus)],
        lambda data: run(data, folder),
        custom_mutator=mutate,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
