"""Token masks for MoE blocks that are part of another library's model.

The model's own mask arguments already identify padding tokens, so callers do not need to pass a
token mask to the MoE blocks. `follow_masks` registers hooks on the modules that receive a mask.
During the forward pass of a module that receives a mask, the MoE blocks inside the module use this
mask. If a module receives no mask, the mask of the enclosing module is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from moe_plugin.utils.machine import inside_backward
from moe_plugin.utils.messages import warn_once
from moe_plugin.utils.selective import hidden_from_policies

T = TypeVar("T")
REAL = "attention_mask"  # transformers: 0 for padding, or numbers that are added to scores
PADDING = ("tgt_key_padding_mask", "src_key_padding_mask", "key_padding_mask", "padding_mask",
           "encoder_padding_mask", "self_attn_padding_mask")  # torch, fairseq: True for padding
LAYOUT = "seqs_layout"  # fairseq2: an object that knows the position of each token, or -1
_INPUTS = ("input_ids", "inputs_embeds", "hidden_states")
_CACHES = ("cache", "past_key_values")
# Containers are skipped: their layers receive the same masks and know the order of the axes.
_CONTAINERS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
# Older masks are dropped, so that forward passes without a backward pass do not accumulate masks.
_KEPT = 63
_CHECKPOINT = "_gradient_checkpointing_func"  # attribute of modules in transformers


class TokenMasks:
    """The masks of the current forward pass, shared by all MoE blocks of a model."""

    def __init__(self) -> None:
        self._open: list[tuple[object, Tensor | None]] = []  # owner and mask of each running pass
        self._trained: list[Tensor | None] = []  # masks of passes that may still be recomputed
        self._recomputed = False
        self._warned = False

    def begin(self, owner: object, real: Tensor | None) -> None:
        """Begin a module's pass with the mask `real`, or the enclosing module's mask if None."""
        if self._open:
            real = self._open[-1][1] if real is None else real
        elif torch.is_grad_enabled() and not torch.compiler.is_compiling() \
                and not inside_backward():
            kept = [] if self._recomputed else self._trained[-_KEPT:]
            self._trained, self._recomputed = [*kept, real], False
        self._open.append((owner, real))

    def end(self, owner: object) -> None:
        """End a module's pass, and all passes inside it that an error left unfinished."""
        # A module that raised an error may not have ended its pass.
        while any(opened_by is owner for opened_by, _ in self._open):
            if self._open.pop()[0] is owner:
                break

    @property
    def running(self) -> bool:
        """True if a pass is in progress."""
        return bool(self._open)

    @property
    def real(self) -> Tensor | None:
        """The mask of the pass that is in progress or being recomputed."""
        if self._open:
            return self._open[-1][1]
        if torch.compiler.is_compiling() or not inside_backward():
            return None
        # Backward has begun, so the next forward pass starts a new list of masks.
        self._recomputed = True
        if not all(_equal(mask, self._trained[-1]) for mask in self._trained):
            raise ValueError(
                "An MoE block is recomputed separately after several forward passes with different "
                "token masks, so its mask is ambiguous. Call backward after each forward pass, or "
                "checkpoint a module that is called with the mask.")
        return self._trained[-1] if self._trained else None

    def keeping(self, mask: Tensor | None, function: Callable[..., T], *args: Any) -> T:
        """Call `function(*args)` while this mask is in effect."""
        owner = object()
        self._open.append((owner, mask))
        try:
            return function(*args)
        finally:
            self.end(owner)

    def of(self, x: Tensor) -> Tensor | None:
        """Return the bool mask [...] of the tokens x [..., D], or None to treat all as real."""
        real = self.real
        if real is None:
            return None
        real = real.to(x.device)
        shape = x.shape[:-1]
        if real.shape == shape:
            return real
        if real.dim() == 2 and real.t().shape == shape:
            return real.t()
        if len(shape) == 1 and real.numel() == shape[0]:
            return real.reshape(-1)
        if not self._warned:
            self._warned = True
            _warn(f"A token mask of shape {tuple(real.shape)} does not match the input of shape "
                  f"{tuple(x.shape)} of an MoE block")
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenMasks, ()  # a copy has no running pass


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or (one.shape == other.shape and torch.equal(one, other))


