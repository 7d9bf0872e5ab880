"""A model and a plan as records, and the groups of ranks of a plan."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Cluster, Device
from moe_plugin.planner.layer_cost import LayerShape
from moe_plugin.planner.once import GroupShape, Limits
from moe_plugin.planner.units import load_record
from moe_plugin.utils.messages import short


# What was measured on one's own ranks, as files that later plans reuse.
@dataclass(frozen=True, kw_only=True)
class MeasuredNetwork:
    """The network of real ranks.

    Attributes:
        about: what ranks must have in common with these to reuse it.
        cluster: fitted to measured all-to-alls, of as many ranks as ran.
    """

    about: dict[str, str] = field(default_factory=dict)
    cluster: Cluster = field(default_factory=Cluster)


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The processors of real ranks, all of which compute at the same time.

    Attributes:
        about: see `MeasuredNetwork`.
        device: fitted to measured matrix products.
    """

    about: dict[str, str] = field(default_factory=dict)
    device: Device = field(default_factory=Device)


Record = TypeVar("Record", MeasuredNetwork, Processor)


def dump(record: MeasuredNetwork | Processor) -> str:
    """The text of a file."""
    return json.dumps(asdict(record), indent=1) + "\n"


def load(kind: type[Record], path: str | Path) -> Record:
    """Read such a file; `ValueError` where it does not hold one."""
    return load_record(kind, path, "file of measurements", "measure again with --fresh")


