"""Collectives along planned trees on emulated networks with unequal links.

Against torch's own on gloo and a ring, for each network and size, with the ratio that the links
alone predict; then fairseq and Megatron, training with gathered parameters (r = 0) on a ring of
nodes, natively and along trees.

Needs Linux and root, and about 25 minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from moe_plugin.comm.forest import plan_few
from moe_plugin.lab.bench.collectives import WIRE, ring_bound_s
from moe_plugin.lab.bench.collectives import measure as measure_network
from moe_plugin.lab.bench.corpus import build_corpus
from moe_plugin.lab.bench.report import paragraph, table
from moe_plugin.lab.bench.study import ROOT, Option
from moe_plugin.lab.emulate import EmulatedCluster
from moe_plugin.lab.emulate.launch import start_torchrun, wait
from moe_plugin.lab.emulate.networks import SHAPES
from moe_plugin.planner.units import show_size

log = logging.getLogger(__name__)
NODES, RATE = 8, 40e6
KIB, MIB = 1 << 10, 1 << 20
SIZES = (256 * KIB, MIB, 4 * MIB, 8 * MIB)
NEAR = 0.15  # of the predicted ratio
# the hosts: a ring of few nodes, because two processors compute for all of them
HOST_NODES, HOST_RATE, STEPS, WARM_UP = 4, 80e6, 12, 3
WIDTH, HIDDEN, EXPERTS, LAYERS = 64, 1024, 8, 2
COLLECTIVES = ("native", "forest")


class HostTraining(NamedTuple):
    """One host's training run.

    Attributes:
        seconds: of each step after the first ones.
        losses: of all steps.
    """

    seconds: list[float]
    losses: list[float]

    @property
    def step_s(self) -> float:
        """Median of a step."""
        return statistics.median(self.seconds)


def fairseq(data: Path, folder: Path, steps: int) -> list[str]:
    """The command that trains, without the flags that differ."""
    return [
        "fairseq-train", str(data / "lm"), *(
            "--user-dir moe_plugin --task language_modeling --arch transformer_lm --dropout 0 "
            f"--decoder-embed-dim {WIDTH} --decoder-input-dim {WIDTH} --decoder-output-dim {WIDTH} "
            f"--decoder-ffn-embed-dim {HIDDEN} --decoder-layers {LAYERS} "
            "--decoder-attention-heads 2 --optimizer sgd --lr 0.1 --lr-scheduler fixed --seed 3 "
            "--tokens-per-sample 64 --batch-size 4 --log-format json --log-interval 1 --cpu "
            "--distributed-backend gloo --ddp-backend legacy_ddp --num-workers 0 --no-progress-bar "
            f"--moe-freq 1 --moe-expert-count {EXPERTS} --criterion moe_cross_entropy "
            "--moe-gate-loss-wt 0.01 --moe-dispatch ragged --moe-capacity-factor none "
            f"--moe-second-expert-policy all --no-save --disable-validation --max-update {steps} "
            f"--moe-stats-interval 1 --moe-stats-jsonl {folder}/stats.jsonl").split()]


def megatron(data: Path, folder: Path, steps: int) -> list[str]:
    """See `fairseq`."""
    return [
        "-m", "moe_plugin.hosts.megatron.train", "--data-path", str(data / "indexed"), *(
            f"--num-layers {LAYERS} --hidden-size {WIDTH} --num-attention-heads 2 --seq-length 64 "
            f"--micro-batch-size 4 --global-batch-size {4 * HOST_NODES} --lr 1e-3 "
            f"--num-experts {EXPERTS} --moe-ffn-hidden-size {HIDDEN} --disable-bias-linear "
            "--moe-aux-loss-coeff 0.01 --hidden-dropout 0 --attention-dropout 0 --cpu "
            f"--lr-decay-style constant --expert-model-parallel-size {HOST_NODES} --log-interval 1 "
            f"--train-iters {steps} --log-file {folder}/log.jsonl").split()]


def fairseq_result(folder: Path) -> HostTraining:
    """What a run of `fairseq` left; losses have the three decimals that fairseq prints."""
    stats = (folder / "stats.jsonl").read_text(encoding="utf-8").splitlines()
    times = sorted({row["step"]: row["time"] for row in map(json.loads, stats)}.items())
    entries = re.findall(r"train_inner(?: \||\]\[INFO\] -) (\{.*\})", (folder / "log").read_text())
    losses = {int(row["num_updates"]): float(row["loss"]) for row in map(json.loads, entries)}
    seconds = [end - begin for (_, begin), (_, end) in pairwise(times)]
    return HostTraining(seconds[WARM_UP:], [losses[step] for step in sorted(losses)])


def megatron_result(folder: Path) -> HostTraining:
    """What a run of `megatron` left."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "lm_loss" in row]
    return HostTraining([row["seconds"] for row in rows][WARM_UP:],
                        [row["lm_loss"] for row in rows])


