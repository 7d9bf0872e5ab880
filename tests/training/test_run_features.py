"""One list of features for all hosts: each host has each of them, or refuses it with a reason."""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_plugin import MoELayer, TorchComm
from moe_plugin.cli.doctor.packages import run_rows
from moe_plugin.comm import LocalComm
from moe_plugin.config import RunConfig, from_dict, run_from_dict
from moe_plugin.config.refusals import HOSTS, LACKS, OF_HOSTS, REPLICAS, refuse_lacking
from moe_plugin.hosts.plain.run import TrainingSteps
from moe_plugin.hosts.plain.sharding import ddp_model
from moe_plugin.training.run_features import FEATURES, HostSeams, make_run
from tests.distributed import run_gloo
from tests.packaging.definitions import graph

# what asks for each, and the seam by which a host makes it possible
ASKED = {
    "guard.twins": ({"guard": {"twins": 2}}, "models"),
    "observe.jsonl": ({"observe": {"jsonl": "stats.jsonl"}}, "records"),
    "guard.votes": ({"guard": {"votes": 3}}, "votes"),
    "offload.activations": ({"offload": {"activations": "recompute"}}, "activations"),
    "resize.expert_parallel_at": ({"resize": {"expert_parallel_at": {2: 1}}}, "resize"),
    REPLICAS: ({}, "replicas"),
    "offload.weights": ({"offload": {"weights": "host"}}, "streamed"),
    "pipeline.schedule": ({"pipeline": {"schedule": "eager-1f1b"}}, "start"),
    "swarm.role": ({"swarm": {"role": "lead"}}, "start"),
    "finetune.frozen_experts": ({"finetune": {"frozen_experts": "nf4"}}, "start"),
    "finetune.lora_rank": ({"finetune": {"lora_rank": 8}}, "start"),
}
FILES = {"fairseq": "hosts.fairseq.run", "megatron": "hosts.megatron.script_features",
         "pytorch": "hosts.plain.run"}


@cache
def told(host: str) -> set[str]:
    """The seams that a host gives."""
    if host == "vision":
        return told("pytorch")
    [tree] = [s.tree for s in graph().sources.values() if s.name == f"moe_plugin.{FILES[host]}"]
    return {word.arg for call in ast.walk(tree) if isinstance(call, ast.Call)
            and ast.unparse(call.func) in ("HostSeams", "replace") for word in call.keywords}


@pytest.mark.fast
def test_a_host_has_each_feature_or_a_reason() -> None:
    assert set(ASKED) == {row.setting for row in FEATURES if row.setting} | set(OF_HOSTS)
    assert {name for name, _ in LACKS} <= set(ASKED) and {h for _, h in LACKS} <= set(HOSTS)
    for host in HOSTS:
        for name, (_, seam) in ASKED.items():
            assert (name, host) in LACKS or seam in told(host), (name, host)


@pytest.mark.fast
@pytest.mark.parametrize(("name", "host"), [key for key in LACKS if key[0] != REPLICAS])
def test_what_a_host_lacks_is_refused_with_a_remedy(name: str, host: str) -> None:
    settings = run_from_dict(ASKED[name][0])
    lack = LACKS[name, host]
    with pytest.raises(ValueError, match=f"{name}=.* is not supported in {HOSTS[host]}, ") as error:
        make_run(settings, HostSeams(host=host, models=[], world=LocalComm()))
    assert lack.reason in str(error.value) and lack.remedy in str(error.value)
    refuse_lacking(RunConfig(), host)


@pytest.mark.fast
def test_the_doctor_has_a_row_for_each() -> None:
    rows = {row["name"]: row for row in run_rows()}
    assert set(rows) == set(ASKED)
    assert "vision" not in rows[REPLICAS]["state"]
    assert "vision: each epoch" in rows[REPLICAS]["what"]
    assert rows["observe.jsonl"]["state"] == ", ".join(HOSTS)
    assert not rows["observe.jsonl"]["what"]


@pytest.mark.fast
@pytest.mark.parametrize("settings", [{"guard": {"votes": 3}},
                                      {"offload": {"activations": "recompute"}}])
def test_a_seam_that_is_missing_is_said(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not supported in this run of Megatron.*: leave it out"):
        make_run(run_from_dict(settings),
                 HostSeams(host="megatron", models=[nn.Linear(2, 2)], world=LocalComm()))


class Blocks(nn.Module):
    """Layers with experts and dropout in between."""

    def __init__(self, comm: Any, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        config = from_dict({"model_dim": 8, "num_experts": 4, **settings})
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), _Tensor(
            MoELayer(config, comm))) for _ in range(2))

    def forward(self, x_TD: Tensor) -> Tensor:
        for layer in self.layers:
            x_TD = x_TD + layer(x_TD)
        return x_TD


