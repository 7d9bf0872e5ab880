"""Log-probabilities of whole models have the same bits in every batch and on any number of ranks,
if our layers are batch-invariant and the rest of the model is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.whole import LENGTH, VOCABULARY, Whole, model_of
from tests.invariant import BATCHES, LinearInBlocks, log_probs, part_of


def _logged(case: Whole, settings: dict[str, Any]) -> list[Tensor]:
    """Of each batch, those of this rank's sequences."""
    from megatron.core import parallel_state as ps

    model, found = model_of(case, settings), []
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCABULARY, (max(BATCHES), LENGTH), generator=g)
    for count in BATCHES:
        mine = ids[part_of(count, ps.get_data_parallel_rank(), case.ep)]
        with torch.no_grad(), LinearInBlocks():
            logits = model(input_ids=mine, attention_mask=None,
                           position_ids=torch.arange(LENGTH).expand_as(mine))
        found.append(log_probs(logits, mine))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_in_any_batch_and_on_any_ranks(dtype: torch.dtype) -> None:
    [[*_, wanted]] = on_ranks(1, _logged, Whole(dtype=dtype), {"batch_invariant": True})
    for ranks in (1, 2, 4):
        results = on_ranks(ranks, _logged, Whole(ep=ranks, dtype=dtype), {"batch_invariant": True})
        for rank, found in enumerate(results):
            for count, got in zip(BATCHES, found, strict=True):
                assert torch.equal(got, wanted[part_of(count, rank, ranks)]), (ranks, rank, count)
    if dtype == torch.bfloat16:
        return  # rounding may hide other bits in so small a model
    # without the setting, some batch has other bits
    [found] = on_ranks(1, _logged, Whole(dtype=dtype), {})
    assert any(not torch.equal(got, found[-1][:count])
               for count, got in zip(BATCHES, found, strict=True))
