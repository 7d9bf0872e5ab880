"""Token masks of the blocks in a model that is not ours: the model's own masks say which tokens are
padding, so that no caller has to.

`follow_masks` registers hooks on the modules that receive a mask. For the time of a module's
forward pass, the blocks inside it take the mask that the module was called with. A module without
a mask leaves that of the module around it.
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

T = TypeVar("T")
REAL = "attention_mask"  # transformers: 0 = padding, or numbers that are added to scores
PADDING = ("tgt_key_padding_mask", "src_key_padding_mask", "key_padding_mask", "padding_mask",
           "encoder_padding_mask", "self_attn_padding_mask")  # torch, fairseq: True = padding
_INPUTS = ("input_ids", "inputs_embeds", "hidden_states")
_CACHES = ("cache", "past_key_values")
# their layers receive the same masks, and know the order of the axes
_CONTAINERS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
_KEPT = 63
_CHECKPOINT = "_gradient_checkpointing_func"  # of modules of transformers


class TokenMasks:
    """The masks of the running pass, for all blocks of one model."""

    def __init__(self) -> None:
        self._open: list[tuple[object, Tensor | None]] = []  # who began, and the mask
        self._trained: list[Tensor | None] = []  # of passes that may still be recomputed
        self._recomputed = False
        self._warned = False

    def begin(self, owner: object, real: Tensor | None) -> None:
        """A module's pass begins; None: it has the mask of the module around it."""
        if self._open:
            real = self._open[-1][1] if real is None else real
        elif torch.is_grad_enabled() and not torch.compiler.is_compiling() \
                and not inside_backward():
            kept = [] if self._recomputed else self._trained[-_KEPT:]
            self._trained, self._recomputed = [*kept, real], False
        self._open.append((owner, real))

    def end(self, owner: object) -> None:
        """It ends; what an error left open inside it, too."""
        while any(mine is owner for mine, _ in self._open):
            if self._open.pop()[0] is owner:
                break

    @property
    def running(self) -> bool:
        """Whether a pass runs."""
        return bool(self._open)

    @property
    def real(self) -> Tensor | None:
        """The mask of the pass that runs, or that is recomputed."""
        if self._open:
            return self._open[-1][1]
        if torch.compiler.is_compiling() or not inside_backward():
            return None
        self._recomputed = True
        if not all(_equal(mask, self._trained[-1]) for mask in self._trained):
            raise ValueError(
                "an MoE block is recomputed alone after several forward passes with token masks, "
                "of which any may be the one that is recomputed: call backward after each forward "
                "pass, or checkpoint a module that is called with the mask")
        return self._trained[-1] if self._trained else None

    def keeping(self, mask: Tensor | None, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)`, with this mask."""
        owner = object()
        self._open.append((owner, mask))
        try:
            return function(*args)
        finally:
            self.end(owner)

    def of(self, x: Tensor) -> Tensor | None:
        """The mask of tokens x [..., D], bool [...]; None: all are real, as far as is known."""
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
            _warn(f"a token mask {tuple(real.shape)} does not fit the input {tuple(x.shape)} of an "
                  "MoE block")
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenMasks, ()  # a copy has no pass that runs


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or (one.shape == other.shape and torch.equal(one, other))


def _warn(why: str) -> None:
    warn_once(__name__, f"{why}: padding is routed and counted like real tokens; call the block "
                        "with the mask, MoEBlock.forward(x, token_mask), bool, True = real token")


class _Checkpoint:
    """A function that checkpoints activations; the second run has the mask of the first."""

    def __init__(self, masks: TokenMasks, function: Callable[..., Any]) -> None:
        self.masks, self.function = masks, function

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As the function."""
        if self.masks.running and not torch.compiler.is_compiling():
            run = partial(self.masks.keeping, self.masks.real, run)
        return self.function(run, *args, **kwargs)


@dataclass(frozen=True, eq=False)
class _Hook:
    """Of a module that receives a mask.

    Attributes:
        name: of the argument.
        places: positions of arguments by name.
        layer: it is called by a module that also has the mask, in the form in which users give it.
        checkpoints: modules inside that checkpoint activations themselves.
    """

    masks: TokenMasks
    name: str
    places: Mapping[str, int]
    layer: bool
    checkpoints: tuple[nn.Module, ...] = ()

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
        """After the pass, or after its error."""
        self.masks.end(self)

    def _value(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
        place = self.places.get(name)
        return args[place] if place is not None and place < len(args) else kwargs.get(name)

    def _real(self, module: nn.Module, value: Any, args: tuple[Any, ...],
              kwargs: dict[str, Any]) -> Tensor | None:
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
            _warn(f"{type(module).__name__} got {self.name} of a form that says nothing of single "
                  "tokens")
        return real


def attended(value: Any, length: int | None, fixed_cache: bool = False) -> Tensor | None:
    """Real tokens of a pass, bool [B, S], by an attention mask of `transformers`.

    Args:
        value: [B, S] (longer with a cache: the last S columns count; 0 = padding), [B, 1, S, K]
            (bool: True = may look; numbers: are added to the scores), or a dictionary of these by
            kinds of layers. A token is real if it may look at itself.
        length: S; None: that of the mask.
        fixed_cache: K counts places of a cache that are not used yet, too: a token is real if it
            may look at any.
    Returns: None: the mask does not say it.
    """
    if isinstance(value, Mapping):
        found = (attended(mask, length, fixed_cache) for mask in value.values())
        return next((real for real in found if real is not None), None)
    if not isinstance(value, Tensor) or value.dim() not in (2, 3, 4):
        return None
    if value.dim() == 2:
        size = value.shape[1] if length is None else length
        return value[:, value.shape[1] - size:] != 0 if value.shape[1] >= size else None
    looks = value > torch.finfo(value.dtype).min / 2 if value.is_floating_point() else value != 0
    looks = looks[:, None] if looks.dim() == 3 else looks
    queries, keys = looks.shape[2:]
    looks = looks.any(1)
    if queries == 1 and keys == length:  # the same for all that look
        return looks[:, 0]
    if length not in (None, queries) or keys < queries:
        return None
    if fixed_cache and keys > queries:
        return looks.any(-1)
    return looks.diagonal(keys - queries, 1, 2)


def _not_padding(module: nn.Module, value: Any) -> Tensor | None:
    """Real tokens by a padding mask: bool, True = padding, or numbers that are added to scores."""
    if not isinstance(value, Tensor) or value.dim() > 2:
        _warn(f"{type(module).__name__} got a padding mask that is not a tensor [B, S]")
        return None
    real = value == 0 if value.is_floating_point() else ~value.bool()
    attention = getattr(module, "self_attn", None)
    swaps = real.dim() == 2 and getattr(attention, "batch_first", True) is False
    return real.t() if swaps else real


class _Unknown:
    """Of a model none of whose modules receives a mask that is known: says so once."""

    def __init__(self, places: Mapping[str, int]) -> None:
        self.places = places

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a pass of the model."""
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        for name, place in self.places.items():
            value = args[place] if place < len(args) else kwargs.get(name)
            if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point() \
                    and any(x is not value and x.shape[:2] == value.shape for x in given):
                _warn(f"{type(module).__name__} got {name}, whose meaning is not known here "
                      f"(known: {REAL}, {', '.join(PADDING)})")


def follow_masks(model: nn.Module, inside: Iterable[nn.Module]) -> TokenMasks:
    """From now on the result has the masks that modules of a model are called with. The same for
    the same model. inside: modules that read them; only modules around these are followed.
    """
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    known = [hook.masks for hook in hooks if isinstance(hook, _Hook)]
    masks, readers = known[0] if known else TokenMasks(), {id(module) for module in inside}
    around = [module for module in model.modules() if id(module) not in readers
              and any(id(part) in readers for part in module.modules())]
    found = [_hooked(module, masks) for module in around]
    if any(found) or any(isinstance(hook, _Unknown) for hook in hooks):
        return masks
    for module in around:
        if names := {name: at for name, at in _places(module).items() if "mask" in name}:
            module.register_forward_pre_hook(_Unknown(names), with_kwargs=True)
            break
    return masks


def _places(module: nn.Module) -> dict[str, int]:
    return {name: place
            for place, name in enumerate(inspect.signature(module.forward).parameters)}


def _hooked(module: nn.Module, masks: TokenMasks) -> bool:
    """Register a hook on a module that receives a mask; whether it has one."""
    if any(isinstance(hook, _Hook) for hook in module._forward_pre_hooks.values()):
        return True
    places = _places(module)
    of_padding = [name for name in PADDING if name in places]
    if isinstance(module, nn.TransformerDecoderLayer):
        of_padding = of_padding[:1]
    # of two masks, the modules inside know which one is theirs
    if isinstance(module, _CONTAINERS) or "decoder_input_ids" in places:
        return False
    if REAL not in places and len(of_padding) != 1:
        return False
    name = REAL if REAL in places else of_padding[0]
    layer = name == REAL and not {"input_ids", "inputs_embeds"} & set(places)
    checkpoints = () if layer else tuple(part for part in module.modules()
                                         if hasattr(part, "gradient_checkpointing"))
    hook = _Hook(masks, name, places, layer, checkpoints)
    module.register_forward_pre_hook(hook, with_kwargs=True)
    module.register_forward_hook(hook.ends, always_call=True)
    return True
