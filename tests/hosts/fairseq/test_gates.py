"""Lists of routers, own modules and deterministic mode in real `fairseq-train` runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_plugin.hosts.fairseq.layers import moe_layers
from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, MOE, Corpus, Result, run
from tests.hosts.fairseq.small import language_model, tokens, translation_model

# routers without chance, whose choice does not depend on which rank has which sentences beyond the
# micro-batch
GATES = "--moe-router switch,expert_choice,hash --moe-losses switch=0.1"


def gates_by_step(path: Path) -> list[dict[str, int]]:
    return [json.loads(line)["routers"] for line in path.read_text().splitlines()]


def train(corpus: Corpus, home: Path, flags: str, ranks: int = 1) -> Result:
    stats = f"--moe-stats-jsonl {home / 'stats.jsonl'} --moe-stats-interval 1"
    return run("fairseq-train",
               f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} {stats} --save-dir {home} {flags}",
               ranks=ranks).ok()


@pytest.mark.distributed
@pytest.mark.parametrize("ddp", ["c10d", "legacy_ddp", "c10d --checkpoint-activations"])
def test_two_ranks_take_the_gates_and_the_curve_of_one(corpus: Corpus, tmp_path: Path,
                                                       ddp: str) -> None:
    """No `--find-unused-parameters`: routers that did not decide do not delay the others; a
    recomputation takes the gate of its step.
    """
    flags = (f"{GATES} --moe-router-selection cycle --max-update 6 --no-save "
             "--validate-interval-updates 3")
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    alone = train(corpus, tmp_path / "one", f"{flags} --update-freq 2")
    both = train(corpus, tmp_path / "two", f"{flags} --ddp-backend {ddp}", ranks=2)
    assert len(alone.steps) == len(both.steps) == 6
    for mine, theirs in zip(both.steps, alone.steps, strict=True):
        for name in ("loss", "inner_loss", "moe_gate_loss", "gnorm"):
            assert mine[name] == pytest.approx(theirs[name],
                                               abs=2.1e-3), (name, mine["num_updates"])
    for home in ("one", "two"):
        decided = gates_by_step(tmp_path / home / "stats.jsonl")
        assert [set(gates) for gates in decided] == [{"switch"}, {"expert_choice"}, {"hash"}] * 2


@pytest.mark.distributed
def test_base_over_ranks_recomputes_without_a_second_exchange_and_stays_balanced(
        corpus: Corpus, tmp_path: Path) -> None:
    losses = []
    for name, flags in (("plain", "--ddp-backend legacy_ddp"),
                        ("recomputed", "--ddp-backend c10d --checkpoint-activations")):
        (tmp_path / name).mkdir()
        losses.append(
            train(corpus, tmp_path / name,
                  f"--moe-router base {flags} --max-update 4 --no-save --disable-validation",
                  ranks=2).losses)
        for line in (tmp_path / name / "stats.jsonl").read_text().splitlines():
            # each of the two problems gives no expert more than its share, rounded up
            record = json.loads(line)
            assert max(record["load"]) <= sum(record["load"]) / 4 + 2 and record["calls"] == 2
    assert losses[0] == pytest.approx(losses[1], abs=2.1e-3) and losses[0][-1] < losses[0][0]


def test_recorded_routing_is_replayed_under_other_weights() -> None:
    from moe_plugin.routing.replay import record_routing, replay_routing

    model, ids = language_model(moe_router="base", moe_dispatch="ragged",
                                moe_capacity_factor="none",
                                moe_second_expert_policy="all").train(), tokens()
    [layer] = moe_layers(model)
    with record_routing() as tape:
        model(ids)
    first = layer.moe_layer.stats.load_KE
    with torch.no_grad():
        layer.moe_layer.moe.router.weight_ED.normal_()
    with replay_routing(tape):
        model(ids)
    assert torch.equal(first, layer.moe_layer.stats.load_KE)


@pytest.mark.distributed
def test_a_resumed_run_goes_on_in_the_sequence(corpus: Corpus, tmp_path: Path) -> None:
    flags = f"{GATES} --moe-router-selection random --moe-router-selection-seed 3"
    (tmp_path / "whole").mkdir(), (tmp_path / "parts").mkdir()
    whole = train(corpus, tmp_path / "whole", f"{flags} --max-update 8 --no-save", ranks=2)
    train(corpus, tmp_path / "parts", f"{flags} --max-update 4 --no-epoch-checkpoints", ranks=2)
    rest = train(corpus, tmp_path / "parts", f"{flags} --max-update 8 --no-epoch-checkpoints",
                 ranks=2)
    assert [step["num_updates"] for step in rest.steps] == [5, 6, 7, 8]
    assert rest.losses == pytest.approx(whole.losses[4:], abs=2.1e-3)
    decided = gates_by_step(tmp_path / "whole" / "stats.jsonl")
    assert decided == gates_by_step(tmp_path / "parts" / "stats.jsonl") and len(
        {str(gates) for gates in decided}) > 1


def test_by_layer_the_layers_of_each_stack_are_numbered() -> None:
    flags = {
        "moe_router": "switch,expert_choice", "moe_router_selection": "layer",
        "moe_dispatch": "ragged", "moe_capacity_factor": "none", "moe_second_expert_policy": "all"
    }
    model = language_model(decoder_layers=3, moe_freq=1, **flags)
    model(tokens())
    assert [layer.moe_layer.stats.router
            for layer in moe_layers(model)] == ["switch", "expert_choice", "switch"]
    both = translation_model(**flags | {"moe_freq": 1})
    both(tokens(), torch.full((3,), 8), tokens())
    assert [layer.moe_layer.stats.router
            for layer in moe_layers(both)] == ["switch", "expert_choice"] * 2


def test_a_step_whose_routers_have_no_loss_adds_nothing_under_neg_log() -> None:
    from tests.hosts.fairseq.test_criterion import criterion

    zero = torch.zeros((), requires_grad=True)
    total = criterion(moe_gate_loss_transform="neg_log").gate_loss([zero, zero])
    total.backward()
    assert float(total) == 0 and zero.grad == 0


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


@pytest.mark.distributed
def test_a_router_of_ones_own_from_a_file(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    result = train(
        corpus, tmp_path,
        f"--moe-import {tmp_path / 'own.py'} --moe-router the_first_two --max-update 3 --no-save",
        ranks=2)
    loads = [
        json.loads(line)["load"] for line in (tmp_path / "stats.jsonl").read_text().splitlines()
    ]
    assert result.losses[-1] < result.losses[0] and all(load[0] == load[1] > 0 == load[2] == load[3]
                                                        for load in loads)


@pytest.mark.distributed
def test_deterministic_runs_have_the_same_bits(corpus: Corpus, tmp_path: Path) -> None:
    """Twice the same command, noise and dropout on: every tensor of both checkpoints is equal."""
    saved = []
    for home in (tmp_path / "one", tmp_path / "two"):
        home.mkdir()
        train(
            corpus, home,
            "--moe-deterministic --moe-router topk,noisy_topk --moe-router-selection cycle "
            "--moe-router-noise 1.0 --max-update 4 "
            "--no-epoch-checkpoints --dropout 0.1", ranks=2)
        saved.append([
            torch.load(home / f"checkpoint_last-rank-{rank}.pt", weights_only=False)["model"]
            for rank in (0, 1)
        ])
    tensors = [{
        f"{rank}.{k}": v for rank, state in enumerate(states) for k, v in state.items()
        if isinstance(v, torch.Tensor)
    } for states in saved]
    assert len(tensors[0]) > 20 and tensors[0].keys() == tensors[1].keys()
    unfilled = "_float_tensor"  # a buffer that fairseq saves and never fills
    assert [
        k for k, value in tensors[0].items()
        if not k.endswith(unfilled) and not torch.equal(value, tensors[1][k])
    ] == []
