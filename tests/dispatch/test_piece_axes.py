"""Cuts of rows into pieces: sender and receiver agree, nothing is lost, each rule does what it
says.
"""

from __future__ import annotations

import random

import pytest

from moe_plugin.config.parallel import CUTS as NAMES
from moe_plugin.dispatch.pieces import PIECE_AXES, Counts, PieceShares, shares_along

pytestmark = pytest.mark.fast

SIZES = [(1, 1, 1), (1, 2, 3), (2, 2, 4), (4, 4, 3), (3, 4, 2), (5, 3, 7), (8, 2, 1), (6, 8, 4)]


def _both_sides(shares: PieceShares, ranks: int, local: int, seed: int) -> list[list[list[Counts]]]:
    """[sent, received][rank][piece] of random counts."""
    dice = random.Random(seed)
    rows = [[[dice.choice([0, 1, 5, 37]) for _ in range(local)] for _ in range(ranks)]
            for _ in range(ranks)]
    sent = [shares.parts(rows[rank], rank, True) for rank in range(ranks)]
    received = [shares.parts([rows[source][rank] for source in range(ranks)], rank, False)
                for rank in range(ranks)]
    for rank in range(ranks):  # nothing is lost
        total = [[sum(column) for column in zip(*lists, strict=True)]
                 for lists in zip(*sent[rank], strict=True)]
        assert total == rows[rank]
    return [sent, received]


def test_the_names_are_those_of_the_settings() -> None:
    assert tuple(PIECE_AXES) == NAMES


@pytest.mark.parametrize("name", PIECE_AXES)
@pytest.mark.parametrize("number,ranks,local", SIZES)
def test_sender_and_receiver_agree(name: str, number: int, ranks: int, local: int) -> None:
    shares = shares_along(name, number, ranks, local)
    sent, received = _both_sides(shares, ranks, local, number)
    for piece in range(shares.pieces):
        for source in range(ranks):
            for target in range(ranks):
                assert sent[source][piece][target] == received[target][piece][source]
    for piece in shares.local:
        for rank in range(ranks):
            assert not any(any(row) for other, row in enumerate(sent[rank][piece]) if other != rank)


def test_by_rows_every_piece_has_some_of_each_expert() -> None:
    assert shares_along("rows", 3, 2, 2).parts([[7, 3], [9, 0]], 0, True) == [
        [[2, 1], [3, 0]], [[2, 1], [3, 0]], [[3, 1], [3, 0]]]


def test_by_experts_a_piece_has_few_experts_with_all_their_rows() -> None:
    assert shares_along("experts", 2, 2, 4).parts([[1, 2, 3, 4], [5, 6, 7, 8]], 0, True) == [
        [[1, 2, 0, 0], [5, 6, 0, 0]], [[0, 0, 3, 4], [0, 0, 7, 8]]]
    # more pieces than experts: an expert's rows are shared out
    assert shares_along("experts", 4, 1, 2).parts([[5, 8]], 0, True) == [
        [[2, 0]], [[3, 0]], [[0, 4]], [[0, 4]]]


def test_by_peers_what_stays_is_first_and_last() -> None:
    """Rank 1 of 3: 4 rows stay, then those for rank 2, then those for rank 0."""
    shares = shares_along("peers", 2, 3, 1)
    assert shares.local == (0, 3)
    assert shares.parts([[5], [4], [7]], 1, True) == [
        [[0], [2], [0]], [[0], [0], [7]], [[5], [0], [0]], [[0], [2], [0]]]
    # two peers in four pieces: half of a peer's rows in each
    assert shares_along("peers", 4, 3, 1).parts([[5], [4], [7]], 1, True)[1:5] == [
        [[0], [0], [3]], [[0], [0], [4]], [[2], [0], [0]], [[3], [0], [0]]]
