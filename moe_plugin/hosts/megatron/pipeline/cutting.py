"""A GPT model that is called with whole batches and computes one slice of their sequences."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat.names import Attention
from moe_plugin.hosts.megatron.compat.settings import setting
from moe_plugin.hosts.megatron.layer import plugin_layers
from moe_plugin.hosts.megatron.pipeline.attention import SliceAttention, SlicePart
from moe_plugin.hosts.megatron.pipeline.base import refuse

NAME = "terapipe"
_BY_TOKENS = ("input_ids", "position_ids", "labels", "loss_mask", "padding_mask")  # [B, S]
_NOT_CUT = ("decoder_input", "inference_context", "inference_params", "packed_seq_params")
_CONFIG = (("context_parallel_size", 1), ("multi_latent_attention", False),
           ("mtp_num_layers", None), ("num_microbatches_with_partial_activation_checkpoints", None))


def check_model(model: Any, config: Any) -> Any:
    """The bare GPT model in its wrappers.

    Raises: ValueError: a part of it or a setting of Megatron does not fit slices.
    """
    for name, bound in _CONFIG:
        if (setting(config, name) or None) != (bound or None):
            refuse(NAME, name, setting(config, name), repr(bound),
                   "use pipeline.schedule=1f1b, or leave it out")
    bare: Any = model
    while isinstance(getattr(bare, "module", None), nn.Module):  # Megatron's wrappers
        bare = bare.module
    positions = getattr(bare, "position_embedding_type", None)  # of GPT models
    if positions not in ("learned_absolute", "rope", "none"):
        refuse(NAME, "position_embedding_type", positions,
               "'learned_absolute', 'rope' or 'none', of a GPT model",
               "use pipeline.schedule=1f1b")
    for module in bare.modules():
        if isinstance(module, Attention) and not isinstance(module.core_attention, SliceAttention):
            refuse(NAME, "core_attention", type(module.core_attention).__name__,
                   "SliceAttention in every layer",
                   "use --spec moe_plugin.hosts.megatron.spec moe_layer, or a spec from "
                   "moe_plugin.hosts.megatron.spec.swap_attention")
    return bare


class CutModel:
    """Cuts what a GPT model is called with to the slice that is set, inside `cutting`.

    Args:
        bare: the model without its wrappers.
        length: of a sequence.
    """

    def __init__(self, bare: Any, length: int) -> None:
        self.bare, self.length = bare, length
        self.attentions = [m for m in bare.modules() if isinstance(m, SliceAttention)]
        self.moe_layers = plugin_layers(bare)
        self.part: SlicePart | None = None
        self._signature = inspect.signature(bare.forward)

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """Inside, calls of the model compute the slice that `begin` set."""
        with ExitStack() as stack:
            hooks = [self.bare.register_forward_pre_hook(self._cut, with_kwargs=True, prepend=True)]
            if getattr(self.bare, "position_embedding_type", None) == "rope":
                hooks.append(self.bare.rotary_pos_emb.register_forward_pre_hook(
                    self._rotate, with_kwargs=True))
            for hook in hooks:
                stack.callback(hook.remove)
            stack.callback(self.begin, None)
            yield

    def begin(self, part: SlicePart | None) -> None:
        """Compute this slice from now on, forward or backward."""
        self.part = part
        for attention in self.attentions:
            attention.part = part
        for layer in self.moe_layers:
            layer.continues = part is not None and part.start > 0

    def _cut(self, _: nn.Module, args: tuple[Any, ...],
             kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        given, part = self._signature.bind(*args, **kwargs).arguments, self.part
        for name in _NOT_CUT:
            if given.get(name) is not None:
                refuse(NAME, name, type(given[name]).__name__, "None", "use pipeline.schedule=1f1b")
        for name in _BY_TOKENS:
            if given.get(name) is not None:
                given[name] = self._cut_tokens(name, given[name], part)
        if "attention_mask" in given:  # every attention asks the slice
            part.sequences.mask, given["attention_mask"] = given["attention_mask"], None
        return (), {**given.pop("kwargs", {}), **given}

    def _cut_tokens(self, name: str, value_BS: Tensor, part: SlicePart) -> Tensor:
        if value_BS.shape[1] != self.length:
            refuse(NAME, f"{name}.shape[1]", value_BS.shape[1], f"seq_length={self.length}",
                   "use pipeline.schedule=1f1b for sequences of several lengths")
        return value_BS[:, part.start:part.start + part.length]

    def _rotate(self, _: nn.Module, args: tuple[Any, ...],
                kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "offset": self.part.start}


class Again:
    """An iterator's items, each as often as slices need it. None stays None."""

    def __init__(self, data: Any) -> None:
        self._data, self._fresh, self._item = data, True, None

    def next_batch(self) -> None:
        """The next item is a new one."""
        self._fresh = True

    def __iter__(self) -> Again:
        return self

    def __next__(self) -> Any:
        if self._fresh:
            self._item, self._fresh = next(self._data), False
        return self._item


@contextmanager
def weighed(part: SlicePart) -> Iterator[None]:
    """Inside, auxiliary losses count by their share of a sequence's tokens: what is logged, and
    unless Megatron weighs by tokens itself, their gradients.
    """
    share = part.length / part.sequences.length
    before = {name: entry.values.clone() for name, entry in core.logged_losses().items()}
    yield
    for name, entry in core.logged_losses().items():
        start = before.get(name, 0 * entry.values)
        entry.values.copy_(start + share * (entry.values - start))
