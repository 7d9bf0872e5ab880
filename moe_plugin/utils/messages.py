"""Values in messages, shortened; bars that say how far something is."""

from __future__ import annotations

import argparse
import difflib
import functools
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, TextIO, TypeVar

T = TypeVar("T")

LIMIT = 200  # characters of a value
_USAGE_LINES = 20  # more of them hide the message
_ARGUMENT_LIMIT = 600  # of argparse's message about an argument, which lists the choices
_UNKNOWN = 6  # unknown flags in a message
_WAIT_S = 10.0  # for the rank that writes the message
_CLEARLY = 0.05  # more alike by so much: the other name was not meant
_CHOICE = re.compile(r"argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)", re.S)

# flags, settings and commands of the version before, and what to use in their place; the flags of a
# command follow its name
_ORDER = "experts are no longer ordered by who is chosen together; leave it out"
_STUDY = "docs/benchmarks.md names its numbers and the commit that still has it"
_FIT = "a prediction is printed with the error of the fits that it is made from"
_CHECKED = (f"{_FIT}, and runs are no longer compared with it; leave it out, and see `moe-plugin "
            "bench plan-error`")
REMOVED = {
    "--moe-stats-choices": _ORDER, "observe.choices": _ORDER, "plan --choices": _ORDER,
    "plan --slack": _ORDER, "plan --order": _ORDER, "reshard --order": _ORDER,
    "bench first-curve": _STUDY, "bench adam": _STUDY, "bench ranks": _STUDY,
    "bench reshard": _STUDY, "bench predicted": _STUDY,
    "bench resources": f"{_STUDY}; tests/scripts/bench/test_resources.py compiles every launch",
    "--moe-verbose": "what Megatron prints is always shown; leave it out",
    "reshard --hybrid-layer-pattern": "leave it out; Megatron 0.19 loads a GPT model's checkpoint "
    "into a hybrid model by itself (docs/megatron_models.md)",
    "--moe-prediction": _CHECKED, "observe.prediction": _CHECKED, "plan --history": _CHECKED,
    "recommend --trust-fit": f"{_FIT}, and no plan is refused for it; leave it out",
    "recommend --parts-only": f"{_FIT}, and no steps of the host are run; leave it out",
}


def removed(name: str, *commands: str) -> str:
    """What to say of a flag, setting or command that is not known because it was removed; nothing
    for other names.

    Args:
        name: as the user wrote it.
        commands: words before it, one of which may be the command of ours that it belongs to.
    """
    places = (name, *(f"{each} {name}" for each in commands))
    said = next((REMOVED[place] for place in places if place in REMOVED), "")
    return f"{name} was removed: {said}" if said else ""


def short(value: Any, limit: int = LIMIT) -> str:
    """A value as at most `limit` characters of a message: an error's text on one line, other values
    as Python writes them.
    """
    try:
        text = repr(value)
        if isinstance(value, BaseException):
            text = printable(" ".join(str(value).split())) or text
    except (ValueError, RecursionError):  # an integer of more digits than Python writes, or nesting
        text = f"a {type(value).__name__} too large to show"
    return cut(text, limit)


def cut(text: str, limit: int = LIMIT) -> str:
    """A text as at most `limit` of its characters."""
    if len(text) <= limit:
        return text
    note = f"... ({len(text)} characters)"
    return text[: limit - len(note)] + note


def printable(text: str, limit: int | None = None) -> str:
    """A text of a file for a terminal: on one line, without escape sequences and without marks that
    change the direction of writing. They are shown as Python writes them.

    Args:
        text: what a name, a path or a value of a file says.
        limit: optional. The most characters to show.
    """
    shown = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
    return shown if limit is None else cut(shown, limit)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal: columns as wide as they need to be, two spaces between them."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)
                               ).rstrip() for row in rows)