HOSTS: dict[str, tuple[Callable[[Path, Path, int], list[str]], Callable[[Path], HostTraining]]] = {
    "fairseq": (fairseq, fairseq_result), "megatron": (megatron, megatron_result)}


def train(host: str, collectives: str, data: Path, folder: Path, steps: int) -> HostTraining:
    """A host's training command on every node of an emulated ring, experts gathered (r = 0)."""
    network = SHAPES["ring"](HOST_NODES, HOST_RATE)
    folder.mkdir(parents=True)
    file = folder / "network.yaml"
    file.write_text(yaml.safe_dump(network.to_dict()), encoding="utf-8")
    flags = ["--moe-parallel-r", "0", "--moe-parallel", "fixed", "--moe-all-to-all", "linear",
             "--moe-collectives", collectives]
    if collectives != "native":  # which reads no network
        flags += ["--moe-network", str(file)]
    command, result = HOSTS[host]
    with EmulatedCluster(HOST_NODES, 1, 1e9, 2e-4) as cluster, \
            open(folder / "log", "w", encoding="utf-8") as log:
        cluster.set_network(network)
        program = [*command(data, folder, steps), *flags]
        if wait(start_torchrun(cluster, program, stdout=log, stderr=log, cwd=ROOT)):
            said = (folder / "log").read_text(encoding="utf-8").splitlines()
            raise RuntimeError(f"{host} failed:\n" + "\n".join(
                line for line in said if "Error" in line or "error:" in line))
    return result(folder)


