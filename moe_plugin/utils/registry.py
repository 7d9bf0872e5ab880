"""Registries that map names to implementations. There is one registry per type of implementation,
such as routers or dispatchers. For an unknown name, a registry raises an error that lists the known
names.

Each registry is created once, for example by `routers = Registry("router")`. A registered
implementation can be selected in the settings, and is automatically included in the exactness
tests. User modules, which are imported by name, may register further ones.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from moe_plugin.utils.messages import did_you_mean, short, similar_names

T = TypeVar("T")
KINDS: dict[str, "Registry"] = {}


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered implementation.

    Attributes:
        name: name of the implementation.
        value: the implementation.
        why_not: function that returns the reason why the implementation cannot run on this machine,
            or None if it can.
        optional: whether the implementation requires packages that may be missing. If such an
            implementation cannot run, `Registry.names` does not list it, and `Registry.get` raises
            an error with the reason.
    """

    name: str
    value: T
    why_not: Callable[[], str | None]
    optional: bool = False

    @property
    def offered(self) -> bool:
        """True if the implementation can be selected on this machine."""
        return not self.optional or self.why_not() is None

    @property
    def summary(self) -> str:
        """The first sentence of the implementation's docstring, in one line."""
        paragraph = " ".join((self.value.__doc__ or "").strip().split("\n\n")[0].split())
        return re.split(r"(?<=\.)\s(?=[A-Z])", paragraph)[0]


class Registry(Generic[T]):
    """A mapping from names to implementations of one type, such as routers or all-to-all
    algorithms.
    """

    def __init__(self, kind: str, *, base: type | None = None,
                 check: Callable[[str, T], None] | None = None) -> None:
        self.kind, self.base, self.check = kind, base, check
        self._entries: dict[str, Entry[T]] = {}
        KINDS[kind] = self

    def register(self, name: str, *, why_not: Callable[[], str | None] = lambda: None,
                 optional: bool = False) -> Callable[[T], T]:
        """Return a decorator that registers an implementation, as in `@routers.register("topk")`.

        Args:
            name: name of the implementation.
            why_not: see `Entry`.
            optional: see `Entry`.
        Raises:
            ValueError: If the name is already registered, or if the implementation is not a
                subclass of the registry's base class.
        """

        def add(value: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is already registered; choose another name")
            if self.base is not None and not (isinstance(value, type)
                                              and issubclass(value, self.base)):
                raise ValueError(f"{self.kind} {name!r} is {value!r}: must be a subclass of "
                                 f"{self.base.__name__}")
            if self.check is not None:
                self.check(name, value)
            self._entries[name] = Entry(name, value, why_not, optional)
            return value

        return add

    def get(self, name: str) -> T:
        """Return the implementation with the given name.

        Raises:
            ValueError: If the name is unknown, or if the implementation is optional and cannot run
                on this machine. The message contains the known names, or the reason why the
                implementation cannot run.
        """
        entry = self._entries.get(name) or self.entry(name)
        if entry.optional and not entry.offered:
            raise ValueError(f"{self.kind} {name!r} cannot run here: {entry.why_not()}")
        return entry.value

    def find(self, name: str) -> T | None:
        """Return the implementation with the given name, even if it cannot run on this machine, or
        None if the name is unknown.
        """
        entry = self._entries.get(name)
        return None if entry is None else entry.value

    def entry(self, name: str) -> Entry[T]:
        """Return the `Entry` with the given name. A `ValueError` that lists the known names is
        raised if the name is unknown.
        """
        if name not in self._entries:
            near = did_you_mean(similar_names(str(name), self.names()))
            raise ValueError(
                f"unknown {self.kind} {short(name)}; {near}"
                f"known: {', '.join(self.names()) or 'none'}")
        return self._entries[name]

    def forget(self, name: str) -> None:
        """Remove a name from the registry, for example to register a changed version in a notebook.
        """
        del self._entries[self.entry(name).name]

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """At the end of the block, undo all registrations and removals made inside the block."""
        before = dict(self._entries)
        try:
            yield
        finally:
            self._entries = before

    def names(self) -> list[str]:
        """Return the names that can be selected on this machine, in alphabetical order."""
        return sorted(name for name, entry in self._entries.items() if entry.offered)

    def values(self) -> list[T]:
        """Return all implementations, in the order in which they were registered."""
        return list(map(operator.attrgetter("value"), self._entries.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter([self._entries[name] for name in sorted(self._entries)])


def import_user_modules(names: str | None) -> None:
    """Import each module of a comma-separated list, once per process.

    Args:
        names: optional. Comma-separated list of module names in dotted form or paths of `.py`
            files.
    Raises:
        ValueError: If importing a module raises any exception, which the message then contains.
    """
    for name in (part.strip() for part in (names or "").split(",")):
        if not name:
            continue
        try:
            _import_file(name) if name.endswith(".py") else importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            raise ValueError(
                f"imports={short(name)} cannot be imported: {type(error).__name__}: "
                f"{short(error)}; give a module that Python finds (PYTHONPATH), or the path of a "
                ".py file") from error


def _import_file(path: str) -> None:
    whole = os.path.realpath(path)
    name = f"moe_plugin_user_{hashlib.sha256(whole.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, whole)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
