"""`FineTunedModel`, the sizes of a model whose weights are frozen and whose experts have low-rank
adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from moe_plugin.planner.cluster import Device
from moe_plugin.planner.layer_cost import LayerShape
from moe_plugin.planner.model import STATE, ModelPlan
from moe_plugin.planner.traced_model import TracedModel

BF16 = "bf16"  # frozen experts whose weights are not quantized
FORMATS = "nf4", "nf4_double", "mxfp4", "fp8", "int8", BF16
STORES = "device", "host", "disk"
# bytes that are read and written to decode a number: the code, float32 twice, and the layer's dtype
DECODED_BYTES = 20
STAGED = 2  # layers whose codes fit into the slots on the device if codes are stored elsewhere
LINKS = {"device": 0.0, "host": 25e9, "disk": 3e9}  # bytes per second from the codes to a device


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """How a model is fine-tuned. All weights are frozen, and only adapters are trained.

    Attributes:
        format: number format of the experts' weights, or `BF16`.
        rank: rank of the adapters.
        store: where the experts' weights are stored. See `STORES`.
        link_bytes_s: bytes per second that one rank reads from the store.
    """

    format: str
    rank: int = 8
    store: str = "device"
    link_bytes_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FineTunedModel(TracedModel):
    """Sizes of a model with frozen weights and adapters, which was run on torch's meta device.

    In `in_experts`, only the parameters of adapters are counted. FSDP divides the weights outside
    the routed experts, and no rank divides the experts or adapters of its replicas.

    Attributes:
        tuning: how the model is fine-tuned.
        code_bytes: size in bytes of the frozen weights of all routed experts.
        format_bytes: bytes per weight in each format that can store the experts.
    """

    tuning: FineTuning
    code_bytes: int
    format_bytes: dict[str, float] = field(default_factory=dict, hash=False)
    backward: ClassVar[float] = 1.0

    def layer(self, tokens: int) -> LayerShape:
        each = self.code_bytes / (self.moe_layers * self.experts)
        return replace(super().layer(tokens), frozen_bytes=each)

    @property
    def synchronized_bytes(self) -> tuple[float, float]:
        return self.weight_bytes, 4.0  # half an all-reduce for each of two all-gathers

    def codes(self, plan: ModelPlan) -> float:
        """Return the size in bytes of the experts' weights that one rank stores."""
        _, moe = self.fullest(plan.pp)
        return self.code_bytes / self.moe_layers * moe / plan.expert_ranks

    def staged(self, plan: ModelPlan) -> float:
        """Return the size in bytes of the experts' slots on the device, if the experts are stored
        elsewhere.
        """
        return self.code_bytes / self.moe_layers * STAGED / plan.expert_ranks

    def buffer_bytes(self, plan: ModelPlan) -> dict[str, float]:
        """See `ModelShape`. The sizes of experts replace those of trained experts."""
        trained = self.in_experts / plan.expert_ranks / plan.pp
        away = self.tuning.store != "device"
        frozen = {"dense gradients": 0.0, f"dense {STATE}": 0.0, "expert parameters": 0.0}
        slots = {"slots of experts": min(self.staged(plan), self.codes(plan))} if away else {}
        return {**super().buffer_bytes(plan), **frozen, **slots,
                "codes": 0.0 if away else self.codes(plan),
                "adapters": self.weight_bytes * trained,
                "expert gradients": self.gradient_bytes * trained,
                f"expert {STATE}": self.optimizer_bytes * trained}

    def extra_s(self, device: Device, plan: ModelPlan) -> dict[str, float]:
        """See `ModelShape`. Each pass of a micro-batch decodes and copies all local experts."""
        passes = 2 * plan.micro_batches(self)
        codes, numbers = self.codes(plan), self.format_bytes[self.tuning.format]
        parts = {}
        if self.tuning.format != BF16:
            parts["decoding"] = passes * (
                DECODED_BYTES * codes / numbers / device.memory_bytes_s)
        if self.tuning.store != "device":
            parts["copies of experts"] = passes * codes / self.tuning.link_bytes_s
        return parts

    def host_bytes(self, plan: ModelPlan, ranks_per_node: int) -> dict[str, float]:
        """Return the parts of the host memory of one node in bytes."""
        on_host = self.tuning.store == "host"
        return {"codes": self.codes(plan) * min(ranks_per_node, plan.dp * plan.tp * plan.pp)
                } if on_host else {}

    def savings(self, plan: ModelPlan) -> dict[str, float]:
        """Return how many bytes of device memory each other way to store the experts would save."""
        codes, own = self.codes(plan), self.format_bytes[self.tuning.format]
        if self.tuning.store != "device":
            return {}
        smaller = {f"--fine-tune {name}": codes * (1 - size / own)
                   for name, size in self.format_bytes.items() if size < own}
        if self.tuning.format != BF16:
            smaller["--store host"] = max(0.0, codes - self.staged(plan))
        return smaller
