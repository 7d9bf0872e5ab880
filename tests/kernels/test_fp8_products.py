"""Products in fp8: their stated error, in one product and in a layer's output and gradients."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from moe_plugin.kernels import Groups
from moe_plugin.kernels.fp8_products import matmul, quantize_weights_fp8
from moe_plugin.records import RowCounts
from tests.experts.problems import make_layer

OFF = 0.06  # of the norm; about 0.04 on normal values


def test_one_product_is_off_by_no_more_than_stated() -> None:
    """Per value: sum |x w| (2^-3 + 2^-8), and 2^-10 of a scale for what is small in its block."""
    g = torch.Generator().manual_seed(0)
    counts, width, wide = [5, 0, 200, 3], 300, 140
    x = torch.randn(208, width, generator=g, dtype=torch.float64)
    x *= torch.logspace(-3, 3, 208, dtype=torch.float64)[:, None]
    w = torch.randn(4, width, wide, generator=g, dtype=torch.float64)
    groups = Groups(RowCounts(counts), torch.device("cpu"))
    got = matmul(x, groups, w, None, None, "fp8")
    for group, span in groups.spans():
        want, size = x[span] @ w[group], x[span].abs() @ w[group].abs()
        largest = x[span].abs().amax(1, keepdim=True) * w[group].abs().amax()
        bound = size * (2**-3 + 2**-8) + width * largest * 2**-15
        assert bool(((got[span] - want).abs() <= bound).all())
        if want.numel():
            assert float((got[span] - want).norm() / want.norm()) < OFF


def test_codes_of_weights_lie_along_the_sum() -> None:
    codes, scales = quantize_weights_fp8(torch.randn(2, 200, 130))
    assert codes.shape == (2, 200, 130) and codes.stride() == (200 * 130, 1, 200)
    assert scales.shape == (2, 2, 2)


@pytest.mark.parametrize("kind", ["ffn", "gated_ffn"])
@pytest.mark.parametrize("dispatch", ["padded", "ragged"])
def test_a_layer_is_off_by_no_more_than_stated(kind: str, dispatch: str) -> None:
    """Against the same layer in float64; whatever strategy is configured, fp8 is computed."""
    torch.manual_seed(0)
    capacity = {"capacity_factor": 2.0} if dispatch == "padded" else {}
    layer = make_layer("loop", dispatch={"name": dispatch, **capacity},
                       experts={"hidden_dim": 96, "compute": "loop", "kind": kind,
                                "precision": "fp8"})
    truth = copy.deepcopy(layer).double()
    truth.experts.config = dataclasses.replace(truth.experts.config, precision="ieee")
    x = torch.randn(64, 16)
    direction = torch.randn(64, 16)
    grads = []
    for mine, dtype in ((layer, torch.float32), (layer, torch.float32), (truth, torch.float64)):
        at = x.to(dtype).requires_grad_()
        y = mine(at).output
        made = torch.autograd.grad((y * direction.to(dtype)).sum(), [at, *mine.parameters()],
                                   allow_unused=True)
        grads.append([y.detach(), *[g for g in made if g is not None]])
    got, again, want = grads
    assert len(got) == len(want) >= 6
    for mine, other, exact in zip(got, again, want, strict=True):
        assert torch.equal(mine, other)
        error = float((mine - exact).norm() / exact.norm())
        assert error < 2 * OFF, error
    assert float((got[0] - want[0]).norm() / want[0].norm()) > 1e-3  # it is fp8


def test_fp8_has_no_dropout() -> None:
    with pytest.raises(ValueError, match="precision='fp8'.*dropout"):
        make_layer(experts={"hidden_dim": 24, "precision": "fp8", "dropout": 0.1})
