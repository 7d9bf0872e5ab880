"""Functions for messages, such as shortened values, tables, suggestions and progress bars."""

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

LIMIT = 200  # characters shown of a value
_USAGE_LINES = 20  # a longer usage text would hide the message
_ARGUMENT_LIMIT = 600  # characters of argparse's message, which lists the choices
_UNKNOWN = 6  # unknown flags listed in a message
_WAIT_S = 10.0  # so that the first rank can write its message
_CLEARLY = 0.05  # difference in similarity above which only the best match is shown
_CHOICE = re.compile(r"argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)", re.S)

# Flags, settings and commands of the previous version, with their replacements. A flag of a command
# follows the command's name.
_ORDER = "experts are no longer ordered by who is chosen together; leave it out"
_STUDY = "docs/benchmarks.md names its numbers and the commit that still has it"
_FIT = "a prediction is printed with the error of the fits that it is made from"
_CHECKED = (f"{_FIT}, and runs are no longer compared with it; leave it out, and see `moe-plugin "
            "bench plan-error`")
REMOVED = {
    "--moe-stats-choices": _ORDER, "observe.choices": _ORDER, "plan --choices": _ORDER,
    "plan --slack": _ORDER, "plan --order": _ORDER, "reshard --order": _ORDER,
    "bench first-curve": _STUDY, "bench adam": _STUDY, "bench ranks": _STUDY,
    "bench reshard": _STUDY, "bench predicted": _STUDY, "bench forest": _STUDY,
    "bench offload-plans": _STUDY,
    "bench layer --plot": "`moe-plugin bench layers --out FOLDER` draws the plots",
    "bench weights --throttle": "leave it out; no page compares disks",
    "bench resources": f"{_STUDY}; tests/scripts/bench/test_resources.py compiles every launch",
    "--moe-verbose": "what Megatron prints is always shown; leave it out",
    "reshard --hybrid-layer-pattern": "leave it out; Megatron 0.19 loads a GPT model's checkpoint "
    "into a hybrid model automatically (docs/megatron_models.md)",
    "--moe-prediction": _CHECKED, "observe.prediction": _CHECKED, "plan --history": _CHECKED,
    "recommend --trust-fit": f"{_FIT}, and no plan is refused for it; leave it out",
    "recommend --parts-only": f"{_FIT}, and no steps of the host are run; leave it out",
}


def removed(name: str, *commands: str) -> str:
    """Return the error message for a name that has been removed from the package, or an empty
    string for any other name.

    Args:
        name: name of a flag, setting or command, as written by the user.
        commands: the words before the name on the command line. The words may include the command
            to which a flag belongs.
    """
    places = (name, *(" ".join([*commands[first:last], name])
                      for last in range(1, len(commands) + 1) for first in range(last)))
    replacement = next((REMOVED[key] for key in places if key in REMOVED), "")
    return f"{name} was removed: {replacement}" if replacement else ""


def short(value: Any, limit: int = LIMIT) -> str:
    """Convert a value to a string with at most `limit` characters.

    An error is converted to its message, without line breaks. Any other value is converted with
    `repr`.
    """
    try:
        text = repr(value)
        if isinstance(value, BaseException):
            text = printable(" ".join(str(value).split())) or text
    except (ValueError, RecursionError):  # an integer with too many digits, or deep nesting
        text = f"a {type(value).__name__} too large to show"
    return cut(text, limit)


def cut(text: str, limit: int = LIMIT) -> str:
    """Shorten a string to at most `limit` characters."""
    if len(text) <= limit:
        return text
    note = f"... ({len(text)} characters)"
    return text[: limit - len(note)] + note


def printable(text: str, limit: int | None = None) -> str:
    """Convert a string from a file to a single line that is safe to display in a terminal.

    Escape sequences and characters that change the writing direction are replaced with Python
    escapes.

    Args:
        text: string to display, such as a name, a path or a value from a file.
        limit: optional. Maximum number of characters to show.
    """
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return shown if limit is None else cut(shown, limit)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format a table for a terminal. Columns are aligned and separated by two spaces."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)
                               ).rstrip() for row in rows)


