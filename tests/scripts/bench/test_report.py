"""Templates of pages: fields with units and quotients, tables, lists, sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.bench import report
from scripts.bench.report import columns, document, filled, page

pytestmark = pytest.mark.fast
WIDTH = 256  # a constant that a template of this module may use
TEMPLATE = """The layer has width {WIDTH} and {cells:count} cells. The links have
{rate:Mbit} Mbit/s.

{nothing}

* *One*: a term whose text is so long that the line must be divided before the hundredth of its
  columns, {rate:Mbit} Mbit/s.
* *Two*: another term.

for each of cells:
| name | {unit} | ratio |
| `{name}` | {seconds[a]:ms.1} | {seconds[b]/seconds[a]:.2f} |

{several}

<!-- second -->

## {title:capital}
"""


@pytest.fixture(autouse=True)
def _template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "PAGES", tmp_path)
    (tmp_path / "test_report.md").write_text(TEMPLATE, encoding="utf-8")


@pytest.mark.parametrize(("text", "value", "wanted"), [
    ("{x:ms}", 0.0126, "13"), ("{x:ms.2}", 0.0126, "12.60"), ("{x:MiB,}", 2e9, "1,907"),
    ("{x:Mbit}", 2e8, "200"), ("{x:size}", 65536, "64 KiB"), ("{x:time}", 0.002, "2 ms"),
    ("{x:list}", (1, 2), "1, 2"), ("{x:count}", "abc", "3"), ("{x:.1%}", 0.5, "50.0%"),
    ("{x:layout}", "r=0 d=1 linear auto", "experts' weights gathered, no all-to-all, one piece"),
    ("{x:.2f}", None, ""), ("{x}", None, ""), ("{x[a]/x[b]:.2f}", {"a": 1, "b": 4}, "0.25"),
    ("{x[a]/x[b]-1:+.0%}", {"a": 5, "b": 4}, "+25%")])
def test_fields(text: str, value: Any, wanted: str) -> None:
    assert filled(text, {"x": value}) == wanted


def test_records_and_functions_fill_a_table() -> None:
    rows = columns([(1, "a"), (2, "b")], {"n": "{0[0]}", "twice": lambda row: 2 * row[1]})
    assert [[cell.strip() for cell in line.split("|")[1:3]] for line in rows.splitlines()[2:]] == [
        ["1", "aa"], ["2", "bb"]]


def test_a_page_has_prose_lists_tables_and_parts() -> None:
    cells = [{"name": "x", "seconds": {"a": 0.5, "b": 1.0}}]
    parts = page(__name__, {"cells": cells, "rate": 2e8}, unit="ms", nothing="",
                 several=["## One", "Text."])
    prose, terms, table, *rest = parts
    assert prose.split() == (
        "The layer has width 256 and 1 cells. The links have 200 Mbit/s.").split()
    assert terms.count("\n* ") == 1 and terms.endswith("* *Two*: another term.")
    assert [line.replace(" ", "") for line in table.splitlines()[::2]] == [
        "|name|ms|ratio|", "|`x`|500.0|2.00|"]
    assert rest == ["## One", "Text."]
    assert page(__name__, {"title": "one, two"}, "second") == ["## One, two"]
    assert max(map(len, document(*parts).splitlines())) <= 100


def test_a_field_without_a_value_is_an_error() -> None:
    with pytest.raises(KeyError, match="title"):
        page(__name__, {}, "second")
