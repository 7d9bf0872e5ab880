"""Make Megatron's Muon optimizer (`--optimizer muon`, `dist_muon`) support expert weights that are
stacks of matrices.

Megatron 0.18 to main is supported. The package `emerging_optimizers` is required. Megatron uses
Muon for parameters that are matrices, and Adam for all other parameters. In Megatron's own experts,
each weight is a matrix. In the experts of this package, each weight is a stack of matrices, which
Megatron would not recognise as a matrix. The function `prepare` changes Megatron so that Muon
updates the matrix of each expert separately (see `experts.matrices`). Expert biases are stacks of
vectors and are still updated by Adam.
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

# optimizers that update each matrix of a stack separately: by our orthogonalization or elementwise
FOLLOWED = ("muon", "dist_muon", "lion")
_SINCE = "megatron-core 0.18 or newer"


def prepare(experts: nn.Module, shards: int) -> None:
    """Make Megatron's optimizers treat the weights of these experts in the same way as the weights
    of Megatron's own experts.

    shards: number of shards into which each expert is split.
    Raises:
        ValueError: If the script's `--optimizer` is Muon but the installed Megatron has no Muon or
            cannot be extended.
    """
    mark_matrices(experts, shards)
    name = str(script_arguments().get("optimizer", ""))
    try:
        module = importlib.import_module("megatron.core.optimizer.emerging_optimizers")
    except ModuleNotFoundError:
        if "muon" in name:
            raise ValueError(f"--optimizer {name} with moe-plugin's experts needs {_SINCE}, "
                             "because older versions use Adam for stacks of matrices. Use "
                             "--optimizer adam.") from None
        return
    if module.HAVE_EMERGING_OPTIMIZERS:
        _teach(module)
    elif "muon" in name:
        raise ValueError(f"--optimizer {name} needs the package emerging-optimizers, which "
                         "requires Python 3.12 or newer. Run pip install emerging-optimizers, or "
                         "use --optimizer adam.")


@functools.cache
def _teach(module: ModuleType) -> None:
    """Extend Megatron's optimizers to support stacks of matrices. Later calls have no effect."""
    core: Any = importlib.import_module("megatron.core.optimizer")
    layer_wise: Any = importlib.import_module("megatron.core.optimizer.layer_wise_optimizer")
    attributes = importlib.import_module("megatron.core.tensor_parallel.layers")
    # attributes that Megatron copies to the float32 copies of parameters
    attributes._MODEL_PARALLEL_ATTRIBUTE_DEFAULTS[MARK] = None
    for entry in module._EMERGING_OPTIMIZERS.values():
        entry.default_param_overrides = {
            _with_stacks(key): value for key, value in entry.default_param_overrides.items()}
    entry = module._EMERGING_OPTIMIZERS["muon"]
    entry.optimizer_cls = _expert_muon(entry.optimizer_cls)
    managed = layer_wise.is_managed_by_layer_wise_optimizer
    for module_with_name in (core, layer_wise):
        module_with_name.is_managed_by_layer_wise_optimizer = lambda p: (
            part_of(p) is not None or (managed(p) and not is_vector(p)))
    optimizer = layer_wise.LayerWiseDistributedOptimizer
    optimizer._compute_per_buffer_param_layout = staticmethod(
        _stacks_together(optimizer._compute_per_buffer_param_layout))
    optimizer._shard_params_ping_pong = _stacks_whole(optimizer._shard_params_ping_pong)
    core._get_megatron_emerging_optimizer = _refused(core._get_megatron_emerging_optimizer)


def _with_stacks(key: Any) -> Any:
    """Return a copy of a `ParamKey` that selects all parameters that Muon must not update, for
    example vectors. The copy does not select stacks of matrices of this package's experts.
    """

    def added(predicate: Any) -> Any:
        return replace(predicate, fn=lambda p: is_vector(p) or (
            part_of(p) is None and predicate.fn(p)))

    predicates = key.predicate
    if isinstance(predicates, tuple):
        return replace(key, predicate=tuple(map(added, predicates)))
    return replace(key, predicate=added(predicates))


