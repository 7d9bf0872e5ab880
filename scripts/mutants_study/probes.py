"""Record which lines of the package each test executes, in every process that the test starts.

Each statement of a function of the package sets a byte of an array before it runs. The array is a
file that all processes of a test share, so the bytes of a process that is killed are counted, too.
This is faster than a tracing function, and the tests take hardly longer than usual. A file in
`site-packages` imports this module in each Python process, see `cover`, and pytest loads it as a
plugin.
"""

from __future__ import annotations

import ast
import base64
import builtins
import json
import mmap
import os
import zlib
from collections.abc import Iterator
from importlib import _bootstrap_external  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

# the folder of the records, and the array of the present test
FOLDER, ARRAY = "MUTANTS_FOLDER", "MUTANTS_ARRAY"
OFFSETS = "offsets.json"
NAME = "executed_lines_of_the_package"


def follow() -> None:
    """Count the lines of this process for the test that started it."""
    if ARRAY in os.environ:
        with open(os.environ[ARRAY], "r+b") as stream:
            setattr(builtins, NAME, mmap.mmap(stream.fileno(), 0))


def statements(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements inside functions, each of them once."""
    seen: set[int] = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                for name in ("body", "orelse", "finalbody"):
                    part = getattr(node, name, None)
                    if isinstance(part, list) and id(part) not in seen:
                        seen.add(id(part))
                        yield part


def with_probes(source: bytes, offset: int) -> ast.AST:
    """Return the syntax tree of a module whose statements set bytes of the array."""
    tree = ast.parse(source)
    for part in list(statements(tree)):
        new: list[ast.stmt] = []
        for number, statement in enumerate(part):
            docstring = not number and isinstance(statement, ast.Expr) and isinstance(
                statement.value, ast.Constant)
            if not docstring:
                place = ast.Subscript(ast.Name(NAME, ast.Load()),
                                      ast.Constant(offset + statement.lineno), ast.Store())
                new.append(ast.copy_location(ast.Assign([place], ast.Constant(1)), statement))
            new.append(statement)
        part[:] = new
    return ast.fix_missing_locations(tree)


def install(folder: Path) -> None:
    """Give every module of the package that this process imports its probes."""
    offsets = json.loads((folder / OFFSETS).read_text())
    loader = _bootstrap_external.SourceFileLoader
    compiled, cached = loader.source_to_code, _bootstrap_external.cache_from_source

    def source_to_code(self: Any, data: Any, path: str, *, _optimize: int = -1) -> Any:
        if path in offsets and isinstance(data, bytes):
            data = with_probes(data, offsets[path])
        return compiled(self, data, path, _optimize=_optimize)

    def cache_from_source(path: str, *args: Any, **options: Any) -> str:
        if path in offsets:
            return str(folder / "compiled" / f"{offsets[path]}.pyc")
        return cached(path, *args, **options)

    loader.source_to_code = source_to_code
    _bootstrap_external.cache_from_source = cache_from_source
    setattr(builtins, NAME, bytearray(offsets["end"]))  # for processes outside of every test
    follow()


class Recorder:
    """A plugin of pytest that writes one record per test."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"records{os.getpid()}.jsonl"
        self.seconds, self.outcome = 0.0, "passed"

    def pytest_runtest_logstart(self) -> None:
        array = getattr(builtins, NAME)
        array[:] = bytes(len(array))
        self.seconds, self.outcome = 0.0, "passed"

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds += report.duration
        if report.outcome != "passed":
            self.outcome = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        lines = base64.b64encode(zlib.compress(getattr(builtins, NAME)[:], 1)).decode()
        with open(self.path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps([nodeid, self.seconds, self.outcome, lines]) + "\n")


def pytest_configure(config: Any) -> None:
    folder = Path(os.environ[FOLDER])
    array = folder / f"array{os.getpid()}"
    array.write_bytes(bytes(json.loads((folder / OFFSETS).read_text())["end"]))
    os.environ[ARRAY] = str(array)
    follow()
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder(folder))


if FOLDER in os.environ:
    install(Path(os.environ[FOLDER]))
