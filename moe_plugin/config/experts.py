"""Settings of the experts (`experts`)."""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.config.options import MOST_WIDTH, SettingsSection, option

# Strategies of this package that multiply with torch, and therefore follow torch's precision flags
# rather than `precision`. A strategy that a user registers may read `precision`.
MULTIPLY_BY_TORCH = ("fused", "grouped", "batched", "loop", "blocks")

# Precisions that round both operands of a product. They always use the kernels, whatever
# `compute` names.
ROUNDED = ("fp8", "fp8_blockwise", "fp8_blockwise_hybrid", "mxfp8", "mxfp8_hybrid", "nvfp4")


@dataclass(kw_only=True)
class ExpertsConfig(SettingsSection):
    """Structure of an expert, and the method by which a rank computes its local experts."""

    PATH = "experts."

    kind: str = option("ffn", "type of expert, by registered name: ffn (two linear maps) or "
                       "gated_ffn (SwiGLU-like)", flag="expert-kind")
    hidden_dim: int = option(0, "inner width of an expert; 0: four times model_dim",
                             flag="expert-hidden-dim")
    latent_dim: int = option(0, "width to which tokens are projected before they are sent. The "
                             "experts compute in this width, and their sum is projected back "
                             "(docs/megatron_models.md); 0: no projection",
                             flag="expert-latent-dim")
    activation: str = option(
        "gelu", "activation function of the experts",
        choices=("gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "squared_relu"),
        flag="expert-activation")
    clamp: float = option(0.0, "gated_ffn: limit c > 0. The gate is clamped to at most c before "
                          "the activation, and the other factor is clamped to -c..c (gpt-oss: 7). "
                          "The fused kernels cannot clamp, so torch's matmuls are used instead. "
                          "0: no limit", flag="expert-clamp")
    linear_offset: float = option(0.0, "gated_ffn: number added to the factor that is not the "
                                  "gate, after clamping (gpt-oss: 1). As with clamp, torch's "
                                  "matmuls are used", flag="expert-linear-offset")
    bias: bool = option(True, "whether the experts' linear maps have biases", flag="expert-bias")
    compute: str = option("auto", "how a rank computes its experts, by registered name; auto "
                          "chooses a strategy", flag="expert-compute")
    compute_selection: str = option("measured", "how compute=auto chooses. measured: the "
                                    "candidates are timed for each load, and the result is reused "
                                    "and checked now and then; rule: a fixed rule, without timing",
                                    choices=("measured", "rule"), flag="expert-compute-selection")
    recompute_activation: bool = option(
        False, "store for backward only the values before the activation, and recompute the values "
        "after it; with dropout, the dropped-out values are stored", flag="recompute-activation")
    precision: str = option(
        "ieee", "precision of the products of compute=kernels. ieee: exact float32 products, "
        "16-bit values unchanged; tf32: float32 values rounded to 11 bits, on a GPU's matrix "
        "units; fp8: every operand rounded to e4m3 with one scale per 128 values, but not for "
        "weight gradients (error about 4 % of a product's norm); mxfp8: e4m3 with a power-of-two "
        "scale per 32 values along each sum, also for weight gradients (about 4 %); fp8_blockwise: "
        "the same with one scale per 128 values, or per 128 x 128 values of a weight; "
        "mxfp8_hybrid, fp8_blockwise_hybrid: the same with gradients in e5m2 (about 6 %); nvfp4: "
        "e2m1 with an e4m3 scale per 16 values, also for weight gradients (about 13 %). All but "
        "ieee and tf32 select compute=kernels automatically", choices=("ieee", "tf32", *ROUNDED),
        flag="expert-precision")
    shared_hidden_dim: int = option(0, "inner width of a shared expert that processes every token; "
                                    "0: no shared expert", flag="shared-expert-hidden-dim")
    shared_gate: bool = option(False, "multiply the shared expert's output by sigmoid(x w), where "
                               "w is one learned row (Qwen2-MoE)", flag="shared-expert-gate")
    shared_overlap: bool = option(False, "compute the shared expert while the rows are sent to "
                                  "their experts, for dispatchers that exchange rows (padded, "
                                  "ragged, bounded, parm_s2)", flag="shared-expert-overlap")
    dropout: float = option(0.0, "probability, in training, with which a value inside an expert is "
                            "set to 0 after the activation. The fused kernels have no dropout, so "
                            "torch's matmuls are used instead", flag="expert-dropout")
    weights_first: bool = option(False, "multiply an expert's input by the gate weight, instead of "
                                 "its output", flag="expert-weights-first")
    init_std: float | None = option(None, "standard deviation of the initial weights. Default "
                                    "(none): Xavier uniform initialization", flag="expert-init-std")
    store: str = option("device", "where expert weights are stored: device, host (host memory) or "
                        "disk (a file). With host or disk, experts in use are copied to slots on "
                        "the device (docs/offload.md)", choices=("device", "host", "disk"),
                        flag="experts-on")
    cache: str = option("0", "with store=host or disk: size of the slots on the device, such as "
                        "2GiB, shared by all layers; 0: twice the largest number of experts that "
                        "one call of a layer uses", flag="experts-cache")
    cache_policy: str = option("lru", "which expert is evicted from its slot when another one is "
                               "needed, by registered name: lru, lfu or next-layer",
                               flag="experts-cache-policy")
    store_path: str | None = option(None, "with store=disk: a folder on a disk for the experts, or "
                                    "a .safetensors file that contains them and is read without "
                                    "copying", flag="experts-store-path")
    store_throttle: float = option(0.0, "largest rate, in MB/s, at which experts are read from the "
                                   "store, to measure the effect of a slower disk; 0: no limit",
                                   flag="experts-store-throttle")

    def check_bounds(self) -> None:
        for name in ("hidden_dim", "latent_dim", "shared_hidden_dim"):
            self.within(name, 0, MOST_WIDTH, "use 0 for the default")
        self.require("dropout", 0 <= self.dropout < 1, "in [0, 1)", "use 0 for no dropout")
        self.require("shared_gate", not self.shared_gate or self.shared_hidden_dim > 0,
                     "False without a shared expert", "set experts.shared_hidden_dim")
        if self.dropout or self.clamp or self.linear_offset:
            self._check_steps()
        self.read_where(self.precision in ROUNDED or self.compute not in MULTIPLY_BY_TORCH,
                        f"where experts.compute={self.compute}",
                        "use experts.compute=kernels, or auto on a GPU", "precision")
        self.require("init_std", self.init_std is None or self.init_std > 0, "> 0 or none",
                     "use none")
        self.within("store_throttle", 0, 1e9, "use 0 for no limit")
        self.read_where(self.store != "device", "where experts.store=device",
                        "use experts.store=host or disk", "cache", "cache_policy",
                        "store_throttle")
        self.read_where(self.store == "disk", f"where experts.store={self.store}",
                        "use experts.store=disk", "store_path")

    def in_steps(self) -> list[str]:
        """Return the names of the enabled settings that are supported by the torch strategies but
        not by the fused kernels.
        """
        return [name for name in ("dropout", "clamp", "linear_offset") if getattr(self, name)]

    def _check_steps(self) -> None:
        self.require("clamp", 0 <= self.clamp <= 1e6, ">= 0 and <= 1e6", "use 0 for no limit")
        self.require("linear_offset", abs(self.linear_offset) <= 1e6, "in -1e6..1e6",
                     "use 0 for no offset")
        self.read_where(self.kind != "ffn", "where experts.kind=ffn, which has no gate",
                        "use experts.kind=gated_ffn", "clamp", "linear_offset")
        for name in self.in_steps():
            where = f"where experts.{name}={getattr(self, name):g}"
            self.require("precision", self.precision not in ROUNDED, f"ieee or tf32 {where}",
                         f"{self.precision} products do not support it; use experts.{name}=0")
            self.read_where(False, where,
                            f"use experts.{name}=0, because the kernels do not support it",
                            "precision")
