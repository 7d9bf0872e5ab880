"""What several tests of experts compute: rows with their plan, parameters, a layer on one rank."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_plugin.comm import LocalComm
from moe_plugin.config import from_dict
from moe_plugin.experts import FFNParameters
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.layer import MoELayer
from moe_plugin.records import RowPlan
from tests.kernels.problems import Shape, make_plan

SMALL = Shape(6, 3, 4, 2, 5)


def problem(s: Shape, gated: bool, bias: bool, empty_slots: bool,
            dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, dict, RowPlan]:
    """(x, gate weights, parameters by name, plan), all that can need a gradient needing one."""
    g = torch.Generator().manual_seed(1)
    plan = make_plan(s, g, empty_slots)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    e, d, f = s.experts, s.width, s.inner
    p = {
        "w_in_LDF": draw(e, d, f), "bias_in_LF": draw(e, f) if bias else None,
        "w_gate_LDF": draw(e, d, f) if gated else None,
        "bias_gate_LF": draw(e, f) if gated and bias else None, "w_out_LFD": draw(e, f, d),
        "bias_out_LD": draw(e, d) if bias else None
    }
    gates = torch.rand(s.tokens, s.top_k, generator=g, dtype=torch.float64).requires_grad_()
    return draw(s.tokens, d), gates, p, RowPlan(plan.source_R, plan.position_TK, gates,
                                                plan.groups.counts)


def parameters(p: dict, activation: str) -> FFNParameters:
    """As a layer's experts hand them over."""
    return FFNParameters(**p, activation=activation, memory=Workspace())


def with_gates(plan: RowPlan, gates: Tensor) -> RowPlan:
    """The plan with other gate weights."""
    return RowPlan(plan.source_R, plan.position_TK, gates, plan.counts)


def make_layer(compute: str = "auto", **config: object) -> MoELayer:
    """A small layer on this rank alone."""
    return MoELayer(
        from_dict({
            "model_dim": 16, "num_experts": 8, "experts": {"hidden_dim": 24, "compute": compute},
            **config
        }), LocalComm())


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.made_by = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.numel() > self.numel:
                self.numel, self.made_by = leaf.numel(), str(func)
        return out
