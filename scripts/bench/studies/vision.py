"""Images per second and accuracy of SwinV2-MoE and of the dense SwinV2 of timm.

Both sides have equal active FLOPs: one expert of the dense MLP's width a token. Speed: calls of
both sides by turns in one process, all threads of the machine. Accuracy: both sides at once, a
process and a thread each, once a seed. Takes about ten minutes on two cores, with `--data cifar10`
hours; a second start continues the training. Needs 6 GB of memory.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moe_plugin.cli.figures import columns
from moe_plugin.hosts.plain.blocks import auxiliary_loss, blocks_in
from moe_plugin.hosts.timm.model import PRESETS, build
from scripts.bench.images import (
    CIFAR,
    CIFAR_OPTIONS,
    check_counts,
    folder_of_runs,
    run_options,
    spread,
    train_images,
)
from scripts.bench.measure import interleaved
from scripts.bench.study import Option

log = logging.getLogger(__name__)
TITLE = "SwinV2-MoE and dense SwinV2"
SIDES = ("dense", "moe")
KINDS = ("training", "forward")
CLASSES = {"tiny": 10, "swin_s": 1000, "cifar": 10}
EXAMPLE = "digits"
COUNTS = {EXAMPLE: (1_442, 355), CIFAR: (50_000, 10_000)}  # to train on, to validate with
BATCHES = (2, 8, 16)


@dataclass(frozen=True)
class SpeedCell:
    """One model at one number of images per call.

    Attributes:
        seconds: of all rounds, by kind and side.
        flops: of a forward pass, per image, by side: products and convolutions.
        dropped: share of tokens without a slot, worst layer.
    """

    preset: str
    batch: int
    seconds: dict[str, dict[str, list[float]]]
    flops: dict[str, float]
    dropped: float

    def rate(self, kind: str, side: str) -> float:
        return self.batch / statistics.median(self.seconds[kind][side])

    def overhead(self, kind: str) -> float:
        """Time of the model with experts over that of the dense one, medians."""
        return self.rate(kind, "dense") / self.rate(kind, "moe")

    @property
    def active(self) -> float:
        """Products of the model with experts over those of the dense one."""
        return self.flops["moe"] / self.flops["dense"]


@dataclass(frozen=True)
class Accuracy:
    """Results of the example's training, by side: one number a seed."""

    epochs: int
    data: str = EXAMPLE
    images: int = 0
    accuracy: dict[str, list[float]] = field(default_factory=dict)
    images_per_s: dict[str, list[float]] = field(default_factory=dict)


def step_of(model: nn.Module, x_BCSS: torch.Tensor, y_B: torch.Tensor) -> Callable[[], None]:
    """Gradients of one batch, into parameters without gradients."""

    def run() -> None:
        model.train()
        model.zero_grad()
        loss = F.cross_entropy(model(x_BCSS), y_B)
        (loss + auxiliary_loss(model) if any(blocks_in(model)) else loss).backward()

    return run


def forward_of(model: nn.Module, x_BCSS: torch.Tensor) -> Callable[[], None]:
    """One call in evaluation."""

    @torch.no_grad()
    def run() -> None:
        model.eval()
        model(x_BCSS)

    return run


def cell(preset: str, batch: int, models: dict[str, nn.Module], rounds: int) -> SpeedCell:
    size = PRESETS[preset].image
    random = torch.Generator().manual_seed(1)
    x_BCSS = torch.randn(batch, 3, size, size, generator=random)
    y_B = torch.randint(CLASSES[preset], (batch,), generator=random)
    calls = [call for model in models.values()
             for call in (step_of(model, x_BCSS, y_B), forward_of(model, x_BCSS))]
    times = interleaved(calls, torch.device("cpu"), rounds, warmup=1)
    seconds = {kind: {side: times[2 * s + k].seconds for s, side in enumerate(models)}
               for k, kind in enumerate(KINDS)}
    for model in models.values():
        model.zero_grad()
    flops, dropped = flops_of(models, x_BCSS)
    return SpeedCell(preset, batch, seconds, flops, dropped)


def flops_of(models: dict[str, nn.Module], x_BCSS: torch.Tensor) -> tuple[dict[str, float], float]:
    """(FLOPs of a forward pass by side and image, largest share of dropped tokens).

    torch counts those of the dense model; with experts the tokens without a slot leave out an MLP,
    and each token's scores are added: a projection and a cosine with every expert's direction.
    """
    from torch.utils.flop_counter import FlopCounterMode  # loads Triton, which speaks at exit

    # torch does not see the experts' grouped products
    with FlopCounterMode(display=False) as counter:
        forward_of(models["dense"], x_BCSS)()
    forward_of(models["moe"], x_BCSS)()
    dense = moe = float(counter.get_total_flops())
    worst = 0.0
    for _, block in blocks_in(models["moe"]):
        stats, config = block.last.stats, block.moe.config
        tokens, kept = float(stats.tokens), float(stats.kept_KE.sum())
        router = sum(2 * p.numel() for name, p in block.moe.router.named_parameters()
                     if name.rpartition(".")[2] in ("project_PD", "direction_EP"))
        mlp = 4 * config.model_dim * block.moe.experts.w_in_LDF.shape[2]
        moe += tokens * router - (tokens - kept) * mlp
        worst = max(worst, 1 - kept / tokens)
    return {"dense": dense / len(x_BCSS), "moe": moe / len(x_BCSS)}, worst