def similar_names(name: str, known: Iterable[str]) -> list[str]:
    """Return known names that the user may have meant by an unknown name. Possible names are names
    with similar spelling, and longer names that start with the unknown name.
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, 2, 0.8)
    if len(near) == 2 and _likeness(name, near[0]) - _likeness(name, near[1]) > _CLEARLY:
        del near[1]
    longer = (candidate for candidate in known if candidate.startswith(f"{name}_"))
    return list(dict.fromkeys([*near, *longer]))[:3]


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def did_you_mean(near: Iterable[str]) -> str:
    """Return a question that suggests similar names, followed by the start of the remedy, or an
    empty string if there are no similar names.
    """
    return f"did you mean {' or '.join(near)}? If not, " if near else ""


@functools.cache
def warn_once(where: str, text: str) -> None:
    """Log a warning, unless this process has logged the same warning before. where: name of the
    logger.
    """
    logging.getLogger(where).warning("moe-plugin: %s", text)


def first_process() -> bool:
    """Return whether this is the first process that a launcher started, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def flag_names(words: Iterable[str]) -> list[str]:
    """Return the flags in a command line, without values and without duplicates."""
    return list(dict.fromkeys(text.split("=")[0] for text in words if text.startswith("--")))


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` with short error messages. If a flag is misspelled, the message suggests
    a known flag.
    """

    given: Sequence[str] = ()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments (see `ArgumentParser.parse_args`)."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {cut(' '.join(flag_names(unknown) or unknown))}")
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments (see `ArgumentParser.parse_known_args`)."""
        self.given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def flags(self) -> set[str]:
        """Return all flags of this parser and of its commands."""
        found = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    found.update(command.flags())
        return found

    def unknown(self) -> list[str]:
        """Return the unknown flags among the arguments."""
        known = self.flags()
        return [name for name in flag_names(self.given) if name not in known]

    def remedies(self, message: str) -> list[str]:
        """Return suggestions of known flags or choices that are similar to the unknown ones in an
        error message.
        """
        known = self.flags()
        wrong = {name: similar_names(name, known) for name in self.unknown()}
        if match := _CHOICE.match(message):
            wrong[match[2]] = similar_names(match[2], re.findall(r"[\w.-]+", match[3]))
        near = {name: meant for name, meant in wrong.items() if meant}
        words = [*self.prog.split()[-1:], *(w for w in self.given if not w.startswith("-"))][:3]
        if gone := [replacement for name in wrong if (replacement := removed(name, *words))]:
            return gone
        if len(wrong) == 1 and all(name in message for name in wrong):
            return [f"did you mean {' or '.join(meant)}?" for meant in near.values()]
        return [f"did you mean {' or '.join(meant)} instead of {name}?"
                for name, meant in list(near.items())[:_UNKNOWN]]

    def error(self, message: str) -> NoReturn:
        """Print the error message and exit with status 2. If the usage text is short, it is printed
        before the message.

        Only the first rank on each node prints the message, because a launcher starts all ranks of
        a node with the same arguments. On different nodes, the arguments may differ. All other
        ranks wait; the launcher terminates them when the first rank has exited.
        """
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_WAIT_S)
            self.exit(2)
        text = "; ".join([cut(message, _ARGUMENT_LIMIT), *self.remedies(message)])
        if self.format_usage().count("\n") > _USAGE_LINES:
            self.exit(2, f"{self.prog}: error: {text} (all arguments: {self.prog} --help)\n")
        super().error(text)


class _Silent:
    """A progress bar that does not print anything. The class has the same methods as tqdm, as far
    as this package uses them.
    """

    def update(self, *_: object) -> None:
        pass

    set_postfix_str = close = __exit__ = update

    def __enter__(self) -> Any:
        return self


def progress(total: int | None, description: str, stream: TextIO | None = None, *,
             unit: str = "step") -> Any:
    """Create a progress bar with the methods `update(n)`, `set_postfix_str(text)` and `close()`,
    which can also be used as a context manager.

    The bar is a tqdm bar that shows the remaining time, provided that the stream is a terminal,
    tqdm is installed, and this is the first process of its job. If one of these conditions is not
    met, the bar prints nothing.

    Args:
        total: optional. Total number of units when the bar is complete.
        description: text to the left of the bar.
        stream: optional. Output stream. Defaults to standard error.
        unit: name of the unit that is counted, such as "step". "B" stands for bytes.
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
    """Yield items one by one, and show the number of completed items in a progress bar."""
    with progress(len(items), description, unit=unit) as bar:
        for item in items:
            yield item
            bar.update(1)
