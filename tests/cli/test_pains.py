"""Every row of docs/pains.md names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(r"^\| (\d+) \| (.+) \| (.+) \| (.+) \|$",
                  (ROOT / "docs" / "pains.md").read_text(encoding="utf-8"), re.MULTILINE)


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of a file's tests that `pytest` collects."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef)
                     and node.name.startswith("test_"))


def test_every_trouble_has_a_row() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 24))


@pytest.mark.parametrize(("number", "tests"), [(row[0], row[3]) for row in ROWS])
def test_the_tests_of_a_row_exist(number: str, tests: str) -> None:
    ids = re.findall(r"`([^`]+)`", tests)
    assert ids and re.sub(r"`[^`]+`", "", tests).strip() == "", f"row {number} has node ids alone"
    for node in ids:
        path, _, name = node.partition("::")
        assert (ROOT / path).is_file() and name in names_in(ROOT / path), node
