"""Linear maps are found by what they compute, whatever their class and names."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from moe_plugin import replace_ffn
from moe_plugin.hosts.plain.feed_forward import read_feed_forward
from tests.hosts.plain.small import Block

WIDTH, INNER = 16, 24


class Projection(nn.Module):
    """A linear map like those of fairseq2, with the matrix [out, in]."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.input_dim, self.output_dim = inputs, outputs
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.register_parameter("bias", nn.Parameter(torch.randn(outputs)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Transposed(Projection):
    """The matrix is [in, out]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(outputs, inputs)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Flagged(Projection):
    """`bias` is a flag."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        del self.bias
        self.bias = False

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Named(nn.Linear):
    """A subclass that says more about itself."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.note = nn.Identity()


def ffn(linear: Any, inner: int = INNER, outer: Any = None) -> nn.Sequential:
    """A feed-forward module of such maps."""
    return nn.Sequential(linear(WIDTH, inner), nn.GELU(), (outer or linear)(inner, WIDTH))


@pytest.mark.parametrize("inner", [INNER, WIDTH])
@pytest.mark.parametrize("linear", [Projection, Transposed, Flagged, Named])
@pytest.mark.parametrize("outer", [None, nn.Linear, Transposed])
def test_every_linear_map_is_found(linear: Any, outer: Any, inner: int) -> None:
    module = ffn(linear, inner, outer)
    before = [value.clone() for value in module.state_dict().values()]
    model, x = nn.Sequential(Block(module)), torch.randn(5, WIDTH)
    wanted, (grad,) = model(x), torch.autograd.grad(model(x).square().sum(), module[0].weight)
    assert all(torch.equal(now, then) for now, then in zip(module.state_dict().values(), before))
    assert replace_ffn(model, num_experts=4) == ["0.ffn"]
    y = model(x)
    torch.testing.assert_close(y, wanted)
    (experts,) = torch.autograd.grad(y.square().sum(), model[0].ffn.moe.experts.w_in_LDF)
    summed = experts.sum(0)
    torch.testing.assert_close(summed, grad if summed.shape == grad.shape and isinstance(
        module[0], Transposed) else grad.T)


class Scaled(Projection):
    """Twice as much."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Rounded(Projection):
    """A quantization of the weights, as training that is aware of it has."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.weight * 64).round() / 64, self.bias)


class Dropping(Projection):
    """Drops in training, by no module."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class Adapted(nn.Linear):
    """An adapter of low rank, which is zero before its first step."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.lora_A = nn.Parameter(torch.randn(2, inputs))
        self.lora_B = nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T


class Wrapped(nn.Module):
    """An adapter around a map, which shows its weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base, self.low = nn.Linear(inputs, outputs), nn.Linear(inputs, 2)
        self.high = nn.Linear(2, outputs)
        self.weight = self.base.weight
        nn.init.zeros_(self.high.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.high(self.low(x))


class Observed(nn.Linear):
    """A scale that training changes later."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Sharded(Projection):
    """A part of the outputs, and a group of ranks that cannot be copied."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.group = threading.Lock()


class OddBias(Projection):
    """One bias for all outputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.bias = nn.Parameter(torch.randn(1))


def normed(inputs: int, outputs: int) -> nn.Module:
    """The weight is computed."""
    return parametrizations.weight_norm(nn.Linear(inputs, outputs))


@pytest.mark.parametrize("linear", [Scaled, Rounded, Dropping, Adapted, Wrapped, Observed, Sharded,
                                    OddBias, normed, lambda i, o: nn.Embedding(o, i)])
@pytest.mark.parametrize("outer", [None, nn.Linear])
def test_what_does_more_is_no_linear_map(linear: Any, outer: Any) -> None:
    module = ffn(linear, outer=outer)
    assert read_feed_forward(module) is None
    model = nn.Sequential(Block(module))
    for every in (1, 2):
        with pytest.raises(ValueError, match="and computes what nn.Linear computes"):
            replace_ffn(model, 4, every=every)
    assert model[0].ffn is module


def test_quantization_aware_maps_of_torch_are_left_alone() -> None:
    qat = pytest.importorskip("torch.ao.nn.qat")
    config = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    module = ffn(lambda i, o: qat.Linear(i, o, qconfig=config))
    assert read_feed_forward(module) is None


def test_dropout_inside_of_a_map_is_that_of_the_experts() -> None:
    class Late(Projection):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(inputs, outputs)
            self.drop = nn.Dropout(0.25)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(super().forward(x))

    found = read_feed_forward(ffn(Projection, outer=Late))
    assert found is not None and (found.dropout, found.after) == (0.0, 0.25)
    assert read_feed_forward(ffn(Late, outer=Projection)) is None  # before the activation


def test_too_few_modules_are_counted() -> None:
    model = nn.Sequential(Block(ffn(Projection)), Block(ffn(nn.Linear)))
    with pytest.raises(ValueError, match=r"fewer than 3 feed-forward modules \(2\)"):
        replace_ffn(model, 4, every=3)
