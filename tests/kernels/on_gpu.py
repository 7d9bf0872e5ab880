"""Run on a machine with a GPU: every Triton kernel against its float64 reference there, the layer,
and its capture in a CUDA graph.

    python -m tests.kernels.on_gpu [--quick] [--list] [name ...]

A name is an operation, or `layer`: its host synchronisation, CUDA graph and torch.compile.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm import LocalComm
from moe_plugin.config import from_dict
from moe_plugin.kernels import RowGroups, kernels
from moe_plugin.kernels.frozen import FrozenWeight
from moe_plugin.kernels.scores import linear_scores
from moe_plugin.layer import MoELayer
from tests.capture import replays
from tests.kernels.interpreted import TOLERANCE, check_result, check_same, otherwise
from tests.kernels.problems import SHAPES, Shape, arguments, fresh

GPU = torch.device("cuda")
QUICK = ("plain", "tiles", "starving experts", "no tokens")
LARGE = Shape(4099, 1000, 61, 6, 712, skew=2.0, dropped=0.05)


def moved(value: Any) -> Any:
    """Arguments on the GPU."""
    if isinstance(value, RowGroups):
        return dataclasses.replace(value, device=GPU)
    if isinstance(value, FrozenWeight):
        return dataclasses.replace(value, parts=moved(value.parts))
    if isinstance(value, tuple):
        return tuple(map(moved, value))
    return value.to(GPU) if isinstance(value, Tensor) else value


# argument that lies in pinned memory of the host: pages of `dispatch.stash_host_mib`
PINNED = {"write_pages": 3, "read_pages": 2}
# Hopper's matrix units keep about 14 bits of a sum of products of fp8 (DeepSeek-V3, section 3.3.2);
# measured at most 2.2e-4 of the largest value, where the interpreter is exact to float32
FP8_SUMS = 2**-11


def there(name: str, args: Sequence[Any]) -> list[Any]:
    """Arguments of their own on the GPU, pages of the host in pinned memory."""
    host = PINNED.get(name)
    return [a.cpu().clone().pin_memory() if number == host else moved(a)
            for number, a in enumerate(fresh(tuple(args)))]


def operations() -> list[str]:
    """Those with a Triton implementation."""
    return [e.name for e in kernels if "triton" in e.value.names()]


def check_kernels(names: list[str], quick: bool) -> int:
    """Forward kernels and gradients' kernels, awkward shapes and one large one, products of float32
    also in TF32; the same twice, bitwise. Returns how many failed; all are tried.
    """
    shapes = {label: s for label, s in SHAPES.items() if not quick or label in QUICK}
    failed = 0
    for name in names:
        kernel, done = kernels.get(name), 0
        refused: dict[str, int] = {}
        for label, shape in {**shapes, "large": LARGE}.items():
            for dtype in (torch.float32,) if name.startswith("route_") else TOLERANCE:
                for number, args in enumerate(arguments(name, shape, dtype)):
                    why = kernel.why_not("triton", *there(name, args))
                    if why is not None:
                        refused[why] = refused.get(why, 0) + 1
                        continue
                    what = f"{name}, {label}, {dtype}, arguments {number}"
                    try:
                        check_call(name, args, dtype, what)
                        done += 1
                    except Exception as error:  # noqa: BLE001 - all are tried
                        failed += 1
                        print(f"FAILED {what}: {type(error).__name__}: {str(error)[:1500]}",
                              flush=True)
        print(name, done, *(f"refused: {why} ({n} times)" for why, n in refused.items()),
              flush=True)
    return failed


def check_call(name: str, args: Sequence[Any], dtype: torch.dtype, what: str) -> None:
    """One call next to its reference, and bit for bit to one whose tiles have another schedule."""
    kernel, mine = kernels.get(name), there(name, args)
    again, got = kernel(*otherwise(there(name, args))), kernel(*mine)
    if name in PINNED:  # torch's operations take no tensors of two devices
        check_result(name, got.cpu(), list(args), dtype, what)
    else:
        check_result(name, got, there(name, args), dtype, what,
                     FP8_SUMS if name == "expert_matmul_fp8" else 0.0)
    check_same(got, again, what)
    if name == "write_pages":
        check_pages(mine[3], args, what)


def check_pages(host_SP: Tensor, args: Sequence[Any], what: str) -> None:
    """What was written to the host's pages, which no operation returns."""
    torch.cuda.synchronize()
    want = fresh(tuple(args))
    kernels.get("write_pages").implementation("torch")(*want)
    # the last slot is the reference's own, for runs that have none
    assert torch.equal(host_SP[:-1], want[3][:-1]), f"{what}: pages on the host"


