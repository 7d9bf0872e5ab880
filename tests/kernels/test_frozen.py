"""Formats of frozen weights: codes and values of other libraries, and the memory of products."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_plugin import MoEBlock
from moe_plugin.hosts.plain.adapters import add_lora, freeze_experts
from moe_plugin.kernels import RowGroups
from moe_plugin.kernels import frozen as module
from moe_plugin.kernels.cpu import frozen as compiled
from moe_plugin.kernels.cpu.native import build
from moe_plugin.kernels.frozen import (
    FROZEN_FORMATS,
    FrozenWeight,
    column_squares,
    frozen_matmul,
    left_product,
    quantized,
)
from moe_plugin.kernels.frozen_products import expert_matmul_frozen
from moe_plugin.records import RowCounts

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def weight_of(parts: tuple[Tensor, ...], format: str) -> FrozenWeight:
    return FrozenWeight(format, tuple(part[None] for part in parts), torch.float32)


def matrix(outer: int, inner: int) -> Tensor:
    g = torch.Generator().manual_seed(outer)
    return torch.randn(outer, inner, generator=g) * torch.rand(outer, 1, generator=g)


@pytest.mark.parametrize(("outer", "inner"), [(96, 128), (33, 64), (300, 256)])
def test_nf4_is_that_of_bitsandbytes(outer: int, inner: int,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    # bitsandbytes would take the checkout's folder `kernels` for a package of that name
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    theirs = pytest.importorskip("bitsandbytes.functional")
    w = matrix(outer, inner)
    w[0, :64] = 0
    codes, state = theirs.quantize_4bit(w, blocksize=64, quant_type="nf4")
    parts = quantized(w, "nf4")
    assert torch.equal(parts[0].flatten(), codes.flatten())
    assert torch.equal(parts[1].view(torch.float32).flatten(), state.absmax)
    assert torch.equal(weight_of(parts, "nf4").decoded(0, slice(0, outer)),
                       theirs.dequantize_4bit(codes, state))
    codes, state = theirs.quantize_4bit(w, blocksize=64, quant_type="nf4",
                                        compress_statistics=True)
    parts = quantized(w, "nf4_double")
    numbers = parts[2].view(torch.float32)
    assert torch.equal(parts[0].flatten(), codes.flatten())
    assert torch.equal(numbers[:-1], state.state2.absmax) and numbers[-1] == state.offset
    # its table of the CPU rounds few scales to the second nearest number
    steps = parts[1].flatten().int() - state.absmax.int()
    assert steps.abs().max() <= 1 and (steps != 0).float().mean() < 0.02
    given = codes.view(outer, -1), state.absmax.view(outer, -1), parts[2]
    assert torch.equal(weight_of(given, "nf4_double").decoded(0, slice(0, outer)),
                       theirs.dequantize_4bit(codes, state))


def test_mxfp4_is_that_of_transformers() -> None:
    theirs = pytest.importorskip("transformers.integrations.mxfp4")
    g = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 24, 3, 16), dtype=torch.uint8, generator=g)
    scales = torch.randint(1, 200, (2, 24, 3), dtype=torch.uint8, generator=g)
    want = theirs.convert_moe_packed_tensors(blocks, scales)
    weight = FrozenWeight("mxfp4", (blocks.flatten(2), scales), torch.bfloat16)
    for expert in range(2):
        got = weight.decoded(expert, slice(0, 24))
        assert torch.equal(got.T.bfloat16(), want[expert])


@pytest.mark.fast
def test_mxfp4_codes_are_nearest_and_never_saturate() -> None:
    w = matrix(40, 64)
    codes, scales = quantized(w, "mxfp4")
    for o, i in ((0, 0), (3, 7), (17, 33), (39, 63)):
        scale = 2.0**(int(scales[o, i // 32]) - 127)
        block = w[o, i // 32 * 32:i // 32 * 32 + 32].abs().max().item()
        assert block <= 6 * scale and block > 3 * scale
        code = int(codes[o, i // 2]) >> 4 * (i % 2) & 15
        value = E2M1[code & 7] * scale * (-1 if code > 7 else 1)
        assert abs(value - w[o, i]) <= min(abs(n * s * scale - w[o, i]) for n in E2M1
                                           for s in (1, -1)) + 1e-7


@pytest.mark.fast
@pytest.mark.parametrize("inner", [128, 200])
def test_fp8_and_int8_by_hand(inner: int) -> None:
    w = matrix(150, inner)
    got = weight_of(quantized(w, "fp8"), "fp8").decoded(0, slice(0, 150))
    for o in (slice(0, 128), slice(128, 150)):
        for i in (slice(0, 128), slice(128, inner)):
            part = w[o, i]
            scale = part.abs().max() / 448 if part.numel() else torch.ones(())
            assert torch.equal(got[o, i], (part / scale).to(torch.float8_e4m3fn).float() * scale)
    got = weight_of(quantized(w, "int8"), "int8").decoded(0, slice(0, 150))
    scale = w.abs().amax(1, keepdim=True) / 127
    assert torch.equal(got, (w / scale).round() * scale)


@pytest.mark.fast
@pytest.mark.parametrize("format", FROZEN_FORMATS)
def test_tiles_products_and_gradients(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that begin inside of a block, experts without rows, and a second derivative."""
    monkeypatch.setattr(module, "TILE", 7 * 128)
    w = torch.stack([matrix(150, 128), matrix(150, 128).flip(0), matrix(150, 128) * 3])
    parts = [quantized(each, format) for each in w]
    weight = FrozenWeight(format, tuple(map(torch.stack, zip(*parts, strict=True))),
                          torch.float64)
    assert weight.shape == (3, 128, 150) and not weight.is_meta
    whole = torch.stack([weight.decoded(e, slice(0, 150)) for e in range(3)]).mT.double()
    g = torch.Generator().manual_seed(1)
    x = torch.randn(9, 128, dtype=torch.float64, generator=g).requires_grad_()
    bias = torch.randn(3, 150, dtype=torch.float64, generator=g)
    got = frozen_matmul(x, RowCounts([4, 0, 5]), weight, bias)
    want = torch.cat([x[:4] @ whole[0] + bias[0], x[4:] @ whole[2] + bias[2]])
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0] for y in (got, want)]
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(*(torch.autograd.grad(one.square().sum(), x)[0] for one in grads))
    torch.testing.assert_close(column_squares(weight, torch.float64), whole.square().sum(1))
    a = torch.randn(3, 2, 128, dtype=torch.float64, generator=g)
    torch.testing.assert_close(left_product(a, weight), a @ whole)
    low = frozen_matmul(x.bfloat16(), RowCounts([4, 0, 5]), weight, None)
    assert low.dtype == torch.bfloat16
    low.sum().backward()
    torch.testing.assert_close(x.grad, torch.cat([
        torch.ones(4, 150).double() @ whole[0].bfloat16().double().T,
        torch.ones(5, 150).double() @ whole[2].bfloat16().double().T]), rtol=0.03, atol=0.3)


