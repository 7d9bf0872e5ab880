"""What a feed-forward module of someone else's model computes, found by running it.

A module that has two linear maps, D to F and back, or three, of which two go D to F, is a
feed-forward module if one of our activations, in one of the possible orders, gives what the module
gives for random tokens and random weights. Nothing is believed because of a name.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.kernels.activations import ACTIVATIONS

PROBES = 32  # tokens
NEAR = 1e-4  # of the largest output, in float32
SPREAD = 3.0  # standard deviation of inner values: beyond the bounds of a ReLU6, too
TRAINED = 8  # calls in training


@dataclass(frozen=True)
class FeedForward:
    """y = act(x w_in + b_in) w_out + b_out, or y = (act(x w_gate + b_gate) * (x w_in + b_in)) w_out
    + b_out.

    Attributes:
        weights: `w_in_DF`, `w_out_FD`, `w_gate_DF` where there is a gate, and of the biases
            `b_in_F`, `b_gate_F`, `b_out_D` those that exist; views of the module's parameters.
        activation: its name in `experts.activation`.
        dropout: probability after the activation (and the gate).
        after: probability of the dropout behind the last map.
        frozen: names of weights whose parameter does not train.
    """

    weights: dict[str, Tensor]
    activation: str
    dropout: float = 0.0
    after: float = 0.0
    frozen: frozenset[str] = frozenset()

    @property
    def gated(self) -> bool:
        """Whether it has a gate."""
        return "w_gate_DF" in self.weights

    @property
    def width(self) -> int:
        """D."""
        return self.weights["w_in_DF"].shape[0]

    @property
    def hidden(self) -> int:
        """F."""
        return self.weights["w_in_DF"].shape[1]


def read_feed_forward(module: nn.Module) -> FeedForward | None:
    """What a module computes; None: it is no feed-forward module.

    The module runs copied, in float32, with random weights: those it has may be zeros, which hide
    the activation. In evaluation once, and once for each dropout, which then drops; and a few times
    in training, where nothing else may act.
    """
    maps = _linear_maps(module)
    own = {id(p) for part in maps for p in part.parameters(recurse=False)}
    if len(maps) not in (2, 3) or any(p.is_meta or id(p) not in own for p in module.parameters()):
        return None
    twin = copy.deepcopy(module).float().eval()
    _draw_weights(twin)
    for width in dict.fromkeys(_matrix(part).shape[0] for part in maps):
        ran = _run(twin, width)
        if ran is not None:
            found = _explained(maps, twin, ran)
            return found if found is not None and _trains_alike(twin, ran) else None
    return None


@torch.no_grad()
def _draw_weights(twin: nn.Module) -> None:
    for number, part in enumerate(_linear_maps(twin)):
        generator = torch.Generator(part.weight.device).manual_seed(3 + number)
        w_DF = _matrix(part)
        w_DF.normal_(0, SPREAD / w_DF.shape[0]**0.5, generator=generator)
        if part.bias is not None:
            part.bias.normal_(generator=generator)


@dataclass(frozen=True)
class _Ran:
    """A call. parts: linear maps and dropouts, as they ran."""

    x_TD: Tensor
    y_TD: Tensor
    parts: list[Any]


def _run(twin: nn.Module, width: int) -> _Ran | None:
    """A call with random tokens; None: it does not take them, or gives another shape."""
    parts: list[Any] = []
    watched = [*_linear_maps(twin), *(p for p in twin.modules() if isinstance(p, nn.Dropout))]
    hooks = [part.register_forward_hook(lambda part, *_: parts.append(part)) for part in watched]
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(PROBES, width, generator=generator, device="cpu")
    x_TD = x_TD.to(next(twin.parameters()).device)
    try:
        with torch.no_grad():
            y_TD = twin(x_TD)
    except Exception:  # a foreign module: it may want other arguments
        return None
    finally:
        for hook in hooks:
            hook.remove()
    fits = isinstance(y_TD, Tensor) and y_TD.shape == x_TD.shape
    return _Ran(x_TD, y_TD, parts) if fits else None


def _trains_alike(twin: nn.Module, ran: _Ran) -> bool:
    """Whether a call in training gives what it gives in evaluation, but for the dropouts that ran:
    nothing else drops or normalizes then. The twin is of no use afterwards.
    """
    for part in ran.parts:
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    twin.train()
    device = ran.x_TD.device
    cards = [device.index] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(cards):
        for generator in (torch.default_generator, *map(torch.cuda.default_generators.__getitem__,
                                                        cards)):
            generator.manual_seed(4)  # ranks find the same
        try:
            return all(_off(twin(ran.x_TD), ran.y_TD) <= NEAR for _ in range(TRAINED))
        except Exception:  # a foreign module
            return False


def _explained(maps: list[Any], twin: nn.Module, ran: _Ran) -> FeedForward | None:
    """The feed-forward function that gave a call's result; None: there is none."""
    twins = _linear_maps(twin)
    order = [twins.index(part) for part in ran.parts if not isinstance(part, nn.Dropout)]
    if sorted(order) != list(range(len(maps))):
        return None
    *up, back = (twins[index] for index in order)
    shape = tuple(_matrix(up[0]).shape)
    if any(tuple(_matrix(part).shape) != shape for part in up) or (
            tuple(_matrix(back).shape) != shape[::-1]):
        return None
    found = list(_candidates(up, back))
    distances = [_distance(each, ran.x_TD, ran.y_TD) for each in found]
    number = distances.index(min(distances))
    if not distances[number] <= NEAR:
        return None
    placed: dict[str, float] = {}
    for call, part in enumerate(part for part in ran.parts if isinstance(part, nn.Dropout)):
        place = _place(found[number], twin, call, ran.x_TD) if part.p else None
        if part.p and (place is None or place in placed):
            return None
        if place is not None:
            placed[place] = part.p
    *up, back = (maps[index] for index in order)
    return replace(list(_candidates(up, back))[number], **placed)


