"""MXFP8, NVFP4 and fp8 blockwise: the formats value by value, the products' stated errors, and
torch's product by a stand-in with its interface.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_plugin.kernels import RowGroups, kernels, strategies
from moe_plugin.kernels.block_formats import FORMATS, quantize_mxfp8, quantize_nvfp4
from moe_plugin.kernels.block_products import BLOCK_PRODUCTS
from moe_plugin.kernels.expert_ffn import OPERANDS
from moe_plugin.kernels.gpu import scaled_grouped
from moe_plugin.records import DeviceCounts, RowCounts
from tests.experts.problems import make_layer
from tests.oracle import round_blocks

pytestmark = pytest.mark.fast

NAMES = sorted(FORMATS)
ROWS = [name for name in NAMES if not name.endswith("hybrid")]  # the same rows as without it
TORCHS = ["mxfp8", "nvfp4"]
CPU = torch.device("cpu")
Round = Callable[[Tensor, str], Tensor]  # values, and what they are of: see `round_blocks`
# of the norm, on normal values: a product, a layer's output and each of its gradients
OFF = {"mxfp8": (0.05, 0.12), "mxfp8_hybrid": (0.07, 0.17), "nvfp4": (0.16, 0.4),
       "fp8_blockwise": (0.05, 0.12), "fp8_blockwise_hybrid": (0.07, 0.17)}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ROWS)
def test_values_are_those_of_the_definition(name: str) -> None:
    """Rows of widths that end inside a block, of very different sizes, and of zeros."""
    for width in (1, 31, 32, 100):
        x = draw(40, width, seed=width) * torch.logspace(-2, 2, 40)[:, None]
        x[3] = 0
        got = FORMATS[name].rows(x).values(torch.float64)
        torch.testing.assert_close(got, round_blocks(x.double(), name), rtol=1e-12, atol=0)
        bound = (2**-2, 2**-4) if name == "nvfp4" else (2**-4 + 2**-10, 2**-17)
        block = {"mxfp8": 32, "nvfp4": 16, "fp8_blockwise": 128}[name]
        largest = torch.cat([each.abs().amax(1, keepdim=True).expand_as(each)
                             for each in x.split(block, 1)], 1)
        # and where a block is next to nothing in its tensor, steps of that
        least = 2**-17 * x.abs().max()
        assert bool(((got - x).abs() <= bound[0] * x.abs() + bound[1] * largest + least).all())
        assert torch.equal(got, FORMATS[name].rows(x).values(torch.bfloat16).double())


def test_codes_and_scales_of_mxfp8() -> None:
    """The largest value of a block is between 224 and 448 scales; 448 is one scale's."""
    x = torch.zeros(3, 32)
    x[0, :3] = torch.tensor([448.0, -224.0, 1.0])
    x[1, :2] = torch.tensor([449.0, 1.0])
    x[2, 0] = 2.0**-100
    made = quantize_mxfp8(x)
    assert made.scales.flatten().tolist() == [127, 128, 127 - 108]
    assert made.codes[:, :3].float().tolist() == [[448, -224, 1], [224, 0.5, 0], [256, 0, 0]]


def test_weights_in_squares_and_gradients_in_e5m2() -> None:
    """Of two experts, and widths that end inside a square; e5m2 keeps three bits."""
    form, w = FORMATS["fp8_blockwise_hybrid"], draw(2, 300, 140) * torch.logspace(-2, 2, 140)
    got = form.weights(w)
    assert got.scales.shape == (2, 300, 2)
    torch.testing.assert_close(got.values(torch.float64), torch.stack(
        [round_blocks(each.double(), "fp8_blockwise", "weights") for each in w]), rtol=0, atol=0)
    for name in ("mxfp8_hybrid", "fp8_blockwise_hybrid"):
        made, grad = FORMATS[name].grads(w[0]), w[0].double()
        assert made.codes.dtype == torch.float8_e5m2
        torch.testing.assert_close(made.values(torch.float64), round_blocks(grad, name, "grads"),
                                   rtol=0, atol=0)
        assert torch.equal(made.values(torch.float64), made.values(torch.bfloat16).double())
        assert bool(((made.values(torch.float64) - grad).abs() <= 2**-3 * grad.abs()).all())


