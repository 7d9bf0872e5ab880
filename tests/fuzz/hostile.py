"""Values that programs trip over, and bounds of the tests that try them."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

DEFAULT_EXAMPLES = 100  # hypothesis's own
LONGEST = 2000  # characters of an error, which may list all known names


def bounded(examples: int) -> settings:
    """So many examples, the same in every run; what fails is shown as it was found, because to make
    it smaller may take minutes. Under the profile of `tests.fuzz.run` they are more, and others in
    every run.
    """
    longer = settings.default.max_examples // DEFAULT_EXAMPLES
    return settings(max_examples=max(1, longer) * examples, deadline=None, derandomize=longer <= 1,
                    database=None, phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck))


NUMBERS = st.sampled_from([
    0, 1, -1, 2, 7, 10**4, 2**31, 2**63, -2**63, 10**12, 10**40, 10**400, 10**4000, 0.0, 0.5, -0.0,
    1e-300, 1e30, 1e300, float("inf"), float("-inf"), float("nan"), True, False])
WORDS = st.one_of(
    st.sampled_from(["", " ", "none", "auto", "true", "1e3", "topk,base", "/dev/null", "/", "..",
                     "${", "${a}", "\x00", "\ud800", "²", "9" * 5000, "x" * 5000, "🦆"]),
    st.text(max_size=8))
VALUES = st.recursive(
    st.one_of(st.none(), NUMBERS, WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3),
                            st.dictionaries(st.one_of(WORDS, NUMBERS), inner, max_size=3)),
    max_leaves=6)


def is_named(error: ValueError) -> bool:
    """Whether an error is one for people: it says something, and not too much."""
    return 0 < len(str(error)) <= LONGEST


def replaced(row: Any, draw: Any) -> Any:
    """A copy of nested lists and mappings in which one value, somewhere, is hostile."""
    if isinstance(row, dict) and row and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(row, key=str)))
        return {**row, key: replaced(row[key], draw)}
    if isinstance(row, list) and row and draw(st.integers(0, 3)):
        index = draw(st.integers(0, len(row) - 1))
        return [*row[:index], replaced(row[index], draw), *row[index + 1:]]
    return draw(VALUES)
