"""Lists of routers, a router from a user's file, and deterministic runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.layer import MoELayer
from tests.hosts.common.adapters import Megatron
from tests.hosts.common.host import Host, records

# routers without chance, whose choice does not depend on which rank has which sentences beyond the
# micro-batch
GATES = {"fairseq": "--moe-router switch,expert_choice --moe-losses switch=0.1 --moe-freq 1",
         "megatron": "--moe-router switch,expert_choice --moe-aux-loss-coeff 0.01"}


def gates(home: Path) -> list[list[str]]:
    """The router of each step, by layer."""
    found: dict[str, list[str]] = {}
    for row in sorted(records(home / "stats.jsonl"), key=lambda row: row["step"]):
        [gate] = row["routers"]  # in every micro-batch, on every rank, and in its recomputation
        found.setdefault(row["layer"], []).append(gate)
    return [found[layer] for layer in sorted(found)]


def stats(home: Path) -> str:
    """Words for a file of statistics of every step."""
    return f"--moe-stats-jsonl {home / 'stats.jsonl'} --moe-stats-interval 1"


WAYS = {
    "fairseq": ["--ddp-backend c10d", "--ddp-backend legacy_ddp",
                "--ddp-backend c10d --checkpoint-activations"],
    "megatron": [Megatron.recompute,
                 "--pipeline-model-parallel-size 2 --expert-model-parallel-size 1"],
}


@pytest.mark.parametrize("rule", ["random --moe-router-selection-seed 2", "layer"])
def test_every_way_to_run_takes_the_same_gates(host: Host, rule: str, tmp_path: Path) -> None:
    """Routers that did not decide do not delay the others, also without
    `--find-unused-parameters`; a recomputation takes the gate of its step; validation takes none.
    """
    more, one = f"{GATES[host.name]} --moe-router-selection {rule}", tmp_path / "one"
    # what two ranks train together; Megatron's own first weights would differ
    alone = host.train(one, 8, f"{more} {stats(one)} {host.twice}", ranks=1, save=2, validate=3)
    wanted = gates(one)
    assert [len(layer) for layer in wanted] == [8, 8] and wanted[0] != wanted[1]
    assert rule == "layer" or all(set(layer) == {"switch", "expert_choice"} for layer in wanted)
    assert rule != "layer" or wanted == [["switch"] * 8, ["expert_choice"] * 8]
    for number, way in enumerate(WAYS[host.name][-1 if rule == "layer" else 0:]):
        home = tmp_path / str(number)
        run = host.train(home, 8, f"{more} {stats(home)} {way}", validate=3,
                         load=host.checkpoint(one, 2))
        assert run.numbers == [*range(3, 9)]
        host.same(run, alone, {"abs": max(5e-4, host.near["abs"])})
        assert gates(home) == [layer[2:] for layer in wanted], way


def test_a_resumed_run_goes_on_in_the_sequence(host: Host, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = (f"{GATES[host.name]} --moe-router-selection cycle --moe-router-selection-every 3 "
            "--moe-stats-interval 1 --moe-stats-jsonl")
    wanted = host.train(whole, 8, f"{more} {whole / 'stats.jsonl'}")
    for last in (4, 8):
        run = host.train(parts, last, f"{more} {parts / 'stats.jsonl'}", save=4)
        host.same(run, wanted)
    assert run.numbers == [5, 6, 7, 8]
    sequence = ["switch"] * 3 + ["expert_choice"] * 3 + ["switch"] * 2
    assert gates(whole) == gates(parts) == [sequence, sequence]


OWN = '''
import torch
from moe_plugin.routing import Router, routers

@routers.register("the_first_two")
class FirstTwo(Router):
    """Always experts 0 and 1."""

    fixed_k = 2

    def select(self, call):
        return torch.tensor([[0, 1]], device=call.logits_TE.device).expand(len(call.logits_TE), 2)

    def weigh(self, call, ids_TK):
        return call.scores_TE.gather(1, ids_TK)
'''


def test_a_router_of_ones_own_from_a_file(host: Host, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    run = host.train(tmp_path, 4, f"--moe-import {tmp_path / 'own.py'} --moe-router the_first_two "
                     f"{stats(tmp_path)}").ok()
    loads = [row["load"] for row in records(tmp_path / "stats.jsonl")]
    assert len(loads) == 4 * len(host.layers) and run.losses[-1] < run.losses[0]
    assert all(load[0] == load[1] > 0 == load[2] == load[3] for load in loads)


def _insist() -> None:
    """End the run at a layer that may compute other bits another time."""
    original = MoELayer.forward

    def forward(self: MoELayer, *args: Any, **options: Any) -> Any:
        assert torch.are_deterministic_algorithms_enabled()
        return original(self, *args, **options)

    MoELayer.forward = forward  # type: ignore[method-assign]


def test_deterministic_runs_have_the_same_bits(host: Host, tmp_path: Path) -> None:
    """Twice the same command, noise and dropout on: every tensor of both checkpoints is equal."""
    more = (f"{host.deterministic} --moe-router topk,noisy_topk --moe-router-selection cycle "
            f"--moe-router-noise 1.0 {host.dropout}")
    saved = []
    for name in ("one", "two"):
        host.train(tmp_path / name, 4, more, save=4, attack=_insist).ok()
        saved.append(host.tensors(tmp_path / name))
    one, two = saved
    assert len(one) > 15 and one.keys() == two.keys()
    assert [name for name, value in one.items() if not torch.equal(value, two[name])] == []