def test_codes_and_scales_of_nvfp4() -> None:
    """Eight sizes and their signs, two to a byte, the first in the low bits; ties go to even."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = torch.cat([sizes, -sizes])[None] * 448  # the tensor's scale is 1, the block's 448
    made = quantize_nvfp4(x)
    assert made.tensor.item() == 1 and made.scales.float().tolist() == [[448]]
    low = [0x10, 0x32, 0x54, 0x76]
    assert made.codes.tolist() == [[*low, *(byte | 0x88 for byte in low)]]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * 2)[None] * 448
    assert (quantize_nvfp4(ties).values(torch.float32)[0, :8] / 448).tolist() == [
        0, 1, 1, 2, 2, 4, 4, 6]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so_and_counts_for_no_scale(name: str, wrong: float) -> None:
    x = draw(4, 64)
    spoiled = x.clone()
    spoiled[1, 5] = wrong
    got, want = (FORMATS[name].rows(each).values(torch.float32) for each in (spoiled, x))
    assert bool(got[1, 5].isnan())
    assert torch.equal(got[[0, 2, 3]], want[[0, 2, 3]])
    block = FORMATS[name].rows(x).block
    assert torch.equal(got[1, block:], want[1, block:])


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("most", [1, 1.31, 1.32])  # NVFP4's scale of the tensor changes at 1.3125
def test_a_row_of_blocks_above_2_to_minus_13_of_the_tensor_is_rounded_alike(
        name: str, most: float) -> None:
    """In MXFP8 any row; in NVFP4 blocks below 2^-19 become 0."""
    blocks = draw(15, 4, 16)
    rows = (blocks / blocks.abs().amax(2, keepdim=True)).flatten(1)
    x = most * rows * torch.tensor([2.0**-20, *(2.0**-n for n in range(13, -1, -1))])[:, None]
    whole = FORMATS[name].rows(x).values(torch.float32)
    for row in range(name == "nvfp4", 15):
        assert torch.equal(FORMATS[name].rows(x[row:row + 1]).values(torch.float32)[0], whole[row])
    assert bool(whole[0].any()) == (name != "nvfp4")


@pytest.mark.parametrize("on_device", [False, True])
def test_groups_are_filled_up_to_whole_blocks(on_device: bool) -> None:
    lengths, rows = [5, 0, 64, 33], 102 + 6 * on_device
    counts = DeviceCounts(torch.tensor(lengths), rows) if on_device else RowCounts(lengths)
    filled, row_P = RowGroups(counts, CPU).filled(32)
    want, start = [], 0
    for length in lengths:
        size = max(32, -(-length // 32) * 32)
        want += [*range(start, start + length), *[-1] * (size - length)]
        start += length
    assert filled.lengths_L.tolist() == [32, 32, 64, 64]
    assert row_P.tolist() == want + [-1] * (filled.total - len(want))


@pytest.mark.parametrize("name", NAMES)
def test_products_are_off_by_no_more_than_stated(name: str) -> None:
    """Forward, input gradient, weight gradient, on normal values; and it is that format."""
    exact: Round = lambda x, of: x  # noqa: E731
    for what, (got, want) in three_products(name, torch.float32, exact).items():
        off = float((got - want).norm() / want.norm())
        assert OFF[name][0] / 4 < off < OFF[name][0], (what, off)


@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_operands_rounded_along_their_sums(name: str) -> None:
    rounded: Round = lambda x, of: round_blocks(x, name, of)  # noqa: E731
    for got, want in three_products(name, torch.float64, rounded).values():
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def three_products(name: str, dtype: torch.dtype, rounded: Round
                   ) -> dict[str, tuple[Tensor, Tensor]]:
    """Forward, input and weight gradient, each made and wanted, of operands rounded along the last
    axis.
    """
    groups = RowGroups(RowCounts([60, 0, 200, 3]), CPU)
    x, grad, w_LIO = (draw(*shape, seed=seed).to(dtype) for seed, shape in enumerate(
        ((263, 96), (263, 80), (4, 96, 80))))
    products = BLOCK_PRODUCTS[name]
    weight = products.weight(w_LIO, backward=True)
    spans = list(groups.spans())
    return {
        "forward": (products.plain(x, groups, weight, None, None, name), torch.cat(
            [rounded(x[span], "rows") @ rounded(w_LIO[g].T, "weights").T for g, span in spans])),
        "input": (products.back(grad, groups, weight.transpose(1, 2), None, None, name), torch.cat(
            [rounded(grad[span], "grads") @ rounded(w_LIO[g], "weights").T for g, span in spans])),
        "weight": (products.weight_grads(x, (grad,), groups, None, None)[0], torch.stack(
            [rounded(x[span].T, "rows") @ rounded(grad[span].T, "grads").T for _, span in spans])),
    }


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_are_filler_count_for_no_scale(name: str) -> None:
    x, w_LIO = draw(40, 64), draw(2, 64, 32, seed=1)
    want = RowGroups(RowCounts([20, 12]), CPU), x[:32]
    spoiled = x.clone()
    spoiled[32:] = 1e30
    lengths_L = torch.tensor([20, 12])
    got = RowGroups(DeviceCounts(lengths_L, 40), CPU), spoiled
    y = [BLOCK_PRODUCTS[name].plain(rows, groups, w_LIO, None, None, name)[:32]
         for groups, rows in (want, got)]
    assert torch.equal(*y)
    grads = [BLOCK_PRODUCTS[name].weight_grads(rows, (rows,), groups, None, None)[0]
             for groups, rows in (want, got)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("on_device", [False, True])
def test_tokens_that_no_expert_computes_count_for_no_scale(name: str, on_device: bool) -> None:
    """Without a row, as padding is; on_device: or in filler alone."""
    x, w_LIO = draw(30, 64), draw(2, 64, 32, seed=1)
    token_R = torch.arange(28).flip(0)
    token_R[[3, 25]] = -1  # those were tokens 24 and 2
    lengths = [20, 6] if on_device else [20, 8]  # rows 26 and 27, of tokens 1 and 0, are filler
    counts = DeviceCounts(torch.tensor(lengths), 28) if on_device else RowCounts(lengths)
    groups = RowGroups(counts, CPU)
    spoiled = x.clone()
    spoiled[[2, 24, 28, 29, *([0, 1] if on_device else [])]] = 1e30
    y = [BLOCK_PRODUCTS[name].plain(each, groups, w_LIO, None, token_R, name)[:sum(lengths)]
         for each in (x, spoiled)]
    assert torch.equal(*y)
    grads = [BLOCK_PRODUCTS[name].weight_grads(each, (each,), groups, token_R, token_R)[0]
             for each in (x, spoiled)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("name", NAMES)
def test_slots_of_a_rank_without_tokens_are_zeros(name: str) -> None:
    groups, token_R = RowGroups(RowCounts([3, 40]), CPU), torch.full((43,), -1)
    x, grad, w_LIO = torch.zeros(0, 64), torch.zeros(0, 32), draw(2, 64, 32)
    products = BLOCK_PRODUCTS[name]
    y = products.plain(x, groups, w_LIO, None, token_R, name)
    assert torch.equal(y, torch.zeros(43, 32))
    for tokens in ((token_R, token_R), (None, token_R)):
        rows = x if tokens[0] is not None else draw(43, 64)
        (got,) = products.weight_grads(rows, (grad,), groups, *tokens)
        assert torch.equal(got, torch.zeros(2, 64, 32))
    taken = products.rows(x, groups, token_R).rows(token_R)
    assert torch.equal(taken.values(torch.float32), torch.zeros(43, 64))


@pytest.mark.parametrize("name", [*NAMES, "fp8"])
def test_where_only_shapes_are_asked_for_no_weight_is_rounded(name: str) -> None:
    layer, fakes = make_layer(experts={"hidden_dim": 96, "precision": name}), FakeTensorMode()
    p = layer.experts.compute_parameters()
    p = dataclasses.replace(p, **{field: fakes.from_tensor(value) for field in OPERANDS
                                  if (value := getattr(p, field)) is not None})
    with fakes:
        x, lengths_L = torch.empty(24, 16, requires_grad=True), torch.empty(8, dtype=torch.int64)
        y = strategies.get("kernels")(x, DeviceCounts(lengths_L, 24), p)
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert y.shape == grad.shape == x.shape


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["ffn", "gated_ffn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_is_off_by_no_more_than_stated(name: str, kind: str, dtype: torch.dtype) -> None:
    """Against the same layer in float64; parameters and gradients keep their dtype."""
    torch.manual_seed(0)
    layer = make_layer("loop", experts={"hidden_dim": 96, "compute": "loop", "kind": kind,
                                        "precision": name}).to(dtype)
    truth = copy.deepcopy(layer).double()
    truth.experts.config = dataclasses.replace(truth.experts.config, precision="ieee")
    x, direction = draw(256, 16).to(dtype), draw(256, 16, seed=1).to(dtype)
    grads = []
    for mine, kept in ((layer, dtype), (truth, torch.float64)):
        at = x.to(kept).requires_grad_()
        y = mine(at).output
        parameters = dict(mine.experts.named_parameters())
        made = torch.autograd.grad((y * direction.to(kept)).sum(), [at, *parameters.values()])
        assert {y.dtype, *(g.dtype for g in made)} == {kept}
        grads.append({"output": y.detach(), **dict(zip(["input", *parameters], made, strict=True))})
    off = {what: float((got.double() - grads[1][what]).norm() / grads[1][what].norm())
           for what, got in grads[0].items()}
    assert all(each < OFF[name][1] for each in off.values()), off
    assert off["output"] > OFF[name][1] / 10  # it is that format


needs_torchs = pytest.mark.skipif(not hasattr(F, "scaled_grouped_mm"), reason="new in torch 2.10")


@needs_torchs
def test_torch_has_the_stand_ins_signature() -> None:
    from tests.kernels.fake_scaled_grouped_mm import scaled_grouped_mm

    assert list(inspect.signature(F.scaled_grouped_mm).parameters) == list(
        inspect.signature(scaled_grouped_mm).parameters)


@needs_torchs
@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("lengths", [[130, 0, 1, 300], [0, 3, 0], [128, 128]])
def test_the_call_of_torchs_product(name: str, on_device: bool, lengths: list[int],
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, strides, scales in tiles and sums per group, as the stand-in reads them."""
    from tests.kernels.fake_scaled_grouped_mm import scaled_grouped_mm

    monkeypatch.setattr(F, "scaled_grouped_mm", scaled_grouped_mm)
    rows = sum(lengths) + 7 * on_device
    counts = DeviceCounts(torch.tensor(lengths), rows) if on_device else RowCounts(lengths)
    groups, products, real = RowGroups(counts, CPU), BLOCK_PRODUCTS[name], sum(lengths)
    x, grad = draw(rows, 160).bfloat16(), draw(rows, 288, seed=1).bfloat16()
    token_R = torch.randperm(rows, generator=torch.Generator().manual_seed(2))
    weight = products.weight(draw(len(lengths), 160, 288, seed=3).bfloat16(), backward=False)
    b_LO = draw(len(lengths), 288, seed=4).bfloat16()
    for token in (None, token_R):
        args = (products.rows(x, groups, token), groups, weight.blocks, b_LO, token,
                torch.bfloat16)
        got, want = both("expert_matmul_blocks", *args)
        torch.testing.assert_close(got[:real], want[:real], rtol=2**-6, atol=2**-4)

    def weight_grads(name_of_op: str) -> Tensor:
        op = kernels.get("expert_weight_grad_blocks")
        monkeypatch.setattr("moe_plugin.kernels.block_products.expert_weight_grad_blocks",
                            op.implementation(name_of_op))
        return products.weight_grads(x, (grad,), groups, token_R, None)[0]

    torch.testing.assert_close(weight_grads("scaled_grouped_mm"), weight_grads("torch"),
                               rtol=2**-6, atol=2**-4)


