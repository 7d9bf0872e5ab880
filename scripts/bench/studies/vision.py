"""Compare SwinV2-MoE with the dense SwinV2 of timm: images per second and accuracy.

Both models have equal active FLOPs: a token uses one expert of the dense MLP's width. Speed is
measured with alternating calls of both models in one process, on all threads of the machine. For
the
accuracy, both models train at the same time, with one process and one thread each, once per seed.
Takes about ten minutes on two cores, and hours with `--data cifar10`. A second start continues the
training. Needs 6 GB of memory.
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
from scripts.bench.report import bullets
from scripts.bench.study import Option

log = logging.getLogger(__name__)
TITLE = "SwinV2-MoE and dense SwinV2"
SIDES = ("dense", "moe")
KINDS = ("training", "forward")
CLASSES = {"tiny": 10, "swin_s": 1000, "cifar": 10}
EXAMPLE = "digits"
COUNTS = {EXAMPLE: (1_442, 355), CIFAR: (50_000, 10_000)}  # (training, validation) images
BATCHES = (2, 8, 16)


@dataclass(frozen=True)
class SpeedCell:
    """Times of both models at one number of images per call.

    Attributes:
        preset: name of the model's sizes.
        batch: number of images per call.
        seconds: seconds of all rounds, by kind and side.
        flops: FLOPs of a forward pass per image (matmuls and convolutions), by side.
        dropped: share of tokens without a slot, in the worst layer.
    """

    preset: str
    batch: int
    seconds: dict[str, dict[str, list[float]]]
    flops: dict[str, float]
    dropped: float

    def rate(self, kind: str, side: str) -> float:
        return self.batch / statistics.median(self.seconds[kind][side])

    def overhead(self, kind: str) -> float:
        """Return the median time of the model with experts relative to that of the dense model."""
        return self.rate(kind, "dense") / self.rate(kind, "moe")

    @property
    def active(self) -> float:
        """FLOPs of the model with experts relative to those of the dense model."""
        return self.flops["moe"] / self.flops["dense"]


@dataclass(frozen=True)
class Accuracy:
    """Results of the example's training by side, with one number per seed."""

    epochs: int
    data: str = EXAMPLE
    images: int = 0
    accuracy: dict[str, list[float]] = field(default_factory=dict)
    images_per_s: dict[str, list[float]] = field(default_factory=dict)


def step_of(model: nn.Module, x_BCSS: torch.Tensor, y_B: torch.Tensor) -> Callable[[], None]:
    """Return a function that computes the gradients of one batch."""

    def run() -> None:
        model.train()
        model.zero_grad()
        loss = F.cross_entropy(model(x_BCSS), y_B)
        (loss + auxiliary_loss(model) if any(blocks_in(model)) else loss).backward()

    return run


def forward_of(model: nn.Module, x_BCSS: torch.Tensor) -> Callable[[], None]:
    """Return a function that runs one call in evaluation mode."""

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
    """Return (FLOPs of a forward pass by side and image, largest share of dropped tokens).

    torch counts the FLOPs of the dense model. For the model with experts, tokens without a slot
    save an
    MLP, and each token's scores are added: a projection, and a cosine with the direction of every
    expert.
    """
    # imported here, because it loads Triton, which prints messages at exit
    from torch.utils.flop_counter import FlopCounterMode

    # only the dense model is counted, because torch does not count the experts' grouped matmuls
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
                       f"{one.overhead('forward'):.2f} times in the forward pass with "
                       f"`{one.preset}`" for one in cells if one.batch == 8) + "."
    yield (
        "This page compares timm's Swin Transformer V2 with the same model in which some blocks "
        "have a layer of experts instead of the MLP (SwinV2-MoE). A token uses one expert of the "
        "MLP's width, so both models have equal active FLOPs.")
    yield bullets(
        "`tiny`: every second block of both stages has 4 experts.",
        "`cifar`: every second block of both stages has 8 experts.",
        "`swin_s`: every second block of the third stage and one block of the last stage have 32 "
        "experts.")
    if any(one.batch == 8 for one in cells):
        yield ("**Time of the model with experts at equal active FLOPs and 8 images per call:** "
               f"{stated}")
    yield "## Images per second"
    yield columns(itertools.product(cells, KINDS), {
        "model": "`{0[0].preset}`", "images per call": "{0[0].batch}", "call": "{0[1]}",
        **{head: lambda row, side=side: f"{row[0].rate(row[1], side):.3g}"
           for head, side in (("dense", "dense"), ("with experts", "moe"))},
        "time, experts / dense": lambda row: f"{row[0].overhead(row[1]):.2f}",
        "FLOPs, experts / dense": "{0[0].active:.3f}",
        "dropped tokens": "{0[0].dropped:.1%}"})
    yield (
        f"The numbers are medians of {len(cells[0].seconds['training']['moe'])} rounds in which "
        "both models alternate, with random images and initial weights. *Training* is forward and "
        "backward without the optimizer, whose time grows with all parameters and not only with "
        "those in use. *Forward* is a call in evaluation mode. *FLOPs* are those of the matmuls "
        "and convolutions in a forward pass. For the model with experts, the FLOPs of the routers "
        "are added, and tokens without a slot are counted without an MLP. *Dropped tokens* is the "
        "share of tokens without a slot in the worst layer.")
    yield (
        "With few images per call, each expert gets few tokens. Most of the time is then used to "
        "read the weights of 32 experts and, in training, to write their gradients, and not for "
        "matmuls. In its third stage, `swin_s` has 144 tokens per image; with two images, an "
        "expert gets 9 of 288 tokens.")
    yield "## Accuracy"
    yield columns(SIDES, {
        "model": {"dense": "dense SwinV2 (timm)", "moe": "SwinV2-MoE"}.get,
        "accuracy": lambda side: spread(trained.accuracy[side], 100, "%"),
        "images per second": lambda side: spread(trained.images_per_s[side])})
    train, valid = (min(trained.images or each, each) for each in COUNTS[trained.data])
    yield (
        f"The models (`{'cifar' if trained.data == CIFAR else 'tiny'}`) train for "
        f"{trained.epochs} epochs on " +
        (f"{train:,} photographs of CIFAR-10" if trained.data == CIFAR else
         f"the example's {train:,} digits") +
        f". The accuracy is the share of the {valid:,} validation images that is classified "
        f"correctly after the last epoch. One image is {100 / valid:.2f} %. The table shows means "
        f"over {len(trained.accuracy['moe'])} seeds, with the smallest and the largest value in "
        "parentheses. Both models train at the same time with one thread each. Images per second "
        "include the optimizer and the reading of images.")


OPTIONS = {
    "rounds": Option(5, "number of timed rounds", quick=1),
    "seeds": Option(3, "number of trainings per model", quick=1),
    "epochs": Option(12, "number of epochs of a training", quick=1),
    "presets": Option(("tiny", "swin_s"), "models to time", quick=("tiny",), choices=CLASSES),
    "batches": Option(BATCHES, "numbers of images per call", quick=(2,)),
    **run_options("vision", EXAMPLE),
}
check = check_counts


def measure(args: argparse.Namespace) -> dict[str, Any]:
    trained = train(args)
    cells = speed(args.presets, args.batches, args.rounds)
    return {"accuracy": asdict(trained),
            "speed": [asdict(one) for one in cells]}
