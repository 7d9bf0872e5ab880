"""Wire formats of rows: error bounds, bytes, values that are not finite."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, Topology, Traffic, algorithms, run_simulated
from moe_plugin.comm.functional import all_to_all
from moe_plugin.config import from_dict
from moe_plugin.dispatch.wire import FORMATS, with_wire
from moe_plugin.kernels import kernels
from moe_plugin.kernels.fp8 import BLOCK
from tests.comm.exchanges import column, random_counts
from tests.seeds import seeded

pytestmark = pytest.mark.fast

WORLD = 4
PAIRS = Topology.uniform(WORLD, 2)

# times |x|, times the largest magnitude of x's row (fp8, mxfp8: of its block of 128 or 32)
BOUNDS = {"bf16": (2**-8, 0.0), "fp16": (2**-11, 2**-39), "fp8": (2**-4, 2**-18),
          "mxfp8": (2**-4, 2**-17)}


def allowed(name: str, x: torch.Tensor) -> torch.Tensor:
    """The stated bound, element by element."""
    relative, absolute = BOUNDS[name]
    size = x.double().abs()
    blocks = size.split({"fp8": BLOCK, "mxfp8": 32}.get(name, size.shape[1]), dim=1)
    return relative * size + absolute * torch.cat(
        [b.amax(1, keepdim=True).expand(b.shape) for b in blocks], dim=1)


def converted(name: str, x: torch.Tensor) -> torch.Tensor:
    """There and back."""
    form = FORMATS[name]
    return form.decode(*form.encode(x), dtype=x.dtype)


def test_every_wire_format_has_a_bound() -> None:
    assert set(BOUNDS) == set(FORMATS)


@pytest.mark.parametrize("name", ["fp16", "fp8", "mxfp8"])
@given(exponents=st.lists(st.integers(-80, 100), min_size=1, max_size=5), width=st.integers(1, 300),
       seed=st.integers(0, 999))
@settings(deadline=None, max_examples=60)
def test_error_bound_of_scaled_formats(name: str, exponents: list[int], width: int,
                                       seed: int) -> None:
    """Rows of very different sizes, elements within a row as well."""
    g = torch.Generator().manual_seed(seed)
    shape = len(exponents), width
    x = torch.randn(shape, generator=g) * 2.0**(-torch.rand(shape, generator=g) *
                                                30) * 2.0**torch.tensor(exponents)[:, None]
    assert ((converted(name, x).double() - x.double()).abs() <= allowed(name, x)).all()


def test_fp8_scales_blocks_of_a_row_apart() -> None:
    """A large element costs only its own block's small ones their bits; all of e4m3's range is
    used.
    """
    x = torch.full((2, 300), 1e-6)
    x[0, 5] = 1000.0
    got = converted("fp8", x)
    assert (got[0, :BLOCK] - x[0, :BLOCK]).abs().max() > 2**-4 * 1e-6
    torch.testing.assert_close(got[0, BLOCK:], x[0, BLOCK:], rtol=2**-4, atol=0)
    assert float(FORMATS["fp8"].encode(x)[0].float().abs().max()) == 448


@pytest.mark.parametrize("values", [[0.0, 2.0**-149, 2.0**-140], [2.0**-130, -(2.0**-126), 0.0],
                                    [2.0**127.5, -3e38, 1e30], [0.0, 0.0, 0.0]])
def test_fp8_at_the_edges_stays_finite(values: list[float]) -> None:
    got = converted("fp8", torch.tensor([values]))
    assert torch.isfinite(got).all() and (got - torch.tensor([values])).abs().max() <= max(
        abs(v) for v in values)
    assert all(g == 0 for g, v in zip(got[0].tolist(), values, strict=True) if v == 0)


def test_fp8_goes_through_the_kernel(own_entries: None) -> None:
    """`quantize_fp8` and `dequantize_fp8` of the registry do the work, so a GPU's rows meet the
    Triton kernel.
    """
    called = []
    for name in ("quantize_fp8", "dequantize_fp8"):
        reference = kernels.get(name).implementation("torch")
        kernels.get(name).add("spy", why_not=lambda *_: None)(
            lambda *args, name=name, fn=reference: called.append(name) or fn(*args))
    x = torch.randn(6, 200)
    run_simulated(1, lambda comm: with_wire(algorithms.get("linear"), "fp8")(comm, x))
    assert called == ["quantize_fp8", "dequantize_fp8"]


@pytest.mark.parametrize("wire", sorted(FORMATS))
@pytest.mark.parametrize("name", ["linear", "2dh"])
def test_rows_through_a_wire_format(name: str, wire: str) -> None:
    counts, traffic = random_counts(WORLD, 3, zeros=0.0), Traffic()

    def rank(comm: Comm) -> float:
        g = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(sum(counts[comm.rank]), 64, generator=g).requires_grad_()
        args = (counts[comm.rank], column(counts, comm.rank))
        got = all_to_all(x, comm, with_wire(algorithms.get(name), wire), *args)
        want = algorithms.get("native")(comm, x.detach(), *args)
        assert ((got - want).abs() <= allowed(wire, want)).all()
        got.sum().backward()
        # ones pass exactly, back through the same wire
        assert torch.equal(x.grad, torch.ones_like(x))
        ints = torch.arange(WORLD)
        assert torch.equal(
            with_wire(algorithms.get(name), wire)(comm, ints),
            algorithms.get("native")(comm, ints))
        return 0.0

    run_simulated(WORLD, rank, topology=PAIRS, traffic=traffic)


def test_bytes_on_the_wire() -> None:
    """64 floats of 4 bytes become 2 bytes each, or 1; and a scale of one byte a row (fp16), four
    bytes a block (fp8) or one (mxfp8).
    """
    for wire, per_row in [("none", 256), ("bf16", 128), ("fp16", 129), ("fp8", 68), ("mxfp8", 66)]:
        traffic = Traffic()
        exchange = with_wire(algorithms.get("linear"), wire)
        run_simulated(2, partial(exchange, x=torch.ones(6, 64)), traffic=traffic)
        assert sum(traffic.bytes.values()) == 2 * 3 * per_row


@pytest.mark.parametrize(("dtype", "width", "smaller"), [(torch.float32, 1, False),
                                                         (torch.float32, 2, True),
                                                         (torch.bfloat16, 4, False),
                                                         (torch.bfloat16, 5, True),
                                                         (torch.bfloat16, 130, True)])
def test_fp8_travels_only_where_it_is_smaller(dtype: torch.dtype, width: int,
                                              smaller: bool) -> None:
    traffic, plain = Traffic(), Traffic()
    for wire, seen in (("fp8", traffic), ("none", plain)):
        exchange = with_wire(algorithms.get("linear"), wire)
        run_simulated(2, partial(exchange, x=torch.ones(6, width, dtype=dtype)), traffic=seen)
    assert (sum(traffic.bytes.values()) < sum(plain.bytes.values())) == smaller


@pytest.mark.parametrize("pieces", [1, 2])
def test_each_way_has_its_own_format(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows to experts and gradients of their results in one format, whose rows are those that it
    is given; the others as they are.
    """
    seen: list[torch.Tensor] = []
    form = FORMATS["mxfp8"]
    monkeypatch.setitem(FORMATS, "mxfp8", replace(
        form, encode=lambda x: seen.append(x.clone()) or form.encode(x)))
    config = from_dict({
        "model_dim": 32, "num_experts": 4, "router": {"top_k": 1},
        "comm": {"wire": "mxfp8", "wire_back": "none"}, "parallel": {"d": pieces, "r": 1}})
    x_TD, direction_TD = (torch.randn(6, 32, generator=torch.Generator().manual_seed(seed))
                          for seed in range(2))

    def rank(comm: Comm) -> torch.Tensor:
        with seeded(2):
            layer = MoELayer(config, comm)
        y_TD = layer(x_TD.clone().requires_grad_()).output
        comm.barrier()
        forward = list(seen)
        comm.barrier()
        seen.clear()
        comm.barrier()
        y_TD.backward(direction_TD)
        return torch.cat(forward)

    forward_RD = run_simulated(2, rank)[0]
    backward_RD = torch.cat(seen)
    assert forward_RD.shape == backward_RD.shape == (12, 32)
    assert all((row == x_TD).all(1).any() for row in forward_RD)
    towards = torch.nn.functional.cosine_similarity(
        backward_RD[:, None], direction_TD[None], dim=-1)
    torch.testing.assert_close(towards.amax(1), torch.ones(12))


@pytest.mark.parametrize("wire", sorted(FORMATS))
def test_what_is_not_finite_stays_so(wire: str) -> None:
    def rank(comm: Comm) -> torch.Tensor:
        x = torch.ones(2, 4)
        x[0, 1], x[1, 2] = float("inf"), float("nan")
        return with_wire(algorithms.get("linear"), wire)(comm, x)

    for rows in run_simulated(2, rank):
        assert not torch.isfinite(rows).all(1).any()


def test_unknown_wire_format() -> None:
    with pytest.raises(ValueError,
                       match="format 'int4'. Known formats: none, bf16, fp16, fp8, mxfp8"):
        with_wire(algorithms.get("linear"), "int4")
