"""The MegaBlocks peer without a GPU: its call and its weights, on a stand-in that has the package's
names, shapes and formulas.

Stand-in written after megablocks 0.10.0: `layers/arguments.py`, `layers/moe.py`,
`layers/router.py`, `layers/mlp.py`, `layers/glu.py`.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_plugin.lab.bench import layer
from moe_plugin.lab.bench.peers import megablocks, ours, peers
from moe_plugin.lab.bench.problem import Problem, make_data
from tests.lab.bench.peer_checks import same_function, without_refusal

pytestmark = pytest.mark.fast


@dataclasses.dataclass
class Arguments:
    """The fields that the peer sets; another name is an error, as with the real one."""

    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    bias: bool
    return_bias: bool
    activation_fn: Any
    moe_num_experts: int
    moe_top_k: int
    moe_normalize_expert_weights: float | None
    moe_loss_weight: float
    moe_lbl_in_fp32: bool
    mlp_type: str
    mlp_impl: str
    fp16: bool
    bf16: bool
    device: str

    @property
    def dtype(self) -> torch.dtype | None:
        """As `layers.common.dtype`."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else None


class Router(nn.Module):
    """`LearnedRouter`: softmax, top-k, weights divided by their p-norm."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args, self.layer = args, nn.Linear(args.hidden_size, args.moe_num_experts, bias=False,
                                                dtype=args.dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.layer(x.view(-1, x.shape[-1])).softmax(dim=-1)
        weights, experts = torch.topk(scores, self.args.moe_top_k, dim=-1)
        if self.args.moe_normalize_expert_weights:
            weights = weights / torch.norm(weights, p=self.args.moe_normalize_expert_weights,
                                           dim=-1, keepdim=True)
        return scores, weights, experts


class Mlp(nn.Module):
    """`GroupedMLP` and `GroupedGLU`, one row at a time."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args = args
        for name in ("w1", "w2", *(["v1"] if args.mlp_type == "glu" else [])):
            self.register_parameter(
                name,
                nn.Parameter(
                    torch.empty(args.moe_num_experts * args.ffn_hidden_size, args.hidden_size,
                                dtype=args.dtype)))

    def row(self, x_D: Tensor, expert: int) -> Tensor:
        w1, w2, *v1 = (getattr(self, n).view(self.args.moe_num_experts, -1,
                                             self.args.hidden_size)[expert]
                       for n in ("w1", "w2", "v1") if hasattr(self, n))
        inner = self.args.activation_fn(x_D @ w1.t())
        return (inner * (x_D @ v1[0].t()) if v1 else inner) @ w2


LOSSES: list[tuple[Tensor, Tensor]] = []


class Experts(nn.Module):
    """`ParallelDroplessMLP`."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.mlp = Mlp(args)


class DMoE(nn.Module):
    """`dMoE`: [sl, bs, hs] to the same shape."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        assert args.mlp_impl == "grouped" and not args.return_bias and not args.bias
        self.router, self.experts = Router(args), Experts(args)

    def forward(self, x: Tensor) -> Tensor:
        _, _, width = x.size()
        scores, weights, experts = self.router(x)
        rows = [
            sum(
                w.to(x.dtype) * self.experts.mlp.row(token, int(e))
                for w, e in zip(ws, es, strict=True))
            for token, ws, es in zip(x.reshape(-1, width), weights, experts, strict=True)
        ]
        LOSSES.append((torch.bincount(experts.reshape(-1), minlength=scores.shape[1]), scores))
        return torch.stack(rows).view(x.shape)


def batched_load_balancing_loss(args: Arguments) -> Tensor:
    """As the package's; one entry a layer, or an error."""
    (counts, scores), = LOSSES
    return args.moe_loss_weight * args.moe_num_experts / (args.num_layers * scores.shape[0] *
                                                          args.moe_top_k) * torch.dot(
                                                              counts.float(),
                                                              scores.float().mean(0))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something importable as megablocks, and no refusal for want of a GPU."""
    modules = {
        "megablocks": {}, "grouped_gemm": {}, "megablocks.layers": {},
        "megablocks.layers.arguments": {"Arguments": Arguments},
        "megablocks.layers.dmoe": {"dMoE": DMoE}, "megablocks.layers.moe": {
            "clear_load_balancing_loss": LOSSES.clear,
            "batched_load_balancing_loss": batched_load_balancing_loss
        }
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["megablocks.layers"].moe = sys.modules["megablocks.layers.moe"]
    monkeypatch.setattr(megablocks, "build", without_refusal(megablocks))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
def test_same_function_and_gradients(gated: bool, top_k: int) -> None:
    problem = Problem(tokens=24, model_dim=16, hidden_dim=20, experts=4, top_k=top_k, gated=gated)
    losses, mine, theirs = same_function(megablocks, problem)
    assert len(losses) == 1 and 0.5 * megablocks.LOSS_WEIGHT < float(
        losses[0].detach()) < problem.experts * megablocks.LOSS_WEIGHT
    norms = [sorted(float(g.norm()) for g in grads if g is not None) for grads in (mine, theirs)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.usefixtures("stand_in")
def test_in_a_report() -> None:
    problem = Problem(tokens=16, model_dim=16, hidden_dim=24, experts=4, top_k=2, dtype="bfloat16",
                      gated=True)
    data = make_data(problem)
    with megablocks.build(problem, data) as peer:
        error = layer.agreement({"moe-plugin": ours(problem, data), "megablocks": peer}, data,
                                problem)["megablocks"]
    assert error <= layer.TOLERANCE["bfloat16"]


def test_refused_with_the_reason(own_entries: None) -> None:
    problem = Problem(tokens=16, model_dim=16, hidden_dim=24, experts=4, top_k=2)
    build = peers.entry("megablocks").value
    peers.forget("megablocks")
    peers.register("megablocks")(build)
    found = layer.run(problem, ["megablocks"], rounds=1)
    assert found.refused == {"megablocks": "MegaBlocks needs a GPU"} and len(found.results) == 1
    assert "takes bfloat16, not float32" in megablocks.why_unsupported(
        Problem(tokens=1, model_dim=1, hidden_dim=128, experts=1, top_k=1, device="cuda"))
    assert "hidden_dim * experts >= 128, not 96" in megablocks.why_unsupported(
        dataclasses.replace(problem, device="cuda"))
