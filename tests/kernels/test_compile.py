"""torch.compile sees the padded layer as one graph, and the experts' operation is a well-formed torch operation."""

from __future__ import annotations

import pytest
import torch

from moe_plugin.experts.kernel_ffn import expert_ffn
from tests.kernels.problems import SHAPES, Shape
from tests.kernels.test_strategies import make_layer, problem


@pytest.mark.parametrize("compute", ["auto", "kernels"])
def test_padded_layer_is_one_graph_with_moving_token_counts(compute: str) -> None:
    layer = make_layer(compute, dispatch={"name": "padded", "capacity_factor": 1.25, "equal_tokens": True})

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = layer(x)
        return out.output, out.losses["gshard"]

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for tokens in (40, 40, 48):
        x = torch.randn(tokens, 16, requires_grad=True)
        answers = []
        for fn in (compiled, run):
            y, loss = fn(x)
            answers.append([y, loss, *torch.autograd.grad(y.square().sum() + loss, [x, *layer.parameters()])])
        for mine, theirs in zip(*answers, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [Shape(7, 4, 3, 2, 6), SHAPES["no tokens"]], ids=["some", "none"])
@pytest.mark.parametrize("gated", [False, True])
def test_opcheck(gated: bool, shape: Shape) -> None:
    x, gates, p, plan = problem(shape, gated, True, True, torch.float32)
    gates = gates.detach().float().requires_grad_()
    maps = (gates, plan.source_R, plan.position_TK)
    torch.library.opcheck(expert_ffn, (x, *maps, *p.values(), plan.counts.host, "gelu"))
    torch.library.opcheck(expert_ffn, (torch.randn(plan.counts.total, shape.width), None, None, None, *p.values(), plan.counts.host, "relu"))
