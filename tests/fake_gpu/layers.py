"""Programs that move tensors between streams and tiers, small; each gives what it computed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, LocalComm
from moe_plugin.config import from_dict
from moe_plugin.memory.activations import swap
from moe_plugin.memory.activations.auto import manage
from moe_plugin.memory.copier import Copier
from moe_plugin.memory.tiers import HostTier
from moe_plugin.memory.weights.streamed import StreamedTrainer
from tests.fake_gpu.device import OnDevice
from tests.fake_gpu.gpu import cuda

WIDTH = 8


def layer_of(comm: Comm, /, dtype: torch.dtype = torch.float32, **settings: Any) -> MoELayer:
    """A layer on the fake GPU; settings by section."""
    tree: dict[str, Any] = {
        "model_dim": WIDTH, "num_experts": 4, "router": {"top_k": 2},
        "experts": {"kind": "gated_ffn", "hidden_dim": 8, "compute": "kernels"},
        "parallel": {"mode": "fixed", "r": 1}}
    for section, values in settings.items():
        tree[section] = tree.get(section, {}) | values
    return MoELayer(from_dict(tree), comm, dtype=dtype, device=cuda().device)


def drawn(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH).to(cuda().device)


def train(layer: nn.Module) -> list[Tensor]:
    """Forward and backward."""
    x_TD = drawn(6).requires_grad_()
    y_TD = layer(x_TD).output
    y_TD.square().sum().backward()
    return [y_TD, x_TD.grad, *(p.grad for p in layer.parameters())]


def layers(comm: Comm) -> list[Tensor]:
    """Dispatchers, with exchanges in pieces where there are ranks; pages on the device and on the
    host.
    """
    return [result for dispatch in (
        {"name": "ragged"}, {"name": "padded", "capacity_factor": 1.0},
        {"name": "bounded", "stash_mib": 1.0, "stash_host_mib": 1.0})
        for result in train(layer_of(comm, dispatch=dispatch, parallel={"d": 2, "d_backward": 3}))]


def copies(comm: Comm) -> list[Tensor]:
    """A copy out and one in, by a copier that is told of no number."""
    x_N = torch.ones(4).to(cuda().device)
    y_N, host_N = x_N * 2, torch.empty(4, pin_memory=True)
    with torch.cuda.device(cuda().device):
        copier = Copier("cuda")
        ticket = copier.start([(host_N, y_N)])
    del y_N
    z_N = x_N + 3  # may lie where y was
    ticket.synchronize()
    host_N.add_(1)
    copier.start_call(lambda: x_N.copy_(host_N, non_blocking=True), 16).wait()
    copier.close()
    return [x_N + 1, z_N]


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD + self.b(torch.relu(self.a(x_TD)))


def swapped(comm: Comm, policies: Sequence[str] = ("swap", "recompute", "swap", "keep"),
            ) -> list[Tensor]:
    """Training steps whose activations wait in memory of the host."""
    blocks = [Block().to(cuda().device) for _ in policies]
    with patch.object(swap, "swappable", lambda x: isinstance(x, OnDevice) and x.numel() > 0):
        activations = manage(blocks, policies, smallest=1)
        for _ in range(2):
            x_TD = drawn(6).requires_grad_()
            y_TD = x_TD
            for block in blocks:
                y_TD = block(y_TD)
            y_TD.square().sum().backward()
            descend(blocks)
            activations.after_step()
        activations.release()
        activations.swapper.copier.close()
    return [x_TD.grad, *(p for block in blocks for p in block.parameters())]


@torch.no_grad()
def descend(modules: Iterable[nn.Module]) -> None:
    """A step of gradient descent."""
    for p in (p for module in modules for p in module.parameters()):
        if p.grad is not None:
            p.add_(p.grad, alpha=-0.01)
            p.grad = None


def streamed(comm: Comm, **options: Any) -> list[Tensor]:
    """A model whose weights and optimizer are in host memory: steps, evaluation, other weights."""
    trainer = StreamedTrainer([Block] * 4, lambda y, target: (y - target).square().mean(),
                              partial(torch.optim.SGD, lr=0.1, momentum=0.9),
                              HostTier(cuda().device), device=cuda().device, **options)

    def batches() -> list[tuple[Tensor, Tensor]]:
        return [(drawn(3), drawn(3)) for _ in range(2)]

    for _ in range(2):
        trainer.step(batches())
    trainer.evaluate(batches())
    for block in trainer.blocks:
        block.write([w + 1 for w in block.read()])
    trainer.step(batches())
    weights = [w.clone() for block in trainer.blocks for w in block.read()]
    trainer.close()
    return weights


def stored(comm: Comm, store: str = "host", slots: int = 2) -> list[Tensor]:
    """Two layers whose experts are elsewhere, in a cache of few slots; some are brought early."""
    expert = 3 * WIDTH * 8 * 4
    with tempfile.TemporaryDirectory() as folder:
        more = {"store_path": folder} if store == "disk" else {}
        two = [layer_of(LocalComm(), experts={"store": store, "cache": str(slots * expert),
                                              "compute": "loop", **more}) for _ in range(2)]
        results: list[Tensor] = []
        for trained in (True, True, False, False) if store == "host" else (False, False):
            x_TD = drawn(6).requires_grad_(trained)
            y_TD = x_TD
            for layer in two:
                layer.train(trained)
                with torch.set_grad_enabled(trained):
                    if not trained:
                        layer.experts.prefetch(torch.tensor([[1]], device=cuda().device))
                    y_TD = y_TD + layer(y_TD).output
            results.append(y_TD)
            if trained:
                y_TD.square().sum().backward()
                results += [x_TD.grad, *(p.grad for layer in two for p in layer.parameters()
                                         if p.grad is not None)]
                descend(two)
        for layer in two:
            layer.experts.store.cache.copier.close()
    return results


ALONE = {each.__name__: each for each in (layers, copies, swapped, streamed, stored)}
