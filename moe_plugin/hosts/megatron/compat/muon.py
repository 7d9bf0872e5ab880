"""Megatron's Muon (`--optimizer muon`, `dist_muon`) with stacks of experts' weights; versions 0.18
to main, with the package `emerging_optimizers`.

Megatron orthogonalizes parameters that are matrices and gives all others to Adam. Its experts are
matrices; ours are stacks of them, in which it would see none. `prepare` teaches it: the same
function makes the same update of each expert's matrix (`experts.matrices`), and biases, stacks of
vectors, stay with Adam.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.experts.matrices import MARK, from_matrices, mark_matrices, part_of, to_matrices
from moe_plugin.hosts.megatron.compat.optimizer import is_vector
from moe_plugin.hosts.megatron.compat.settings import script_arguments
from moe_plugin.utils.messages import short

# whose updates of a stack are those of its matrices: by our orthogonalization, or by element
FOLLOWED = ("muon", "dist_muon", "lion")
_SINCE = "megatron-core 0.18 or newer"


def prepare(experts: nn.Module, shards: int) -> None:
    """Let Megatron's optimizers treat these experts' weights as it treats its own experts'.

    shards: into which each expert is cut.
    Raises:
        ValueError: the script's `--optimizer` is Muon, and this Megatron has none, or none that
            can be taught.
    """
    mark_matrices(experts, shards)
    name = str(script_arguments().get("optimizer", ""))
    try:
        module = importlib.import_module("megatron.core.optimizer.emerging_optimizers")
    except ModuleNotFoundError:
        if "muon" in name:
            raise ValueError(f"--optimizer {name} with moe-plugin's experts needs {_SINCE}: older "
                             "ones give Adam what is no matrix; use --optimizer adam") from None
        return
    if module.HAVE_EMERGING_OPTIMIZERS:
        _teach(module)
    elif "muon" in name:
        raise ValueError(f"--optimizer {name} needs the package emerging-optimizers, of Python "
                         "3.12 or newer: pip install emerging-optimizers; or use --optimizer adam")


@functools.cache
def _teach(module: ModuleType) -> None:
    """Once for the life of the process."""
    core = importlib.import_module("megatron.core.optimizer")
    layer_wise = importlib.import_module("megatron.core.optimizer.layer_wise_optimizer")
    attributes = importlib.import_module("megatron.core.tensor_parallel.layers")
    # what copies of parameters in float32 get of them
    attributes._MODEL_PARALLEL_ATTRIBUTE_DEFAULTS[MARK] = None
    for entry in module._EMERGING_OPTIMIZERS.values():
        entry.default_param_overrides = {
            _with_stacks(key): value for key, value in entry.default_param_overrides.items()}
    entry = module._EMERGING_OPTIMIZERS["muon"]
    entry.optimizer_cls = _expert_muon(entry.optimizer_cls)
    managed = layer_wise.is_managed_by_layer_wise_optimizer
    for place in (core, layer_wise):
        place.is_managed_by_layer_wise_optimizer = lambda p: (
            part_of(p) is not None or (managed(p) and not is_vector(p)))
    optimizer = layer_wise.LayerWiseDistributedOptimizer
    optimizer._compute_per_buffer_param_layout = staticmethod(
        _stacks_together(optimizer._compute_per_buffer_param_layout))
    optimizer._shard_params_ping_pong = _stacks_whole(optimizer._shard_params_ping_pong)
    core._get_megatron_emerging_optimizer = _refused(core._get_megatron_emerging_optimizer)


def _with_stacks(key: Any) -> Any:
    """A `ParamKey` of parameters that are not matrices, without our stacks of them."""

    def added(predicate: Any) -> Any:
        return replace(predicate, fn=lambda p: is_vector(p) or (
            part_of(p) is None and predicate.fn(p)))

    predicates = key.predicate
    if isinstance(predicates, tuple):
        return replace(key, predicate=tuple(map(added, predicates)))
    return replace(key, predicate=added(predicates))


def _expert_muon(base: type[Any]) -> type[Any]:
    """Megatron's Muon, which knows stacks, too."""

    class ExpertMuon(base):

        def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(params, *args, **kwargs)
            # parts of matrices by their stack: parameter, momentum and learning rate of each
            self._parts: dict[Any, dict[int, tuple[Tensor, Tensor, float]]] = {}
            marks = [part_of(p) for group in self.param_groups for p in group["params"]]
            cut = max((mark.stack.shards for mark in marks if mark is not None), default=1)
            if cut > 1 and self.tp_mode != "blockwise":
                raise ValueError(
                    f"muon_tp_mode={short(self.tp_mode)} does not fit experts that are cut into "
                    f"{cut} shards: must be 'blockwise'; use --muon-tp-mode blockwise, or as many "
                    "experts as ranks hold them")

        def orthogonalize(self, p: Tensor, grad: Tensor, **group: Any) -> Tensor:
            """The update of p, [L, in, out] of experts' weights."""
            mark = part_of(p)
            if mark is None:
                return super().orthogonalize(p, grad, **group)
            parts = self._parts.setdefault(mark.stack, {})
            parts[mark.number] = p, grad, group["lr"]
            if len(parts) < mark.stack.parts:
                return grad.new_zeros(())  # with the last part
            del self._parts[mark.stack]
            momenta = [parts[number][1] for number in sorted(parts)]
            updates = from_matrices([self.scaled_orthogonalize_fn(matrix, None, None)
                                     for matrix in to_matrices(momenta)], momenta)
            for number, update in enumerate(updates):
                if number != mark.number:
                    other, _, lr = parts[number]
                    other.add_(update, alpha=-lr)
            return updates[mark.number]

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            """See Megatron's; all parts of a matrix are in one optimizer."""
            done = super().step(closure)
            if self._parts:
                raise RuntimeError("Muon has a part of an expert's matrix alone: its parameters "
                                   "were shared out one by one")
            return done

    return ExpertMuon


