"""`Experts`, the base class of all types of experts, functions that mark parameters as expert
parameters, experts that are arbitrary modules, and functions that build the experts of a rank.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.comm.placement import HostContext, Placement
from moe_plugin.config import MoEConfig
from moe_plugin.experts.lora import ExpertRanks
from moe_plugin.kernels.expert_ffn import FFNParameters, apply_to_rows
from moe_plugin.kernels.weight_grads import LaterGrads
from moe_plugin.records import ExpertRows, ParameterRequest, RowCounts
from moe_plugin.utils.machine import memory_bytes
from moe_plugin.utils.registry import Registry

# Earlier versions used other parameter names, which checkpoints may still contain.
# former name -> current name
FORMER = {"b_in_LF": "bias_in_LF", "b_gate_LF": "bias_gate_LF", "b_out_LD": "bias_out_LD"}
# current name -> name in Megatron's distributed checkpoints, which all versions must be able to
# read
IN_MEGATRON = {now: former for former, now in FORMER.items()}
# peft's adapters add `base_layer` to the path; fields of the optimizer may follow the name
_IN_FULL = re.compile(rf"(?<![^.])experts\.((?:base_layer\.)*)({'|'.join(FORMER)})(?![^.])")


def current_name(name: str) -> str:
    """If a tensor name contains a former parameter name, replace it with the current parameter
    name.
    """
    return _IN_FULL.sub(lambda found: f"experts.{found[1]}{FORMER[found[2]]}", name)


def with_current_names(column: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a mapping with `current_name` applied to each key. The order of the keys is
    preserved.

    Raises:
        ValueError: If the mapping contains a parameter under both its former and its current name.
    """
    renamed = {current_name(name): value for name, value in column.items()}
    if len(renamed) < len(column):
        both = next(name for name in column if current_name(name) != name in column)
        raise ValueError(f"the file contains both {both!r} and {current_name(both)!r}, which is "
                         f"the current name of the same parameter. Remove {both!r}")
    return renamed


def use_current_names(state: MutableMapping[str, Any], prefix: str) -> None:
    """Replace former parameter names of one layer's experts in a state dict.

    Args:
        state: the state dict, which is modified in place. If a parameter is present under both
            names, both entries are kept.
        prefix: the prefix of the experts' names, with a trailing dot.
    """
    for former, now in FORMER.items():
        if prefix + former in state and prefix + now not in state:
            state[prefix + now] = state.pop(prefix + former)


