"""Log-probabilities of whole models have the same bits in every batch and on any number of ranks,
if their experts are computed in blocks of rows and the rest of the model is batch-invariant.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.20")

import moe_plugin.hosts.transformers as ours  # noqa: E402
from tests.checkpoint.hf_models import tiny, tokens  # noqa: E402
from tests.distributed import run_gloo  # noqa: E402
from tests.invariant import BATCHES, LinearInBlocks, log_probs, part_of  # noqa: E402


def logged(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad(), LinearInBlocks():
        return log_probs(model(ids).logits, ids)


def _ranks(folder: Path, dtype: torch.dtype, ids: Tensor, wanted: Tensor) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    ours.use({"experts.compute": "blocks"}, "in_blocks")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, distributed_config=transformers.distributed.DistributedConfig(
            fsdp_size=ranks, ep_size=ranks, ep_implementation="in_blocks")).eval()
    for count in BATCHES:
        mine = part_of(count, rank, ranks)
        assert torch.equal(logged(model, ids[mine]), wanted[mine]), count


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "experts"), [("mixtral", "num_local_experts"),
                                               ("qwen3_moe", "num_experts")])
def test_log_probabilities_in_any_batch_and_on_any_ranks(
        kind: str, experts: str, dtype: torch.dtype, tmp_path: Path) -> None:
    start = tiny(kind, **{experts: 8})
    ids = tokens(start, batch=max(BATCHES), length=5)
    start.save_pretrained(tmp_path)
    ours.use({"experts.compute": "blocks"}, "in_blocks")
    model, plain = (transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, experts_implementation=name).eval() for name in ("in_blocks",
                                                                               "moe_plugin"))
    wanted = logged(model, ids)
    for count in BATCHES:
        assert torch.equal(logged(model, ids[:count]), wanted[:count]), count
    # without blocks, some batch has other bits; in bfloat16, rounding may hide them
    found = [logged(plain, ids[:count]) for count in BATCHES]
    assert dtype == torch.bfloat16 or any(
        not torch.equal(got, found[-1][:len(got)]) for got in found)
    for ranks in (2, 4):
        run_gloo(ranks, _ranks, tmp_path, dtype, ids, wanted)
