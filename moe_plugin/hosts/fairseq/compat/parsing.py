"""Errors of fairseq's command lines: one line, once on a node, with what to write instead; those of
MoE settings before anything is built.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from moe_plugin.config.flags import as_given
from moe_plugin.hosts.fairseq.compat.launch import errors_of_use_in_one_line
from moe_plugin.hosts.fairseq.compat.overlay import Overlay
from moe_plugin.messages import Parser, alike, flag_names

_USER_DIR = "--user-dir"
_OURS = "invalid choice: 'moe_"  # how names of our models and criteria begin


class CommandParser(Parser):
    """A parser whose errors name the user dir where it is missing."""

    def flags(self) -> set[str]:
        """Every flag, with those that the user dir would bring."""
        return super().flags() | self._brought()

    def remedies(self, message: str) -> list[str]:
        """As `Parser`'s."""
        brought, known = self._brought(), super().flags()
        if brought and (_OURS in message or any(
                name in brought or set(alike(name, brought)) & set(alike(name, known | brought))
                for name in flag_names(self.given) if name not in known)):
            message = f"{_USER_DIR} moe_plugin is missing, which brings MoE models and their flags"
            return [*super().remedies(""), message]
        return super().remedies(message)

    def _brought(self) -> set[str]:
        # flags, where the user dir is not given: then all is lost, and imports may take their time
        if _USER_DIR in flag_names(self.given):
            return set()
        from moe_plugin.hosts.fairseq import options

        return {"--" + name.replace("_", "-") for kind in options.KINDS
                for name in kind.__dataclass_fields__}


def short_errors() -> None:
    """fairseq <= 0.12.3 writes 300 lines of usage before the message, on every rank, and names no
    near flag.
    """
    from fairseq import options

    options.argparse = Overlay(argparse, ArgumentParser=CommandParser)
    original = options.get_parser

    def get_parser(*args: Any, **kwargs: Any) -> Any:
        with errors_of_use_in_one_line():  # it imports the user dir
            return original(*args, **kwargs)

    options.get_parser = get_parser


def settings_checked_when_parsed() -> None:
    """fairseq parses MoE settings as texts: whether they fit is said before its log begins."""
    from fairseq import options

    original = options.parse_args_and_arch

    def parse_args_and_arch(parser: Any, *args: Any, **kwargs: Any) -> Any:
        parsed = original(parser, *args, **kwargs)
        namespace = parsed[0] if isinstance(parsed, tuple) else parsed
        if "moe_plugin.hosts.fairseq.registered" in sys.modules:  # the user dir is there
            from moe_plugin.checkpoint.formats.fairseq.translate import check_flags

            try:
                check_flags(namespace)
            except ValueError as error:
                parser.error(as_given(str(error), vars(namespace)))
        return parsed

    options.parse_args_and_arch = parse_args_and_arch


SHIMS: tuple[Callable[[], None], ...] = (short_errors, settings_checked_when_parsed)
