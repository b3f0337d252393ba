"""``rollout_trace.jsonl``: written line by line while a run goes on, read as a stream.

The writer appends whole lines with one ``write`` each and no fsync: what was written survives the
death of the process. A line that cannot be written is taken back, so that no torn line ever stands
in the middle; how many were lost is said by a ``gap`` line as soon as writing works again.

    python -m rl_staleness.trace TRACE     prints a step a row
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import io
import logging
import os
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, cast

import msgspec

from rl_staleness.events import Event, Gap, RunStarted, TraceError, decode, encode
from rl_staleness.ledger import Ledger
from rl_staleness.staleness import StepStaleness

__all__ = ["TraceWriter", "numbered_events", "read", "run_of", "steps"]

LONGEST_LINE = 1 << 26
"""Bytes; a longer line is an error, so that rubbish cannot fill the memory."""

MOST_UNPACKED = 100
"""Times the size of a packed trace that it may hold: real ones hold ten times as much, and what was
made to fill a memory a thousand times."""

_TOO_LARGE = (
    f"the file unpacks to more than {MOST_UNPACKED} times its size; gunzip it if you trust it"
)

_FIRST = b'{"event":"run_started"'
"""What a trace begins with, also one whose first line is torn."""

_log = logging.getLogger(__name__)


def read(path: str | os.PathLike[str]) -> Iterator[Event]:
    """Read a trace as a stream; a name that ends in ``.gz`` is decompressed on the way.

    A torn last line is left out with a warning.

    Raises:
        TraceError: ``FILE:LINE: FIELD: reason``, or the file is empty.
        OSError: it cannot be opened or read.
    """
    for _, event in numbered_events(path):
        yield event


def numbered_events(
    path: str | os.PathLike[str], *, torn: Callable[[int, int], None] | None = None
) -> Iterator[tuple[int, Event]]:
    """Read a trace like `read`, with the number of each line, from 1.

    Args:
        torn: is told the number and the bytes of a torn last line, instead of the log.
    """
    number = 0
    with _opened(path) as file:
        lines = iter(partial(file.readline, LONGEST_LINE), b"")
        if os.fspath(path).endswith(".gz"):
            lines = _limited(lines, path)
        try:
            for number, line in enumerate(lines, start=1):
                if len(line) >= LONGEST_LINE and not line.endswith(b"\n"):
                    raise TraceError(f"{path}:{number}: line: longer than {LONGEST_LINE} bytes")
                try:
                    event = decode(line)
                except TraceError as error:
                    if not _is_torn(line):
                        raise TraceError(f"{path}:{number}: {error}") from None
                    if number == 1:
                        raise TraceError(f"{path}:1: line: torn; the file holds no trace") from None
                    tell = partial(_log_torn, path) if torn is None else torn
                    tell(number, len(line))
                    number -= 1
                    break
                if number == 1 and type(event) is not RunStarted:
                    raise TraceError(f"{path}:1: event: there is no run_started before it")
                yield number, event
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{path}:{number + 1}: line: not readable as gzip: {error}") from error
    if not number:
        raise TraceError(f"{path}:1: line: the file holds no trace")


def run_of(path: str | os.PathLike[str]) -> str:
    """The identity of the run whose trace stands there; errors are those of `read`."""
    first = next(read(path))
    assert isinstance(first, RunStarted)  # `read` takes no other
    return first.run


def steps(path: str | os.PathLike[str]) -> Iterator[StepStaleness]:
    """Recompute every step of a trace, in constant memory; errors are those of `read`."""
    apply = Ledger().apply
    for _, event in numbered_events(path):
        step = apply(event)
        if step is not None:
            yield step


class TraceWriter:
    """Appends events to one file and knows what is missing in it.

    Args:
        path: the file to make or go on with. A trace of another run that stands there is left
            alone: ``rollout_trace-2.jsonl`` beside it is taken, and so on.
        run: the run's identity.

    Raises:
        OSError: the file cannot be opened for appending, or another process writes this run.
        TraceError: what stands there is no trace.
        ValueError: the name ends in ``.gz``.
    """

    def __init__(self, path: str | os.PathLike[str], *, run: str) -> None:
        if os.fspath(path).endswith(".gz"):
            raise ValueError(f"trace: {path} is written as plain lines; compress it afterwards")
        try:
            self.path, file = _free(Path(path), run)
        except OSError as error:
            if error.filename is None or "trace: " in str(error):
                raise
            problem = f"trace: {error.strerror}; pass trace= a file that can be written"
            raise type(error)(error.errno, problem, os.fspath(path)) from error
        self._taken = None if self.path == Path(path) else Path(path)  # by another run
        self._file: int | None = file
        self.lost = 0
        """Lines of this writer that are not in the file."""
        self._unsaid = self._written = 0
        self.held: deque[bytes] = deque()
        """Lines that could not be written so far, and are written before any other."""
        try:
            self.torn = _mend(self.path)
            """Bytes of a torn last line that were cut off."""
        except BaseException:
            self.close()
            raise
        self.continued = self.path.stat().st_size > 0
        """The file holds a trace of this run already."""
        here = weakref.WeakMethod(self.close)
        os.register_at_fork(after_in_child=lambda: (here() or (lambda: None))())

    def append(
        self,
        event: Event,
        *,
        held: bool = False,
        applied: Callable[[Event], None] | None = None,
    ) -> bool:
        """Write one line; ``applied`` gets what a reader will see of it, and of a gap before it.

        Args:
            held: if it cannot be written it is not lost, but written before the next line that can
                be: a run's start, without which nothing can be read, and what goes with it.

        Returns:
            False if it could not be written.

        Raises:
            TraceError: a value is of a wrong type, or the line would be longer than readers take;
                nothing was written.
        """
        if self._taken is not None:  # not before there is a run: a checkpoint may name another one
            told = "rl_staleness: trace: %s is another run's; this one is in %s"
            _log.warning(told, self._taken, self.path)
            self._taken = None
        line = encode(event)
        if len(line) >= LONGEST_LINE:
            raise TraceError(f"line: {len(line)} bytes; readers take less than {LONGEST_LINE}")
        seen, lines = [decode(line)], [line]
        if self._unsaid and not held:
            # Both or none, so that a disk that is nearly full is not filled with gaps.
            seen.insert(0, Gap(time=event.time, lost=self._unsaid))
            lines.insert(0, encode(seen[0]))
        # A second line that is held waits without a try: they may be thousands.
        is_written = not (held and self.held) and self._write_held() and self._write(*lines)
        if is_written:
            self._unsaid = 0
        else:
            self.lost += 1
            self._unsaid += not held
            self.held += [line] if held else []
        if applied is not None and (is_written or held):
            for each in seen:
                applied(each)
        return is_written

    def damage(self) -> str | None:
        """What became of the file while it was written here; None: nothing, it is all there."""
        if self._file is None:
            return None
        mine = os.fstat(self._file)
        try:
            there = os.stat(self.path)
        except OSError:
            return "the trace was deleted while it was written"
        if (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            return "the trace was replaced while it was written"
        if mine.st_size < self._written:
            return "the trace was cut short while it was written"
        return None

    def skip(self) -> None:
        """Something happened that cannot be written: the next line has a gap before it."""
        self._unsaid += 1

    def close(self) -> None:
        """Close the file; a second time does nothing. A forked child never writes to it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def discard(self) -> None:
        """Close the file, and remove it if nothing was ever written to it."""
        if self._file is not None and not os.fstat(self._file).st_size:
            self.path.unlink(missing_ok=True)
        self.close()

    def _write_held(self) -> bool:
        while self.held and self._write(self.held[0]):
            self.held.popleft()
            self.lost -= 1
        return not self.held

    def _write(self, *lines: bytes) -> bool:
        if self._file is None:
            return False
        data = b"\n".join(lines) + b"\n"
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            if not (self._unsaid or self.held):
                _log.warning("%s: a line could not be written: %s", self.path, error)
            if written:
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            return False
        self._written += written
        return True


