"""Train a LLaMA of fairseq2 with experts, by fairseq2's own trainer.

The model learns to write Python, and the run records statistics of the experts. When the script is
started again with more steps and the same number of ranks, it continues from the last checkpoint.

    pip install fairseq2==0.8.1                             # also needs libsndfile
    python fairseq2_llama.py --folder runs/llama --steps 40
    torchrun --standalone --nproc_per_node 2 fairseq2_llama.py --folder runs/llama_2 --steps 40
    moe-plugin report runs/llama

For your own model, replace the small LLaMA. For your own text, replace the class `Pieces`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import fairseq2
import torch
from fairseq2.checkpoint import NOOP_HG_EXPORTER, StandardCheckpointManager
from fairseq2.datasets import DataReader, SequenceBatch
from fairseq2.early_stopper import NOOP_EARLY_STOPPER
from fairseq2.file_system import FileSystem
from fairseq2.gang import (
    ProcessGroupGang,
    create_fake_gangs,
    create_fsdp_gangs,
    create_parallel_gangs,
)
from fairseq2.io import TensorFileDumper, TensorFileLoader
from fairseq2.metrics.recorders import NOOP_METRIC_RECORDER
from fairseq2.models.llama import LLaMAConfig, create_llama_model
from fairseq2.optim.fp16_loss_scaler import NOOP_FP16_LOSS_SCALER
from fairseq2.optim.lr_schedulers import PassthroughLR
from fairseq2.profilers import NOOP_PROFILER
from fairseq2.recipe.trainer import Trainer, TrainUnit
from fairseq2.utils.device_stat import NOOP_DEVICE_STAT_TRACKER
from fairseq2.utils.gc import NOOP_GARBAGE_COLLECTOR
from fairseq2.utils.progress import NOOP_PROGRESS_REPORTER
from fairseq2.utils.stopwatch import Stopwatch
from fairseq2.utils.threading import ThreadPool
from fairseq2.validator import NOOP_VALIDATOR

import moe_plugin
from moe_plugin.comm import default_comm
from moe_plugin.config import ObserveConfig
from moe_plugin.hosts.plain.fairseq2 import enable_checkpoints
from moe_plugin.observe import StatsRecorder

LENGTH, BATCH = 65, 8  # the longest piece of text, and the number of pieces per rank and step


class Pieces(DataReader[SequenceBatch]):
    """Endless batches of pieces of text with different lengths. Each rank reads other pieces."""

    def __init__(self, rank: int) -> None:
        self.text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
        self.generator = torch.Generator().manual_seed(rank)

    def __iter__(self) -> Pieces:
        return self

    def __next__(self) -> list[SequenceBatch]:
        first = torch.randint(len(self.text) - LENGTH, (BATCH, 1), generator=self.generator)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH,), generator=self.generator)
        pieces = self.text[first + torch.arange(LENGTH)]
        return [SequenceBatch(pieces, lengths.tolist())]

    def reset(self) -> None:
        pass

    def state_dict(self) -> dict[str, object]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.generator.set_state(state_dict["generator"])

    @property
    def num_accumulate(self) -> int:
        return 1


class LanguageModelling(TrainUnit[SequenceBatch]):
    """Predict each token from the tokens before it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.trained, self.losses = model, []

    def prepare_metric_bag(self, metric_bag: Any) -> None:
        pass

    def process_batch(self, batch: SequenceBatch, metric_bag: Any) -> tuple[torch.Tensor, int]:
        batch, targets = batch.as_auto_regressive()
        number = targets.num_target_elements
        seqs, layout = batch.as_input()
        real = layout.position_indices >= 0
        loss = self.trained(seqs, layout, targets.seqs, target_mask=real)
        self.losses.append(loss.item() / number)
        # the loss is a sum over tokens, which the trainer divides by the number of all tokens
        return loss + number * moe_plugin.auxiliary_loss(self.trained), number


def main(words: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40, help="with those of earlier runs")
    options = parser.parse_args(words)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))
                          ) if torch.cuda.is_available() else torch.device("cpu")
    resolver = fairseq2.init_fairseq2(no_progress=True)
    gangs = create_fake_gangs(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        gangs = create_parallel_gangs(ProcessGroupGang.create_default_process_group(device))
        gangs = create_fsdp_gangs(gangs)  # so that each rank saves a file with its own experts

    torch.manual_seed(0)  # all ranks start with the same dense weights
    model: Any = create_llama_model(LLaMAConfig(
        model_dim=64, max_seq_len=LENGTH, vocab_size=256, num_layers=4, num_attn_heads=4,
        num_key_value_heads=2, ffn_inner_dim=192, ffn_inner_dim_multiple_of=64)).to(device)
    names = moe_plugin.replace_ffn(model, num_experts=8, every=2, losses={"gshard": 0.01})
    recorder = StatsRecorder(ObserveConfig(jsonl=str(options.folder / "stats.jsonl"), interval=5),
                             default_comm())
    recorder.add_model(model)
    groups = moe_plugin.optimizer_groups(model, lr=3e-3, weight_decay=0.01)
    if gangs.dp.size > 1:
        model = moe_plugin.ddp_model(model)
    enable_checkpoints(model, gangs)
    optimizer = torch.optim.AdamW(groups)
    unit = LanguageModelling(model)
    trainer = Trainer(
        model=model, unit=unit, data_reader=Pieces(gangs.dp.rank), gangs=gangs, amp=False,
        amp_dtype=torch.float32, optimizer=optimizer, lr_scheduler=PassthroughLR(optimizer),
        fp16_loss_scaler=NOOP_FP16_LOSS_SCALER, validator=NOOP_VALIDATOR,
        early_stopper=NOOP_EARLY_STOPPER, hg_exporter=NOOP_HG_EXPORTER,
        checkpoint_manager=StandardCheckpointManager(
            options.folder, gangs, resolver.resolve(FileSystem), resolver.resolve(TensorFileLoader),
            resolver.resolve(TensorFileDumper), resolver.resolve(ThreadPool)),
        metric_recorder=NOOP_METRIC_RECORDER, garbage_collector=NOOP_GARBAGE_COLLECTOR,
        profiler=NOOP_PROFILER, device_stat_tracker=NOOP_DEVICE_STAT_TRACKER,
        wall_watch=Stopwatch(), progress_reporter=NOOP_PROGRESS_REPORTER, seed=1,
        max_grad_norm=1.0, grad_check=device.type == "cuda",  # needs NCCL
        max_num_steps=options.steps, checkpoint_every_n_steps=20)

    def after_step(*_: Any) -> None:
        moe_plugin.finish_step(model)
        recorder.training(trainer.step_nr, loss=unit.losses[-1])
        recorder.step(trainer.step_nr)

    optimizer.register_step_post_hook(after_step)
    rank = gangs.dp.rank
    trainer.run()
    trainer.close()
    recorder.close()
    if rank == 0 and unit.losses:
        print(f"fairseq2_llama: experts in {names}, steps {options.steps - len(unit.losses)} to "
              f"{options.steps}, loss {unit.losses[0]:.4f} -> {unit.losses[-1]:.4f}", flush=True)
    return unit.losses


if __name__ == "__main__":
    main()