@pytest.fixture(params=["AVX512", "AVX2"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Compiled for this processor, and for one with fewer instructions and without AMX."""
    here, why = torch.backends.cpu.get_cpu_capability(), compiled.why_not()
    if why is not None or request.param == "AVX512" != here:
        pytest.skip(why or f"this processor has {here}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    caches: Any = build.library, compiled.compiled_functions
    for cached in caches:
        cached.cache_clear()
    yield request.param
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("format", FROZEN_FORMATS)
def test_compiled_functions_have_the_values_of_torch(
        format: str, made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that begin anywhere in a buffer, a code of each kind, experts without rows, and rows
    that fill tiles and do not. Widths of 352 and 200 end inside of a panel or of a tile.
    """
    inner = 384 if format in ("nf4", "nf4_double") else 352 if format == "mxfp4" else 200
    for outer, inner in ((352, 384), (150, inner)):
        parts = [quantized(matrix(outer, inner) * size, format) for size in (1, 3, 0.1)]
        stacked = [torch.stack(part) for part in zip(*parts, strict=True)]
        stacked[0][0, 0, :128] = torch.arange(128)  # also e4m3's NaN
        stacked[0][0, 1, :128] = torch.arange(128, 256)
        buffers = [torch.empty(part.numel() + 1, dtype=torch.uint8) for part in stacked]
        for buffer, part in zip(buffers, stacked, strict=True):
            buffer[1:] = part.flatten()
        weight = FrozenWeight(format, tuple(buffer[1:].view(part.shape) for buffer, part in zip(
            buffers, stacked, strict=True)), torch.float32)
        g = torch.Generator().manual_seed(2)
        counts = RowCounts([37, 0, 16])
        rows = {back: torch.randn(53, outer if back else inner, generator=g).bfloat16()
                for back in (False, True)}

        def values() -> list[Tensor]:
            return [weight.decoded(e, slice(3, outer - 1), dtype)
                    for e in range(3) for dtype in (torch.float32, torch.bfloat16, torch.float64)]

        def products() -> list[Tensor]:
            return [expert_matmul_frozen(x, RowGroups(counts, x.device), weight, back)
                    for back, x in rows.items()]

        found = values(), products()
        multiplied = compiled.multiply(rows[True], RowGroups(counts, torch.device("cpu")), weight,
                                       True)
        assert (multiplied is not None) == (made == "AVX512" and outer % 32 == inner % 32 == 0
                                            and compiled.why_not_multiply() is None)
        with monkeypatch.context() as patched:
            for name in ("decode", "multiply"):
                patched.setattr(compiled, name, lambda *_: None)
            for got, want in zip(found[0], values(), strict=True):
                assert torch.equal(got.nan_to_num(1e9), want.nan_to_num(1e9))
            for got, want in zip(found[1], products(), strict=True):
                torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-6, equal_nan=True)


class Largest(TorchDispatchMode):
    """The most elements of a tensor in memory that an operation returned, without views of others.
    """

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.most, self.known = 0, known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, Tensor) and not value.is_meta and (
                    value.untyped_storage().data_ptr() not in self.known):
                self.most = max(self.most, value.numel())
        return made


