"""A function of the package with one line changed, as a programmer might have left it."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def changed(function: Callable[..., Any], old: str, new: str) -> Iterator[None]:
    """Inside, `function` runs with `new` in place of `old`, which is in its source once."""
    plain: Any = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(plain))
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {plain.__qualname__}"
    lines = "\n" * (plain.__code__.co_firstlineno - 1)
    names: dict[str, Any] = {}
    code = compile(lines + source.replace(old, new), plain.__code__.co_filename, "exec",
                   __future__.annotations.compiler_flag)
    exec(code, dict(plain.__globals__), names)  # noqa: S102 - a test's own text
    before = plain.__code__
    plain.__code__ = inspect.unwrap(names[plain.__name__]).__code__
    try:
        yield
    finally:
        plain.__code__ = before