def _place(ffn: FeedForward, twin: nn.Module, number: int, x_TD: Tensor) -> str | None:
    """Which dropout of a `FeedForward` a dropout of the module is, found by letting it drop; None:
    neither.

    number: of its call among those of all dropouts, 0 first.
    """
    calls, kept = itertools.count(), torch.ones(())

    def drop(part: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        nonlocal kept
        if next(calls) != number:
            return None
        draws = torch.rand(output.shape, generator=torch.Generator().manual_seed(2), device="cpu")
        kept = 2 * (draws < 0.5).to(output)
        return output * kept

    hooks = [part.register_forward_hook(drop) for part in twin.modules()
             if isinstance(part, nn.Dropout)]
    try:
        with torch.no_grad():
            y_TD = twin(x_TD)
    finally:
        for hook in hooks:
            hook.remove()
    if kept.shape == (len(x_TD), ffn.hidden) and _distance(ffn, x_TD, y_TD, kept) <= NEAR:
        return "dropout"
    if kept.shape == x_TD.shape and _off(compute(ffn, x_TD) * kept, y_TD) <= NEAR:
        return "after"
    return None


def compute(ffn: FeedForward, x_TD: Tensor, kept_TF: Tensor | None = None) -> Tensor:
    """What it computes, without dropout, in the dtype of x_TD: the plain formula.

    kept_TF: factors of the inner values, such as a dropout's; None: all 1.
    """
    w = {name: value.to(x_TD.dtype) for name, value in ffn.weights.items()}
    act = ACTIVATIONS[ffn.activation].value
    h_TF = x_TD @ w["w_in_DF"] + w.get("b_in_F", 0)
    h_TF = act(x_TD @ w["w_gate_DF"] + w.get("b_gate_F", 0)) * h_TF if ffn.gated else act(h_TF)
    h_TF = h_TF if kept_TF is None else h_TF * kept_TF
    y_TD: Tensor = h_TF @ w["w_out_FD"] + w.get("b_out_D", 0)
    return y_TD


def _distance(ffn: FeedForward, x_TD: Tensor, y_TD: Tensor,
              kept_TF: Tensor | None = None) -> float:
    with torch.no_grad():
        y = compute(ffn, x_TD, kept_TF)
    return _off(y, y_TD)


def _off(y: Tensor, wanted: Tensor) -> float:
    """The largest difference, of the largest value."""
    off = (y - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)
    return float(off.nan_to_num(float("inf")))


def _linear_maps(module: nn.Module) -> list[Any]:
    # Conv1D: transformers' name for a linear map with its matrix transposed
    return [part for part in module.modules()
            if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"]


def _matrix(part: Any) -> Tensor:
    return part.weight.detach().T if isinstance(part, nn.Linear) else part.weight.detach()


def _candidates(up: list[Any], back: Any) -> Iterator[FeedForward]:
    for activation, order in itertools.product(ACTIVATIONS, itertools.permutations(up)):
        parts = [(*names, part) for names, part in zip(
            (("w_in_DF", "b_in_F"), ("w_gate_DF", "b_gate_F")), order, strict=False)]
        parts.append(("w_out_FD", "b_out_D", back))
        weights: dict[str, Tensor] = {}
        frozen: set[str] = set()
        for matrix, bias, part in parts:
            weights[matrix] = _matrix(part)
            frozen |= set() if part.weight.requires_grad else {matrix}
            if part.bias is not None:
                weights[bias] = part.bias.detach()
                frozen |= set() if part.bias.requires_grad else {bias}
        yield FeedForward(weights, activation, frozen=frozenset(frozen))
