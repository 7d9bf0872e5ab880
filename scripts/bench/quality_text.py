"""Experiments with language models with and without experts, trained in both hosts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_plugin.cli.corpus import build_corpus
from moe_plugin.cli.planning.launch import BYTES
from scripts.bench.paired import compare
from scripts.bench.quickstart import quickstart, settings

log = logging.getLogger(__name__)
# sizes that differ from the quick start's model; every layer has experts
SIZES = {"ranks": 1, "layers": 2, "width": 64, "heads": 4, "hidden": 128, "experts": 8, "top_k": 2,
         "length": 64, "batch": 16}
CORPUS_BYTES = 4_000_000
VALID_STEPS = 100
RATES = 0.004, 0.008, 0.016, 0.032
# Megatron uses the settings of fairseq's optimizer, because high learning rates are unstable with
# Megatron's default beta2 of 0.999.
ADAM = {"fairseq": [], "megatron": ["--adam-beta2", "0.98", "--weight-decay", "0"]}
# inner width of each side, relative to that of one expert
SIDES = {"moe": 1, "active": SIZES["top_k"], "total": SIZES["experts"]}


def flops(side: str) -> int:
    """Return the FLOPs of a token's matmuls, forward. Attention is counted over the whole sample.
    """
    width, inner = SIZES["width"], SIZES["hidden"]
    visited = SIZES["top_k"] if side == "moe" else SIDES[side]
    attention = 4 * width ** 2 + 2 * SIZES["length"] * width
    router = SIZES["experts"] * width * (side == "moe")
    layer = attention + 2 * width * inner * visited + router
    return 2 * (SIZES["layers"] * layer + width * BYTES)


def parameters(side: str) -> int:
    """Return the number of parameters in all matrices except the embeddings."""
    width, inner = SIZES["width"], SIZES["hidden"]
    copies = SIZES["experts"] if side == "moe" else SIDES[side]
    router = SIZES["experts"] * width * (side == "moe")
    return SIZES["layers"] * (4 * width ** 2 + 2 * width * inner * copies + router)


def command_of(host: str, side: str, s: dict[str, Any], data: Path, folder: Path) -> list[str]:
    """Return the quick start's command, for a model in which all layers or no layers have experts.
    """
    sizes = {**s, "hidden": s["hidden"] * SIDES[side]}
    command = quickstart().HOST_STEPS[host][1](sizes, data, folder, False)
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


def measure(place: Path, steps: int, seeds: int, jobs: int, hosts: Sequence[str]
            ) -> dict[str, Any]:
    """Return the result of `compare` for held-out losses in nats per byte, by "HOST MODEL"."""
    info = build_corpus(place / "corpus", size=CORPUS_BYTES)
    data = {host: quickstart().HOST_STEPS[host][0](place / "corpus") for host in hosts}

    def run(name: str, rate: float, seed: int) -> dict[str, Any]:
        host, side = name.split()
        s = {**settings(steps), **SIZES, "learning_rate": rate, "seed": seed + 1}
        folder = place / f"{host} {side} {steps} steps {rate:g} seed {seed}".replace(" ", "-")
        command = command_of(host, side, s, data[host], folder)
        found, _ = quickstart().train(quickstart().Run(host, folder, command, steps))
        log.info("%s, rate %g, seed %d: %.4f", name, rate, seed, found["valid_loss"])
        return {"valid_loss": found["valid_loss"]}

    rates = {f"{host} {side}": RATES for host in hosts for side in SIDES}
    return {"steps": steps, "train_bytes": info.tokens["train"],
            "unigram_entropy": info.unigram_entropy,
            **compare(jobs, rates, seeds, run, "valid_loss")}
