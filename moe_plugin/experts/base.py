"""What all kinds of experts have in common."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.experts.lora import ExpertRanks
from moe_plugin.kernels.expert_ffn import FFNParameters
from moe_plugin.kernels.weight_grads import LaterGrads
from moe_plugin.records import ExpertRows, ParameterRequest
from moe_plugin.utils.registry import Registry

# The names that experts' parameters had in earlier versions, which files may still contain.

# former name -> name now
FORMER = {"b_in_LF": "bias_in_LF", "b_gate_LF": "bias_gate_LF", "b_out_LD": "bias_out_LD"}
# name now -> name in Megatron's distributed checkpoints, which every version reads
IN_MEGATRON = {now: former for former, now in FORMER.items()}
# adapters of peft put the experts one level deeper; optimizer fields may follow the name
_IN_FULL = re.compile(rf"(?<![^.])experts\.((?:base_layer\.)*)({'|'.join(FORMER)})(?![^.])")


def current_name(name: str) -> str:
    """Return a tensor's name in a model or file with the present name of the experts' parameter."""
    return _IN_FULL.sub(lambda found: f"experts.{found[1]}{FORMER[found[2]]}", name)


def with_current_names(column: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping in its order, with `current_name` of every key.

    Raises:
        ValueError: a parameter is there under both names.
    """
    renamed = {current_name(name): value for name, value in column.items()}
    if len(renamed) < len(column):
        both = next(name for name in column if current_name(name) != name in column)
        raise ValueError(f"{both!r} is there under its present name, too ({current_name(both)!r}): "
                         "a file must contain one of the two; remove the older one")
    return renamed


def use_current_names(state: MutableMapping[str, Any], prefix: str) -> None:
    """Rename the parameters of one layer's experts in a state dict.

    Args:
        state: is changed. A parameter that is there under both names keeps them.
        prefix: the beginning of the experts' names, with a trailing dot.
    """
    for former, now in FORMER.items():
        if prefix + former in state and prefix + now not in state:
            state[prefix + now] = state.pop(prefix + former)


# The mark by which hosts tell expert parameters from all others: `parameter.expert = True`.
def mark_expert(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter as an expert's: hosts must not reduce it over all data-parallel ranks."""
    parameter.expert = True  # type: ignore[attr-defined]
    return parameter


def mark_experts(module: nn.Module, ranks: int | None = None) -> None:
    """Mark every parameter of experts, or of what stands in their place and has them inside: an
    adapter of a rank's experts is of that rank, as they are.

    ranks: size of the expert-parallel group. Optional: the mark of an earlier call stays.
    """
    for parameter in module.parameters():
        mark_expert(parameter)
        if ranks is not None:
            parameter.expert_ranks = ranks  # type: ignore[attr-defined]


def expert_ranks(parameter: Tensor) -> int:
    """Size of the expert-parallel group of an expert's parameter; 1 for all other parameters."""
    return getattr(parameter, "expert_ranks", 1)


def is_expert(parameter: Tensor) -> bool:
    """Whether `mark_expert` marked this parameter, or fairseq marked an fp32 copy of it alike."""
    return getattr(parameter, "expert", False)


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """A model's expert parameters by name."""
    return {name: p for name, p in model.named_parameters() if is_expert(p)}


class Experts(nn.Module):
    """Base of all kinds of experts of one rank.

    Its parameters stay marked as experts' where torch makes new ones of them (deepcopy, leaving the
    meta device, `load_state_dict(..., assign=True)`).

    Attributes:
        supports_gather: can compute with parameters gathered from other ranks; then it has
            `local_parameters` and `compute_parameters`.
        stored: they are outside the device, so that `prefetch` does something.
        traceable: `torch.compile` may look inside; else it calls them as they are.
        reduced: `gradients.sync.reduce_experts` was called; each parameter that has its
            hooks carries this mark, too.
        adapters: low-rank ones on these experts, see `experts.lora`; None: there are none.
        later: where a host has weight gradients left that asks for them after the backward pass.
        seed_comm: ranks that draw initial values from one seed, whatever their generators are at;
            None: the generators are alike, or values of one rank are copied to the others.
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
        """Rows [R, D], or tokens [T, D] with a `RowPlan`, through their experts; the same shape.

        work: a `ParameterRequest` asks for `local_parameters` instead.
        """

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that inputs must have; None: any."""
        return None

    @property
    def anchor(self) -> nn.Parameter | None:
        """A parameter, see `comm.functional`, that trains where one does; None if there are none.
        """
        frozen = None
        for parameter in self._parameters.values():  # `parameters` takes ten times as long
            if parameter is not None and parameter.requires_grad:
                return parameter
            frozen = parameter if frozen is None else frozen
        return next(self.parameters(), None) if frozen is None else frozen

    def local_parameters(self) -> dict[str, Tensor]:
        """Stored parameters by name, expert axis first."""
        raise NotImplementedError(f"{type(self).__name__} does not support gathered parameters")

    def compute_parameters(self, tensors: dict[str, Tensor] | None = None,
                           first_shard: int | None = None) -> FFNParameters:
        """What to compute with: `tensors` in the form of `local_parameters`, or the stored ones."""
        raise NotImplementedError(f"{type(self).__name__} does not support gathered parameters")

    def gathered_parameters(self, local: dict[str, Tensor] | None, comm: Comm, shards: int,
                            first_shard: int) -> FFNParameters:
        """What to compute with after an all-gather over ranks. Collective.

        Args:
            local: this rank's parameters, in the form of `local_parameters`; None: the stored ones.
            comm: the ranks to gather from.
            shards: how many consecutive ranks have shards of one expert.
            first_shard: the first shard that this rank has then.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support gathered parameters")

    def prefetch(self, ids_TK: Tensor) -> None:
        """Start to bring experts that a call will need; never waits for them.

        ids_TK: int64, global numbers; -1: none.
        """

    def use_layer(self, number: int | None) -> None:
        """These are the experts of MoE layer `number`, from 0; see `HostContext.numbered_later`.
        None: the host does not know it either.
        """

    def taken_counts(self) -> dict[str, int]:
        """What the store of `stored` experts did since the last call of this."""
        return {}

    def mark(self) -> None:
        """Mark every parameter as an expert's."""
        mark_experts(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "seed_comm"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark()
        for parameter in self.parameters():
            parameter.__dict__.pop("reduced", None)  # pickle keeps marks, and no hooks

    def _apply(self, fn: Any, recurse: bool = True) -> Experts:
        super()._apply(fn, recurse)
        self.mark()
        return self


def _rename(experts: Experts, state: dict[str, Any], prefix: str, *_: object) -> None:
    use_current_names(state, prefix)


def _mark_loaded(experts: Experts, incompatible: object) -> None:
    experts.mark()


expert_kinds: Registry[type[Experts]] = Registry("experts", base=Experts)
