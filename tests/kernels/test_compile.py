"""torch.compile sees the padded layer as one graph, and the experts' operation is a well-formed
torch operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from moe_plugin.kernels import (
    combine_rows,
    gather_rows,
    permute_rows,
    route,
    strategies,
    weigh_rows,
)
from moe_plugin.kernels.gpu.expert_ffn import expert_ffn
from moe_plugin.kernels.router import Rule
from moe_plugin.kernels.scores import SOFTMAX
from moe_plugin.layer import MoELayer
from moe_plugin.records import DeviceCounts, RowCounts
from tests.combinations import Cell, all_pairs, name_of
from tests.experts.problems import make_layer, parameters, problem
from tests.kernels.compiled_graphs import with_own_results
from tests.kernels.problems import SHAPES, Shape

TOKENS = (48, 7, 2, 3, 64, 1000, 5, 41, 40)


def recompiled(layer: MoELayer, first: list[torch.Tensor], fullgraph: bool) -> list[int]:
    """Graphs of forward and backward after each of `first`, and after all of `TOKENS`; output, loss
    and all gradients are held to the layer's own.
    """
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = layer(x)
        return out.output, out.losses["gshard"]

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(with_own_results("aot_eager"))
    compiled = torch.compile(run, fullgraph=fullgraph, backend=counter)

    def answers(fn: Callable[[torch.Tensor], Any], x: torch.Tensor) -> list[torch.Tensor]:
        y, loss = fn(x)
        return [y, loss, *torch.autograd.grad(y.square().sum() + loss, [x, *layer.parameters()])]

    def step(x: torch.Tensor) -> None:
        torch.testing.assert_close(answers(compiled, x), answers(run, x), rtol=1e-4, atol=1e-4)

    counts = []
    for x in first:
        step(x)
        counts.append(counter.frame_count)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in TOKENS:
            step(torch.randn(tokens, 16, requires_grad=True))
    return [*counts, counter.frame_count]


def tokens_marked_dynamic(tokens: int) -> torch.Tensor:
    """An input whose number of tokens torch is told to be any."""
    x = torch.randn(tokens, 16, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    return x


@pytest.mark.parametrize("cell", all_pairs({
    "compute": ["auto", "kernels"], "factor": [1.25, 0.5], "gated": [False, True]
}), ids=name_of)
def test_padded_layer_is_compiled_once_for_all_token_counts(cell: Cell) -> None:
    """Also where capacity and tokens are so few that an expert has one slot alone; torch's batched
    matmul, which is taken by rule, is compiled once more for that.
    """
    compute, factor, gated = cell["compute"], cell["factor"], cell["gated"]
    first = [56] if factor > 1 or compute == "kernels" else [56, 2]
    layer = make_layer(
        compute, dispatch={"name": "padded", "capacity_factor": factor, "equal_tokens": True},
        experts={
            "hidden_dim": 24, "compute": compute,
            **({"kind": "gated_ffn", "activation": "silu"} if gated else {})
        })
    assert recompiled(layer, [tokens_marked_dynamic(tokens) for tokens in first],
                      fullgraph=True) == [*range(1, len(first) + 1), len(first)]


def test_padded_layer_is_compiled_twice_where_torch_finds_out_by_itself() -> None:
    """Once for the first count, once for any; and, as torch has it, once for a single token and
    once for none.
    """
    layer = make_layer("auto",
                       dispatch={"name": "padded", "capacity_factor": 1.25, "equal_tokens": True})
    first = [torch.randn(tokens, 16, requires_grad=True) for tokens in (56, 57, 1, 0)]
    assert recompiled(layer, first, fullgraph=True) == [1, 2, 3, 4, 4]


@pytest.mark.parametrize("compute", ["auto", "kernels", "loop"])
def test_dropless_layer_is_not_compiled_again_for_other_loads(compute: str) -> None:
    """Routing is compiled, what needs the counts on the host is not: two graphs per kind of
    input, for any loads.
    """
    layer = make_layer(compute, dispatch={"name": "ragged"})
    first = [torch.randn(tokens, 16, requires_grad=True) for tokens in (56, 57)]
    assert recompiled(layer, first, fullgraph=False) == [2, 4, 4]


@pytest.mark.parametrize(("compute", "gated"), [("auto", True), ("kernels", False)])
def test_bounded_layer_is_one_graph_for_any_load(compute: str, gated: bool) -> None:
    """Dropless, forward and backward without a read of the loads: nothing is compiled again."""
    layer = make_layer(compute, dispatch={"name": "bounded"}, experts={
        "hidden_dim": 24, "compute": compute,
        **({"kind": "gated_ffn", "activation": "silu"} if gated else {})
    })
    assert recompiled(layer, [tokens_marked_dynamic(56)], fullgraph=True) == [1, 1]


def routed(logits_TE: torch.Tensor) -> torch.Tensor:
    """All differentiable results of `route` in one."""
    made = route(logits_TE, None, Rule(2, True, SOFTMAX))
    return torch.cat([made.weights_TK.flatten(), made.importance_E, made.z[None]])


SOURCE_R = torch.tensor([2, -1, 0, 5, 3, 1, -1])  # choices; the 5th has no row
POSITION_TK = torch.tensor([[2, 5], [0, 4], [-1, 3]])
ORDER_R = torch.tensor([3, 0, 6, 5, 1, 2, 4])
FUNCTIONS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, int]]]] = {
    "gather": (lambda x: gather_rows(x, SOURCE_R, POSITION_TK), [(3, 4)]),
    "combine": (lambda rows, w: combine_rows(rows, w, SOURCE_R, POSITION_TK), [(7, 4), (3, 2)]),
    "combine without weights": (lambda rows: combine_rows(rows, None, SOURCE_R, POSITION_TK),
                                [(7, 4)]),
    "weigh": (lambda x, w: weigh_rows(x, w, SOURCE_R, POSITION_TK), [(3, 4), (3, 2)]),
    "permute": (lambda rows: permute_rows(rows, ORDER_R, ORDER_R.argsort()), [(7, 4)]),
    "route": (routed, [(3, 5)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_functions_of_ours(name: str) -> None:
    """The compiled gradients are the eager ones; also where the result is changed in place."""
    function, shapes = FUNCTIONS[name]
    inputs = [torch.rand(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def grads(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = function(*inputs)
        return out.detach(), *torch.autograd.grad(out.pow(3).sum(), inputs)

    torch._dynamo.reset()
    wanted = grads(lambda *inputs: function(*inputs) * 2)
    compiled = torch.compile(lambda *inputs: function(*inputs).mul_(2), fullgraph=True,
                             backend=with_own_results("aot_eager"))
    torch.testing.assert_close(grads(compiled), wanted)


@pytest.mark.parametrize("shape", [Shape(7, 4, 3, 2, 6), SHAPES["no tokens"]], ids=["some", "none"])
@pytest.mark.parametrize("gated", [False, True])
def test_opcheck(gated: bool, shape: Shape) -> None:
    x, gates, p, plan = problem(shape, gated, True, True, torch.float32)
    gates = gates.detach().float().requires_grad_()
    rows = torch.randn(plan.counts.total, shape.width)
    counts = plan.counts.host
    lengths_L = torch.tensor(counts)
    for arguments in ((x, gates, plan.source_R, plan.position_TK, *p.values(), counts, None,
                       "gelu", "ieee"),
                      (rows, None, None, None, *p.values(), counts, None, "relu", "ieee"),
                      *((x, gates, plan.source_R, plan.position_TK, *p.values(), None, lengths_L,
                         "gelu", each) for each in (("fp8", "nvfp4") if gated else ("fp8",)))):
        assert set(torch.library.opcheck(expert_ffn, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize(("counts", "left_out"), [
    (lambda _: RowCounts([3, 4]), True), (lambda _: RowCounts([4, 4]), False),
    (lambda lengths_L: DeviceCounts(lengths_L, 8), False)], ids=["uneven", "even", "of the device"])
def test_what_no_cuda_graph_may_hold_is_left_out_of_them(
        counts: Callable[[torch.Tensor], RowCounts], left_out: bool) -> None:
    """By the tag that torch.compile looks for in mode reduce-overhead; in backward, too."""
    _, _, p, _ = problem(Shape(8, 4, 2, 1, 6), True, True, True, torch.float32)

    def grad(rows_RD: torch.Tensor, lengths_L: torch.Tensor,
             *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        known = parameters(dict(zip(p, values, strict=True)), "relu")
        return torch.autograd.grad(
            strategies.get("kernels")(rows_RD, counts(lengths_L), known).sum(), rows_RD)

    lengths_L = torch.tensor([3, 4])
    rows_RD = torch.randn(counts(lengths_L).total, 4, requires_grad=True)
    graph = make_fx(grad, tracing_mode="fake")(rows_RD, lengths_L, *p.values())
    tags = [node.target.tags for node in graph.graph.nodes if "expert_ffn" in str(node.target)]
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    assert [tag in each for each in tags] == [left_out and tag is not None] * 2
