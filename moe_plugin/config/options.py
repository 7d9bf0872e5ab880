"""Base classes and checks for the settings. `option` declares a setting, `SettingsSection` groups
settings, and `check` raises an error that contains the setting's value, the allowed values and a
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

from moe_plugin.utils.messages import cut, did_you_mean, removed, short, similar_names

LARGEST = 2**63 - 1  # largest integer that torch accepts
# Upper bounds far above any practical value. They keep loops and memory finite.
MOST_EXPERTS, MOST_WIDTH, MOST_RANKS, MOST_SECONDS = 1 << 20, 1 << 24, 1 << 20, 1e7
MOST_TOKENS, MOST_MIB, MOST_STEPS = 1 << 30, 1 << 24, 10**9


def option(default: Any, help: str, *, choices: tuple[str, ...] = (), flag: str = "",
           alias: str = "", prefix: str = "--moe-") -> Any:
    """Declare one setting of a section.

    Args:
        default: default value of the setting.
        help: description shown in the docs and in each host's `--help`.
        choices: optional. All allowed values, if only a fixed set of values is allowed.
        flag: optional. Name of the command-line flag, without `prefix`. By default the setting has
            no flag.
        alias: optional. A second name of the setting in files, code and flags.
        prefix: prefix of the flag. Settings that apply to a whole model use the prefix `--`.
    """
    return field(default=default,
                 metadata={"help": help, "choices": choices, "flag": flag, "alias": alias,
                           "prefix": prefix})


def check(ok: bool, path: str, value: Any, bound: str, remedy: str) -> None:
    """Unless `ok` is true, raise a `ValueError` that contains the setting's name and value, the
    allowed values and a remedy.
    """
    if not ok:
        raise ValueError(f"{path}={short(value)} is out of bounds: must be {bound}; {remedy}")


_UNREAD: ContextVar[set[str] | None] = ContextVar("settings that nothing reads", default=None)


@contextmanager
def unread_allowed() -> Iterator[set[str]]:
    """Inside the block, collect settings that have no effect, instead of letting
    `SettingsSection.read_where` raise an error for each of them.

    Use this context for settings that were read from a file and may still be overridden by flags,
    and for the settings of a finished run.

    Yields: The set of dotted paths of all settings that have no effect, which grows while the block
        runs.
    """
    token = _UNREAD.set(met := set[str]())
    try:
        yield met
    finally:
        _UNREAD.reset(token)


@dataclass
class SettingsSection:
    """Base class of all sections of the settings tree, which are dataclasses.

    The constructor first checks types, then choices, then bounds. Nested sections are checked by
    their own constructors, which run earlier.

    Attributes:
        PATH: dotted path of the section in the tree, with a trailing dot.
        SHORTHAND: the setting that receives the value if the user gives a string in place of a
            whole section. `SHORTHAND` is empty if the section has no short form.
    """

    PATH: ClassVar[str] = ""
    SHORTHAND: ClassVar[str] = ""

    def __post_init__(self) -> None:
        _check_types(self)
        self.check_bounds()

    def check_bounds(self) -> None:
        """Check all constraints that cannot be expressed by types and choices. Subclasses call
        `require`.
        """

    def require(self, name: str, ok: bool, bound: str, remedy: str) -> None:
        """Raise a `ValueError` unless `ok` is true. The error message names the setting `name`. For
        a setting in a nested section, `name` has the form `section.name`.
        """
        if not ok:
            check(False, self.PATH + name, operator.attrgetter(name)(self), bound, remedy)

    def read_where(self, ok: bool, where: str, remedy: str, *names: str) -> None:
        """Raise an error if a setting that has no effect was changed from its default, so that no
        setting is silently ignored.

        Args:
            ok: whether the settings have an effect. If `ok` is True, nothing is checked.
            where: condition under which the settings have no effect, such as "where guard.votes=0".
            remedy: how the user can make the settings effective.
            names: names of the settings. By default all settings of the section are checked.
        """
        if ok:
            return
        for f in dataclasses.fields(self):
            if getattr(self, f.name) != f.default and (not names or f.name in names):
                default = "none" if f.default is None else f.default
                self.unread(f.name, f"{default} {where}, which does not read it",
                            f"leave it out, or {remedy}")

    def unread(self, name: str, bound: str, remedy: str) -> None:
        """Handle a setting that has no effect: record it inside `unread_allowed`, and raise a
        `ValueError` otherwise.
        """
        met = _UNREAD.get()
        if met is None:
            self.require(name, False, bound, remedy)
        else:
            met.add(self.PATH + name)

    def within(self, name: str, least: float, most: float, remedy: str) -> None:
        """Require that the number `name` is between `least` and `most`. `most` is far above any
        practical value. The limit prevents excessive memory use and endless loops.
        """
        value = operator.attrgetter(name)(self)
        if value is not None:
            self.require(name, least <= value, f">= {least}", remedy)
            self.require(name, value <= most, f"<= {most:.15g}", remedy)


_Changed = TypeVar("_Changed", bound=SettingsSection)


def resolved(section: _Changed, **values: Any) -> _Changed:
    """Return a copy of `section` in which the settings in `values` are replaced by values that this
    package has chosen.

    The copy is not validated again, because it may contain user settings that have no effect in
    combination with the chosen values.
    """
    made = copy.copy(section)
    vars(made).update(values)
    return made


class _Leaf(NamedTuple):
    """One field of a section.

    Attributes:
        is_section: whether the field is a nested section rather than a single setting.
        plain: types whose values need no further check.
        numbers: numeric types whose values must be representable in 64 bits.
        choices: allowed values, or an empty tuple if any value of the type is allowed.
    """

    name: str
    hint: Any
    is_section: bool
    plain: tuple[type, ...]
    numbers: tuple[type, ...]
    choices: tuple[str, ...]


@functools.cache  # cached: a tree has about 140 fields, all checked for every new or changed tree
def _leaves(cls: type) -> tuple[_Leaf, ...]:
    leaves = []
    for f in dataclasses.fields(cls):
        hint = hints_of(cls)[f.name]
        kinds = typing.get_args(hint) or (hint,)
        if typing.get_origin(hint) is dict:
            kinds = (dict,)
        plain = tuple(kind for kind in kinds if kind in (str, bool, type(None)))
        numbers = {float: (float, int), int: (int,)}.get(kinds[0], ())
        leaves.append(_Leaf(f.name, hint, is_section(hint), plain, numbers,
                            f.metadata.get("choices", ())))
    return tuple(leaves)


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
    """Build a section from plain nested values.

    Args:
        prefix: dotted path of the section, with a trailing dot.
        base: optional. A section that provides the values of all settings missing from `values`. By
            default, missing settings get their default values.
        root: optional. The settings tree in which similar names are looked up for the error message
            if a key is unknown. Defaults to `cls`.
    Raises:
        ValueError: If a key is unknown, if a setting is given under both its name and its alias, or
            if a value is invalid or has a wrong type. The error message contains the dotted path of
            the setting.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = canonical(values, aliases(cls), prefix)
    unknown = sorted(str(key) for key in set(values) - set(fields))
    if unknown:
        if removal := removed(prefix + unknown[0]):
            raise ValueError(removal)
        near = [*_below(cls, unknown[0], prefix), *_below(root or cls, unknown[0], ""),
                *(prefix + name for name in similar_names(unknown[0], fields))]
        near = list(dict.fromkeys(near))
        raise ValueError(f"unknown key {short(prefix + unknown[0])}; {did_you_mean(near[:3])}known "
                         f"keys here: {', '.join(sorted(fields))}")
    hints = hints_of(cls)
    built = {name: _convert(hints[name], value, prefix + name, getattr(base, name, None),
                            root or cls) for name, value in values.items()}
    return cls(**built) if base is None else dataclasses.replace(base, **built)


