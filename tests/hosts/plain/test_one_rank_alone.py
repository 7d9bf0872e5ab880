"""What must be called on all ranks and is not: the error of the rank that waits says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_plugin.comm import CommError, TorchComm
from moe_plugin.hosts.plain.huggingface import restore_moe_blocks, swap_moe_blocks
from tests.checkpoint.hf_models import tiny
from tests.distributed import run_gloo

pytestmark = pytest.mark.distributed
CALLS = {
    "generate": (lambda model, folder: model.generate(
        torch.tensor([[1, 2, 3]]), max_new_tokens=2, min_new_tokens=2, do_sample=False),
                 r"ended earlier: call model.generate\(..., synced_gpus=True\) on all ranks"),
    "save": (lambda model, folder: model.save_pretrained(folder),
             "call save_pretrained, restore_moe_blocks or full_state on every rank"),
    "restore": (lambda model, folder: restore_moe_blocks(model), "every rank, not only on rank 0"),
}


def run_alone(name: str, folder: Path) -> None:
    model = tiny("mixtral").eval()
    # a group whose failure is not that of the world
    swap_moe_blocks(model, TorchComm(dist.new_group(), timeout_s=2))
    call, words = CALLS[name]
    if dist.get_rank() == 0:
        with pytest.raises(CommError, match=words):
            call(model, folder)


@pytest.mark.parametrize("name", CALLS)
def test_the_waiting_rank_says_what_to_call(name: str, tmp_path: Path) -> None:
    run_gloo(2, run_alone, name, tmp_path)
