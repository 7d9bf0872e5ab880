"""Building blocks of the settings tree: leaves, sections, and errors that name value, bound and
remedy.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeGuard, TypeVar, cast

from moe_plugin.utils.messages import alike, cut, did_you_mean, removed, short

LARGEST = 2**63 - 1  # integer that torch takes
# beyond any use; they keep loops and memory finite
MOST_EXPERTS, MOST_WIDTH, MOST_RANKS, MOST_SECONDS = 1 << 20, 1 << 24, 1 << 20, 1e7
MOST_TOKENS, MOST_MIB, MOST_STEPS = 1 << 30, 1 << 24, 10**9


def option(default: Any, help: str, *, choices: tuple[str, ...] = (), flag: str = "",
           alias: str = "", prefix: str = "--moe-") -> Any:
    """A leaf of the tree.

    Args:
        default: its value where nothing is given.
        help: text for the docs and the hosts' `--help`.
        choices: all values, where they are a fixed set.
        flag: the hosts' flag without its prefix; empty: none.
        alias: a second name in files, code and flags; empty: none.
        prefix: of the flag; `--` where the setting is of a whole model.
    """
    return field(default=default,
                 metadata={"help": help, "choices": choices, "flag": flag, "alias": alias,
                           "prefix": prefix})


def check(ok: bool, path: str, value: Any, bound: str, remedy: str) -> None:
    """`ValueError` naming the setting, its value, the bound and the remedy, unless `ok`."""
    if not ok:
        raise ValueError(f"{path}={short(value)} is out of bounds: must be {bound}; {remedy}")


_UNREAD: ContextVar[set[str] | None] = ContextVar("settings that nothing reads", default=None)


@contextmanager
def unread_allowed() -> Iterator[set[str]]:
    """Settings that nothing reads are not errors inside (`SettingsSection.read_where`): those of a
    file whose flags are still to come, or of a run that is over.

    Yields: the paths of those that were met.
    """
    token = _UNREAD.set(met := set[str]())
    try:
        yield met
    finally:
        _UNREAD.reset(token)


@dataclass
class SettingsSection:
    """Base of all sections of the tree, which are dataclasses.

    Building one checks types, choices and bounds, in this order; sections inside it did it before.

    Attributes:
        PATH: where the section is in the tree, with a trailing dot.
        SHORTHAND: the leaf that a text in place of the section sets; empty: none.
    """

    PATH: ClassVar[str] = ""
    SHORTHAND: ClassVar[str] = ""

    def __post_init__(self) -> None:
        _check_types(self)
        self.check_bounds()

    def check_bounds(self) -> None:
        """Check what types and choices leave open, by `require`."""

    def require(self, name: str, ok: bool, bound: str, remedy: str) -> None:
        """`check` of the leaf `name` of this section, or `section.name` of one inside it."""
        if not ok:
            check(False, self.PATH + name, operator.attrgetter(name)(self), bound, remedy)

    def read_where(self, ok: bool, where: str, remedy: str, *names: str) -> None:
        """`require` that leaves which nothing reads (not `ok`) are as by default, so that nothing
        is ignored that was asked for.

        Args:
            where: when nothing reads them, e.g. "where guard.votes=0".
            names: none: all leaves.
        """
        if ok:
            return
        for f in dataclasses.fields(self):
            if getattr(self, f.name) != f.default and (not names or f.name in names):
                default = "none" if f.default is None else f.default
                self.unread(f.name, f"{default} {where}, which does not read it",
                            f"leave it out, or {remedy}")

    def unread(self, name: str, bound: str, remedy: str) -> None:
        """`require` of a leaf that nothing reads; inside `unread_allowed` it is noted there."""
        met = _UNREAD.get()
        if met is None:
            self.require(name, False, bound, remedy)
        else:
            met.add(self.PATH + name)

    def within(self, name: str, least: float, most: float, remedy: str) -> None:
        """`require` that the number `name` is in these bounds. `most` is beyond any use: it keeps
        loops, memory and times finite.
        """
        value = operator.attrgetter(name)(self)
        if value is not None:
            self.require(name, least <= value, f">= {least}", remedy)
            self.require(name, value <= most, f"<= {most:.15g}", remedy)


_Changed = TypeVar("_Changed", bound=SettingsSection)


def resolved(section: _Changed, **values: Any) -> _Changed:
    """A copy with values that this package chose for settings left open, of which nothing is
    checked: what was given may be read no more.
    """
    made = copy.copy(section)
    vars(made).update(values)
    return made


class _Leaf(NamedTuple):
    """A field of a section: its type; of a leaf, the types whose values need no further look, the
    types whose values must be in 64 bits, and its choices.
    """

    name: str
    hint: Any
    is_section: bool
    plain: tuple[type, ...]
    numbers: tuple[type, ...]
    choices: tuple[str, ...]


@functools.cache  # a tree has some 140 leaves, and is checked whenever one is made or replaced
def _leaves(cls: type) -> tuple[_Leaf, ...]:
    found = []
    for f in dataclasses.fields(cls):
        hint = hints_of(cls)[f.name]
        kinds = typing.get_args(hint) or (hint,)
        if typing.get_origin(hint) is dict:
            kinds = (dict,)
        plain = tuple(kind for kind in kinds if kind in (str, bool, type(None)))
        numbers = {float: (float, int), int: (int,)}.get(kinds[0], ())
        found.append(_Leaf(f.name, hint, is_section(hint), plain, numbers,
                           f.metadata.get("choices", ())))
    return tuple(found)


def _check_types(section: SettingsSection) -> None:
    prefix, cls = section.PATH, cast(type, type(section))
    for name, hint, nested, plain, numbers, choices in _leaves(cls):
        value = getattr(section, name)
        kind = type(value)
        if nested:
            if not isinstance(value, hint):
                raise ValueError(f"{prefix}{name}={short(value)} is a {kind.__name__}; must be "
                                 f"{hint.__name__}(...)")
        elif not ((kind in plain and not (kind is str and type(None) in plain
                                          and says_none(value)))
                  or (kind in numbers and -LARGEST <= value <= LARGEST)):
            value = _convert(hint, value, prefix + name)
            setattr(section, name, value)
        if choices and value is not None and value not in choices:
            check(False, prefix + name, value, f"one of {', '.join(choices)}",
                  "choose one of these")


def build(cls: type, values: Mapping[str, Any], prefix: str, base: Any = None,
          root: type | None = None) -> Any:
    """A section from plain nested values.

    Args:
        cls: its class.
        values: by name.
        prefix: its path, with a trailing dot.
        base: a section whose values those leaves have that `values` does not name; None: defaults.
        root: the tree in which errors look for what may be meant; None: this section.
    Raises:
        ValueError: unknown keys, a setting under two names, wrong types and bad values; it names
            the path `prefix` + key.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = canonical(values, aliases(cls), prefix)
    unknown = sorted(str(key) for key in set(values) - set(fields))
    if unknown:
        if said := removed(prefix + unknown[0]):
            raise ValueError(said)
        near = [*_below(cls, unknown[0], prefix), *_below(root or cls, unknown[0], ""),
                *(prefix + name for name in alike(unknown[0], fields))]
        near = list(dict.fromkeys(near))
        raise ValueError(f"unknown key {short(prefix + unknown[0])}; {did_you_mean(near[:3])}known "
                         f"keys here: {', '.join(sorted(fields))}")
    hints = hints_of(cls)
    built = {name: _convert(hints[name], value, prefix + name, getattr(base, name, None),
                            root or cls) for name, value in values.items()}
    return cls(**built) if base is None else dataclasses.replace(base, **built)


