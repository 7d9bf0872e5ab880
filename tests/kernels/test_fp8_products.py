"""Products in fp8: their stated error, in one product and in a layer's output and gradients."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_plugin.kernels import RowGroups, fp8
from moe_plugin.kernels.fp8 import FP8, Fp8Weight, quantize_weights_fp8
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.layer import MoELayer
from moe_plugin.records import RowCounts
from tests.experts.problems import make_layer

pytestmark = pytest.mark.fast

OFF = 0.06  # of the norm; about 0.04 on normal values


def test_one_product_is_off_by_no_more_than_stated() -> None:
    """Per value: sum |x w| (2^-3 + 2^-8), and 2^-10 of a scale for what is small in its block."""
    g = torch.Generator().manual_seed(0)
    counts, width, wide = [5, 0, 200, 3], 300, 140
    x = torch.randn(208, width, generator=g, dtype=torch.float64)
    x *= torch.logspace(-3, 3, 208, dtype=torch.float64)[:, None]
    w = torch.randn(4, width, wide, generator=g, dtype=torch.float64)
    groups = RowGroups(RowCounts(counts), torch.device("cpu"))
    got = FP8.plain(x, groups, w, None, None, "fp8")
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


def test_a_transposed_weight_has_the_same_codes() -> None:
    w_LIO = torch.randn(3, 200, 130)
    weight, other = Fp8Weight.of(w_LIO), Fp8Weight.of(w_LIO.transpose(1, 2))
    turned = weight.transpose(1, 2)
    assert turned is weight.transpose(2, 1)
    assert turned.codes_LIO.stride() == other.codes_LIO.stride()
    for mine, theirs in ((turned.codes_LIO, other.codes_LIO), (turned.scales_LHW,
                                                               other.scales_LHW)):
        assert torch.equal(mine.float(), theirs.float())
    with pytest.raises(ValueError, match="Axes 0 and 1 .* Only axes 1 and 2"):
        weight.transpose(0, 1)


def fp8_layer(kind: str = "gated_ffn") -> MoELayer:
    torch.manual_seed(0)
    return make_layer(experts={"hidden_dim": 96, "kind": kind, "precision": "fp8"})


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every weight that is rounded."""
    seen: list[torch.Tensor] = []

    def quantize(w_LIO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(w_LIO)
        return quantize_weights_fp8(w_LIO)

    monkeypatch.setattr(fp8, "quantize_weights_fp8", quantize)
    return seen


@pytest.mark.parametrize("kind, weights", [("ffn", 2), ("gated_ffn", 3)])
def test_a_weight_is_rounded_once_for_forward_and_backward(kind: str, weights: int,
                                                           rounded: list[torch.Tensor]) -> None:
    """Of several forward passes too, and where activations are computed again."""
    layer, x = fp8_layer(kind), torch.randn(64, 16)
    sum(layer(x).output.sum() for _ in range(3)).backward()
    assert len(rounded) == weights
    for reentrant in (False, True):
        rounded.clear()
        at = x.clone().requires_grad_()
        checkpoint(lambda x: layer(x).output, at, use_reentrant=reentrant).sum().backward()
        assert len(rounded) == weights, reentrant


def in_place(w: torch.nn.Parameter) -> None:
    with torch.no_grad():
        w.mul_(-2.0)


def unseen(w: torch.nn.Parameter) -> None:
    """As an optimizer with fp32 copies writes: autograd counts no version."""
    version = w._version
    w.data.copy_(-2.0 * w.data)
    assert w._version == version


def elsewhere(w: torch.nn.Parameter) -> None:
    w.data = -2.0 * w.data


@pytest.mark.parametrize("write", [in_place, unseen, elsewhere])
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_changed_weights_are_rounded_again(write: Callable[[torch.nn.Parameter], None],
                                           backward: bool, training: bool) -> None:
    """After a step of any optimizer. Without a backward pass no optimizer has stepped, so there a
    write that nothing shows counts in evaluation alone.
    """
    if write is unseen and training and not backward:
        pytest.skip("nothing tells")
    layer, x = fp8_layer().train(training), torch.randn(64, 16)
    y = layer(x).output
    if backward:
        y.sum().backward()
    write(layer.experts.w_in_LDF)
    fresh = copy.deepcopy(layer)  # copies keep nothing
    assert torch.equal(layer(x).output, fresh(x).output)
    assert not torch.equal(layer(x).output, y)


def test_an_optimizer_step_is_followed(rounded: list[torch.Tensor]) -> None:
    """Three steps round each weight three times, and are those of a layer that keeps nothing."""
    layer, other, x = fp8_layer(), fp8_layer(), torch.randn(64, 16)
    for one in (layer, other):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        rounded.clear()
        for _ in range(3):
            if one is other:
                one.experts.memory = Workspace()
            optimizer.zero_grad()
            one(x).output.square().sum().backward()
            optimizer.step()
        assert len(rounded) == 9
    for mine, theirs in zip(layer.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_fp8_has_no_dropout() -> None:
    with pytest.raises(ValueError, match="precision='fp8'.*dropout"):
        make_layer(experts={"hidden_dim": 24, "precision": "fp8", "dropout": 0.1})
