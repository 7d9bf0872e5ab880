"""Detect feed-forward modules in an unknown model by running its modules.

A module is recognised as a feed-forward module if it meets two conditions. First, the module must
have two linear layers (D to F and back) or three linear layers (two of them D to F). Second, there
must be a feed-forward function that computes the same output as the module for random tokens and
random weights. This function uses the linear layers in any order, and one of the supported
activation functions. Neither the names nor the classes of modules matter: a linear layer is also
detected by running it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.kernels.activations import ACTIVATIONS

PROBES = 32  # number of random tokens
NEAR = 1e-4  # largest accepted difference, relative to the largest output, in float32
SPREAD = 3.0  # standard deviation of inner values, wide enough to pass the bounds of a ReLU6
TRAINED = 8  # number of calls in training mode


@dataclass(frozen=True)
class FeedForward:
    """The function that a feed-forward module computes, together with its weights.

    Without a gate, the function is `y = act(x @ w_in + b_in) @ w_out + b_out`. With a gate, the
    function is `y = (act(x @ w_gate + b_gate) * (x @ w_in + b_in)) @ w_out + b_out`.

    Attributes:
        weights: dict of the module's weights, which are views of its parameters. The possible keys
            are `w_in_DF`, `w_out_FD`, `w_gate_DF`, `b_in_F`, `b_gate_F` and `b_out_D`.
        activation: name of the activation function, as in `experts.activation`.
        dropout: dropout probability after the activation function (and the gate).
        after: dropout probability after the last linear layer.
        frozen: names of the weights that are not trainable.
    """

    weights: dict[str, Tensor]
    activation: str
    dropout: float = 0.0
    after: float = 0.0
    frozen: frozenset[str] = frozenset()

    @property
    def gated(self) -> bool:
        """True if the function has a gate."""
        return "w_gate_DF" in self.weights

    @property
    def width(self) -> int:
        """The input width D."""
        return self.weights["w_in_DF"].shape[0]

    @property
    def hidden(self) -> int:
        """The inner width F."""
        return self.weights["w_in_DF"].shape[1]


def read_feed_forward(module: nn.Module) -> FeedForward | None:
    """Return the feed-forward function that a module computes. Return None if the module is not a
    feed-forward module.

    The test runs a copy of the module in float32 with random weights. The module's own weights
    could be zero and would then hide the activation function. First, the copy is run in evaluation
    mode. Then the copy is run again for each dropout module, with only this dropout active.
    Finally, the copy is run several times in training mode. The runs in training mode check that
    only dropout behaves differently during training.
    """
    parts = _matrix_modules(module)
    known = {id(p) for part in parts for p in part.parameters()}
    if len(parts) not in (2, 3) or any(p.is_meta or id(p) not in known
                                       for p in module.parameters()):
        return None
    try:
        twin = copy.deepcopy(module).float().eval()
    except Exception:  # any error: an unknown module may contain objects that cannot be copied
        return None
    twins = _linear_maps(twin)
    if len(twins) != len(parts):
        return None
    maps = [replace(found, part=part) for found, part in zip(twins, parts, strict=True)]
    for width in dict.fromkeys(found.matrix_IO.shape[0] for found in twins):
        ran = _run(twin, twins, width)
        if ran is not None:
            ffn = _explained(maps, twins, twin, ran)
            return ffn if ffn is not None and _trains_alike(twin, ran) else None
    return None


@dataclass(frozen=True, eq=False)
class _LinearMap:
    """A module that computes `x @ matrix_IO + bias`.

    Attributes:
        part: the module.
        input_first: True if its weight has the shape [in, out], as in `Conv1D` of `transformers`.
            False if the shape is [out, in].
    """

    part: Any
    input_first: bool

    @property
    def matrix_IO(self) -> Tensor:
        """The matrix, a view of the weight."""
        weight: Tensor = self.part.weight.detach()
        return weight if self.input_first else weight.T

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, or None."""
        return _bias(self.part)


def _bias(part: nn.Module) -> nn.Parameter | None:
    # other attributes with this name may be flags
    return part._parameters.get("bias")


def _matrix_modules(module: nn.Module) -> list[Any]:
    """Return the modules whose state consists of a matrix `weight` and perhaps a `bias`.

    A module with other parameters or buffers computes more than a linear map, for example with an
    adapter or with scales of a quantization, even if it computes nothing else at the moment.
    """
    found = []
    for part in module.modules():
        weight = part._parameters.get("weight")
        # the types of quantized and distributed parameters are subclasses
        if type(weight) is nn.Parameter and weight.dim() == 2 and weight.is_floating_point():
            state = {name for name, _ in (*part.named_parameters(remove_duplicate=False),
                                          *part.named_buffers())}
            if state <= {"weight", "bias"}:
                found.append(part)
    return found


@torch.no_grad()
def _linear_maps(twin: nn.Module) -> list[_LinearMap]:
    """Set the weights of a module to random values, and return its linear maps."""
    found = []
    for number, part in enumerate(_matrix_modules(twin)):
        generator = torch.Generator(part.weight.device).manual_seed(3 + number)
        for parameter in part.parameters():
            parameter.normal_(generator=generator)
        for input_first in (False, True):
            linear = _LinearMap(part, input_first)
            if _is_linear(linear, generator):
                linear.matrix_IO.mul_(SPREAD / linear.matrix_IO.shape[0]**0.5)
                found.append(linear)
                break
    return found


