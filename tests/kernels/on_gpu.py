"""Run on a machine with a GPU: every Triton kernel against its float64 reference there, the layer,
and its capture in a CUDA graph.

    python -m tests.kernels.on_gpu [--quick] [--list] [name ...]

A name is an operation, or `layer`: its host synchronisation, CUDA graph and torch.compile.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm import LocalComm
from moe_plugin.config import from_dict
from moe_plugin.kernels import RowGroups, kernels
from moe_plugin.layer import MoELayer
from tests.capture import replays
from tests.kernels.interpreted import TOLERANCE, check_result, check_same
from tests.kernels.problems import SHAPES, Shape, arguments, fresh

GPU = torch.device("cuda")
QUICK = ("plain", "tiles", "starving experts", "no tokens")
LARGE = Shape(4099, 1000, 61, 6, 712, skew=2.0, dropped=0.05)


def moved(value: Any) -> Any:
    """Arguments on the GPU."""
    if isinstance(value, RowGroups):
        return dataclasses.replace(value, device=GPU)
    if isinstance(value, tuple):
        return tuple(map(moved, value))
    return value.to(GPU) if isinstance(value, Tensor) else value


# argument that lies in pinned memory of the host: pages of `dispatch.stash_host_mib`
PINNED = {"write_pages": 3, "read_pages": 2}


def there(name: str, args: Sequence[Any]) -> list[Any]:
    """Arguments of their own on the GPU, pages of the host in pinned memory."""
    host = PINNED.get(name)
    return [a.cpu().clone().pin_memory() if number == host else moved(a)
            for number, a in enumerate(fresh(tuple(args)))]


def operations() -> list[str]:
    """Those with a Triton implementation."""
    return [e.name for e in kernels if "triton" in e.value.names()]


def check_kernels(names: list[str], quick: bool) -> None:
    """Forward kernels and gradients' kernels, awkward shapes and one large one, products of float32
    also in TF32; the same twice, bitwise.
    """
    shapes = {label: s for label, s in SHAPES.items() if not quick or label in QUICK}
    for name in names:
        kernel, done = kernels.get(name), 0
        refused: dict[str, int] = {}
        for label, shape in {**shapes, "large": LARGE}.items():
            for dtype in (torch.float32,) if name.startswith("route_") else TOLERANCE:
                for number, args in enumerate(arguments(name, shape, dtype)):
                    on_gpu = there(name, args)
                    why = kernel.why_not("triton", *on_gpu)
                    if why is not None:
                        refused[why] = refused.get(why, 0) + 1
                        continue
                    mine, again = there(name, args), kernel(*there(name, args))
                    got = kernel(*mine)
                    what = f"{name}, {label}, {dtype}, arguments {number}"
                    if name in PINNED:  # torch's operations take no tensors of two devices
                        check_result(name, got.cpu(), list(args), dtype, what)
                    else:
                        check_result(name, got, on_gpu, dtype, what)
                    check_same(got, again, what)
                    if name == "write_pages":
                        check_pages(mine[3], args, what)
                    done += 1
        print(name, done, *(f"refused: {why} ({n} times)" for why, n in refused.items()),
              flush=True)


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
    check_kernels([n for n in args.names if n != "layer"] if args.names else operations(),
                  args.quick)
    if not args.names or "layer" in args.names:
        for check in (check_syncs, check_graph, check_compile):
            check()


if __name__ == "__main__":
    main()
