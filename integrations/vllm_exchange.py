"""One request and its answer over HTTP, in bounded time and memory, whatever the server sends.

The standard library waits as long for each byte as it was told to wait for all, believes the length
that a server announces, and skips as many interim answers as come. Nothing is decompressed, and no
redirect is followed: what carries the server's key goes to the server alone.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from rl_staleness.printable import printable

__all__ = ["LARGEST_ANSWER", "LONGEST_ERROR", "exchanged"]

LARGEST_ANSWER = 64 * 2**20
"""Bytes of an answer and its headers; the calls of a hundred thousand requests are fewer."""

LONGEST_ERROR = 300
"""Characters of what is said of an answer."""

_PIECE = 65536


class _Metered(io.RawIOBase):
    """What a socket brings, up to a moment and to a number of bytes."""

    def __init__(self, source: socket.socket, end: float) -> None:
        self._socket, self._raw = source, source.makefile("rb", buffering=0)
        self._end, self._left = end, LARGEST_ANSWER

    def makefile(self, mode: str) -> io.BufferedReader:
        """What the standard library asks a socket for."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the answer takes too long")
        self._socket.settimeout(seconds)
        number = self._raw.readinto(buffer)
        self._left -= number or 0
        if self._left < 0:
            raise http.client.HTTPException(f"the answer is larger than {LARGEST_ANSWER} bytes")
        return number

    def close(self) -> None:
        self._raw.close()
        super().close()


def exchanged(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    *,
    headers: Mapping[str, str],
    seconds: float,
) -> tuple[int, bytes]:
    """Send one request and read the whole answer; the status, and the body.

    Args:
        seconds: for each of connecting, sending and the answer.

    Raises:
        OSError, HTTPException: there is no answer, or it is none of HTTP, too late or too large;
            the connection is closed.
    """
    connection.timeout = seconds
    if connection.sock is not None:
        connection.sock.settimeout(seconds)
    try:
        connection.request(method, path, body=body, headers=dict(headers))
        connection.response_class = partial(_response, end=time.monotonic() + seconds)  # type: ignore[assignment]
        response = connection.getresponse()
        return response.status, _read(response)
    except (ValueError, http.client.HTTPException) as error:
        connection.close()
        if isinstance(error, OSError):
            raise
        # Without the chain: what the server sent stands in it, and tracebacks are printed.
        said = printable(f"{type(error).__name__}: {error}", longest=LONGEST_ERROR)
        raise http.client.HTTPException(said) from None
    except BaseException:
        connection.close()
        raise


def _response(source: socket.socket, *more: Any, end: float, **named: Any) -> Any:
    metered: Any = _Metered(source, end)
    return http.client.HTTPResponse(metered, *more, **named)


def _read(response: http.client.HTTPResponse) -> bytes:
    """The body; in pieces, as no memory is taken for a length that is only announced."""
    pieces: list[bytes] = []
    while piece := response.read(_PIECE):
        pieces.append(piece)
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(pieces)
