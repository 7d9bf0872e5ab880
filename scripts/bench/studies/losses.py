"""Losses of `bench train` traced token by token: why sides of equal weights and data part.

Every side trains on the same steps twice. First each makes its own choices of experts. Then the
choices of the first side are written down, and the others take them in place of their own: what is
left of the difference is rounding. Where another side would have chosen another expert, the first
such token is reported, with the two experts between which it stood.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.cli.figures import columns
from moe_plugin.planner.units import parse_grid
from scripts.bench.ranks import on_processes
from scripts.bench.train import host_steps
from scripts.bench.train import run as runs
from scripts.bench.train.host_sides import Settings, Side, TrainShape
from scripts.bench.train.results import HOSTS
from scripts.bench.train.shapes import SHAPES, for_host, parse_shapes
from scripts.bench.train.sides import our_settings
from scripts.emulate import EmulatedCluster

TITLE = "Losses of the sides of a benchmark, traced token by token"
ABOUT = """The sides of [whole training steps](train.md) begin with equal weights and train on equal
data, two layers of experts each, Adam, float32. *Own choices*: the largest difference between the
first side's loss and any other's, over all steps, where each chooses its own experts, and the
first step in which it is above 1e-5. *Same choices*: the same, where all others take the experts
that the first side has chosen, each with its own weights for them. Then the sides differ by the
order of their sums alone, and training makes such differences larger from step to step. How much
larger says *one rounding*: the same for the first side next to itself with each weight changed by
its last bit at the beginning. *First token*: the first one for which a side would have chosen
another expert than the first side did, although all choices before it were the same; with a
capacity (fairseq) also for which another of its two experts would have come first. *Margin*: by how
much the first side's logit of the expert that it took is above that of the expert which the other
side would have taken. *Rounding*: by how much the two sides' differences of these two logits
differ. A token can part where rounding is larger than its margin."""
SAME = 1e-5  # losses that differ by less are the same
CHANGED = "one rounding"  # the first side, each weight changed by its last bit


@dataclass
class Parted:
    """The first token for which a side would have chosen otherwise than the first side.

    Attributes:
        took, other: the expert of the first side, and the one that this side would have taken.
        margin: of the first side's logits, that of `took` less that of `other`; at least 0.
        rounding: by how much this difference is another one in this side.
    """

    side: str
    step: int
    layer: int
    rank: int
    token: int
    took: int
    other: int
    margin: float
    rounding: float


class Tracer:
    """The choices of the first side in a step, which the others take.

    Args:
        ordered: with a capacity it matters which of a token's experts is the first.
    """

    def __init__(self, top_k: int, rank: int, ordered: bool = False) -> None:
        self.top_k, self.rank, self.ordered, self.step = top_k, rank, ordered, 0
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.parted: list[Parted] = []

    def first(self, layer: int, logits_TE: Tensor) -> Tensor:
        """The experts [T, K] of the first side, largest first."""
        ids_TK = logits_TE.detach().topk(self.top_k, dim=1).indices
        self.kept[layer] = logits_TE.detach().clone(), ids_TK
        return ids_TK

    def other(self, side: str, layer: int, logits_TE: Tensor) -> Tensor:
        """Those of the first side; the first token that parts is noted."""
        theirs_TE, ids_TK = self.kept[layer]
        own_TK = logits_TE.detach().topk(self.top_k, dim=1).indices
        both = (own_TK, ids_TK) if self.ordered else (own_TK.sort(1).values, ids_TK.sort(1).values)
        apart_T = (both[0] != both[1]).any(1).nonzero().flatten()
        if len(apart_T) and not any(one.side == side for one in self.parted) and side != CHANGED:
            token = int(apart_T[0])
            place = int((both[0][token] != both[1][token]).nonzero()[0])
            took, other = ids_TK[token].tolist(), own_TK[token].tolist()
            a = next((e for e in took if e not in other), took[place])
            b = next((e for e in other if e not in took), other[place])
            margin, here = (float(of_TE[token, a] - of_TE[token, b])
                            for of_TE in (theirs_TE.double(), logits_TE.detach().double()))
            self.parted.append(Parted(side, self.step, layer, self.rank, token, a, b, margin,
                                      margin - here))
        return ids_TK


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--host", required=True, choices=("megatron", "fairseq"), help="the framework")
    p.add_argument("--shapes", default="all", metavar="LIST",
                   help=f"as of `bench train`: all, or names ({', '.join(SHAPES)})")
    p.add_argument("--emulate", metavar="NxP",
                   help="nodes x ranks per node of an emulated cluster (default: two processes of "
                        "this machine)")
    p.add_argument("--steps", type=int, default=25, help="of each model (default: %(default)s)")


def check(args: argparse.Namespace) -> None:
    args.steps = 2 if args.quick else args.steps
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps} must be >= 1; e.g. 25")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Losses and the tokens that part, by host, place and shape."""
    grid = parse_grid(args.emulate) if args.emulate else None
    shapes = [one for one in for_host(parse_shapes(args.shapes), args.host) if not one.bf16]
    ours = {name: value for name, value in our_settings(grid is not None and grid[0] > 1).items()
            if not name.endswith("auto")}  # whose layout changes with what is measured
    with ExitStack() as stack:
        text = host_steps.write_text(Path(stack.enter_context(tempfile.TemporaryDirectory())))
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
    """All shapes, one after the other; every rank calls it, and all get the same result."""
    return [_traced(host, shape, text, ours, steps) for shape in shapes]


