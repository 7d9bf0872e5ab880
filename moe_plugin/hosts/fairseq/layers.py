"""fairseq's transformer layers with their feed-forward network replaced by an MoE layer.

Shapes: T positions, B sentences, D model width (fairseq's order).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm import LocalComm, default_comm
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import MoEConfig, RunConfig, flatten, to_dict
from moe_plugin.dispatch import dispatchers
from moe_plugin.experts.base import is_expert
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
from moe_plugin.training.resilience.overflow import until_rows_fit


@dataclass(frozen=True)
class LayerSettings:
    """What an MoE transformer layer needs in addition to fairseq's own config.

    Attributes:
        gradient_factor: see `translate.gradient_factor`.
        layer_number: of this MoE layer in its stack, from 0.
        evaluation: set in models that only evaluate.
        run: what the trainer reads.
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
        """What `MoELayer` is told."""
        batch_comm = None
        if self.evaluation is not None:
            batch_comm = LocalComm()  # every rank evaluates batches of its own
        elif self.groups.world > 1 and (self.groups.replicas > 1
                                        or self.run.resize.expert_parallel_at):
            batch_comm = default_comm(self.config.comm.timeout_s)
        return HostContext(layer_number=self.layer_number, batch_comm=batch_comm,
                           own_capacity=self.evaluation is not None,
                           training=self.evaluation is None, agreed=flatten(to_dict(self.run)))


def _refuse_what_does_not_fit(settings: LayerSettings) -> None:
    config = settings.config
    if config.router.pre_gate and dispatchers.get(config.dispatch.name).traits.bounded:
        raise ValueError(
            f"router.pre_gate=1 does not fit dispatch.name={config.dispatch.name!r} in fairseq, "
            "whose evaluation repeats a layer's call where rows did not fit: must be 0; use "
            "dispatch.name='ragged'")
    name, replicas = config.dispatch.name, config.parallel.replicas
    asked = []
    if dispatchers.get(name).traits.shares_tokens:
        asked.append(f"dispatch.name={name!r}")
    if replicas > 1:
        asked.append(f"parallel.replicas={replicas}")
    store = config.experts.store
    if store != "device" and settings.evaluation is None:
        raise ValueError(
            f"experts.store={store} does not fit training in fairseq, which reduces and updates "
            "parameters on the device: must be device; evaluation (fairseq-validate, "
            "fairseq-eval-lm, fairseq-generate) takes --moe-experts-on")
    if asked and settings.groups.expert.size > 1:
        raise ValueError(
            f"{asked[0]} does not fit fairseq, whose data-parallel ranks have different tokens: it "
            "is for ranks that have the same ones; use "
            "dispatch.name='ragged' or 'padded', and parallel.replicas=1")


class FairseqMoELayer(TakesTokenIds, nn.Module):
    """`MoELayer` as fairseq needs it: one gate loss, statistics kept for the criterion.

    The gate loss is the weighted sum of the router losses.

    Attributes: `stats`: of the last forward pass. `observer`: if set, called with the statistics of
    every training pass that counts. `ignored`: the batch stands for a missing one, and none of its
    tokens is real. Expert parameters have their gradient scaled by `gradient_factor` and the number
    of their replicas, over which the trainer averages, and that number as a mark.
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
        """Prepare new expert parameters, which so many ranks store."""
        for parameter in self.moe.parameters():
            if is_expert(parameter):
                mark_replicas(parameter, replicas)
                # the trainer averages over replicas
                factor = self._gradient_factor * replicas
                if factor != 1.0:
                    parameter.register_hook(_scale(factor))

    def forward(self, x_TBD: Tensor, padding_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output [T, B, D] and gate loss (a float32 scalar).

        padding_BT: bool, True = padding, as fairseq has it; more columns than T (incremental
        decoding): the last ones count. Tokens are routed sentence after sentence, as fairseq's
        `moe` branch does: what finds no slot are the last sentences, not the end of every sentence.
        """
        x_BTD, mask_BT = x_TBD.transpose(0, 1), None
        length = x_BTD.shape[1]
        if padding_BT is not None and self.mask_padding:
            mask_BT = ~padding_BT[:, -length:].bool()
        if self.ignored:
            mask_BT = x_BTD.new_zeros(x_BTD.shape[:2], dtype=torch.bool)
        known = "token_ids" in self.needs and self.tokens_BT is not None
        ids_BT = self.tokens_BT[:, -length:] if known else None  # incremental decoding: the last
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
        """In evaluation, where nothing asks for a whole step, each call says that its rows fit."""
        if not self._evaluates:
            return self.moe(x_BTD, mask_BT, info=info)
        comm = LocalComm() if self._turns is None else self._turns.comm
        return until_rows_fit(self.moe, lambda: self.moe(x_BTD, mask_BT, info=info), comm)

    @torch.no_grad()
    def _without_tokens(self) -> None:
        """Take part in other ranks' call; leaves nothing of it in `stats`."""
        self.moe.eval()
        x_BTD = self.moe.experts.anchor.detach().new_empty(1, 0, self.moe.config.model_dim)
        ids_BT = x_BTD.new_empty(1, 0, dtype=torch.int64) if "token_ids" in self.needs else None
        self._compute(x_BTD, None, token_info(x_BTD, ids_BT, self.needs, batch_axis=0))


def _counts(layer: nn.Module) -> bool:
    """Where activations are recomputed a layer runs twice per step: one pass is counted, of
    reentrant checkpoints the second, because the first is without gradients.
    """
    return layer.training and torch.is_grad_enabled() and not replaying()


class _MoEMixin:
    """Routes fairseq's inline feed-forward code (`fc2(dropout(act(fc1(x))))`) through the experts.

    The gate loss leaves as the last output of `forward`, so that it has a gradient under activation
    checkpointing too; a hook takes it off before fairseq sees it and keeps it as `gate_loss` until
    the criterion reads it.
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
    """fairseq's decoder layer with experts."""

    def __init__(self, cfg: Any, no_encoder_attn: bool, settings: LayerSettings) -> None:
        super().__init__(cfg, no_encoder_attn)
        self._become_moe(settings)

    def forward(self, x_TBD: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As fairseq's, plus the gate loss as last output."""
        self._padding_BT = kwargs.get("self_attn_padding_mask")
        return self._with_gate_loss(super().forward(x_TBD, *args, **kwargs))


class MoEEncoderLayer(_MoEMixin, TransformerEncoderLayerBase):
    """fairseq's encoder layer with experts; torch's fused inference path is off."""

    def __init__(self, cfg: Any, return_fc: bool, settings: LayerSettings) -> None:
        super().__init__(cfg, return_fc)
        drop_fused_path_copies(self)
        self.BT_version = self.can_use_fastpath = False
        self._become_moe(settings)

    def forward(self, x_TBD: Tensor, encoder_padding_mask: Tensor | None,
                attn_mask: Tensor | None = None) -> tuple[Any, ...]:
        """As fairseq's, plus the gate loss as last output."""
        self._padding_BT = encoder_padding_mask
        output = super().forward(x_TBD, encoder_padding_mask, attn_mask)
        return self._with_gate_loss(output if isinstance(output, tuple) else (output,))

    def _load_from_state_dict(self, *args: Any) -> None:
        # fairseq's version copies fc1 and fc2 for the fused path
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
    """The MoE transformer layers of a model, in order."""
    return [module for module in model.modules() if isinstance(module, _MoEMixin)]


def run_settings(model: nn.Module) -> RunConfig:
    """The run's settings, of a model with experts; without any, the defaults."""
    layers = moe_layers(model)
    return layers[0].moe_layer.run if layers else RunConfig()
