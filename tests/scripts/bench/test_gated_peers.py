"""The peers whose experts are gated alone: transformers', torchtitan's and OLMo-core's."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from scripts.bench import layer
from scripts.bench.peers import UnsupportedProblem, olmo_core, peers, transformers
from scripts.bench.problem import Problem, make_data
from scripts.bench.studies import layers
from tests.scripts.bench.peer_checks import same_function

GATED = Problem(tokens=24, model_dim=16, hidden_dim=20, experts=4, top_k=2, gated=True)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_experts_of_transformers(implementation: str) -> None:
    pytest.importorskip("transformers")
    build = transformers.builds[implementation]
    losses, (router, up, gate, down), (their_router, gate_up, their_down) = same_function(
        SimpleNamespace(build=build), GATED)
    assert len(losses) == 1
    for mine, theirs in ((router, their_router), (gate, gate_up[:, :20].transpose(1, 2)),
                         (up, gate_up[:, 20:].transpose(1, 2)), (down, their_down.transpose(1, 2))):
        assert float((mine - theirs).norm()) <= 1e-4 * float(mine.norm())


@pytest.mark.parametrize(("name", "problem", "reason"), [
    ("transformers_eager", {"gated": False}, "gated; use --gated"),
    ("transformers_batched_mm", {"tokens": 4096, "model_dim": 4096, "hidden_dim": 4096},
     "would copy 1,536 GiB of weights"),
    ("olmo_core", {}, "Triton kernels, which need a GPU"),
    ("olmo_core", {"device": "cuda", "gated": False}, "gated; use --gated"),
    ("torchtitan", {"gated": False}, "gated; use --gated"),
    ("torchtitan", {}, "compute in bfloat16, not float32"),
])
def test_what_they_do_not_compute(name: str, problem: dict[str, object], reason: str) -> None:
    problem = Problem(**{**vars(GATED), **problem})
    with pytest.raises(UnsupportedProblem, match=reason), peers.get(name)(problem, None):
        pass


def test_weights_of_olmo_core() -> None:
    """[E * F, D] each, gate, up and down as `DroplessMoEMLP` multiplies; a flat router."""
    data = make_data(GATED)
    mlp = SimpleNamespace(**{name: torch.empty(4 * 20, 16) for name in ("w1", "w2", "w3")})
    made = SimpleNamespace(router=SimpleNamespace(weight=torch.empty(4 * 16)),
                           experts=SimpleNamespace(mlp=mlp))
    olmo_core.load(made, data)
    w1, w2, w3 = (w.view(4, 20, 16)[2] for w in (mlp.w1, mlp.w2, mlp.w3))
    x_TD = data.x_TD
    y_TD = (F.silu(x_TD @ w1.t()) * (x_TD @ w3.t())) @ w2
    wanted_TD = (F.silu(x_TD @ data.w_gate_LDF[2]) * (x_TD @ data.w_in_LDF[2])) @ data.w_out_LFD[2]
    torch.testing.assert_close(y_TD, wanted_TD)
    assert torch.equal(made.router.weight.view(4, 16), data.router_ED)


def test_torchtitan() -> None:
    pytest.importorskip("torchtitan")
    problem = Problem(**{**vars(GATED), "tokens": 32, "hidden_dim": 32, "dtype": "bfloat16"})
    found = layer.run(problem, ["torchtitan"], rounds=1)
    assert found["peers"][0]["error"] <= layer.TOLERANCE["bfloat16"]


def test_a_layer_over_two_ranks() -> None:
    """Peers of one rank are refused there; the bound holds the rows that come to this rank."""
    names = [n for n in ("dense", "einsum", "grouped_mm", "megatron", "transformers_grouped_mm")
             if peers.entry(n).why_not() is None]
    found = layer.on_ranks(GATED, names, rounds=1, ranks=2, threads=1)
    assert [one["name"] for one in layer.results(found)] == ["moe-plugin", *(
        n for n in names if n != "grouped_mm")]
    assert "one rank only" in found["refused"]["grouped_mm"]
    assert "2 ranks, each 1 thread" in layer.parts(found)[0]
    loads = [layer.own_loads(GATED, make_data(GATED), rank, 2) for rank in (0, 1)]
    assert sum(map(sum, loads)) == 2 * GATED.rows and list(map(len, loads)) == [2, 2]


def test_a_decoding_batch_has_a_forward_pass_alone() -> None:
    found = layer.run(GATED, ["dense"], rounds=1, forward_only=True)
    assert "| forward " in layer.parts(found)[1]
    assert GATED.work(True)[0] == GATED.flops / 3 and GATED.work(False)[1] == GATED.bytes


def test_aims_are_those_of_the_measured_layers() -> None:
    def one(number: int, ratio: float, mib: float) -> dict[str, object]:
        return {**asdict(layers.LAYERS["cpu"][number]), "ratio_to_bound": ratio,
                "peak_extra_mib": mib}

    assert [layers.aim_of(one(n, 1, 1)) for n in range(8)] == [
        1.08, 1.2, 1.08, 1.2, 1.02, 1.18, 1.06, 1.18]
    *_, last, other = "\n".join(layers.aims([one(4, 1.021, 20.1), one(5, 1.19, 20.0)])).splitlines()
    assert [cell.strip() for cell in last.split("|")[2:7]] == [
        "1.02", "1.02", "yes", "20.1", "no"]
    assert [cell.strip() for cell in other.split("|")[4:7]] == ["no", "20.0", "yes"]
    assert layers.aim_of(asdict(GATED)) is None