def make_layer(**config: Any) -> MoELayer:
    """A bfloat16 layer on the GPU."""
    tree = {"model_dim": 256, "num_experts": 16, "experts": {"hidden_dim": 512}, **config}
    return MoELayer(from_dict(tree), LocalComm(), dtype=torch.bfloat16, device=GPU)


def check_graph() -> None:
    """Forward and backward captured once and replayed on new inputs give what eager gives: the
    padded layer and the dropless one whose loads the device alone knows.
    """
    for dispatch in ({"name": "padded", "capacity_factor": 1.25, "equal_tokens": True},
                     {"name": "bounded"}):
        layer = make_layer(dispatch=dispatch)
        x = torch.randn(1024, 256, device=GPU, dtype=torch.bfloat16)
        for pairs in replays(layer, x, 3):
            for mine, eager in pairs:
                assert torch.equal(mine, eager), f"{dispatch}: a replay differs from eager"
        print(f"{dispatch}: CUDA graph the same as eager, bitwise")


def check_syncs() -> None:
    """No host synchronisation on one rank: dropless, by counts of the host or of the device, and
    fixed slots, their number promised or not.
    """
    for dispatch in ({"name": "ragged"}, {"name": "bounded"},
                     {"name": "padded", "capacity_factor": 1.25},
                     {"name": "padded", "capacity_factor": 0.0},
                     {"name": "padded", "capacity_factor": 1.25, "equal_tokens": True}):
        layer, mask = make_layer(dispatch=dispatch), torch.rand(512, device=GPU) < 0.9
        x = torch.randn(512, 256, device=GPU, dtype=torch.bfloat16)
        layer(x, mask).output.sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x, mask).output.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        print(f"{dispatch}: no host synchronisation")


def check_scores() -> None:
    """Router logits of bfloat16 tokens and their gradients, next to float64: as exact as float32
    (up to 4.4e-6 on an H100, whose matrix units cut sums off), the tokens' gradient rounded once.
    """
    for weight_dtype in (torch.bfloat16, torch.float32):
        for experts in (8, 61, 256):
            x = torch.randn(4099, 1024, device=GPU).bfloat16().requires_grad_()
            w = (torch.randn(experts, 1024, device=GPU) / 32).to(weight_dtype).requires_grad_()
            grad = torch.randn(4099, experts, device=GPU)
            got = [linear_scores(x, w)]
            got += torch.autograd.grad(got[0], (x, w), grad)
            want = [x.double() @ w.double().t(), grad.double() @ w.double(),
                    grad.double().t() @ x.double()]
            for mine, exact, bound in zip(got, want, (
                    1e-5, 2**-9, 2**-9 if weight_dtype == torch.bfloat16 else 1e-5), strict=True):
                off = float((mine.double() - exact).norm() / exact.norm())
                assert off <= bound, f"scores of {experts} experts, {weight_dtype}: off by {off}"
    print("router logits: as exact as float32")


def check_compile() -> None:
    """torch.compile with inductor, one graph."""
    layer = make_layer(dispatch={"name": "padded", "capacity_factor": 1.25, "equal_tokens": True})
    compiled = torch.compile(lambda v: layer(v).output, fullgraph=True)
    x = torch.randn(512, 256, device=GPU, dtype=torch.bfloat16)
    torch.testing.assert_close(compiled(x), layer(x).output, rtol=2e-2, atol=2e-2)
    print("torch.compile: one graph, agrees")


def main() -> None:
    """Check what the command line names; everything without names."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("names", nargs="*")
    p.add_argument("--quick", action="store_true", help="some shapes alone")
    p.add_argument("--list", action="store_true", help="print the names and do nothing")
    args = p.parse_args()
    if args.list:
        print(*operations(), "layer", sep="\n")
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    failed = check_kernels([n for n in args.names if n != "layer"] if args.names else operations(),
                           args.quick)
    if not args.names or "layer" in args.names:
        for check in (check_scores, check_syncs, check_graph, check_compile):
            try:
                check()
            except Exception:  # noqa: BLE001
                traceback.print_exc()
                failed += 1
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
