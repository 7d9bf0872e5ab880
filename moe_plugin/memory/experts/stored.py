"""Experts that are stored in an `ExpertStore` and computed in the slots of its cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moe_plugin.comm.placement import HostContext, Placement
from moe_plugin.config import MoEConfig
from moe_plugin.experts import FFNExperts, expert_kinds
from moe_plugin.experts.base import Experts, mark_expert, use_current_names
from moe_plugin.experts.ffn import SHARD_AXIS
from moe_plugin.kernels.expert_ffn import FFNParameters, Strategy, apply_to_rows
from moe_plugin.memory.experts.cache import CacheSpec
from moe_plugin.memory.experts.files import ExpertFile, expert_of, given_file, own_file
from moe_plugin.memory.experts.store import (
    ExpertStore,
    FileWeights,
    HostWeights,
    counts_of,
    order_of,
    parts,
    reordered,
    with_counts,
)
from moe_plugin.planner.units import parse_size
from moe_plugin.records import ExpertRows, ParameterRequest, RowCounts, RowPlan
from moe_plugin.utils.machine import pinned_copy, to_device, user_cache
from moe_plugin.utils.regular_files import check_input


class StoredExperts(Experts):
    """Feed-forward experts of any kind whose parameters are stored outside the device.

    Only the experts that are currently computed have a copy of their parameters on the device.
    Experts in host memory are ordinary parameters, and stay in host memory when the layer is moved
    to a device. Experts in a file are not registered as parameters. For experts in a file,
    `state_dict` returns tensors that are mapped from the file. If other processes can change the
    file, the tensors are mapped from a copy. When a state dict is loaded, the experts are written
    to the file one at a time.

    Attributes:
        store: see `ExpertStore`.
    """

    traceable = False
    stored = True

    def __init__(self, config: MoEConfig, placement: Placement, *, host: HostContext,
                 dtype: torch.dtype | None = None, device: Any = None) -> None:
        super().__init__()
        self._config, self._place, self._host = config.experts, placement, host
        self._probe = torch.empty(0, dtype=dtype, device=device)
        self._values_wanted = True
        self._taken: dict[str, int] = {}
        kind: Callable[..., Any] = expert_kinds.get(config.experts.kind)
        self.on_disk = config.experts.store == "disk"
        where = "meta" if self.on_disk or self._probe.is_meta else "cpu"
        # in a tuple, so that torch does not register it as a submodule
        self._template: tuple[FFNExperts] = (
            kind(config, placement, host=host, dtype=dtype, device=where),)
        named = dict(self.template.named_parameters())
        self.shapes = {name: tuple(value.shape[1:]) for name, value in named.items()}
        for name in (*named, *sorted(set(SHARD_AXIS) - set(named))):
            self.register_parameter(name, None)  # also for a file: the state has these names
        for name, value in named.items() if not self.on_disk else ():
            self._adopt(name, value.detach())
        self.store = ExpertStore(self._weights(), self._spec(), placement.first_expert,
                                 placement.local)

    @property
    def template(self) -> FFNExperts:
        """Experts of the configured kind, whose parameters are passed in each call."""
        return self._template[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._probe.dtype

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype in which experts are stored and copied to the device."""
        return self.dtype

    @property
    def anchor(self) -> Tensor:
        """See `Experts`. An empty tensor on the device that connects exchanges to the autograd
        graph. The tensor requires gradients if the experts are trained.
        """
        return self._probe.requires_grad_(any(p.requires_grad for p in self.parameters()))

    def forward(self, work: ExpertRows | ParameterRequest) -> Tensor:
        """See `Experts`.

        Raises:
            ValueError: If the layer is trained with experts in a file or with expert dropout.
            TierError: If the experts cannot be read.
        """
        assert isinstance(work, ExpertRows), "parameters are only asked of experts that gather"
        gates_TK = work.rows.weights_TK if isinstance(work.rows, RowPlan) else None
        parameters = tuple(self.parameters())
        if not torch.is_grad_enabled() or not any(
                x is not None and x.requires_grad for x in (work.x, gates_TK, *parameters)):
            return self.compute(work)
        self._check_training()
        counts = counts_of(work.rows)
        active = sum(n > 0 for n in counts)
        if isinstance(work.rows, RowPlan) and self.store.room(active) < active:
            # the cache cannot store all active experts at once, so their rows are computed in parts
            def in_parts(rows_RD: Tensor, counts: RowCounts) -> Tensor:
                piece = dataclasses.replace(work, x=rows_RD, rows=counts)
                return Refetched.apply(rows_RD, None, self, piece, *parameters)

            return apply_to_rows(in_parts, work.x, work.rows)
        return Refetched.apply(work.x, gates_TK, self, work, *parameters)

    @torch.no_grad()
    def compute(self, work: ExpertRows) -> Tensor:
        """Compute outputs without gradients, for a few experts at a time if the cache is too small.
        """
        counts = counts_of(work.rows)
        active = [expert for expert, rows in enumerate(counts) if rows]
        room = self.store.room(len(active))
        if len(active) <= room:
            return self._run(work.x, work.rows, active, work.strategy, work.started)
        return apply_to_rows(
            lambda rows_RD, c: torch.cat([self._run(part_RD, part, experts, work.strategy)
                                          for part_RD, part, experts in parts(rows_RD, c, room)]),
            work.x, work.rows)

    def _run(self, x: Tensor, rows: RowCounts | RowPlan, active: Sequence[int],
             strategy: Strategy | None,
             started: Callable[[], object] | None = None) -> Tensor:
        """Compute the rows of the experts in `active`, which are all experts with rows."""
        counts, buffers = counts_of(rows), self.store.cache.buffers
        with self.store.use(active) as slots:
            if started is not None:
                started()
            first, last = min(slots, default=0), max(slots, default=0) + 1
            lengths = [0] * (last - first)
            for expert, slot in zip(active, slots, strict=True):
                lengths[slot - first] = counts[expert]
            parameters = self.template.compute_parameters(
                {name: buffer[first:last] for name, buffer in buffers.items()})
            if slots == sorted(slots):
                return self.call(x, with_counts(rows, lengths), parameters, strategy)
            order_R = order_of([counts[expert] for expert in active], slots, x.device)
            if isinstance(rows, RowPlan):
                return self.call(x, reordered(rows, order_R, lengths), parameters, strategy)
            y_RD = self.call(x.index_select(0, order_R), RowCounts(lengths), parameters, strategy)
            return torch.empty_like(y_RD).index_copy_(0, order_R, y_RD)

    def call(self, x: Tensor, rows: RowCounts | RowPlan, parameters: FFNParameters,
             strategy: Strategy | None) -> Tensor:
        return self.template(ExpertRows(x, rows, parameters, strategy))

    @contextmanager
    def fetched(self, experts: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        """Yield copies [A, ...] of the parameters of A experts on the device, by parameter name, so
        that their gradients can be computed.
        """
        with self.store.use(experts) as slots:
            index_A = to_device(slots, self._probe.device)
            yield {name: buffer.index_select(0, index_A)
                   for name, buffer in self.store.cache.buffers.items()}

    def prefetch(self, ids_TK: Tensor) -> None:
        """See `Experts`. The host synchronizes with the device only once."""
        self.store.prefetch(expert for expert in ids_TK.unique().tolist() if expert >= 0)

    def taken_counts(self) -> dict[str, int]:
        """See `Experts`. Return by how much the store's counters have increased since the last
        call, and the number of bytes in slots.

        The `stalls` counter is 1 if the call waited for a copy, and 0 otherwise.
        """
        now = self.store.counters.as_dict()
        before, self._taken = self._taken, now
        grown = {name: value - before.get(name, 0) for name, value in now.items()}
        grown["stalls"] = min(1, grown["stalls"])  # a call may compute in parts
        return {**grown, "resident_bytes": self.store.cache.resident_bytes}

    def use_layer(self, number: int | None) -> None:
        """See `Experts`. If the file contains several layers, select layer `number`."""
        if self._host.numbered_later:
            self._host = dataclasses.replace(self._host, layer_number=number, numbered_later=False)
            self.store.weights = self._weights()
            self.store.forget()

    def train(self, mode: bool = True) -> StoredExperts:
        self.template.train(mode)
        return super().train(mode)

    def _check_training(self) -> None:
        if not self.training:
            return
        for name, value, bad, remedy in (
                ("store", "disk", self.on_disk, "host"),
                ("dropout", self._config.dropout, self._config.dropout > 0, "0"),
                ("store", "host", self._host.adds_to_main_grad, "device")):
            if bad:
                raise ValueError(
                    f"experts.{name}={value} cannot be used in training with "
                    f"experts.store={self._config.store}"
                    f"{' in this host' if self._host.adds_to_main_grad else ''}: use {remedy}, or "
                    "call eval()")

    def _weights(self) -> HostWeights | FileWeights:
        if not self.on_disk:
            return HostWeights(self._parameters, self.shapes, self._probe.device)
        path = self._config.store_path
        if path is not None and path.endswith(".safetensors"):
            check_input(path, "experts.store_path")
            layer = 0 if self._host.numbered_later else self._host.layer_number
            file = given_file(path, self.shapes, self._place, layer)
        else:
            file = self._new_file()
        return FileWeights(file, self._new_file, self.template.draw)

    def _new_file(self, dtype: torch.dtype | None = None) -> ExpertFile:
        path = self._config.store_path
        folder: str | Path = path or ""
        if path is None or path.endswith(".safetensors"):
            folder = user_cache("experts cannot be stored there") / "experts"
        return own_file(folder, dtype or self.stored_dtype, self.shapes, self._place.local)

    def _spec(self) -> CacheSpec:
        c = self._config
        return CacheSpec(tuple(self.shapes.items()), self.stored_dtype, self._probe.device,
                         parse_size(c.cache), c.cache_policy, c.store_throttle * 1e6 or None,
                         self._place.comm.rank)

    def _adopt(self, name: str, value: Tensor) -> None:
        if self._probe.device.type == "cuda" and not value.is_pinned():
            value = pinned_copy(value, self._probe.device)
        old = self._parameters.get(name)
        trained = value.is_floating_point() and (old is None or old.requires_grad)
        parameter = mark_expert(nn.Parameter(value, trained))
        self.register_parameter(name, parameter)
        self.template.register_parameter(name, parameter)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredExperts:
        probe = self._probe
        with torch.no_grad():
            self._probe = fn(probe.detach())
        for name, value in [(name, value) for name in self.shapes
                            if (value := self._parameters.get(name)) is not None]:
            if value.is_meta and not self._probe.is_meta:
                self._adopt(name, torch.empty(value.shape, dtype=self.stored_dtype))
            elif value.dtype != self.stored_dtype or self._probe.is_cuda != probe.is_cuda:
                value.data = value.data.to(self.stored_dtype)
                if self._probe.is_cuda and not value.is_pinned():
                    value.data = pinned_copy(value.data, self._probe.device)
                if value.grad is not None:
                    value.grad = value.grad.to(self.dtype)
        if isinstance(self.store.weights, HostWeights):
            self.store.weights = HostWeights(self._parameters, self.shapes, self._probe.device)
        self.store.move(self._spec())
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str,
                            keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(self.store.weights, FileWeights):
            if self._values_wanted:
                destination.update((prefix + name, value)
                                   for name, value in self.store.weights.mapped().items())
                self.store.forget()  # the receiver of the mapped tensors may write to them
            else:
                destination.update((prefix + name, torch.empty(
                    self._place.local, *shape, dtype=self.stored_dtype, device="meta"))
                    for name, shape in self.shapes.items())

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: Any,
                              strict: bool, missing: list[str], unexpected: list[str],
                              errors: list[str]) -> None:
        """See torch's method. If the experts are in a file, they are written to it one at a time.

        Instead of a tensor, the state may contain an object with `entry.shape` and `read(window)`.
        """
        weights = self.store.weights
        if not isinstance(weights, FileWeights):
            super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected,
                                          errors)
            return
        use_current_names(state, prefix)
        found = {name: state[prefix + name] for name in self.shapes if prefix + name in state}
        others = [key for key in state if key.removeprefix(prefix) not in self.shapes]
        rest = {key: state[key] for key in others if key.removeprefix(prefix) in self._parameters}
        super()._load_from_state_dict(rest, prefix, metadata, strict, missing, unexpected, errors)
        unexpected += [k for k in others if strict and k.startswith(prefix) and k not in rest]
        if strict and (not weights.filled or found):
            missing += [prefix + name for name in self.shapes if name not in found]
        wrong = [
            f"size mismatch for {prefix + name}: copying a param with shape {tuple(shape)} from "
            f"checkpoint, the shape in the file of experts is {want}" for name, value in
            found.items() if tuple(shape := value.shape if isinstance(value, Tensor)
                                   else value.entry.shape)
            != (want := (self._place.local, *self.shapes[name]))]
        errors += wrong
        # a model on the meta device has no values yet
        if found and not wrong and not expert_of(next(iter(found.values())), 0).is_meta:
            weights.fill({name: partial(expert_of, value) for name, value in found.items()})


