"""Programs that move tensors between streams and tiers, small, each on a fake GPU of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from moe_plugin.comm import LocalComm
from moe_plugin.comm.exchange import FunctionExchange
from moe_plugin.comm.handles import start
from moe_plugin.dispatch.row_pages import PAGE, Pages
from tests.fake_gpu import mutants, stand_ins
from tests.fake_gpu.detector import Detector
from tests.fake_gpu.device import CountingDevice
from tests.fake_gpu.fake import install
from tests.fake_gpu.gpu import CUDA
from tests.fake_gpu.layers import WIDTH, copies, descend, stored, streamed, swapped
from tests.fake_gpu.mutants import changed


def prepare() -> Detector:
    """The fake GPU of this process, and what observes it."""
    torch.set_num_threads(1)
    detector = Detector()
    detector.gpu = install(None, detector)
    stand_ins.install()
    return detector


def found_by(detector: Detector, program: Callable[[], object]) -> list[str]:
    """What is found while a program runs, and after it has dropped everything."""
    detector.restart()
    torch.manual_seed(0)
    with CountingDevice():
        program()
        gc.collect()
        torch.ones(1, device=CUDA)  # what was freed is told with the next launch
    assert detector.launches, "nothing ran on the fake GPU"
    return [str(each) for each in detector.found]


def rows(tokens: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tokens, WIDTH, dtype=dtype).to(CUDA).requires_grad_()


def given_up() -> None:
    """An exchange for whose rows nobody waits, as where another one failed."""
    start(LocalComm(), FunctionExchange(lambda comm, x, send, recv: x + 1),
          torch.ones(4, device=CUDA))


def paged() -> None:
    """Pages of the host that are dropped while a kernel writes to them."""
    pages, x_N = Pages(1, 4, torch.empty(0, device=CUDA)), torch.ones(2 * PAGE, device=CUDA)
    pages.write(x_N, torch.full((), 2 * PAGE, device=CUDA))


def train(*layers: nn.Module, steps: int = 2, tokens: int = 6,
          step: Callable[[], object] | None = None) -> None:
    """Steps of layers that follow each other. step: changes their parameters after backward."""
    for _ in range(steps):
        x_TD = rows(tokens, next(layers[0].parameters()).dtype)
        loss = 0.0
        for layer in layers:
            out = layer(x_TD)
            x_TD = x_TD + out.output
            loss = loss + sum(out.losses.values())
        (x_TD.float().square().sum() + loss).backward()
        if step is None:
            descend(layers)
        else:
            step()


ALONE: dict[str, Callable[[], object]] = {
    "an exchange given up": given_up,
    "pages of the host": paged,
    **{name: partial(program, LocalComm()) for name, program in {
        "copies": copies,
        "activations swapped": partial(swapped, policies=("swap",) * 3),
        "activations by several policies": swapped,
        "weights streamed": streamed,
        "weights streamed, two blocks a segment": partial(streamed, segments=[2, 2]),
        "weights streamed, throttled, one stays": partial(streamed, throttle=1e9, resident=(1,)),
        "experts in host memory": stored,
        "experts in host memory, all in slots": partial(stored, slots=8),
        "experts in a file": partial(stored, store="disk"),
    }.items()},
}


def alone() -> dict[str, list[str]]:
    """What is found in each program of one rank, and in the package with each mutant."""
    detector = prepare()
    found = {name: found_by(detector, program) for name, program in ALONE.items()}
    for mutant in mutants.ALONE:
        with changed(mutant.function, mutant.old, mutant.new):
            found[str(mutant)] = found_by(detector, ALONE[mutant.program])
    return found
