"""What each definition of the package and of the laboratory names of them: a graph, from the source
alone.

A node is a module or a definition at its top level: a function, class or constant. Methods belong
to their class.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import moe_plugin

ROOT = Path(__file__).parents[2]
PACKAGE = "moe_plugin"
SCRIPTS = "scripts"
LABORATORY = ("bench", "emulate", "audit")  # folders of scripts
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Decorators that register nothing: what they stand at is reached only by its name.
PLAIN_DECORATORS = {"dataclass", "cache", "lru_cache", "contextmanager", "jit", "no_grad",
                    "runtime_checkable", "total_ordering", "overload", "wraps", "disable"}


class Node(NamedTuple):
    """A module (name is empty) or what it defines."""

    module: str
    name: str = ""


class Source:
    """One module: its definitions, what it imports, and the statements that run at its import."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.is_package = name, path.name == "__init__.py"
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.definitions: dict[str, list[ast.stmt]] = defaultdict(list)
        self.imported: dict[str, Node] = {}
        self.imported_elsewhere: set[str] = set()  # from other packages
        self.at_import: list[ast.stmt] = []
        for statement in _flat(self.tree.body):
            self._add(statement)

    def _add(self, statement: ast.stmt) -> None:
        if isinstance(statement, DEFINITION):
            self.definitions[statement.name].append(statement)
            if registers(statement):
                self.at_import.append(ast.Expr(ast.Name(statement.name, ast.Load())))
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for name in _assigned(statement):
                self.definitions[name].append(statement)
            if isinstance(statement.value, ast.Call):
                self.at_import.append(statement)
        else:
            self.at_import.append(statement)
            self.imported |= self.bindings(statement)
            if isinstance(statement, ast.ImportFrom):
                self.imported_elsewhere |= {alias.name for alias in statement.names}

    def bindings(self, node: ast.AST) -> dict[str, Node]:
        """The names that an import statement binds to what is ours."""
        return {alias.asname or target.name or target.module.partition(".")[0]:
                target if alias.asname or target.name else Node(target.module.partition(".")[0])
                for alias, target in imports(node)}


def imports(node: ast.AST) -> Iterator[tuple[ast.alias, Node]]:
    """What an import statement names of ours."""
    if isinstance(node, ast.Import):
        yield from ((alias, Node(alias.name)) for alias in node.names if _ours(alias.name))
    elif isinstance(node, ast.ImportFrom) and _ours(node.module or ""):
        yield from ((alias, Node(node.module or "", alias.name)) for alias in node.names)