def _expert_muon(base: type[Any]) -> type[Any]:
    class ExpertMuon(base):

        def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(params, *args, **kwargs)
            # parts of matrices by their stack: (parameter, momentum, learning rate) of each part
            self._parts: dict[Any, dict[int, tuple[Tensor, Tensor, float]]] = {}
            marks = [part_of(p) for group in self.param_groups for p in group["params"]]
            cut = max((mark.stack.shards for mark in marks if mark is not None), default=1)
            if cut > 1 and self.tp_mode != "blockwise":
                raise ValueError(
                    f"muon_tp_mode={short(self.tp_mode)} cannot be used with experts that are "
                    f"split into {cut} shards. Use --muon-tp-mode blockwise, or at least as many "
                    "experts as expert-parallel ranks.")

        def orthogonalize(self, p: Tensor, grad: Tensor, **group: Any) -> Tensor:
            """Return the orthogonalized update of the expert weights `p` [L, in, out]."""
            mark = part_of(p)
            if mark is None:
                return super().orthogonalize(p, grad, **group)
            parts = self._parts.setdefault(mark.stack, {})
            parts[mark.number] = p, grad, group["lr"]
            if len(parts) < mark.stack.parts:
                return grad.new_zeros(())  # the update is made when the last part arrives
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
            """Run one optimizer step with Megatron's Muon. All parameters that together store one
            matrix must belong to the same optimizer.
            """
            done = super().step(closure)
            if self._parts:
                raise RuntimeError("Muon needs all parameters of an expert's matrix on one rank, "
                                   "but they were assigned to different ranks")
            return done

    return ExpertMuon


class _Together:
    def __init__(self, members: Sequence[Tensor], aligned: Callable[[int], int]) -> None:
        self.members, self.aligned = members, aligned
        *first, last = [each.numel() for each in members]
        size = sum(map(aligned, first)) + last
        self.data = SimpleNamespace(nelement=lambda: size)

    def dim(self) -> int:
        """Return the number of dimensions of each parameter, for Megatron's main branch."""
        return self.members[0].dim()

    def places(self, start: int, bucket: int) -> Iterable[tuple[Tensor, tuple[int, int, int]]]:
        """Yield each parameter with its position in the buffer (start, end, bucket)."""
        for each in self.members:
            yield each, (start, start + each.numel(), bucket)
            start = self.aligned(start + each.numel())


def _stacks_together(layout: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that assigns parameters to positions in a buffer, so that all parameters of
    one matrix are assigned to the same data-parallel rank.
    """
    aligned = importlib.import_module("megatron.core.optimizer.param_layout").pad_param_start

    @functools.wraps(layout)
    def call(params: list[Any], *args: Any, **kwargs: Any) -> Any:
        stacks: dict[Any, list[Tensor]] = {}
        for p in params:
            mark = part_of(p)
            stacks.setdefault(p if mark is None else mark.stack, []).append(p)
        units = [members[0] if len(members) == 1 else _Together(members, aligned)
                 for members in stacks.values()]
        param_layout = layout(units, *args, **kwargs)
        places = param_layout.param_index_map
        for unit in [unit for unit in units if isinstance(unit, _Together)]:
            start, _, bucket = places.pop(unit)
            places.update(unit.places(start, bucket))
        return param_layout

    return call


def _stacks_whole(share: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(share)
    def call(self: Any, optimizers: Any, world: int, expert_world: int) -> Any:
        marks = [part_of(p) for each in optimizers for group in each.param_groups
                 for p in group["params"]]
        if expert_world > 1 and any(mark and mark.stack.parts > 1 for mark in marks):
            raise ValueError(
                f"use_layer_wise_param_layout=False cannot be used with gated experts on "
                f"{expert_world} replicas, because it assigns the two weights of a matrix to "
                "different ranks. Leave out --no-use-layer-wise-param-layout.")
        return share(self, optimizers, world, expert_world)

    return call


def _refused(build: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(build)
    def call(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        marked = any(part_of(p) is not None for chunk in model_chunks for p in chunk.parameters())
        if marked and config.optimizer not in FOLLOWED:
            raise ValueError(
                f"optimizer={short(config.optimizer)} is not supported with moe-plugin's experts, "
                "because their weights are stacks of matrices. Use one of adam, sgd, "
                f"{', '.join(FOLLOWED)}.")
        return build(config, model_chunks, *args, **kwargs)

    return call