def make_data(folder: Path) -> Path:
    """The text of `bench.corpus` for both hosts."""
    from moe_plugin.hosts.megatron.trainer.data import documents, write_indexed

    build_corpus(folder / "corpus", size=400_000)
    write_indexed(documents(str(folder / "corpus" / "train.txt")), str(folder / "indexed"))
    subprocess.run([
        str(Path(sys.executable).with_name("fairseq-preprocess")), "--only-source", "--trainpref",
        str(folder / "corpus" / "train.tok"), "--validpref", str(folder / "corpus" / "valid.tok"),
        "--srcdict", str(folder / "corpus" / "dict.txt"), "--destdir", str(folder / "lm")
    ], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


def expert_bytes(host: str) -> int:
    """Of one layer's expert parameters, float32: two matrices each, in fairseq with biases."""
    biases = HIDDEN + WIDTH if host == "fairseq" else 0
    return 4 * EXPERTS * (2 * WIDTH * HIDDEN + biases)


def saved_s(host: str) -> float:
    """Seconds of a step that the links alone predict to be saved: each layer gathers its experts
    and scatters their gradients.
    """
    network, size = SHAPES["ring"](HOST_NODES, HOST_RATE), expert_bytes(host) / WIRE
    one = ring_bound_s(network, size) - plan_few(network, "all_gather").seconds(size)
    return 2 * LAYERS * one


def run_hosts(hosts: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """Each host natively and along trees."""
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        data = make_data(Path(temporary))
        for host in hosts:
            runs = {name: train(host, name, data, data / host / name, steps)
                    for name in COLLECTIVES}
            native, forest = (runs[name] for name in COLLECTIVES)
            apart = max(abs(a - b) for a, b in zip(native.losses, forest.losses, strict=True))
            found.append({
                "host": host, "native_s": native.step_s, "forest_s": forest.step_s,
                "predicted_saved_s": saved_s(host), "losses": forest.losses, "apart": apart})
            log.info("%s", {**found[-1], "losses": forest.losses[-1]})
    return found


def cell_row(cell: dict[str, Any]) -> list[str]:
    """One line of the table."""
    times = [f"{1e3 * cell[f'{name}_s']:.0f}" for name in ("gloo", "ring", "native", "forest")]
    return [cell["network"], cell["kind"], show_size(cell["bytes"]), *times,
            f"{1e3 * cell['bound_s']:.0f}", f"{cell['predicted']:.2f}", f"{cell['ratio']:.2f}",
            cell["chosen"]]


def page(report: dict[str, Any]) -> str:
    """The page."""
    cells = report["cells"]
    large = [c for c in cells if c["bytes"] == max(each["bytes"] for each in cells)]
    near = [c for c in large if abs(c["ratio"] / c["predicted"] - 1) <= NEAR]
    right = [c for c in cells if c["chosen"] == min(("native", "forest"),
                                                    key=lambda name: c[f"{name}_s"])
             or abs(c["native_s"] / c["forest_s"] - 1) < 0.05]
    text = [
        "# Collectives along planned trees", "",
        paragraph(f"Made by `moe-plugin bench collectives`: {NODES} emulated nodes of one "
                  f"rank on one machine of {report['cpus']} processors; an ordinary link has "
                  f"{RATE / 1e6:.0f} Mbit/s in each direction. Times in milliseconds, medians of "
                  "the slowest rank. gloo: torch's own. ring: messages around all ranks. native, "
                  "forest: what `comm.collectives` chooses between, as `auto` measured it. bound: "
                  "of the trees, by the links alone. predicted: times that a ring takes as long as "
                  "the trees, by the links alone; measured: the same for the faster one of gloo "
                  "and ring. Load average "
                  f"{report['load'][0]} before, {report['load'][1]} after."), "",
        table(["network", "collective", "bytes", "gloo", "ring", "native", "forest", "bound",
               "predicted", "measured", "auto"], list(map(cell_row, cells))),
        "", paragraph(
            f"Of the {len(large)} cells of the largest size, {len(near)} are within "
            f"{NEAR:.0%} of the predicted ratio. In {len(right)} of {len(cells)} cells `auto` took "
            "the faster one, or one that is less than 5 % slower.")]
    if report["hosts"]:
        text += ["", "## Training with gathered parameters", "", paragraph(
            f"fairseq and Megatron on a ring of {HOST_NODES} nodes, {HOST_RATE / 1e6:.0f} Mbit/s, "
            f"r = 0, {EXPERTS} experts in each of {LAYERS} layers. Median of a step in "
            "milliseconds; saved: by the links alone, and as measured; losses: the largest "
            "difference of any step."), "", table(
                ["host", "native", "forest", "predicted saved", "saved", "losses differ by"],
                [[h["host"], f"{1e3 * h['native_s']:.0f}", f"{1e3 * h['forest_s']:.0f}",
                  f"{1e3 * h['predicted_saved_s']:.0f}",
                  f"{1e3 * (h['native_s'] - h['forest_s']):.0f}", f"{h['apart']:.1g}"]
                 for h in report["hosts"]])]
    return "\n".join(text) + "\n"


OPTIONS = {
    "networks": Option(tuple(SHAPES), "networks to measure", quick=("ring",), choices=SHAPES),
    "sizes": Option(SIZES, "bytes of the whole", quick=(65536,)),
    "repeats": Option(3, "timed calls of each", quick=1),
    "hosts": Option(tuple(HOSTS), "hosts that train", choices=HOSTS),
    "steps": Option(STEPS, "training steps of a host", quick=5),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All cells of all networks, and the hosts."""
    cells: list[dict[str, Any]] = []
    for name in args.networks:
        begun = time.monotonic()
        cells += [cell.as_dict() for cell in measure_network(
            SHAPES[name](NODES, RATE), tuple(args.sizes), args.repeats)]
        log.info("%s: %.0f s", name, time.monotonic() - begun)
    return {"cells": cells, "hosts": run_hosts(args.hosts, args.steps), "cpus": os.cpu_count()}
