"""Helpers that write pages in Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from moe_plugin.planner.choice import LayoutChoice

NOT_PROSE = ("#", "|", "!", "```", "* ")  # parts of a page that start like this are not wrapped


def document(*parts: str) -> str:
    """Return a page: its parts, separated by empty lines, with prose wrapped at 100 columns."""
    return "\n\n".join(part if part.startswith(NOT_PROSE) else paragraph(part)
                       for part in parts if part) + "\n"


def paragraph(text: str) -> str:
    """Wrap a text at 100 columns."""
    return textwrap.fill(" ".join(text.split()), 100, break_long_words=False,
                         break_on_hyphens=False)


def bullets(*items: str) -> str:
    """Return a Markdown list, wrapped at 100 columns."""
    return "\n".join(textwrap.fill(
        " ".join(item.split()), 100, initial_indent="* ", subsequent_indent="  ",
        break_long_words=False, break_on_hyphens=False) for item in items)


def made_with(command: str) -> str:
    """Return the sentence that names the command that writes a page."""
    return f"This page is written by `{command}`."


def versions_in_words(found: Mapping[str, str]) -> str:
    """Return a sentence with the date, the device and the versions of a measurement."""
    left = dict(found)
    date, device = left.pop("date", ""), left.pop("device", "")
    device = re.sub(r", (\d+) threads$", lambda match: (
        f" with {match[1]} thread" + "s" * (match[1] != "1")), device)
    packages = ", ".join(f"{name} {value}" for name, value in left.items())
    where = "".join(f" on {value}" for value in (date, device) if value)
    return f"Measured{where}{f' using {packages}' if packages else ''}."


def load_in_words(load: Sequence[float], cores: int | None = None) -> str:
    """Return a sentence with the load averages of the machine during a measurement."""
    shown = [f"{value:.1f}" for value in load]
    machine = f"machine ({cores} cores)" if cores else "machine"
    if len(shown) == 2:
        return (f"The load average of the {machine} was {shown[0]} before the run and {shown[1]} "
                "after it.")
    return f"The load averages of the {machine} were {', '.join(shown)}."


def layout_in_words(label: str) -> str:
    """Return a layout label in words.

    Args:
        label: a label of `LayoutChoice`, or several separated by commas, each followed by the
            number of layers that use it, such as "r=0 d=1 linear auto (1 of 2)".
    """
    parts: Iterable[str] = label.split(", ") if label else ()
    shown = []
    for part in parts:
        text, _, count = part.partition(" (")
        words = LayoutChoice.from_label(text).words
        shown.append(f"{count.rstrip(')')} layers: {words}" if count else words)
    return "; ".join(shown)
