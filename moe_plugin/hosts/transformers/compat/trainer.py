"""Methods of `transformers.Trainer` for models whose experts this package computes.

Importing `moe_plugin.hosts.transformers` replaces them, so that `Trainer` and its subclasses, such
as those of TRL, save and resume under expert parallelism, and the auxiliary loss is weighted
correctly unless a subclass computes its own loss.
See `checkpoints` and `compute_loss`. The original methods are called for all other models, for
models in `peft`, and with DeepSpeed and the FSDP of accelerate.

Auxiliary loss: a model with `output_router_logits=True` adds `router_aux_loss_coef * aux_loss` to
its loss. `Trainer` divides the loss of the tokens by the number of tokens on all ranks and in all
micro-batches, and multiplies the sum of both losses by the number of ranks. The gradient of the
auxiliary loss is therefore multiplied by the number of ranks times the number of micro-batches of a
step (transformers issue 48690). Also, each rank computes the auxiliary loss from the load of its
own tokens, which differs from the load of the batch.

Here, `Trainer` adds the auxiliary loss of the tokens of all ranks instead, as one process would for
all of these tokens. With gradient accumulation, it adds the mean over the micro-batches.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, Trainer

from moe_plugin.comm.host_collectives import named
from moe_plugin.hosts.plain.adapters.trainer import Method, around, save_checkpoint
from moe_plugin.hosts.transformers.compat import checkpoints
from moe_plugin.hosts.transformers.register import computes_experts

logger = logging.getLogger(__name__)
_WEIGHT = "router_aux_loss_coef"


def compute_loss(original: Callable[..., Any], self: Any, model: Any, inputs: dict[str, Any],
                 return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    """`Trainer.compute_loss`, with the auxiliary loss of the tokens of all ranks.

    Raises:
        ValueError: If the model's auxiliary loss is not the balance loss of Switch Transformer over
            all layers, as in Mixtral.
    """
    settings = self.model.config.get_text_config()
    holders = [each for each in (*self.model.modules(), settings) if getattr(each, _WEIGHT, None)]
    if not holders or "labels" not in inputs or (
            self.label_smoother is not None or self.compute_loss_func is not None):
        return original(self, model, inputs, return_outputs, num_items_in_batch)
    weight = getattr(holders[0], _WEIGHT)
    with _without(holders):  # whatever `Trainer` multiplies, it does not multiply this loss
        loss, outputs = original(self, model, inputs, True, num_items_in_batch)
    top_k = getattr(self.model, "num_experts_per_tok", None) or settings.num_experts_per_tok
    load_E, probs_E, rows = _sums(outputs["router_logits"], top_k, inputs.get("attention_mask"))
    if not getattr(self, "_moe_plugin_told", False):
        self._moe_plugin_told = True
        _tell(self, _product(load_E, probs_E, rows), outputs["aux_loss"])
    ranks = self.args.world_size
    if ranks > 1:
        totals = torch.cat([load_E, rows[None]])
        with named("all_reduce of the loads for the auxiliary loss"):
            dist.all_reduce(totals)
        load_E, rows = totals[:-1], totals[-1]
    # The shares of all ranks add up to the loss. Ranks then average their gradients.
    share = ranks * _product(load_E, probs_E, rows)
    scaled = self.loss_is_scaled_for_ga
    if scaled is None:
        scaled = self.model_accepts_loss_kwargs and num_items_in_batch is not None
    if self.model.training and scaled:  # `Trainer` does not divide by the number of micro-batches
        share = share / self.current_gradient_accumulation_steps
    loss = loss + weight * share.to(loss.device)
    return (loss, outputs) if return_outputs else loss


@contextlib.contextmanager
def _without(holders: list[Any]) -> Iterator[None]:
    """Set the weight of the auxiliary loss to 0 inside the block."""
    weights = [getattr(each, _WEIGHT) for each in holders]
    try:
        for each in holders:
            setattr(each, _WEIGHT, 0.0)
        yield
    finally:
        for each, weight in zip(holders, weights, strict=True):
            setattr(each, _WEIGHT, weight)


def _sums(logits: tuple[Tensor, ...], top_k: int, mask: Tensor | None
          ) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of choices [E] and the sum of the probabilities [E] of each expert, in
    float32 over all layers and real tokens, and the number of tokens times layers.

    Args:
        logits: the logits [T, E] of each layer's router.
        mask: 1 for real tokens and 0 for padding, with T values. Optional.
    """
    device, experts = logits[0].device, logits[0].shape[-1]
    real_T1 = torch.ones(logits[0].shape[0], 1, device=device) if mask is None else \
        mask.reshape(-1, 1).to(device, torch.float32)
    load_E, probs_E = torch.zeros(2, experts, device=device)
    for logits_TE in logits:
        probs_TE = logits_TE.to(device).softmax(-1)
        chosen_TK = probs_TE.topk(top_k, dim=-1).indices
        load_E = load_E.scatter_add(0, chosen_TK.flatten(), real_T1.expand(-1, top_k).flatten())
        probs_E = probs_E + (probs_TE.float() * real_T1).sum(0)
    return load_E, probs_E, real_T1.sum() * len(logits)


