"""Names from a trace as text for a terminal: they are input from outside, and may be hostile."""

from __future__ import annotations

import json
import unicodedata

import msgspec

__all__ = ["as_ascii_json", "printable"]


def printable(text: str, *, longest: int | None = None) -> str:
    """A text as one line, without characters that steer a terminal or turn the text around.

    Args:
        longest: characters that are kept; what is longer ends in an ellipsis. None: all.

    >>> printable("a" + chr(27) + "[31m" + chr(0x202E) + "b" + chr(10) + "c")
    'a?[31m?b c'
    """
    if longest is not None:
        text = text[: 4 * longest]
    text = " ".join(text.split())
    text = "".join("?" if unicodedata.category(c)[0] == "C" else c for c in text)
    return text if longest is None or len(text) <= longest else text[: longest - 1] + "…"


def as_ascii_json(value: object) -> str:
    """A value as one line of JSON in printable ASCII: names stay what they are, and harmless.

    >>> as_ascii_json({"name": chr(27) + chr(127)})
    '{"name":"\\\\u001b\\\\u007f"}'
    """
    plain = msgspec.to_builtins(value, str_keys=True)
    text = json.dumps(plain, separators=(",", ":"), allow_nan=False)
    return text.replace("\x7f", "\\u007f")
