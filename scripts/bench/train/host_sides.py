"""A model that a host trains: its sizes, settings, data and steps, and what its tuners do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.layer import MoELayer
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.routed_experts import RoutedExperts
from moe_plugin.tuning.exchange_tuner import ExchangeTuner

Settings = Mapping[str, Any]  # of the layer by path; and `FUSED_ADAM`
FUSED_ADAM = "--moe-fused-adam"
OURS, AUTO = "moe-plugin", "moe-plugin, auto"
_ONE_LAYOUT = {"parallel.mode": "fixed"}
# what `auto` chooses from, each alone
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
    """A decoder language model whose every layer has experts.

    Attributes:
        width: of a token, D.
        inner: width inside an expert, F.
        experts: E.
        top_k: experts per token.
        tokens: of one step, over all ranks.
        layers, length: transformer layers, tokens of a sentence.
        gated: experts are SwiGLU ones.
        bf16: parameters and activations are in bfloat16, the optimizer's copies in float32.
    Raises: ValueError: sizes that do not fit together; it names value, bound and remedy.
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

    def __post_init__(self) -> None:
        for field in ("width", "inner", "experts", "top_k", "tokens", "layers", "length"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} is out of bounds: must be >= 1; "
                                 "give a positive number")
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} is out of bounds: must be <= "
                             f"experts={self.experts}; lower it")

    def sentences(self, ranks: int) -> int:
        """Sentences of one rank in a step."""
        if self.tokens % (self.length * ranks):
            raise ValueError(
                f"tokens={self.tokens} does not fit {ranks} ranks and sentences of {self.length} "
                f"tokens: must be a multiple of {self.length * ranks}")
        return self.tokens // (self.length * ranks)

    def label(self) -> str:
        return (f"width {self.width}, inner {self.inner}, {self.experts} experts, k {self.top_k}, "
                f"{self.tokens:,} tokens" + ", gated" * self.gated + ", bf16" * self.bf16)


@dataclass(frozen=True)
class Side:
    """One model in training.

    Attributes:
        kind: ours, native or dense.
        step: trains (or evaluates) on the step with this number and returns the language
            model's loss over all ranks, nats per token.
        optimizers: torch's, timed by themselves.
        settled: whether its tuners have chosen, the same on all ranks.
        layout: what runs, for the report.
        parameters: of the model; in 16 bits the optimizers have copies of them.
        routers: one function for each MoE layer, in their order. It is given a function from
            logits [T, E] to experts [T, K], which from then on makes the layer's choices.
    """

    name: str
    kind: str
    step: Callable[[int], float]
    optimizers: Sequence[torch.optim.Optimizer]
    settled: Callable[[], bool] = lambda: True
    layout: Callable[[], str] = lambda: ""
    parameters: Sequence[Tensor] = ()
    routers: Sequence[Callable[[Callable[[Tensor], Tensor]], None]] = ()


def tuners_settled(layers: Sequence[MoELayer]) -> Callable[[], bool]:
    """A function that says whether these layers' tuners have no trials left; alike on all ranks."""
    return lambda: not any(_exploring(layer) for layer in layers)


def _exploring(layer: MoELayer) -> bool:
    routed = layer.routed_experts
    if routed.tuner is not None and routed.tuner.exploring:
        return True
    exchanges = layer.comm.size > 1 and routed.current.r > 0
    return exchanges and routed.current.algorithm == "auto" and ExchangeTuner.of(
        layer.comm).exploring


def take_choices(layer: MoELayer, choose: Callable[[Tensor], Tensor]) -> None:
    """From now on `choose` gives the experts [T, K] of logits [T, E]."""
    layer.router.forced = lambda call: choose(call.logits_TE)


def layout_of(layers: Sequence[MoELayer], tokens: int) -> str:
    """The layouts of the latest calls, and how many layers run in each. Collective.

    tokens: of a rank in a step.
    """
    seen = Counter(_latest(layer.routed_experts, tokens).label for layer in layers)
    return ", ".join(label if count == len(layers) else f"{label} ({count} of {len(layers)})"
                     for label, count in seen.items())


def _latest(routed: RoutedExperts, tokens: int) -> LayoutChoice:
    if routed.prefill is None:
        return routed.current
    return routed.prefill.choice(routed.current, tokens)


def batch(text: Tensor, step: int, sentences: int, length: int, rank: int) -> Tensor:
    """The token bytes of a rank's sentences in a step, int64 [sentences, length + 1].

    text: uint8 [N]. The same step gives every side the same sentences.
    """
    source = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(len(text) - length, (sentences, 1), generator=source)
    return text[starts + torch.arange(length + 1)].long()
