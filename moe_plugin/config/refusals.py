"""Settings that a host refuses in combination with another setting, as rows of a table.

Each host has one table, `hosts/NAME/refusals.py`. The same rows raise the errors when a run is
built, are listed by `moe-plugin doctor --all`, and are written to docs/refusals_HOST.md.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_plugin.utils.messages import short

# all hosts refuse these for the same reason
ACTIVATION_POLICY = "offload.activations={offload.activations!r}"
CONTROLLED_TWICE = "both control the same tensors or layers; remove one of them"
_PLACEHOLDER = re.compile(r"\{([\w.]+)(!r)?\}")
_SHOWN_VALUE = re.compile(r"[= ]?(\([^()]*\{[^()]*\)|\{[\w.!]+\})")


class Values(dict[str, Any]):
    """Values of settings by name. Names that are not stored are looked up with `read(name)`.

    Args:
        known: values that are stored.
        read: function that returns the value of a setting, or None if the setting does not exist.
    """

    def __init__(self, known: Mapping[str, Any],
                 read: Callable[[str], Any] = lambda name: None) -> None:
        super().__init__(known)
        self._read = read

    def __missing__(self, name: str) -> Any:
        return self._read(name)

    def fill(self, text: str) -> str:
        """Replace `{name}` in a text by the value of a setting, and `{name!r}` by its `repr`."""
        return _PLACEHOLDER.sub(lambda found: (short if found[2] else str)(self[found[1]]), text)


@dataclass(frozen=True)
class Refusal:
    """A setting that a request excludes.

    Attributes:
        setting: the setting as messages name it. May contain names of settings in braces, which are
            replaced by their values (see `Values.fill`).
        excluded: function that returns a true value if the given values contain the setting.
        remedy: what to do instead, and the reason if it is not obvious. May contain braces, too.
        example: values for which the row applies if the request's example is added.
    """

    setting: str
    excluded: Callable[[Values], Any]
    remedy: str
    example: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The setting for lists of settings: its name without values."""
        return _SHOWN_VALUE.sub("", self.setting).strip()


@dataclass(frozen=True)
class Request:
    """A setting or flag that a user requests, and the settings that it excludes.

    Attributes:
        name: the request as messages name it. May contain braces, as in `Refusal.setting`.
        rows: the excluded settings, in the order in which they are checked.
        example: values with which the request is made.
        message: text of the error, with the placeholders request, setting and remedy.
    """

    name: str
    rows: tuple[Refusal, ...]
    example: Mapping[str, Any] = field(default_factory=dict)
    message: str = "{request} does not fit {setting}: {remedy}"

    def text(self, row: Refusal, values: Values) -> str:
        """Return the error message of a row."""
        parts = {"request": self.name, "setting": row.setting, "remedy": row.remedy}
        return values.fill(_PLACEHOLDER.sub(lambda part: parts.get(part[1], part[0]), self.message))

    @property
    def title(self) -> str:
        """The request for lists of requests: its name without explanations."""
        return Values(self.example).fill(self.name).partition(", w")[0]

    def refuse(self, values: Mapping[str, Any]) -> None:
        """Raise a `ValueError` for the first row that applies to the values."""
        known = values if isinstance(values, Values) else Values(values)
        for row in self.rows:
            if row.excluded(known):
                raise ValueError(self.text(row, known))


def flag(name: str) -> str:
    """Return the command-line flag of an argument. `name` may begin with a group and a dot."""
    return "--" + name.rpartition(".")[2].replace("_", "-")


def _named(text: str, name: str) -> str:
    return text.replace("{flag}", flag(name)).replace("{}", name)


def off(remedy: str, *names: str, shown: str = "{flag}", given: Any = True) -> tuple[Refusal, ...]:
    """Return rows for settings that must not be set.

    Args:
        remedy: remedy of all rows. `{flag}` is replaced by the flag of a setting, `{}` by its name.
        names: names of the settings.
        shown: how messages name the setting, with the same replacements.
        given: value in the examples.
    """
    return tuple(Refusal(_named(shown, name), operator.itemgetter(name), _named(remedy, name),
                         {name: given}) for name in names)


def at_most_one(remedy: str, *names: str, shown: str = "{flag}") -> tuple[Refusal, ...]:
    """Return rows for sizes that must be 1, 0 or not set. See `off` for the arguments."""
    def several(name: str, values: Values) -> bool:
        return (values[name] or 1) > 1

    return tuple(Refusal(_named(shown, name), functools.partial(several, name),
                         _named(remedy, name), {name: 2}) for name in names)


def one_of(remedy: str, name: str, *accepted: Any, shown: str, given: Any) -> tuple[Refusal, ...]:
    """Return a row for a setting that must be one of the accepted values or not set. See `off`."""
    return (Refusal(_named(shown, name), lambda values: values[name] not in (None, *accepted),
                    _named(remedy, name), {name: given}),)


def when(setting: str, excluded: Callable[[Values], Any], remedy: str,
         **example: Any) -> tuple[Refusal, ...]:
    """Return a row with any condition. In the names of the example, `__` stands for a dot."""
    return (Refusal(setting, excluded, remedy,
                    {name.replace("__", "."): value for name, value in example.items()}),)


def streamed_peer(lighthouse: str) -> tuple[Refusal, ...]:
    """Return the rows for peers of a run whose weights stream.

    lighthouse: name of the host's setting for the lighthouse.
    """
    every = "offload.average_every"
    return (Refusal("--moe-lighthouse without --moe-average-every",
                    lambda values: values[lighthouse] and not values[every],
                    "peers average weights, not gradients: set it, e.g. to 50",
                    {lighthouse: "http://a:1"}),
            Refusal(f"--moe-average-every {{{every}}} without --moe-lighthouse",
                    lambda values: values[every] and not values[lighthouse],
                    "set the address of the lighthouse", {every: 5}))
