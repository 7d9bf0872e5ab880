"""Values in messages, shortened."""

from __future__ import annotations

import argparse
import difflib
import functools
import logging
import os
from collections.abc import Iterable
from typing import Any, NoReturn

LIMIT = 200  # characters of a value
_USAGE_LINES = 20  # more of them hide the message
_ARGUMENT_LIMIT = 600  # of argparse's message about an argument, which lists the choices


def short(value: Any, limit: int = LIMIT) -> str:
    """A value as at most `limit` characters of a message: an error's text on one line, other values
    as Python writes them.
    """
    try:
        text = repr(value)
        if isinstance(value, BaseException):
            text = " ".join(str(value).split()) or text
    except (ValueError, RecursionError):  # an integer of more digits than Python writes, or nesting
        text = f"a {type(value).__name__} too large to show"
    return cut(text, limit)


def cut(text: str, limit: int = LIMIT) -> str:
    """A text as at most `limit` of its characters."""
    if len(text) <= limit:
        return text
    note = f"... ({len(text)} characters)"
    return text[: limit - len(note)] + note


def alike(name: str, known: Iterable[str]) -> list[str]:
    """Known names that a wrong one was perhaps meant to be: of similar letters, or longer."""
    known = list(known)
    near = [*difflib.get_close_matches(name, known, 2, 0.8),
            *(each for each in known if each.startswith(f"{name}_"))]
    return list(dict.fromkeys(near))[:3]


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


class Parser(argparse.ArgumentParser):
    """`ArgumentParser` whose errors are short, whatever the arguments are."""

    def error(self, message: str) -> NoReturn:
        """Write the usage, if it is short, and the message; end with status 2. Of the ranks that a
        launcher starts on one node with the same arguments the first writes; other nodes may have
        other arguments.
        """
        if os.environ.get("LOCAL_RANK", "0") != "0":
            self.exit(2)
        if self.format_usage().count("\n") > _USAGE_LINES:
            self.exit(2, f"{self.prog}: error: {cut(message, _ARGUMENT_LIMIT)}\n"
                      f"All arguments: {self.prog} --help\n")
        super().error(cut(message, _ARGUMENT_LIMIT))
