"""Compiled passes: against float64, the same for any number of threads and processor; and what
happens where nothing can be compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_plugin import MoELayer
from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.kernels.cpu import expert_ffn as fused
from moe_plugin.kernels.cpu import products
from moe_plugin.kernels.cpu.native import build, functions
from tests.kernels.compiled_or_not import compiled

WHY_NOT = functions.why_not("gelu")
needs_compiler = pytest.mark.skipif(WHY_NOT is not None, reason=f"by torch: {WHY_NOT}")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["AVX512", "AVX2"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Compiled for this processor, and for one with fewer instructions."""
    here = torch.backends.cpu.get_cpu_capability()
    if WHY_NOT is not None or (request.param == "AVX512" != here):
        pytest.skip(WHY_NOT or f"this processor has {here}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    forget()
    yield request.param
    forget()


def forget() -> None:
    for cached in (build.library, functions.compiled_passes, functions.compiled_scores,
                   functions.compiled_sums, products.side_by_side):
        cached.cache_clear()


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int, size: float = 3.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def point(activation: str, h: Tensor) -> tuple[Tensor, Tensor]:
    """act(h) and act'(h) in float64."""
    wide = h.double().requires_grad_()
    value = ACTIVATIONS[activation].value(wide)
    return value.detach(), torch.autograd.grad(value.sum(), wide)[0]


def near(got: Tensor, want: Tensor, roundings: int = 1) -> None:
    """Relative, and for results of float32 sums or polynomials absolute by the largest."""
    eps = torch.finfo(got.dtype).eps
    most = want.abs().max().item() if want.numel() else 1.0
    torch.testing.assert_close(got.double(), want, rtol=roundings * max(eps / 2, 2e-6) * 1.01,
                               atol=most * max(2e-6, eps * 1e-2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows,width", [(5, 7), (1, 1), (3, 1024), (2, 2500), (0, 4), (40, 96)])
def test_passes_are_the_activation(made: str, activation: str, dtype: torch.dtype, rows: int,
                                   width: int) -> None:
    shape = rows, width
    h, up, grad = (draw(shape, dtype, seed) for seed in range(3))
    scale, run = draw((rows,), torch.float32, 3).abs(), functions.passes(h, activation)
    assert run is not None
    value, slope = point(activation, h)
    wide_up, wide_grad, wide_scale = up.double(), grad.double(), scale.double()[:, None]

    after, dots, kept = torch.empty_like(h), torch.empty(rows), h.clone()
    run.forward(h, None, after, False)
    near(after, value)
    run.forward(kept, None, after, True)
    near(after, value)
    near(kept, slope)
    into = grad.clone()
    run.backward(into, kept, None, after, None, scale, dots, True)
    near(into, wide_grad * slope * wide_scale, 2)
    near(dots, (wide_grad * after.double()).sum(1))

    again, into = torch.empty_like(h), grad.clone()
    run.backward(into, h, None, again, None, scale, dots, False)
    assert torch.equal(again, after)
    near(into, wide_grad * slope * wide_scale)
    near(dots, (wide_grad * again.double()).sum(1))

    run.forward(h, up, after, False)
    near(after, value * wide_up)
    into, grad_up = grad.clone(), torch.empty_like(h)
    run.backward(into, h, up, again, grad_up, None, None, False)
    assert torch.equal(again, after)
    near(into, wide_grad * wide_up * slope)
    near(grad_up, wide_grad * value)
    run.backward(into := grad.clone(), h, up, again, grad_up, scale, dots, False)
    near(into, wide_grad * wide_up * slope * wide_scale)
    near(grad_up, wide_grad * value * wide_scale)
    near(dots, (wide_grad * again.double()).sum(1))

    run.scale(into := grad.clone(), scale)
    near(into, wide_grad * wide_scale)


@needs_compiler
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@given(st.floats(-30, 30, width=32))
@settings(max_examples=200)
def test_small_results_keep_their_digits(activation: str, x: float) -> None:
    """Where torch's float32 loses them: its gelu of -5 is off by a tenth."""
    h = torch.tensor([[x]])
    functions.passes(h, activation).forward(h, None, after := torch.empty_like(h), False)
    wide = torch.tensor(x, dtype=torch.float64)
    if activation == "gelu":
        want = wide * torch.special.erfc(-wide / 2**0.5) / 2
    else:
        v = wide if activation == "silu" else (8 / torch.pi)**0.5 * (wide + 0.044715 * wide**3)
        want = wide * torch.sigmoid(v)
    # exp(-|v|) is off by the float32 error of v
    torch.testing.assert_close(after.double()[0, 0], want, rtol=2e-5, atol=1e-30)


@needs_compiler
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_values(activation: str, dtype: torch.dtype) -> None:
    large = [3e38, 1e30, 1e10, 100.0]
    values = [float("nan"), float("inf"), *large, 0.0, -0.0, *(-x for x in large), float("-inf")]
    h = torch.tensor([values], dtype=dtype)
    kept, after = h.clone(), torch.empty_like(h)
    functions.passes(h, activation).forward(kept, None, after, True)
    value, slope = point(activation, h)
    most = torch.finfo(dtype).max
    value, slope = (torch.where(x > most, torch.inf, x) for x in (value, slope))
    assert after[0, 0].isnan() and after[0, 1] == torch.inf and abs(after[0, -1]) < 1e-6
    for got, want in ((after, value), (kept, slope)):
        torch.testing.assert_close(got[0, 2:-1].double(), want[0, 2:-1], rtol=1e-2, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    h, grad = draw((300, 1100), dtype, 0), draw((300, 1100), dtype, 1)
    x, weight = draw((301, 1100), torch.bfloat16, 2), draw((6, 1100), torch.float32, 3)
    grad_TE = draw((301, 6), torch.float32, 4)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert functions.threads(h) == threads
        kept, into, after, dots = h.clone(), grad.clone(), torch.empty_like(h), torch.empty(300)
        run, router = functions.passes(h, "gelu"), functions.scores_of(x, weight)
        run.forward(kept, None, after, True)
        run.backward(into, kept, None, after, None, dots.clone().fill_(0.5), dots, True)
        found.append([kept, into, after, dots, router.scores(x, weight),
                      router.grad_tokens(grad_TE, weight), router.grad_weight(grad_TE, x)])
    for one, two, three in zip(*found, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def grads(layer: MoELayer, x_TD: Tensor, twice: bool = False) -> list[Tensor]:
    x_TD = x_TD.clone().requires_grad_()
    found = [x_TD, *layer.parameters()]
    out = layer(x_TD).output
    loss = out.float().square().sum()
    first = torch.autograd.grad(loss, found, retain_graph=twice)
    if twice:
        for one, other in zip(torch.autograd.grad(loss, found), first, strict=True):
            assert torch.equal(one, other)
    return [out.detach(), *first]


@needs_compiler
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["ffn", "gated_ffn"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_layer_is_as_by_torch(kind: str, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = MoELayer(24, num_experts=5, top_k=2, experts={"kind": kind, "bias": bias}).to(dtype)
    x_TD = torch.randn(70, 24).to(dtype)
    mine = grads(layer, x_TD, twice=True)
    with compiled(False):
        theirs = grads(layer, x_TD)
    for one, other in zip(mine, theirs, strict=True):
        scale = other.abs().max().item() or 1.0
        torch.testing.assert_close(one / scale, other / scale, rtol=0.0,
                                   atol=10 * torch.finfo(dtype).eps)


needs_mkl = pytest.mark.skipif(products.why_one_by_one() is not None,
                               reason=f"one by one: {products.why_one_by_one()}")


@contextlib.contextmanager
def left_to_torch() -> Iterator[list[tuple[Any, ...]]]:
    """What is not done side by side, which is not done."""
    found: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "one_by_one", lambda *given: found.append(given))
        yield found


def lying(shape: tuple[int, int], by_row: bool, seed: int) -> Tensor:
    """A matrix whose lines are rows, or columns."""
    x = draw(shape if by_row else shape[::-1], torch.float32, seed)
    return x if by_row else x.t()


@needs_mkl
@pytest.mark.parametrize("by_row", [*itertools.product([True, False], repeat=3)], ids=str)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=7), st.integers(1, 30), st.integers(1, 30),
       st.sampled_from(["new", "added", "bias"]), st.integers(1, 3))
@settings(max_examples=25)
def test_products_side_by_side(by_row: tuple[bool, bool, bool], sizes: list[int], inner: int,
                               columns: int, base: str, threads: int) -> None:
    """Rows through their experts, and weights' gradients, which are sums over rows."""
    torch.set_num_threads(threads)
    rows, number = sum(sizes), len(sizes)
    x, y = (lying((rows, width), by_row[i], i) for i, width in ((0, inner), (2, columns)))
    w = [lying((inner, columns), by_row[1], 3 + i) for i in range(number)]
    grad = [lying((inner, columns), by_row[2], 13 + i) for i in range(number)]
    turned = lying((inner, rows), by_row[0], 1)
    by_sum = lying((rows, columns), by_row[1], 23)
    bias = draw((columns,), torch.float32, 8)
    for a_s, b_s, outs in ((x.split(sizes), w, y.split(sizes)),
                           (turned.split(sizes, 1), by_sum.split(sizes), grad)):
        bases = {"new": [None] * number, "added": outs, "bias": [bias] * number}[base]
        wanted = [a.double() @ b.double() + (0.0 if was is None else was.double())
                  for a, b, was in zip(a_s, b_s, bases, strict=True)]
        with left_to_torch() as left:
            products.side_by_side()(a_s, b_s, outs, bases)
        # a line of one value may look like one with gaps
        assert not left or 1 in {inner, columns, rows, *sizes}
        for out, want in zip(outs, wanted, strict=True) if not left else ():
            near(out, want, 20)


@needs_mkl
def test_products_one_by_one() -> None:
    """Where they cannot be side by side."""
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    for a_s, b_s, shape in (([x], [w], (4, 5)), ([x[None]] * 2, [w[None]] * 2, (1, 4, 5)),
                            ([x[:, ::2]] * 2, [w[:3]] * 2, (4, 5)),
                            ([x[:1].expand(2, 6)] * 2, [w] * 2, (2, 5)),
                            ([x, x.clone()], [w, w.t().contiguous().t()], (4, 5)),
                            ([x.as_strided((4, 6), (2, 1))] * 2, [w] * 2, (4, 5)),
                            ([x, x[None]], [w, w[None]], (4, 5))):
        outs = [torch.zeros(shape if a.dim() < 3 else (1, 4, 5)) for a in a_s]
        given = a_s, b_s, outs, [None] * len(a_s)
        with left_to_torch() as left:
            products.side_by_side()(*given)
        assert left == [given] and not any(map(torch.any, outs))
    for other in (x.double(), x.to("meta"), x.bfloat16()):
        assert not isinstance(products.products_of(other), products.SideBySide)
    assert isinstance(products.products_of(x), products.SideBySide)
    assert not isinstance(products.products_of(x, in_order=True), products.SideBySide)


@needs_mkl
def test_a_layer_computes_its_experts_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, several = [], products.side_by_side()

    def counted(*args: Any) -> None:
        several(*args)
        ran.append(len(args[0]))

    monkeypatch.setattr(products, "side_by_side", lambda: counted)
    layer = MoELayer(24, num_experts=5, top_k=2, experts={"kind": "gated_ffn"})
    with left_to_torch() as left:
        grads(layer, torch.randn(70, 24))
    assert not left and ran == [5] * 9  # three forward, their rows' and weights' gradients


@needs_compiler
def test_a_torch_without_mkl_multiplies_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert "another library" in products.why_one_by_one()
    assert not isinstance(products.products_of(torch.ones(1)), products.SideBySide)
    forget()


def test_what_is_computed_by_torch() -> None:
    """Other dtypes, and tensors that hold no values."""
    for dtype in (torch.float16, torch.float64):
        assert functions.passes(torch.ones(1, dtype=dtype), "gelu") is None
    with torch.device("meta"):
        assert functions.passes(torch.ones(1), "gelu") is None

    class Other(Tensor):
        pass

    assert functions.passes(torch.ones(1).as_subclass(Other), "gelu") is None
    x, weight = torch.ones(6, 6).bfloat16(), torch.ones(2, 6)
    assert WHY_NOT or functions.scores_of(x, weight) is not None
    for tokens, other in ((x.t(), weight), (x.float(), weight), (x, weight[:0]), (x, weight[:, :5]),
                          (x, torch.ones(functions.EXPERTS + 1, 6)), (x, weight.to("meta")),
                          (x, weight.as_subclass(Other)), (x.to("meta"), weight)):
        assert functions.scores_of(tokens, other) is None


def test_a_layer_without_memory_is_an_error() -> None:
    with torch.device("meta"):
        layer = MoELayer(8, num_experts=4).bfloat16()
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        layer(torch.randn(3, 8).bfloat16())


@needs_compiler
@pytest.mark.parametrize("kind", ["ffn", "gated_ffn"])
def test_saved_tensors_that_hooks_lay_out_anew(kind: str) -> None:
    torch.manual_seed(0)
    layer = MoELayer(24, num_experts=4, experts={"kind": kind}).float()
    x_TD = torch.randn(50, 24)
    wanted = grads(layer, x_TD)

    def turned(x: Tensor) -> Tensor:
        return x.t().contiguous().t() if x.dim() == 2 else x

    with torch.autograd.graph.saved_tensors_hooks(turned, lambda x: x):
        got = grads(layer, x_TD)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_other_processors_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "-mavx2" in build.processor_options("x86_64", "AVX2", {"avx512_bf16"})
    assert "-mavx512bf16" not in build.processor_options("x86_64", "AVX512", {"avx2"})
    assert "-mavx512bf16" in build.processor_options("x86_64", "AVX512", {"avx512_bf16"})
    for machine, capability in (("aarch64", "DEFAULT"), ("x86_64", "DEFAULT")):
        with pytest.raises(build.Unavailable, match=capability if machine == "x86_64" else machine):
            build.processor_options(machine, capability, set())
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(build.Unavailable, match="darwin"):
        build.processor_options("x86_64", "AVX2", set())


def test_the_compiler_is_cc_or_the_first_there_is(tmp_path: Path) -> None:
    for name in ("gcc", "clang"):
        script(tmp_path / name, "exit 0")
    path = str(tmp_path)
    assert build.compiler({"PATH": path}) == [f"{path}/gcc"]
    assert build.compiler({"PATH": path, "CC": "clang -O1"}) == [f"{path}/clang", "-O1"]
    for environment, said in (({"PATH": path, "CC": "icc"}, "CC='icc' was not found"),
                              ({"PATH": path, "CC": "gcc 'x"}, "is not a command"),
                              ({"PATH": f"{path}/none"}, "no C compiler was found")):
        with pytest.raises(build.Unavailable, match=said):
            build.compiler(environment)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user for whom nothing has been compiled."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    forget()
    yield tmp_path
    forget()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_torch_computes(home: Path, monkeypatch: pytest.MonkeyPatch,
                                           caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "CC='no-such-compiler' was not found" in functions.why_not("gelu") or WHY_NOT
    layer, x_TD = MoELayer(8, num_experts=4), torch.randn(6, 8)
    assert fused.passes(x_TD, "gelu") is None
    grads(layer, x_TD)
    grads(layer.bfloat16(), x_TD.bfloat16())
    assert not caplog.records and not list(home.rglob("*.so"))


@needs_compiler
def test_a_compiler_that_fails_is_named(home: Path, monkeypatch: pytest.MonkeyPatch,
                                        caplog: pytest.LogCaptureFixture) -> None:
    fails = script(home / "cc", "echo 'cannot do that' >&2; exit 3")
    monkeypatch.setenv("CC", fails)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert functions.passes(torch.ones(1), "gelu") is None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "passes.c" in said[0] and fails in said[0]
    assert "exit status 3" in said[0] and "cannot do that" in said[0]
    assert not list(home.rglob("*.so"))


@needs_compiler
def test_a_library_that_does_not_load_is_named(home: Path, monkeypatch: pytest.MonkeyPatch,
                                               caplog: pytest.LogCaptureFixture) -> None:
    # nothing that can be loaded is in the file after -o
    monkeypatch.setenv("CC", script(home / "cc", 'while [ "$1" != -o ]; do shift; done; '
                                                 'echo none > "$2"'))
    assert functions.passes(torch.ones(1), "silu") is None
    assert "cannot be compiled or loaded" in caplog.text
    assert not list(home.rglob("*.so"))


@needs_compiler
def test_a_damaged_library_is_made_again(home: Path) -> None:
    assert functions.passes(torch.ones(1), "gelu") is not None
    made = next(home.rglob("*.so"))
    made.rename(made.with_suffix(".old"))  # which this process has loaded
    made.write_bytes(b"")
    forget()
    assert functions.passes(torch.ones(1), "gelu") is not None
    assert made.stat().st_size > 0


@needs_compiler
def test_a_compiler_that_hangs_is_stopped(home: Path, monkeypatch: pytest.MonkeyPatch,
                                          caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(build, "TIMEOUT", 0.5)
    monkeypatch.setenv("CC", script(home / "cc", f"sleep 60 & echo $! > {home}/child; wait"))
    assert functions.passes(torch.ones(1), "gelu") is None
    assert "did not finish within 0.5 s" in caplog.text
    child = Path("/proc") / (home / "child").read_text().strip() / "stat"

    def ended() -> bool:
        try:
            return child.read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    deadline = time.monotonic() + 20  # the system takes a while to end what was killed
    while not ended() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended()


@needs_compiler
def test_a_user_without_a_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    assert "Could not determine home directory" in functions.why_not("gelu")


@needs_compiler
def test_compiled_once_for_all_processes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert functions.passes(torch.ones(1), "gelu") is not None
    made = list(home.rglob("*"))
    names = [path.name for path in made if path.is_file()]
    assert len(names) == 1 and names[0].startswith("passes-") and names[0].endswith(".so")
    forget()
    monkeypatch.setattr(build, "run_compiler", lambda command: pytest.fail("compiled again"))
    assert functions.passes(torch.ones(1), "gelu") is not None


@needs_compiler
def test_what_another_rank_could_compile_serves_one_that_could_not(
        home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert functions.passes(torch.ones(1), "gelu") is not None
    target = next(home.rglob("*.so"))
    content = target.read_bytes()
    target.unlink()
    forget()

    def too_late(command: list[str]) -> None:
        target.write_bytes(content)  # by another rank, meanwhile
        raise OSError("does not end")

    monkeypatch.setattr(build, "run_compiler", too_late)
    assert functions.passes(torch.ones(1), "gelu") is not None


@needs_compiler
def test_a_torch_without_openmp(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "THREADS", ("no_such_function",))
    assert "does not use OpenMP" in functions.why_not("gelu")


@needs_compiler
def test_processes_that_compile_at_once(tmp_path: Path) -> None:
    code = ("import torch; from moe_plugin.kernels.cpu.native.functions import passes; "
            "p = passes(torch.ones(1, 4), 'gelu'); h = torch.ones(1, 4); p.forward(h, None, h, 0); "
            "print(float(h[0, 0]))")
    environment = {**os.environ, "HOME": str(tmp_path)}
    ranks = [subprocess.Popen([sys.executable, "-c", code], env=environment, text=True,
                              stdout=subprocess.PIPE) for _ in range(3)]
    assert [round(float(rank.communicate(timeout=300)[0]), 5) for rank in ranks] == [0.84134] * 3
    assert len(list(tmp_path.rglob("*.so"))) == 1


def test_warnings_of_compilers(tmp_path: Path) -> None:
    """None, with the strictest settings; from every compiler that is here."""
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    for source, defines in (("passes.c", ["-DACTIVATION=gelu"]), ("router.c", []),
                            ("products.c", [])):
        done = subprocess.run(
            [*build.compiler_command([]), *defines, "-Wall", "-Wextra", "-Werror",
             "-Wno-unused-function", "-o", str(tmp_path / "made.so"), str(build.SOURCES / source)],
            capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert ctypes.CDLL(str(tmp_path / "made.so")).connect_threads
