"""What a user can reach, and that public names are defined once."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distribution

import pytest

import moe_plugin
from tests.packaging.definitions import (
    DEFINITION,
    PACKAGE,
    ROOT,
    SCRIPTS,
    Graph,
    Node,
    Source,
    graph,
)

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Being measured is not a door.
MEASURES = f"{SCRIPTS}.bench"
LABORATORY = (MEASURES, f"{SCRIPTS}.emulate")
# Documented for Python alone: no flag, setting or command yet.
ONLY_FROM_PYTHON = (
    "training.resilience.averaging_peers.StreamedPeer",
)
# What benchmarks alone ask of other rooms: only `compat` may ask it of a host.
ASKED_BY_BENCHMARKS = {
    "hosts.megatron.compat.core.destroy_groups",
    "hosts.megatron.compat.aux_losses.forget_losses",
    "hosts.megatron.compat.core.gpt_moe_layer_spec",
    "hosts.megatron.compat.cpu.building",
    "planner.units.parse_rate", "planner.units.parse_time",
}


def _project() -> Iterator[str]:
    """Commands, and files that pyproject.toml installs elsewhere."""
    yield from (entry.value.replace(":", ".") for entry in distribution("moe-plugin").entry_points)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for path in re.findall(rf'^"({PACKAGE}/[\w/]+)\.py" = ', text, re.MULTILINE):
        yield path.replace("/", ".")


def _runs(source: Source) -> bool:
    """Whether `python -m` runs it."""
    return any(isinstance(s, ast.If) and "__name__" in ast.unparse(s.test)
               for s in source.tree.body)


def _documented() -> Iterator[str]:
    """What the manual's pages of the API list, and what others name in full."""
    for page in PAGES:
        text = page.read_text("utf-8")
        yield from re.findall(rf"^::: ((?:{PACKAGE}|{SCRIPTS})[\w.]*)", text, re.MULTILINE)
        yield from re.findall(rf"`((?:{PACKAGE}|{SCRIPTS})\.[\w.]+)`", text)


def _examples() -> Iterator[ast.Module]:
    """Python in the manual, and programs that a user runs."""
    for page in PAGES:
        for code in re.findall(r"```python[^\n]*\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            try:
                yield ast.parse(code)
            except SyntaxError:
                continue  # part of a program
    for program in (ROOT / "docs" / "examples").rglob("*.py"):
        yield ast.parse(program.read_text("utf-8"))
    for program in (ROOT / "scripts").glob("*.py"):
        yield ast.parse(program.read_text("utf-8"))


def _named_by_headlines() -> Iterator[Node]:
    """Functions that the data of the page of headlines names."""
    rows = (ROOT / SCRIPTS / "bench" / "pages" / "headlines.yaml").read_text("utf-8")
    names = set(re.findall(r"\w+", rows))
    modules = [f"{SCRIPTS}.bench.headline_{what}" for what in ("models", "ratios")]
    yield from (node for node in graph().nodes if node.module in modules and node.name in names)


@cache
def roots() -> frozenset[Node]:
    """Exports, commands, and what the manual shows."""
    found = {Node(PACKAGE, name) for name in moe_plugin.EXPORTS}
    found |= {Node(name) for name, source in graph().sources.items() if _runs(source)}
    found |= set(_named_by_headlines())
    for text in (*_project(), *_documented()):
        found |= set(graph().by_text(text))
        if text in graph().sources:
            found |= {n for n in graph().nodes if n.module == text and n.name[0] != "_"}
    here = Source(PACKAGE, ROOT / PACKAGE / "__init__.py")
    for program in _examples():
        found |= set(graph().names_in(program, here))
    return frozenset(found)


def public(nodes: set[Node]) -> dict[str, Node]:
    """Functions and classes among them, by their name below the package."""
    return {f"{n.module}.{n.name}".removeprefix(f"{PACKAGE}."): n for n in sorted(nodes)
            if not n.name.startswith("_") and any(
                isinstance(s, DEFINITION) for s in graph().sources[n.module].definitions[n.name])}


def test_what_measures_is_reached():
    missing = public(graph().nodes - graph().reached(roots()))
    assert sorted(name for name in missing if missing[name].module.startswith(LABORATORY)) == []


def test_everything_else_has_a_door():
    reached = graph().reached(roots(), without=MEASURES)
    missing = public({n for n in graph().nodes - reached if not n.module.startswith(LABORATORY)})
    assert sorted(set(missing) - ASKED_BY_BENCHMARKS) == []


def test_what_is_listed_exists():
    names = set(public(graph().nodes))
    assert {*ONLY_FROM_PYTHON, *ASKED_BY_BENCHMARKS} <= names


def test_a_public_class_name_is_defined_once():
    found = defaultdict(list)
    for node in graph().nodes:
        if not node.name.startswith("_") and any(
                isinstance(s, ast.ClassDef)
                for s in graph().sources[node.module].definitions[node.name]):
            found[node.name].append(node.module)
    assert {name: sorted(where) for name, where in found.items() if len(where) > 1} == {}


@pytest.mark.parametrize("code, expected", [
    ("from moe_plugin.comm.base import Comm", ["comm.base.Comm"]),
    ("from moe_plugin.comm import Comm\nComm", ["comm.base.Comm"]),
    ("from moe_plugin.comm import base\nbase.Comm.size", ["comm.base.Comm"]),
    ("run('moe_plugin.comm.base:Comm')", ["comm.base.Comm"]),
    ("import torch\ntorch.Tensor", []),
])
def test_finds_names_as_they_are_written(code, expected):
    here = Source(PACKAGE, ROOT / PACKAGE / "__init__.py")
    found = set(graph().names_in(ast.parse(code), here))
    assert sorted(public({n for n in found if n.name})) == expected


def test_finds_what_nobody_reaches():
    graph_of, lonely = Graph(graph().sources), Node(f"{PACKAGE}.messages", "lonely")
    graph_of.nodes.add(lonely)
    assert lonely in graph_of.nodes - graph_of.reached(roots())
