"""Trace a model on torch's meta device: its parameters, and the bytes that autograd saves in each
layer.

Tensors on the meta device have shapes and dtypes but no values. A training step therefore takes no
memory, and the memory of any model can be counted on any machine. Only the first two layers of each
kind are run, because layers with equal parameters save equally many bytes, except before the first
trainable parameter. Attention is assumed to be fused, so that no scores are saved. A number that is
read from a tensor is 1, and a list of numbers divides the rows of the experts equally. Of the tiles
of a frozen weight, only the first one is decoded.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from moe_plugin.kernels.frozen import FrozenWeight

OUTSIDE = -1  # index of the embedding, the output head and the loss among the layers


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Sizes of one decoder layer.

    Attributes:
        parameters: number of parameters outside the routed experts.
        expert_parameters: number of parameters of the routed experts.
        saved: bytes that autograd saves outside the routed experts.
        expert_saved: bytes that autograd saves in the routed experts.
        frozen_bytes: size of the frozen parameters of the routed experts in bytes.
        trained: number of trainable parameters of the routed experts.
    """

    parameters: int
    expert_parameters: int
    saved: int
    expert_saved: int
    frozen_bytes: int
    trained: int


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """Sizes of a traced model for one micro-batch.

    Attributes:
        layers: sizes of the decoder layers, in their order.
        parameters: number of parameters of the whole model. Shared parameters count once.
        parameter_bytes: size of all parameters in bytes.
        ends_saved: bytes that autograd saves in the embedding, the output head and the loss.
        extra: bytes of temporary tensors at the moment of the forward and backward passes in which
            most memory is used. Parameters and all gradients of parameters of routed experts are
            not included.
        largest_matrix: number of elements of the largest parameter of routed experts.
    """

    layers: tuple[LayerBytes, ...]
    parameters: int
    parameter_bytes: int
    ends_saved: int
    extra: int
    largest_matrix: int

    @property
    def saved(self) -> int:
        """Number of bytes that autograd saves in the whole model."""
        return self.ends_saved + sum(one.saved + one.expert_saved for one in self.layers)


class FusedAttention(torch.autograd.Function):
    """Attention that saves its inputs, its output and one float32 number per row of scores, as
    fused kernels do. Only shapes are computed.

    Tensors: queries [B, H, S, D], keys [B, K, S, D], values [B, K, S, V], output [B, H, S, V].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class AliveBytes(TorchDispatchMode):
    """A dispatch mode that counts the bytes of all storages created by operators while the mode is
    active.

    Attributes:
        now: current number of bytes.
        peak: largest number of bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        """Count the storages of the tensors that an operator returns."""
        result = self.compute(func, args, kwargs or {})
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self._add(x.untyped_storage())
        return result

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator. Subclasses can replace the results of operators."""
        return func(*args, **kwargs)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Exclude the given tensors, which exist throughout the measurement."""
        self._seen |= {x.untyped_storage()._cdata for x in tensors}

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.now -= nbytes


class _MetaOperators(AliveBytes):
    """Count the bytes of living tensors, and replace operators that need values.

    rows: number of rows of all experts, which is divided equally if the host reads the counts.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            counts, rest = torch.zeros(args[0].shape, dtype=torch.int64), self.rows
            for index in range(counts.numel()):
                counts.view(-1)[index] = share = -(-rest // (counts.numel() - index))
                rest -= share
            return counts.to(args[0].dtype)
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        if func is torch.ops.aten._grouped_mm.default:  # its meta kernel refuses float32
            a, b, ends = (*args, *kwargs.values())[:3]
            shape = (a.shape[0], b.shape[-1]) if b.dim() == 3 else (
                len(ends), a.shape[0], b.shape[1])
            return a.new_empty(shape)
        return super().compute(func, args, kwargs)


class _Saved:
    """The storages that autograd saves, by the layer that saved them first."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module],
                 experts: Sequence[nn.Module]) -> None:
        self.layer, self.in_experts = OUTSIDE, False
        self.sizes: dict[int, tuple[int, bool, int]] = {}
        self.kept: list[Tensor] = []  # keeps the keys of `sizes` unique
        self._left_out = {x.untyped_storage()._cdata
                          for x in (*model.parameters(), *model.buffers())}
        self.hooks = [hook for index, layer in enumerate(layers) for hook in (
            layer.register_forward_pre_hook(lambda *_, index=index: self._enter(index)),
            layer.register_forward_hook(lambda *_: self._enter(OUTSIDE)))]
        self.hooks += [hook for module in experts for hook in (
            module.register_forward_pre_hook(lambda *_: self._experts(True)),
            module.register_forward_hook(lambda *_: self._experts(False)))]

    def _enter(self, index: int) -> None:
        self.layer = index

    def _experts(self, inside: bool) -> None:
        self.in_experts = inside

    def pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._left_out and key not in self.sizes:
            self.sizes[key] = self.layer, self.in_experts, storage.nbytes()
            self.kept.append(x.detach())
        return x

    def total(self) -> int:
        """Return the number of bytes of all saved storages."""
        return sum(size for *_, size in self.sizes.values())

    def of(self, layer: int, in_experts: bool = False) -> int:
        """Return the bytes that a layer saves, either outside or inside the routed experts."""
        return sum(size for at, inside, size in self.sizes.values()
                   if (at, inside) == (layer, in_experts))


def kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """Return a value that is equal for layers with the same class and the same parameters."""
    return type(layer), tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())


@contextmanager
def _skipping(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the block, the given layers return their first input."""
    for layer in layers:
        layer.forward = lambda x=None, *_, hidden_states=None, **__: (  # type: ignore[assignment]
            hidden_states if x is None else x)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@contextmanager
def _own_layers() -> Iterator[None]:
    """Inside the block, MoE layers of this package run on the meta device."""
    enabled, tiles = torch.is_autocast_enabled, FrozenWeight.tiles

    def first_tile(weight: FrozenWeight, expert: int, dtype: torch.dtype
                   ) -> Iterator[tuple[slice, Tensor]]:
        return itertools.islice(tiles(weight, expert, dtype), 1)

    # torch has no autocast for the meta device, and refuses the question
    changed: Any = torch
    changed.is_autocast_enabled = lambda device="cuda": device != "meta" and enabled(device)
    FrozenWeight.tiles = first_tile  # type: ignore[method-assign]
    try:
        yield
    finally:
        changed.is_autocast_enabled, FrozenWeight.tiles = enabled, tiles  # type: ignore[method-assign]


def trace(model: nn.Module, layers: Sequence[nn.Module], experts: Sequence[nn.Module],
          loss: Callable[[nn.Module], Tensor], rows: int = 0) -> ModelBytes:
    """Run the forward and backward passes of a model on the meta device, and count its bytes.

    Args:
        model: the model, whose parameters are on the meta device.
        layers: the decoder layers of the model, in their order.
        experts: the modules that compute the routed experts.
        loss: function that runs the model for one micro-batch and returns the loss.
        rows: number of rows that the experts of a layer compute.
    """
    model.train()
    kinds = [kind_of(layer) for layer in layers]
    # for each layer, the first layer of its kind, or the second one for all later layers
    like = [[i for i, kind in enumerate(kinds[:index + 1]) if kind == kinds[index]][:2][-1]
            for index in range(len(kinds))]
    others = [layer for index, layer in enumerate(layers) if index not in like]
    saved, fewer = _Saved(model, layers, experts), _Saved(model, (), ())
    operators = _MetaOperators(rows)
    routed = {id(p): p for module in experts for p in module.parameters()}
    # gradients of whole stacks depend on the number of ranks, but those of adapters are small
    stacks = [] if any(not p.requires_grad for p in routed.values()) else list(routed.values())
    for parameter in model.parameters():  # gradients exist throughout the step
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    operators.leave_out((*model.parameters(), *model.buffers(),
                         *(p.grad for p in model.parameters() if p.grad is not None)))
    try:
        with _skipping(others), _own_layers():
            # separate runs, because the hooks keep tensors alive that the backward pass releases
            with _MetaOperators(rows), saved_tensors_hooks(saved.pack, lambda x: x):
                loss(model)
            for parameter in stacks:
                parameter.requires_grad_(False)
            # without gradients of stacks, fewer tensors are saved
            with _MetaOperators(rows), saved_tensors_hooks(fewer.pack, lambda x: x):
                loss(model)
            with operators:
                loss(model).backward()
    finally:
        for hook in saved.hooks:
            hook.remove()
        for parameter in stacks:
            parameter.requires_grad_(True)
    return ModelBytes(
        layers=tuple(LayerBytes(
            parameters=sum(p.numel() for p in layer.parameters() if id(p) not in routed),
            expert_parameters=sum(p.numel() for p in layer.parameters() if id(p) in routed),
            saved=saved.of(index), expert_saved=saved.of(index, True),
            frozen_bytes=sum(p.nbytes for p in layer.parameters()
                             if id(p) in routed and not p.requires_grad),
            trained=sum(p.numel() for p in layer.parameters()
                        if id(p) in routed and p.requires_grad))
            for index, layer in zip(like, layers, strict=True)),
        parameters=sum(p.numel() for p in model.parameters()),
        parameter_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        ends_saved=saved.of(OUTSIDE), extra=max(0, operators.peak - fewer.total()),
        largest_matrix=max((p.numel() for p in stacks), default=0))