GRADIENT_BYTES = 4  # gradients are added up in fp32
STATE = "optimizer state"  # the part that a sharded optimizer divides
MAX_SIZE = 10**12  # more than any model has; products stay within floats


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder with experts in every `moe_every`-th layer.

    Attributes:
        moe_first: each so many layers the first one has experts, as Megatron's
            `--moe-layer-freq` has it, rather than the last one, as fairseq's `--moe-freq`;
            `in_host` sets it.
        sharded_optimizer: each data-parallel rank stores an equal part of the optimizer state of
            the parameters that it replicates (Megatron's `--use-distributed-optimizer`);
            `in_host` sets it.
        ffn_dim: inner width of dense layers.
        hidden_dim: of an expert.
        latent_dim: width in which rows travel and experts compute; 0: `model_dim`.
        sequence: tokens per sequence.
        global_batch: sequences per step.
        groups, group_top_k: a token's experts are in `group_top_k` of `groups` groups of
            consecutive experts (DeepSeek's node-limited routing, where groups are nodes), which
            bounds the ranks and nodes that its row goes to; 1: not limited.
        capacity_factor: None: dropless.
        skew: rows of the busiest rank over the mean, >= 1.
        element_bytes: of weights and activations.
        state_bytes: gradient and optimizer state per parameter, without its weight (fp32
            gradient 4, master 4, Adam moments 8; none of the optimizer where it is 4 or less).
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

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            least = 0 if f.name in (
                "vocab", "hidden_dim", "latent_dim", "capacity_factor") else 1
            if f.name in ("gated", "moe_first", "sharded_optimizer") or value is None:
                continue
            if not least <= value <= MAX_SIZE:
                raise ValueError(f"model {f.name}={short(value)} must be from {least} to "
                                 f"{MAX_SIZE}; correct the file")
        if self.experts % self.groups:
            raise ValueError(f"model groups={self.groups} does not fit experts={self.experts}: "
                             "must be a divisor; correct the file")
        if self.skew > self.experts:
            raise ValueError(f"model skew={self.skew} does not fit experts={self.experts}: must be "
                             "at most as large; correct the file")
        least = -(-self.top_k * self.groups // self.experts)  # groups that have top_k experts
        if self.groups > 1 and not least <= self.group_top_k <= self.groups:
            raise ValueError(f"model group_top_k={self.group_top_k} does not fit top_k="
                             f"{self.top_k} and groups={self.groups}: must be from {least} to "
                             f"{self.groups}; correct the file")

    def in_host(self, host: str) -> ModelShape:
        """The same with experts in the layers where this host has them, and its optimizer."""
        megatron = host == "megatron"
        return dataclasses.replace(self, moe_first=megatron, sharded_optimizer=megatron)

    def moe_before(self, layer: int) -> int:
        """Layers with experts among the first `layer` ones."""
        return -(-layer // self.moe_every) if self.moe_first else layer // self.moe_every

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, from 0, has experts."""
        return self.moe_before(layer + 1) > self.moe_before(layer)

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.moe_before(self.layers)

    def stages(self, pp: int) -> list[range]:
        """The layers of each of `pp` pipeline stages, as many each; the last may have fewer."""
        each = -(-self.layers // pp)
        return [range(min(first, self.layers), min(first + each, self.layers))
                for first in range(0, pp * each, each)]

    def fullest(self, pp: int) -> tuple[int, int]:
        """(layers, those with experts) of the stage that has most with experts."""
        return max((self.moe_before(layers.stop) - self.moe_before(layers.start), len(layers))
                   for layers in self.stages(pp))[::-1]

    @property
    def matrices(self) -> int:
        """Matrices per feed-forward network."""
        return 3 if self.gated else 2

    @property
    def dense_parameters(self) -> float:
        """Parameters outside the experts."""
        attention = self.layers * 4 * self.model_dim**2
        dense = (self.layers - self.moe_layers) * self.matrices * self.model_dim * self.ffn_dim
        of_tokens = self.moe_layers * self.model_dim * (self.experts + 2 * self.latent_dim)
        return attention + dense + self.vocab * self.model_dim + of_tokens

    def parameter_bytes(self) -> dict[str, int]:
        """Bytes for one parameter, by what they hold."""
        gradient = min(GRADIENT_BYTES, self.state_bytes)
        return {"parameters": self.element_bytes, "gradients": gradient,
                STATE: self.state_bytes - gradient}

    @property
    def expert_parameters(self) -> float:
        """Parameters of all experts of all layers."""
        return self.moe_layers * self.experts * self.matrices * self.row_dim * self.expert_dim

    @property
    def row_dim(self) -> int:
        """Width of the rows that travel, and of the experts' inputs and outputs."""
        return self.latent_dim or self.model_dim

    @property
    def expert_dim(self) -> int:
        """Inner width of an expert."""
        return self.hidden_dim or self.ffn_dim

    def layer(self, tokens: int) -> LayerShape:
        """One MoE layer with `tokens` tokens per rank."""
        return LayerShape(tokens=max(1, tokens), model_dim=self.model_dim,
                          latent_dim=self.latent_dim, hidden_dim=self.expert_dim,
                          experts=self.experts,
                          top_k=self.top_k, capacity_factor=self.capacity_factor, skew=self.skew,
                          gated=self.gated,
                          element_bytes=self.element_bytes, limits=self.limits)

    @property
    def limits(self) -> Limits:
        """Where a token's experts may be."""
        return Limits(self.groups, self.group_top_k if self.groups > 1 else 1)


@dataclass(frozen=True, order=True, kw_only=True)
class ModelPlan:
    """How a model is distributed over a cluster.

    Rank order as in Megatron: tensor, expert, data, pipeline; experts fold over tensor and data
    ranks.

    Attributes:
        tp, pp, dp: tensor-, pipeline- and data-parallel sizes, tp * pp * dp = ranks.
        ep: ranks that share the list of experts.
        etp: ranks that share each expert's width.
        micro_batch: sequences at a time.
        layout: of the MoE layers in their groups of ep * etp ranks.
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
        """Ranks of one expert group."""
        return self.ep * self.etp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert."""
        return self.tp * self.dp // self.expert_ranks

    def micro_batches(self, model: ModelShape) -> int:
        """Micro-batches per step on one rank."""
        return model.global_batch // (self.dp * self.micro_batch)

    def tokens(self, model: ModelShape) -> int:
        """Tokens that one rank routes at a time; tensor-parallel ranks split a micro-batch."""
        return self.micro_batch * model.sequence // self.tp

    def groups(self) -> dict[str, GroupShape]:
        """The groups of ranks, by name."""
        return {
            "tp": GroupShape(self.tp), "dp": GroupShape(self.dp, self.tp),
            "experts": GroupShape(self.expert_ranks),
            "expert_dp": GroupShape(self.expert_dp, self.expert_ranks),
        }

    def expert_cluster(self, cluster: Cluster) -> Cluster:
        """The part of the cluster that one expert group occupies."""
        return self.groups()["experts"].shape(cluster)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**dataclasses.asdict(self), "expert_dp": self.expert_dp}

    @property
    def label(self) -> str:
        """Short text."""
        return (f"TP{self.tp} PP{self.pp} DP{self.dp} EP{self.ep} ETP{self.etp} "
                f"mb{self.micro_batch} {self.layout.label}")


def load_model(path: str | Path) -> ModelShape:
    """Read a model file (`configs/plans/`); `ValueError` if it does not hold a `ModelShape`."""
    return load_record(ModelShape, path, "model file", "see configs/plans/")
