"""Which parameters of ours get weight decay by the rules of other packages, which go by names and
by numbers of axes. Megatron's: tests/hosts/megatron/test_megatron_muon.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_plugin import MoELayer
from moe_plugin.gradients.muon import muon_groups
from moe_plugin.hosts.plain.blocks import optimizer_groups
from moe_plugin.hosts.plain.decay_rules import expert_biases

BIASES = {"bias_in_LF", "bias_gate_LF", "bias_out_LD"}


class Counting(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (7 * index + (1 + index % 5) * torch.arange(9)) % 60
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_a_trainer_decays_what_it_decays_in_the_models_own_blocks(kind: str,
                                                                  tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.20")
    pytest.importorskip("accelerate")
    from moe_plugin.hosts.plain.huggingface import restore_moe_blocks, swap_moe_blocks
    from tests.checkpoint.hf_models import tiny

    def trained(swap: bool) -> Any:
        model = tiny(kind)
        if swap:
            swap_moe_blocks(model)
        trainer = transformers.Trainer(
            model, transformers.TrainingArguments(
                str(tmp_path), max_steps=4, per_device_train_batch_size=4, save_strategy="no",
                learning_rate=0.1, weight_decay=2.0, optim="sgd", max_grad_norm=1.0,
                lr_scheduler_type="constant", report_to="none", use_cpu=True, disable_tqdm=True),
            train_dataset=Counting())
        decayed = set(trainer.get_decay_parameter_names(model))
        assert not decayed & set(expert_biases(model))
        assert not [name for name in decayed if name.rpartition(".")[2] in BIASES]
        trainer.train()
        if swap:
            restore_moe_blocks(model)
        return dict(model.named_parameters())

    once = trained(False)
    for name, value in trained(True).items():
        torch.testing.assert_close(value, once[name], rtol=1e-3, atol=1e-4, msg=name)


def _no_decay_list(name: str, parameter: Tensor) -> bool:
    """Scripts of accelerate and DeepSpeed."""
    return any(part in name for part in ("bias", "LayerNorm.weight"))


def _timm(name: str, parameter: Tensor) -> bool:
    """`param_groups_weight_decay`."""
    return parameter.ndim <= 1 or name.endswith(".bias")


def _muon(name: str, parameter: Tensor) -> bool:
    """Muon's own scripts: matrices go to Muon, the rest without decay to AdamW."""
    return parameter.ndim != 2 or bool(re.search("embed|head", name))


@pytest.mark.fast
def test_rules_that_do_not_know_experts_biases() -> None:
    """They take a stack of vectors for a matrix; `optimizer_groups` and `muon_groups` do not."""
    model = nn.Sequential(nn.Linear(8, 8), MoELayer(8, num_experts=4, expert_kind="gated_ffn"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    biases = set(expert_biases(model))
    assert {name.rpartition(".")[2] for name in biases} == BIASES
    for rule in (_no_decay_list, _timm, _muon):
        missed = {name for name, parameter in model.named_parameters()
                  if name in biases and not rule(name, parameter)}
        assert missed == biases, rule  # docs/adapters.md says so
    for groups in (optimizer_groups(model, 0.1, weight_decay=0.1),
                   muon_groups(model, 0.1, 0.1, weight_decay=0.1)):
        without = {names[id(p)] for group in groups if not group["weight_decay"]
                   for p in group["params"]}
        assert without == {"0.bias", *biases, *(n for n in names.values() if "logit_bias" in n)}