def _is_linear(linear: _LinearMap, generator: torch.Generator) -> bool:
    w_IO = linear.matrix_IO
    if linear.bias is not None and linear.bias.shape != w_IO.shape[1:]:
        return False
    x_TI = torch.randn(PROBES, len(w_IO), generator=generator, device=w_IO.device)
    try:
        y_TO = linear.part(x_TI.clone())
        return _off(y_TO, F.linear(x_TI, w_IO.T, linear.bias)) <= NEAR
    except Exception:  # any error: an unknown module may require other arguments
        return False


@dataclass(frozen=True)
class _Ran:
    """A record of one call of a module. parts: list of the linear and dropout modules, in the order
    in which they were called.
    """

    x_TD: Tensor
    y_TD: Tensor
    parts: list[Any]


def _run(twin: nn.Module, twins: list[_LinearMap], width: int) -> _Ran | None:
    """Call a module with random tokens.

    Return None if the module raises an error, or if it returns a tensor with a different shape.
    """
    parts: list[Any] = []
    watched = [*(linear.part for linear in twins),
               *(part for part in twin.modules() if isinstance(part, nn.Dropout))]
    hooks = [part.register_forward_hook(lambda part, *_: parts.append(part)) for part in watched]
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(PROBES, width, generator=generator, device="cpu")
    x_TD = x_TD.to(next(twin.parameters()).device)
    try:
        with torch.no_grad():
            y_TD = twin(x_TD)
    except Exception:  # any error: an unknown module may require other arguments
        return None
    finally:
        for hook in hooks:
            hook.remove()
    fits = isinstance(y_TD, Tensor) and y_TD.shape == x_TD.shape
    return _Ran(x_TD, y_TD, parts) if fits else None


def _trains_alike(twin: nn.Module, ran: _Ran) -> bool:
    """Return True if the module computes the same output in training mode as in evaluation mode
    when all dropouts are disabled.

    A module fails this test if it drops or normalizes values by other means than `nn.Dropout`. This
    function changes the dropout modules of `twin`, so `twin` must not be used afterwards.
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
            generator.manual_seed(4)  # all ranks must reach the same decision
        try:
            return all(_off(twin(ran.x_TD), ran.y_TD) <= NEAR for _ in range(TRAINED))
        except Exception:  # any error: the module is unknown
            return False


def _explained(maps: list[_LinearMap], twins: list[_LinearMap], twin: nn.Module,
               ran: _Ran) -> FeedForward | None:
    parts = [linear.part for linear in twins]
    order = [parts.index(part) for part in ran.parts if not isinstance(part, nn.Dropout)]
    if sorted(order) != list(range(len(maps))):
        return None
    *up, back = (twins[index] for index in order)
    shape = up[0].matrix_IO.shape
    if any(linear.matrix_IO.shape != shape for linear in up) or back.matrix_IO.T.shape != shape:
        return None
    candidates = list(_candidates(up, back))
    distances = [_distance(candidate, ran.x_TD, ran.y_TD) for candidate in candidates]
    number = distances.index(min(distances))
    if not distances[number] <= NEAR:
        return None
    placed: dict[str, Any] = {}
    for call, part in enumerate(part for part in ran.parts if isinstance(part, nn.Dropout)):
        dropout_place = _place(candidates[number], twin, call, ran.x_TD) if part.p else None
        if part.p and (dropout_place is None or dropout_place in placed):
            return None
        if dropout_place is not None:
            placed[dropout_place] = part.p
    *up, back = (maps[index] for index in order)
    return replace(list(_candidates(up, back))[number], **placed)


def _place(ffn: FeedForward, twin: nn.Module, number: int, x_TD: Tensor) -> str | None:
    """Determine the position of a dropout module in a `FeedForward`.

    The dropout is forced to drop random values. The resulting output is compared with the output of
    the `FeedForward` for each of the two possible positions. Return "dropout" or "after", or None
    if neither position reproduces the output.

    number: index of the dropout among all calls of dropout modules, starting at 0.
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
    """Compute the formula of a feed-forward function in the dtype of `x_TD`, without dropout.

    Args:
        ffn: the function.
        x_TD: tokens with shape [T, D].
        kept_TF: factors with shape [T, F] by which the inner values are multiplied, for example to
            emulate dropout. Optional. Defaults to 1.
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
    """Return the largest absolute difference, divided by the largest absolute value of `wanted`."""
    off = (y - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)
    return float(off.nan_to_num(float("inf")))


def _candidates(up: list[_LinearMap], back: _LinearMap) -> Iterator[FeedForward]:
    for activation, order in itertools.product(ACTIVATIONS, itertools.permutations(up)):
        maps = [(*names, linear) for names, linear in zip(
            (("w_in_DF", "b_in_F"), ("w_gate_DF", "b_gate_F")), order, strict=False)]
        maps.append(("w_out_FD", "b_out_D", back))
        weights: dict[str, Tensor] = {}
        frozen: set[str] = set()
        for matrix, bias, linear in maps:
            weights[matrix] = linear.matrix_IO
            frozen |= set() if linear.part.weight.requires_grad else {matrix}
            if linear.bias is not None:
                weights[bias] = linear.bias.detach()
                frozen |= set() if linear.bias.requires_grad else {bias}
        yield FeedForward(weights, activation, frozen=frozenset(frozen))