@pytest.mark.fast
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("format", FROZEN_FORMATS)
def test_no_decoded_copy_of_a_weight_exists(format: str, dora: bool,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    tile, rows = 4096, 8
    monkeypatch.setattr(module, "TILE", tile)
    block = MoEBlock(128, num_experts=4, expert_hidden_dim=256, expert_kind="gated_ffn")
    freeze_experts(block, format)
    add_lora(block, rank=2, use_dora=dora)
    known = {p.untyped_storage().data_ptr() for p in block.parameters()}
    x = torch.randn(rows // 2, 128)
    with Largest(known) as seen:
        block(x).sum().backward()
    # two rows for each token; gate and up of a row are together in the adapter's product
    assert tile <= seen.most <= max(tile, rows * 2 * 256) < 128 * 256


@pytest.mark.fast
@pytest.mark.parametrize("format", FROZEN_FORMATS)
def test_slots_have_codes_and_codes_in_a_file_are_never_all_in_memory(
        format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tile, rows, experts = 2048, 8, 16
    monkeypatch.setattr(module, "TILE", tile)
    shapes = [*FROZEN_FORMATS[format].shapes(128, 256), *FROZEN_FORMATS[format].shapes(256, 128)]
    size = sum(map(math.prod, shapes))
    block = MoEBlock(128, num_experts=experts, expert_hidden_dim=256, experts={
        "store": "disk", "store_path": str(tmp_path), "cache": str(size)})
    x = torch.randn(rows // 2, 128)
    with Largest(set()) as seen:
        freeze_experts(block, format)
    assert 128 * 256 <= seen.most < 4 * 128 * 256  # one expert is rounded at a time
    add_lora(block, rank=2)
    assert not any(p.dtype == torch.uint8 for p in block.parameters())
    store = block.moe.experts.store
    assert store.cache.spec.expert_bytes == size < 128 * 256 * (1.3 if "4" in format else 2.1)
    with Largest(set()) as seen:
        block(x).sum().backward()
    assert store.cache.slots == 1 and store.counters.misses > 1
    assert tile <= seen.most <= max(tile, rows * 2 * 256, *map(math.prod, shapes))


@pytest.mark.fast
def test_what_cannot_be_stored_is_refused() -> None:
    for format, width, said in (("nf4", 72, "72 inputs, which are not a multiple of 64"),
                                ("mxfp4", 40, "40 inputs, which are not a multiple of 32")):
        block = MoEBlock(width, num_experts=2, expert_hidden_dim=64)
        with pytest.raises(ValueError, match=f"format={format} cannot store w_in_LDF.*{said}.*"
                           "Use the format .*fp8 or int8, or other widths"):
            freeze_experts(block, format)
        assert block.moe.experts.w_in_LDF.requires_grad  # nothing has changed
        freeze_experts(block, "int8")
        assert block(torch.randn(3, width)).isfinite().all()
    block = MoEBlock(64, num_experts=2, expert_hidden_dim=64)
    with torch.no_grad():
        block.moe.experts.w_in_LDF[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="infinity or NaN.*format nf4"):
        freeze_experts(block)
