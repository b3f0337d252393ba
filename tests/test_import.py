"""What importing the package pulls in, and who may import whom."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = sorted(path.stem for path in (ROOT / "rl_staleness").glob("*.py"))
INTEGRATIONS = sorted(path.stem for path in (ROOT / "integrations").glob("*.py"))

PROBE = """
import importlib, json, sys
before = set(sys.modules)
importlib.import_module(sys.argv[1])
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@functools.cache
def modules_loaded_by(module: str) -> frozenset[str]:
    """Names in ``sys.modules`` that a fresh interpreter has only after importing ``module``."""
    result = subprocess.run(
        [sys.executable, "-c", PROBE, module], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return frozenset(json.loads(result.stdout))


def third_party(modules: frozenset[str]) -> set[str]:
    """The distributions' names, without those that msgspec itself loads where they are there."""
    ours = modules - modules_loaded_by("msgspec")
    return {name.partition(".")[0] for name in ours} - set(sys.stdlib_module_names)


def imported_names(source: Path) -> set[str]:
    """Dotted names that a file imports anywhere, ``from a import b`` as both ``a`` and ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def test_the_package_loads_nothing_from_outside_the_standard_library_but_msgspec():
    loaded = modules_loaded_by("rl_staleness")

    assert third_party(loaded) == {"rl_staleness"}


@pytest.mark.parametrize("name", [name for name in CORE if name not in ("__init__", "__main__")])
def test_each_core_module_needs_only_msgspec_and_no_integration(name: str):
    loaded = modules_loaded_by(f"rl_staleness.{name}")

    assert third_party(loaded) == {"rl_staleness"}
    assert not [name for name in loaded if name.startswith("rl_staleness.integrations")]


def test_the_package_of_integrations_loads_none_of_them():
    loaded = modules_loaded_by("rl_staleness.integrations")

    assert third_party(loaded) == {"rl_staleness"}
    assert not [name for name in loaded if name.startswith("rl_staleness.integrations.")]


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_integrations_do_not_import_one_another(name: str):
    """But the parts of one product, which have its name alone or before an underscore."""
    imported = imported_names(ROOT / "integrations" / f"{name}.py")
    product = f"rl_staleness.integrations.{name.partition('_')[0]}"

    assert not [
        other
        for other in imported
        if other.startswith(("rl_staleness.integrations", "integrations", "."))
        and not (f"{other}.".startswith(f"{product}.") or other.startswith(f"{product}_"))
    ]