def _below(cls: type, name: str, prefix: str) -> list[str]:
    """Paths of the settings of this name in the sections of a section."""
    sections = {section: hint for section, hint in hints_of(cls).items() if is_section(hint)}
    return [path for section, hint in sections.items()
            for path in ([f"{prefix}{section}.{name}"] if name in hints_of(hint) else
                         _below(hint, name, f"{prefix}{section}."))]


def aliases(cls: type, prefix: str = "") -> Mapping[str, str]:
    """Second names in a section and below: dotted path to dotted path."""
    found: dict[str, str] = {}
    hints = hints_of(cls)
    for f in dataclasses.fields(cls):
        if is_section(hints[f.name]):
            found.update(aliases(hints[f.name], f"{prefix}{f.name}."))
        elif f.metadata.get("alias"):
            found[prefix + f.metadata["alias"]] = prefix + f.name
    return found


def canonical(values: Mapping[str, Any], names: Mapping[str, str],
              prefix: str = "") -> dict[str, Any]:
    """The same values by their first names.

    Args:
        values: by name or alias.
        names: see `aliases`.
        prefix: what errors put before a name.
    Raises:
        ValueError: a setting is given under both names.
    """
    for alias, name in names.items():
        if alias in values and name in values:
            raise ValueError(
                f"{prefix}{alias}={short(values[alias])} and {prefix}{name}={short(values[name])} "
                "name the same setting; give one of the two")
    return {names.get(name, name): value for name, value in values.items()}


