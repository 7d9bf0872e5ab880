"""What type checkers see of the package is what it exports; `python -m mypy`, which continuous
integration runs, checks every module, and those that define an exported name strictly.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import moe_plugin

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
MYPY, STRICT = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split(
    "[tool.mypy]")[1].split("[[tool.mypy.overrides]]")[:2]
MODULES = re.findall(r'"([a-z_.]+?)(?:\.\*)?"', STRICT)


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
def test_the_module_of_an_exported_name_is_checked_strictly(name: str) -> None:
    module = getattr(moe_plugin, name).__module__
    assert {module, module.rpartition(".")[0]} & {*MODULES} - {"moe_plugin"}, module


def test_all_of_the_package_is_checked() -> None:
    assert re.search(r'files = \["moe_plugin", "kernels"', MYPY)


def test_the_strict_modules_exist() -> None:
    assert MODULES and all(importlib.util.find_spec(name) for name in MODULES)
