"""MoE layers as blocks of a plain PyTorch model: called like a feed-forward module, tensor in,
tensor out, so that they fit into `nn.Sequential`.

    model = nn.Sequential(nn.Linear(32, 64), MoEBlock(64, num_experts=8), nn.Linear(64, 10))
    loss = criterion(model(x), y) + auxiliary_loss(model)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.experts import is_expert
from moe_plugin.layer import MoELayer
from moe_plugin.output import MoEOutput, weighted_loss


class MoEBlock(nn.Module):
    """A `MoELayer` that returns its output alone; what else it returns is kept until the next call.

    Args:
        moe: the layer, or the arguments of one: `MoEBlock(64, num_experts=8, router="switch")`.

    Attributes:
        moe: the layer. last: what its last call returned, for losses and statistics; None before
            the first call and in copies of the block. after: what follows the experts.
    """

    def __init__(self, moe: MoELayer | Any, *args: Any, after: nn.Module | None = None,
                 **settings: Any) -> None:
        super().__init__()
        self.moe = moe if isinstance(moe, MoELayer) else MoELayer(moe, *args, **settings)
        self.after = nn.Identity() if after is None else after
        self.last: MoEOutput | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to the same shape and dtype."""
        self.last = self.moe(x)
        y: Tensor = self.after(self.last.output)
        return y

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "last": None}  # a graph can be neither copied nor pickled


def blocks_in(model: nn.Module) -> Iterator[tuple[str, MoEBlock]]:
    """Names and modules of a model's blocks, in the model's order."""
    return ((name, module) for name, module in model.named_modules()
            if isinstance(module, MoEBlock))


def auxiliary_loss(model: nn.Module) -> Tensor:
    """The routers' losses of the last forward pass: for each block sum of weight * loss over the
    names in `losses`, summed over the blocks. Add it to the model's loss once.

    Returns: a float32 scalar, differentiable; 0 before a forward pass or where no loss is set.
    Raises:
        ValueError: a block in training has losses without a gradient.
    """
    terms = []
    for name, block in blocks_in(model):
        if block.last is None:
            continue
        term = weighted_loss(block.last.losses, block.moe.config.losses)
        trains = block.training and any(p.requires_grad for p in block.moe.router.parameters())
        if trains and _has_weight(block) and not term.requires_grad:
            raise ValueError(
                f"block {name!r}: its losses have no gradient, since its last call ran under "
                "torch.no_grad (reentrant activation checkpointing does so); call "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)")
        terms.append(term)
    return torch.stack(terms).sum() if terms else torch.zeros(())


def _has_weight(block: MoEBlock) -> bool:
    assert block.last is not None
    weights = block.moe.config.losses
    return any(weights.get(name) for name in block.last.losses)


def optimizer_groups(model: nn.Module, lr: float, *, weight_decay: float = 0.0,
                     expert_lr: float | None = None) -> list[dict[str, Any]]:
    """Parameter groups for any optimizer of torch: experts apart from the rest, and no weight decay
    for vectors (biases, norms; an expert's bias is one, although it is stored as a row of a
    matrix).

    Args:
        lr: learning rate. expert_lr: that of experts; None: the same.
        weight_decay: of matrices.
    Returns: groups that have parameters, each with `name`, `params`, `lr`, `weight_decay`.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        expert = is_expert(parameter)
        decays = parameter.ndim - expert >= 2
        label = f"{'experts' if expert else 'dense'}{'' if decays else ', no decay'}"
        group = groups.setdefault(label, {
            "name": label, "params": [],
            "lr": expert_lr if expert and expert_lr is not None else lr,
            "weight_decay": weight_decay if decays else 0.0})
        group["params"].append(parameter)
    return list(groups.values())
