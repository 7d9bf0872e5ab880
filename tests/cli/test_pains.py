"""Every trouble of docs/pains.md names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]
TROUBLES = re.findall(r"^\*\*(\d+)\. .+?\*\*.+?^Tested by\s(.+?)\.$",
                      (ROOT / "docs" / "pains.md").read_text(encoding="utf-8"),
                      re.MULTILINE | re.DOTALL)


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of a file's tests that `pytest` collects."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef)
                     and node.name.startswith("test_"))


def test_troubles_are_found() -> None:
    assert [int(number) for number, _ in TROUBLES] == list(range(1, 24))


@pytest.mark.parametrize(("number", "tests"), TROUBLES)
def test_the_tests_of_a_trouble_exist(number: str, tests: str) -> None:
    ids = re.findall(r"`([^`]+)`", tests)
    assert ids and re.sub(r"`[^`]+`,?", "", tests).strip() == "", f"{number} has node ids alone"
    for node in ids:
        path, _, name = node.partition("::")
        assert (ROOT / path).is_file() and name in names_in(ROOT / path), node
