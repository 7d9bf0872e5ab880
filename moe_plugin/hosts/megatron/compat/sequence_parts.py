"""Attention without Transformer Engine for context parallelism, packed sequences and multi-head
latent attention (MLA).

Megatron-core's own `DotProductAttention` does not support these features, so without this module
they would not be available on CPU. Each context-parallel rank gathers the keys and values of the
whole sequence in token order, and computes attention for the queries of its own tokens. The results
equal those of a single rank that has the whole sequence. Unlike ring attention, this method does
not save memory. Packed sequences (THD) are processed as a single sequence. A mask prevents
attention between different documents. In multi-head latent attention, the values may have a
different width than the keys.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import re
from contextvars import ContextVar
from typing import Any

import torch
from megatron.core import __version__ as core_version
from megatron.core import parallel_state as ps
from torch import Tensor, nn

from moe_plugin.hosts.megatron.compat.names import DotProductAttention, mappings
from moe_plugin.hosts.megatron.compat.settings import setting
from moe_plugin.training.gradients import fused
from moe_plugin.utils.messages import first_process

# How versions 0.15 to 0.19 identify the MoE layers of multi-token prediction:
#
# | | 0.15 | 0.16 | 0.17 | 0.18, 0.19 |
# |---|---|---|---|---|
# | numbers of these layers start | at 1 | after the other layers | at 1 | at 1 |
# | passes is_mtp_layer to an MoE layer | no | no | only to its exact class | yes |
# | one repeated layer (`mtp_use_repeated_layer`) | no | no | yes | yes |
#
# In a hybrid model (from 0.18 on) each prediction is a stack of layers, and the layer numbers of
# every stack start at 1. Up to 0.19 only the layers' names contain the number of the prediction,
# counted from 1.
NUMBER = tuple(int(part) for part in core_version.split(".")[:2])
_IN_STACK = re.compile(r"mtp\.layers\.(\d+)\.mtp_model_layer\.layers\.")
_inside: ContextVar[bool] = ContextVar("moe_plugin_inside_mtp", default=False)


def is_mtp_layer(extra: dict[str, Any]) -> bool:
    """Return True if an MoE layer built with these arguments belongs to multi-token prediction.

    Some Megatron versions do not pass this information to layers.
    """
    return is_told(extra) or prediction_of(extra) is not None


def is_told(extra: dict[str, Any]) -> bool:
    """Return True if Megatron would mark its own router as part of multi-token prediction."""
    return bool(extra.get("is_mtp_layer")) or _inside.get()


def prediction_of(extra: dict[str, Any]) -> int | None:
    """Return the multi-token prediction to which an MoE layer of a hybrid model belongs, as a
    0-based index.

    Return None if the layer does not belong to multi-token prediction. `extra` contains the
    arguments that are passed to the layer's constructor.
    """
    match = _IN_STACK.search(extra.get("name") or "")
    return int(match[1]) - 1 if match else None


def tell_layers() -> None:
    """Make Megatron 0.17 also mark this package's layers as part of multi-token prediction."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer as Layer

    original: Any = Layer.__init__
    if NUMBER != (0, 17) or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        token = _inside.set(True)
        try:
            original(self, *args, **kwargs)
        finally:
            _inside.reset(token)

    Layer.__init__ = build


_KINDS = {"LayerNorm": (fused.LAYER_NORM, nn.LayerNorm), "RMSNorm": (fused.RMS_NORM, nn.RMSNorm)}


