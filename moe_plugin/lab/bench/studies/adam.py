"""Training steps of a model with 64 experts with Adam as each host has it and by --moe-fused-adam.

One process with one thread, on CPU; two models with equal weights and data, steps in turn: the
median processor time of a step, of the optimizer in it, and the largest difference between the
losses. Takes less than a minute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.lab.bench.report import paragraph, table
from moe_plugin.lab.bench.study import Option

WIDTH, INNER, EXPERTS, LAYERS, LENGTH, SENTENCES, SYMBOLS = 256, 512, 64, 2, 128, 16, 252
FLAG, WARM_UP = "--moe-fused-adam", 2
OPTIONS = {"host": Option("megatron", "the trainer", choices=("fairseq", "megatron")),
           "steps": Option(10, "timed steps of each model", quick=2)}


@dataclass
class AdamSide:
    """A model in training. step: trains on tokens [SENTENCES, LENGTH + 1], returns the loss."""

    step: Callable[[torch.Tensor], float]
    optimizers: list[torch.optim.Optimizer]
    seconds: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(self._begin)
            optimizer.register_step_post_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self.begun = time.process_time()

    def _end(self, *_: Any) -> None:
        self.optimizer_s[-1] += time.process_time() - self.begun

    def run(self, tokens_BT: torch.Tensor) -> None:
        """One step."""
        self.optimizer_s.append(0.0)
        begun = time.process_time()
        self.losses.append(self.step(tokens_BT))
        self.seconds.append(time.process_time() - begun)

    def result(self) -> dict[str, float]:
        """Medians without the warm-up, ms."""
        whole, adam = (1e3 * statistics.median(times[WARM_UP:])
                       for times in (self.seconds, self.optimizer_s))
        return {"step_ms": round(whole, 1), "optimizer_ms": round(adam, 1),
                "share": round(adam / whole, 3),
                "tokens_per_s": round(SENTENCES * LENGTH / whole * 1e3)}


def fairseq_side(*flags: str) -> AdamSide:
    """fairseq's trainer."""
    from moe_plugin.hosts.fairseq.compat.names import (
        benchmark,  # noqa: F401 - registers the task
        convert_namespace_to_omegaconf,
        options,
        tasks,
        trainer,
        utils,
    )

    utils.import_user_module(argparse.Namespace(user_dir="moe_plugin"))
    given = (f"--task dummy_lm --dict-size {SYMBOLS} --tokens-per-sample {LENGTH} --arch "
             f"transformer_lm --decoder-embed-dim {WIDTH} --decoder-ffn-embed-dim {INNER} "
             f"--decoder-layers {LAYERS} --decoder-attention-heads 4 --dropout 0 --moe-freq 1 "
             f"--moe-expert-count {EXPERTS} --moe-second-expert-policy all "
             "--moe-capacity-factor none --criterion moe_cross_entropy --moe-gate-loss-wt 0.01 "
             f"--optimizer adam --lr 1e-3 --clip-norm 1 --cpu --batch-size {SENTENCES}")
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(
        options.get_training_parser(), input_args=[*given.split(), *flags]))
    torch.manual_seed(1)
    task = tasks.setup_task(cfg.task)
    made = trainer.Trainer(cfg, task, task.build_model(cfg.model),
                           task.build_criterion(cfg.criterion))
    made.begin_epoch(1)

    def step(tokens_BT: torch.Tensor) -> float:
        sample = {"id": torch.arange(SENTENCES), "nsentences": SENTENCES,
                  "ntokens": SENTENCES * LENGTH, "net_input": {
                      "src_tokens": tokens_BT[:, :-1],
                      "src_lengths": torch.full((SENTENCES,), LENGTH)},
                  "target": tokens_BT[:, 1:].contiguous()}
        return float(made.train_step([sample])["inner_loss"])

    return AdamSide(step, [made.optimizer.optimizer])


def megatron_side(*flags: str) -> AdamSide:
    """The training script's model and optimizer."""
    from moe_plugin.hosts.megatron.compat.optimizer import parts
    from moe_plugin.hosts.megatron.trainer import arguments, model, train
    from moe_plugin.hosts.megatron.trainer.train import seed_everything

    given = (f"--train-iters 1 --lr 1e-3 --data-path none --cpu --num-layers {LAYERS} "
             f"--hidden-size {WIDTH} --seq-length {LENGTH} --micro-batch-size {SENTENCES} "
             f"--num-experts {EXPERTS} --moe-ffn-hidden-size {INNER} --num-attention-heads 4 "
             "--hidden-dropout 0 --attention-dropout 0 --disable-bias-linear "
             "--moe-router-dtype fp32 --moe-aux-loss-coeff 0.01")
    args = arguments.parser().parse_args([*given.split(), *flags])
    if dist.is_initialized():
        arguments.check(args, 1)
    else:
        train.start(args)
    seed_everything(args.seed)
    made = model.build(args, arguments.transformer_config(args, cpu=True), {}, SYMBOLS)
    loop = train.Loop(args, made, None, None, None)

    def step(tokens_BT: torch.Tensor) -> float:
        from moe_plugin.hosts.megatron.trainer.data import Batch

        batch = Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], torch.ones(SENTENCES, LENGTH),
                      torch.arange(LENGTH).expand(SENTENCES, -1))
        loss_2, _ = loop.step([iter([batch])], args.lr)
        return float(loss_2[0] / loss_2[1])

    return AdamSide(step, [part.optimizer for part in parts(made.optimizer)])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both models, in turn."""
    torch.set_num_threads(1)
    build = {"fairseq": fairseq_side, "megatron": megatron_side}[args.host]
    sides = {"as the host has it": build(), FLAG: build(FLAG)}
    for number in range(WARM_UP + args.steps):
        source = torch.Generator().manual_seed(number)
        tokens_BT = torch.randint(4, SYMBOLS, (SENTENCES, LENGTH + 1), generator=source)
        for side in sides.values():
            side.run(tokens_BT)
    curves = [side.losses for side in sides.values()]
    return {"host": args.host, "parameters": 2 * LAYERS * EXPERTS * WIDTH * INNER,
            "sides": {name: side.result() for name, side in sides.items()},
            "loss_difference": max(abs(a - b) for a, b in zip(*curves, strict=True))}


def page(found: dict[str, Any]) -> str:
    """The page."""
    rows = [[name, f"{side['step_ms']:.1f}", f"{side['optimizer_ms']:.1f}", f"{side['share']:.1%}",
             f"{side['tokens_per_s']:,}"] for name, side in found["sides"].items()]
    return "\n\n".join([
        f"# The optimizer's share of a step in {found['host']}",
        paragraph(
            f"Made by `moe-plugin bench adam --host {found['host']}`. A model with "
            f"{found['parameters']:,} parameters of experts; processor time, medians; the losses "
            f"of the two differ by at most {found['loss_difference']:.1g}. Load average before "
            f"and after: {found['load']}."),
        table(["Adam", "step, ms", "optimizer, ms", "share", "tokens/s"], rows)]) + "\n"
