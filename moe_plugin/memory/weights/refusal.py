"""Checks that raise an error if streamed weights are requested but not supported."""

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
    """Return a context manager in which a host framework may build a model with streamed weights.
    """
    before = _may.set(True)
    try:
        yield
    finally:
        _may.reset(before)


def refuse_streamed_weights(settings: OffloadConfig, host: str) -> None:
    """Raise `ValueError` if streamed weights are requested and the host framework can only run the
    model as a whole.

    Args:
        settings: offload settings.
        host: name of the host framework, for use in the message.
    """
    if settings.weights != "device" and not _may.get():
        raise ValueError(
            f"offload.weights={settings.weights} does not fit {host}, which builds all weights at "
            "once and runs the whole model for each micro-batch: use device "
            "(--weights-on device), offload.activations or experts.store, or train a language "
            "model with fairseq-train or moe_plugin.hosts.megatron.launch, and other models with "
            "moe_plugin.hosts.plain.streamed.streamed_trainer")


def check_tier(tier: Tier, device: torch.device) -> None:
    """Raise `ValueError` if the tier cannot be used with the device."""
    if isinstance(tier, DiskTier) and device.type != "cpu":
        raise ValueError(f"weights on disk (DiskTier) cannot be used with device={device}, because "
                         "their optimizer runs in host memory; use device=cpu, or keep the device "
                         "and store the weights in host memory (HostTier)")
    if not isinstance(tier, DiskTier | HostTier):
        raise ValueError(f"the tier is a {type(tier).__name__}, but streamed weights need a "
                         "HostTier or DiskTier")


def reduction(gradients: Callable[[nn.Module], object] | None) -> Callable[[nn.Module], object]:
    """Return the function that reduces gradients. Raises `ValueError` if there are several ranks
    and no function was passed.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if gradients is None and ranks > 1:
        raise ValueError(
            f"streaming weights on {ranks} ranks needs `gradients`, a function that reduces a "
            "block's gradients over the ranks, for example BlockGradients(world) of "
            "moe_plugin.hosts.plain.streamed")
    return gradients or (lambda block: None)


def check_shared(blocks: Sequence[StreamedBlock], number: int, module: nn.Module) -> None:
    """Raise `ValueError` if the block's module shares a parameter with an earlier block."""
    owner = {id(p): (block.number, name) for block in blocks
             for name, p in zip(block.names, block.params, strict=True)}
    for name, p in module.named_parameters():
        if id(p) in owner:
            other, its_name = owner[id(p)]
            raise ValueError(
                f"blocks {other} and {number} share a parameter ({its_name}, {name}): its gradient "
                "would be summed in a different order, and it would be needed in two segments; "
                "use separate parameters in each block")
