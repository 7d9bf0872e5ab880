"""Train a Mixtral on several ranks with the `Trainer` of transformers.

The script trains, evaluates and saves. When it is started again, it continues from the last
checkpoint.

    pip install ".[hf]"
    torchrun --standalone --nproc_per_node 2 trainer_ranks.py --folder runs/trainer --steps 10
    torchrun --standalone --nproc_per_node 2 trainer_ranks.py --folder runs/trainer --steps 20

For your own model, pass its folder instead of the small random model. For your own tokens, replace
the data set `Counting`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data import Dataset
from transformers.distributed import DistributedConfig
from transformers.trainer_utils import get_last_checkpoint

import moe_plugin.hosts.transformers

VOCABULARY, LENGTH, BATCH = 64, 16, 4  # BATCH: sequences of one rank in a step


class Counting(Dataset):
    """Sequences that count up, each with a different start and increment."""

    def __init__(self, first: int, number: int) -> None:
        self.first, self.number = first, number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number = self.first + index
        ids = (7 * number + (1 + number % 5) * torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


class KeepsOptimizer(transformers.TrainerCallback):
    """Save and load the optimizer, which `Trainer` does not save for a distributed model.

    Each rank saves its own part.

    Args:
        checkpoint: folder of the checkpoint to continue from. None for a new run.
        done: number of completed steps in the checkpoint.
    """

    def __init__(self, checkpoint: str | None, done: int) -> None:
        self.checkpoint, self.done = checkpoint, done

    def on_save(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any,
                **_: Any) -> None:
        values = get_optimizer_state_dict(model, optimizer.optimizer)
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "optimizer"
        dcp.save(values, checkpoint_id=folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any,
                       **_: Any) -> None:
        state.global_step = self.done  # the mean loss at the end includes these steps
        if self.checkpoint is not None:
            values = get_optimizer_state_dict(model, optimizer.optimizer)
            dcp.load(values, checkpoint_id=Path(self.checkpoint) / "optimizer")
            set_optimizer_state_dict(model, optimizer.optimizer, values)


def start(folder: Path) -> None:
    """Write a small random model on the first rank, while the other ranks wait in `main`."""
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, bos_token_id=1,
        eos_token_id=2, pad_token_id=None)).save_pretrained(folder)


def main(words: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20, help="with those of earlier runs")
    options = parser.parse_args(words)
    args = transformers.TrainingArguments(
        str(options.folder), max_steps=options.steps, per_device_train_batch_size=BATCH,
        learning_rate=1e-2, lr_scheduler_type="constant", train_sampling_strategy="sequential",
        save_strategy="steps", save_steps=10, save_only_model=True, report_to="none",
        use_cpu=not torch.cuda.is_available(), disable_tqdm=True)
    ranks = args.world_size
    options.folder.mkdir(parents=True, exist_ok=True)
    checkpoint, done = get_last_checkpoint(str(options.folder)), 0
    if checkpoint is not None:
        state = transformers.TrainerState.load_from_json(f"{checkpoint}/trainer_state.json")
        done = state.global_step
    with args.main_process_first():
        if checkpoint is None and args.process_index == 0:
            start(options.folder / "start")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint or options.folder / "start",
        experts_implementation="moe_plugin",  # on one rank
        distributed_config=DistributedConfig(
            fsdp_size=ranks, ep_size=ranks, ep_implementation="moe_plugin"))
    moe_plugin.hosts.transformers.check(model)
    seen = done * BATCH * ranks
    trainer = transformers.Trainer(
        model, args, callbacks=[KeepsOptimizer(checkpoint, done)],
        train_dataset=Counting(seen, options.steps * BATCH * ranks - seen),
        eval_dataset=Counting(10**6, 16))
    trainer.train()
    loss: float = trainer.evaluate()["eval_loss"]
    if args.process_index == 0:
        print(f"trainer_ranks: steps {done} to {options.steps}, loss {loss:.6f}", flush=True)
    return loss


if __name__ == "__main__":
    main()
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()
