"""Methods without a call, optional arguments that are never given, settings that are never read.

By names alone, which may be those of other things, too: what is found here is unused for certain.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import pytest

import moe_plugin
from moe_plugin.config import MoEConfig
from tests.packaging.definitions import PACKAGE, ROOT, registers, sources, trees_of_tests

# Overridden: hosts, torch and other libraries call them.
OVERRIDDEN = {
    "always_call_state_dict_during_save_checkpoint", "broadcast_global_state_dict",
    "extra_repr", "format_field", "get_data_parallel_rank", "get_field", "get_loss_scale",
    "get_normalized_probs", "is_fsdp", "manipulate_search_path", "multiply_grads",
    "num_accumulate", "on_save", "on_train_begin", "on_train_end", "postprocess",
    "prepare_metric_bag", "preprocess", "pytest_collectreport", "pytest_runtest_logfinish",
    "pytest_runtest_logstart", "reraise", "routed_experts_compute", "set_extra_state",
    "smoothed_value",
}


@cache
def _programs() -> list[ast.Module]:
    """The package, scripts and examples; tests are none."""
    others = [p for folder in ("scripts", "docs/examples") for p in (ROOT / folder).rglob("*.py")]
    return [*(source.tree for source in sources().values()),
            *(ast.parse(p.read_text("utf-8")) for p in others)]


@cache
def _manual() -> frozenset[str]:
    """Words of the manual and of templates."""
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"),
             *(ROOT / PACKAGE).rglob("*.html")]
    return frozenset(word for path in paths for word in re.findall(r"\w+", path.read_text("utf-8")))


def _name(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _words(node: ast.AST) -> Iterator[str]:
    """Names that a node reads, those in a string included."""
    if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
        yield _name(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from re.findall(r"\w+", node.value)


def unnamed_methods(trees: list[ast.Module], known: set[str]) -> list[str]:
    """Public methods, undecorated but as properties, that no code names."""
    named = known | {word for tree in trees for node in ast.walk(tree) for word in _words(node)}
    return sorted(f"{c.name}.{m.name}" for tree in trees for c in ast.walk(tree)
                  if isinstance(c, ast.ClassDef) for m in c.body
                  if isinstance(m, ast.FunctionDef) and m.name[0] != "_" and m.name not in named)


def _gives(call: ast.Call, name: str, place: int | None) -> bool:
    if any(word.arg in (None, name) for word in call.keywords):
        return True
    return place is not None and (
        len(call.args) > place or any(isinstance(a, ast.Starred) for a in call.args))


def _optional(f: ast.FunctionDef, method: bool) -> Iterator[tuple[str, int | None]]:
    """Optional parameters of a function, and their places in a call."""
    given = [*f.args.posonlyargs, *f.args.args]
    first = len(given) - len(f.args.defaults)
    bound = method and not any(_name(d) == "staticmethod" for d in f.decorator_list)
    yield from ((given[i].arg, i - bound) for i in range(first, len(given)))
    yield from ((a.arg, None) for a, default in
                zip(f.args.kwonlyargs, f.args.kw_defaults, strict=True) if default is not None)


def never_given(trees: list[ast.Module], others: list[ast.Module], known: set[str]) -> list[str]:
    """Optional parameters of functions that are called, and never with them.

    others: only callers. known: functions with callers elsewhere. A function that is passed on
    may be called with anything.
    """
    calls: dict[str, list[ast.Call]] = defaultdict(list)
    called, passed = set(), set(known)
    methods = set()
    for node in (node for tree in (*trees, *others) for node in ast.walk(tree)):
        if isinstance(node, ast.Call):
            calls[_name(node.func)].append(node)
            called.add(id(node.func))
        elif isinstance(node, ast.ClassDef):
            methods |= {id(child) for child in node.body}
        elif id(node) not in called:
            passed |= set(_words(node))
    return sorted({f"{f.name}({name})" for tree in trees for f in ast.walk(tree)
                   if isinstance(f, ast.FunctionDef) and f.name not in passed
                   and f.name[:2] != "__" and calls[f.name] and not registers(f)
                   for name, place in _optional(f, id(f) in methods)
                   if not any(_gives(call, name, place) for call in calls[f.name])})


def test_every_method_is_called():
    assert unnamed_methods(_programs(), set(_manual()) | OVERRIDDEN) == []


def test_every_optional_argument_is_given():
    """By tests, too: what they alone give may be a seam."""
    known = set(_manual()) | set(moe_plugin.EXPORTS) | {*OVERRIDDEN}
    assert never_given(_programs(), [*trees_of_tests().values()], known) == []


def settings(cls: Any) -> Iterator[str]:
    """Names of all settings below a class of them."""
    for one in fields(cls):
        yield one.name
        if is_dataclass(inner := one.default_factory):
            yield from settings(inner)


def test_every_setting_is_read():
    read = {node.attr for name, source in sources().items() for node in ast.walk(source.tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    found = set(settings(MoEConfig))
    assert len(found) > 100
    assert sorted(found - read) == []


CLASS = "class A:\n    def used(self): ...\n    def lonely(self, x=1, *, y=2): ...\n"


@pytest.mark.parametrize("code, methods, arguments", [
    ("a.used()", ["A.lonely"], []), ("'lonely used'", [], []),
    ("a.used(); a.lonely()", [], ["lonely(x)", "lonely(y)"]),
    ("a.used(); a.lonely(1)", [], ["lonely(y)"]), ("a.used(); a.lonely(**b)", [], []),
    ("a.used(); a.lonely(x=1, y=2)", [], []), ("a.used(); a.lonely(); f(a.lonely)", [], []),
])
def test_finds_what_is_unused(code, methods, arguments):
    trees = [ast.parse(CLASS + code)]
    assert unnamed_methods(trees, set()) == methods
    assert never_given(trees, [], set()) == arguments
