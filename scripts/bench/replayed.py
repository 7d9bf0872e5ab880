"""Replay a routing trace in the layer on emulated nodes, with each policy for overloaded experts.

The planner predicts the time of every call. The layer is also run with forced balance. Each call in
the trace is run once with each variant (policy or forced balance). The variants alternate in the
same processes. The experts of a token are chosen by the trace (`routing.rollouts`)
or by `router.force: balance`.

Letters in shapes: T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_plugin import MoELayer, TorchComm
from moe_plugin.cli.planning.launch import moe_settings
from moe_plugin.config import from_dict
from moe_plugin.observe.traces import Key
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import load_cluster, load_device
from moe_plugin.planner.model import ModelPlan, ModelShape
from moe_plugin.planner.routing_replay import (
    PARTS,
    CallTime,
    PolicyTimes,
    as_dict,
    best,
    calls_of,
    check_fits,
    replay,
    resplit,
    what_to_use,
)
from moe_plugin.planner.spill import POLICIES
from moe_plugin.planner.units import show_time
from moe_plugin.routing.rollouts import replay_choices
from moe_plugin.utils.messages import aligned
from scripts.bench.report import paragraph
from scripts.bench.sweep import clean_step, slowest, timed_end
from scripts.emulate import EmulatedCluster

BALANCE, STANDING = "balance", "standing"
SIDES = (BALANCE, *POLICIES)
STEPS = 12  # default number of steps of a trace that are replayed
Trace = Mapping[Key, list[list[Tensor]]]  # trace of one rank, see `observe.traces.read_trace`


@dataclass(frozen=True)
class Emulation:
    """The emulated cluster and the layer on which a trace is replayed.

    Attributes:
        grid: number of nodes, and number of ranks per node.
        links: keyword arguments of `EmulatedCluster`.
        model: model to which the layer belongs. The layer computes in float32 and does not drop
            tokens.
        cluster: cluster file, used to decide about spilling and to predict times.
        device: device file, used to decide about spilling and to predict times.
        guests: maximum number of experts that a rank may borrow.
        replan: number of steps between consecutive placements of replicas by the policy `standing`.
    """

    grid: tuple[int, int]
    links: Mapping[str, float]
    model: ModelShape
    cluster: str
    device: str
    guests: int = 2
    replan: int = 10

    @property
    def ranks(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def shape(self) -> ModelShape:
        """The shape of the model on the emulated cluster."""
        return replace(self.model, element_bytes=4, capacity_factor=None)


def excerpt(traces: Sequence[Trace], experts: int, ranks: int, steps: int,
            tokens: int | None = None) -> list[Trace]:
    """Select consecutive steps from the beginning, middle and end of traces, and convert them to
    traces of `ranks` ranks.

    Args:
        traces: traces of the recorded ranks.
        ranks: number of ranks in the returned traces.
        steps: approximate number of steps. A third of the steps comes from each of the three
            periods. If the trace has fewer steps, all of its steps are used.
        tokens: mean number of tokens per rank and call. To reach this mean, recorded tokens are
            repeated or left out evenly. None (default) keeps the recorded number. Tokens without an
            expert (padding) and empty calls are always left out.

    Raises:
        ValueError: if the recorded ranks cannot be converted to `ranks` ranks, or if a token has
            only some of its choices.
    """
    check_fits(traces, experts, ranks)
    made: list[dict[Key, list[list[Tensor]]]] = [{} for _ in range(ranks)]
    for key in traces[0]:
        total = min(len(trace[key]) for trace in traces)
        for number in picked(total, steps):
            calls = [_scaled([torch.cat([_real(ids_TK) for ids_TK in part])
                              for part in resplit(call, ranks)], tokens)
                     for call in zip(*(trace[key][number] for trace in traces), strict=False)]
            for rank, mine in enumerate(made):
                mine.setdefault(key, []).append([call[rank] for call in calls
                                                 if any(map(len, call))])
    return made


def picked(total: int, steps: int) -> list[int]:
    """Return the indices of the steps that `excerpt` selects."""
    if steps >= total:
        return list(range(total))
    each = -(-steps // len(PARTS))
    starts = (0, (total - each) // 2, total - each)
    return sorted({start + i for start in starts for i in range(each)})


def _real(ids_TK: Tensor) -> Tensor:
    none_T = (ids_TK < 0).any(1)
    if bool((none_T & (ids_TK >= 0).any(1)).any()):
        raise ValueError("the trace contains tokens with both chosen and dropped experts (-1). "
                         "Every token must have all of its choices or none. Leave out --emulate, "
                         "or use the trace of a run that drops no choices")
    return ids_TK[~none_T]


def _scaled(of_ranks: Sequence[Tensor], tokens: int | None) -> list[Tensor]:
    have = sum(map(len, of_ranks))
    if tokens is None or not have:
        return list(of_ranks)
    wanted = [round(len(ids_TK) * tokens * len(of_ranks) / have) for ids_TK in of_ranks]
    return [ids_TK[torch.arange(count) * len(ids_TK) // max(1, count)]
            for ids_TK, count in zip(of_ranks, wanted, strict=True)]


def make_layer(where: Emulation, side: str, comm: TorchComm) -> MoELayer:
    """Build the layer for one variant on every rank. Only the variant with forced balance uses the
    layer's own router.
    """
    parallel: dict[str, Any] = {}
    if side not in (BALANCE, POLICIES[0]):
        parallel = {"spill": side, "guests": where.guests}
    if side == STANDING:
        parallel["replan"] = where.replan
    plan = ModelPlan(tp=1, pp=1, dp=where.ranks, ep=where.ranks, etp=1, micro_batch=1,
                     layout=LayoutChoice(r=1))
    tree = moe_settings(where.shape, plan, auto=False)
    for section, more in {"comm": {"cluster": where.cluster}, "tuner": {"device": where.device},
                          "parallel": parallel,
                          "router": {"force": "balance"} if side == BALANCE else {}}.items():
        tree[section] = {**tree.get(section, {}), **more}
    return MoELayer(from_dict({"model_dim": where.model.model_dim, **tree}), comm)


class Replayed:
    """The layers of all variants on one rank."""

    def __init__(self, where: Emulation) -> None:
        self.where, self.comm = where, TorchComm()
        self.layers = {side: make_layer(where, side, self.comm) for side in SIDES}

    def tokens(self, count: int) -> Tensor:
        """Return tokens of this rank, [T, D]. Every call and every variant uses the same tokens."""
        draw = torch.Generator().manual_seed(self.comm.rank)
        return torch.randn(count, self.where.model.model_dim, generator=draw).requires_grad_()

    def routed(self, side: str, ids_TK: Tensor) -> AbstractContextManager[None]:
        """Return a context manager in which the layer of a variant uses the given choices. The
        layer with forced balance is not affected.
        """
        if side == BALANCE:
            return nullcontext()
        return replay_choices([self.layers[side].router], ids_TK[:, None])

    def step(self, side: str, ids_TK: Tensor) -> tuple[float, int]:
        """Run a forward and backward pass that all ranks start at the same time. Return the time in
        seconds, and the number of rows computed on this rank.
        """
        layer, x_TD = self.layers[side], self.tokens(len(ids_TK))
        with self.routed(side, ids_TK):
            seconds, stats = clean_step(layer, x_TD)
        return seconds, int(stats.rows)

    def begin(self, first_TK: Tensor) -> None:
        """Prepare for the next layer of the trace: remove all replicas, and run an untimed call of
        each variant.
        """
        self.layers[STANDING] = make_layer(self.where, STANDING, self.comm)
        for side, layer in self.layers.items():
            layer.eval()  # in evaluation, the layer does not count the load of experts
            self.step(side, first_TK)
            layer.train()


def run_rank(where: Emulation, traces: Sequence[Trace]) -> dict[str, dict[str, list[float]]]:
    """Replay the traces on one rank. Return the `seconds` and `rows` of every call by variant.

    The time to place replicas is added to the previous call.
    """
    replayed = Replayed(where)
    found: dict[str, dict[str, list[float]]] = {
        what: {side: [] for side in SIDES} for what in ("seconds", "rows")}
    for steps in traces[replayed.comm.rank].values():
        replayed.begin(next(ids_TK for step in steps for ids_TK in step))
        for step in steps:
            for ids_TK in step:
                turn = len(found["rows"][BALANCE]) % len(SIDES)
                for side in (*SIDES[turn:], *SIDES[:turn]):
                    seconds, rows = replayed.step(side, ids_TK)
                    found["seconds"][side].append(seconds)
                    found["rows"][side].append(rows)
            placing = timed_end(replayed.layers[STANDING])  # places replicas if a new plan is due
            if step:
                found["seconds"][STANDING][-1] += placing
    return found


def emulate(traces: Sequence[Trace], where: Emulation) -> dict[str, Any]:
    """Predict and measure every call in the traces that `excerpt` returned. Return plain values
    that can be passed to `times_of`.

    The result contains the times in seconds for each policy and for forced balance, and the period
    of the trace to which each call belongs (beginning, middle or end).
    """
    predicted = replay(traces, where.shape, load_cluster(where.cluster).resized(*where.grid),
                       load_device(where.device), where.guests, where.replan, where.ranks)
    calls = len(predicted[0].calls)
    with EmulatedCluster(*where.grid, **where.links) as cluster:
        ranks = cluster.run(run_rank, where, traces, timeout_s=120 + 10.0 * calls)
    plain = predicted[0].calls
    return {
        "third": [call.third for call in plain],
        "mean_rows": [sum(map(sum, counts_WV)) / where.ranks for steps in calls_of(
            traces, where.model.experts, where.ranks).values() for step in steps
            for counts_WV in step],
        "balanced": {"predicted": _rounded([call.balanced for call in plain]),
                     "measured": _rounded(slowest(ranks, BALANCE))},
        "policies": {one.policy: {
            "lent": [call.lent for call in one.calls],
            "rows": [int(max(rows)) for rows in zip(*(rank["rows"][one.policy] for rank in ranks),
                                                    strict=True)],
            "predicted": _rounded([call.seconds for call in one.calls]),
            "measured": _rounded(slowest(ranks, one.policy))} for one in predicted}}


def _rounded(seconds: Sequence[float]) -> list[float]:
    return [round(one, 6) for one in seconds]


def times_of(found: Mapping[str, Any], what: str) -> list[PolicyTimes]:
    """Return the `predicted` or `measured` times from a result of `emulate`."""
    return [PolicyTimes(policy, [CallTime(*call) for call in zip(
        one[what], found["balanced"][what], one["lent"], found["third"], strict=True)])
        for policy, one in found["policies"].items()]


HEADER = ("parallel.spill", "time per call", "share", "predicted share", *PARTS, "gain",
          "predicted gain", "busiest rank", "lent")
MEANING = (
    "\"Share\" is the throughput divided by the throughput of the same calls under forced balance. "
    "\"Early\", \"middle\" and \"late\" are the shares in the first, second and last third of the "
    "steps. \"Gain\" is the speed divided by the speed of `never`. \"Busiest rank\" is the number "
    "of rows on the busiest rank divided by the mean number of rows. \"Lent\" is the number of "
    "lent experts per call.")


def rows_of(found: Mapping[str, Any]) -> list[list[str]]:
    """Return one table row for each policy. The columns are listed in `HEADER`."""
    predicted, measured = times_of(found, "predicted"), times_of(found, "measured")
    rows = []
    for before, after in zip(predicted, measured, strict=True):
        thirds = [after.share(third) for third in range(len(PARTS))]
        busiest = sum(found["policies"][after.policy]["rows"]) / sum(found["mean_rows"])
        rows.append([
            after.policy, show_time(after.mean), f"{after.share():.1%}", f"{before.share():.1%}",
            *("-" if share is None else f"{share:.1%}" for share in thirds),
            f"{measured[0].mean / after.mean:.2f}", f"{predicted[0].mean / before.mean:.2f}",
            f"{busiest:.2f}", f"{after.lent:.1f}"])
    return rows


def explain(found: Mapping[str, Any], grid: str) -> str:
    """Return a table with one row for each policy, and a recommendation."""
    predicted, measured = times_of(found, "predicted"), times_of(found, "measured")
    about = (f"{len(measured[0].calls):,} layer calls, forward and backward, were measured on "
             f"{grid} emulated nodes x ranks. All policies ran alternately, and times were "
             "measured on the slowest rank. " + MEANING)
    return "\n".join([paragraph(about), "", aligned([HEADER, *rows_of(found)]), "",
                      paragraph(f"By the measurement: {what_to_use(measured)} By the prediction, "
                                f"the best policy is {best(predicted).policy}.")])


def as_json(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the predicted and measured times as plain values for JSON."""
    return {what: as_dict(times_of(found, what)) for what in ("predicted", "measured")}