def stored_names(model: nn.Module) -> set[str]:
    """Return the names, as in the state dict, of the expert parameters that are stored in files."""
    return {f"{prefix}.{name}" if prefix else name for prefix, module in model.named_modules()
            if isinstance(module, StoredExperts) and module.on_disk for name in module.shapes}


@contextmanager
def without_values(model: nn.Module) -> Iterator[None]:
    """Let `state_dict` return meta tensors for experts stored in files."""
    modules = [module for module in model.modules() if isinstance(module, StoredExperts)]
    for module in modules:
        module._values_wanted = False
    try:
        yield
    finally:
        for module in modules:
            module._values_wanted = True


class Refetched(torch.autograd.Function):
    """Autograd function that computes the rows of the experts. The backward pass loads the experts'
    parameters again and recomputes the rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates_TK: Tensor | None, experts: StoredExperts,
                work: ExpertRows, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, gates_TK)
        device = x.device.type
        ctx.autocast = {"device_type": device, "enabled": torch.is_autocast_enabled(device),
                        "dtype": torch.get_autocast_dtype(device)}
        ctx.experts, ctx.rows, ctx.strategy = experts, work.rows, work.strategy
        ctx.like = parameters
        if isinstance(ctx.rows, RowPlan):
            ctx.rows = dataclasses.replace(ctx.rows, weights_TK=None)
        return experts.compute(work)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, gates_TK), experts, rows = ctx.saved_tensors, ctx.experts, ctx.rows
        counts = counts_of(rows)
        active = [expert for expert, n in enumerate(counts) if n]
        wanted = ctx.needs_input_grad
        sums = [torch.zeros_like(p) if needed else None
                for p, needed in zip(ctx.like, wanted[4:], strict=True)]
        names = list(experts.shapes)
        call = partial(_gradients, ctx, names=names, sums=sums)
        room = experts.store.room(len(active))
        if not active:
            grad_x = torch.zeros_like(x)
            grad_gates = None if gates_TK is None else torch.zeros_like(gates_TK)
        elif len(active) <= room:
            grad_x, grad_gates = call(x, gates_TK, grad, active=active,
                                      rows=with_counts(rows, [counts[e] for e in active]))
        else:  # parts of the rows, not of the tokens
            both = zip(parts(x, rows, room), parts(grad, rows, room), strict=True)
            grad_x, grad_gates = torch.cat([
                call(x_RD, None, grad_RD, rows=RowCounts([part.host[e] for e in chosen]),
                     active=chosen)[0]
                for (x_RD, part, chosen), (grad_RD, _, _) in both]), None
        if experts.training:
            experts.store.forget()  # an optimizer's step follows
        return (grad_x if wanted[0] else None, grad_gates if wanted[1] else None, None, None, *sums)


def _gradients(ctx: Any, x: Tensor, gates_TK: Tensor | None, grad: Tensor, *,
               rows: RowCounts | RowPlan, active: Sequence[int], names: Sequence[str],
               sums: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Return gradients of `x` and the gate weights. Add parameter gradients to `sums`."""
    experts: StoredExperts = ctx.experts
    with experts.fetched(active) as tensors, torch.enable_grad(), torch.autocast(**ctx.autocast):
        x = x.detach().requires_grad_()
        inputs = [x]
        if gates_TK is not None:
            assert isinstance(rows, RowPlan)
            gates_TK = gates_TK.detach().requires_grad_()
            rows = dataclasses.replace(rows, weights_TK=gates_TK)
            inputs.append(gates_TK)
        leaves = [tensors[name].requires_grad_() for name in names if sums]
        y = experts.call(x, rows, experts.template.compute_parameters(
            dict(zip(names, leaves, strict=False)) or tensors), ctx.strategy)
    gradients = torch.autograd.grad(y, inputs + leaves, grad, allow_unused=True)
    for total, part in zip(sums, gradients[len(inputs):], strict=True):
        if total is not None and part is not None:
            total[list(active)] = part.to(total.device, total.dtype)
    return gradients[0], gradients[1] if gates_TK is not None else None
