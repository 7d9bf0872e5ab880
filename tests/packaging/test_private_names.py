"""Tests ask for what users see: private names of the package are left alone, but for those listed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.packaging.definitions import DEFINITION, imports, sources, trees_of_tests

# Whole files: they change the lines of functions, by name.
WHITE_BOX = {"fake_gpu/mutants.py"}
# Of other libraries, by names that ours have, too.
FOREIGN = {"_apply", "_experts_implementation", "_fields", "_library", "_quorum", "_version"}
ALLOWED = {
    ("faults/recorded.py", "_commit"): "a replica that fails where it agrees on a step",
    ("faults/test_steps_apart.py", "_commit"): "a replica that fails where it agrees on a step",
    ("hosts/fairseq/test_norms.py", "_check_grad_norms"): "what fairseq calls",
    ("training/resilience/test_peers.py", "_commit"): "a replica that fails where it agrees",
    ("training/resilience/test_peers.py", "_group"): "how many are in an average, while it is made",
    ("training/resilience/test_peers.py", "_kept"): "the outer optimizer's momenta are not public",
    ("training/resilience/test_peers.py", "_manager"): "torchft's, which is told of an error",
    ("training/resilience/test_swarm.py", "_backward"): "a peer that fails in this request",
    ("training/resilience/test_swarm.py", "_reduce"): "a peer that fails in this request",
    ("training/resilience/test_swarm.py", "_server"): "a server that takes no connection",
    ("training/resilience/test_swarm.py", "_took"): "a trainer that dies before this request",
    ("hosts/megatron/test_megatron_flags.py", "_table"): "the names in a checkpoint's files",
    ("kernels/test_workspace.py", "_lock"): "a thread that holds it while the process forks",
}


def name_of(node: ast.AST) -> str:
    """The last part of a dotted name; empty for other expressions."""
    return getattr(node, "attr", getattr(node, "id", ""))


def private(name: str) -> bool:
    """Whether it begins with one underscore."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that code defines: functions, classes, constants and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, DEFINITION):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def used(tree: ast.AST) -> Iterator[str]:
    """Private names that a test's code takes from what is not its own `self` or `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found = [] if of_itself else [node.attr]
        elif isinstance(node, ast.Call) and name_of(node.func).endswith(("attr", "object")):
            found = [str(a.value) for a in node.args[1:2] if isinstance(a, ast.Constant)]
        else:
            found = [alias.name for alias, _ in imports(node)]
        yield from filter(private, found)


def test_tests_use_no_other_private_names():
    ours = {name for source in sources().values() for name in defined(source.tree)} - FOREIGN
    found = {(file, name) for file, tree in trees_of_tests().items() if file not in WHITE_BOX
             for name in used(tree) if name in ours}
    assert found == set(ALLOWED), "use what is public, or make public what two rooms need"


@pytest.mark.parametrize("code, expected", [
    ("layer._x + layer.experts._y", ["_y", "_x"]), ("from moe_plugin.comm.base import _x", ["_x"]),
    ("monkeypatch.setattr(build, '_x', 1)", ["_x"]), ("super()._x()", ["_x"]),
    ("patch.object(swap, '_x')", ["_x"]), ("self._x = cls._y", []), ("x.__dict__", []),
    ("from torch import _C", []), ("from tests.comm import _x", []),
])
def test_finds_private_names_as_they_are_written(code, expected):
    assert sorted(used(ast.parse(code))) == sorted(expected)
