"""Feed-forward experts, and the all-gather of their parameters.

Parameters are stored in the same form regardless of the layout of a call. Gathered parameters exist
only during one call. The backward pass sends the gradients of gathered parameters back to the ranks
that store them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.comm.functional import all_gather
from moe_plugin.comm.placement import HostContext, Placement
from moe_plugin.config import MoEConfig
from moe_plugin.config.experts import ROUNDED
from moe_plugin.config.options import check
from moe_plugin.experts.base import Experts, expert_kinds, mark_expert
from moe_plugin.experts.lora import (
    ADAPTER_AXIS,
    PLACES,
    WHOLE,
    ExpertRanks,
    as_adapters,
    column_lengths,
    with_factors,
)
from moe_plugin.kernels.activations import transformed
from moe_plugin.kernels.expert_ffn import (
    FFNParameters,
    Strategy,
    is_stepwise,
    stepwise_strategy,
    strategies,
)
from moe_plugin.kernels.frozen import FROZEN_AXIS
from moe_plugin.kernels.rounded import RoundedWeights
from moe_plugin.kernels.weight_grads import WEIGHTS, has_main_grad, redirect_grad
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.records import ExpertRows, ParameterRequest
from moe_plugin.utils.machine import exporting
from moe_plugin.utils.tensors import fill_, is_sharded

logger = logging.getLogger(__name__)

# the axis along which an expert is split if there are fewer experts than ranks (axis 0 counts
# experts)
SHARD_AXIS = {
    "w_in_LDF": 2, "bias_in_LF": 1, "w_gate_LDF": 2, "bias_gate_LF": 1, "w_out_LFD": 1,
    "bias_out_LD": 1
}
# the same for all parameters that an expert may store; None if each shard stores the whole tensor
PART_AXIS: dict[str, int | None] = {**SHARD_AXIS, **ADAPTER_AXIS, **FROZEN_AXIS}
# the same for the tensors that an expert computes with; None if every shard has the whole tensor
_USED_AXIS: dict[str, int | None] = {**PART_AXIS, **dict.fromkeys(WHOLE)}


@expert_kinds.register("ffn")
class FFNExperts(Experts):
    """Experts that each compute `y = act(x w_in + bias_in) w_out + bias_out`.

    The parameters are w_in_LDF, bias_in_LF, w_out_LFD and bias_out_LD. If each expert is split into
    S shards (`Placement`), F is hidden_dim / S, and bias_out_LD has D / S columns. Shard j adds its
    bias only to the columns [j*D/S, (j+1)*D/S). The sum over all shards therefore contains each
    bias exactly once.
    """

    gated = False
    supports_gather = True
    own_gate: Callable[[Tensor, Tensor], Tensor] | None = None  # see `FFNParameters`
    finish: Callable[[Tensor], Tensor] | None = None

    def __init__(self, config: MoEConfig, placement: Placement, *,
                 host: HostContext = HostContext(), dtype: torch.dtype | None = None,
                 device: Any = None) -> None:
        super().__init__()
        self.config, self.placement = config.experts, placement
        self.adds_to_main_grad = host.adds_to_main_grad
        self.compute = strategies.get(
            "blocks" if config.batch_invariant else config.experts.compute)
        if config.batch_invariant:
            check(placement.shards == 1, "batch_invariant", True,
                  f"False if experts are split into {placement.shards} shards",
                  "the order of their sum over ranks depends on the batch. Use at least as many "
                  "experts as ranks")
        c = self.config
        if (c.dropout or c.clamp or c.linear_offset) and not is_stepwise(self.compute):
            logger.info(
                "experts.%s is not supported by experts.compute=%s, so torch's matmuls compute the "
                "experts%s", ", experts.".join(c.in_steps()), c.compute,
                " in training" if c.in_steps() == ["dropout"] else "")
        self.memory = Workspace()
        shards, local, width = placement.shards, placement.local, config.row_dim
        _check_shards(config, shards)
        inner = config.hidden_dim // shards

        def parameter(*shape: int) -> nn.Parameter:
            return mark_expert(nn.Parameter(torch.empty(local, *shape, dtype=dtype, device=device)))

        self.w_in_LDF = parameter(width, inner)
        self.w_gate_LDF = parameter(width, inner) if self.gated else None
        self.w_out_LFD = parameter(inner, width)
        bias = config.experts.bias
        self.bias_in_LF = parameter(inner) if bias else None
        self.bias_gate_LF = parameter(inner) if bias and self.gated else None
        self.bias_out_LD = parameter(width // shards) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weights of complete experts, and set the biases to zero. If experts are
        sharded, each rank keeps its shard.

        Weights are drawn from a Xavier uniform distribution, or from a normal distribution with
        standard deviation `experts.init_std`. The seed of an expert is a number drawn from torch's
        generator plus the expert's global index. The initial values therefore do not depend on the
        number of ranks, and the generators of all ranks advance equally.
        """
        # always on the CPU, even inside `with torch.device("meta")` or of a GPU
        seed = torch.randint(2**31, (1,), device="cpu")
        if self.seed_comm is not None:
            seed = self.seed_comm.broadcast(seed.to(self.seed_comm.device))
        self.seed = int(seed)
        if self.w_in_LDF.is_meta:
            return
        stored = {name: value for name, value in self.named_parameters() if name in SHARD_AXIS}
        whole = {name: torch.empty(value.shape, dtype=value.dtype, device="cpu")
                 if is_sharded(value) else value for name, value in stored.items()}
        for slot in range(self.placement.local):
            self.draw(slot, {name: value[slot] for name, value in whole.items()})
        for name in [name for name, value in stored.items() if is_sharded(value)]:
            fill_(stored[name], whole[name])

    @torch.no_grad()
    def draw(self, slot: int, targets: Mapping[str, Tensor]) -> None:
        """Write the initial values of one expert into the given tensors.

        Args:
            slot: the local index of the expert.
            targets: the tensors to write to, by parameter name.
        """
        # one generator per expert, so that values depend neither on other experts nor on the ranks
        generator = torch.Generator().manual_seed(self.seed + self.placement.first_expert + slot)
        for name, axis in (("w_in_LDF", 1), ("w_gate_LDF", 1), ("w_out_LFD", 0)):
            if name in targets:
                targets[name].copy_(self._draw(targets[name], axis, generator))
        for name in ("bias_in_LF", "bias_gate_LF", "bias_out_LD"):
            if name in targets:
                targets[name].zero_()

    def _draw(self, like: Tensor, axis: int, generator: torch.Generator) -> Tensor:
        shape, shards = list(like.shape), self.placement.shards
        shape[axis] *= shards
        # The whole matrix is drawn even if this rank stores a part, and in float32 on the CPU, so
        # that values are the same for all numbers of ranks, dtypes and devices.
        whole = torch.empty(shape, dtype=torch.float32, device="cpu")
        if self.config.init_std is None:
            bound = (6 / sum(shape)) ** 0.5
            whole.uniform_(-bound, bound, generator=generator)
        else:
            whole.normal_(0.0, self.config.init_std, generator=generator)
        return whole.chunk(shards, axis)[self.placement.shard]

    @property
    def dtype(self) -> torch.dtype:
        return self.w_in_LDF.dtype

    def forward(self, work: ExpertRows | ParameterRequest) -> Any:
        """See `Experts`. If experts are split into shards, the result is this shard's contribution
        to the output.
        """
        if isinstance(work, ParameterRequest):
            return self.local_parameters()
        strategy = work.strategy or self.compute
        # gathered and borrowed parameters come with the work
        parameters = work.parameters or self.compute_parameters()
        p = parameters
        steps = p.dropout or p.clamp or p.linear_offset or p.adapters
        if (steps or p.own_gate or p.finish) and not is_stepwise(strategy):
            strategy = stepwise_strategy()
        if transformed() or exporting():
            strategy = _by_torch_alone(parameters)
        elif parameters.precision in ROUNDED:
            strategy = strategies.get("kernels")
        return strategy(work.x, work.rows, parameters)

    def local_parameters(self) -> dict[str, Tensor]:
        """See `Experts`. The names are those keys of `SHARD_AXIS` for which this type of expert has
        parameters.
        """
        parameters = {}
        for name in SHARD_AXIS:
            if (value := getattr(self, name)) is not None:
                parameters[name] = value
        for name in self.main_grad_weights() if self.adds_to_main_grad else ():
            parameters[name] = redirect_grad(parameters[name])
        return parameters if self.adapters is None else {**parameters, **self.used_adapters()}

    def weights_of(self) -> dict[str, list[Tensor]]:
        """Return the stored weights as lists, by the keys of `lora.PLACES`."""
        first: list[Tensor] = [w for w in (self.w_in_LDF, self.w_gate_LDF) if w is not None]
        return {"in": first, "out": [self.w_out_LFD]}

    def add_lora(self, ranks: ExpertRanks, seed: int) -> None:
        """Add low-rank adapters to these experts.

        The method is collective if experts are split into shards on several ranks.

        Adding adapters does not change the experts' outputs: `a` is random, `b` is zero, and with
        DoRA `m` contains the current length of each column.

        Args:
            ranks: the LoRA ranks and scales of the adapters.
            seed: the seed of the random values, which must be equal on all ranks. The random values
                of an expert also depend on its global index.
        """
        place, (local, width, inner) = self.placement, self.w_in_LDF.shape
        like: dict[str, Any] = {"dtype": self.dtype, "device": self.w_in_LDF.device}
        sizes = {"D": width // place.shards, "F": inner, "L": local}
        for key in ranks.ranks:
            a, bs, ms = PLACES[key]
            sizes["R"] = max(ranks.ranks[key])
            made = {a: self._drawn_a(seed, (sizes[a[-2]] * place.shards, sizes["R"]))}
            for w_LIO, b, m in zip(self.weights_of()[key], bs, ms, strict=False):
                made[b] = torch.zeros([sizes[axis] for axis in b.rpartition("_")[2]], **like)
                if ranks.dora:
                    lengths = column_lengths(w_LIO, None, self._shards() if key == "out" else None)
                    made[m] = lengths.split(sizes[m[-1]], 1)[place.shard if key == "out" else 0]
            for name, value in made.items():
                self.register_parameter(name, mark_expert(nn.Parameter(value.to(**like))))
        self.adapters = ranks

    def _drawn_a(self, seed: int, shape: tuple[int, int]) -> Tensor:
        """Draw this rank's slice of `a` uniformly between -1 / sqrt(inputs) and 1 / sqrt(inputs),
        as `peft` does.
        """
        place, drawn = self.placement, []
        if self.w_in_LDF.is_meta:
            return torch.empty(place.local, shape[0] // place.shards, shape[1], device="meta")
        for expert in range(place.first_expert, place.first_expert + place.local):
            whole = torch.empty(shape, dtype=torch.float32)
            whole.uniform_(-shape[0]**-0.5, shape[0]**-0.5,
                           generator=torch.Generator().manual_seed(seed + expert))
            drawn.append(whole.chunk(place.shards)[place.shard])
        return torch.stack(drawn)

    def _shards(self) -> Comm | None:
        """Return the group of ranks that store shards of the same experts, or None if experts are
        not sharded.
        """
        place = self.placement
        return place.comm.contiguous_subgroup(place.shards) if place.shards > 1 else None

    def used_adapters(self) -> dict[str, Tensor]:
        """Return the adapter tensors that a call uses.

        No adapter tensors are returned if the adapters are merged into the weights. The method is
        collective if experts are split over ranks.
        """
        ranks, shards = self.adapters, self._shards()
        if ranks is None or ranks.merged is not None:
            return {}
        tensors: dict[str, Tensor] = {name: value for name in ADAPTER_AXIS if (
            value := self._parameters.get(name)) is not None}
        cut = {name: tensors[name] for name in WHOLE if name in tensors and shards is not None}
        if shards is not None and cut:
            tensors |= gather_parameters(cut, shards, shards.size, ADAPTER_AXIS)
        return with_factors(tensors, self.weights_of(), ranks, self.placement.first_expert, shards)

    def main_grad_weights(self) -> dict[str, Tensor]:
        """Return the weights whose gradients are added to the host's `main_grad`, by parameter
        name.
        """
        if not (self.adds_to_main_grad and torch.is_grad_enabled()):
            return {}
        return {
            name: value for name in WEIGHTS
            if (value := getattr(self, name)) is not None and has_main_grad(value)
        }

    def compute_parameters(self, tensors: Mapping[str, Tensor] | None = None,
                           first_shard: int | None = None) -> FFNParameters:
        """Return the parameters in the form that compute strategies use.

        Args:
            tensors: parameters in the form of `local_parameters`. The weights may belong to experts
                of other ranks, to more experts than this rank stores, or to several consecutive
                shards. Defaults to the stored parameters.
            first_shard: the index of the first shard in `tensors`. Defaults to the shard of this
                rank.
        """
        redirected, rounded, borrowed = {}, None, tensors is not None
        if tensors is None and self.adds_to_main_grad:
            redirected = self.main_grad_weights()
        # not in evaluation, where averaged weights may have been swapped in without notice
        if tensors is None and self.training and self.config.precision in ROUNDED:
            rounded = self.memory.state(RoundedWeights)
        tensors = self.local_parameters() if tensors is None else tensors
        bias_LD, width = tensors.get("bias_out_LD"), self.w_in_LDF.shape[1]
        # strategies add a bias of full width: zeros in the columns of other shards
        if bias_LD is not None and bias_LD.shape[1] < width:
            first_shard = self.placement.shard if first_shard is None else first_shard
            before = first_shard * (width // self.placement.shards)
            bias_LD = F.pad(bias_LD, (before, width - before - bias_LD.shape[1]))
        return FFNParameters(tensors["w_in_LDF"], tensors.get("bias_in_LF"),
                             tensors.get("w_gate_LDF"), tensors.get("bias_gate_LF"),
                             tensors["w_out_LFD"], bias_LD,
                             self.config.activation, self.memory, self.config.compute_selection,
                             redirected, self.config.dropout if self.training else 0.0,
                             self.config.clamp, self.config.linear_offset,
                             self.config.recompute_activation, precision=self.config.precision,
                             rounded=rounded, later=None if borrowed else self.later,
                             adapters=as_adapters(tensors) if self.adapters else {},
                             own_gate=self.own_gate, finish=self.finish)

    def gathered_parameters(self, local: dict[str, Tensor] | None, comm: Comm, shards: int,
                            first_shard: int) -> FFNParameters:
        local = self.local_parameters() if local is None else local
        return self.compute_parameters(gather_parameters(local, comm, shards), first_shard)


@expert_kinds.register("gated_ffn")
class GatedFFNExperts(FFNExperts):
    """Experts that each compute `(act(x w_gate + bias_gate) * (x w_in + bias_in)) w_out +
    bias_out`.

    With the silu activation, a gated expert is a SwiGLU layer (Shazeer 2020). `experts.clamp`
    limits both factors of the product, and `experts.linear_offset` is added to the second factor
    (`kernels.expert_ffn.gated`).
    """

    gated = True


def _by_torch_alone(parameters: FFNParameters) -> Strategy:
    """Return the strategy that uses only torch operations and works for any number of rows.

    Raises:
        ValueError: If the precision of the experts is not ieee.
    """
    if parameters.precision != "ieee":
        raise ValueError(f"experts.precision={parameters.precision} is not supported by "
                         "torch.export and torch.func, which cannot run our kernels. Use a layer "
                         "with experts.precision=ieee and the same weights")
    return strategies.get("loop")


def _check_shards(config: MoEConfig, shards: int) -> None:
    outer = "experts.latent_dim" if config.experts.latent_dim else "model_dim"
    for path, value in (("experts.hidden_dim", config.hidden_dim), (outer, config.row_dim)):
        if value % shards:
            why = f"parallel.shards={shards}"
            if not config.parallel.shards:
                why = (f"num_experts={config.num_experts} is {shards} times smaller than the "
                       "expert-parallel group")
            raise ValueError(f"{path}={value} cannot be split into {shards} shards, but {why}. Use "
                             f"a multiple of {shards}, more experts, or fewer ranks")


def gather_parameters(local: Mapping[str, Tensor], comm: Comm, shards: int,
                      axes: Mapping[str, int | None] = _USED_AXIS) -> dict[str, Tensor]:
    """Gather the parameters of several ranks in a single all-gather. The backward pass is a single
    reduce-scatter.

    Args:
        local: the parameters of this rank, by name. The first dimension of each parameter indexes
            the experts.
        shards: number of consecutive ranks that store shards of the same expert. Shards of an
            expert are concatenated along the dimension given by `axes`.
        axes: the dimension of each parameter along which experts are split, or None if every shard
            has the full tensor. If the dimension is None, the tensor of the first shard is used.
    Returns: tensors [L * size / shards, ...], by the names in `local`. The dimension along which
        experts are split is `shards` times as long as in `local`.
    """
    # one all-gather of all parameters instead of one for each
    flat = torch.cat([*map(torch.flatten, local.values())])
    all_WN = all_gather(flat, comm).view(comm.size, -1)
    parts = all_WN.split([*map(Tensor.numel, local.values())], dim=1)
    return {
        name: _together(part, local[name], axes[name], shards)
        for (name, part) in zip(local, parts, strict=True)
    }


def _together(part_WN: Tensor, like: Tensor, axis: int | None, shards: int) -> Tensor:
    shape = like.shape[1:]
    if shards == 1:
        return part_WN.reshape(-1, *shape)
    # axes: groups of ranks with the same experts, shards of an expert, experts, ...
    split = part_WN.reshape(-1, shards, *like.shape)
    if axis is None:
        return split[:, 0].reshape(-1, *shape)
    whole = list(shape)
    whole[axis - 1] *= shards
    return split.movedim(1, axis + 1).reshape(-1, *whole)
