"""MoE layers as blocks of a plain PyTorch model: called like a feed-forward module, tensor in,
tensor out, so that they fit into `nn.Sequential`.

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


class MoEBlock(nn.Module):
    """A `MoELayer` that returns its output alone; what else it returns is kept until the next call.

    Args:
        moe: the layer, or the arguments of one: `MoEBlock(64, num_experts=8, router="switch")`.
    Raises:
        ValueError: there are arguments of a layer beside a layer.

    Attributes:
        moe: the layer.
        last: what its last call returned, for losses and statistics; None before the first call and
            in copies of the block.
        after: what follows the experts.
        masks: token masks of the model around it (`use_model_masks`); None: callers give them.
    """

    def __init__(self, moe: MoELayer | Any, *args: Any, after: nn.Module | None = None,
                 **settings: Any) -> None:
        super().__init__()
        if isinstance(moe, MoELayer) and (args or settings):
            given = next(iter(settings), "comm")
            raise ValueError(f"{given} beside a layer that is built: give it to the layer, "
                             f"MoEBlock(MoELayer(..., {given}=...)), or leave it out")
        self.moe = moe if isinstance(moe, MoELayer) else MoELayer(moe, *args, **settings)
        self.after = nn.Identity() if after is None else after
        self.last: MoEOutput | None = None
        self.masks: TokenMasks | None = None
        self._begin_pass(None)

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """[..., D] to the same shape and dtype.

        token_mask: [...] bool, True = real token; None: as the model around the block says.
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
        if torch.compiler.is_compiling() or not inside_backward():  # no recomputation
            self._keep(output)
        y: Tensor = self.after(output.output)
        return y

    def losses(self) -> list[dict[str, Tensor]]:
        """Those of each call in the last forward pass: more than one where weights are shared."""
        return self._earlier if self.last is None else [*self._earlier, self.last.losses]

    def _begin_pass(self, owner: _NewPass | None) -> None:
        """owner: of the pass; None: where it begins and ends is not known."""
        self.last, self._owner = None, owner
        self._earlier: list[dict[str, Tensor]] = []

    def _keep(self, output: MoEOutput) -> None:
        # where passes are not followed, the call before may be of another one
        self._earlier = [] if self._owner is None else self.losses()
        self.last = output

    def __getstate__(self) -> dict[str, Any]:
        # a graph can be neither copied nor pickled
        return {**self.__dict__, "last": None, "_earlier": [], "_owner": None}


def blocks_in(model: nn.Module) -> Iterator[tuple[str, MoEBlock]]:
    """Names and modules of a model's blocks, in the model's order."""
    return ((name, module) for name, module in model.named_modules()
            if isinstance(module, MoEBlock))


def use_model_masks(model: nn.Module) -> None:
    """Let the blocks of a model that was not made for them follow its passes and its masks."""
    follow_passes(model)
    blocks = [block for _, block in blocks_in(model)]
    masks = follow_masks(model, blocks)
    for block in blocks:
        block.masks = masks


@dataclass(frozen=True)
class _NewPass:
    """Before a forward pass of a model: what its blocks keep is of the pass before. A part's pass
    inside of another's is not a new one.
    """

    def __call__(self, model: nn.Module, args: Any) -> None:
        for _, block in blocks_in(model):
            if block._owner is None or block._owner is self:
                block._begin_pass(self)

    def ends(self, model: nn.Module, args: Any, output: Any) -> None:
        """After it, or after its error."""
        for _, block in blocks_in(model):
            if block._owner is self:
                block._owner = None


def follow_passes(model: nn.Module) -> None:
    """From now on, a block that a forward pass of the model leaves out (layer drop) has no part in
    that pass's losses. The same model may be given more than once.
    """
    if not any(isinstance(hook, _NewPass) for hook in model._forward_pre_hooks.values()):
        hook = _NewPass()
        model.register_forward_pre_hook(hook)
        model.register_forward_hook(hook.ends, always_call=True)


def auxiliary_loss(model: nn.Module) -> Tensor:
    """The routers' losses of the last forward pass: for each block sum of weight * loss over the
    names in `losses`, summed over the blocks and, where blocks are shared, over their calls. Add
    it to the model's loss once. (Of a shared block that was put in by hand the first pass counts
    its last call, unless `follow_passes(model)` was called before.)

    A block that this pass did not call adds nothing: a pass begins where the model that is given
    here, or to `replace_ffn`, is called. (Call it as a whole: where its parts are called one by
    one, the losses of a part that is left out are those of its last call.)

    Returns: a float32 scalar, differentiable; 0 before a forward pass or where no loss is set.
    Raises:
        ValueError: there is no block; a `MoELayer` with losses is in no block, so that its caller
            alone gets them; a block in training has losses without a gradient, and the call is not
            under `torch.no_grad` itself.
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
                f"block {name!r}: its losses have no gradient, since its last call ran under "
                "torch.no_grad; must be a call with gradients: call auxiliary_loss before a "
                "forward pass under no_grad, and checkpoint activations with "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)")
        terms.append(term)
    return torch.stack(terms).sum() if terms else torch.zeros(())


def _check_blocks(model: nn.Module) -> None:
    """`ValueError` where the losses of some experts, or all, would be missing."""
    inside = {id(block.moe) for _, block in blocks_in(model)}
    for name, layer in named_layers_in(model).items():
        if id(layer) not in inside:
            if weights := {name: w for name, w in layer.config.losses.items() if w}:
                raise ValueError(
                    f"layer {name or type(layer).__name__!r} is a MoELayer in no MoEBlock, and its "
                    f"losses={weights} are in what its call returns: add weighted_loss(out.losses, "
                    "layer.config.losses) to the loss there, or wrap it, MoEBlock(layer)")
            inside.add(id(layer))
    if not inside:
        raise ValueError(f"{type(model).__name__} has no MoEBlock, so that there is no loss: call "
                         "replace_ffn(model) first, or give the model that has the experts")


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
        lr: learning rate.
        expert_lr: that of experts; None: the same.
        weight_decay: of matrices.
    Returns: groups that have parameters, each with `name`, `params`, `lr`, `weight_decay`.
    Raises:
        ValueError: `expert_lr` for a model in which no experts are trained.
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
        raise ValueError(f"expert_lr={expert_lr} has no effect: no experts are trained in "
                         f"{type(model).__name__}; leave it out, give the model that has them, or "
                         "unfreeze them with requires_grad_()")
    return list(groups.values())
