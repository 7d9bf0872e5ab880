"""ATOM by Megatron's command: a model whose weights stream trains as one on the device does, also
in 16 bits, with tied embeddings, and with several ranks; peers may have several ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.distributed import free_port
from tests.hosts.megatron.conftest import make_data
from tests.hosts.megatron.training import EP2, MODEL, QUICK, TP2, TRAIN, own_loop, records_of

pytestmark = [pytest.mark.megatron, own_loop]
RUN = [*MODEL, "--train-iters", "4", "--eval-interval", "2", "--eval-iters", "1", "--split",
       "80,20,0", "--lr-decay-iters", "4"]
UNTIED = ["--untie-embeddings-and-output-weights"]
ONE = ["--global-batch-size", "2"]  # one micro-batch a step
SGD = ["--optimizer", "sgd"]
# the first step overflows with this scale
FP16 = ["--fp16", "--initial-loss-scale", "1048576", "--hysteresis", "1", "--loss-scale-window",
        "2"]
slow = pytest.mark.slow
EXACT = {  # ranks, flags
    "tied": (1, [*ONE, *SGD]), "fp16": (1, [*UNTIED, *FP16]), "experts": (2, [*UNTIED, *EP2]),
    "tied, adam": (1, ONE), "bf16": (1, [*UNTIED, "--bf16"]),
    "bf16, sgd": (1, [*UNTIED, "--bf16", *SGD, "--clip-grad", "0.1"]),
    "bf16 of a constant scale": (1, [*UNTIED, "--bf16", "--loss-scale", "512"]),
    "tensors": (2, [*UNTIED, *TP2]), "data": (2, [*UNTIED, "--bf16"]),
    "experts, fp16": (2, [*UNTIED, *EP2, *FP16, "--accumulate-allreduce-grads-in-fp32"]),
    "tensors, tied": (2, [*TP2, *ONE, *SGD, "--qk-layernorm"]),
    "tensors, experts": (4, [*UNTIED, *TP2, *EP2, "--bf16"]),
}
FAST = ["tied", "fp16", "experts"]
# sums of gradients in another order; in bf16 without the rounding of the sum of both uses
CLOSE = {"tied": ([*SGD], 1e-5), "tied, bf16": ([*SGD, "--bf16"], 1e-3),
         "tied, fp16, adam": (FP16, 2e-3)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_data(tmp_path_factory.mktemp("some data"))


def streams(folder: Path) -> list[str]:
    """The setting by a file."""
    (folder / "run.yaml").write_text(f"offload:\n  weights: host\n  path: {folder / 'weights'}\n")
    return ["--moe-config", str(folder / "run.yaml")]


def both(flags: list[str], data: str, folder: Path, world: int = 1
         ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the resident run logs, and the one whose weights stream."""
    argv = [*RUN, *flags, "--data-path", data]
    return (records_of(world, argv, folder / "resident.jsonl"),
            records_of(world, [*argv, *streams(folder)], folder / "streamed.jsonl"))


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind in FAST else slow)
                                  for kind in EXACT])
def test_losses_and_norms_have_the_bits_of_the_resident_run(kind: str, data: str, tmp_path: Path
                                                            ) -> None:
    world, flags = EXACT[kind]
    resident, streamed = both(flags, data, tmp_path, world)
    assert streamed == resident
    steps = [row for row in streamed if "lm_loss" in row]
    made = [row for row in steps if row["grad_norm"]]
    assert len({row["lm_loss"] for row in made}) == len(made) >= 2
    assert ("fp16" in kind) == (len(made) < 4)
    if "fp16" in kind:  # the scale halves in the step that is skipped
        assert steps[0]["loss_scale"] == 524288 and steps[0]["skipped_steps"] == 1


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=slow) for kind in CLOSE])
def test_gradients_of_a_tied_weight_are_the_sum_of_both_uses(kind: str, data: str, tmp_path: Path
                                                             ) -> None:
    flags, close = CLOSE[kind]
    resident, streamed = both(flags, data, tmp_path)
    for mine, theirs in zip(streamed, resident, strict=True):
        for name in mine.keys() & {"lm_loss", "grad_norm", "valid_loss", "loss_scale"}:
            assert mine[name] == theirs[name] or mine[name] == pytest.approx(
                theirs[name], rel=close), (mine, theirs)


