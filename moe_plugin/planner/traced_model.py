"""`TracedModel`, the sizes of a model that was run on the meta device instead of described by
formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_plugin.planner.model import STATE, ModelPlan, ModelShape


@dataclass(frozen=True, kw_only=True)
class TracedModel(ModelShape):
    """Sizes of a model that was built and run on torch's meta device.

    The numbers of parameters and the saved bytes replace the formulas of `ModelShape`. Saved bytes
    are those of one sequence of `sequence` tokens on one rank without tensor parallelism.

    Attributes:
        dense_first: number of leading layers without experts.
        outside: number of parameters outside the routed experts.
        in_layers: number of the parameters in `outside` that belong to decoder layers.
        in_experts: number of parameters of all routed experts.
        dense_saved: bytes that autograd saves in one layer without experts.
        moe_saved: bytes that autograd saves in one layer with experts, outside the routed experts.
        ends_saved: bytes that autograd saves in the embedding, the output head and the loss.
        row_saved: bytes that autograd saves in the routed experts, per row.
        extra: bytes of temporary tensors when most memory is used.
        largest_matrix: number of parameters in the largest stack of expert weights. The gradient of
            this stack is computed before it is added to the existing gradient.
        weight_bytes, gradient_bytes, optimizer_bytes: bytes per parameter.
        sharded_parameters: whether weights and gradients are divided among the ranks that replicate
            them, as with FSDP. Set by `in_host`.
    """

    dense_first: int = 0
    outside: int = 0
    in_layers: int = 0
    in_experts: int = 0
    dense_saved: int = 0
    moe_saved: int = 0
    ends_saved: int = 0
    row_saved: float = 0.0  # type: ignore[misc]
    extra: int = 0
    largest_matrix: int = 0
    weight_bytes: float = 2
    gradient_bytes: float = 4
    optimizer_bytes: float = 12
    sharded_parameters: bool = False  # type: ignore[misc]

    def in_host(self, host: str) -> TracedModel:
        """Return a copy in which a host framework divides the optimizer state, and for transformers
        also the parameters. The MoE layers stay where they were traced.
        """
        return replace(self, sharded_optimizer=host != "fairseq",
                       sharded_parameters=host == "transformers")

    def moe_before(self, layer: int) -> int:
        return super().moe_before(max(0, layer - self.dense_first))

    @property
    def dense_parameters(self) -> float:
        return self.outside

    @property
    def expert_parameters(self) -> float:
        return self.in_experts

    def parameter_bytes(self) -> dict[str, float]:
        return {"parameters": self.weight_bytes, "gradients": self.gradient_bytes,
                STATE: self.optimizer_bytes}

    @property
    def attention_flops(self) -> float:
        """FLOPs per token of the forward pass of one layer outside its dense feed-forward network,
        including shared experts.
        """
        ffn = (self.layers - self.moe_layers) * self.matrices * self.model_dim * self.ffn_dim
        return 2 * max(0, self.in_layers - ffn) / self.layers

    def saved_bytes(self, experts: bool) -> float:
        return self.moe_saved if experts else self.dense_saved

    @property
    def logits_bytes(self) -> float:
        return self.ends_saved

    def buffer_bytes(self, plan: ModelPlan) -> dict[str, float]:
        """Return the size of temporary tensors, and of the gathered parameters of two layers if
        parameters are sharded.
        """
        gradient = self.weight_bytes * self.largest_matrix / plan.expert_ranks
        head = self.extra * plan.micro_batch / plan.tp
        # gradients of experts are computed when the tensors of the output head are no longer used
        buffers = {"temporary tensors": max(
            head, gradient - self.ends_saved * plan.micro_batch / plan.tp)}
        if self.sharded_parameters and plan.dp > 1:
            each = self.in_layers / self.layers
            if plan.expert_dp > 1:
                each += self.in_experts / max(1, self.moe_layers) / plan.expert_ranks
            buffers["gathered parameters"] = 2 * self.weight_bytes * each
        return buffers
