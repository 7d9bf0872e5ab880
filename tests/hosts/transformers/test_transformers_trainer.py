"""`Trainer` over ranks, by the example of the manual."""

from __future__ import annotations

import copy
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers", minversion="5.20")
pytest.importorskip("accelerate")

from moe_plugin import auxiliary_loss, finish_step  # noqa: E402
from moe_plugin.hosts.plain.huggingface import swap_moe_blocks  # noqa: E402
from tests.checkpoint.hf_models import tiny, tokens  # noqa: E402
from tests.cli.examples import blocks  # noqa: E402
from tests.distributed import run_gloo  # noqa: E402

DOCS = Path(__file__).resolve().parents[3] / "docs"
EXAMPLE = DOCS / "examples" / "trainer_ranks.py"


def _environment() -> None:
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks,
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # the group is there already


def _losses(main: Any, folder: Path) -> list[float]:
    _environment()
    return [main(["--folder", str(folder / name), "--steps", steps])
            for name, steps in (("once", "20"), ("twice", "10"), ("twice", "20"))]


@pytest.mark.distributed
def test_a_run_that_is_resumed_ends_where_one_without_a_break_does(tmp_path: Path) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]  # here, so that one process imports all
    for once, half, twice in run_gloo(2, _losses, main, tmp_path):
        assert twice == pytest.approx(once, rel=1e-6) and abs(half - once) > 0.1


# timm, which accelerate's command would import, cannot be where torchvision is of another torch
COMMAND = ("import sys; sys.modules['timm'] = None; "
           "from accelerate.commands.accelerate_cli import main; main()")


@pytest.mark.slow
@pytest.mark.distributed
def test_accelerate_starts_it(tmp_path: Path) -> None:
    """`accelerate launch` on two ranks: the loss of `torchrun`; on one: it trains."""
    losses = {}
    for name, start in {
            "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
            **{name: ["-c", COMMAND, "launch", *words, "--num_machines", "1", "--mixed_precision",
                      "no", "--dynamo_backend", "no"]
               for name, words in (("accelerate", ["--multi_gpu", "--num_processes", "2"]),
                                   ("one rank", ["--cpu", "--num_processes", "1"]))}}.items():
        out = subprocess.run([sys.executable, *start, str(EXAMPLE), "--folder",
                              str(tmp_path / name), "--steps", "10"], check=True, timeout=300,
                             capture_output=True, text=True).stdout
        losses[name] = float(out.rsplit("loss ", 1)[1])
    assert losses["accelerate"] == losses["torchrun"] and losses["one rank"] < 4.0


def test_a_second_trainer_of_one_folder_is_refused(tmp_path: Path) -> None:
    from moe_plugin.hosts.transformers.register import FolderOfOneRun

    args, state = SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(
        is_world_process_zero=True)
    lock = tmp_path / "moe_plugin.lock"
    first = FolderOfOneRun()
    first.on_train_begin(args, state, None)
    other = json.loads(lock.read_text()) | {"host": "elsewhere"}
    first.on_train_end(args, state, None)
    assert not lock.exists()
    lock.write_text(json.dumps(other))
    with pytest.raises(ValueError, match="in use by another run .* on host elsewhere"):
        FolderOfOneRun().on_train_begin(args, state, None)
    model = torch.nn.Linear(2, 2)
    trainer = transformers.Trainer(
        model, transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True),
        callbacks=[FolderOfOneRun(take_over=True)])
    trainer.control = trainer.callback_handler.on_train_begin(
        trainer.args, trainer.state, trainer.control)
    assert json.loads(lock.read_text())["host"] != "elsewhere"
    trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    assert not lock.exists()


def test_swapped_blocks_in_a_trainer(tmp_path: Path) -> None:
    """As the manual adds them: balance losses are means over micro-batches, biases move once."""
    [block] = [b for b in blocks(DOCS / "transformers.md") if "class MoETrainer" in b.text]
    made: dict[str, Any] = {}
    exec(compile(block.text, block.name, "exec"), made)
    model = tiny("deepseek_v3").train()
    swap_moe_blocks(model, settings={"losses": {"switch": 0.5}})
    twin, start = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    rows = [{"input_ids": ids, "labels": ids.masked_fill(torch.arange(9) < number, -100)}
            for number, ids in enumerate(tokens(model, batch=3, length=9))]
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, gradient_accumulation_steps=3, per_device_train_batch_size=1,
        optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=1e9,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
    made["MoETrainer"](model, args, train_dataset=rows, callbacks=[made["EndStep"]()]).train()
    labels = sum(int((row["labels"][1:] != -100).sum()) for row in rows)
    for row in rows:
        batch = {name: value[None] for name, value in row.items()}
        share = int((row["labels"][1:] != -100).sum()) / labels
        (twin(**batch).loss * share + auxiliary_loss(twin) / len(rows)).backward()
    finish_step(twin)
    for name, parameter in twin.named_parameters():
        if parameter.grad is not None:
            moved = start[name] - model.get_parameter(name)
            torch.testing.assert_close(moved, parameter.grad, rtol=1e-3, atol=1e-5, msg=name)
    for name, value in twin.named_buffers():
        assert torch.equal(value, model.get_buffer(name)), name
        assert "bias_E" not in name or not torch.equal(value, start[name])