@pytest.mark.parametrize("width", [128, 160])
def test_blocks_of_128_are_operands_of_the_fp8_product(width: int) -> None:
    groups, products = RowGroups(RowCounts([5, 0, 40]), CPU), BLOCK_PRODUCTS["fp8_blockwise"]
    weight = products.weight(draw(3, width, 200, seed=1), backward=True)
    token_R = torch.randint(-1, 30, (45,), generator=torch.Generator().manual_seed(2))
    for wide, blocks in ((width, weight.blocks), (200, weight.transpose(1, 2).blocks)):
        args = (products.rows(draw(30, wide), groups, token_R), groups, blocks,
                draw(3, blocks.codes.shape[1], seed=3), token_R, torch.float32)
        op = kernels.get("expert_matmul_blocks")
        got, want = (op.implementation(name)(*args) for name in ("fp8", "torch"))
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        assert op.why_not("fp8", *args) == "not on a GPU"
    grads = FORMATS["fp8_blockwise_hybrid"].grads(draw(30, 200))
    assert "e5m2" in op.why_not("fp8", grads, *args[1:])
    assert "blocks of 32" in op.why_not("fp8", quantize_mxfp8(draw(30, 200)), *args[1:])


def both(name: str, *args: object) -> tuple[Tensor, Tensor]:
    op = kernels.get(name)
    return tuple(op.implementation(each)(*args) for each in ("scaled_grouped_mm", "torch"))


