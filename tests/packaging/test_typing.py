"""What type checkers see of the package is what it exports; `python -m mypy`, which continuous
integration runs, checks every module that defines it.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import moe_plugin

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
CHECKED = re.findall(r'"((?:moe_plugin|tests)/[^"]*)"', (ROOT / "pyproject.toml").read_text(
    encoding="utf-8").split("[tool.mypy]")[1].split("\n[")[0])


def test_type_checkers_see_the_exported_names() -> None:
    tree = ast.parse(Path(moe_plugin.__file__).read_text(encoding="utf-8"))
    [block] = [node for node in tree.body
               if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, "else it is not exported again"
            seen[alias.name] = node.module
    assert seen == moe_plugin.EXPORTS


@pytest.mark.parametrize("name", sorted(moe_plugin.EXPORTS))
def test_the_module_of_an_exported_name_is_checked(name: str) -> None:
    defined = sys.modules[getattr(moe_plugin, name).__module__]
    path = Path(str(defined.__file__)).relative_to(ROOT)
    assert any(place.as_posix() in CHECKED for place in (path, *path.parents)), path


def test_the_checked_files_exist() -> None:
    assert CHECKED and all((ROOT / name).exists() for name in CHECKED)