def _traced(host: str, shape: TrainShape, text: str, ours: Mapping[str, Settings],
            steps: int) -> dict[str, Any]:
    def sides(more: Mapping[str, Settings]) -> list[Side]:
        made = runs.sides_of(host, shape, host_steps.read_text(text), {**ours, **more})
        return [side for side in made if side.kind != "dense"]

    free = sides({})
    own = [[side.step(n) for side in free] for n in range(steps)]
    del free
    tracer = Tracer(shape.top_k, dist.get_rank(), ordered=host == "fairseq")
    again = sides({CHANGED: next(iter(ours.values()))})
    changed = next(side for side in again if side.name == CHANGED)
    change_last_bits(changed.parameters)
    again = [*(side for side in again if side is not changed), changed]
    for place, side in enumerate(again):
        for layer, take in enumerate(side.routers):
            take(_chooser(tracer, place, side.name, layer))
    same = []
    for tracer.step in range(steps):
        same.append([side.step(tracer.step) for side in again])
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [asdict(one) for one in tracer.parted])
    parted = sorted((one for each in every for one in each),
                    key=lambda one: (one["step"], one["layer"], one["rank"], one["token"]))
    return {"sides": [side.name for side in again], "own": own, "same": same, "parted": parted}


@torch.no_grad()
def change_last_bits(parameters: Iterable[Tensor]) -> None:
    """Make each number larger or smaller by about its last bit; alike on all ranks."""
    drawn = torch.Generator().manual_seed(0)
    for parameter in parameters:
        up = torch.randint(2, parameter.shape, generator=drawn).to(parameter.dtype)
        parameter.mul_(1 + (2 * up - 1) * torch.finfo(parameter.dtype).eps)


def _chooser(tracer: Tracer, place: int, name: str, layer: int) -> Callable[[Tensor], Tensor]:
    if place == 0:
        return lambda logits_TE: tracer.first(layer, logits_TE)
    return lambda logits_TE: tracer.other(name, layer, logits_TE)


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Those of the same host, place and shape are replaced."""
    return {**new, "shapes": {**old["shapes"], **new["shapes"]}}


def gap(losses: list[list[float]]) -> float:
    """The largest difference between the first side's loss and another's in a step."""
    return max(abs(one - row[0]) for row in losses for one in row[1:])


def gaps(one: Mapping[str, Any]) -> tuple[float, float]:
    """With the same choices, of the other sides, and of the first one with its last bits changed.
    """
    return gap([row[:-1] for row in one["same"]]), gap([[row[0], row[-1]] for row in one["same"]])


def first_apart(losses: list[list[float]]) -> int | None:
    """The first step, from 0, whose losses are not the same; None: there is none."""
    return next((n for n, row in enumerate(losses) if gap([row]) > SAME), None)


def body(found: dict[str, Any]) -> Iterator[str]:
    yield ABOUT
    rows = [{"where": where, **one} for where, one in found["shapes"].items()]
    yield columns(rows, {
        "host, place, shape": lambda r: r["where"], "sides": lambda r: str(len(r["sides"]) - 1),
        "own choices": lambda r: f"{gap(r['own']):.1e}",
        "from step": lambda r: "" if (n := first_apart(r["own"])) is None else str(n + 1),
        "same choices": lambda r: f"{gaps(r)[0]:.1e}",
        "one rounding": lambda r: f"{gaps(r)[1]:.1e}"})
    yield "## The first token that parts"
    yield columns([{"where": row["where"], **row["parted"][0]} for row in rows if row["parted"]], {
        "host, place, shape": lambda r: r["where"], "side": lambda r: r["side"],
        "step": lambda r: str(r["step"] + 1), "layer": lambda r: str(r["layer"] + 1),
        "rank": lambda r: str(r["rank"]), "token": lambda r: str(r["token"]),
        "experts": lambda r: f"{r['took']}, {r['other']}",
        "margin": lambda r: f"{r['margin']:.1e}", "rounding": lambda r: f"{r['rounding']:.1e}"})
