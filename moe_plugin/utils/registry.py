"""One registry per kind: names map to implementations, an unknown name lists the known ones.

A kind is created once (`routers = Registry("router")`); whatever is registered in it is found by
config and joins the exactness tests without another line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from moe_plugin.utils.messages import alike, did_you_mean, short

T = TypeVar("T")
KINDS: dict[str, "Registry"] = {}


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered implementation.

    Attributes:
        why_not: returns None if it can run here, else the reason.
        optional: it needs what may not be installed; where it cannot run, `Registry.names` leaves
            it out and `Registry.get` gives the reason.
    """

    name: str
    value: T
    why_not: Callable[[], str | None]
    optional: bool = False

    @property
    def offered(self) -> bool:
        """Whether its name may be chosen here."""
        return not self.optional or self.why_not() is None

    @property
    def summary(self) -> str:
        """First sentence of the implementation's docstring, on one line."""
        paragraph = " ".join((self.value.__doc__ or "").strip().split("\n\n")[0].split())
        return re.split(r"(?<=\.)\s(?=[A-Z])", paragraph)[0]


class Registry(Generic[T]):
    """Named implementations of one kind: router, loss, dispatcher, all-to-all algorithm, ..."""

    def __init__(self, kind: str, *, base: type | None = None,
                 check: Callable[[str, T], None] | None = None) -> None:
        self.kind, self.base, self.check = kind, base, check
        self._entries: dict[str, Entry[T]] = {}
        KINDS[kind] = self

    def register(self, name: str, *, why_not: Callable[[], str | None] = lambda: None,
                 optional: bool = False) -> Callable[[T], T]:
        """Decorator: `@routers.register("topk")`; `ValueError` if the name exists already.

        why_not, optional: see `Entry`.
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
        """The implementation called `name`; `ValueError` with the known names if absent, with the
        reason if it is optional and cannot run here.
        """
        entry = self._entries.get(name) or self.entry(name)
        if entry.optional and not entry.offered:
            raise ValueError(f"{self.kind} {name!r} cannot run here: {entry.why_not()}")
        return entry.value

    def find(self, name: str) -> T | None:
        """What is registered under a name, whether it can run here or not; None: nothing is."""
        entry = self._entries.get(name)
        return None if entry is None else entry.value

    def entry(self, name: str) -> Entry[T]:
        """The whole entry called `name`."""
        if name not in self._entries:
            raise ValueError(
                f"unknown {self.kind} {short(name)}; {did_you_mean(alike(str(name), self.names()))}"
                f"known: {', '.join(self.names()) or 'none'}")
        return self._entries[name]

    def forget(self, name: str) -> None:
        """Unregister `name`, e.g. to register a changed version in a notebook."""
        del self._entries[self.entry(name).name]

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """What is registered or forgotten inside is undone at the end."""
        before = dict(self._entries)
        try:
            yield
        finally:
            self._entries = before

    def names(self) -> list[str]:
        """The names that may be chosen here, sorted."""
        return sorted(name for name, entry in self._entries.items() if entry.offered)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter([self._entries[name] for name in sorted(self._entries)])