def alike(name: str, known: Iterable[str]) -> list[str]:
    """Known names that a wrong one was perhaps meant to be: of similar letters, or longer."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 2, 0.8)
    if len(near) == 2 and _likeness(name, near[0]) - _likeness(name, near[1]) > _CLEARLY:
        del near[1]
    longer = (each for each in known if each.startswith(f"{name}_"))
    return list(dict.fromkeys([*near, *longer]))[:3]


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def did_you_mean(near: Iterable[str]) -> str:
    """The beginning of a remedy, or nothing."""
    return f"did you mean {' or '.join(near)}? If not, " if near else ""


@functools.cache
def warn_once(where: str, text: str) -> None:
    """Log a warning, each text once in a process. where: the logger's name, that of a module."""
    logging.getLogger(where).warning("moe-plugin: %s", text)


def first_process() -> bool:
    """Whether this is the first process of those that a launcher started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def flag_names(words: Iterable[str]) -> list[str]:
    """The flags among the words of a command line, without values, each once."""
    return list(dict.fromkeys(text.split("=")[0] for text in words if text.startswith("--")))


class Parser(argparse.ArgumentParser):
    """`ArgumentParser` whose errors are short, whatever the arguments are, and say which flag a
    misspelled one was perhaps meant to be.
    """

    given: Sequence[str] = ()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As `ArgumentParser`'s."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {cut(' '.join(flag_names(unknown) or unknown))}")
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As `ArgumentParser`'s."""
        self.given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def flags(self) -> set[str]:
        """Every flag, also those of the commands below this one."""
        found = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    found.update(command.flags())
        return found

    def unknown(self) -> list[str]:
        """The flags given that are not known, and that nothing else is said of."""
        known = self.flags()
        return [name for name in flag_names(self.given) if name not in known]

    def remedies(self, message: str) -> list[str]:
        """What to add to an error: which known flags or choices the unknown ones are near to."""
        known = self.flags()
        wrong = {name: alike(name, known) for name in self.unknown()}
        if found := _CHOICE.match(message):
            wrong[found[2]] = alike(found[2], re.findall(r"[\w.-]+", found[3]))
        near = {name: meant for name, meant in wrong.items() if meant}
        words = [*self.prog.split()[-1:], *(w for w in self.given if not w.startswith("-"))][:2]
        if gone := [said for name in wrong if (said := removed(name, *words))]:
            return gone
        if len(wrong) == 1 and all(name in message for name in wrong):
            return [f"did you mean {' or '.join(meant)}?" for meant in near.values()]
        return [f"did you mean {' or '.join(meant)} instead of {name}?"
                for name, meant in list(near.items())[:_UNKNOWN]]

    def error(self, message: str) -> NoReturn:
        """Write the usage, if it is short, and the message; end with status 2. Of the ranks that a
        launcher starts on one node with the same arguments the first writes; other nodes may have
        other arguments. The others wait until they are ended: a launcher ends all ranks when the
        first of them has.
        """
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_WAIT_S)
            self.exit(2)
        text = "; ".join([cut(message, _ARGUMENT_LIMIT), *self.remedies(message)])
        if self.format_usage().count("\n") > _USAGE_LINES:
            self.exit(2, f"{self.prog}: error: {text} (all arguments: {self.prog} --help)\n")
        super().error(text)


class _Silent:
    """The methods of a tqdm bar that we use; shows nothing."""

    def update(self, *_: object) -> None:
        pass

    set_postfix_str = close = __exit__ = update

    def __enter__(self) -> Any:
        return self


def progress(total: int | None, description: str, stream: TextIO | None = None, *,
             unit: str = "step") -> Any:
    """A bar with `update(n)`, `set_postfix_str(text)` and `close()`, also a context manager.

    A tqdm bar, with the time that is left, if `stream` (default: standard error) is a terminal,
    tqdm is installed and this is the first process of its job; otherwise a bar that shows nothing.

    unit: of what is counted; "B": bytes.
    """
    stream = stream if stream is not None else sys.stderr
    if not stream.isatty() or not first_process():
        return _Silent()
    try:
        from tqdm import tqdm
    except ImportError:
        return _Silent()
    return tqdm(total=total, desc=description, unit=unit, file=stream, dynamic_ncols=True,
                leave=False, unit_scale=unit == "B", unit_divisor=1024)


def tracked(items: Sequence[T], description: str, unit: str) -> Iterator[T]:
    """The items one after the other, under a bar that counts those that are done."""
    with progress(len(items), description, unit=unit) as bar:
        for item in items:
            yield item
            bar.update(1)
