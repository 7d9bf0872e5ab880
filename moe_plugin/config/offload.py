"""Settings of what lies somewhere else than on the device for a while."""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.config.options import SettingsSection, option

POLICIES = ("keep", "recompute", "swap")
WEIGHTS = ("device", "host")


@dataclass(kw_only=True)
class OffloadConfig(SettingsSection):
    """Memory for training, which hosts manage for a whole model; see docs/activations.md."""

    PATH = "offload."

    activations: str = option(
        "keep",
        "what each transformer layer does with its activations until backward. keep: on the "
        "device; recompute: only its input, the rest again in backward; swap: copied to host "
        "memory (on a CPU: to a disk) and back ahead of use; auto: one of these for each layer, "
        "chosen for offload.memory from what the first steps measure. Or keep, recompute or swap "
        "for each layer of the model, in the order of forward: recompute,keep,recompute,keep",
        flag="activations")
    memory: str | None = option(
        None,
        "with activations auto: what the layers' activations may take on a rank's device, such as "
        "8GiB", flag="activation-memory")
    path: str | None = option(
        None,
        "with swap, auto, weights host on a CPU: folder on a disk; none: that for temporary files",
        flag="activation-path")
    smallest: str = option(
        "64KiB", "with swap or auto: smaller tensors stay on the device",
        flag="activation-smallest")
    profile: str | None = option(
        None, "with activations auto: file for what was measured, which moe-plugin plan --memory "
        "explains", flag="activation-profile")
    weights: str = option(
        "device",
        "where the weights of the whole model lie, in plain PyTorch's streamed_trainer and in our "
        "training script for Megatron. device: on it; host: in host memory (on a CPU: on a disk), "
        "from where they stream through the device block by block",
        choices=WEIGHTS, flag="weights-on", prefix="--")
    weights_memory: str | None = option(
        None,
        "with weights host: what weights, gradients and inputs of blocks may take on the device, "
        "such as 8GiB; Megatron's model is cut into segments for it after the first step. none: a "
        "segment is one block", flag="weights-memory", prefix="--")

    def check_bounds(self) -> None:
        """Check names, and that auto has a size."""
        auto = self.activations == "auto"
        self.require("activations", auto or set(self.each_layer()) <= set(POLICIES),
                     f"auto, one of {', '.join(POLICIES)}, or one of these for each layer",
                     "write for example keep, or recompute,keep,recompute,keep")
        self.require("memory", not auto or self.memory is not None,
                     "a size with offload.activations=auto", "name one, such as 8GiB")
        self.require("memory", auto or self.memory is None,
                     "none without offload.activations=auto", "use offload.activations=auto")
        self.require("profile", auto or self.profile is None,
                     "none without offload.activations=auto, which alone measures",
                     "use offload.activations=auto")
        self.require("weights_memory", self.weights == "host" or self.weights_memory is None,
                     "none without offload.weights=host", "use offload.weights=host")
        where = f"where offload.activations={self.activations}"
        swaps = auto or "swap" in self.each_layer()
        self.read_where(swaps, where, "use swap or auto", "smallest")
        self.read_where(swaps or self.weights == "host", f"{where} and offload.weights=device",
                        "use swap, auto or offload.weights=host", "path")

    def each_layer(self) -> list[str]:
        """`activations` at its commas: one name for all layers, or one for each."""
        return [name.strip() for name in self.activations.split(",")]