def _warn(why: str) -> None:
    warn_once(__name__, f"{why}. Padding is therefore routed and counted like real tokens. Pass a "
                        "mask to the block: MoEBlock.forward(x, token_mask), bool, True for real "
                        "tokens.")


class _Checkpoint:
    """An activation checkpointing function. The recomputation uses the same mask as the first pass.
    """

    def __init__(self, masks: TokenMasks, function: Callable[..., Any]) -> None:
        self.masks, self.function = masks, function

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if self.masks.running and not torch.compiler.is_compiling():
            run = partial(self.masks.keeping, self.masks.real, run)
        return self.function(run, *args, **kwargs)


@dataclass(frozen=True, eq=False)
class _Hook:
    """A hook on a module that receives a mask.

    Attributes:
        name: name of the argument that contains the mask.
        places: mapping from the name of each argument to its position.
        layer: True if the caller of the module also receives the mask, as passed by the user. The
            argument is then read only if no enclosing pass is in progress.
        checkpoints: modules inside this module that may use activation checkpointing.
    """

    masks: TokenMasks
    name: str
    places: Mapping[str, int]
    layer: bool
    checkpoints: tuple[nn.Module, ...] = ()

    @hidden_from_policies
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for other in () if torch.compiler.is_compiling() else self.checkpoints:
            if (function := vars(other).get(_CHECKPOINT)) is not None \
                    and not isinstance(function, _Checkpoint):
                cast(Any, other)._gradient_checkpointing_func = _Checkpoint(self.masks, function)
        real = None
        if not (self.layer and self.masks.running):
            value = self._value(args, kwargs, self.name)
            real = None if value is None else self._real(module, value, args, kwargs)
        self.masks.begin(self, real)

    def ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the module's pass. `ends` is also called after an error."""
        self.masks.end(self)

    def _value(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
        position = self.places.get(name)
        return args[position] if position is not None and position < len(args) else kwargs.get(name)

    def _real(self, module: nn.Module, value: Any, args: tuple[Any, ...],
              kwargs: dict[str, Any]) -> Tensor | None:
        if self.name == LAYOUT:
            real: Tensor | None = value.position_indices >= 0 if value.padded else None
            return real
        if self.name != REAL:
            return _not_padding(module, value)
        given = (self._value(args, kwargs, name) for name in _INPUTS)
        x = next((x for x in given if isinstance(x, Tensor)), None)
        cache = next((c for name in _CACHES
                      if (c := self._value(args, kwargs, name)) is not None), None)
        length = None if x is None else x.shape[1 if x.dim() > 1 else 0]
        real = attended(value, length, bool(getattr(cache, "is_compileable", False)))
        says = not isinstance(value, Mapping) or any(mask is not None for mask in value.values())
        if real is None and says and not self.masks.running:
            _warn(f"{type(module).__name__} received {self.name} in a form that does not describe "
                  "single tokens")
        return real


def attended(value: Any, length: int | None, fixed_cache: bool = False) -> Tensor | None:
    """Return a bool tensor [B, S], True for real tokens, given a `transformers` attention mask.

    Args:
        value: attention mask in one of the following forms. A mask [B, S] is 0 for padding. If a
            cache is used, a mask [B, S] is longer, and only its last S columns are read. A mask [B,
            1, S, K] either is a bool tensor that is True for visible positions, or is added to the
            attention scores. A dictionary maps types of layers to masks [B, S] or [B, 1, S, K]. A
            token is real if it may attend to its own position.
        length: number of tokens per sequence, S. Defaults to the length of the mask.
        fixed_cache: True if K includes unused positions of a cache. With a cache of fixed size, a
            token is real if it may attend to at least one position.
    Returns: The mask, or None if the attention mask does not describe individual tokens.
    """
    if isinstance(value, Mapping):
        masks = (attended(mask, length, fixed_cache) for mask in value.values())
        return next((real for real in masks if real is not None), None)
    if not isinstance(value, Tensor) or value.dim() not in (2, 3, 4):
        return None
    if value.dim() == 2:
        size = value.shape[1] if length is None else length
        return value[:, value.shape[1] - size:] != 0 if value.shape[1] >= size else None
    # Numbers that are added to scores are 0 for visible positions, and very negative otherwise.
    looks = value > torch.finfo(value.dtype).min / 2 if value.is_floating_point() else value != 0
    looks = looks[:, None] if looks.dim() == 3 else looks
    queries, keys = looks.shape[2:]
    looks = looks.any(1)
    if queries == 1 and keys == length:  # one row for all queries
        return looks[:, 0]
    if length not in (None, queries) or keys < queries:
        return None
    if fixed_cache and keys > queries:
        return looks.any(-1)
    return looks.diagonal(keys - queries, 1, 2)


def _not_padding(module: nn.Module, value: Any) -> Tensor | None:
    """Given a padding mask, return a mask that is True for real tokens. The padding mask is either
    a bool tensor that is True for padding, or contains numbers that are added to the attention
    scores.
    """
    if not isinstance(value, Tensor) or value.dim() > 2:
        _warn(f"{type(module).__name__} received a padding mask that is not a tensor [B, S]")
        return None
    real = value == 0 if value.is_floating_point() else ~value.bool()
    attention = getattr(module, "self_attn", None)
    swaps = real.dim() == 2 and getattr(attention, "batch_first", True) is False
    return real.t() if swaps else real


class _Unknown:
    """A hook for models that have no known mask argument. If a model receives an unknown mask, the
    hook logs a warning once.
    """

    def __init__(self, places: Mapping[str, int]) -> None:
        self.places = places

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the arguments before each forward pass of the model."""
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        for name, position in self.places.items():
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point() \
                    and any(x is not value and x.shape[:2] == value.shape for x in given):
                _warn(f"{type(module).__name__} received the unknown mask {name} (known masks: "
                      f"{REAL}, {', '.join(PADDING)})")


def follow_masks(model: nn.Module, inside: Iterable[nn.Module]) -> TokenMasks:
    """Return an object that records the masks passed to the modules of a model.

    If this function is called again for the same model, it returns the same object.

    inside: modules that read the masks. Masks are recorded only for modules that contain at least
    one module in `inside`.
    """
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    known = [hook.masks for hook in hooks if isinstance(hook, _Hook)]
    masks, readers = known[0] if known else TokenMasks(), {id(module) for module in inside}
    around = [module for module in model.modules() if id(module) not in readers
              and any(id(part) in readers for part in module.modules())]
    hooked = [_hooked(module, masks) for module in around]
    if any(hooked) or any(isinstance(hook, _Unknown) for hook in hooks):
        return masks
    for module in around:
        if names := {name: at for name, at in _places(module).items() if "mask" in name}:
            module.register_forward_pre_hook(_Unknown(names), with_kwargs=True)
            break
    return masks


def _places(module: nn.Module) -> dict[str, int]:
    return {name: position
            for position, name in enumerate(inspect.signature(module.forward).parameters)}


def _hooked(module: nn.Module, masks: TokenMasks) -> bool:
    """If a module receives a mask, register a hook on it. Return whether the module has a hook."""
    if any(isinstance(hook, _Hook) for hook in module._forward_pre_hooks.values()):
        return True
    places = _places(module)
    of_padding = [name for name in PADDING if name in places]
    if isinstance(module, nn.TransformerDecoderLayer):
        of_padding = of_padding[:1]
    # An encoder-decoder model receives two masks. Its inner modules receive the one they need.
    if isinstance(module, _CONTAINERS) or "decoder_input_ids" in places:
        return False
    name = next((known for known in (REAL, LAYOUT) if known in places), None)
    if name is None and len(of_padding) != 1:
        return False
    name = name or of_padding[0]
    layer = name == REAL and not {"input_ids", "inputs_embeds"} & set(places)
    checkpoints = () if layer else tuple(part for part in module.modules()
                                         if hasattr(part, "gradient_checkpointing"))
    hook = _Hook(masks, name, places, layer, checkpoints)
    module.register_forward_pre_hook(hook, with_kwargs=True)
    # `always_call`, because a pass must also end if the module raises an error.
    module.register_forward_hook(hook.ends, always_call=True)
    return True