class LocalNorm:
    """Builder of norms. The norms are apex's fused `LayerNorm` or `RMSNorm`, or torch's norms if
    apex cannot be used.

    See `gradients.fused`. Each norm is marked so that Megatron's sequence parallelism supports it.

    Megatron-core's own norms (`FusedLayerNorm`, `WrappedTorchNorm`) have three drawbacks: they need
    a GPU if apex is installed, they include no fused RMS norm, and without apex they raise an error
    for `sequence_parallel`. To support sequence parallelism, the parameters of a norm need only one
    attribute. The attribute makes Megatron sum the gradient of a replicated parameter over the
    tensor-parallel group.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> nn.Module:  # type: ignore[misc]
        """Return a norm over the last dimension, which has size `hidden_size`.

        Raises:
            ValueError: If neither the norms of apex nor those of torch support a setting.
        """
        for name in ("layernorm_zero_centered_gamma", "persist_layer_norm"):
            if setting(config, name):
                raise ValueError(
                    f"{name}=True needs the norms of Apex or Transformer Engine. Install one of "
                    "these packages, or set it to False.")
        if config.normalization not in _KINDS:
            raise ValueError(
                f"normalization={config.normalization!r} is not available without Transformer "
                f"Engine. Use {' or '.join(_KINDS)}.")
        name, norm_class = _KINDS[config.normalization]
        options, apex = {}, fused.apex(name)
        if setting(config, "memory_efficient_layer_norm"):
            if apex.value is None:
                raise ValueError("memory_efficient_layer_norm=True needs apex or Transformer "
                                 f"Engine ({apex.reason}). Install one of these packages, or set "
                                 "it to False.")
            options["memory_efficient"] = True
        norm = (apex.value or norm_class)(hidden_size, eps=eps, **options)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


logger = logging.getLogger("moe_plugin.megatron")


def extend() -> None:
    """Extend Megatron's `DotProductAttention` until the process ends.

    After this call, the attention supports sequences that are split among ranks, packed sequences,
    and values whose width differs from the width of the keys.
    """
    build, attend = DotProductAttention.__init__, DotProductAttention.forward
    arguments, given_to = inspect.signature(build), inspect.signature(attend)

    @functools.wraps(build)
    def built(self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None,
              **kwargs: Any) -> None:
        given = arguments.bind(self, *args, **kwargs)
        config = given.arguments["config"]
        if config.context_parallel_size > 1:
            given.arguments["config"] = copy.copy(config)
            given.arguments["config"].context_parallel_size = 1
        build(*given.args, **given.kwargs)
        self.config = config
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        if config.context_parallel_size > 1:
            _check(self)

    @functools.wraps(attend)
    def attended(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        given = given_to.bind(self, *args, **kwargs)
        packed, parts = given.arguments.pop("packed_seq_params", None), (
            self.config.context_parallel_size)
        causal = "causal" in self.attn_mask_type.name
        if packed is not None:
            _packed(given.arguments, packed, parts, causal, self.scale_mask_softmax.window_size)
        elif parts > 1:
            # up to 0.15 an attention module has no groups
            group = getattr(getattr(self, "pg_collection", None), "cp", None)
            group = ps.get_context_parallel_group() if group is None else group
            _gathered(given.arguments, group, causal)
        return attend(*given.args, **given.kwargs)

    DotProductAttention.__init__, DotProductAttention.forward = built, attended


def _check(attention: Any) -> None:
    window = attention.scale_mask_softmax.window_size
    if window is not None:
        raise ValueError(
            f"window_size={window} with context_parallel_size="
            f"{attention.config.context_parallel_size} needs the attention of Transformer Engine, "
            "which is not installed. Leave out the window, or use --context-parallel-size 1.")
    if first_process():
        _say_once(attention.config.context_parallel_size)


@functools.cache
def _say_once(parts: int) -> None:
    logger.info("attention: using torch's attention over the keys and values of all %d "
                "context-parallel ranks, because Transformer Engine is not used", parts)


def tokens_of_part(length: int, parts: int, part: int) -> Tensor:
    """Return the indices of the tokens on a context-parallel rank, in the order in which the rank
    stores the tokens. The indices are an int64 tensor [length / parts].

    The sequence is split into `2 * parts` chunks of equal length. Rank `i` stores two chunks: chunk
    `i` counted from the start of the sequence, and chunk `i` counted from the end.
    """
    pieces_PN = torch.arange(length).view(2 * parts, -1)
    return pieces_PN[[part, -1 - part]].flatten()


def _gathered(given: dict[str, Any], group: Any, causal: bool) -> None:
    """Gather the keys and values of the whole sequence, and adapt the mask."""
    parts, rows = group.size(), given["query"].shape[0]
    length = rows * parts
    by_rank_S = torch.cat([tokens_of_part(length, parts, part) for part in range(parts)])
    order_S = by_rank_S.argsort().to(given["key"].device)
    for name in ("key", "value"):
        whole = mappings.gather_from_sequence_parallel_region(given[name], group=group)
        given[name] = whole.index_select(0, order_S)
    mask = given["attention_mask"]
    if mask is not None and mask.shape[-2:] != (rows, length):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, but must have shape [batch, 1, {rows}, "
            f"{length}] with context_parallel_size={parts}: one row per token of this rank, and "
            "one column per token of the sequence. Split the rows of the mask among ranks in the "
            "same way as the tokens.")
    if mask is None and causal:
        own_N = tokens_of_part(length, parts, group.rank()).to(order_S.device)
        seen_S = torch.arange(length, device=order_S.device)
        given["attention_mask"] = (seen_S > own_N[:, None])[None, None]


def _packed(given: dict[str, Any], packed: Any, parts: int, causal: bool, window: Any) -> None:
    """Convert packed sequences [t, heads, channels] to a batch that contains a single sequence,
    with shape [t, 1, heads, channels].

    A mask prevents attention between different documents.
    """
    if window is not None:  # Megatron would replace our mask by the window's mask
        raise ValueError(
            f"window_size={window} with packed sequences needs the attention of Transformer "
            "Engine, which is not installed. Leave out the window, or do not pack sequences.")
    if parts > 1 or getattr(packed, "local_cp_size", None):
        raise ValueError(
            f"Packed sequences with context_parallel_size={parts} need the attention of "
            "Transformer Engine, which is not installed. Use --context-parallel-size 1.")
    for name in ("query", "key", "value"):
        if given[name].dim() == 3:
            given[name] = given[name].unsqueeze(1)
    padded = getattr(packed, "cu_seqlens_q_padded", None)
    ends_N = packed.cu_seqlens_q if padded is None else padded
    token_S = torch.arange(given["query"].shape[0], device=ends_N.device)
    document_S = torch.searchsorted(ends_N.long(), token_S, right=True)
    apart_SS = document_S[:, None] != document_S
    later_SS = (token_S > token_S[:, None]) & causal
    given["attention_mask"] = (apart_SS | later_SS)[None, None]