def _opened(path: str | os.PathLike[str]) -> IO[bytes]:
    if os.fspath(path).endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    return open(path, "rb", buffering=io.DEFAULT_BUFFER_SIZE * 16)


def _limited(lines: Iterator[bytes], path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The lines of a packed trace, as far as a real one could hold them."""
    left = max(LONGEST_LINE, MOST_UNPACKED * os.stat(path).st_size)
    for number, line in enumerate(lines, start=1):
        left -= len(line)
        if left < 0:
            raise TraceError(f"{path}:{number}: line: {_TOO_LARGE}")
        yield line


def _log_torn(path: str | os.PathLike[str], number: int, size: int) -> None:
    _log.warning("%s:%d: torn last line, %d bytes, left out", path, number, size)


def _is_torn(line: bytes) -> bool:
    """Whether a line that is no event is one that was being written when its process died."""
    return not line.endswith(b"\n") and not _is_json(line)


def _is_json(line: bytes) -> bool:
    """Whether a line is whole JSON, so that its error is no tear."""
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _free(path: Path, run: str) -> tuple[Path, int]:
    """Open the first of path, path-2, ... that nobody writes and that is new or of this run."""
    number, free = 1, path
    while True:
        if free.exists() and not free.is_file():
            raise OSError(errno.EINVAL, "trace: not a regular file", str(free))
        file = os.open(free, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        alone = _lock(file)
        try:
            ours = not free.stat().st_size or _run(free) in (None, run)
        except BaseException:
            os.close(file)
            raise
        if alone and ours:
            return free, file
        os.close(file)
        if ours and free.stat().st_size:
            raise FileExistsError(f"trace: {free}: another process is writing run {run!r}")
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")


def _lock(file: int) -> bool:
    """Keep other writers off this file while it is open; False if there is one."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _run(path: Path) -> str | None:
    """The run whose trace stands there; None: it died while it wrote the first line."""
    try:
        return run_of(path)
    except TraceError as error:
        with open(path, "rb") as file:
            start = file.read(len(_FIRST))
        if "holds no trace" not in str(error) or not _FIRST.startswith(start):
            raise TraceError(f"trace: {error}; pass trace= another file") from error
        return None


def _mend(path: Path) -> int:
    """Give a whole last line its newline and cut off a torn one; the number of bytes cut off.

    Raises:
        TraceError: it is longer than any line of a trace; the file is left as it is.
    """
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        last = _after_last_newline(file, end)
        if len(last) >= LONGEST_LINE:
            problem = f"its last line is longer than {LONGEST_LINE} bytes; pass trace= another file"
            raise TraceError(f"trace: {path}: {problem}")
        if not last:
            return 0
        if _is_json(last):
            file.seek(end)
            file.write(b"\n")
            return 0
        file.truncate(end - len(last))
        return len(last)


def _after_last_newline(file: IO[bytes], end: int) -> bytes:
    """What stands there; of more than the longest line as much as tells that it is."""
    parts: list[bytes] = []
    start = end
    while start and end - start < LONGEST_LINE:
        stop, start = start, max(0, start - 65536)
        file.seek(start)
        block = file.read(stop - start)
        newline = block.rfind(b"\n")
        parts.append(block[newline + 1 :])
        if newline >= 0:
            break
    return b"".join(reversed(parts))


if __name__ == "__main__":
    import sys

    from rl_staleness.cli import main

    sys.exit(main(["steps", *sys.argv[1:]]))
