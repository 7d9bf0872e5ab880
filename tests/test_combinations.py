"""The cells of the matrices: all pairs, few of them, always the same."""

from __future__ import annotations

import itertools

import pytest

from tests.combinations import all_pairs, every_value, name_of

pytestmark = pytest.mark.fast

SETTINGS = {"size": list(range(9)), "name": ["a", "b"], "factor": [None, 0.5, 1.0], "flag": [0, 1]}


def test_every_pair_of_values_meets() -> None:
    cells = all_pairs(SETTINGS)
    for one, other in itertools.combinations(SETTINGS, 2):
        met = {(cell[one], cell[other]) for cell in cells}
        assert met == set(itertools.product(SETTINGS[one], SETTINGS[other])), (one, other)


def test_cells_are_few_and_always_the_same() -> None:
    cells = all_pairs(SETTINGS)
    assert 9 * 3 <= len(cells) < 36  # the two longest settings alone need 27; all cells are 108
    assert cells == all_pairs(SETTINGS)
    assert all_pairs({"name": ["a", "b"]}) == [{"name": "a"}, {"name": "b"}]


def test_few_cells_show_every_value() -> None:
    cells = all_pairs(SETTINGS)
    some = [cells[place] for place in every_value(cells, along="name")]
    shown = {(cell["name"], name, cell[name]) for cell in some for name in SETTINGS}
    assert shown == {(cell["name"], name, cell[name]) for cell in cells for name in SETTINGS}
    assert len(some) <= 2 * 9 + 2  # the longest setting's values, with either name


def test_a_cell_names_all_its_settings() -> None:
    assert name_of({"experts": 8, "k": 2, "factor": None}) == "experts=8 k=2 factor=None"
