"""MoE layers as blocks of a plain PyTorch model.

A block has the same interface as a feed-forward module. Both the input and the output of a block
are tensors, so a block can be used in `nn.Sequential`.

    model = nn.Sequential(nn.Linear(32, 64), MoEBlock(64, num_experts=8), nn.Linear(64, 10))
    loss = criterion(model(x), y) + auxiliary_loss(model)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.group import UNEQUAL_TEXTS, CommError
from moe_plugin.experts import is_expert
from moe_plugin.experts.matrices import is_vector, stacked
from moe_plugin.layer import MoELayer, named_layers_in
from moe_plugin.output import MoEOutput, weighted_loss
from moe_plugin.routing.model_masks import TokenMasks, follow_masks
from moe_plugin.utils.machine import inside_backward
from moe_plugin.utils.selective import hidden_from_policies


class MoEBlock(nn.Module):
    """An `nn.Module` that calls a `MoELayer` and returns only the output tensor of the layer.

    The losses and statistics of the most recent call are available in `last` until the next call.

    Args:
        moe: a `MoELayer`, or the first argument for building a layer, as in
            `MoEBlock(64, num_experts=8, router="switch")`.
    Raises:
        ValueError: If `moe` is a layer but arguments for building a layer are also passed.

    Attributes:
        moe: the layer.
        last: complete output of the most recent call, including losses and statistics. `last` is
            None before the first call, and in copies of the block.
        after: module that is applied to the output of the layer.
        masks: token masks that are read from the surrounding model (see `use_model_masks`), or None
            if the caller passes token masks.
    """

    def __init__(self, moe: MoELayer | Any, *args: Any, after: nn.Module | None = None,
                 **settings: Any) -> None:
        super().__init__()
        if isinstance(moe, MoELayer) and (args or settings):
            given = next(iter(settings), "comm")
            raise ValueError(f"the argument {given} was passed together with a layer that is "
                             "already built. Pass it to the layer instead, "
                             f"MoEBlock(MoELayer(..., {given}=...)), or leave it out")
        self.moe = moe if isinstance(moe, MoELayer) else MoELayer(moe, *args, **settings)
        self.after = nn.Identity() if after is None else after
        self.last: MoEOutput | None = None
        self.masks: TokenMasks | None = None
        self._begin_pass(None)

    @hidden_from_policies
    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Apply the layer. The output has shape [..., D] and the same dtype as the input.

        Args:
            x: input tokens with shape [..., D].
            token_mask: bool tensor with shape [...] that is True for real tokens. Optional.
                Defaults to the token mask of the surrounding model.
        """
        if token_mask is None and self.masks is not None:
            token_mask = self.masks.of(x)
        output: MoEOutput
        try:
            output = self.moe(x, token_mask)
        except CommError as error:
            if self.training:
                raise
            raise CommError(f"{error}; {UNEQUAL_TEXTS}") from error
        # a recomputation repeats a call whose losses are already stored
        if torch.compiler.is_compiling() or not inside_backward():
            self._keep(output)
        y: Tensor = self.after(output.output)
        return y

    def losses(self) -> list[dict[str, Tensor]]:
        """Return a list with the losses of each call in the most recent forward pass.

        The list has several elements if the model uses this block in several layers.
        """
        return self._earlier if self.last is None else [*self._earlier, self.last.losses]

    def _begin_pass(self, owner: _NewPass | None) -> None:
        """Discard the losses of all earlier calls.

        owner: hook that detects the beginning and end of the forward pass, or None.
        """
        self.last, self._owner = None, owner
        self._earlier: list[dict[str, Tensor]] = []

    def _keep(self, output: MoEOutput) -> None:
        # without a hook the call before may belong to an earlier forward pass
        self._earlier = [] if self._owner is None else self.losses()
        self.last = output

    def __getstate__(self) -> dict[str, Any]:
        # a stored output refers to an autograd graph, which can be neither copied nor pickled
        return {**self.__dict__, "last": None, "_earlier": [], "_owner": None}


def blocks_in(model: nn.Module) -> Iterator[tuple[str, MoEBlock]]:
    """Iterate over the names and modules of all blocks, in the order of `named_modules()`."""
    return ((name, module) for name, module in model.named_modules()
            if isinstance(module, MoEBlock))


def use_model_masks(model: nn.Module) -> None:
    """Make the blocks of a model detect when a forward pass begins, and make the blocks read the
    model's token masks. The model's own code is not changed.
    """
    follow_passes(model)
    blocks = [block for _, block in blocks_in(model)]
    masks = follow_masks(model, blocks)
    for block in blocks:
        block.masks = masks


@dataclass(frozen=True)
class _NewPass:
    """A forward pre-hook that makes all blocks discard the losses of the previous forward pass.

    Calling a submodule during a forward pass of the whole model does not begin a new pass.
    """

    def __call__(self, model: nn.Module, args: Any) -> None:
        for _, block in blocks_in(model):
            if block._owner is None or block._owner is self:
                block._begin_pass(self)

    def ends(self, model: nn.Module, args: Any, output: Any) -> None:
        """Mark the end of the forward pass, which may have failed with an error."""
        for _, block in blocks_in(model):
            if block._owner is self:
                block._owner = None


