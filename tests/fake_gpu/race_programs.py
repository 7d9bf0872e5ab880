"""Programs that move tensors between streams and tiers, small, each on a fake GPU of its own."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from moe_plugin.comm import LocalComm
from moe_plugin.comm.exchange import FunctionExchange
from moe_plugin.comm.handles import start
from moe_plugin.dispatch.row_pages import PAGE, Pages
from moe_plugin.memory.activations import swap
from moe_plugin.memory.activations.auto import manage
from moe_plugin.memory.copier import Copier
from moe_plugin.memory.tiers import HostTier
from moe_plugin.memory.weights.streamed import StreamedTrainer
from tests.fake_gpu import mutants, stand_ins
from tests.fake_gpu.detector import Detector
from tests.fake_gpu.device import CountingDevice, OnDevice
from tests.fake_gpu.fake import install
from tests.fake_gpu.gpu import CUDA
from tests.fake_gpu.layers import WIDTH, Block, layer_of
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


def copies() -> None:
    """Two copies out and one in, by a job of the thread and by the stream alone."""
    copier, x = Copier("cuda"), torch.ones(4, device=CUDA)
    host, target = torch.empty(4, pin_memory=True), torch.empty(4, device=CUDA)
    out = copier.start([(host, x)])
    del x
    out.synchronize()
    host.add_(1)
    copier.start_call(lambda: target.copy_(host, non_blocking=True), 16).wait()
    (target + 1).sum().item()
    copier.close()


def given_up() -> None:
    """An exchange for whose rows nobody waits, as where another one failed."""
    start(LocalComm(), FunctionExchange(lambda comm, x, send, recv: x + 1),
          torch.ones(4, device=CUDA))


def paged() -> None:
    """Pages of the host that are dropped while a kernel writes to them."""
    pages, x_N = Pages(1, 4, torch.empty(0, device=CUDA)), torch.ones(2 * PAGE, device=CUDA)
    pages.write(x_N, torch.full((), 2 * PAGE, device=CUDA))


def swapped(policies: Sequence[str] = ("swap", "recompute", "swap", "keep")) -> None:
    """Training steps whose activations wait in host memory."""
    blocks = [Block().to(CUDA) for _ in policies]
    plain = patch.object(swap, "swappable", lambda x: isinstance(x, OnDevice) and x.numel() > 0)
    with plain:
        activations = manage(blocks, policies, smallest=1)
        for _ in range(2):
            y_TD = rows()
            for block in blocks:
                y_TD = block(y_TD)
            y_TD.square().sum().backward()
            _step(blocks)
            activations.after_step()
        activations.release()
        activations.swapper.copier.close()


def streamed(segments: Sequence[int] | None = None, **options: Any) -> None:
    """A model whose weights and optimizer are in host memory: steps, evaluation, other weights."""
    trainer = StreamedTrainer(
        [Block] * 4, lambda y, target: (y - target).square().mean(),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9), HostTier("cuda"), device=CUDA,
        segments=segments, **options)

    def batches() -> list[tuple[Tensor, Tensor]]:
        return [(torch.randn(3, WIDTH).to(CUDA), torch.randn(3, WIDTH).to(CUDA))
                for _ in range(2)]

    for _ in range(2):
        trainer.step(batches())
    trainer.evaluate(batches())
    for block in trainer.blocks:
        block.write([w + 1 for w in block.read()])
    trainer.step(batches())
    trainer.close()


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
            _step(layers)
        else:
            step()


@torch.no_grad()
def _step(modules: Sequence[nn.Module]) -> None:
    for p in (p for module in modules for p in module.parameters()):
        if p.grad is not None:
            p.add_(p.grad, alpha=-0.01)
            p.grad = None


def stored(store: str, slots: int = 2) -> None:
    """Two layers whose experts are elsewhere, in a cache of few slots; some are brought early."""
    expert = 3 * WIDTH * 8 * 4
    with tempfile.TemporaryDirectory() as folder:
        more = {"store_path": folder} if store == "disk" else {}
        layers = [layer_of(LocalComm(), experts={
            "store": store, "cache": str(slots * expert), "compute": "loop", **more})
            for _ in range(2)]
        if store == "host":
            train(*layers)
        for layer in layers:
            layer.eval()
        for _ in range(2):
            with torch.no_grad():
                x_TD = rows()
                for layer in layers:
                    layer.experts.prefetch(torch.tensor([[1]], device=CUDA))
                    x_TD = x_TD + layer(x_TD).output
        for layer in layers:
            layer.experts.store.cache.copier.close()


ALONE: dict[str, Callable[[], None]] = {
    "copies": copies,
    "an exchange given up": given_up,
    "pages of the host": paged,
    "activations swapped": partial(swapped, ("swap",) * 3),
    "activations by several policies": swapped,
    "weights streamed": streamed,
    "weights streamed, two blocks a segment": partial(streamed, [2, 2]),
    "weights streamed, throttled, one stays": partial(streamed, throttle=1e9, resident=(1,)),
    "experts in host memory": partial(stored, "host"),
    "experts in host memory, all in slots": partial(stored, "host", 8),
    "experts in a file": partial(stored, "disk"),
}


def alone() -> dict[str, list[str]]:
    """What is found in each program of one rank, and in the package with each mutant."""
    detector = prepare()
    found = {name: found_by(detector, program) for name, program in ALONE.items()}
    for mutant in mutants.ALONE:
        with changed(mutant.function, mutant.old, mutant.new):
            found[str(mutant)] = found_by(detector, ALONE[mutant.program])
    return found
