"""The auxiliary loss in `Trainer` is that of one process with the tokens of all ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.20")
pytest.importorskip("accelerate")

import moe_plugin.hosts.transformers  # noqa: E402, F401
from moe_plugin.hosts.transformers.compat.trainer import compute_loss  # noqa: E402
from tests.checkpoint.hf_models import tiny, tokens  # noqa: E402
from tests.distributed import run_gloo  # noqa: E402
from tests.hosts.transformers.test_transformers_resume import environment  # noqa: E402

WEIGHT, PARTS, ROWS = 0.5, 2, 8  # the loss's weight, micro-batches of a step, sequences of a step


def rows(model: Any) -> list[dict[str, Tensor]]:
    """Sequences with padding, and with labels that are ignored."""
    made = []
    for number, ids in enumerate(tokens(model, batch=ROWS, length=9)):
        real = torch.arange(9) < 9 - number % 4
        labels = ids.masked_fill(~real | (torch.arange(9) < number // 2), -100)
        made.append({"input_ids": ids, "attention_mask": real.long(), "labels": labels})
    return made


def batch(chosen: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in chosen]) for name in chosen[0]}


def start(kind: str, folder: Path) -> Any:
    model = tiny(kind)
    model.config.update({"output_router_logits": True, "router_aux_loss_coef": WEIGHT})
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="eager")


def reference(model: Any) -> dict[str, Tensor]:
    """The gradients of one process, from the losses of whole micro-batches."""
    made = rows(model)
    labels = sum(int((row["labels"][1:] != -100).sum()) for row in made)
    for part in range(PARTS):
        both = batch(made[part * ROWS // PARTS:(part + 1) * ROWS // PARTS])
        out = model(**both, num_items_in_batch=labels)
        (out.loss + (1 / PARTS - 1) * WEIGHT * out.aux_loss).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def moved(folder: Path, where: str, **distributed: Any) -> dict[str, Tensor]:
    environment()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="moe_plugin", **distributed)
    ranks = dist.get_world_size()
    before = {name: whole(p) for name, p in model.named_parameters()}
    args = transformers.TrainingArguments(
        str(folder / where), max_steps=1, gradient_accumulation_steps=PARTS, optim="sgd",
        per_device_train_batch_size=ROWS // PARTS // ranks, learning_rate=1.0, report_to=[],
        lr_scheduler_type="constant", max_grad_norm=1e9, use_cpu=True, save_strategy="no",
        train_sampling_strategy="sequential", disable_tqdm=True)
    trainer = transformers.Trainer(model, args, train_dataset=rows(model))
    trainer.train()
    assert model.router_aux_loss_coef == WEIGHT
    return {name: before[name] - whole(p) for name, p in trainer.model.named_parameters()}


def whole(value: Any) -> Tensor:
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def _equal(folder: Path, want: dict[str, Tensor], mesh: dict[str, int]) -> None:
    distributed = {} if not mesh else {"distributed_config": transformers.distributed.
                                       DistributedConfig(**mesh, ep_implementation="moe_plugin")}
    changes = moved(folder, "run", **distributed)
    for name, gradient in want.items():
        torch.testing.assert_close(changes[name], gradient, rtol=1e-4, atol=2e-6, msg=lambda text,
                                   name=name: f"{mesh} {name}: {text}")


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_gradients_are_those_of_one_process_with_the_whole_batch(kind: str, tmp_path: Path) -> None:
    model = start(kind, tmp_path)
    want = reference(model)
    router = next(name for name in want if name.endswith("mlp.gate.weight"))
    model.zero_grad()
    model.router_aux_loss_coef = 0.0
    without = {name: value.clone() for name, value in want.items()}
    model(**batch(rows(model))).loss.backward()
    assert (model.get_parameter(router).grad - without[router]).norm() > 0.1 * want[router].norm()
    run_gloo(1, _equal, tmp_path, want, {})
    run_gloo(2, _equal, tmp_path, want, {})  # data parallel
    run_gloo(2, _equal, tmp_path, want, {"fsdp_size": 2, "ep_size": 2})


def test_another_formula_is_refused() -> None:
    class Odd(nn.Module):
        router_aux_loss_coef, num_experts_per_tok = 0.1, 1
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(output_router_logits=True))

    logits = torch.tensor([[2.0, 0.0], [1.0, 0.0]])
    trainer = SimpleNamespace(
        model=Odd(), label_smoother=None, compute_loss_func=None,
        args=SimpleNamespace(world_size=1, n_gpu=1, gradient_accumulation_steps=1))

    def original(*args: Any) -> Any:
        return torch.tensor(1.0), {"router_logits": (logits,), "aux_loss": torch.tensor(9.0)}

    with pytest.raises(ValueError, match="auxiliary loss of Odd is 9, but must be .* is 1.61"):
        compute_loss(original, trainer, trainer.model, {"labels": 0})
