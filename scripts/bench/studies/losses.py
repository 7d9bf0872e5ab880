"""Trace the losses of `bench train` token by token, to explain why models with the same weights and
data have different losses.

Every model is trained twice on the same steps. In the first run, each model chooses its own
experts. In the second run, the choices of the first model are recorded, and all other models use
these choices. The differences that remain in the second run are caused by rounding. If a model
would have chosen a different expert, the study reports the first token for which this happens, and
both experts.

The models in fairseq use ReLU, whose derivative is 0 for negative inputs and 1 for positive inputs.
If the input of a hidden unit is almost 0, rounding decides its sign, and the derivative can differ
between two models. The gradients of this unit then differ by the whole contribution of one token.
The second run is therefore repeated with GELU, which has a continuous derivative.

In bfloat16, rounding errors are so large that the losses cannot be equal. Therefore a float32 copy
of the first model is trained with the same choices, and the study reports which models have losses
that are closer to the losses of this copy.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.planner.units import parse_grid
from scripts.bench.child import on_processes
from scripts.bench.report import page
from scripts.bench.study import Option
from scripts.bench.train import run as runs
from scripts.bench.train import sides
from scripts.bench.train.results import HOSTS
from scripts.bench.train.sides import Settings, Side, TrainShape
from scripts.emulate import EmulatedCluster

TITLE = "Differences of losses in training steps, traced to single tokens"
SAME = 1e-5  # losses that differ by less count as equal
CHANGED = "one rounding"  # the first side, with each weight changed by its last bit
FLOAT32 = "float32"  # the first side in float32, only for shapes in bfloat16


class Tracer:
    """Record the choices of the first model in a step, and replace the choices of all other models
    with them.

    Args:
        rank: this rank.
        ordered: whether the order of a token's experts matters, as it does if the capacity is
            limited.
    """

    def __init__(self, rank: int, ordered: bool = False) -> None:
        self.rank, self.ordered, self.step = rank, ordered, 0
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.parted: list[dict[str, Any]] = []

    def first(self, layer: int, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Return the experts [T, K] that the first model chooses."""
        self.kept[layer] = logits_TE.detach().clone(), ids_TK
        return ids_TK

    def other(self, side: str, layer: int, logits_TE: Tensor, own_TK: Tensor) -> Tensor:
        """Return the experts of the first model, and record the first token for which this model
        would have chosen different experts (`own_TK`).

        `margin` is computed on the first model: the logit of the expert that it chose (`took`)
        minus the logit of the expert that the other model would have chosen (`other`). `rounding`
        is the difference between the margins on the first model and on the other model.
        """
        theirs_TE, ids_TK = self.kept[layer]
        both = (own_TK, ids_TK) if self.ordered else (own_TK.sort(1).values, ids_TK.sort(1).values)
        apart_T = (both[0] != both[1]).any(1).nonzero().flatten()
        if len(apart_T) and not any(one["side"] == side for one in self.parted) and side not in (
                CHANGED, FLOAT32):
            token = int(apart_T[0])
            place = int((both[0][token] != both[1][token]).nonzero()[0])
            took, other = ids_TK[token].tolist(), own_TK[token].tolist()
            a = next((e for e in took if e not in other), took[place])
            b = next((e for e in other if e not in took), other[place])
            margin, here = (float(of_TE[token, a] - of_TE[token, b])
                            for of_TE in (theirs_TE.double(), logits_TE.detach().double()))
            self.parted.append({
                "side": side, "step": self.step, "layer": layer, "rank": self.rank, "token": token,
                "took": a, "other": b, "margin": margin, "rounding": margin - here})
        return ids_TK


