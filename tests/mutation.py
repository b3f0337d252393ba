"""Breaks the core's arithmetic, one small change at a time, and asks the tests if they notice.

    python -m tests.mutation [MODULE ...] [--tests NAME ...] [-k EXPRESSION] [--again FILE]

MODULE is a name in the package, ``spans`` for ``rl_staleness/spans.py``; the default is `MODULES`.
The tests are collected once. For each mutant the process forks; the child gives the live function
the changed code and runs the tests that reach the changed lines, quick ones first, until one fails.
No file is ever changed. Those that no test notices are printed at the end with the line as it was;
``tests/mutants.md`` says of each why it is no error. Exit 1: there are others.

What is changed: comparisons, operators, whole numbers by one, ``and`` and ``or``, conditions, what
is returned, ``min`` and ``max``, ``any`` and ``all``; statements and filters are left out. What is
not: annotations, texts of messages, defaults, and what runs at import.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import os
import resource
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("spans", "ledger", "staleness", "groups", "refits", "listings", "ranges")
TESTS = (
    "arithmetic",
    "ranges",
    "spans",
    "ledger",
    "refits",
    "listings",
    "groups",
    "trace",
    "resume",
    "callback",
    "lost_evidence",
    "properties",
)
ARGUED = ROOT / "tests" / "mutants.md"
CPU_SECONDS = 30
"""A mutant that takes longer loops without end, and that is noticed."""
TIMEOUT_SECONDS = 400
BYTES = 8 * 2**30
KILLED, SURVIVED, SLOW = 1, 0, 2

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass
class Mutant:
    """One change to one function."""

    function: str
    """Its qualified name."""
    line: int
    """Of the statement, from 1."""
    what: str
    lines: range
    """Those of the statement without the body of a compound one."""
    code: CodeType


@dataclass
class Plan:
    """What to break and what has been found."""

    modules: list[str]
    again: set[str] | None
    """Those to try; None: all."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """How long each test took."""
    reached: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    """Tests by the file and line that they run."""
    survivors: list[str] = field(default_factory=list[str])
    number: int = 0

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of running the tests once, run them for each mutant."""
        files = [str(ROOT / "rl_staleness" / f"{name}.py") for name in self.modules]
        vars(session.config.option).update(tbstyle="native", verbose=0)  # no time for tracebacks
        self._watch(session, set(files))
        functions = {name: live_functions(f"rl_staleness.{name}") for name in self.modules}
        gc.collect()
        gc.freeze()  # so that a child copies little
        print(f"\n{len(session.items)} tests, {sum(self.seconds.values()):.0f} s", flush=True)
        for name, file in zip(self.modules, files, strict=True):
            self._break(session, name, file, functions[name])
        return True

    def _watch(self, session: pytest.Session, files: set[str]) -> None:
        """Run each test once, and note which lines it reaches."""
        for item in session.items:
            seen: set[tuple[str, int]] = set()

            def trace(frame: FrameType, kind: str, _: Any, seen: Any = seen) -> Any:
                if frame.f_code.co_filename not in files:
                    return None
                if kind == "line":
                    seen.add((frame.f_code.co_filename, frame.f_lineno))
                return trace

            began, failed = time.monotonic(), session.testsfailed
            threading.settrace(trace)
            sys.settrace(trace)
            try:
                item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            finally:
                sys.settrace(None)
                threading.settrace(None)  # type: ignore[arg-type]
            if session.testsfailed > failed:
                raise SystemExit(f"{item.nodeid} fails without any mutant")
            self.seconds[item.nodeid] = time.monotonic() - began
            for place in seen:
                self.reached[place].add(item.nodeid)

    def _break(
        self, session: pytest.Session, name: str, file: str, functions: dict[str, FunctionType]
    ) -> None:
        lines = Path(file).read_text().splitlines()
        items = {item.nodeid: item for item in session.items}
        for mutant in mutants(file):
            function = functions.get(mutant.function)
            if function is None:
                continue
            source = lines[mutant.line - 1].strip()
            said = f"{name}.{mutant.function}: {mutant.what}: `{source}`"
            if self.again is not None and said not in self.again:
                continue
            self.number += 1
            names = {n for line in mutant.lines for n in self.reached.get((file, line), ())}
            ordered = sorted(names, key=lambda n: ("properties" in n, self.seconds[n]))
            status = outcome(function, mutant, [items[n] for n in ordered])
            if status != KILLED:
                word = "slow" if status == SLOW else "survived"
                print(f"{word} {name}.py:{mutant.line} {said} [{len(ordered)} tests]", flush=True)
                if status == SURVIVED:
                    self.survivors.append(said)