def follow_passes(model: nn.Module) -> None:
    """Register hooks that detect the forward passes of a model.

    After this call, a block that is skipped in a forward pass (layer drop) contributes no losses to
    this pass. A second call for the same model has no effect.
    """
    if not any(isinstance(hook, _NewPass) for hook in model._forward_pre_hooks.values()):
        hook = _NewPass()
        model.register_forward_pre_hook(hook)
        model.register_forward_hook(hook.ends, always_call=True)


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Return the sum of all router losses in the most recent forward pass. Add this sum to the loss
    of the model.

    For each block, the sum contains `weight * loss` for every name in the setting `losses`. If the
    model calls a block several times, the sum includes the losses of all calls. However, if you
    inserted the block by hand, the first pass includes only the block's last call. To include all
    calls, call `follow_passes(model)` before the first pass.

    A block that was not called in the most recent pass contributes nothing. A pass begins when the
    model that was passed to this function or to `replace_ffn` is called. Always call this model as
    a whole. If submodules are called separately, a submodule that is skipped contributes the losses
    of its last call.

    Returns: a differentiable float32 scalar. The scalar is 0 before the first forward pass, and if
        no losses are set.
    Raises:
        ValueError: If the model has no block, if a `MoELayer` with losses is not part of a block
            (only the caller of such a layer receives its losses), or if a block in training mode
            has losses without gradients although gradients are enabled.
    """
    _check_blocks(model)
    follow_passes(model)
    terms = []
    for name, block in blocks_in(model):
        if block.last is None:
            continue
        term = torch.stack([weighted_loss(losses, block.moe.config.losses)
                            for losses in block.losses()]).sum()
        wanted = torch.is_grad_enabled() and block.training
        trains = wanted and any(p.requires_grad for p in block.moe.router.parameters())
        if trains and _has_weight(block) and not term.requires_grad:
            raise ValueError(
                f"the losses of block {name!r} have no gradient, because its last call ran under "
                "torch.no_grad. Call auxiliary_loss before a forward pass under no_grad, and "
                "checkpoint activations with "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)")
        terms.append(term)
    return torch.stack(terms).sum() if terms else torch.zeros(())


def _check_blocks(model: nn.Module) -> None:
    inside = {id(block.moe) for _, block in blocks_in(model)}
    for name, layer in named_layers_in(model).items():
        if id(layer) not in inside:
            if weights := {name: w for name, w in layer.config.losses.items() if w}:
                raise ValueError(
                    f"layer {name or type(layer).__name__!r} is a MoELayer outside of any MoEBlock,"
                    f" and has losses={weights}, which only its caller receives. Add "
                    "weighted_loss(out.losses, layer.config.losses) to the loss there, or wrap the "
                    "layer as MoEBlock(layer)")
            inside.add(id(layer))
    if not inside:
        raise ValueError(f"{type(model).__name__} has no MoEBlock and therefore no auxiliary loss. "
                         "Call replace_ffn(model) first, or pass the model that has the experts")


def _has_weight(block: MoEBlock) -> bool:
    assert block.last is not None
    weights = block.moe.config.losses
    return any(weights.get(name) for name in block.last.losses)


def optimizer_groups(model: nn.Module, lr: float, *, weight_decay: float = 0.0,
                     expert_lr: float | None = None) -> list[dict[str, Any]]:
    """Return separate optimizer parameter groups for experts and dense parameters.

    Vectors (biases and the weights of norms) are not subject to weight decay. Expert biases are
    treated as vectors, although they are stored as the rows of a matrix.

    Args:
        model: the model.
        lr: learning rate.
        expert_lr: learning rate of the experts. Optional. Defaults to `lr`.
        weight_decay: weight decay of all matrices.
    Returns: a list of all parameter groups that are not empty. Each group has the keys `name`,
        `params`, `lr` and `weight_decay`.
    Raises:
        ValueError: If `expert_lr` is set but the model has no trainable experts.
    """
    stacks, groups = stacked(model), dict[str, dict[str, Any]]()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        expert = is_expert(parameter)
        decays = not is_vector(parameter, stacks)
        label = f"{'experts' if expert else 'dense'}{'' if decays else ', no decay'}"
        group = groups.setdefault(label, {
            "name": label, "params": [],
            "lr": expert_lr if expert and expert_lr is not None else lr,
            "weight_decay": weight_decay if decays else 0.0})
        group["params"].append(parameter)
    if expert_lr is not None and not any(label.startswith("experts") for label in groups):
        raise ValueError(f"expert_lr={expert_lr} has no effect, because {type(model).__name__} has "
                         "no trainable experts. Leave expert_lr out, pass the model that has the "
                         "experts, or unfreeze them with requires_grad_()")
    return list(groups.values())