class _Tensor(nn.Module):
    def __init__(self, moe: MoELayer) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.moe(x_TD).output


def loss_of(model: nn.Module, x_TD: Tensor) -> Tensor:
    return (model(x_TD) - x_TD.flip(0)).square().mean()


def trained(settings: dict[str, Any], steps: int = 3) -> tuple[list[Tensor], TrainingSteps]:
    model = Blocks(LocalComm())
    run = TrainingSteps(model, torch.optim.SGD(model.parameters(), 0.1), loss_of,
                        run_from_dict(settings))
    torch.manual_seed(2)
    for _ in range(steps):
        run(torch.randn(16, 8))
    return [p.detach() for p in model.parameters()], run


@pytest.mark.fast
@pytest.mark.parametrize("policy", ["recompute", "keep,recompute"])
def test_activations_of_a_loop_of_ones_own_change_no_bit(policy: str) -> None:
    kept, _ = trained({})
    found, run = trained({"offload": {"activations": policy}})
    assert all(map(torch.equal, found, kept))
    assert [row.kinds[0] in map(type, run.run.features) for row in FEATURES
            if row.setting == "offload.activations"] == [True]


@pytest.mark.fast
def test_an_evaluation_warns_of_dropped_choices(caplog: pytest.LogCaptureFixture) -> None:
    model = Blocks(LocalComm(), dispatch={"capacity_factor": 0.25})
    run = TrainingSteps(model, torch.optim.SGD(model.parameters(), 0.1), loss_of)
    assert run(torch.randn(16, 8)) is not None
    x_TD = torch.randn(16, 8)
    found = run.evaluate(lambda: loss_of(model, x_TD))
    assert not found.requires_grad and model.training
    assert "validation at step 1:" in caplog.text and "found no slot" in caplog.text


def _votes(pairs: bool, wrong: int | None) -> list[tuple[Tensor, list[Tensor]]]:
    """Of each rank losses and parameters after two steps by votes."""
    world = TorchComm()
    model = Blocks(world.contiguous_subgroup(2) if pairs else LocalComm(), dispatch={
        "capacity_factor": None})
    run = TrainingSteps(model, torch.optim.SGD(model.parameters(), 0.1), loss_of,
                        run_from_dict({"guard": {"votes": 3}}), clip=0.1)
    if world.rank == wrong:
        model.layers[0].register_forward_hook(lambda _, __, y: 3 * y)
    found = []
    for step in range(2):
        torch.manual_seed(7 * step + world.rank)
        loss = run(torch.randn(6, 8))
        found.append((loss, [p.detach().clone() for p in model.parameters()]))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "pairs"), [(3, False), (6, True)])
def test_a_wrong_rank_is_outvoted_in_a_loop_of_ones_own(ranks: int, pairs: bool) -> None:
    clean, wrong = (run_gloo(ranks, _votes, pairs, each) for each in (None, ranks - 1))
    for rank in range(ranks - (2 if pairs else 1)):  # those of other workers
        for (loss, parameters), (mine, others) in zip(clean[rank], wrong[rank], strict=True):
            assert torch.equal(loss, mine) and all(map(torch.equal, parameters, others))
    assert torch.equal(clean[0][1][0], clean[ranks - 1][1][0])


def _by_means(votes: bool) -> tuple[list[Tensor], Tensor]:
    """Parameters and norm after a step without dropout."""
    world = TorchComm()
    model = Blocks(LocalComm()).eval()
    wrapped = model if votes else ddp_model(model)
    run = TrainingSteps(wrapped, torch.optim.SGD(model.parameters(), 0.1), loss_of,
                        run_from_dict({"guard": {"votes": 3 * votes}}), clip=0.1)
    torch.manual_seed(world.rank)
    run(torch.randn(6, 8))
    return [p.detach() for p in model.parameters()], run.norm


@pytest.mark.distributed
def test_votes_give_the_mean_gradient() -> None:
    for (voted, norm), (mean, its) in zip(*(run_gloo(3, _by_means, each) for each in (
            True, False)), strict=True):
        torch.testing.assert_close(norm, its)
        for a, b in zip(voted, mean, strict=True):
            torch.testing.assert_close(a, b)


def _refused() -> str:
    model = ddp_model(Blocks(LocalComm()))
    with pytest.raises(ValueError, match="guard.votes=3 does not fit ddp_model: .* bare model"):
        TrainingSteps(model, torch.optim.SGD(model.parameters(), 0.1), loss_of,
                      run_from_dict({"guard": {"votes": 3}}))
    return "refused"


@pytest.mark.distributed
def test_votes_do_not_fit_gradients_that_are_averaged_before() -> None:
    assert run_gloo(1, _refused) == ["refused"]