def is_section(hint: Any) -> TypeGuard[type[SettingsSection]]:
    """Whether the type of a field is a section, not that of a leaf."""
    return dataclasses.is_dataclass(hint)


def hints_of(cls: type) -> Mapping[str, Any]:
    """Field types of a section, as types."""
    return _hints_of(cls)


@functools.cache  # most of the time in which settings are read; it has no types for mypy
def _hints_of(cls: type) -> Mapping[str, Any]:
    return MappingProxyType({name: hint for name, hint in typing.get_type_hints(cls).items()
                             if typing.get_origin(hint) is not ClassVar})


def _convert(hint: Any, value: Any, path: str, base: Any = None, root: type | None = None) -> Any:
    if is_section(hint):
        if isinstance(value, str) and hint.SHORTHAND:
            value = {hint.SHORTHAND: value}
        if not isinstance(value, Mapping):
            keys = ", ".join(hints_of(hint))
            raise ValueError(f"{path}={short(value)} must be a mapping with keys {keys}")
        return build(hint, value, path + ".", base, root)
    if typing.get_origin(hint) is dict:
        value = {} if says_none(value) else value
        names, numbers = typing.get_args(hint)
        if not isinstance(value, Mapping):
            what, such = (("name to number", "{gshard: 0.01}") if names is str else
                          ("number to number", "{100: 4}"))
            raise ValueError(f"{path}={short(value)} must be a mapping of {what}, e.g. {such}")
        return {str(key) if names is str else _scalar(names, key, f"{path}: the key"):
                _scalar(numbers, item, f"{path}.{key}") for key, item in value.items()}
    options = typing.get_args(hint)
    if type(None) in options:
        return None if value is None or says_none(value) else _scalar(options[0], value, path)
    return _scalar(hint, value, path)


def says_none(value: Any) -> bool:
    """Whether a value is the word "none", which the flags and their help use for None."""
    return isinstance(value, str) and value.lower() == "none"


def _scalar(kind: type, value: Any, path: str) -> Any:
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)  # YAML and Hydra read a text such as 4 as a number
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"{cut(path)}={short(value)} must be a finite number")
        try:
            return float(value)
        except OverflowError as error:
            raise ValueError(f"{cut(path)}={short(value)} must be a finite number; the largest is "
                             "about 1.8e308") from error
    if kind is int and isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{cut(path)}={short(value)} must be an integer of at most 64 bits")
    if kind is not float and isinstance(value,
                                        kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{cut(path)}={short(value)} is a {type(value).__name__}; must be "
                     f"{kind.__name__}")
