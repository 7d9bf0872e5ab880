"""Compare SwinV2-MoE with timm's dense SwinV2: images per second and accuracy.

Both models have the same number of active FLOPs, because each token uses one expert that has the
width of the dense MLP. The speed is measured in one process that calls both models alternately,
with all threads of the machine. To measure the accuracy, both models are trained at the same time,
once per seed, each in its own process with one thread. The study takes about ten minutes on two
cores, and hours with `--data cifar10`. If the study is interrupted, the training can be continued
by running the study again. The study requires 6 GB of memory.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moe_plugin.hosts.plain.blocks import auxiliary_loss, blocks_in
from moe_plugin.hosts.timm.model import PRESETS, build
from scripts.bench import images
from scripts.bench.images import CIFAR, spread
from scripts.bench.measure import interleaved
from scripts.bench.report import page
from scripts.bench.study import Option

log = logging.getLogger(__name__)
TITLE = "SwinV2-MoE and dense SwinV2"
SIDES = ("dense", "moe")
KINDS = ("training", "forward")
CLASSES = {"tiny": 10, "swin_s": 1000, "cifar": 10}
EXAMPLE = "digits"
COUNTS = {EXAMPLE: (1_442, 355), CIFAR: (50_000, 10_000)}  # (training, validation) images
BATCHES = (2, 8, 16)


def rate(cell: dict[str, Any], kind: str, side: str) -> float:
    """Return the number of images per second measured in one cell."""
    return cell["batch"] / statistics.median(cell["seconds"][kind][side])


def overhead(cell: dict[str, Any], kind: str) -> float:
    """Return the median time of the MoE model divided by the median time of the dense model."""
    return rate(cell, kind, "dense") / rate(cell, kind, "moe")


def step_of(model: nn.Module, x_BCSS: torch.Tensor, y_B: torch.Tensor) -> Callable[[], None]:
    """Return a function that computes the gradients for one batch."""

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


def cell(preset: str, batch: int, models: dict[str, nn.Module], rounds: int) -> dict[str, Any]:
    """Measure both models with a given number of images per call.

    Returns: The times of all rounds in seconds (by kind of call and model), the FLOPs of a forward
        pass per image (by model), and the share of tokens without a slot in the layer with the
        largest share.
    """
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
    return {"preset": preset, "batch": batch, "seconds": seconds, "flops": flops,
            "dropped": dropped}


def flops_of(models: dict[str, nn.Module], x_BCSS: torch.Tensor) -> tuple[dict[str, float], float]:
    """Return (FLOPs of a forward pass per image by model, largest share of dropped tokens).

    The FLOPs of the dense model are counted by torch. For the MoE model, the FLOPs of an MLP are
    subtracted for each token without a slot. The FLOPs of the router are added for each token: a
    projection, and the cosine with the direction of every expert.
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


def speed(presets: Sequence[str], batches: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    found = []
    for preset in presets:
        models = {}
        for side in SIDES:
            torch.manual_seed(1)
            models[side] = build(PRESETS[preset], CLASSES[preset], dense=side == "dense")
        for batch in batches:
            found.append(cell(preset, batch, models, rounds))
            log.info("%s, %s images: %s", preset, batch,
                     {kind: overhead(found[-1], kind) for kind in KINDS})
    return found


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train both models, and return their accuracy and images per second, by model and seed."""
    found: dict[str, dict[str, list[float]]] = {
        name: {side: [] for side in SIDES} for name in ("accuracy", "images_per_s")}
    place = images.folder_of_images(args)
    sizes = images.CIFAR_OPTIONS if args.data == CIFAR else []
    sizes = [*sizes, *["--log-every", "1"] * args.quick]  # a short run has few steps
    for seed in range(1, args.seeds + 1):  # both models at the same time, for equal conditions
        logs = images.train_each(len(SIDES), {side: (
            place / f"{side} {seed}", "--data", str(place / "images"), "--epochs", str(args.epochs),
            "--seed", str(seed), *sizes, *["--dense"] * (side == "dense")) for side in SIDES})
        for side, log in logs.items():
            found["accuracy"][side].append(log[-1]["accuracy"])
            found["images_per_s"][side].append(statistics.median(
                r["tokens_per_s"] for r in log if "tokens_per_s" in r))
    return {"epochs": args.epochs, "data": args.data, "images": args.images, **found}


def body(found: dict[str, Any]) -> list[str]:
    cifar = found.get(CIFAR)
    return [*_part(found, ""), *(_part(cifar, "cifar") if cifar else [])]


def _part(found: dict[str, Any], part: str) -> list[str]:
    cells, trained = found["speed"], found["accuracy"]
    data = trained.get("data", EXAMPLE)
    train, valid = (min(trained.get("images") or each, each) for each in COUNTS[data])
    stated = "; ".join(f"{overhead(one, 'training'):.2f} times the dense time in training and "
                       f"{overhead(one, 'forward'):.2f} times in the forward pass with "
                       f"`{one['preset']}`" for one in cells if one["batch"] == 8)
    return page(
        __name__, found, part, trained=trained, valid=valid, train=train, percent=100 / valid,
        rounds=len(cells[0]["seconds"]["training"]["moe"]),
        stated=page(__name__, {}, "stated", stated=stated) if stated else [],
        calls=[{**one, "kind": kind, **{side: rate(one, kind, side) for side in SIDES}}
               for one in cells for kind in KINDS],
        sides=[{"model": model, "accuracy": spread(trained["accuracy"][side], 100, "%"),
                "rate": spread(trained["images_per_s"][side])}
               for side, model in (("dense", "dense SwinV2 (timm)"), ("moe", "SwinV2-MoE"))],
        preset="tiny", images=f"the example's {train:,} digits")


OPTIONS = {
    "rounds": Option(5, "number of timed rounds", quick=1),
    "presets": Option(("tiny", "swin_s"), "models to time", quick=("tiny",), choices=CLASSES),
    "batches": Option(BATCHES, "numbers of images per call", quick=(2,)),
    **images.image_options("vision", EXAMPLE),
}
merge = images.merge


def measure(args: argparse.Namespace) -> dict[str, Any]:
    return {"data": args.data, "accuracy": train(args),
            "speed": speed(args.presets, args.batches, args.rounds)}