def live_functions(module: str) -> dict[str, FunctionType]:
    """The functions and methods of a module by their qualified names."""
    importlib.import_module(module)
    return {
        thing.__qualname__: thing
        for thing in gc.get_objects()
        if type(thing) is FunctionType
        and thing.__module__ == module
        and "<locals>" not in thing.__qualname__
    }


def outcome(function: FunctionType, mutant: Mutant, items: list[pytest.Item]) -> int:
    """Run the tests on a mutant in a process of its own."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = SURVIVED
        try:
            os.setpgid(0, 0)
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            function.__code__ = mutant.code
            for item in items:
                failed = item.session.testsfailed
                item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
                if item.session.testsfailed > failed:
                    code = KILLED
                    break
        except BaseException:  # noqa: BLE001 (the child ends here, whatever it is)
            code = KILLED
        os._exit(code)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return KILLED if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
        time.sleep(0.003)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return SLOW


def mutants(file: str) -> Iterator[Mutant]:
    """Every mutant of the functions of a file."""
    tree = ast.parse(Path(file).read_text())
    for function, name in functions_of(tree, ""):
        for statement in statements(function.body):
            for parent, slot, node in expressions(statement):
                for what, other in variants(node):
                    put(parent, slot, other)
                    ast.fix_missing_locations(other)
                    code = code_of(compile(tree, file, "exec"), name)
                    put(parent, slot, node)
                    assert code is not None, name
                    yield Mutant(name, statement.lineno, what, header(statement), code)


def functions_of(node: ast.AST, prefix: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Functions of a module and of its classes, with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from functions_of(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield child, prefix + child.name


def code_of(module: CodeType, name: str) -> CodeType | None:
    """The code of the function with this qualified name."""
    code: CodeType | None = module
    for part in name.split("."):
        inner = [c for c in code.co_consts if isinstance(c, CodeType)] if code else []
        code = next((c for c in inner if c.co_name == part), None)
    return code


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement of a body, nested ones too, with a note of the list that holds it."""
    for at, statement in enumerate(body):
        statement.place = (body, at)  # type: ignore[attr-defined]
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from statements(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from statements(handler.body)


def header(statement: ast.stmt) -> range:
    """The lines of a statement without its body."""
    body = getattr(statement, "body", None)
    stop = body[0].lineno - 1 if body else statement.end_lineno
    return range(statement.lineno, max(stop or 0, statement.lineno) + 1)


def put(parent: Any, slot: Any, node: Any) -> None:
    """Set an entry of a list, or a field of a node."""
    if isinstance(parent, list):
        parent[slot] = node
    else:
        setattr(parent, slot, node)


def expressions(statement: ast.stmt) -> Iterator[tuple[Any, Any, ast.AST]]:
    """The statement itself and the expressions in it, with the places that hold them."""
    body, at = statement.place  # type: ignore[attr-defined]
    if isinstance(statement, ast.Assert) or is_text(statement):
        return
    yield body, at, statement
    yield from below(statement)


def is_text(statement: ast.stmt) -> bool:
    """Whether it is a docstring."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def below(node: ast.AST) -> Iterator[tuple[Any, Any, ast.AST]]:
    """The expressions below a node: no annotations, no texts, no nested statements."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(
            node, ast.Call
        ):
            continue
        for slot, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.stmt | ast.JoinedStr) or not isinstance(child, ast.AST):
                continue
            yield (node, name, child) if slot is None else (value, slot, child)
            yield from below(child)


def variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What a node may be changed to, each with a word for it."""
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                other = COMPARED[type(op)]
                new = [*ops[:at], other(), *ops[at + 1 :]]
                change = ast.Compare(node.left, new, node.comparators)
                yield f"{type(op).__name__} is {other.__name__}", change
        case ast.BinOp(op=op) if type(op) in COMPUTED:
            other_op = COMPUTED[type(op)]
            change = ast.BinOp(node.left, other_op(), node.right)
            yield f"{type(op).__name__} is {other_op.__name__}", change
        case ast.BoolOp(op=op, values=values):
            swapped = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield f"{type(op).__name__} is {type(swapped).__name__}", ast.BoolOp(swapped, values)
            for at in range(len(values)):
                rest = [*values[:at], *values[at + 1 :]]
                left = rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
                yield f"without {ast.unparse(values[at])}", left
        case ast.UnaryOp(op=ast.Not() | ast.USub() as op, operand=operand):
            yield f"without {type(op).__name__}", operand
        case ast.Constant(value=bool(value)):
            yield f"{value} is {not value}", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            for near in (value + 1, value - 1):
                yield f"{value} is {near}", ast.Constant(near)
        case ast.Name(id=name, ctx=ast.Load()) if name in CALLED:
            yield f"{name} is {CALLED[name]}", ast.Name(CALLED[name], ast.Load())
        case ast.IfExp():
            yield f"always {ast.unparse(node.body)}", node.body
            yield f"always {ast.unparse(node.orelse)}", node.orelse
        case ast.comprehension(ifs=[_, *_]):
            new_for = ast.comprehension(node.target, node.iter, [], node.is_async)
            yield "without the filter", new_for
        case ast.If():
            yield "condition negated", ast.If(negated(node.test), node.body, node.orelse)
        case ast.Return(value=ast.expr()):
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                yield "returns None", ast.Return(ast.Constant(None))
        case ast.Break():
            yield "break is continue", ast.Continue()
        case ast.Continue():
            yield "continue is break", ast.Break()
        case ast.AugAssign(op=op):
            if type(op) in COMPUTED:
                new_op = COMPUTED[type(op)]()
                yield (
                    f"{type(op).__name__} is other",
                    ast.AugAssign(node.target, new_op, node.value),
                )
            yield "left out", ast.Pass()
        case ast.Expr() | ast.Assign() | ast.Delete():
            yield "left out", ast.Pass()


def negated(test: ast.expr) -> ast.expr:
    """The opposite condition."""
    return ast.UnaryOp(ast.Not(), test)


def named(path: Path) -> set[str]:
    """The mutants that a list names."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line.removeprefix("- ") for line in lines if line.startswith("- ")}


def main() -> int:
    """Break and ask."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(MODULES), metavar="MODULE")
    parser.add_argument("--tests", nargs="*", default=list(TESTS), metavar="NAME")
    parser.add_argument(
        "-k", default="not memory", metavar="EXPRESSION", help="pytest's choice of tests"
    )
    parser.add_argument("--again", metavar="FILE", help="only those that FILE, an output, names")
    options = parser.parse_args()
    os.environ.setdefault("RL_STALENESS_EXAMPLES", "20")
    settings.register_profile("mutation", phases=[Phase.explicit, Phase.generate])  # no shrinking
    settings.load_profile("mutation")
    again = None if options.again is None else named(Path(options.again))
    plan = Plan(options.modules, again)
    paths = [str(ROOT / "tests" / f"test_{name}.py") for name in options.tests]
    print(f"RL_STALENESS_SEED={os.environ.setdefault('RL_STALENESS_SEED', '1')}", flush=True)
    flags = ["--import-mode=importlib", "--assert=plain", "-m", "not engine and not slow"]
    without = ("cacheprovider", "doctest", "terminal", "timeout", "xdist", "cov")
    flags += [part for name in without for part in ("-p", f"no:{name}")]
    status = pytest.main([*flags, "-k", options.k, "-o", "addopts=", *paths], plugins=[plan])
    left = [said for said in plan.survivors if said not in named(ARGUED)]
    print(f"{plan.number} mutants, {len(plan.survivors)} survived, {len(left)} without a reason")
    for said in left:
        print(f"- {said}")
    return 1 if left or status not in (0, 5) else 0


if __name__ == "__main__":
    sys.exit(main())