@slow
@pytest.mark.parametrize(("world", "flags"), [
    (1, [*UNTIED, *FP16]), (2, [*TP2, "--bf16", "--hidden-dropout", "0.1"])])
def test_a_resumed_run_goes_on(world: int, flags: list[str], data: str, tmp_path: Path) -> None:
    """With its main weights, loss scale and the count of steps until that rises."""
    argv = [*RUN, *flags, "--data-path", data, *streams(tmp_path)]
    saved = str(tmp_path / "saved")
    whole, first, rest = (records_of(world, [*argv, *more], tmp_path / f"{name}.jsonl")
                          for name, more in {
        "whole": [], "first": ["--exit-interval", "2", "--save", saved],
        "rest": ["--load", saved]}.items())
    for row in rest:  # it counts skipped steps from its own begin
        if "skipped_steps" in row:
            row["skipped_steps"] += first[1].get("skipped_steps", 0)
    assert first == whole[:3] and rest == whole[3:]


class PeerOfTwoRanks:
    """A command of a peer whose two ranks share the experts; the embedding is tied, in bfloat16."""

    def __init__(self, number: int, lighthouse: str, data: str, folder: Path) -> None:
        self.saved, self.log = folder / str(number), folder / f"{number}.txt"
        self.records = folder / f"{number}.jsonl"
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
                 "--master-port", str(free_port()), "-m", TRAIN, "--cpu", *QUICK, *RUN, *EP2,
                 "--bf16", "--data-path", data, "--seed", str(number + 1), "--weights-on", "host",
                 "--moe-lighthouse", lighthouse, "--moe-replica", str(number), "--moe-timeout",
                 "60", "--moe-average-every", "2", "--moe-outer-lr", "0.7", "--save",
                 str(self.saved), "--save-interval", "2", "--log-file", str(self.records)]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                words, cwd=folder, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"})

    @property
    def steps(self) -> list[dict[str, Any]]:
        rows = map(json.loads, self.records.read_text().splitlines())
        return [row for row in rows if "lm_loss" in row]

    def weights(self, iteration: int, rank: int) -> dict[str, torch.Tensor]:
        folder = self.saved / f"iter_{iteration:07d}" / f"rank_{rank:05d}"
        return {f"{path.stem}.{name}": x for path in sorted(folder.glob("*.safetensors"))
                for name, x in load_file(path).items() if name.startswith("weight")}


@slow
@pytest.mark.distributed
def test_peers_of_two_ranks_average_their_main_weights(data: str, tmp_path: Path) -> None:
    coordination = pytest.importorskip("torchft.coordination")
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    peers = [PeerOfTwoRanks(number, lighthouse.address(), data, tmp_path) for number in range(2)]
    try:
        for peer in peers:
            assert peer.process.wait(timeout=300) == 0, peer.log.read_text()[-4000:]
    finally:
        for peer in peers:
            if peer.process.poll() is None:
                os.killpg(peer.process.pid, signal.SIGKILL)
        lighthouse.shutdown()
    mine, theirs = ([row["lm_loss"] for row in peer.steps] for peer in peers)
    assert len(mine) == 4 and mine != theirs  # of other data
    assert all(peer.steps[-1]["replicas"] == 2 for peer in peers)
    for iteration in (2, 4):
        for rank in range(2):
            first, second = (peer.weights(iteration, rank) for peer in peers)
            assert first.keys() == second.keys() and len(first) > 20
            assert all(x.dtype == torch.float32 and torch.equal(x, second[name])
                       for name, x in first.items())
        assert any(not torch.equal(x, peers[0].weights(iteration, 1)[name])
                   for name, x in peers[0].weights(iteration, 0).items())  # other experts
