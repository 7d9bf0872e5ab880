"""Files by worker, and how many of them the worst workers spoil."""

from __future__ import annotations

import itertools

import pytest

from moe_plugin.planner.vote_assignments import (
    Assignment,
    assign,
    cyclic,
    mols,
    ramanujan,
    repetition,
)

SCHEMES = [mols(3, 1), mols(5, 3), ramanujan(5, 3), ramanujan(3, 3), ramanujan(3, 6),
           ramanujan(5, 5), repetition(5, 3)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.name}-{s.workers}-{s.count}")
def test_every_file_has_r_workers_and_every_worker_as_many_files(scheme: Assignment) -> None:
    assert {len(set(workers)) for workers in scheme.workers_of} == {scheme.copies}
    assert len({len(set(files)) for files in scheme.files}) == 1


@pytest.mark.parametrize("scheme, sizes", [
    (mols(5, 3), (15, 25, 5, 3)), (mols(7, 5), (35, 49, 7, 5)),
    (ramanujan(5, 3), (15, 25, 5, 3)), (ramanujan(5, 5), (25, 25, 5, 5)),
    (ramanujan(3, 6), (9, 18, 6, 3)), (repetition(5, 3), (15, 5, 1, 3)),
])
def test_sizes(scheme: Assignment, sizes: tuple[int, ...]) -> None:
    """K, f, l, r."""
    assert (scheme.workers, scheme.count, len(scheme.files[0]), scheme.copies) == sizes


def test_workers_of_different_squares_share_one_file() -> None:
    scheme = mols(7, 5)
    for a, b in itertools.combinations(range(35), 2):
        shared = len(set(scheme.files[a]) & set(scheme.files[b]))
        assert shared == (a // 7 != b // 7)


@pytest.mark.parametrize("scheme", [mols(5, 3), ramanujan(5, 3), ramanujan(3, 3), ramanujan(3, 6),
                                    repetition(4, 3)], ids=lambda s: f"{s.name}-{s.count}")
def test_the_search_is_exhaustive(scheme: Assignment) -> None:
    """Against all sets of workers."""
    assert scheme.worst(5) == [max(scheme.spoiled(wrong) for wrong in itertools.combinations(
        range(scheme.workers), q)) for q in range(6)]


def test_worst_cases_of_15_workers() -> None:
    worst = mols(5, 3).worst(8)
    assert worst[2:] == [1, 3, 5, 8, 12, 14, 17]
    assert [c / 25 for c in worst[2:8]] == [0.04, 0.12, 0.20, 0.32, 0.48, 0.56]
    frc = repetition(5, 3).worst(7)
    assert frc == [q // 2 for q in range(8)]
    assert [c / 5 for c in frc[2:]] == [0.2, 0.2, 0.4, 0.4, 0.6, 0.6]


def test_worst_cases_of_25_workers() -> None:
    assert ramanujan(5, 5).worst(11)[3:] == [1, 1, 2, 4, 5, 7, 9, 12, 14]


def test_worst_cases_of_35_workers() -> None:
    assert mols(7, 5).worst(7)[3:] == [1, 1, 2, 4, 5]


@pytest.mark.slow
def test_worst_cases_of_35_workers_of_which_12_are_wrong() -> None:
    """A minute."""
    assert mols(7, 5).worst(12)[3:] == [1, 1, 2, 4, 5, 8, 10, 11, 14, 16]


@pytest.mark.parametrize("make, words", [
    (lambda: mols(4, 3), "must be a prime"),
    (lambda: mols(5, 5), "copies must be at most load - 1"),
    (lambda: mols(5, 2), "an odd number"), (lambda: ramanujan(4, 4), "must be a prime"),
    (lambda: ramanujan(5, 7), "or a multiple"), (lambda: ramanujan(5, 4), "an odd number"),
    (lambda: repetition(0, 3), ">= 1"),
])
def test_impossible_numbers_are_named(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("name, workers, copies, wanted", [
    ("cyclic", 4, 3, cyclic(4, 3)), ("mols", 15, 3, mols(5, 3)),
    ("ramanujan", 15, 3, ramanujan(5, 3)), ("ramanujan", 25, 5, ramanujan(5, 5)),
    ("repetition", 15, 3, repetition(5, 3)),
])
def test_an_assignment_by_name(name: str, workers: int, copies: int, wanted: Assignment) -> None:
    made = assign(name, workers, copies)
    assert made == wanted and made.workers == workers and made.copies == copies


@pytest.mark.parametrize("name, workers, copies, words", [
    ("cyclic", 2, 3, "larger than the number of workers, 2"), ("cyclic", 4, 2, "an odd number"),
    ("mols", 16, 3, "not a multiple of copies=3"), ("mols", 12, 3, "load=4"),
    ("ramanujan", 6, 3, "fewer than copies^2=9"), ("ramanujan", 12, 3, "prime=4"),
])
def test_an_assignment_that_does_not_exist(name: str, workers: int, copies: int,
                                           words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("^", r"\^")):
        assign(name, workers, copies)