def _product(load_E: Tensor, probs_E: Tensor, rows: Tensor) -> Tensor:
    return len(load_E) * torch.dot(load_E / rows, probs_E / rows)


def _tell(trainer: Any, ours: Tensor, theirs: Tensor) -> None:
    """Log what is corrected. Raise a `ValueError` if the model has another auxiliary loss."""
    args, model = trainer.args, type(trainer.model).__name__
    if args.n_gpu <= 1 and not torch.allclose(ours, theirs.float().to(ours.device), rtol=1e-2,
                                              equal_nan=True):
        raise ValueError(
            f"the auxiliary loss of {model} is {float(theirs):.6g}, but must be the balance loss "
            f"of Switch Transformer over all layers, which is {float(ours):.6g}. Trainer would "
            "multiply it by the number of ranks and micro-batches. Set output_router_logits=False, "
            "and add your own loss in compute_loss_func")
    if args.world_size * args.gradient_accumulation_steps > 1:
        logger.info("the auxiliary loss is that of the tokens of all ranks, and a mean over "
                    "micro-batches; Trainer alone would multiply it by %d ranks x %d micro-batches "
                    "(transformers issue 48690)", args.world_size, args.gradient_accumulation_steps)


_METHODS: dict[str, Method] = {
    "_save_checkpoint": save_checkpoint, "_save": checkpoints.save_weights,
    "_save_optimizer_and_scheduler": checkpoints.save_optimizer,
    "_load_optimizer_and_scheduler": checkpoints.load_optimizer,
    "_load_from_checkpoint": checkpoints.load_model, "_load_best_model": checkpoints.load_best}

def extend_trainer() -> None:
    """Replace the methods of `Trainer`. Later calls have no effect."""
    if hasattr(Trainer.__init__, "_moe_plugin_original"):
        return
    for name, ours in _METHODS.items():
        setattr(Trainer, name, around(getattr(Trainer, name), ours, _is_ours))
    setattr(Trainer, "compute_loss", around(Trainer.compute_loss, compute_loss, _has_our_loss))
    setattr(Trainer, "__init__", around(Trainer.__init__, _create, lambda trainer: True))


def _is_ours(trainer: Any) -> bool:
    return (isinstance(trainer.model, PreTrainedModel) and computes_experts(trainer.model)
            and not trainer.is_fsdp_enabled and not trainer.is_deepspeed_enabled)


def _has_our_loss(trainer: Any) -> bool:
    # called for every micro-batch of every model, so that the modules are searched only if needed
    config = getattr(trainer.model, "config", None)
    return (isinstance(config, PreTrainedConfig)
            and getattr(config.get_text_config(), "output_router_logits", False)
            and _is_ours(trainer))


def _create(original: Method, self: Any, model: Any = None, args: Any = None, *rest: Any,
            **more: Any) -> None:
    """`Trainer.__init__`, without its refusal to save the optimizer of a distributed model."""
    accepts = (args is not None and not args.save_only_model
               and getattr(model, "is_distributed_loading_by_transformers", False)
               and computes_experts(model))
    if accepts:
        args.save_only_model = True
    try:
        original(self, model, args, *rest, **more)
    finally:
        if accepts:
            args.save_only_model = False
