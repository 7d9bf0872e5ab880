"""fairseq's transformer layers with an MoE layer instead of the feed-forward network.

In tensor shapes, T is the number of positions, B is the number of sentences, and D is the width of
the model. fairseq uses the order [T, B, D].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm import Comm, LocalComm, default_comm
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import MoEConfig, RunConfig, flatten, to_dict
from moe_plugin.dispatch import dispatchers
from moe_plugin.experts.base import is_expert
from moe_plugin.hosts.fairseq import refusals
from moe_plugin.hosts.fairseq.compat.names import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from moe_plugin.hosts.fairseq.compat.runtime import drop_fused_path_copies
from moe_plugin.hosts.fairseq.groups import Evaluation, FairseqGroups
from moe_plugin.layer import MoELayer
from moe_plugin.observe.sinks import watch_store
from moe_plugin.output import LayerStats, MoEOutput, weighted_loss
from moe_plugin.records import TokenInfo
from moe_plugin.routing import needs_of
from moe_plugin.routing.call import TakesTokenIds, token_info
from moe_plugin.routing.replay import replaying
from moe_plugin.training.gradients.replicas import mark_replicas
from moe_plugin.training.resilience.skipped_steps import until_rows_fit


@dataclass(frozen=True)
class LayerSettings:
    """Settings of an MoE transformer layer, in addition to fairseq's own settings.

    Attributes:
        config: settings of the MoE layer.
        groups: process groups of the model.
        mask_padding: True to exclude padding tokens from routing.
        gradient_factor: see `translate.gradient_factor`.
        layer_number: 0-based index of this MoE layer in its stack.
        evaluation: the `Evaluation` object of a model that is used only for evaluation, or None.
        run: settings of the run.
    """

    config: MoEConfig
    groups: FairseqGroups
    mask_padding: bool
    gradient_factor: float
    layer_number: int | None = None
    evaluation: Evaluation | None = None
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def host(self) -> HostContext:
        """Information about fairseq that `MoELayer` needs."""
        batch_comm: Comm | None = None
        if self.evaluation is not None:
            batch_comm = LocalComm()  # in evaluation, every rank has its own batches
        elif self.groups.world > 1 and (self.groups.replicas > 1
                                        or self.run.resize.expert_parallel_at):
            batch_comm = default_comm(self.config.comm.timeout_s)
        return HostContext(layer_number=self.layer_number, batch_comm=batch_comm,
                           own_capacity=self.evaluation is not None,
                           training=self.evaluation is None, agreed=flatten(to_dict(self.run)))


def _refuse_what_does_not_fit(settings: LayerSettings) -> None:
    values = flatten(to_dict(settings.config))
    traits = dispatchers.get(settings.config.dispatch.name).traits
    refusals.PRE_GATE.refuse({**values, "bounded": traits.bounded})
    several = settings.groups.expert.size > 1
    refusals.LAYER.refuse({
        **values, "training": settings.evaluation is None,
        "same_tokens.dispatch.name": several and traits.shares_tokens,
        "same_tokens.parallel.replicas": several and values["parallel.replicas"] > 1})


class FairseqMoELayer(TakesTokenIds, nn.Module):
    """A `MoELayer` for fairseq. The layer returns a single gate loss, and stores statistics for the
    criterion.

    The gate loss is the weighted sum of all router losses. The gradients of expert parameters are
    multiplied by `gradient_factor` and by the number of replicas of the experts. The trainer later
    averages gradients over replicas, so the number of replicas cancels out. Each expert parameter
    is marked with its number of replicas.

    Attributes:
        stats: statistics of the latest forward pass.
        observer: function that is called with the statistics of each training batch, or None.
        ignored: True if the batch is a dummy that stands in for a missing batch. If True, the layer
            ignores all tokens.
    """

    def __init__(self, settings: LayerSettings) -> None:
        super().__init__()
        _refuse_what_does_not_fit(settings)
        self.moe = MoELayer(settings.config, settings.groups.expert, host=settings.host)
        self.moe.ddp_check.compare_replicas(settings.host.batch_comm)
        self.run, self.needs = settings.run, needs_of(self.moe.router)
        self.mask_padding = settings.mask_padding
        self.stats: LayerStats | None = None
        self.observer: Callable[[LayerStats], None] | None = None
        self.ignored = False
        self._evaluates = settings.evaluation is not None
        self._turns = None if settings.evaluation is None else settings.evaluation.turns
        self._drops = None if settings.evaluation is None else settings.evaluation.drops
        if self._turns is not None:
            self._number = self._turns.add_layer(self._without_tokens)
        self._gradient_factor = settings.gradient_factor
        self.scale_gradients(settings.groups.replicas)

    def scale_gradients(self, replicas: int) -> None:
        """Mark expert parameters as stored on `replicas` ranks, and scale their gradients."""
        for parameter in self.moe.parameters():
            if is_expert(parameter):
                mark_replicas(parameter, replicas)
                # the trainer averages over replicas, which divides the gradient by their number
                factor = self._gradient_factor * replicas
                if factor != 1.0:
                    parameter.register_hook(_scale(factor))

    def forward(self, x_TBD: Tensor, padding_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output [T, B, D] and the gate loss, which is a float32 scalar.

        Tokens are routed sentence by sentence, as in fairseq's `moe` branch. If the capacity is
        limited, the tokens of the last sentences are dropped, not the last tokens of every
        sentence.

        Args:
            x_TBD: input tokens with shape [T, B, D].
            padding_BT: bool tensor that is True for padding tokens, as in fairseq. During
                incremental decoding, the tensor has more than T columns, and the last T are used.
        """
        x_BTD, mask_BT = x_TBD.transpose(0, 1), None
        length = x_BTD.shape[1]
        if padding_BT is not None and self.mask_padding:
            mask_BT = ~padding_BT[:, -length:].bool()
        if self.ignored:
            mask_BT = x_BTD.new_zeros(x_BTD.shape[:2], dtype=torch.bool)
        ids_BT = self.tokens_BT if "token_ids" in self.needs else None
        if ids_BT is not None:  # incremental decoding passes all earlier tokens as well
            ids_BT = ids_BT[:, -length:]
        info = token_info(x_BTD, ids_BT, self.needs, batch_axis=0)
        if self._turns is not None:
            self._turns.wait_for(self._number)
        out = self._compute(x_BTD, mask_BT, info)
        self.stats = out.stats
        if self.observer is not None and out.stats is not None and _counts(self):
            self.observer(out.stats)
        if self._drops is not None:
            self._drops.add(out.stats)
        loss = weighted_loss(out.losses, self.moe.config.losses).to(x_TBD.device)
        return out.output.transpose(0, 1), loss

    def _compute(self, x_BTD: Tensor, mask_BT: Tensor | None,
                 info: TokenInfo | None) -> MoEOutput:
        """Call the layer. During evaluation, repeat the call until all rows fit into their buffers.

        During training, the whole step is repeated if rows do not fit.
        """
        if not self._evaluates:
            return self.moe(x_BTD, mask_BT, info=info)
        comm = LocalComm() if self._turns is None else self._turns.comm
        return until_rows_fit(self.moe, lambda: self.moe(x_BTD, mask_BT, info=info), comm)

    @torch.no_grad()
    def _without_tokens(self) -> None:
        """Call this layer without tokens, because other ranks call it. `stats` does not change."""
        self.moe.eval()
        anchor: Any = self.moe.experts.anchor
        x_BTD = anchor.detach().new_empty(1, 0, self.moe.config.model_dim)
        ids_BT = x_BTD.new_empty(1, 0, dtype=torch.int64) if "token_ids" in self.needs else None
        self._compute(x_BTD, None, token_info(x_BTD, ids_BT, self.needs, batch_axis=0))