def dotted(node: ast.AST) -> str:
    """`a.b.c` as it is written; empty for an expression that is more than names."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _ours(module: str) -> bool:
    return module.partition(".")[0] in (PACKAGE, SCRIPTS)


def registers(definition: ast.AST) -> bool:
    """Whether a decorator may have given it to somebody: a registry, a host."""
    names = (ast.unparse(d.func if isinstance(d, ast.Call) else d).rpartition(".")[2]
             for d in getattr(definition, "decorator_list", []))
    return any(name not in PLAIN_DECORATORS for name in names)


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those inside `if` and `try` included."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With):
            parts = [statement.body, getattr(statement, "orelse", []),
                     *(h.body for h in getattr(statement, "handlers", []))]
            for part in parts:
                yield from _flat(part)
        else:
            yield statement


def _assigned(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[str]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from (n.id for n in ast.walk(target)
                    if isinstance(n, ast.Name) and n.id != "__all__")


@cache
def sources() -> dict[str, Source]:
    """All modules by their full name."""
    found = {}
    for folder, prefix in ((ROOT / PACKAGE, (PACKAGE,)), (ROOT / "kernels", (PACKAGE, "kernels")),
                           *((ROOT / SCRIPTS / name, (SCRIPTS, name)) for name in LABORATORY)):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((*prefix, *(p for p in parts if p != "__init__")))
            found[name] = Source(name, path)
    return found


@cache
def trees_of_tests() -> dict[str, ast.Module]:
    """All files of the tests, by their path below `tests`."""
    return {path.relative_to(ROOT / "tests").as_posix(): ast.parse(path.read_text("utf-8"))
            for path in (ROOT / "tests").rglob("*.py")}


class Graph:
    """What each node names."""

    def __init__(self, sources: dict[str, Source]) -> None:
        self.sources = sources
        self._named: dict[Node, list[Node]] = {}
        self.nodes = {Node(m, name) for m, s in self.sources.items() for name in s.definitions}

    def find(self, node: Node) -> Node | None:
        """Where a name is defined: re-exports are followed, exports of the package too."""
        for _ in range(9):
            full = f"{node.module}.{node.name}" if node.name else node.module
            source = self.sources.get(node.module)
            if node in self.nodes:
                return node
            bound = source.imported.get(node.name, node) if source is not None else node
            if bound != node:  # before a module of its name
                node = bound
            elif full in self.sources:
                return Node(full)
            elif node.module == PACKAGE and node.name in moe_plugin.EXPORTS:
                node = Node(moe_plugin.EXPORTS[node.name], node.name)
            else:
                return None
        return None

    def imported(self, target: Node) -> str:
        """The module that is run for an import of it; for an export, the one that it is in."""
        full = f"{target.module}.{target.name}" if target.name else target.module
        if target.module == PACKAGE and target.name in moe_plugin.EXPORTS:
            return moe_plugin.EXPORTS[target.name]
        return full if full in self.sources else target.module

    def named(self, node: Node) -> Iterator[Node]:
        """What a node names."""
        source = self.sources[node.module]
        if node.name:
            yield Node(node.module)
            for statement in source.definitions[node.name]:
                yield from self.names_in(statement, source)
            return
        parts = node.module.split(".")
        yield from (Node(above) for n in range(1, len(parts))
                    if (above := ".".join(parts[:n])) in self.sources)
        if source.is_package and "iter_modules" in source.imported_elsewhere:  # all that is in it
            yield from (Node(m) for m in self.sources if m.rpartition(".")[0] == node.module)
        for statement in source.at_import:
            yield from self.names_in(statement, source, import_only=True)

    def names_in(self, tree: ast.AST, source: Source,
                 import_only: bool = False) -> Iterator[Node]:
        """What a piece of code names. import_only: an import runs a module, and uses no name."""
        local: dict[str, list[Node]] = {name: [node] for name, node in source.imported.items()}
        for node in ast.walk(tree):
            for name, target in source.bindings(node).items():  # one name may be bound twice
                local.setdefault(name, []).append(target)
        for node in ast.walk(tree):
            for target in self._targets(node, source, local, import_only):
                if (found := self.find(target)) is not None:
                    yield found

    def _targets(self, node: ast.AST, source: Source, local: dict[str, list[Node]],
                 import_only: bool) -> Iterator[Node]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in source.bindings(node).values():
                yield Node(target.module)
                if not import_only or f"{target.module}.{target.name}" in self.sources:
                    yield target
        elif isinstance(node, ast.Name):
            yield from local.get(node.id, [Node(source.name, node.id)])
        elif isinstance(node, ast.Attribute):
            yield from self._attribute(dotted(node), local)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from self.by_text(node.value.replace(":", "."))
        elif isinstance(node, ast.Call):
            yield from self._laboratory(node)
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            yield from self._by_prefix(str(node.values[0].value))

    def _attribute(self, text: str, local: dict[str, list[Node]]) -> Iterator[Node]:
        """`module.name`, through a name that an import bound to a module."""
        first, _, rest = text.partition(".")
        for bound in map(self.find, local.get(first, [])):
            if bound is not None and not bound.name and re.fullmatch(r"[\w.]+", rest):
                yield from self.by_text(f"{bound.module}.{rest}")

    def by_text(self, text: str) -> Iterator[Node]:
        """`moe_plugin.a.b` in a string: a module with its `main`, or what a module defines."""
        if not _ours(text):
            return
        if text in self.sources:
            yield from (Node(text), Node(text, "main"))
        else:
            yield Node(*text.rpartition(".")[::2])

    def _laboratory(self, call: ast.Call) -> Iterator[Node]:
        """All public names of a module that `laboratory` loads, or a command of it."""
        loads = getattr(call.func, "attr", getattr(call.func, "id", "")) == "laboratory"
        values = [*call.args, *(word.value for word in call.keywords if word.arg == "laboratory")]
        names = {f"{SCRIPTS}.{value.value}" for value in values[0 if loads else len(call.args):]
                 if isinstance(value, ast.Constant)}
        if names:
            yield from (node for node in self.nodes
                        if node.module in names and not node.name.startswith("_"))

    def _by_prefix(self, prefix: str) -> Iterator[Node]:
        """A module whose name is put together: all public names of all that it may be."""
        if not prefix.startswith((f"{PACKAGE}.", f"{SCRIPTS}.bench.")):
            return
        for node in self.nodes:
            if node.module.startswith(prefix) and not node.name.startswith("_"):
                yield node

    def reached(self, roots: Iterable[Node], without: str = "-") -> set[Node]:
        """All that roots lead to. without: the room that is left out."""
        found: set[Node] = set()
        waiting = [root for root in map(self.find, roots) if root is not None]
        while waiting:
            node = waiting.pop()
            if node not in found and not node.module.startswith(without):
                found.add(node)
                if node not in self._named:
                    self._named[node] = list(self.named(node))
                waiting += self._named[node]
        return found


@cache
def graph() -> Graph:
    """Of the package as it is."""
    return Graph(sources())
