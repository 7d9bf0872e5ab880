"""One format for times and sizes, and nobody who writes another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moe_plugin
from moe_plugin.planner.units import parse_size, parse_time, show_change, show_size, show_time

pytestmark = pytest.mark.fast

PACKAGE = Path(moe_plugin.__file__).parent


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0 s"), (1.23e-5, "12.3 us"), (9.994e-4, "999 us"), (9.996e-4, "1 ms"), (0.0045, "4.5 ms"),
    (0.99994, "1 s"), (2.5, "2.5 s"), (59.94, "59.9 s"), (59.96, "1 min"), (260.5, "4.34 min"),
    (3599, "1 h"), (4500, "1.25 h"), (7.56e6, "2,100 h"), (-0.0045, "-4.5 ms"),
    (float("inf"), "inf"), (float("nan"), "nan")])
def test_times(seconds: float, text: str) -> None:
    assert show_time(seconds) == text


@pytest.mark.parametrize(("size", "text"), [
    (0, "0 B"), (512, "512 B"), (1023, "1,023 B"), (65536, "64 KiB"), (2**20 - 1, "1 MiB"),
    (2**20, "1 MiB"), (2**31 / 3, "683 MiB"), (1.5 * 2**30, "1.5 GiB"), (2**41, "2,048 GiB")])
def test_sizes(size: float, text: str) -> None:
    assert show_size(size) == text


def test_changes_have_a_sign() -> None:
    assert [show_change(s) for s in (0.0045, -26, 0)] == ["+4.5 ms", "-26 s", "+0 s"]


@given(st.floats(1e-9, 1e9))
def test_three_digits_are_kept(value: float) -> None:
    shown = show_time(value)
    number, unit = shown.replace(",", "").split()
    factor = {"min": 60.0, "h": 3600.0}.get(unit) or parse_time(f"1{unit}")
    assert float(number) * factor == pytest.approx(value, rel=0.006, abs=1e-12)
    assert "e" not in number or value < 1e-9 or float(number) < 1e-3
    number, unit = show_size(value * 2**20).replace(",", "").split()
    assert float(number) * parse_size(f"1{unit}") == pytest.approx(value * 2**20, rel=0.006)


@pytest.mark.parametrize("room", ["checkpoint", "cli", "hosts/timm", "memory", "observe",
                                  "planner", "tuning", "../scripts/bench", "../scripts/emulate",
                                  "../scripts/audit"])
def test_nobody_formats_by_hand(room: str) -> None:
    """In a text with values, a unit of time or size never follows a value's format; but in pages of
    studies, which are made again from their numbers as they were.
    """
    by_hand = re.compile(r"\{[^{}]*:[^{}]*\} ?(us|µs|ms|s|KiB|MiB|GiB|kB|MB)\b|"
                         r"1e[36] \*[^{}]*\} ?(us|ms)\b")
    found = [f"{path.name}:{number}: {line.strip()}"
             for path in sorted((PACKAGE / room).rglob("*.py"))
             for number, line in enumerate(path.read_text().splitlines(), start=1)
             if by_hand.search(line) and path.parent.name != "studies"]
    assert found == []
