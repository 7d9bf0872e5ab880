"""Blocks take the masks of models that are wrapped, or trained by a `Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from moe_plugin import auxiliary_loss, ddp_model, fully_shard_model
from moe_plugin.comm import LocalComm
from moe_plugin.hosts.plain.blocks import blocks_in
from moe_plugin.hosts.plain.huggingface import swap_moe_blocks
from moe_plugin.training.gradients.sync import exclude_experts
from tests.distributed import run_gloo
from tests.hosts.plain.test_model_masks import IDS, LEFT, RIGHT, one_layer, their_loss

pytest.importorskip("transformers")


class Wrapper(nn.Module):
    """A module of a user's, with another signature."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch)


def loads(model: nn.Module) -> Tensor:
    [(_, block)] = blocks_in(model)
    return block.last.stats.load_KE


def run_wrapped() -> list[tuple[str, float, float, int]]:
    found = []
    for name in ("ddp_model", "DistributedDataParallel", "fully_shard_model", "a user's module"):
        for mask_BS in (RIGHT, LEFT):
            theirs, _ = one_layer()
            want, _ = their_loss(theirs, mask_BS)
            swap_moe_blocks(theirs, LocalComm(), settings={"losses": {"switch": 2.0}})
            model: Any = Wrapper(theirs) if name == "a user's module" else theirs
            if name == "ddp_model":
                wrapped = ddp_model(model)
            elif name == "DistributedDataParallel":
                exclude_experts(model)
                wrapped = nn.parallel.DistributedDataParallel(model)
            elif name == "fully_shard_model":
                wrapped = fully_shard_model(model)
            else:
                wrapped = model
            batch = {"input_ids": IDS, "attention_mask": mask_BS.long()}
            wrapped(batch) if name == "a user's module" else wrapped(**batch)
            loss = auxiliary_loss(model)
            found.append((name, loss.item(), want.item(), int(loads(model).sum())))
    return found


@pytest.mark.distributed
def test_wrapped_models_hand_their_masks_on() -> None:
    for found in run_gloo(2, run_wrapped):
        for name, loss, want, load in found:
            assert loss == pytest.approx(want, rel=1e-5), name
            assert load == 2 * int(RIGHT.sum()), name


def test_a_trainer_hands_its_masks_on(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    _, ours = one_layer()
    seen = []
    rows = [{"input_ids": IDS[row], "labels": IDS[row], "attention_mask": LEFT[row].long()}
            for row in range(3)]

    class Noting(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, **more)
            seen.append((int(loads(model).sum()), int(inputs["attention_mask"].sum())))
            return loss

    Noting(ours, TrainingArguments(
        str(tmp_path), per_device_train_batch_size=1, max_steps=3, use_cpu=True, report_to=[],
        save_strategy="no", gradient_checkpointing=True), train_dataset=rows).train()
    assert sorted(tokens for _, tokens in seen) == sorted(map(int, LEFT.sum(1)))
    assert all(load == 2 * tokens for load, tokens in seen)
