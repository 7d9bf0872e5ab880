"""Peers compute our layer's function with the same weights, and say which problems they refuse.

ScatterMoE and SonicMoE run on stand-ins that have the package's names, shapes and formulas, written
after `scattermoe/mlp.py`, `scattermoe/parallel_experts.py`, `sonicmoe/functional/__init__.py` and
`sonicmoe/moe.py`.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.bench import layer
from scripts.bench.child import on_processes
from scripts.bench.peers import UnsupportedProblem, megatron, ours, packages, peers
from scripts.bench.problem import Problem, make_data
from scripts.bench.studies import layers

PLAIN = Problem(tokens=24, model_dim=16, hidden_dim=20, experts=4, top_k=2)
GATED = replace(PLAIN, gated=True)


def same_function(build: Callable[..., Any], problem: Problem
                  ) -> tuple[list[Tensor], list[Tensor | None], list[Tensor | None]]:
    """(the peer's losses, our parameters' gradients, the peer's); outputs and input gradients are
    held to each other.
    """
    data, results = make_data(problem), []
    with build(problem, data) as peer:
        for candidate in (ours(problem, data), peer):
            x = data.x_TD.clone().requires_grad_()
            for _ in range(2):  # its list of losses does not grow
                y, losses = candidate.forward(x)
            results.append((y, losses,
                            torch.autograd.grad((y * data.grad_TD).sum(),
                                                [x, *candidate.parameters], allow_unused=True)))
    (y, _, mine), (other, losses, theirs) = results
    torch.testing.assert_close(other, y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(theirs[0], mine[0], rtol=1e-4, atol=1e-5)
    return losses, list(mine[1:]), list(theirs[1:])


class Experts(nn.Module):
    """`ParallelExperts` of ScatterMoE: weight [E, out, in]."""

    def __init__(self, num_experts: int, input_size: int, output_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, output_size, input_size))


class MLP(nn.Module):
    """ScatterMoE's, one row at a time; `forward` takes tokens, gate weights [T, K] in their dtype,
    and expert numbers [T, K].
    """

    halves = 1

    def __init__(self, input_size: int, hidden_size: int, num_experts: int, top_k: int,
                 activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.experts = Experts(num_experts, input_size, self.halves * hidden_size)
        self.output_experts = Experts(num_experts, hidden_size, input_size)
        self.top_k, self.activation = top_k, activation

    def inner(self, rows_F: Tensor) -> Tensor:
        return self.activation(rows_F)

    def forward(self, x: Tensor, expert_p: Tensor, expert_idxs: Tensor) -> Tensor:
        assert expert_p.dtype == x.dtype
        assert expert_p.shape == expert_idxs.shape == (len(x), self.top_k)
        return torch.stack([
            sum(p * F.linear(self.inner(F.linear(row, self.experts.weight[e])),
                             self.output_experts.weight[e]) for p, e in zip(ps, es, strict=True))
            for row, ps, es in zip(x, expert_p, expert_idxs, strict=True)
        ])


class GLUMLP(MLP):
    """Gated: the second half of the first matmul goes through the activation."""

    halves = 2

    def inner(self, rows_F: Tensor) -> Tensor:
        h, gates = rows_F.chunk(2, dim=-1)
        return self.activation(gates) * h


class ActivationType(enum.Enum):
    """SonicMoE's names."""

    SWIGLU = "swiglu"
    GELU = "gelu"


def moe_general_routing_inputs(x: Tensor, router_scores: Tensor, token_indices: Tensor,
                               expert_indices: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor,
                               b2: Tensor | None, E: int, stream_id: int,
                               activation_type: ActivationType) -> tuple[Tensor, Tensor]:
    """SonicMoE's, one choice at a time. w1: [I, D, E], w2: [D, F, E], both strided as [E, ., .]."""
    assert b1 is None and b2 is None and w2.shape[-1] == E
    assert token_indices.dtype == expert_indices.dtype == torch.int32
    assert bool((token_indices.diff() >= 0).all()) and router_scores.dtype == torch.float32
    assert all(w.permute(2, 0, 1).is_contiguous() for w in (w1, w2))
    rows = []
    for score, token, expert in zip(router_scores, token_indices, expert_indices, strict=True):
        h = F.linear(x[token], w1[..., expert])
        h = (F.silu(h[::2]) * h[1::2] if activation_type == ActivationType.SWIGLU else F.gelu(h))
        rows.append(score * F.linear(h, w2[..., expert]))
    y = torch.zeros_like(x).index_add(0, token_indices.long(), torch.stack(rows))
    return y, torch.bincount(expert_indices.long(), minlength=E)


STAND_INS = {
    "scattermoe": {"scattermoe.mlp": {"MLP": MLP, "GLUMLP": GLUMLP}},
    "sonicmoe": {"sonicmoe.enums": {"ActivationType": ActivationType}, "sonicmoe.functional": {
        "moe_general_routing_inputs": moe_general_routing_inputs}}}


@pytest.mark.fast
@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
def test_packages_that_need_a_gpu(name: str, gated: bool, top_k: int,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is importable as the package, and the peer takes any problem."""
    for module, values in {name: {}, **STAND_INS[name]}.items():
        made = ModuleType(module)
        made.__dict__.update(values)
        monkeypatch.setitem(sys.modules, module, made)
    build = contextlib.contextmanager(inspect.unwrap(getattr(packages, name)))
    losses, mine, theirs = same_function(build, replace(PLAIN, gated=gated, top_k=top_k))
    assert len(losses) == 1 and 0.5 < float(losses[0].detach()) < PLAIN.experts
    # the gated layer keeps two matrices as one: the sums of squares agree
    assert sum(float(g.square().sum()) for g in theirs) == pytest.approx(
        sum(float(g.square().sum()) for g in mine), rel=1e-4)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
def test_grouped_mm(gated: bool, top_k: int) -> None:
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("torch has no grouped_mm")
    _, mine, theirs = same_function(packages.grouped_mm, replace(PLAIN, top_k=top_k, gated=gated))
    for g, other in zip(sorted(mine, key=lambda g: g.shape), sorted(theirs, key=lambda g: g.shape),
                        strict=True):
        assert float(g.norm()) == pytest.approx(float(other.norm()), rel=1e-4)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_experts_of_transformers(implementation: str) -> None:
    pytest.importorskip("transformers")
    losses, (router, up, gate, down), (their_router, gate_up, their_down) = same_function(
        packages.builds[implementation], GATED)
    assert len(losses) == 1
    for mine, theirs in ((router, their_router), (gate, gate_up[:, :20].transpose(1, 2)),
                         (up, gate_up[:, 20:].transpose(1, 2)), (down, their_down.transpose(1, 2))):
        assert float((mine - theirs).norm()) <= 1e-4 * float(mine.norm())


@pytest.mark.parametrize(("name", "problem", "reason"), [
    ("transformers_eager", {"gated": False}, "gated; use --gated"),
    ("transformers_batched_mm", {"tokens": 4096, "model_dim": 4096, "hidden_dim": 4096},
     "would copy 1,536 GiB of weights"),
    ("olmo_core", {}, "olmo_core needs a GPU"),
    ("olmo_core", {"device": "cuda", "gated": False}, "gated; use --gated"),
    ("torchtitan", {"gated": False}, "gated; use --gated"),
    ("torchtitan", {}, "supports only bfloat16, not float32"),
    ("grouped_mm", {"hidden_dim": 21}, "multiples of 4"),
    ("scattermoe", {}, "needs a GPU"), ("sonicmoe", {}, "needs a GPU"),
])
def test_what_they_do_not_compute(name: str, problem: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedProblem, match=reason), peers.get(name)(
            replace(GATED, **problem), None):
        pass
    if name in STAND_INS:
        assert peers.entry(name).why_not() == f"{name} is not installed"


def test_weights_of_olmo_core() -> None:
    """[E * F, D] each, gate, up and down as `DroplessMoEMLP` multiplies; a flat router."""
    data = make_data(GATED)
    mlp = SimpleNamespace(**{name: torch.empty(4 * 20, 16) for name in ("w1", "w2", "w3")})
    made = SimpleNamespace(router=SimpleNamespace(weight=torch.empty(4 * 16)),
                           experts=SimpleNamespace(mlp=mlp))
    packages.load_olmo_core(made, data)
    w1, w2, w3 = (w.view(4, 20, 16)[2] for w in (mlp.w1, mlp.w2, mlp.w3))
    x_TD = data.x_TD
    y_TD = (F.silu(x_TD @ w1.t()) * (x_TD @ w3.t())) @ w2
    wanted_TD = (F.silu(x_TD @ data.w_gate_LDF[2]) * (x_TD @ data.w_in_LDF[2])) @ data.w_out_LFD[2]
    torch.testing.assert_close(y_TD, wanted_TD)
    assert torch.equal(made.router.weight.view(4, 16), data.router_ED)


def test_weights_of_transformer_engine() -> None:
    """`TEGroupedMLP` has one parameter an expert and product: weight0, weight1, ... [out, in]."""
    data = make_data(Problem(tokens=8, model_dim=6, hidden_dim=10, experts=3, top_k=1, gated=True))

    class TEGroupedMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in (("linear_fc1", (20, 6)), ("linear_fc2", (6, 10))):
                linear = nn.Module()
                for expert in range(3):
                    linear.register_parameter(f"weight{expert}", nn.Parameter(torch.empty(shape)))
                self.add_module(name, linear)

    made = SimpleNamespace(router=nn.Linear(6, 3, bias=False), experts=TEGroupedMLP())
    megatron.load(made, data.router_ED, data.w_gate_LDF, data.w_in_LDF, data.w_out_LFD)
    x = data.x_TD[:2]
    gate, up = (x @ made.experts.linear_fc1.weight2.t()).chunk(2, 1)
    torch.testing.assert_close(gate, x @ data.w_gate_LDF[2])
    torch.testing.assert_close(up, x @ data.w_in_LDF[2])
    torch.testing.assert_close(made.experts.linear_fc2.weight1, data.w_out_LFD[1].t())


def test_torchtitan() -> None:
    pytest.importorskip("torchtitan")
    problem = replace(GATED, tokens=32, hidden_dim=32, dtype="bfloat16")
    found = layer.run(problem, ["torchtitan"], rounds=1)
    assert found["peers"][0]["error"] <= layer.TOLERANCE["bfloat16"]


@pytest.mark.megatron
def test_the_plain_megatron_peer_says_what_it_is() -> None:
    if peers.entry("megatron").why_not() is not None:
        pytest.skip("megatron-core is not installed")
    found = layer.run(PLAIN, ["megatron", "megatron_te"], rounds=1)
    assert [r["note"] for r in layer.results(found)] == ["", "SequentialMLP"]
    assert "SequentialMLP" in peers.entry("megatron").summary
    assert set(found["refused"]) == {"megatron_te"}


def test_a_layer_over_two_ranks() -> None:
    """Peers of one rank are refused there; the bound holds the rows that come to this rank."""
    names = [n for n in ("dense", "einsum", "grouped_mm", "megatron", "transformers_grouped_mm")
             if peers.entry(n).why_not() is None]
    found = on_processes(2, layer.run, GATED, names, 1)
    assert [one["name"] for one in layer.results(found)] == ["moe-plugin", *(
        n for n in names if n != "grouped_mm")]
    assert "one rank only" in found["refused"]["grouped_mm"]
    assert "2 ranks, each 1 thread" in layer.parts(found)[0]
    loads = [layer.loads(GATED, make_data(GATED), rank, 2) for rank in (0, 1)]
    assert sum(map(sum, loads)) == 2 * GATED.rows and list(map(len, loads)) == [2, 2]


def test_a_decoding_batch_has_a_forward_pass_alone() -> None:
    found = layer.run(GATED, ["dense"], rounds=1, forward_only=True)
    assert "| forward " in layer.parts(found)[1]
    assert GATED.work(True)[0] == GATED.work()[0] / 3 and GATED.work(False) == GATED.work()


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
