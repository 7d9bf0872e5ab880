"""Imports go strictly downward through the rooms, function-level ones included."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache

import pytest

from tests.packaging.definitions import SCRIPTS, Source, graph, imports

pytestmark = pytest.mark.fast

# Bottom to top. A room imports from itself and from the levels below its own: no room imports a
# neighbour of its level.
LEVELS = (
    ("utils",), ("records", "output", "config"), ("kernels", "planner"), ("comm",),
    ("routing", "dispatch", "experts"), ("tuning", "memory"), ("routed_experts",), ("layer",),
    ("observe", "checkpoint"), ("training",), ("hosts",), ("cli",),
)
# Bottom to top in `scripts`, which may import all of the package.
LAB = ("emulate", "bench", "audit")
LOADER = "utils.checkout"  # the one module that knows `scripts`


def type_checking(node: ast.AST) -> bool:
    """Whether the node is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run: those under `if TYPE_CHECKING` are left out."""
    for child in ast.iter_child_nodes(node):
        if not type_checking(child):
            yield child
            yield from runtime_nodes(child)


def below(module: str) -> str:
    """Its name below the package, which itself is ''; the whole name of a script."""
    return module if module.startswith(SCRIPTS) else module.partition(".")[2]


def targets(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Our modules that import statements name; `from moe_plugin import X` is where X lives."""
    for node in nodes:
        yield from (below(graph().imported(target)) for _, target in imports(node))


@cache
def edges(checking: bool = False) -> frozenset[tuple[str, str]]:
    """Importer and imported module. checking: those under `if TYPE_CHECKING` instead."""
    return frozenset(_edges(checking, package_sources()))


def package_sources() -> list[Source]:
    return [s for s in graph().sources.values() if not s.name.startswith(SCRIPTS)]


def _edges(checking: bool, sources: list[Source]) -> set[tuple[str, str]]:
    found = set()
    for source in sources:
        nodes = (n for block in ast.walk(source.tree) if type_checking(block)
                 for n in ast.walk(block)) if checking else runtime_nodes(source.tree)
        found |= {(below(source.name), target) for target in targets(nodes)}
    return found


def room(module: str) -> str:
    """The first part of a module's name."""
    return module.partition(".")[0]


def upward(pairs: frozenset[tuple[str, str]]) -> set[tuple[str, str]]:
    """The imports that break the order; the package's own `__init__` counts as the lowest room."""
    rank = {"": 0, **{name: number for number, level in enumerate(LEVELS, 1) for name in level}}
    return {(a, b) for a, b in pairs - {("", "utils.checkout")}
            if room(a) != room(b) and rank[room(b)] >= max(rank[room(a)], 1)}


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    """All that `start` imports, directly or not."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        fresh = graph.get(waiting.pop(), set()) - found
        found |= fresh
        waiting += fresh
    return found


def links(pairs: frozenset[tuple[str, str]]) -> dict[str, set[str]]:
    """What each module imports."""
    found: dict[str, set[str]] = {}
    for importer, imported in pairs:
        found.setdefault(importer, set()).add(imported)
    return found


def test_every_room_has_a_place_in_the_order():
    assert {room(below(source.name)) for source in package_sources()} - {""} == {
        name for level in LEVELS for name in level}


def test_imports_go_downward():
    assert sorted(upward(edges())) == []


def types_named() -> frozenset[tuple[str, str]]:
    """Imports for the type checker; the package itself names what it exports (test_typing.py)."""
    return frozenset(pair for pair in edges(checking=True) if pair[0])


def test_type_checking_imports_go_downward():
    assert sorted(upward(types_named())) == []


def test_no_module_imports_itself_through_others():
    """Imports for the type checker count, too."""
    every = links(edges() | types_named())
    assert sorted(name for name in every if name in reachable(name, every)) == []


def test_planner_never_imports_torch():
    """Neither itself nor through what it imports of ours."""
    every, sources = links(edges()), {below(s.name): s for s in package_sources()}
    for name in sources:
        if room(name) != "planner" and not name.startswith("cli.planning"):
            continue
        for module in {name, *reachable(name, every)}:
            for node in runtime_nodes(sources[module].tree):
                imported = [a.name for a in node.names] if isinstance(node, ast.Import) else [
                    node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert "torch" not in {i.partition(".")[0] for i in imported}, (name, module)


def test_nothing_imports_the_command():
    assert {a for a, b in edges() if room(b) == "cli" and room(a) != "cli"} == set()


def names_scripts(tree: ast.AST) -> list[str]:
    """What code names of `scripts`: imports, and modules in strings, such as those of `-m`."""
    found = [name for name in targets(ast.walk(tree)) if room(name) == SCRIPTS]
    texts = (node.value for node in ast.walk(tree)
             if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return found + [name for text in texts for name in re.findall(
        rf"^{SCRIPTS}\.$|(?<![\w./]){SCRIPTS}\.(?:{'|'.join(LAB)})[\w.]*", text)]


def test_the_package_names_no_script():
    """An installed package has none; one module finds those of a checkout."""
    found = {below(s.name): names for s in package_sources()
             if (names := names_scripts(s.tree))}
    assert found.pop(LOADER) == [f"{SCRIPTS}."] and found == {}


@pytest.mark.parametrize("code, expected", [
    ("def f():\n    from scripts.bench import study", ["scripts.bench.study"]),
    ("import scripts.emulate.faults", ["scripts.emulate.faults"]),
    ("run(['-m', 'scripts.bench.child'])", ["scripts.bench.child"]),
    ("run('python -m scripts.audit.run')", ["scripts.audit.run"]),
    ("import_module(f'scripts.{name}')", ["scripts."]),
    ("'see scripts/setup.sh, and launch scripts.'", []),
])
def test_finds_scripts_as_they_are_named(code, expected):
    assert names_scripts(ast.parse(code)) == expected


def test_imports_go_downward_in_the_laboratory():
    def level(module: str) -> int:
        return LAB.index(module.split(".")[1])

    sources = [s for s in graph().sources.values() if s.name.startswith(SCRIPTS)]
    pairs = _edges(False, sources) | _edges(True, sources)
    inside = {(a, b) for a, b in pairs if room(b) == SCRIPTS and "." in b}
    assert {level(a) for a, _ in inside} == set(range(len(LAB)))
    assert sorted((a, b) for a, b in inside if level(b) > level(a)) == []


def test_hosts_do_not_import_each_other():
    def host(module: str) -> str:
        return module.split(".")[1]

    for a, b in edges():
        if room(a) == room(b) == "hosts" and "." in a and "." in b:
            # models of timm are trained as plain ones, and both kinds of models of transformers
            # are trained by the same `Trainer`
            assert host(b) in {host(a), {"timm": "plain", "transformers": "plain"}.get(host(a))}, (
                f"{a} imports {b}")


@pytest.mark.parametrize("code, expected", [
    ("import moe_plugin.comm.base", ["comm.base"]),
    ("from moe_plugin.comm import base, Comm", ["comm.base", "comm"]),
    ("from moe_plugin import MoELayer, config", ["layer", "config"]),
    ("def f():\n    from moe_plugin.cli.main import main", ["cli.main"]),
    ("if TYPE_CHECKING:\n    import moe_plugin.layer", []),
    ("import torch", []),
])
def test_finds_imports_as_they_are_written(code, expected):
    assert list(targets(runtime_nodes(ast.parse(code)))) == expected


def test_finds_what_breaks_the_order():
    assert upward(frozenset({("comm.base", "layer"), ("layer", "comm.base")})) == {
        ("comm.base", "layer")}
