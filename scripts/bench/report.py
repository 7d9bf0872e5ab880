"""Write pages in Markdown. A page consists of text and tables from a template in `pages`, filled in
with measured values by the function `page`.

 The fields of a template are those of `str.format`, with
additional formats after the colon:

* a unit, which divides the value and rounds it: `{rate:Mbit}`, or with digits `{seconds:ms.1}` and
  with thousands separated by commas `{size:MiB,}`; see `UNITS`;
* a notation, such as `{bytes:size}`, `{seconds:time}` or `{names:list}`; see `NOTATIONS`.

A field may contain a quotient (`{theirs/ours:.2f}`) or a relative difference
(`{measured/predicted-1:.0%}`). A field whose value is None is replaced with an empty string.

A template consists of paragraphs that are separated by empty lines:

* A paragraph that consists of one field, such as `{cells}`, is replaced by the value of the field:
  a text, or several paragraphs.
* A paragraph that begins with `for each of NAME:` is a table. The next two lines are the header of
  the table and the row that is repeated for each record in NAME.
* A line `<!-- NAME -->` starts a new section of the template.
"""

from __future__ import annotations

import re
import string
import sys
import textwrap
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_plugin.cli.figures import table
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.units import show_size, show_time

PAGES = Path(__file__).resolve().parent / "pages"
UNITS = {"ms": 1e-3, "Mbit": 1e6, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "MB": 1e6, "GB": 1e9,
         "tera": 1e12}
NOT_PROSE = ("#", "|", "!", "```", "* ")  # parts of a page that start like this are not wrapped


def document(*parts: str) -> str:
    """Return a page. The paragraphs are separated by empty lines, and text is wrapped at 100
    columns.
    """
    return "\n\n".join(part if part.startswith(NOT_PROSE) else paragraph(part)
                       for part in parts if part) + "\n"


def paragraph(text: str) -> str:
    """Wrap a text at 100 columns."""
    return textwrap.fill(" ".join(text.split()), 100, break_long_words=False,
                         break_on_hyphens=False)


def bullets(*items: str) -> str:
    """Format a Markdown list, wrapped at 100 columns."""
    return "\n".join(textwrap.fill(
        " ".join(item.split()), 100, initial_indent="* ", subsequent_indent="  ",
        break_long_words=False, break_on_hyphens=False) for item in items)


def versions_in_words(found: Mapping[str, str]) -> str:
    """Return a sentence with the date of a measurement, the device and the package versions."""
    left = dict(found)
    date, device = left.pop("date", ""), left.pop("device", "")
    device = re.sub(r", (\d+) threads(?=$| and )", lambda match: (
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
    """Describe a layout label in words.

    Args:
        label: a label of `LayoutChoice`, or several labels separated by commas. If there are
            several labels, each label is followed by the number of layers that use it, such as "r=0
            d=1 linear auto (1 of 2)".
    """
    parts: Iterable[str] = label.split(", ") if label else ()
    shown = []
    for part in parts:
        text, _, count = part.partition(" (")
        words = LayoutChoice.from_label(text).words
        shown.append(f"{count.rstrip(')')} layers: {words}" if count else words)
    return "; ".join(shown)


NOTATIONS: dict[str, Callable[[Any], str]] = {
    "size": show_size, "time": show_time, "layout": layout_in_words,
    "versions": versions_in_words, "load": load_in_words,
    "capital": lambda text: f"{text[:1].upper()}{text[1:]}",
    "count": lambda values: str(len(values)),
    "list": lambda values: ", ".join(map(str, values))}
_UNIT = re.compile(rf"({'|'.join(UNITS)})(,?)(?:\.(\d+))?")


class _Fields(string.Formatter):
    """A `str.format` formatter that supports the additional formats and quotients of this module.
    """

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        if match := re.fullmatch(r"([^/]+)/([^/]+?)(-1)?", field_name):
            top, bottom = (super(_Fields, self).get_field(name, args, kwargs)[0]
                           for name in match.groups()[:2])
            return top / bottom - bool(match[3]), field_name
        return super().get_field(field_name, args, kwargs)

    def format_field(self, value: Any, spec: str) -> str:
        if value is None:
            return ""
        if spec in NOTATIONS:
            return NOTATIONS[spec](value)
        if match := _UNIT.fullmatch(spec):
            unit, comma, digits = match.groups()
            return f"{value / UNITS[unit]:{comma}.{digits or 0}f}"
        return format(value, spec)


def filled(text: str, values: Any) -> str:
    """Return a text with its fields replaced by values.

    Args:
        values: a mapping from field names to values, or a record whose attributes are available as
            `{0.name}`.
    """
    return _Fields().vformat(text, (values,), values if isinstance(values, Mapping) else {})


def columns(records: Iterable[Any], cells: Mapping[str, str | Callable[[Any], str]]) -> str:
    """Return a Markdown table with one row for each record.

    Args:
        records: one record for each row.
        cells: for each header, a function of the record or a template string for `filled`.
    """
    return table(list(cells), [[cell(one) if callable(cell) else filled(cell, one)
                                for cell in cells.values()] for one in records])


def page(of: str, found: Mapping[str, Any], section: str = "", **values: Any) -> list[str]:
    """Return the paragraphs of a page, generated from the template of a study.

    Args:
        of: `__name__` of the study's module. The template may use all constants of that module.
        found: measured numbers.
        section: name of a template section. Defaults to the text before the first section.
        values: further values.
    """
    name = of.rpartition(".")[2]
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    sections = dict(zip(*[iter(["", *re.split(r"^<!-- (.*) -->$", text, flags=re.M)])] * 2,
                        strict=True))
    fields = ChainMap(values, dict(found), vars(sys.modules[of]))
    return [part for one in re.split(r"\n\s*\n", sections[section].strip())
            for part in _part(one, fields) if part]


def _part(text: str, fields: Mapping[str, Any]) -> Sequence[str]:
    if match := re.fullmatch(r"\{(\w+)\}", text):
        value = fields[match[1]]
        return [value] if isinstance(value, str) else list(value)
    if match := re.match(r"for each of (\w+):\n(.*)\n(.*)", text):
        header, row = ([cell.strip() for cell in line.strip("|").split("|")]
                       for line in match.groups()[1:])
        cells = dict(zip((filled(head, fields) for head in header), row, strict=True))
        return [columns(fields[match[1]], cells)]
    said = filled(text, fields)
    return [bullets(*re.split(r"^\* ", said, flags=re.M)[1:])] if text.startswith("* ") else [said]
