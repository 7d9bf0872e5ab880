"""The documentation's site, and the tests that docs/pains.md names."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import moe_plugin

pytestmark = pytest.mark.fast


# The documentation's site: every page is in its menu, the API page has every exported name, and
# pages are rendered as they read. `mkdocs build`, which continuous integration runs, checks
# links.


ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_every_page_is_in_the_menu() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    menu = yaml.safe_load(text)["nav"]
    pages = list(entries(menu))
    own = [page for page in pages if "/" not in page]  # others: one of many that a page lists
    assert all((DOCS / page).is_file() for page in pages)
    assert [next(iter(section)) for section in menu] == [
        "Start", "Hosts", "Concepts", "Operate", "Reference"]
    assert sorted(own) == sorted(path.name for path in DOCS.glob("*.md"))


def entries(menu: str | list | dict) -> Iterator[str]:
    """The pages of a menu or of a part of it, which may be nested."""
    if isinstance(menu, str):
        yield menu
    else:
        for part in menu.values() if isinstance(menu, dict) else menu:
            yield from entries(part)


def test_every_page_is_linked_from_the_first_one() -> None:
    links = re.findall(r"\]\(([\w./]+\.md)", (DOCS / "index.md").read_text(encoding="utf-8"))
    own = {link for link in links if "/" not in link}
    assert sorted({*own, "index.md"}) == sorted(path.name for path in DOCS.glob("*.md"))


def test_continuous_integration_counts_the_warnings_of_the_site() -> None:
    """`--quiet` hides warnings from strict mode, too."""
    [build] = re.findall(r"^.*mkdocs build.*$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"),
                         re.MULTILINE)
    assert "--quiet" not in build and " -q" not in build


def test_the_api_page_has_what_the_package_exports() -> None:
    exports = (DOCS / "api.md").read_text("utf-8").split("## What the package exports\n")[1]
    found = re.findall(r"^::: (.*)\.(\w+)$", exports.split("\n## ")[0], re.MULTILINE)
    assert {name for _, name in found} == set(moe_plugin.EXPORTS)
    for module, name in found:
        item = getattr(importlib.import_module(module), name)
        assert item is getattr(moe_plugin, name) and item.__module__ == module


def imported(page: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of what a page's Python blocks import from the package's parts."""
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                    ("moe_plugin.", "scripts.")):
                yield from ((node.module, alias.name) for alias in node.names)


def test_the_api_page_has_what_the_examples_import() -> None:
    """Classes and functions; the names on the page exist."""
    text = (DOCS / "api.md").read_text("utf-8")
    shown = {re.sub(r"^kernels\.", "moe_plugin.kernels.", name)  # where the repository has them
             for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)}
    assert len(shown) > 50
    for path in shown:
        module, _, name = path.rpartition(".")
        item = getattr(importlib.import_module(module), name)
        assert item.__module__ == module, f"{path} is defined in {item.__module__}"
    found = {pair for page in DOCS.glob("*.md") for pair in imported(page)}
    assert len(found) > 20
    for module, name in found:
        item = getattr(importlib.import_module(module), name, None)
        if inspect.isclass(item) or inspect.isfunction(item):
            assert f"{item.__module__}.{item.__qualname__}" in shown, (module, name)


def test_links_out_of_the_documentation_and_marks_of_fences(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    hook = importlib.import_module("site_links")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="benchmarks/x.md"), ancestors=[], meta={})
    text = "[`a`](../../scripts/a.py) [b](../b.md#c)\n```bash check\nls\n```\n"
    assert hook.on_page_markdown(text, page) == "`a` [b](../b.md#c)\n```bash\nls\n```\n"


# Every trouble of docs/pains.md names tests that exist.


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