OPTIONS = {
    "host": Option("megatron", "the framework to train in", choices=tuple(HOSTS), required=True),
    "shapes": Option("all", "shapes as in `bench train`: all, or names "
                            f"({', '.join(sides.SHAPES)})"),
    "emulate": Option("", "nodes x ranks per node of an emulated cluster, such as 2x2; without "
                          "this option, two processes of this machine"),
    "steps": Option(25, "number of steps of each model", quick=2, least=1),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the losses, and the tokens with different choices, by host, place and shape."""
    grid = parse_grid(args.emulate) if args.emulate else None
    shapes = sides.for_host(sides.parse_shapes(args.shapes), args.host)
    every = sides.our_settings(several_nodes=grid is not None and grid[0] > 1)
    # the layout of `auto` depends on measured times
    ours = {name: every[name] for name in every if not name.endswith("auto")}
    with ExitStack() as stack:
        text = sides.write_text(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        work = args.host, shapes, text, ours, args.steps
        if grid:
            runs.forked_hosts([args.host])
            cluster = stack.enter_context(EmulatedCluster(*grid, rate_bit_s=200e6, delay_s=1e-3))
            found = cluster.run(traced, *work, timeout_s=3600, group_timeout_s=600)[0]
        else:
            found = on_processes(2, traced, *work)
    place = f"{args.emulate} emulated nodes" if grid else "one machine, 2 ranks"
    return {"shapes": {f"{HOSTS[args.host]}, {place}, {shape.name}": one
                       for shape, one in zip(shapes, found, strict=True)}}


def traced(host: str, shapes: list[TrainShape], text: str, ours: Mapping[str, Settings],
           steps: int) -> list[dict[str, Any]]:
    """Trace the training of all shapes one after the other. Every rank must call this function, and
    all ranks get the same result.
    """
    found = []
    for shape in shapes:
        free = _sides(host, shape, text, ours)
        own = [[side.step(n) for side in free] for n in range(steps)]
        del free
        found.append({"own": own, **_same_choices(host, shape, text, ours, steps)})
        if host == "fairseq":
            smooth = _same_choices(host, replace(shape, gelu=True), text, ours, steps)
            found[-1]["gelu"] = smooth["same"]
    return found


def _sides(host: str, shape: TrainShape, text: str, ours: Mapping[str, Settings]) -> list[Side]:
    made = runs.sides_of(host, shape, sides.read_text(text), ours)
    return [side for side in made if side.kind != "dense"]


def _same_choices(host: str, shape: TrainShape, text: str, ours: Mapping[str, Settings],
                  steps: int) -> dict[str, Any]:
    """Train all sides with the choices of the first side."""
    tracer = Tracer(dist.get_rank(), ordered=host == "fairseq")
    again = _sides(host, shape, text, {**ours, CHANGED: next(iter(ours.values()))})
    changed = next(side for side in again if side.name == CHANGED)
    change_last_bits(changed.parameters)
    changed.reload()
    again = [side for side in again if side is not changed]
    wide = [_in_float32(host, shape, text, ours, again[0])] if shape.bf16 else []
    again += [*wide, changed]
    for place, side in enumerate(again):
        for layer, take in enumerate(side.routers):
            take(partial(tracer.first, layer) if place == 0 else
                 partial(tracer.other, side.name, layer))
    same = []
    for tracer.step in range(steps):
        same.append([side.step(tracer.step) for side in again])
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, tracer.parted)
    parted = sorted((one for each in every for one in each),
                    key=lambda one: (one["step"], one["layer"], one["rank"], one["token"]))
    found: dict[str, Any] = {"parted": parted}
    if wide:  # the last side but one
        found |= {"float32": [row.pop(-2) for row in same], "native": [
            side.kind == "native" for side in again if side is not wide[0]]}
        again.remove(wide[0])
    return {"sides": [side.name for side in again], "same": same, **found}


def _in_float32(host: str, shape: TrainShape, text: str, ours: Mapping[str, Settings],
                first: Side) -> Side:
    """Build a float32 copy of the first model, with the same weights."""
    [side] = runs.sides_of(host, replace(shape, bf16=False), sides.read_text(text),
                           {FLOAT32: next(iter(ours.values()))}, others=False)
    with torch.no_grad():
        for mine, its in zip(side.parameters, first.parameters, strict=True):
            mine.copy_(its)
    return side


@torch.no_grad()
def change_last_bits(parameters: Iterable[Tensor]) -> None:
    """Multiply each weight by 1 plus or minus the epsilon of its dtype. The factors are the same on
    all ranks.
    """
    drawn = torch.Generator().manual_seed(0)
    for parameter in parameters:
        up = torch.randint(2, parameter.shape, generator=drawn).to(parameter.dtype)
        parameter.mul_(1 + (2 * up - 1) * torch.finfo(parameter.dtype).eps)


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Replace earlier results for the same host, place and shape. The page states the dates, the
    devices and the versions of all runs.
    """
    versions = {}
    for name in {**old["versions"], **new["versions"]}:
        seen = [of["versions"][name] for of in (old, new) if name in of["versions"]]
        versions[name] = " and ".join(sorted({one for each in seen for one in each.split(" and ")}))
    return {**new, "versions": versions, "shapes": {**old["shapes"], **new["shapes"]}}


def gap(losses: list[list[float]]) -> float:
    """Return the largest difference between the loss of the first model and the loss of any other
    model in any step.
    """
    return max(abs(one - row[0]) for row in losses for one in row[1:])


def gaps(one: Mapping[str, Any]) -> tuple[float, float]:
    """Return two gaps for the case in which all models use the same choices: the gap of the other
    models, and the gap of the copy of the first model with changed bits.
    """
    return gap([row[:-1] for row in one["same"]]), gap([[row[0], row[-1]] for row in one["same"]])


def gelu_gap(one: Mapping[str, Any]) -> float | None:
    """Return the largest difference of the losses of models with GELU instead of ReLU and with the
    same choices. None if these models were not trained.
    """
    return gap([row[:-1] for row in one["gelu"]]) if "gelu" in one else None


def from_float32(one: Mapping[str, Any], native: bool) -> float | None:
    """Return the largest difference between a bfloat16 loss and the float32 loss of the same step,
    for our models or for the native models, with the same choices. None for shapes in float32.
    """
    if "float32" not in one:
        return None
    return max(abs(loss - wide) for row, wide in zip(one["same"], one["float32"], strict=True)
               for loss, its in zip(row[:-1], one["native"], strict=False) if its == native)


def first_apart(losses: list[list[float]]) -> int | None:
    """Return the index of the first step with different losses, or None if all losses are equal."""
    return next((n for n, row in enumerate(losses) if gap([row]) > SAME), None)


def body(found: dict[str, Any]) -> list[str]:
    rows, tokens = [], []
    for where, one in found["shapes"].items():
        same, rounding = gaps(one)
        first = first_apart(one["own"])
        rows.append({"where": where, "number": len(one["sides"]) - 1, "own_gap": gap(one["own"]),
                     "from_step": None if first is None else first + 1, "same_gap": same,
                     "rounding": rounding, "gelu": gelu_gap(one),
                     "ours_32": from_float32(one, False), "native_32": from_float32(one, True)})
        tokens += [{"where": where, **parted, "step": parted["step"] + 1,
                    "layer": parted["layer"] + 1} for parted in one["parted"][:1]]
    return page(__name__, found, rows=rows, tokens=tokens)
