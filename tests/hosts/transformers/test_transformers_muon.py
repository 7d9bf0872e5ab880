"""`ExpertMuon` in models of `transformers`: in a `Trainer`, and over ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers", minversion="5.20")

import moe_plugin.hosts.transformers  # noqa: E402
from moe_plugin.training.gradients.muon import ExpertMuon, muon_groups  # noqa: E402
from tests.checkpoint.hf_models import tiny, tokens  # noqa: E402
from tests.distributed import run_gloo  # noqa: E402


def optimizer_of(model: Any) -> ExpertMuon:
    return ExpertMuon(muon_groups(model, lr=0.02, adamw_lr=0.01))


def test_what_goes_to_muon_in_a_mixtral() -> None:
    model = tiny("mixtral")
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)].split("layers.0.")[-1]: group["halves"] if group["muon"] else "adamw"
             for group in muon_groups(model, 0.1, 0.1) for p in group["params"]
             if not re.search(r"layers\.[12]", names[id(p)])}
    assert found == {
        "model.embed_tokens.weight": "adamw", "lm_head.weight": "adamw",
        "model.norm.weight": "adamw", "input_layernorm.weight": "adamw",
        "post_attention_layernorm.weight": "adamw", "mlp.gate.weight": "adamw",
        **{f"self_attn.{name}_proj.weight": "none" for name in "qkvo"},
        "mlp.experts.gate_up_proj": "concatenated", "mlp.experts.down_proj": "none"}


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (7 * index + (1 + index % 5) * torch.arange(9)) % 60
        return {"input_ids": ids, "labels": ids}


def train(folder: Path, steps: int, checkpoint: Path | None = None) -> Any:
    model = tiny("mixtral")
    if checkpoint is not None:
        # `resume_from_checkpoint` takes no experts from files whose names of them are others
        model = transformers.MixtralForCausalLM.from_pretrained(checkpoint)
    model.set_experts_implementation("moe_plugin")
    moe_plugin.hosts.transformers.check(model)
    trainer = transformers.Trainer(
        model, transformers.TrainingArguments(
            str(folder), max_steps=steps, per_device_train_batch_size=4, save_steps=2,
            lr_scheduler_type="constant", report_to="none", use_cpu=True, disable_tqdm=True),
        train_dataset=Counting(), optimizers=(optimizer_of(model), None))
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return model


def test_a_trainer_trains_saves_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    once, start = train(tmp_path / "once", 4), dict(tiny("mixtral").named_parameters())
    train(tmp_path / "twice", 2)
    going_on = train(tmp_path / "twice", 4, tmp_path / "twice" / "checkpoint-2")
    twice = dict(going_on.named_parameters())
    for name, value in once.named_parameters():
        assert not torch.equal(value, start[name]), name
        torch.testing.assert_close(twice[name], value, rtol=1e-6, atol=1e-7)


def _steps(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    optimizer = optimizer_of(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p
            for name, p in ((n, p.detach()) for n, p in model.named_parameters())}


def _rank(folder: Path, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, distributed_config=transformers.distributed.DistributedConfig(
            fsdp_size=2, ep_size=2, ep_implementation="moe_plugin"))
    return _steps(model.train(), ids.chunk(2)[dist.get_rank()])


@pytest.mark.distributed
def test_experts_and_dense_matrices_on_two_ranks(tmp_path: Path) -> None:
    """Experts are spread by expert, dense matrices are sharded by FSDP2."""
    tiny("mixtral").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, experts_implementation="moe_plugin")
    ids = tokens(model, batch=4, length=9)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    want = _steps(model.train(), ids)
    for got in run_gloo(2, _rank, tmp_path, ids):
        for name, value in want.items():
            moved = (value - start[name]).abs().max()
            assert (got[name] - value).abs().max() <= 1e-3 * moved, name
