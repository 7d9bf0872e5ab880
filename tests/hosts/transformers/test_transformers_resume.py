"""`Trainer` under expert parallelism saves, resumes with other ranks, and refuses what cannot fit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

transformers = pytest.importorskip("transformers", minversion="5.20")
pytest.importorskip("accelerate")

import moe_plugin.hosts.transformers  # noqa: E402, F401
from tests.checkpoint.hf_models import tiny, tokens  # noqa: E402
from tests.distributed import run_gloo  # noqa: E402
from tests.hosts.trainers import Killed, killed_at  # noqa: E402

BATCH, STEPS = 12, 6  # sequences of all ranks in a step


def environment() -> None:
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks,
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # the group is there already


def trainer(folder: Path, start: Path, mesh: dict[str, int], **settings: Any) -> Any:
    environment()
    distributed = {} if not mesh else {"distributed_config": transformers.distributed.
                                       DistributedConfig(**mesh, ep_implementation="moe_plugin")}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        start, experts_implementation="moe_plugin", **distributed)
    ids = tokens(model, batch=BATCH * STEPS, length=8)
    ranks = dist.get_world_size()
    args = transformers.TrainingArguments(**{
        "output_dir": str(folder), "max_steps": STEPS, "learning_rate": 1e-2, "warmup_steps": 2,
        "per_device_train_batch_size": BATCH // ranks, "save_steps": 3, "logging_steps": 1,
        "report_to": [], "use_cpu": True, "disable_tqdm": True, **settings})
    made = [{"input_ids": row, "labels": row} for row in ids]
    return transformers.Trainer(model, args, train_dataset=made, eval_dataset=made)


def losses(folder: Path, start: Path, mesh: dict[str, int], resume: Any = None,
           **settings: Any) -> list[float]:
    run = trainer(folder, start, mesh, **settings)
    run.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def start(folder: Path, **settings: Any) -> Path:
    model = tiny("mixtral")
    model.config.update({"output_router_logits": True, "router_aux_loss_coef": 0.1, **settings})
    model.save_pretrained(folder / "start")
    return folder / "start"


def _killed(folder: Path, start: Path, mesh: dict[str, int]) -> None:
    once = losses(folder / "once", start, mesh)
    with killed_at(6), pytest.raises(Killed):
        losses(folder / "killed", start, mesh)
    dist.barrier()
    assert sorted(os.listdir(folder / "killed")) == ["checkpoint-3", "unfinished"]
    again = losses(folder / "killed", start, mesh, resume=True)
    assert again == once, (again, once)
    assert sorted(os.listdir(folder / "killed")) == ["checkpoint-3", "checkpoint-6"]


@pytest.mark.distributed
def test_a_run_that_is_killed_while_it_saves_ends_with_the_same_losses(tmp_path: Path) -> None:
    """With dropout, so that the states of the random numbers count."""
    run_gloo(2, _killed, tmp_path, start(tmp_path, attention_dropout=0.2),
             {"fsdp_size": 2, "ep_size": 2})


def _resumed(folder: Path, start: Path, mesh: dict[str, int], once: list[float]) -> None:
    again = losses(folder / "elsewhere", start, mesh, resume=str(folder / "first/checkpoint-3"))
    assert again == pytest.approx(once, rel=2e-5), (mesh, again, once)


@pytest.mark.distributed
def test_a_run_resumes_on_other_layouts(tmp_path: Path) -> None:
    first = start(tmp_path)
    once = run_gloo(4, losses, tmp_path / "first", first, {"fsdp_size": 4, "ep_size": 2})[0]
    assert len(set(once)) == STEPS
    for ranks, mesh in ((2, {"fsdp_size": 2, "ep_size": 2}),
                        (2, {"fsdp_size": 2, "ep_size": 1}),
                        (3, {"fsdp_size": 3, "ep_size": 3}), (1, {})):
        run_gloo(ranks, _resumed, tmp_path, first, mesh, once)


def _refused(folder: Path, start: Path) -> None:
    mesh = {"fsdp_size": 2, "ep_size": 2}
    losses(folder, start, mesh, max_steps=3)
    saved, other = str(folder / "checkpoint-3"), folder / "other"
    with pytest.raises(ValueError, match="does not fit the optimizer SGD"):
        losses(other, start, mesh, saved, optim="sgd", optim_args="momentum=0.9")
    if dist.get_rank() == 0:
        model = tiny("mixtral", num_hidden_layers=2)
        model.save_pretrained(folder / "smaller")
    dist.barrier()
    with pytest.raises(ValueError, match=r"-3 does not fit MixtralForCausalLM: model.layers.2"
                                         r"\S* has the shape \(.*must have None.*output_dir"):
        losses(other, folder / "smaller", mesh, saved)
    losses(folder / "light", start, mesh, max_steps=3, save_only_model=True)
    with pytest.raises(ValueError, match="contains no optimizer and no scheduler.pt.*from_p"):
        losses(other, start, mesh, str(folder / "light/checkpoint-3"))
    if dist.get_rank() == 0:
        (folder / "full").mkdir()
        (folder / "full" / "unfinished").write_text("a file where a folder must be")
    dist.barrier()
    with pytest.raises(ValueError, match="unfinished.*cannot be written"):
        losses(folder / "full", start, mesh)


@pytest.mark.distributed
def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    run_gloo(2, _refused, tmp_path / "run", start(tmp_path))


def _best(folder: Path, start: Path) -> None:
    mesh = {"fsdp_size": 2, "ep_size": 2}
    run = trainer(folder, start, mesh, save_total_limit=1, load_best_model_at_end=True,
                  eval_strategy="steps", eval_steps=1, save_steps=1,
                  metric_for_best_model="loss", greater_is_better=True)
    run.train()
    history = {entry["step"]: entry["eval_loss"] for entry in run.state.log_history
               if "eval_loss" in entry}
    best = max(history, key=lambda step: history[step])
    assert 0 < best < STEPS and history[best] > history[STEPS]
    assert run.state.best_model_checkpoint == str(folder / f"checkpoint-{best}")
    assert run.evaluate()["eval_loss"] == pytest.approx(history[best], rel=1e-5)
    assert os.listdir(folder) == [f"checkpoint-{best}"]  # as `save_total_limit` asks for
    state = json.loads((folder / f"checkpoint-{best}" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == run.state.best_model_checkpoint


@pytest.mark.distributed
def test_the_best_checkpoint_is_kept_and_loaded(tmp_path: Path) -> None:
    run_gloo(2, _best, tmp_path / "run", start(tmp_path))
