"""Definitions used to measure training steps in both hosts: shapes, settings, batches and models.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_plugin.cli.corpus import build_corpus
from moe_plugin.kernels.router import top_k_stable
from moe_plugin.layer import MoELayer
from moe_plugin.tuning.exchange_tuner import ExchangeTuner

Chooser = Callable[[Tensor, Tensor], Tensor]  # see `Side.routers`
Settings = Mapping[str, Any]  # settings of the layer by path, and optionally `FUSED_ADAM`
FUSED_ADAM = "--moe-fused-adam"
OURS, AUTO = "moe-plugin", "moe-plugin, auto"
PIECES = "moe-plugin, pieces by load"
ONE_NODE = ("linear", "native", "r=0", "all_gather")
TEXT_BYTES = 1_000_000
_ONE_LAYOUT = {"parallel.mode": "fixed"}
# every choice of `auto` as a fixed setting
FIXED: dict[str, Settings] = {
    "linear": {**_ONE_LAYOUT, "comm.all_to_all": "linear"},
    "native": {**_ONE_LAYOUT, "comm.all_to_all": "native"},
    "2dh": {**_ONE_LAYOUT, "comm.all_to_all": "2dh"},
    "leader": {**_ONE_LAYOUT, "comm.all_to_all": "leader"},
    "r=0": {**_ONE_LAYOUT, "parallel.r": 0, "comm.all_to_all": "linear"},
    "all_gather": {"dispatch.name": "all_gather", "comm.all_to_all": "linear"},
}


@dataclass(frozen=True, kw_only=True)
class TrainShape:
    """A decoder language model with an MoE layer in every block.

    Attributes:
        width: width of a token, D.
        inner: inner width of an expert, F.
        experts: number of experts, E.
        top_k: number of experts per token, K.
        tokens: number of tokens per step, over all ranks.
        layers: number of transformer layers.
        length: number of tokens per sentence.
        gated: whether the experts are gated (SwiGLU).
        bf16: whether parameters and activations are stored in bfloat16. The optimizer stores
            float32 copies of the parameters.
        gelu: whether fairseq's models use GELU instead of ReLU. Megatron's models never use ReLU.

    Raises:
        ValueError: if a size is smaller than 1, or top_k is larger than the number of experts.
    """

    name: str
    width: int
    inner: int
    experts: int
    top_k: int
    tokens: int
    layers: int = 2
    length: int = 128
    gated: bool = False
    bf16: bool = False
    gelu: bool = False

    def __post_init__(self) -> None:
        for field in ("width", "inner", "experts", "top_k", "tokens", "layers", "length"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} is out of bounds: must be >= 1. "
                                 "Use a positive number")
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} is out of bounds: must be <= "
                             f"experts={self.experts}. Use a smaller top_k")

    def sentences(self, ranks: int) -> int:
        """Return the number of sentences that one rank processes in a step.

        Raises:
            ValueError: if the tokens of a step cannot be divided equally among the ranks.
        """
        if self.tokens % (self.length * ranks):
            raise ValueError(
                f"tokens={self.tokens} cannot be divided into sentences of {self.length} tokens on "
                f"{ranks} ranks. The number of tokens must be a multiple of {self.length * ranks}")
        return self.tokens // (self.length * ranks)

    def label(self) -> str:
        return (f"width {self.width}, inner {self.inner}, {self.experts} experts, k {self.top_k}, "
                f"{self.tokens:,} tokens" + ", gated" * self.gated + ", bf16" * self.bf16
                + ", GELU" * self.gelu)


@dataclass(frozen=True)
class Side:
    """A model that is trained in a comparison.

    Attributes:
        kind: "ours", "native" or "dense".
        step: a function that receives the number of a step and trains (or evaluates) on this step.
            The function returns the loss of the language model over all ranks, in nats per token.
        optimizers: the torch optimizers. The time of the optimizers is measured separately.
        settled: a function that returns whether the tuners have made their final choices. The
            function returns the same value on all ranks.
        layout: a function that returns the label of the current layout.
        parameters: parameters of the model. If the model is stored in 16 bits, the optimizers have
            float32 copies of the parameters.
        routers: for each MoE layer, in order, a function that replaces all later choices of the
            layer's router. The argument of this function maps the logits [T, E] and the experts
            [T, K] that the router chooses to the experts [T, K] that the layer uses.
        reload: a function that copies the parameters to the optimizers' float32 copies after the
            parameters have changed. Does nothing if there are no such copies.
    """

    name: str
    kind: str
    step: Callable[[int], float]
    optimizers: Sequence[torch.optim.Optimizer]
    settled: Callable[[], bool] = lambda: True
    layout: Callable[[], str] = lambda: ""
    parameters: Sequence[Tensor] = ()
    routers: Sequence[Callable[[Chooser], None]] = ()
    reload: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class SideTimes:
    """The step times of one model, in seconds on the slowest rank.

    Attributes:
        kind: "ours", "native" or "dense".
        seconds: time of each timed step.
        optimizer_s: time spent in the optimizer during each timed step.
        losses: losses of all steps, including the steps of the last warm-up. The losses of two
            models can be compared step by step, because all models start with the same weights and
            use the same data.
        parameters: number of parameters per rank.
    """

    name: str
    kind: str
    seconds: list[float]
    optimizer_s: list[float]
    losses: list[float]
    parameters: int
    layout: str


def tuners_settled(layers: Sequence[MoELayer]) -> Callable[[], bool]:
    """Return a function that returns whether the tuners of all layers have finished their trials.
    The returned value is the same on all ranks.
    """
    def exploring(layer: MoELayer) -> bool:
        routed = layer.routed_experts
        if routed.tuner is not None and routed.tuner.exploring:
            return True
        exchanges = layer.comm.size > 1 and routed.current.r > 0
        return exchanges and routed.current.algorithm == "auto" and ExchangeTuner.of(
            layer.comm).exploring

    return lambda: not any(map(exploring, layers))


def take_choices(layer: MoELayer, choose: Chooser) -> None:
    """Make `choose` select the experts in all later calls of the layer. See `Side.routers`."""
    # the router compares scores, which may be equal although the logits differ in their last bits
    layer.router.forced = lambda call: choose(call.logits_TE, top_k_stable(
        call.scores_TE.detach(), call.k))


def layout_of(layers: Sequence[MoELayer], tokens: int) -> str:
    """Return the layout labels of the latest calls, each with the number of layers that use the
    layout. Collective.

    Args:
        layers: the layers.
        tokens: number of tokens per step on one rank.
    """
    of = [layer.routed_experts for layer in layers]
    seen = Counter((routed.current if routed.prefill is None else
                    routed.prefill.choice(routed.current, tokens)).label for routed in of)
    return ", ".join(label if count == len(layers) else f"{label} ({count} of {len(layers)})"
                     for label, count in seen.items())


def batch(text: Tensor, step: int, sentences: int, length: int, rank: int) -> Tensor:
    """Return the bytes of a rank's sentences in one step, int64 [sentences, length + 1].

    All models get the same sentences in the same step.

    Args:
        text: the text, uint8 [N].
        length: number of tokens per sentence.
        rank: this rank.
    """
    source = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(len(text) - length, (sentences, 1), generator=source)
    return text[starts + torch.arange(length + 1)].long()


# -- shapes and settings that are measured

# three shapes from a study of native layers, and small versions of layers used in practice
SHAPES = {
    shape.name: shape for shape in (
        TrainShape(name="few", width=128, inner=128, experts=8, top_k=2, tokens=4096),
        TrainShape(name="fine", width=128, inner=64, experts=64, top_k=8, tokens=4096),
        TrainShape(name="wide", width=128, inner=512, experts=8, top_k=2, tokens=2048),
        TrainShape(name="switch", width=128, inner=256, experts=16, top_k=1, tokens=4096),
        TrainShape(name="mixture", width=256, inner=512, experts=8, top_k=2, tokens=2048),
        TrainShape(name="many", width=256, inner=128, experts=32, top_k=4, tokens=2048),
        # Gated experts have three matrices instead of two. With two thirds of the inner width
        # (rounded to a multiple of 32) they do as much work as the shapes above.
        TrainShape(name="gated", width=256, inner=352, experts=8, top_k=2, tokens=2048, gated=True),
        TrainShape(name="gated_fine", width=256, inner=96, experts=32, top_k=4, tokens=2048,
                   gated=True),
        TrainShape(name="few_bf16", width=128, inner=128, experts=8, top_k=2, tokens=4096,
                   bf16=True),
        TrainShape(name="mixture_bf16", width=256, inner=512, experts=8, top_k=2, tokens=2048,
                   bf16=True),
    )
}


def parse_shapes(text: str) -> list[TrainShape]:
    """Parse the value of the option `--shapes`.

    Args:
        text: `all`, several names separated by commas, or `WxFxExKxT` (width, inner width, number
            of experts, experts per token, tokens per step).

    Raises:
        ValueError: if a name is unknown.
    """
    return list(SHAPES.values()) if text == "all" else [_shape(item) for item in text.split(",")]


def _shape(text: str) -> TrainShape:
    if text in SHAPES:
        return SHAPES[text]
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)x(\d+)", text)
    if not match:
        raise ValueError(f"{text!r} is not a known shape. Use one of {', '.join(SHAPES)}, or "
                         "width x inner width x experts x k x tokens, such as 128x128x8x2x4096")
    width, inner, experts, top_k, tokens = map(int, match.groups())
    return TrainShape(name=text, width=width, inner=inner, experts=experts, top_k=top_k,
                      tokens=tokens, length=min(128, max(1, tokens // 32)))


def for_host(shapes: Sequence[TrainShape], host: str) -> list[TrainShape]:
    """Adapt the shapes to the limits of the host's own layer.

    The layer of fairseq's `moe` branch does not support gated experts, or more than two experts per
    token. Therefore the number of experts per token is reduced, and shapes with gated experts are
    removed.

    Raises:
        ValueError: if the host is fairseq and all shapes have gated experts.
    """
    if host != "fairseq":
        return list(shapes)
    if found := [replace(one, top_k=min(one.top_k, 2)) for one in shapes if not one.gated]:
        return found
    raise ValueError(f"{shapes[0].name} has gated experts, which fairseq's moe branch does not "
                     "support. Use --host megatron, or another shape")


def our_settings(several_nodes: bool) -> dict[str, Settings]:
    """Return the settings of our layer for each model.

    There is one model for the default settings, one for the automatic choice (`auto`) of the layout
    and the all-to-all algorithm (on several nodes, this is the default), and one for every fixed
    setting that is not the default.
    """
    if several_nodes:  # the default settings are `auto` already
        return {OURS: {}, **{f"{OURS}, {name}": FIXED[name] for name in FIXED}}
    auto = {"parallel.mode": "auto", "comm.all_to_all": "auto"}
    return {OURS: {}, AUTO: auto, **{f"{OURS}, {name}": FIXED[name] for name in ONE_NODE}}


def evaluated_settings(hardware: Settings) -> dict[str, Settings]:
    """Return the settings of our layer for evaluations, with rows not divided into pieces and with
    the number of pieces chosen by the load.

    Args:
        hardware: settings that describe the links and the processor. Used with and without pieces.
    """
    return {OURS: hardware, PIECES: {**hardware, "parallel.prefill": True}}


# -- the text


def write_text(folder: Path) -> str:
    """Write the training text to `folder` and return its path."""
    build_corpus(folder, size=TEXT_BYTES)
    return str(folder / "train.txt")


def read_text(path: str) -> Tensor:
    """Read the text written by `write_text`, as uint8 [N]."""
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