def _counts(layer: nn.Module) -> bool:
    """Return True if the statistics of the current forward pass are recorded.

    With activation recomputation, a layer runs twice per step, but only one of the two passes is
    recorded. With reentrant checkpoints, the second pass is recorded, because the first pass
    computes no gradients.
    """
    return layer.training and torch.is_grad_enabled() and not replaying()


class _MoEMixin:
    """Mixin that makes fairseq's inline code for the feed-forward network call the experts.

    fairseq computes `fc2(dropout(act(fc1(x))))`. `forward` returns the gate loss as its last
    output, so that the loss has a gradient when activation checkpointing is used. Before fairseq
    uses the outputs, a hook removes the gate loss from them. The hook stores the loss in
    `gate_loss`, where the criterion reads it.
    """

    def _become_moe(self: Any, settings: LayerSettings) -> None:
        del self.fc1, self.fc2
        self.moe_layer = FairseqMoELayer(settings)
        stack = "encoder" if isinstance(self, TransformerEncoderLayerBase) else "decoder"
        watch_store(self.moe_layer.moe, lambda: f"{stack}'s MoE layer {settings.layer_number}")
        self.fc1, self.fc2, self.activation_fn = self._experts, _identity, _identity
        self.activation_dropout_module = nn.Identity()
        self.gate_loss: Tensor | None = None
        self._padding_BT: Tensor | None = None
        self._new_gate_loss: Tensor | None = None
        self.register_forward_hook(_keep_gate_loss)

    def _experts(self: Any, x_TBD: Tensor) -> Tensor:
        y_TBD, self._new_gate_loss = self.moe_layer(x_TBD, self._padding_BT)
        return y_TBD

    def _with_gate_loss(self: Any, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        loss, self._new_gate_loss, self._padding_BT = self._new_gate_loss, None, None
        return (*outputs, loss)


class MoEDecoderLayer(_MoEMixin, TransformerDecoderLayerBase):
    """fairseq's decoder layer with experts instead of the feed-forward network."""

    def __init__(self, cfg: Any, no_encoder_attn: bool, settings: LayerSettings) -> None:
        super().__init__(cfg, no_encoder_attn)
        self._become_moe(settings)

    def forward(self, x_TBD: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run fairseq's forward pass, and append the gate loss to its outputs."""
        self._padding_BT = kwargs.get("self_attn_padding_mask")
        return self._with_gate_loss(super().forward(x_TBD, *args, **kwargs))


class MoEEncoderLayer(_MoEMixin, TransformerEncoderLayerBase):
    """fairseq's encoder layer with experts instead of the feed-forward network. torch's fused
    inference path is disabled.
    """

    def __init__(self, cfg: Any, return_fc: bool, settings: LayerSettings) -> None:
        super().__init__(cfg, return_fc)
        drop_fused_path_copies(self)
        self.BT_version = self.can_use_fastpath = False
        self._become_moe(settings)

    def forward(self, x_TBD: Tensor, encoder_padding_mask: Tensor | None,
                attn_mask: Tensor | None = None) -> tuple[Any, ...]:
        """Run fairseq's forward pass, and append the gate loss to its outputs."""
        self._padding_BT = encoder_padding_mask
        output = super().forward(x_TBD, encoder_padding_mask, attn_mask)
        return self._with_gate_loss(output if isinstance(output, tuple) else (output,))

    def _load_from_state_dict(self, *args: Any) -> None:
        # fairseq's method would copy fc1 and fc2 for the fused path; this layer has neither
        nn.Module._load_from_state_dict(self, *args)


def _keep_gate_loss(layer: Any, _: Any, outputs: tuple[Any, ...]) -> Any:
    layer.gate_loss = outputs[-1]
    outputs = outputs[:-1]
    return outputs if len(outputs) > 1 else outputs[0]


def _identity(x: Any) -> Any:
    return x


def _scale(factor: float) -> Any:
    def scale(gradient: Tensor) -> Tensor:
        return gradient * factor

    return scale


def moe_layers(model: nn.Module) -> list[Any]:
    """Return all MoE transformer layers of a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, _MoEMixin)]


def run_settings(model: nn.Module) -> RunConfig:
    """Return the run settings of a model, or default settings if the model has no experts."""
    layers = moe_layers(model)
    return layers[0].moe_layer.run if layers else RunConfig()
