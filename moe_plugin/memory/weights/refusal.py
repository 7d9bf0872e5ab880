"""Where weights cannot stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from moe_plugin.config import OffloadConfig
from moe_plugin.memory.tiers import DiskTier, HostTier, Tier

if TYPE_CHECKING:
    from moe_plugin.memory.weights.blocks import StreamedBlock

_may = ContextVar("weights_may_stream", default=False)


@contextmanager
def weights_may_stream() -> Iterator[None]:
    """Inside, a host builds a model whose weights do."""
    before = _may.set(True)
    try:
        yield
    finally:
        _may.reset(before)


def refuse_streamed_weights(settings: OffloadConfig, host: str) -> None:
    """`ValueError` where weights are to stream in a model of a host that runs it as a whole.

    host: its name.
    """
    if settings.weights != "device" and not _may.get():
        raise ValueError(
            f"offload.weights={settings.weights} does not fit {host}, which builds all weights at "
            "once and runs the whole model for one micro-batch before the next: use device "
            "(--weights-on device), offload.activations or experts.store, or train a language "
            "model by fairseq-train or moe_plugin.hosts.megatron.launch, another one with "
            "moe_plugin.hosts.plain.streamed.streamed_trainer")


def check_tier(tier: Tier, device: torch.device) -> None:
    """`ValueError`: a tier does not fit a device."""
    if isinstance(tier, DiskTier) and device.type != "cpu":
        raise ValueError(f"weights on disk do not fit the device {device}: their optimizer steps "
                         "in host memory, which is the device of a CPU alone; use the host's "
                         "memory")
    if not isinstance(tier, DiskTier | HostTier):
        raise ValueError(f"a tier of kind {type(tier).__name__}: must be a HostTier or DiskTier")


def reduction(gradients: Callable[[nn.Module], object] | None) -> Callable[[nn.Module], object]:
    """What reduces the gradients over ranks. `ValueError`: nothing does, and there are several."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if gradients is None and ranks > 1:
        raise ValueError(
            f"weights that stream through each of {ranks} ranks need `gradients`, which reduces a "
            "block's gradients over them, e.g. BlockGradients(world) of "
            "moe_plugin.hosts.plain.streamed")
    return gradients or (lambda block: None)


def check_shared(blocks: Sequence[StreamedBlock], number: int, module: nn.Module) -> None:
    """`ValueError`: a block's module has a parameter of one before it."""
    owner = {id(p): (block.number, name) for block in blocks
             for name, p in zip(block.names, block.params, strict=True)}
    for name, p in module.named_parameters():
        if id(p) in owner:
            other, its_name = owner[id(p)]
            raise ValueError(
                f"blocks {other} and {number} share a parameter ({its_name}, {name}): its gradient "
                "would be summed in another order, and it would have to be in two segments; give "
                "each block its own")
