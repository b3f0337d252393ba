"""The command ``rl-staleness``."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

import msgspec

from rl_staleness import doctor, lens
from rl_staleness.compare import compared, find_trace, overlay, text_table
from rl_staleness.destinations import Product, product_of, replay, upload
from rl_staleness.page import MissingExtra
from rl_staleness.plot import plot
from rl_staleness.printable import as_ascii_json, printable
from rl_staleness.report import report
from rl_staleness.staleness import StepStaleness
from rl_staleness.trace import steps

__all__ = ["main", "table_rows"]

_COLUMNS: tuple[tuple[str, Callable[[StepStaleness], object]], ...] = (
    ("step", lambda s: s.step),
    ("version", lambda s: s.version),
    ("batch_age", lambda s: _short(s.batch_age)),
    ("in_flight", lambda s: _short(s.age_in_flight)),
    ("in_queue", lambda s: _short(s.age_in_queue)),
    ("p50", lambda s: _short(s.age_p50)),
    ("p95", lambda s: _short(s.age_p95)),
    ("max", lambda s: _short(s.age_max)),
    ("refits", lambda s: _short(s.batch_age_refits)),
    ("lo", lambda s: _short(s.age_lo)),
    ("hi", lambda s: _short(s.age_hi)),
    ("coverage", lambda s: _short(s.coverage)),
    ("tokens", lambda s: s.tokens),
    ("spanning", lambda s: s.spanning_calls),
    ("violations", lambda s: s.violations),
    ("tokens by version", lambda s: _by_version(s.tokens_by_version)),
)


_PAGE, _PICTURE = b"<!doctype html>", b"\x89PNG"

WIDTH = 6
"""Of a number with three decimals, at least."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0, or 1 where the doctor finds a broken invariant, or 2 for wrong use and unreadable files,
        with one line on stderr.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    parser = _Parser(prog="rl-staleness", description="How off-policy was each training batch?")
    parser.add_argument("--version", action="version", version=_version())
    _add_commands(parser)
    try:
        arguments = parser.parse_args(argv)
        with _uncollected():
            status: int | None = arguments.run(arguments)
        if sys.stdout is not None:  # it was closed before we began
            sys.stdout.flush()
    except (_Usage, MissingExtra) as error:
        return _fail(f"{parser.prog}: {error}")
    except KeyboardInterrupt:
        return 130
    except ValueError as error:  # a TraceError, or a name that no file can have
        return _fail(str(error))
    except BrokenPipeError:
        sys.stdout = None  # nobody reads on; leave without a word
        status = 0
    except OSError as error:
        return _fail(f"{error.filename or 'rl-staleness'}: {error.strerror or error}")
    return status or 0


def table_rows(numbers: Iterator[StepStaleness]) -> Iterator[str]:
    """Lay out steps as they come: a header before the first of them, then a row each."""
    widths = [max(len(title), WIDTH) for title, _ in _COLUMNS[:-1]]
    titles = (title.rjust(width) for (title, _), width in zip(_COLUMNS, widths, strict=False))
    header = "  ".join([*titles, _COLUMNS[-1][0]])
    for step in numbers:
        if header:
            yield header
        header = ""
        cells = (
            str(cell(step)).rjust(width) for (_, cell), width in zip(_COLUMNS, widths, strict=False)
        )
        yield "  ".join([*cells, str(_COLUMNS[-1][1](step))])
    if header:
        yield header


def _add_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("steps", help="print the exact batch age of every step")
    _add_trace(command)
    command.add_argument("--json", action="store_true", help="one JSON object a step")
    command.set_defaults(run=_print_steps)

    text = "name every violation and broken invariant with its lines; exits 1 if there is one"
    command = commands.add_parser("doctor", help=text)
    _add_trace(command)
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.set_defaults(run=_examine)

    text = "print what other frameworks would have shown, next to the exact batch age"
    command = commands.add_parser("lens", help=text)
    _add_trace(command)
    text = "one JSON object with the definitions, then one a step"
    command.add_argument("--json", action="store_true", help=text)
    command.set_defaults(run=_look)

    command = commands.add_parser("report", help="draw a run: one HTML file that opens anywhere")
    _add_trace(command)
    _add_output(command, "staleness_report.html")
    command.set_defaults(run=_report)

    command = commands.add_parser("plot", help="draw a run: one PNG")
    _add_trace(command)
    _add_output(command, "staleness.png")
    command.set_defaults(run=_plot)

    command = commands.add_parser("compare", help="lay runs side by side: a table and an overlay")
    command.add_argument(
        "sources",
        metavar="RUN",
        nargs="+",
        help="two or more: traces, or directories that hold rollout_trace.jsonl or .jsonl.gz; ids"
        " of MLflow runs; W&B runs as ENTITY/PROJECT/RUN or the folder of an offline one",
    )
    _add_tracking_uri(command)
    _add_output(command, "staleness_compare.html")
    command.set_defaults(run=_compare)

    text = "attach a trace, its report and its picture to a run, after a crash say"
    command = commands.add_parser("upload", help=text)
    _add_trace(command)
    _add_run(command, "the run", required=True)
    command.set_defaults(run=_upload)

    text = (
        "put the steps of a trace into a run, with their times, and attach it: once and only once"
    )
    command = commands.add_parser("replay", help=text)
    _add_trace(command)
    _add_run(command, "the run, default one that is made for this trace", required=False)
    command.set_defaults(run=_replay)