@pytest.mark.parametrize("capability, build, torchs, why", [
    ((10, 0), "USE_MSLK=1", True, None),
    ((10, 0), "USE_FBGEMM_GENAI=1", True, None),
    ((9, 0), "USE_MSLK=1", True, "compute capability 9.0 has no block scales, which need 10.0"),
    ((10, 3), "USE_MSLK=1", True, "compute capability 10.3 has no block scales"),
    ((10, 0), "", True, "neither USE_MSLK nor USE_FBGEMM_GENAI"),
    ((10, 0), "USE_MSLK=1", False, "has no scaled_grouped_mm; torch 2.10 is needed"),
])
def test_where_torch_has_no_such_product(capability: tuple[int, int], build: str, torchs: bool,
                                         why: str | None,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.__config__, "show", lambda: build)
    monkeypatch.setattr(F, "scaled_grouped_mm", None, raising=False)
    if not torchs:
        monkeypatch.delattr(F, "scaled_grouped_mm")
    ask: Callable[..., str | None] = scaled_grouped.no_scaled_grouped_mm.__wrapped__
    got = ask(torch.device("cuda", 0))
    assert got is None if why is None else why in (got or "")
    assert ask(CPU) == "not on a GPU"


def test_what_torchs_product_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, x = RowGroups(RowCounts([4]), CPU), quantize_mxfp8(draw(4, 64))
    op, grad_op = kernels.get("expert_matmul_blocks"), kernels.get("expert_weight_grad_blocks")

    def why(outer: int, dtype: torch.dtype) -> list[str | None]:
        weight, grad = quantize_mxfp8(draw(1, outer, 64)), quantize_mxfp8(draw(outer, 32))
        return [op.why_not("scaled_grouped_mm", x, groups, weight, None, None, dtype),
                grad_op.why_not("scaled_grouped_mm", quantize_mxfp8(draw(64, 32)), grad, groups,
                                dtype)]

    assert why(64, torch.bfloat16) == ["not on a GPU"] * 2
    monkeypatch.setattr(scaled_grouped, "no_scaled_grouped_mm", lambda device: None)
    assert why(64, torch.bfloat16) == [None, None]
    assert why(64, torch.float32) == ["dtype torch.float32, but results are bfloat16"] * 2
    wide, grads = (FORMATS["fp8_blockwise_hybrid"].rows(draw(4, 64)), FORMATS["mxfp8_hybrid"].grads(
        draw(32, 32)))
    assert "blocks of 128" in op.why_not("scaled_grouped_mm", wide, groups, wide, None, None,
                                         torch.bfloat16)
    assert "e5m2" in grad_op.why_not("scaled_grouped_mm", quantize_mxfp8(draw(32, 32)), grads,
                                     groups, torch.bfloat16)
    assert why(48, torch.bfloat16) == ["widths (64, 48), which are not multiples of 32"] * 2
