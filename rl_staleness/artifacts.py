"""The files that a run shows beside its numbers: its trace, packed, the report and the picture.

They are made of whole lines only, so that a trace may be taken while it is written. A sink has them
made in a process of its own: that takes no time from the training in this one, and can be ended.

    python -m rl_staleness.artifacts pack|draw TRACE FOLDER NICENESS     says as JSON what it did
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, NamedTuple, cast

from rl_staleness.events import SCHEMA, StepTrained, TraceError, decode
from rl_staleness.trace import LONGEST_LINE

__all__ = ["PACKED", "PICTURE", "REPORT", "Packed", "draw", "pack", "pack_aside", "reason"]

PACKED, REPORT, PICTURE = "rollout_trace.jsonl.gz", "staleness_report.html", "staleness.png"
"""Names of the files; pages that lay runs side by side look for the same name."""

LONGEST_REASON = 300
"""Characters."""

_CHUNK = 1 << 20


class Packed(NamedTuple):
    """A trace as it stood at one moment, in one file."""

    path: str
    rows: int
    """Lines."""
    first_step: int | None
    last_step: int | None
    sha256: str
    """Of the lines, unpacked."""

    @property
    def metadata(self) -> dict[str, object]:
        """What a reader wants to know before he fetches it."""
        return {"schema": SCHEMA, **{k: v for k, v in self._asdict().items() if k != "path"}}


def pack(trace: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Packed:
    """Write the trace's whole lines into the folder, compressed; the same lines, the same bytes.

    A torn last line is left out.

    Raises:
        OSError: it cannot be read, or the file cannot be written; none is left behind then.
        TraceError: a line is longer than any of a trace.
    """
    path = os.path.join(folder, PACKED)
    digest = hashlib.sha256()
    rows, steps = 0, list[int]()
    try:
        with _opened(trace) as source, open(path, "wb") as file, _compressed(file) as target:
            for line in _whole_lines(source):
                target.write(line)
                digest.update(line)
                rows += 1
                if line.startswith(b'{"event":"step_trained"'):
                    steps = [*steps[:1], *_number(line)]
    except BaseException:
        _remove(path)
        raise
    return Packed(
        path, rows, steps[0] if steps else None, steps[-1] if steps else None, digest.hexdigest()
    )


def pack_aside(
    trace: str | os.PathLike[str], folder: str, *, seconds: float, in_background: bool
) -> Packed:
    """Do what `pack` does in a process of its own; here, where that fails.

    Args:
        seconds: after which it is ended.
        in_background: let others go first.

    Raises:
        TimeoutError: it took too long.
        OSError: as `pack`.
    """
    try:
        done = _run_aside("pack", trace, folder, seconds=seconds, in_background=in_background)
        return Packed(*json.loads(done.stdout))
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"packing the trace took longer than {max(seconds, 0):.0f} s") from error
    except (OSError, ValueError):
        return pack(trace, folder)


def draw(trace: str, folder: str, *, seconds: float, in_background: bool = False) -> dict[str, str]:
    """Draw the report and the picture of a trace into the folder, in a process of its own.

    Args:
        seconds: after which it is ended.
        in_background: let others go first.

    Returns:
        By name, why a file is not there; empty if both are.
    """
    both = (REPORT, PICTURE)
    try:
        done = _run_aside("draw", trace, folder, seconds=seconds, in_background=in_background)
        lacking = cast(dict[str, str], json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        lacking = dict.fromkeys(both, f"drawing took longer than {max(seconds, 0):.0f} s")
    except ValueError:  # it died, and what it printed is no JSON
        lacking = dict.fromkeys(both, "the drawing process died")
    except OSError as error:
        lacking = dict.fromkeys(both, reason(error))
    return {name: why for name, why in lacking.items() if not _is_file(folder, name)}


def _run_aside(
    what: str, trace: str | os.PathLike[str], folder: str, *, seconds: float, in_background: bool
) -> subprocess.CompletedProcess[bytes]:
    if not sys.executable:
        raise FileNotFoundError("there is no Python to start")
    paths = [os.path.abspath(trace), os.path.abspath(folder)]
    niceness = "10" if in_background else "0"
    return subprocess.run(
        [sys.executable, "-m", "rl_staleness.artifacts", what, *paths, niceness],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=max(seconds, 0.0),
        check=False,
    )


def reason(error: BaseException) -> str:
    """An error as one line of a readable length."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]


def _main(what: str, trace: str, folder: str, niceness: str) -> None:
    os.nice(int(niceness))
    answer = pack(trace, folder) if what == "pack" else _draw_here(trace, folder)
    sys.stdout.write(json.dumps(answer))


def _draw_here(trace: str, folder: str) -> dict[str, str]:
    """Draw each file for itself, the trace read once; what is not there, and why."""
    from rl_staleness import page, plot, report, view

    makers: dict[str, Callable[[], bytes]] = {
        REPORT: lambda: report.draw(looked_at()).encode(),
        PICTURE: lambda: plot.picture(looked_at()),
    }
    seen: list[view.RunView] = []

    def looked_at() -> view.RunView:
        if not seen:
            seen.append(view.look_at(trace))
        return seen[0]

    lacking: dict[str, str] = {}
    for name, make in makers.items():
        try:
            content = make()
            _write(os.path.join(folder, name), content)
        except page.MissingExtra as error:
            lacking[name] = str(error)
        except Exception as error:  # noqa: BLE001  # one that fails does not keep the other away
            lacking[name] = reason(error)
    return lacking


def _write(path: str, content: bytes) -> None:
    """All of it or nothing, so that a file that is there is whole."""
    try:
        with open(path + ".part", "wb") as file:
            file.write(content)
        os.replace(path + ".part", path)
    except BaseException:
        _remove(path + ".part")
        raise


def _opened(trace: str | os.PathLike[str]) -> IO[bytes]:
    if os.fspath(trace).endswith(".gz"):
        return cast(IO[bytes], gzip.open(trace, "rb"))
    return open(trace, "rb")


def _compressed(file: IO[bytes]) -> gzip.GzipFile:
    """Without name and time, which would make other bytes of the same lines."""
    return gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0)


def _whole_lines(source: IO[bytes]) -> Iterator[bytes]:
    """Lines with their newline; a last one without gets it if it is an event.

    Raises:
        TraceError: a line is longer than any of a trace.
    """
    try:
        for line in iter(partial(source.readline, LONGEST_LINE), b""):
            if line.endswith(b"\n"):
                yield line
            elif len(line) >= LONGEST_LINE:
                raise TraceError(f"line: longer than {LONGEST_LINE} bytes")
            elif _is_event(line):
                yield line + b"\n"
    except EOFError:  # the end of a packed trace is missing
        return


def _is_event(line: bytes) -> bool:
    try:
        decode(line)
    except TraceError:
        return False
    return True


def _number(line: bytes) -> list[int]:
    try:
        event = decode(line)
    except TraceError:  # whoever draws or reads it will say so
        return []
    return [event.step] if isinstance(event, StepTrained) else []


def _is_file(folder: str, name: str) -> bool:
    return os.path.isfile(os.path.join(folder, name))


def _remove(path: str) -> None:
    if os.path.exists(path):
        os.remove(path)


if __name__ == "__main__":
    _main(*sys.argv[1:])
