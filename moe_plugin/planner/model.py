"""Records of models, plans and measurements, and the rank groups of a plan."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Cluster, Device
from moe_plugin.planner.layer_cost import LayerShape
from moe_plugin.planner.once import GroupShape, Limits
from moe_plugin.planner.units import load_record
from moe_plugin.utils.messages import short


# Measurements of real ranks are written to files, which later plans reuse.
@dataclass(frozen=True, kw_only=True)
class MeasuredNetwork:
    """Constants of a network, measured between real ranks.

    Attributes:
        about: properties of the ranks. A measurement can be reused on other ranks with the same
            properties.
        cluster: cluster whose constants were fitted to measured all-to-alls. The fitted cluster has
            the same number of ranks as the measurement.
    """

    about: dict[str, str] = field(default_factory=dict)
    cluster: Cluster = field(default_factory=Cluster)


@dataclass(frozen=True, kw_only=True)
class Processor:
    """Compute speed of real ranks, measured while all ranks compute at the same time.

    Attributes:
        about: properties of the ranks. A measurement can be reused on other ranks with the same
            properties.
        device: device whose constants were fitted to measured matmuls.
    """

    about: dict[str, str] = field(default_factory=dict)
    device: Device = field(default_factory=Device)


Record = TypeVar("Record", MeasuredNetwork, Processor)


def dump(record: MeasuredNetwork | Processor) -> str:
    """Convert a record to the text of a measurement file."""
    return json.dumps(asdict(record), indent=1) + "\n"


def load(kind: type[Record], path: str | Path) -> Record:
    """Read a record of the given type from a measurement file.

    Raises:
        ValueError: If the file cannot be read, or if it does not contain a record of the given
            type.
    """
    return load_record(kind, path, "file of measurements", "measure again with --fresh")


GRADIENT_BYTES = 4  # gradients are accumulated in fp32
ACTIVATION_BYTES = 34 / 2  # per token, model dimension and byte of an element
SCORES = 2  # copies of the attention scores: before and after the softmax
LOGITS_BYTES = 8
STATE = "optimizer state"  # the only part of memory that a sharded optimizer divides
MAX_SIZE = 10**12  # larger than in any real model, and small enough that products fit into floats


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder model in which every `moe_every`-th layer is an MoE layer.

    Attributes:
        moe_first: if True, the first of every `moe_every` layers is an MoE layer, as with
            Megatron's `--moe-layer-freq`. If `moe_first` is False, the last of every `moe_every`
            layers is an MoE layer, as with fairseq's `--moe-freq`. Set by `in_host`.
        sharded_optimizer: if True, the optimizer state of replicated parameters is divided equally
            among the data-parallel ranks (Megatron's `--use-distributed-optimizer`). Set by
            `in_host`.
        ffn_dim: inner width of dense layers.
        hidden_dim: inner width of an expert. 0 means `ffn_dim`.
        latent_dim: width of the rows that are sent to the experts, and of the experts' inputs and
            outputs. 0 means `model_dim`.
        sequence: number of tokens per sequence.
        global_batch: number of sequences per training step.
        groups, group_top_k: number of groups into which consecutive experts are divided, and number
            of groups from which a token may select experts. In DeepSeek's node-limited routing,
            each group corresponds to a node. `group_top_k` then limits the number of ranks and
            nodes to which a token is sent. With `groups=1`, a token may select any experts.
        capacity_factor: capacity factor of the experts, or None if no token is dropped.
        skew: number of rows on the busiest rank divided by the mean number of rows per rank. At
            least 1.
        element_bytes: number of bytes per element of weights and activations.
        state_bytes: number of bytes per parameter for the gradient and the optimizer state, not
            counting the weight itself. An fp32 gradient takes 4 bytes, an fp32 master weight 4
            bytes, and the two Adam moments 8 bytes. If `state_bytes` is at most 4, there is a
            gradient but no optimizer state.
    """

    layers: int
    model_dim: int
    ffn_dim: int
    heads: int = 1
    vocab: int = 0
    sequence: int = 1024
    global_batch: int = 1
    moe_every: int = 2
    moe_first: bool = False
    sharded_optimizer: bool = False
    experts: int = 8
    hidden_dim: int = 0
    latent_dim: int = 0
    top_k: int = 2
    groups: int = 1
    group_top_k: int = 1
    capacity_factor: float | None = None
    skew: float = 1.0
    gated: bool = False
    element_bytes: int = 2
    state_bytes: int = 16
    sharded_parameters: ClassVar[bool] = False  # whether replicas divide weights and gradients
    backward: ClassVar[float] = 2.0  # FLOPs of the backward pass, relative to the forward pass
    row_saved: ClassVar[float] = 0.0  # see `LayerShape`

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            least = 0 if f.default in (0, None) else 1
            if f.type == "bool" or not isinstance(value, int | float):
                continue
            if not least <= value <= MAX_SIZE:
                raise ValueError(f"model {f.name}={short(value)} must be from {least} to "
                                 f"{MAX_SIZE}; correct the model file")
        if self.experts % self.groups:
            raise ValueError(f"model groups={self.groups} does not divide experts={self.experts}. "
                             "Set groups to a divisor of experts in the model file")
        if self.skew > self.experts:
            raise ValueError(f"model skew={self.skew} is larger than experts={self.experts}. "
                             "Set skew to at most the number of experts in the model file")
        least = -(-self.top_k * self.groups // self.experts)  # fewest groups with top_k experts
        if self.groups > 1 and not least <= self.group_top_k <= self.groups:
            raise ValueError(f"model group_top_k={self.group_top_k} is not possible with top_k="
                             f"{self.top_k} and groups={self.groups}; it must be from {least} to "
                             f"{self.groups}. Correct the model file")

    def in_host(self, host: str) -> ModelShape:
        """Return a copy with the placement of MoE layers and the sharding of the optimizer that a
        host framework uses.
        """
        megatron = host == "megatron"
        return dataclasses.replace(self, moe_first=megatron, sharded_optimizer=megatron)

    def moe_before(self, layer: int) -> int:
        """Return the number of MoE layers among the first `layer` layers."""
        return -(-layer // self.moe_every) if self.moe_first else layer // self.moe_every

    def has_experts(self, layer: int) -> bool:
        """Return whether the layer with the given index, counted from 0, is an MoE layer."""
        return self.moe_before(layer + 1) > self.moe_before(layer)

    @property
    def moe_layers(self) -> int:
        """Number of MoE layers in the model."""
        return self.moe_before(self.layers)

    def stages(self, pp: int) -> list[range]:
        """For each of `pp` pipeline stages, return the indices of its layers.

        All stages have the same number of layers, except that the last stages may have fewer.
        """
        size = -(-self.layers // pp)
        return [range(min(first, self.layers), min(first + size, self.layers))
                for first in range(0, pp * size, size)]

    def fullest(self, pp: int) -> tuple[int, int]:
        """Return the number of layers and the number of MoE layers of the stage with the most MoE
        layers.
        """
        return max((self.moe_before(layers.stop) - self.moe_before(layers.start), len(layers))
                   for layers in self.stages(pp))[::-1]

    @property
    def matrices(self) -> int:
        """Number of weight matrices per feed-forward network."""
        return 3 if self.gated else 2

    @property
    def dense_parameters(self) -> float:
        """Number of parameters of the model outside the experts."""
        attention = self.layers * 4 * self.model_dim**2
        dense = (self.layers - self.moe_layers) * self.matrices * self.model_dim * self.ffn_dim
        of_tokens = self.moe_layers * self.model_dim * (self.experts + 2 * self.latent_dim)
        return attention + dense + self.vocab * self.model_dim + of_tokens

    @property
    def attention_flops(self) -> float:
        """FLOPs per token of the forward pass of one layer in the matrices of the attention."""
        return 8 * self.model_dim**2

    def saved_bytes(self, experts: bool) -> float:
        """Return the number of bytes that one layer stores for the backward pass of a sequence,
        without the rows of routed experts.

        Args:
            experts: whether the layer is an MoE layer.
        """
        width = ACTIVATION_BYTES * self.model_dim
        if self.element_bytes > 2:
            width += SCORES * self.heads * self.sequence
        return width * self.element_bytes * self.sequence

    @property
    def logits_bytes(self) -> float:
        """Bytes of the logits and their gradients per sequence."""
        return LOGITS_BYTES * self.sequence * self.vocab

    def buffer_bytes(self, plan: ModelPlan) -> dict[str, float]:
        """Return the sizes in bytes of other tensors of a rank, which the formulas leave out or
        compute differently.
        """
        return {}

    def extra_s(self, device: Device, plan: ModelPlan) -> dict[str, float]:
        """Return the time in seconds of other components of a training step."""
        return {}

    @property
    def synchronized_bytes(self) -> tuple[float, float]:
        """Bytes per parameter outside and inside the experts that an all-reduce of equal duration
        sends.
        """
        return (GRADIENT_BYTES * (1.5 if self.sharded_parameters else 1.0),) * 2

    def parameter_bytes(self) -> dict[str, float]:
        """Return the number of bytes per parameter for weights, for gradients and for the optimizer
        state.
        """
        gradient = min(GRADIENT_BYTES, self.state_bytes)
        return {"parameters": self.element_bytes, "gradients": gradient,
                STATE: self.state_bytes - gradient}

    @property
    def expert_parameters(self) -> float:
        """Number of parameters of all experts in all layers."""
        return self.moe_layers * self.experts * self.matrices * self.row_dim * self.expert_dim

    @property
    def row_dim(self) -> int:
        """Width of the rows that are sent to the experts, and of the experts' inputs and outputs.
        """
        return self.latent_dim or self.model_dim

    @property
    def expert_dim(self) -> int:
        """Inner width of an expert."""
        return self.hidden_dim or self.ffn_dim

    def layer(self, tokens: int) -> LayerShape:
        """Return the shape of one MoE layer in which each rank processes `tokens` tokens."""
        return LayerShape(tokens=max(1, tokens), model_dim=self.model_dim,
                          latent_dim=self.latent_dim, hidden_dim=self.expert_dim,
                          experts=self.experts,
                          top_k=self.top_k, capacity_factor=self.capacity_factor, skew=self.skew,
                          gated=self.gated,
                          element_bytes=self.element_bytes, limits=self.limits,
                          row_saved=self.row_saved)

    @property
    def limits(self) -> Limits:
        """Restrictions of the router on which experts a token can select."""
        return Limits(self.groups, self.group_top_k if self.groups > 1 else 1)


@dataclass(frozen=True, order=True, kw_only=True)
class ModelPlan:
    """A description of how a model is distributed over a cluster.

    As in Megatron, the parallel dimensions are ordered from innermost to outermost as tensor,
    expert, data, pipeline. Expert groups are folded over the tensor-parallel and data-parallel
    ranks.

    Attributes:
        tp, pp, dp: tensor-parallel, pipeline-parallel and data-parallel sizes. The product of the
            three sizes is the number of ranks.
        ep: number of ranks among which the experts are divided.
        etp: number of ranks among which the inner width of each expert is divided.
        micro_batch: number of sequences per micro-batch.
        layout: layout of the MoE layers within an expert group of `ep * etp` ranks.
    """

    tp: int
    pp: int
    dp: int
    ep: int
    etp: int
    micro_batch: int
    layout: LayoutChoice

    @property
    def expert_ranks(self) -> int:
        """Number of ranks in one expert group."""
        return self.ep * self.etp

    @property
    def expert_dp(self) -> int:
        """Number of replicas of each expert."""
        return self.tp * self.dp // self.expert_ranks

    def micro_batches(self, model: ModelShape) -> int:
        """Return the number of micro-batches that each rank computes per training step."""
        return model.global_batch // (self.dp * self.micro_batch)

    def tokens(self, model: ModelShape) -> int:
        """Return the number of tokens that each rank routes per micro-batch.

        The tokens of a micro-batch are divided among the tensor-parallel ranks.
        """
        return self.micro_batch * model.sequence // self.tp

    def groups(self) -> dict[str, GroupShape]:
        """Return the group of ranks for each type of parallelism, by name."""
        return {
            "tp": GroupShape(self.tp), "dp": GroupShape(self.dp, self.tp),
            "experts": GroupShape(self.expert_ranks),
            "expert_dp": GroupShape(self.expert_dp, self.expert_ranks),
        }

    def expert_cluster(self, cluster: Cluster) -> Cluster:
        """Return the part of the cluster on which one expert group runs."""
        return self.groups()["experts"].shape(cluster)

    def as_dict(self) -> dict[str, Any]:
        """Convert the plan to a dictionary of plain values. The dictionary also contains
        `expert_dp`.
        """
        return {**dataclasses.asdict(self), "expert_dp": self.expert_dp}

    @property
    def label(self) -> str:
        """Description of the plan's sizes and layout in one line."""
        return (f"TP{self.tp} PP{self.pp} DP{self.dp} EP{self.ep} ETP{self.etp} "
                f"mb{self.micro_batch} ({self.layout.words})")


def load_model(path: str | Path) -> ModelShape:
    """Read a model file, such as the files in `configs/plans/`.

    Raises:
        ValueError: If the file cannot be read, or if it does not describe a `ModelShape`.
    """
    return load_record(ModelShape, path, "model file", "see configs/plans/")