def speed(presets: Sequence[str], batches: Sequence[int], rounds: int) -> list[SpeedCell]:
    found = []
    for preset in presets:
        models = {}
        for side in SIDES:
            torch.manual_seed(1)
            models[side] = build(PRESETS[preset], CLASSES[preset], dense=side == "dense")
        for batch in batches:
            found.append(cell(preset, batch, models, rounds))
            one = found[-1]
            log.info("%s, %s images: %s", preset, batch, {k: one.overhead(k) for k in KINDS})
    return found


def train(args: argparse.Namespace) -> Accuracy:
    found = Accuracy(args.epochs, args.data, args.images, {side: [] for side in SIDES},
                     {side: [] for side in SIDES})
    place = folder_of_runs(args)
    sizes = CIFAR_OPTIONS if args.data == CIFAR else []

    def run(side: str, seed: int) -> list[dict[str, Any]]:
        return train_images(place / f"{side} {seed}", "--data", str(place / "images"), "--epochs",
                            str(args.epochs), "--seed", str(seed), *sizes,
                            *["--dense"] * (side == "dense"))

    with ThreadPoolExecutor(len(SIDES)) as pool:
        for seed in range(1, args.seeds + 1):
            for side, log in zip(SIDES, pool.map(run, SIDES, [seed] * 2), strict=True):
                found.accuracy[side].append(log[-1]["accuracy"])
                found.images_per_s[side].append(statistics.median(
                    r["tokens_per_s"] for r in log if "tokens_per_s" in r))
    return found


def body(found: dict[str, Any]) -> Iterator[str]:
    cells = [SpeedCell(**cell) for cell in found["speed"]]
    trained = Accuracy(**found["accuracy"])
    stated = "; ".join(f"{one.overhead('training'):.2f} times the dense time in training and "
                       f"{one.overhead('forward'):.2f} forward (`{one.preset}`)"
                       for one in cells if one.batch == 8)
    yield (
        "Both sides are timm's Swin Transformer V2 of the same sizes. With experts, some "
        "blocks have a layer of experts in the MLP's place (`tiny`: one of two in both stages, "
        "4 experts; `cifar`: the same, 8 experts; `swin_s`: every other one of the third stage "
        "and one of the last, 32 experts), and each token visits one expert of the MLP's width: "
        "equal active FLOPs.")
    if stated:
        yield ("**Overhead of the experts at equal active FLOPs**, 8 images per call: "
               f"{stated}.")
    yield "## Images per second"
    yield columns(itertools.product(cells, KINDS), {
        "model": "`{0[0].preset}`", "images per call": "{0[0].batch}", "what": "{0[1]}",
        **{head: lambda row, side=side: f"{row[0].rate(row[1], side):.3g}"
           for head, side in (("dense", "dense"), ("with experts", "moe"))},
        "time, experts / dense": lambda row: f"{row[0].overhead(row[1]):.2f}",
        "FLOPs, experts / dense": "{0[0].active:.3f}", "dropped": "{0[0].dropped:.1%}"})
    yield (
        f"Median of {len(cells[0].seconds['training']['moe'])} rounds in which both sides take "
        "turns; random images and initial weights. *Training* is forward and backward without "
        "the optimizer, whose time grows with all parameters and not with those in use; "
        "*forward* is evaluation. *FLOPs* counts products of a forward pass: those of the "
        "dense model, the routers' added, tokens without a slot (*dropped*, worst layer) "
        "without their MLP.")
    yield (
        "Few images per call leave few tokens to each expert, so that reading 32 experts' "
        "weights (and, in training, writing their gradients) takes the time, not the products: "
        "`swin_s` has 144 tokens an image in its third stage, 9 of 288 for each expert with "
        "two images.")
    yield "## Accuracy"
    yield columns(SIDES, {
        "model": {"dense": "dense SwinV2 (timm)", "moe": "SwinV2-MoE"}.get,
        "accuracy": lambda side: spread(trained.accuracy[side], 100, "%"),
        "images per second": lambda side: spread(trained.images_per_s[side])})
    train, valid = (min(trained.images or each, each) for each in COUNTS[trained.data])
    yield (
        (f"{train:,} photographs of CIFAR-10" if trained.data == CIFAR else
         f"The example's {train:,} digits") +
        f", {trained.epochs} epochs, `{'cifar' if trained.data == CIFAR else 'tiny'}`, the share "
        f"of the {valid:,} validation images that is right after the last epoch: mean of "
        f"{len(trained.accuracy['moe'])} seeds (smallest to largest). One image is "
        f"{100 / valid:.2f} %. One thread a run, both sides at once; here the optimizer and "
        "reading images count.")


OPTIONS = {
    "rounds": Option(5, "of each cell", quick=1), "seeds": Option(3, "of the accuracy", quick=1),
    "epochs": Option(12, "of a run", quick=1),
    "presets": Option(("tiny", "swin_s"), "models", quick=("tiny",), choices=CLASSES),
    "batches": Option(BATCHES, "images per call", quick=(2,)),
    **run_options("vision", EXAMPLE),
}
check = check_counts


def measure(args: argparse.Namespace) -> dict[str, Any]:
    trained = train(args)
    cells = speed(args.presets, args.batches, args.rounds)
    return {"accuracy": asdict(trained),
            "speed": [asdict(one) for one in cells]}