class _Together:
    """Several parameters that a layout keeps next to each other."""

    def __init__(self, members: Sequence[Tensor], aligned: Callable[[int], int]) -> None:
        self.members, self.aligned = members, aligned
        *first, last = [each.numel() for each in members]
        size = sum(map(aligned, first)) + last
        self.data = SimpleNamespace(nelement=lambda: size)

    def dim(self) -> int:
        """As that of each: main asks, to estimate the cost of a matrix."""
        return self.members[0].dim()

    def places(self, start: int, bucket: int) -> Iterable[tuple[Tensor, tuple[int, int, int]]]:
        """Where each is in the buffer, from `start`: first and last number, bucket."""
        for each in self.members:
            yield each, (start, start + each.numel(), bucket)
            start = self.aligned(start + each.numel())


def _stacks_together(layout: Callable[..., Any]) -> Callable[..., Any]:
    """Of a layout of parameters on data-parallel ranks: all parts of a matrix on one rank."""
    aligned = importlib.import_module("megatron.core.optimizer.param_layout").pad_param_start

    @functools.wraps(layout)
    def call(params: list[Any], *args: Any, **kwargs: Any) -> Any:
        stacks: dict[Any, list[Tensor]] = {}
        for p in params:
            mark = part_of(p)
            stacks.setdefault(p if mark is None else mark.stack, []).append(p)
        units = [members[0] if len(members) == 1 else _Together(members, aligned)
                 for members in stacks.values()]
        found = layout(units, *args, **kwargs)
        places = found.param_index_map
        for unit in [unit for unit in units if isinstance(unit, _Together)]:
            start, _, bucket = places.pop(unit)
            places.update(unit.places(start, bucket))
        return found

    return call


def _stacks_whole(share: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(share)
    def call(self: Any, optimizers: Any, world: int, expert_world: int) -> Any:
        marks = [part_of(p) for each in optimizers for group in each.param_groups
                 for p in group["params"]]
        if expert_world > 1 and any(mark and mark.stack.parts > 1 for mark in marks):
            raise ValueError(
                f"use_layer_wise_param_layout=False with gated experts on {expert_world} replicas: "
                "it gives the two weights of a matrix to two ranks; leave out "
                "--no-use-layer-wise-param-layout")
        return share(self, optimizers, world, expert_world)

    return call


def _refused(build: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(build)
    def call(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        marked = any(part_of(p) is not None for chunk in model_chunks for p in chunk.parameters())
        if marked and config.optimizer not in FOLLOWED:
            raise ValueError(
                f"optimizer={short(config.optimizer)} is not supported with moe-plugin's experts, "
                f"whose weights are stacks of matrices: must be adam, sgd, {', '.join(FOLLOWED)}; "
                "use --optimizer muon or adam")
        return build(config, model_chunks, *args, **kwargs)

    return call