def _below(cls: type, name: str, prefix: str) -> list[str]:
    """Return the dotted paths of all settings named `name` in sections nested in `cls`."""
    sections = {section: hint for section, hint in hints_of(cls).items() if is_section(hint)}
    return [path for section, hint in sections.items()
            for path in ([f"{prefix}{section}.{name}"] if name in hints_of(hint) else
                         _below(hint, name, f"{prefix}{section}."))]


def aliases(cls: type, prefix: str = "") -> Mapping[str, str]:
    """Return a mapping from the dotted path of each alias to that of its setting, for a section and
    its nested sections.
    """
    main_names: dict[str, str] = {}
    hints = hints_of(cls)
    for f in dataclasses.fields(cls):
        if is_section(hints[f.name]):
            main_names.update(aliases(hints[f.name], f"{prefix}{f.name}."))
        elif f.metadata.get("alias"):
            main_names[prefix + f.metadata["alias"]] = prefix + f.name
    return main_names


def canonical(values: Mapping[str, Any], names: Mapping[str, str],
              prefix: str = "") -> dict[str, Any]:
    """Return `values` with every alias replaced by the setting's main name.

    Args:
        values: values by name or alias.
        names: mapping from aliases to main names, as returned by `aliases`.
        prefix: string that precedes each name in error messages.
    Raises:
        ValueError: If a setting is given under both its main name and its alias.
    """
    for alias, name in names.items():
        if alias in values and name in values:
            raise ValueError(
                f"{prefix}{alias}={short(values[alias])} and {prefix}{name}={short(values[name])} "
                "set the same setting; give only one of them")
    return {names.get(name, name): value for name, value in values.items()}


def is_section(hint: Any) -> TypeGuard[type[SettingsSection]]:
    """Return whether a field with this type is a nested section rather than a single setting."""
    return dataclasses.is_dataclass(hint)


def hints_of(cls: type) -> Mapping[str, Any]:
    """Return the resolved type of each field of a section."""
    return _hints_of(cls)


# Cached, because resolving types dominates the time to read settings. `hints_of` wraps the function
# because mypy loses the types of a cached function.
@functools.cache
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
    """Return whether a value is the string "none", which means None on the command line and in help
    texts.
    """
    return isinstance(value, str) and value.lower() == "none"


def _scalar(kind: type, value: Any, path: str) -> Any:
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)  # YAML and Hydra parse the text `4` as a number
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
