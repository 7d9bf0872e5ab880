"""A docstring has a line for each argument and attribute: no chain of `x: ...; y: ...`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.packaging.definitions import DEFINITION, sources

# Modules with chains that are left; the list only becomes shorter.
LEFT = {
    "moe_plugin.hosts.megatron.run", "moe_plugin.hosts.plain.run",
    "moe_plugin.hosts.timm.train", "moe_plugin.training.resilience.averaging_peers",
    "moe_plugin.tuning.layout_tuner", "moe_plugin.tuning.predicted",
}


def _described(node: ast.AST) -> Iterator[str]:
    """What a docstring may describe: parameters, and a class's fields and attributes."""
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            yield part.arg
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            yield part.attr
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id


def chains(tree: ast.AST) -> Iterator[str]:
    """Names that a docstring describes behind another one on the same line."""
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, DEFINITION) else None
        if not text:
            continue
        name = "|".join(map(re.escape, {*_described(node)})) or "-"
        entry = rf"(?:{name})(?:, (?:{name}))*: "
        for line in text.splitlines():
            if re.match(rf"\s*{entry}", line):
                yield from (f"{node.name}: {found}" for found in
                            re.findall(rf"[.;)] ({entry})", line))


def test_each_argument_has_a_line_of_its_own():
    found = [f"{name}.{chain}" for name, source in sources().items() if name not in LEFT
             for chain in chains(source.tree)]
    assert found == [], "one line for each, below `Args:` or `Attributes:`"


@pytest.mark.parametrize("text, expected", [
    ("x: one. y: two.", ["f: y: "]), ("x: one; y: two.", ["f: y: "]),
    ("Args:\n        x: one.\n        y: two.", []), ("x, y: both; None: neither.", []),
    ("Shapes. x: what it is.", []),
])
def test_finds_chains(text, expected):
    tree = ast.parse(f'def f(x, y):\n    """A function.\n\n    {text}\n    """\n')
    assert list(chains(tree)) == expected
