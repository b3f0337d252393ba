"""How off-policy was the batch that I just trained on? Exactly, online, for any trainer.

Batch age is the token-weighted number of policy updates between generating a token and training on
it. What is exported here is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_staleness.callback import StalenessCallback
    from rl_staleness.engines import captured
    from rl_staleness.events import Call, TraceError
    from rl_staleness.group import Group
    from rl_staleness.ledger import Ledger
    from rl_staleness.staleness import StepStaleness
    from rl_staleness.trace import read, steps

__all__ = [
    "Call",
    "Group",
    "Ledger",
    "StalenessCallback",
    "StepStaleness",
    "TraceError",
    "captured",
    "read",
    "steps",
]

_HOME = {
    "Call": "events",
    "Group": "group",
    "Ledger": "ledger",
    "StalenessCallback": "callback",
    "StepStaleness": "staleness",
    "TraceError": "events",
    "captured": "engines",
    "read": "trace",
    "steps": "trace",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
