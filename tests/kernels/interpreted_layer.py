"""Run in a process of its own with TRITON_INTERPRET=1: cells of the exactness matrix with every
operation in Triton.
"""

from __future__ import annotations

import copy
from unittest.mock import patch

import torch
from torch import Tensor

import moe_plugin.kernels.gpu.tilings as tilings
from moe_plugin.comm import LocalComm
from moe_plugin.kernels import RowGroups, groups, kernels
from moe_plugin.kernels.gpu import expert_ffn
from moe_plugin.kernels.weight_grads import WEIGHTS, LaterGrads
from tests.exactness.harness import compare, config_of, reference, run_rank
from tests.experts.problems import make_layer
from tests.oracle import Case


def main() -> None:
    """Plain and gated experts, three dispatchers, a skewed load, dropped tokens; one rank: the
    interpreter knows no threads.
    """
    assert tilings.INTERPRETED
    assert kernels.get("take_rows").choose(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), 1,
                                           None) == "triton"
    # torch.empty is NaN: what nothing wrote shows where something reads it
    torch.use_deterministic_algorithms(True)
    cells = 0
    for case, dispatch in [(Case(1, 4, 2, [7]), "ragged"), (Case(1, 4, 2, [6], [2], 0.5), "padded"),
                           (Case(1, 3, 3, [5], None, None, "gated_ffn"), "ragged"),
                           (Case(1, 4, 1, [5], None, None, "gated_ffn",
                                 activation="silu"), "ragged"),
                           (Case(1, 4, 2, [8], None, 1.0, skew=3.0), "padded"),
                           (Case(1, 2, 1, [0]), "ragged"),
                           # with filler: rows of tokens that are padding
                           (Case(1, 4, 2, [6], [2]), "bounded"),
                           (Case(1, 3, 2, [5], [1], None, "gated_ffn", skew=3.0), "bounded")]:
        config = config_of(case, dispatch__name=dispatch, experts__compute="kernels")
        results = [run_rank(case, LocalComm(), config, torch.float32)]
        compare(case, results, reference(case, torch.float32), rtol=2e-5, atol=2e-5)
        cells += 1
    print(f"cells: {cells}")
    main_grads()
    tables()
    beside()


def main_grads() -> None:
    """bf16 weights with an fp32 `main_grad`, two micro-batches: the kernel adds what float64 says.
    """
    torch.manual_seed(0)
    layer = make_layer("kernels",
                       experts={"hidden_dim": 24, "compute": "kernels",
                                "kind": "gated_ffn"}).bfloat16()
    truth = copy.deepcopy(layer).double()
    layer.experts.adds_to_main_grad = True
    for name in WEIGHTS:
        parameter = getattr(layer.experts, name)
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros(parameter.shape), False
    for tokens in (9, 5):
        x = torch.randn(tokens, 16).bfloat16()
        layer(x).output.float().sum().backward()
        truth(x.double()).output.sum().backward()
    for name in WEIGHTS:
        parameter, want = getattr(layer.experts, name), getattr(truth.experts, name).grad
        assert parameter.grad_added_to_main_grad
        assert float((parameter.main_grad - want).norm() / want.norm()) < 2e-2, name
    print("main_grad: added")


def tables() -> None:
    """A table of tiles is computed once for forward and backward: one for the products over rows,
    and where weight gradients are cut one for each height of their parts.
    """
    made: list[tuple[int, int]] = []
    compute = groups.tile_table

    def counted(lengths_L: Tensor, height: int, total: int, least: int) -> tuple[Tensor, ...]:
        made.append((height, least))
        return compute(lengths_L, height, total, least)

    groups.tile_table = counted
    gated, fp8 = {"kind": "gated_ffn"}, {"precision": "fp8"}
    for dispatch, experts in (({"name": "ragged"}, gated), ({"name": "bounded"}, fp8),
                              ({"name": "padded", "capacity_factor": 1.0}, gated)):
        layer = make_layer(dispatch=dispatch, experts={
            "hidden_dim": 24, "compute": "kernels", **experts})
        made.clear()
        y = layer(torch.randn(60, 16, requires_grad=True)).output
        forward = list(made)
        for _ in range(2):  # the second pass, through the graph that is kept, finds all of them
            y.sum().backward(retain_graph=True)
        over_rows = [each for each in made if each[1] == 0]
        assert len(forward) == 1 and over_rows == forward, (dispatch, experts, made)
        assert len(set(made)) == len(made) > 1, (dispatch, experts, made)
    groups.tile_table = compute
    print("tables: once")


def beside() -> None:
    """Where weight gradients are left for later, exchanges of another micro-batch run beside all
    products, which have a program a tile; results are the same bits.
    """
    made: list[RowGroups] = []
    results = []
    x_TD = torch.randn(60, 16)
    for later in (None, LaterGrads()):
        torch.manual_seed(1)
        layer = make_layer("kernels", experts={"hidden_dim": 24, "compute": "kernels",
                                               "kind": "gated_ffn"})
        layer.experts.later = later
        with patch.object(expert_ffn, "RowGroups",
                          lambda *args: made.append(RowGroups(*args)) or made[-1]):
            y_TD = layer(x_TD).output
        y_TD.square().sum().backward()
        if later is not None:
            assert layer.experts.w_in_LDF.grad is None
            later.compute(dict(layer.experts.named_parameters(recurse=False)))
        results.append([y_TD, *(p.grad for p in layer.parameters())])
    assert [groups.beside for groups in made] == [False, True]
    assert all(map(torch.equal, *results))
    print("beside: the same")


if __name__ == "__main__":
    main()
