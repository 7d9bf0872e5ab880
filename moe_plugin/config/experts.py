"""Settings of the experts."""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.config.options import MOST_WIDTH, SettingsSection, option

# strategies of ours that multiply as torch is set to, and read no precision; one that a user
# registers may read it
MULTIPLY_BY_TORCH = ("fused", "grouped", "batched", "loop", "blocks")

# precisions whose products round both operands; they take the kernels whatever is named
ROUNDED = ("fp8", "fp8_blockwise", "fp8_blockwise_hybrid", "mxfp8", "mxfp8_hybrid", "nvfp4")


@dataclass(kw_only=True)
class ExpertsConfig(SettingsSection):
    """What an expert is and how the experts of a rank are computed."""

    PATH = "experts."

    kind: str = option(
        "ffn", "expert: ffn (two linear maps) or gated_ffn (SwiGLU-like), by registered name",
        flag="expert-kind")
    hidden_dim: int = option(0, "inner width of an expert; 0: four times model_dim",
                             flag="expert-hidden-dim")
    latent_dim: int = option(
        0, "width to which tokens are projected before they travel, in which experts compute, and "
        "from which their sum is projected back (docs/megatron_models.md); 0: none",
        flag="expert-latent-dim")
    activation: str = option("gelu", "activation",
                             choices=("gelu", "gelu_tanh", "quick_gelu", "relu", "silu",
                                      "squared_relu"),
                             flag="expert-activation")
    clamp: float = option(
        0.0,
        "gated_ffn: c > 0: the gate is cut to at most c before the activation, the other factor to "
        "-c..c (gpt-oss: 7); torch's matmuls take the place of fused kernels, which have no cut; "
        "0: neither is cut", flag="expert-clamp")
    linear_offset: float = option(
        0.0,
        "gated_ffn: added to the factor that is not the gate, after the cut (gpt-oss: 1); by "
        "torch's matmuls, too", flag="expert-linear-offset")
    bias: bool = option(True, "biases in the experts' linear maps", flag="expert-bias")
    compute: str = option("auto",
                          "how a rank's experts are computed, by registered name; auto chooses",
                          flag="expert-compute")
    compute_selection: str = option(
        "measured",
        "how compute=auto chooses: measured (candidates are timed for each load, the result is "
        "kept and checked now and then), or rule (nothing is timed)", choices=("measured", "rule"),
        flag="expert-compute-selection")
    recompute_activation: bool = option(
        False,
        "keep for backward the values before the activation alone, and compute those after it "
        "again; with dropout, what it leaves is kept", flag="recompute-activation")
    precision: str = option(
        "ieee",
        "of the products of compute=kernels: ieee (float32 exactly, 16-bit values as they are), "
        "tf32 (float32 values with 11 bits on a GPU's matrix units), fp8 (every operand rounded to "
        "e4m3 with a scale for 128 values, weight gradients not; off by about 4 % of a product's "
        "norm), mxfp8 (e4m3 with a power of two for 32 values along each sum, weight gradients "
        "too; about 4 %), fp8_blockwise (the same for 128 values, or 128 x 128 of a weight), "
        "either with _hybrid (gradients in e5m2; about 6 %), or nvfp4 (e2m1 with an e4m3 scale for "
        "16 values, weight gradients too; about 13 %); all but the first two take compute=kernels "
        "themselves",
        choices=("ieee", "tf32", *ROUNDED), flag="expert-precision")
    shared_hidden_dim: int = option(0, "inner width of an expert that every token visits; 0: none",
                                    flag="shared-expert-hidden-dim")
    shared_gate: bool = option(
        False,
        "multiply the shared expert's output by sigmoid(x w), w one learned row (Qwen2-MoE)",
        flag="shared-expert-gate")
    shared_overlap: bool = option(
        False,
        "compute the shared expert while the rows are on their way to their experts, where a "
        "dispatcher exchanges rows (padded, ragged, bounded, parm_s2)",
        flag="shared-expert-overlap")
    dropout: float = option(
        0.0, "training: probability with which a value inside an expert, after the activation, "
        "becomes 0; fused kernels have no dropout, torch's matmuls take their place",
        flag="expert-dropout")
    weights_first: bool = option(
        False,
        "multiply an expert's input by the gate weight, in place of its output",
        flag="expert-weights-first")
    init_std: float | None = option(
        None, "standard deviation of initial weights; none: Xavier uniform", flag="expert-init-std")
    store: str = option(
        "device",
        "where experts lie: device, host (memory of the host) or disk (a file); those that compute "
        "are copied to slots on the device (docs/offload.md)",
        choices=("device", "host", "disk"), flag="experts-on")
    cache: str = option(
        "0",
        "with store=host or disk: size of the slots on the device, which all layers share, such as "
        "2GiB; 0: twice the most experts that a call of a layer uses", flag="experts-cache")
    cache_policy: str = option(
        "lru", "which expert leaves its slot for another one, by registered name: lru, lfu or "
        "next-layer", flag="experts-cache-policy")
    store_path: str | None = option(
        None,
        "with store=disk: a folder, on a disk, for the experts; or a .safetensors file that has "
        "them, and is used as it is", flag="experts-store-path")
    store_throttle: float = option(
        0.0, "most MB/s that are read from the store, to see what a slower one costs; 0: as fast "
        "as it is", flag="experts-store-throttle")

    def check_bounds(self) -> None:
        for name in ("hidden_dim", "latent_dim", "shared_hidden_dim"):
            self.within(name, 0, MOST_WIDTH, "use 0 for the default")
        self.require("dropout", 0 <= self.dropout < 1, "in [0, 1)", "use 0 for none")
        self.require("shared_gate", not self.shared_gate or self.shared_hidden_dim > 0,
                     "False without a shared expert", "set experts.shared_hidden_dim")
        if self.dropout or self.clamp or self.linear_offset:
            self._check_steps()
        self.read_where(self.precision in ROUNDED or self.compute not in MULTIPLY_BY_TORCH,
                        f"where experts.compute={self.compute}",
                        "use experts.compute=kernels, or auto on a GPU", "precision")
        self.require("init_std", self.init_std is None or self.init_std > 0, "> 0 or none",
                     "use none")
        self.within("store_throttle", 0, 1e9, "use 0 for none")
        self.read_where(self.store != "device", "where experts.store=device",
                        "use experts.store=host or disk", "cache", "cache_policy",
                        "store_throttle")
        self.read_where(self.store == "disk", f"where experts.store={self.store}",
                        "use experts.store=disk", "store_path")

    def in_steps(self) -> list[str]:
        """The settings, of those that are set, that only strategies in steps of torch follow."""
        return [name for name in ("dropout", "clamp", "linear_offset") if getattr(self, name)]

    def _check_steps(self) -> None:
        self.require("clamp", 0 <= self.clamp <= 1e6, ">= 0 and <= 1e6", "use 0 for none")
        self.require("linear_offset", abs(self.linear_offset) <= 1e6, "in -1e6..1e6",
                     "use 0 for none")
        self.read_where(self.kind != "ffn", "where experts.kind=ffn, which has no gate",
                        "use experts.kind=gated_ffn", "clamp", "linear_offset")
        for name in self.in_steps():
            where = f"where experts.{name}={getattr(self, name):g}"
            self.require("precision", self.precision not in ROUNDED, f"ieee or tf32 {where}",
                         f"{self.precision} products have none; use experts.{name}=0")
            self.read_where(False, where, f"use experts.{name}=0: the kernels have none",
                            "precision")