def mark_expert(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter as an expert parameter by setting `parameter.expert = True`.

    Hosts must not reduce the gradient of an expert parameter over all data-parallel ranks.
    """
    parameter.expert = True  # type: ignore[attr-defined]
    return parameter


def mark_experts(module: nn.Module, ranks: int | None = None) -> None:
    """Mark all parameters of a module as expert parameters.

    Args:
        module: the experts, or an adapter that wraps them. Adapter parameters also belong to this
            rank's experts, so they are marked as well.
        ranks: the size of the expert-parallel group, which is stored on each parameter. By default,
            the size stored earlier is not changed.
    """
    for parameter in module.parameters():
        mark_expert(parameter)
        if ranks is not None:
            parameter.expert_ranks = ranks  # type: ignore[attr-defined]


def expert_ranks(parameter: Tensor) -> int:
    """Return the expert-parallel size stored on an expert parameter, or 1 for any other parameter.
    """
    return getattr(parameter, "expert_ranks", 1)


def is_expert(parameter: Tensor) -> bool:
    """Return whether a parameter belongs to an expert. The result is also correct for fairseq's
    fp32 copies of parameters.
    """
    return getattr(parameter, "expert", False)


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the expert parameters of a model by name."""
    return {name: p for name, p in model.named_parameters() if is_expert(p)}


class Experts(nn.Module):
    """The base class of the experts of one rank.

    Parameters remain marked as expert parameters when torch replaces them. Torch replaces
    parameters in deepcopy, when they leave the meta device, and in
    `load_state_dict(..., assign=True)`.

    Attributes:
        supports_gather: whether the experts can compute with parameters gathered from other ranks.
            If `supports_gather` is True, the subclass implements `local_parameters`,
            `compute_parameters` and `gathered_parameters`.
        stored: whether the parameters are stored outside the device. If `stored` is True,
            `prefetch` can hide the time to load the parameters.
        traceable: whether `torch.compile` can trace the experts.
        reduced: whether `gradients.sync.reduce_experts` was called for these experts.
            `reduce_experts` also sets the attribute `reduced` of each parameter on which it
            registers hooks.
        adapters: the ranks of the low-rank adapters on these experts (`experts.lora`). None
            without adapters.
        later: object that postpones the computation of weight gradients until the host requests it
            after the backward pass. If `later` is None, weight gradients are computed in the
            backward pass.
        seed_comm: the group over which the seed of the initial values is broadcast. None if the
            ranks' random generators are already in the same state, or if initial values are copied
            between ranks.
    """

    supports_gather: ClassVar[bool] = False
    stored: bool = False
    traceable: ClassVar[bool] = True
    reduced: bool = False
    adapters: ExpertRanks | None = None
    later: LaterGrads | None = None
    seed_comm: Comm | None = None

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(_rename)
        self.register_load_state_dict_post_hook(_mark_loaded)

    @abstractmethod
    def forward(self, work: ExpertRows | ParameterRequest) -> Any:
        """Compute the experts.

        Args:
            work: rows [R, D] sorted by expert, or tokens [T, D] with a `RowPlan`. For a
                `ParameterRequest`, the result of `local_parameters` is returned instead of outputs.
        Returns: the expert outputs, with the same shape as the input, or the parameters if the
        input is a `ParameterRequest`.
        """

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that input rows must have, or None if any dtype is allowed."""
        return None

    @property
    def anchor(self) -> Tensor | None:
        """A parameter that connects the exchanges between ranks to the autograd graph (see
        `comm.functional`).

        The anchor is a trainable parameter, unless all parameters are frozen. None if there are no
        parameters.
        """
        frozen = None
        for parameter in self._parameters.values():  # `parameters()` is ten times slower
            if parameter is not None and parameter.requires_grad:
                return parameter
            frozen = parameter if frozen is None else frozen
        return next(self.parameters(), None) if frozen is None else frozen

    def local_parameters(self) -> dict[str, Tensor]:
        """Return the stored parameters by name. The first dimension of each parameter indexes the
        experts.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support gathered parameters")

    def compute_parameters(self, tensors: dict[str, Tensor] | None = None,
                           first_shard: int | None = None) -> FFNParameters:
        """Return the parameters in the form that compute strategies use.

        Args:
            tensors: parameters in the form of `local_parameters`. Defaults to the stored
                parameters.
            first_shard: the index of the first expert shard in `tensors`. Defaults to the first
                shard of this rank.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support gathered parameters")

    def gathered_parameters(self, local: dict[str, Tensor] | None, comm: Comm, shards: int,
                            first_shard: int) -> FFNParameters:
        """Gather the parameters of several ranks, and return them in the form that compute
        strategies use.

        Collective over `comm`.

        Args:
            local: parameters of this rank in the form of `local_parameters`. Defaults to the stored
                parameters.
            comm: the group of ranks whose parameters are gathered.
            shards: number of consecutive ranks that store shards of the same expert.
            first_shard: the index of the first expert shard in the gathered parameters.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support gathered parameters")

    def prefetch(self, ids_TK: Tensor) -> None:
        """Start to load the experts that a call will need, without waiting until they are loaded.

        Args:
            ids_TK: int64 tensor of global expert indices. The index -1 means that no expert is
                chosen.
        """

    def use_layer(self, number: int | None) -> None:
        """Set the index of the MoE layer that contains these experts, counted from 0.

        Args:
            number: the layer index, or None if the host does not know it
                (`HostContext.numbered_later`).
        """

    def taken_counts(self) -> dict[str, int]:
        """Return the counters that the expert store has collected since the last call, and reset
        them.
        """
        return {}

    def mark(self) -> None:
        """Mark all parameters of these experts as expert parameters."""
        mark_experts(self)

    def __getstate__(self) -> dict[str, Any]:
        # a process group cannot be pickled, and is needed only for new initial values
        return {name: value for name, value in vars(self).items() if name != "seed_comm"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark()
        for parameter in self.parameters():
            parameter.__dict__.pop("reduced", None)  # pickle restores marks, but not hooks

    def _apply(self, fn: Any, recurse: bool = True) -> Experts:
        super()._apply(fn, recurse)
        self.mark()  # torch may have replaced the parameters
        return self


def _rename(experts: Experts, state: dict[str, Any], prefix: str, *_: object) -> None:
    use_current_names(state, prefix)


def _mark_loaded(experts: Experts, incompatible: object) -> None:
    experts.mark()


expert_kinds: Registry[type[Experts]] = Registry("experts", base=Experts)


class CustomExperts(Experts):
    """Experts that are arbitrary modules created by the user.

    Arbitrary modules cannot be split into shards, so the number of experts must be at least the
    number of ranks. All parameters of the modules are marked as expert parameters.

    Args:
        factory: a function `factory(global_index)` that returns the module of one expert. The
            module must map [rows, D] to [rows, D].
        placement: describes which ranks store each expert.
    Raises:
        ValueError: If the placement splits experts into shards.
    """

    def __init__(self, factory: Callable[[int], nn.Module], placement: Placement) -> None:
        super().__init__()
        if placement.shards > 1:
            raise ValueError(
                f"custom experts cannot be split into {placement.shards} shards, so "
                f"num_experts={placement.experts} must be >= the number of expert-parallel ranks, "
                f"{placement.comm.size}. Use more experts or fewer ranks, without parallel.shards"
            )
        self.first = placement.comm.rank * placement.local
        self.local_experts = nn.ModuleList(
            factory(self.first + slot) for slot in range(placement.local))
        self.mark()

    def forward(self, work: ExpertRows | ParameterRequest) -> Tensor:
        """See `Experts`.

        Raises:
            ValueError: If an expert's output does not have the same shape as its input rows.
        """
        assert isinstance(work, ExpertRows), "parameters are only asked of experts that gather"
        return apply_to_rows(self._each, work.x, work.rows)

    def _each(self, rows_RD: Tensor, counts: RowCounts) -> Tensor:
        # experts without rows are called, too, so that every parameter gets a gradient
        parts = rows_RD.split(counts.host)
        results = [expert(rows) for expert, rows in zip(self.local_experts, parts, strict=True)]
        for slot, (result, rows) in enumerate(zip(results, parts, strict=True)):
            if not isinstance(result, Tensor) or result.shape != rows.shape:
                raise self._refused(slot, rows, result)
        return torch.cat(results)

    def _refused(self, slot: int, rows: Tensor, result: object) -> ValueError:
        # a wrong number of rows would shift the rows of all later experts to other tokens
        found = (f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else
                 f"a {type(result).__name__}")
        return ValueError(
            f"expert {self.first + slot} ({type(self.local_experts[slot]).__name__}) returned "
            f"{found} for rows of shape {tuple(rows.shape)}, but the shapes must be equal. An "
            f"expert must map [rows, {rows.shape[1]}] to [rows, {rows.shape[1]}]")


_MATRICES = {"ffn": 2, "gated_ffn": 3}


def build_device_experts(config: MoEConfig, place: Placement, host: HostContext,
                  factory: Callable[[int], nn.Module] | None, **where: Any) -> Experts:
    """Build the experts of this rank whose parameters are stored on the device.

    Args:
        factory: a function `factory(global_index) -> module` that creates a custom expert. By
            default, experts of the configured type are built.
        where: the dtype and device of the parameters.
    """
    if factory is not None:
        return CustomExperts(factory, place)
    kind: Callable[..., Experts] = expert_kinds.get(config.experts.kind)
    return kind(config, place, host=host, **where)


def check_memory(config: MoEConfig, place: Placement, factory: Callable[[int], nn.Module] | None,
                 dtype: torch.dtype | None, device: Any) -> None:
    """Before allocating memory, check that the weights of this rank fit in the device's memory.

    The check is skipped on the meta device, for custom experts, and for experts that are stored on
    disk.

    Args:
        config: the settings of the layer.
        place: describes which ranks store each expert.
        factory: the function that creates custom experts, or None.
        dtype: the dtype of the parameters. Defaults to torch's default dtype.
        device: the device of the parameters. Defaults to torch's default device.
    Raises:
        ValueError: If the weights are larger than the total memory of the device.
    """
    store = config.experts.store
    like = torch.empty(0, dtype=dtype, device="cpu" if store == "host" else device)
    memory = memory_bytes(like.device)
    if (memory is None or store == "disk" or factory is not None
            or config.experts.kind not in _MATRICES):
        return
    width, matrices = config.model_dim, _MATRICES[config.experts.kind]
    elements = width * (config.num_experts + matrices * config.experts.shared_hidden_dim)
    elements += matrices * config.row_dim * place.local * (config.hidden_dim // place.shards)
    if elements * like.element_size() > memory:
        raise ValueError(
            f"num_experts={config.num_experts} with model_dim={width}, "
            f"hidden_dim={config.hidden_dim} needs {elements * like.element_size() / 2**30:.3g} "
            f"GiB for the weights of this rank, but {like.device} has {memory / 2**30:.3g} GiB. "
            "Use more ranks, or fewer or narrower experts")
