"""Load by expert against counting by hand."""

from __future__ import annotations

import pytest
import torch

from moe_plugin.kernels.choices import expert_load

pytestmark = pytest.mark.fast

IDS_TK = torch.tensor([[0, 2], [2, -1], [2, 0], [-1, -1]])


def test_load_counts_choices_and_skips_minus_one() -> None:
    assert expert_load(IDS_TK, 4).tolist() == [2, 0, 3, 0]
    assert expert_load(IDS_TK, 4).dtype == torch.int64
    assert expert_load(IDS_TK[:0], 4).tolist() == [0, 0, 0, 0]


def test_load_by_choice() -> None:
    assert expert_load(IDS_TK, 3, per_choice=True).tolist() == [[1, 0, 2], [1, 0, 1]]


def test_masked_tokens_are_not_counted() -> None:
    mask_T = torch.tensor([False, True, True, True])
    assert expert_load(IDS_TK, 3, mask_T).tolist() == [1, 0, 2]
    assert expert_load(IDS_TK, 3, mask_T, per_choice=True).tolist() == [[0, 0, 2], [1, 0, 0]]
