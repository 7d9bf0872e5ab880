"""Products of 16 bits on a processor without instructions for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_plugin import MoELayer
from moe_plugin.cli.doctor import packages
from moe_plugin.kernels import strategies
from moe_plugin.kernels.cpu import products
from moe_plugin.tuning import compute_tuner

pytestmark = pytest.mark.fast

NARROW = (torch.bfloat16, torch.float16)


@pytest.fixture
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (products, compute_tuner):
        monkeypatch.setattr(module, "in_float32", lambda dtype: dtype in NARROW)


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=generator).to(dtype)
                 for shape in ((5, 7), (7, 3), (5, 3)))


def test_only_16_bits_are_widened() -> None:
    assert not products.in_float32(torch.float32) and not products.in_float32(torch.float64)


@pytest.mark.usefixtures("without_instructions")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("base", ["none", "rows", "row", "itself"])
def test_sums_are_of_32_bits_and_rounded_once(dtype: torch.dtype, base: str) -> None:
    a, b, out = operands(dtype)
    added = {"none": None, "rows": out.clone() * 2, "row": out[0].clone(), "itself": out}[base]
    wanted = a.double() @ b.double() + (0 if added is None else added.double())
    assert products.multiply(a, b, out, added) is out
    step = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out.double(), wanted, rtol=step * 1.01, atol=1e-6)


@pytest.mark.usefixtures("without_instructions")
def test_autocast_changes_nothing() -> None:
    a, b, out = operands(torch.bfloat16)
    plain = products.multiply(a, b, out.clone(), out)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(products.multiply(a, b, out.clone(), out), plain)


def grads(layer: MoELayer, x_TD: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x_TD = x_TD.clone().requires_grad_()
    for _ in range(2):  # the second one adds to gradients that are there
        out = layer(x_TD)
        out.output.float().square().sum().backward()
    return [out.output.detach(), x_TD.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.usefixtures("without_instructions")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kind", ["ffn", "gated_ffn"])
def test_the_layer_is_as_near_to_its_reference(dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(0)
    layer = MoELayer(16, num_experts=4, experts={"kind": kind}).to(dtype)
    reference = MoELayer(16, num_experts=4, experts={"kind": kind}).double()
    reference.load_state_dict(layer.state_dict())
    x_TD = torch.randn(24, 16).to(dtype)
    mine, theirs = grads(layer, x_TD), grads(reference, x_TD.double())
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype == dtype
        scale = other.abs().max().item() or 1.0
        torch.testing.assert_close(one.double() / scale, other / scale, rtol=0.0,
                                   atol=20 * torch.finfo(dtype).eps)


def test_the_doctor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for narrow, said in ((NARROW, "computes experts in bfloat16 and float16 as float32"),
                         (NARROW[1:], "computes experts in float16 as float32"), ((), None)):
        monkeypatch.setattr(packages, "in_float32", lambda dtype, narrow=narrow: dtype in narrow)
        what = packages.devices()[0]["what"]
        assert said in what if said else "as float32" not in what


@pytest.mark.usefixtures("without_instructions")
def test_auto_takes_no_way_that_multiplies_number_by_number() -> None:
    layer = MoELayer(512, num_experts=2).bfloat16()
    p = layer.experts
    x_RD = torch.zeros(1, 512, dtype=torch.bfloat16)
    assert compute_tuner.usable_ways(x_RD, p, None) == {"fused"}


class NoResultWithGaps(TorchDispatchMode):
    """Refuses batched 16-bit products whose result has gaps between the values of a row: torch
    computes these number by number, up to 10,000 times as slowly.
    """

    checked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        packet = func.overloadpacket
        if packet in (torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.baddbmm_):
            out = (kwargs or {}).get("out", args[0] if packet is torch.ops.aten.baddbmm_ else None)
            assert out is None or out.element_size() != 2 or out.stride(-1) == 1, (
                func, out.shape, out.stride())
            self.checked += 1
        return func(*args, **(kwargs or {}))


def layouts(shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """The same values with other strides."""
    one, rows, columns = shape
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    made = {
        "plain": torch.empty(shape, dtype=dtype),
        "transposed": torch.empty(one, columns, rows, dtype=dtype).mT,
        "transposed with gaps": torch.empty(one, columns, rows + 3, dtype=dtype)[..., :rows].mT,
        "every second value": torch.empty(one, rows, 2 * columns, dtype=dtype)[..., ::2],
    }
    return {name: tensor.copy_(values) for name, tensor in made.items()}


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("base", ["none", "rows", "row", "itself"])
@pytest.mark.parametrize("into", layouts((1, 1, 1), torch.float32))
def test_batched_products_into_results_with_any_strides(dtype: torch.dtype, base: str,
                                                        into: str) -> None:
    out = layouts((2, 5, 3), dtype)[into]
    added = {"none": None, "rows": out.clone() * 2, "row": out[:, 0].clone(), "itself": out}[base]
    for a in layouts((2, 5, 7), dtype).values():
        for b in layouts((2, 7, 3), dtype).values():
            term = (0 if added is None else
                    added.double()[:, None] if added.dim() == 2 else added.double())
            wanted = a.double() @ b.double() + term
            with NoResultWithGaps() as mode:
                products.multiply(a, b, out, added)
            assert mode.checked or products.in_float32(dtype)
            torch.testing.assert_close(out.double(), wanted, rtol=2 * torch.finfo(dtype).eps,
                                       atol=1e-2)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", strategies.names())
def test_no_way_to_compute_experts_multiplies_number_by_number(name: str, gated: bool,
                                                               dtype: torch.dtype) -> None:
    """Weights are stored transposed, as those of transformers."""
    if (why := next(e for e in strategies if e.name == name).why_not()) is not None:
        pytest.skip(why)
    torch.manual_seed(0)
    layer = MoELayer(32, num_experts=16, top_k=2, dtype=dtype,
                     experts={"kind": "gated_ffn" if gated else "ffn", "compute": name})
    for parameter in layer.experts.parameters():
        if parameter.dim() == 3:
            parameter.data = parameter.data.mT.contiguous().mT
    with NoResultWithGaps():
        for made in grads(layer, torch.randn(40, 32).to(dtype)):
            assert made.isfinite().all()
