"""A whole model and a whole plan as records, and the ranks that a plan puts together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.collectives import Group
from moe_plugin.planner.layer_cost import LayerShape


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder with experts in every `moe_every`-th layer.

    ffn_dim: inner width of dense layers; hidden_dim: of an expert. sequence, global_batch: tokens
    of a sequence, sequences of a step.
    capacity_factor: None: dropless. element_bytes: of weights and activations; state_bytes:
    gradient and optimizer state of a parameter beside its weight (fp32 gradient 4, master 4, Adam
    moments 8).
    """

    layers: int
    model_dim: int
    ffn_dim: int
    heads: int = 1
    vocab: int = 0
    sequence: int = 1024
    global_batch: int = 1
    moe_every: int = 2
    experts: int = 8
    hidden_dim: int = 0
    top_k: int = 2
    capacity_factor: float | None = None
    gated: bool = False
    element_bytes: int = 2
    state_bytes: int = 16

    def __post_init__(self) -> None:
        for name in ("layers", "model_dim", "ffn_dim", "heads", "sequence", "global_batch",
                     "moe_every", "experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"model {name}={getattr(self, name)} must be >= 1; correct the file")

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers // self.moe_every

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward network."""
        return 3 if self.gated else 2

    @property
    def dense_parameters(self) -> float:
        """Parameters that are no expert's."""
        dense = (self.layers - self.moe_layers) * self.matrices * self.model_dim * self.ffn_dim
        return self.layers * 4 * self.model_dim**2 + dense + self.vocab * self.model_dim + self.moe_layers * self.model_dim * self.experts

    @property
    def expert_parameters(self) -> float:
        """Parameters of all experts of all layers."""
        return self.moe_layers * self.experts * self.matrices * self.model_dim * (self.hidden_dim
                                                                                  or self.ffn_dim)

    def layer(self, tokens: int) -> LayerShape:
        """One MoE layer with `tokens` on a rank."""
        return LayerShape(tokens=max(1, tokens), model_dim=self.model_dim,
                          hidden_dim=self.hidden_dim or self.ffn_dim, experts=self.experts,
                          top_k=self.top_k, capacity_factor=self.capacity_factor, gated=self.gated,
                          element_bytes=self.element_bytes)


@dataclass(frozen=True, order=True, kw_only=True)
class Plan:
    """How a model lies on a cluster. Rank order as in Megatron: tensor, expert, data, pipeline;
    experts fold over tensor and data ranks.

    tp, pp, dp: tensor-, pipeline- and data-parallel sizes, tp * pp * dp = ranks. ep: ranks over
    which whole experts are spread; etp: ranks among which one expert is cut. micro_batch: sequences
    at a time. layout: of the MoE layers in their groups of ep * etp.
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
        """Micro-batches of a step on one rank."""
        return model.global_batch // (self.dp * self.micro_batch)

    def tokens(self, model: ModelShape) -> int:
        """Tokens that one rank routes at a time: tensor-parallel ranks share a micro-batch's tokens
        between them.
        """
        return self.micro_batch * model.sequence // self.tp

    def groups(self) -> dict[str, Group]:
        """The groups of ranks."""
        return {
            "tp": Group(self.tp), "dp": Group(self.dp, self.tp),
            "experts": Group(self.expert_ranks), "expert_dp": Group(self.expert_dp,
                                                                    self.expert_ranks)
        }

    def expert_cluster(self, cluster: Cluster) -> Cluster:
        """The cluster that one expert group is."""
        return self.groups()["experts"].shape(cluster)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **{
                f.name: getattr(self, f.name) for f in dataclasses.fields(self)
            }, "layout": self.layout.as_dict(), "expert_dp": self.expert_dp
        }

    @property
    def label(self) -> str:
        """Short text."""
        return (f"TP{self.tp} PP{self.pp} DP{self.dp} EP{self.ep} ETP{self.etp} "
                f"mb{self.micro_batch} {self.layout.label}")


def load_model(path: str | Path) -> ModelShape:
    """Read a model file (`configs/plans/`); unknown keys, wrong types and what cannot be read are a
    `ValueError`.
    """
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(
            f"model file {str(path)!r} cannot be read ({error}); see configs/plans/") from error
    return model_from_dict(values, f"model file {str(path)!r}")


def model_from_dict(values: Mapping[str, Any], where: str = "model") -> ModelShape:
    """Plain values to a `ModelShape`."""
    known = [f.name for f in dataclasses.fields(ModelShape)]
    if not isinstance(values, Mapping) or not set(values) <= set(known):
        wrong = sorted(set(values) - set(known)) if isinstance(values, Mapping) else values
        raise ValueError(
            f"{where}: {wrong} cannot be read; must be a mapping with keys of {', '.join(known)}")
    try:
        return ModelShape(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error
