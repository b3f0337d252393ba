"""The labels that vLLM puts on weights, and what they say about versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MAX_NAMES", "Labels", "remember", "spans_from_labels"]

MAX_NAMES = 1024
"""Labels and adapters remembered: of a call that began so many refits ago no spans are known."""


@dataclass(slots=True)
class Labels:
    """What the engine's labels say about versions, and whether they can be believed."""

    versions: dict[str, int | None] = field(default_factory=dict[str, "int | None"])
    """By label; None where it was given to several versions, or at no known place."""
    current: str | None = None
    """The label of the weights that generate."""
    due: bool = False
    """The first one waits for the engine's loop."""
    of_trainer: str | None = None
    """Set by the trainer itself since the last pause."""
    believed: bool = False
    """None is on its way, and the last one was set in a pause."""
    failed: bool = False
    """The engine refused one."""

    def learn(self, label: str, version: int | None) -> None:
        """Note which version carries a label."""
        known = self.versions.get(label, version)
        remember(self.versions, label, version if known == version else None)

    def spans(self, state: Any, tokens: int) -> tuple[tuple[int, ...], ...] | None:
        """What they say of a call, by vLLM's state of it; None if they cannot be believed."""
        if not self.believed:
            return None
        starts = getattr(state, "weight_version_starts", None)  # vLLM 0.32 and later
        if not (starts and tokens):
            return None
        if len(starts) > 1 or starts[0][1]:
            return spans_from_labels(starts, tokens, self.versions)
        version = self.versions.get(starts[0][0])
        return None if version is None else ((starts[0][1], tokens, version),)


def spans_from_labels(
    starts: Sequence[tuple[str, int]], tokens: int, versions: Mapping[str, int | None]
) -> tuple[tuple[int, ...], ...] | None:
    """Turn vLLM's (label, first token) pairs into spans; None where a label says no version.

    >>> spans_from_labels([("0", 0), ("2", 30)], 90, {"0": 0, "2": 2})
    ((0, 30, 0), (30, 90, 2))
    """
    spans: list[tuple[int, ...]] = []
    stop = tokens
    for label, start in reversed(starts):
        version = versions.get(label)
        if version is None:
            return None
        if start < stop:  # else a stop string took all of it away
            spans.append((start, stop, version))
            stop = start
    return tuple(reversed(spans)) or None


def remember(names: dict[Any, Any], name: object, value: object) -> None:
    """Keep the newest names."""
    names.pop(name, None)
    names[name] = value
    if len(names) > MAX_NAMES:
        del names[next(iter(names))]