def _add_trace(command: argparse.ArgumentParser) -> None:
    command.add_argument("trace", metavar="TRACE", help="rollout_trace.jsonl, or .jsonl.gz")


def _add_run(command: argparse.ArgumentParser, which: str, *, required: bool) -> None:
    text = f"{which}: an MLflow run id, ENTITY/PROJECT/RUN of W&B, or the folder of an offline run"
    command.add_argument("--run", metavar="RUN", dest="target", required=required, help=text)
    product = command.add_mutually_exclusive_group()
    for name, title in (("wandb", "W&B"), ("mlflow", "MLflow")):
        text = f"it is one of {title}, whatever the form of its name"
        product.add_argument(
            f"--{name}", dest="product", action="store_const", const=name, help=text
        )
    _add_tracking_uri(command)


def _add_tracking_uri(command: argparse.ArgumentParser) -> None:
    text = "where MLflow runs are, default MLflow's own"
    command.add_argument("--tracking-uri", metavar="URI", help=text)


def _add_output(command: argparse.ArgumentParser, default: str) -> None:
    text = "the file to write, default %(default)s"
    command.add_argument("-o", "--output", metavar="FILE", default=default, help=text)


def _report(arguments: argparse.Namespace) -> None:
    _check_output(arguments.output)
    _write(arguments.output, report(arguments.trace).encode())


def _plot(arguments: argparse.Namespace) -> None:
    _check_output(arguments.output)
    _write(arguments.output, plot(arguments.trace))


def _compare(arguments: argparse.Namespace) -> None:
    if len(arguments.sources) < 2:
        raise _Usage("compare: one run cannot be compared; name two or more")
    _check_output(arguments.output)
    for source in arguments.sources:
        find_trace(source)
    views = compared(arguments.sources, tracking_uri=arguments.tracking_uri)
    for row in text_table(views):
        print(row)
    sys.stdout.flush()
    _write(arguments.output, overlay(views).encode())


def _upload(arguments: argparse.Namespace) -> None:
    product, where = _destination(arguments)
    print(upload(arguments.trace, product, run=arguments.target, **where))


def _replay(arguments: argparse.Namespace) -> None:
    product, where = _destination(arguments)
    print(replay(arguments.trace, product, run=arguments.target, **where))


def _destination(arguments: argparse.Namespace) -> tuple[Product, dict[str, str | None]]:
    """Which product, by its option or the form of the run's name, and where its runs are."""
    run, product = arguments.target, arguments.product
    if product is None and run is not None:
        product = product_of(run)
        if product is None:
            raise _Usage(
                f"--run: {run!r} is no MLflow run id (32 digits), ENTITY/PROJECT/RUN or folder of"
                " an offline W&B run; say --mlflow or --wandb if it is one all the same"
            )
    if product is None:
        raise _Usage("replay: say where, with --wandb, --mlflow or --run")
    if product == "mlflow":
        return "mlflow", {"tracking_uri": arguments.tracking_uri}
    if arguments.tracking_uri is not None:
        raise _Usage("--tracking-uri: it is MLflow's, and the run is one of W&B")
    return "wandb", {}


def _check_output(path: str) -> None:
    """See that nothing is written over but a page or a picture: a trace is all that a run leaves.

    Raises:
        _Usage: something else stands there.
    """
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        start = file.read(len(_PAGE))
    if start and start.lower() != _PAGE and not start.startswith(_PICTURE):
        raise _Usage(f"-o: {path} is there, and is no page or picture of ours; name another file")


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
    print(f"wrote {os.path.abspath(path)}", file=sys.stderr)


def _print_steps(arguments: argparse.Namespace) -> None:
    numbers = steps(arguments.trace)
    for row in _json_rows(numbers) if arguments.json else table_rows(numbers):
        print(row)


def _examine(arguments: argparse.Namespace) -> int:
    found = doctor.examine(arguments.trace)
    if arguments.json:
        print(as_ascii_json(doctor.as_record(found)))
    else:
        for line in doctor.told(found):
            print(line)
    return 0 if found.sound else 1


def _look(arguments: argparse.Namespace) -> None:
    seen = lens.look(arguments.trace)
    if arguments.json:
        print(as_ascii_json({"definitions": lens.definitions_record()}))
        for step in seen:
            print(as_ascii_json(lens.as_record(step)))
    else:
        for row in lens.lens_rows(seen):
            print(row)


@contextmanager
def _uncollected() -> Generator[None]:
    """A long trace makes many objects and no cycles: nothing looks for them."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def _json_rows(numbers: Iterator[StepStaleness]) -> Iterator[str]:
    encoder = msgspec.json.Encoder()
    return (encoder.encode(step).decode() for step in numbers)


class _Usage(Exception):
    """Wrong use of the command."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise _Usage(f"{message} (see {self.prog} --help)")


def _fail(line: str) -> int:
    print(printable(line), file=sys.stderr)
    return 2


def _short(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}" if isinstance(number, float) else str(number)


def _by_version(tokens: dict[int, int]) -> str:
    return " ".join(f"v{version}:{count}" for version, count in tokens.items())


def _version() -> str:
    try:
        return f"rl-staleness {version('rl-staleness')}"
    except PackageNotFoundError:
        return "rl-staleness (not installed)"


if __name__ == "__main__":
    sys.exit(main())
