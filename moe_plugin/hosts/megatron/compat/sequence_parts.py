"""Attention without Transformer Engine for context parallelism, packed sequences and multi-head
latent attention.

Megatron-core's own `DotProductAttention` takes none of them, so that a run on CPU could have none.
Here a context-parallel rank gathers the keys and values of the whole sequence, in the order of its
tokens, and attends with its own queries: the numbers of one rank that has the sequence, without the
memory that a ring saves. Packed sequences (THD) are one sequence in which no token sees another
document. Values of latent attention have their own width.
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

# Which MoE layers are those of multi-token prediction, versions 0.15 to 0.19.
#
# | | 0.15 | 0.16 | 0.17 | 0.18, 0.19 |
# |---|---|---|---|---|
# | their numbers begin | at 1 | after the others | at 1 | at 1 |
# | says so when it builds an MoE layer | no | no | one of its own exact class | yes |
# | one repeated layer (`mtp_use_repeated_layer`) | no | no | yes | yes |
#
# In a hybrid model (0.18 on) each prediction is a stack of layers, whose numbers all begin at 1; up
# to 0.19 only their names say so, in which predictions are numbered from 1.
NUMBER = tuple(int(part) for part in core_version.split(".")[:2])
_IN_STACK = re.compile(r"mtp\.layers\.(\d+)\.mtp_model_layer\.layers\.")
_inside: ContextVar[bool] = ContextVar("moe_plugin_inside_mtp", default=False)


def is_mtp_layer(extra: dict[str, Any]) -> bool:
    """Whether an MoE layer that is built with these arguments is one of multi-token prediction, as
    far as this version says so.
    """
    return is_told(extra) or prediction_of(extra) is not None


def is_told(extra: dict[str, Any]) -> bool:
    """Whether Megatron's own router, too, would know that it is in such a layer."""
    return bool(extra.get("is_mtp_layer")) or _inside.get()


def prediction_of(extra: dict[str, Any]) -> int | None:
    """Of which prediction of a hybrid model, from 0, an MoE layer built with these arguments is;
    None: of none.
    """
    found = _IN_STACK.search(extra.get("name") or "")
    return int(found[1]) - 1 if found else None


def tell_layers() -> None:
    """Let 0.17 say so to our class, too."""
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
    """Builds apex's fused `LayerNorm` or `RMSNorm`, or torch's where apex cannot be used
    (`gradients.fused`), marked for Megatron's sequence parallelism.

    Megatron-core's own choices (`FusedLayerNorm`, `WrappedTorchNorm`) need a GPU once apex is
    installed, have no fused RMS norm, and refuse `sequence_parallel` without apex; all that is
    missing there is the mark by which Megatron sums a replicated parameter's gradient over the
    tensor-parallel group.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> nn.Module:  # type: ignore[misc]
        """A norm over the last dimension, `hidden_size` wide. `ValueError` for settings that
        neither apex's nor torch's norms know.
        """
        for name in ("layernorm_zero_centered_gamma", "persist_layer_norm"):
            if setting(config, name):
                raise ValueError(
                    f"{name}=True needs Megatron's own norms, of Apex or Transformer Engine; "
                    "install one of them or leave it False")
        if config.normalization not in _KINDS:
            raise ValueError(
                f"normalization={config.normalization!r} must be one of {', '.join(_KINDS)} "
                "without Transformer Engine; choose one of these")
        name, kind = _KINDS[config.normalization]
        options, apex = {}, fused.apex(name)
        if setting(config, "memory_efficient_layer_norm"):
            if apex.value is None:
                raise ValueError("memory_efficient_layer_norm=True needs apex or Transformer "
                                 f"Engine ({apex.reason}); install one of them or leave it False")
            options["memory_efficient"] = True
        norm = (apex.value or kind)(hidden_size, eps=eps, **options)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


logger = logging.getLogger("moe_plugin.megatron")


def extend() -> None:
    """Let `DotProductAttention` take parts of sequences, packed ones and values of another width
    than keys; stays for the life of the process.
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
            _gathered(given.arguments, _group(self), causal)
        return attend(*given.args, **given.kwargs)

    DotProductAttention.__init__, DotProductAttention.forward = built, attended


def _check(attention: Any) -> None:
    window = attention.scale_mask_softmax.window_size
    if window is not None:
        raise ValueError(
            f"window_size={window} with context_parallel_size="
            f"{attention.config.context_parallel_size} needs Transformer Engine's attention, which "
            "is not here: must be left out; leave it out, or use --context-parallel-size 1")
    if first_process():
        _say_once(attention.config.context_parallel_size)


@functools.cache
def _say_once(parts: int) -> None:
    logger.info("attention: torch's, over the keys and values of all %d context-parallel ranks, in "
                "the place of Transformer Engine's", parts)


def _group(attention: Any) -> Any:
    # versions up to 0.15 keep no groups
    own = getattr(getattr(attention, "pg_collection", None), "cp", None)
    return ps.get_context_parallel_group() if own is None else own


def tokens_of_part(length: int, parts: int, part: int) -> Tensor:
    """Which of `length` tokens a context-parallel rank has, int64 [length / parts], in its order:
    of 2 `parts` equal pieces the one of its number, and the one as far from the end.
    """
    pieces_PN = torch.arange(length).view(2 * parts, -1)
    return pieces_PN[[part, -1 - part]].flatten()


def _gathered(given: dict[str, Any], group: Any, causal: bool) -> None:
    """Puts keys and values of the whole sequence, and a mask for them, in the place of a part's."""
    parts, own = group.size(), given["query"].shape[0]
    length = own * parts
    by_rank_S = torch.cat([tokens_of_part(length, parts, part) for part in range(parts)])
    order_S = by_rank_S.argsort().to(given["key"].device)
    for name in ("key", "value"):
        whole = mappings.gather_from_sequence_parallel_region(given[name], group=group)
        given[name] = whole.index_select(0, order_S)
    mask = given["attention_mask"]
    if mask is not None and mask.shape[-2:] != (own, length):
        raise ValueError(
            f"attention_mask {list(mask.shape)} must be [batch, 1, {own}, {length}] with "
            f"context_parallel_size={parts}: a rank's own tokens and those that they see; cut its "
            "rows as tokens are cut")
    if mask is None and causal:
        own_N = tokens_of_part(length, parts, group.rank()).to(order_S.device)
        seen_S = torch.arange(length, device=order_S.device)
        given["attention_mask"] = (seen_S > own_N[:, None])[None, None]


def _packed(given: dict[str, Any], packed: Any, parts: int, causal: bool, window: Any) -> None:
    """Puts a batch of one sequence [t, 1, heads, channels] in the place of packed ones [t, heads,
    channels], and the mask that keeps them apart.
    """
    if window is not None:  # Megatron puts the window's mask in the place of any other
        raise ValueError(
            f"window_size={window} with packed sequences needs Transformer Engine's attention, "
            "which is not here: must be left out; leave it out, or do not pack sequences")
    if parts > 1 or getattr(packed, "local_cp_size", None):
        raise ValueError(
            f"packed sequences with context_parallel_size={parts} need Transformer Engine's "
            "attention, which is not here: must be 1; use --context-parallel-size 1")
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
