"""Tables of pipeline schedules and of EPS-MoE choices for prompts of different lengths, and the
timeline of one pipeline schedule as text.

For each prompt length, the second table contains the kernel for the forward pass of an MoE layer,
and the number of pieces into which the rows are divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.events import Timeline
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.once import GroupShape, all_to_all_s
from moe_plugin.planner.pipeline.choice import StageProfile, choose, groups, predict
from moe_plugin.planner.prefill import (
    PIECE_OPERATIONS,
    PrefillChoice,
    PrefillLoad,
    Profile,
    choices,
    crossovers,
    table,
)
from moe_plugin.planner.units import show_size, show_time

COLUMNS = 88  # width of a lane


def explain(profile: StageProfile) -> str:
    """Describe the time of each schedule, the chosen schedule, and the timeline of this schedule.
    """
    every, best = predict(profile), choose(profile)
    stages = len(profile.forward_s)
    lines = [f"{profile.name}: {stages} stages, {profile.micro_batches} micro-batches,",
             f"transfers of {show_time(profile.transfer_s)} over {profile.transport}"]
    if profile.memory_bytes:
        lines.append(f"{show_size(profile.memory_bytes)} for activations")
    lines += ["", f"{'schedule':<14}{'step':>10}{'idle':>8}  micro-batches kept by stage"]
    for one in every:
        kept = " ".join(f"{count:.3g}" for count in one.alive)
        kept += "" if one.fits else "  does not fit"
        lines.append(f"{one.schedule:<14}{show_time(one.seconds):>10}{one.bubble:>8.1%}  {kept}")
    cut = f", slices {','.join(map(str, best.slices))}" if best.slices else ""
    if best.sequences:
        cut = f", micro-batches of {best.sequences} sequences{cut}"
    if profile.batch:
        found = groups(profile)
        lines += ["", "groups that do not overlap, of any sizes (TeraPipe's own cut): " + "; ".join(
            f"{size} in {','.join(map(str, one.slices))}" for size, one in found.groups)
            + f": {show_time(found.seconds)}"]
    return "\n".join([*lines, "", f"best: {best.schedule}{cut}", "",
                      *lanes(best.timeline, stages), "",
                      "digits: forward of this micro-batch (last digit), letters: backward (a is "
                      "0), dots: idle"])


def lanes(timeline: Timeline, stages: int) -> list[str]:
    """For each stage, return one line that shows what the stage computes over time."""
    cells = [["."] * COLUMNS for _ in range(stages)]
    for span in timeline.spans:
        if span.task.phase == "send":
            continue
        kind, stage, unit = span.task.name.split()
        batch = unit.split(".")[0]  # a slice is named by its micro-batch and its own number
        first, last = (round(COLUMNS * at / timeline.seconds) for at in (span.start, span.end))
        mark = (chr(ord("a") + int(batch) % 26) if kind in ("backward", "weights")
                else batch[-1])
        cells[int(stage)][first:last] = mark * (last - first)
    return [f"stage {stage:<3} {''.join(row)}" for stage, row in enumerate(cells)]


def as_dict(profile: StageProfile) -> dict[str, object]:
    """Return the comparison as plain values for JSON."""
    return {"best": choose(profile).schedule, "schedules": [{
        "schedule": one.schedule, "seconds": one.seconds, "bubble": one.bubble,
        "micro_batches_kept": list(one.alive), "fits": one.fits, "slices": list(one.slices),
        **({"sequences": one.sequences} if one.sequences else {})
    } for one in predict(profile)], **({} if not profile.batch else {
        "groups": [[size, list(one.slices)] for size, one in groups(profile).groups]})}


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline of the stages and links in the trace event format of Chrome and Perfetto.
    """
    rows = sorted({span.task.resource for span in timeline.spans},
                  key=lambda name: (name.startswith("link"), *map(int, name.split()[1:])))
    return timeline.trace(rows)


LOOKED_AT = 4096  # number of loads checked for a change of kernel


@dataclass(frozen=True)
class PrefillRow:
    """The number of pieces and the kernel chosen for one prompt length.

    Attributes:
        tokens: number of prompt tokens per rank.
        rows: number of rows per expert.
        whole_s: time of the forward pass in seconds if the rows are not divided into pieces.
        best: the fastest choice over all numbers of pieces.
    """

    tokens: int
    rows: float
    whole_s: float
    best: PrefillChoice


@dataclass(frozen=True)
class PrefillTable:
    """The number of pieces and the kernel chosen for each prompt length.

    Attributes:
        kernels: the prompt lengths at which the best kernel changes when the rows are not divided,
            as tuples (tokens per rank, kernel for shorter prompts, kernel from this length on).
    """

    rows: tuple[PrefillRow, ...]
    kernels: tuple[tuple[int, str, str], ...]


def prefill_table(model: ModelShape, cluster: Cluster, profile: Profile,
                  lengths: Sequence[int]) -> PrefillTable:
    """Compute the table for an MoE layer whose experts are sharded over all ranks of a cluster.

    Args:
        profile: measured kernels for the widths and experts of this layer.
        lengths: the prompt lengths, in tokens per rank.
    Raises:
        ValueError: If the number of experts is not divisible by the number of ranks.
    """
    ranks = cluster.ranks
    if model.experts % ranks:
        raise ValueError(f"{model.experts} experts cannot be divided equally among {ranks} "
                         "ranks. Change the number of ranks with --nodes and --ranks-per-node")
    local_experts = model.experts // ranks
    host_s = PIECE_OPERATIONS * min((kernel.launch_s for kernel in profile.values()), default=0.0)
    loads = [_load(model, cluster, tokens, local_experts, host_s) for tokens in lengths]
    rows = [PrefillRow(tokens, load.rows, choices(load, profile, pieces=(1,))[0].seconds, best)
            for tokens, (load, best) in zip(lengths, table(loads, profile), strict=True)]
    each = model.top_k / local_experts  # rows of an expert per token of each rank
    most = int(max(load.rows for load in loads))
    changes = crossovers(profile, local_experts, range(1, most + 1, max(1, most // LOOKED_AT)))
    return PrefillTable(tuple(rows), tuple((round(n / each), a, b) for n, a, b in changes))


def _load(model: ModelShape, cluster: Cluster, tokens: int, here: int,
          host_s: float) -> PrefillLoad:
    sent, group = tokens * model.top_k, GroupShape(cluster.ranks)
    fixed = all_to_all_s(cluster, group, "linear", 1)
    whole = all_to_all_s(cluster, group, "linear", sent * model.row_dim * model.element_bytes)
    return PrefillLoad(experts=here, rows=sent / here, row_s=max(0.0, whole - fixed) / sent,
                       exchange_s=fixed, host_s=host_s)


def explain_prefill(found: PrefillTable) -> str:
    """Format the table: a line per length, lengths at which kernels change, settings."""
    lines = [f"{'tokens/rank':>13}{'rows/expert':>16}{'one piece':>12}{'best':>12}  pieces, kernel"]
    for row in found.rows:
        best = row.best
        cut = "one" if best.pieces == 1 else f"{best.pieces} along {best.cut}"
        lines.append(f"{row.tokens:>13}{row.rows:>16.4g}{show_time(row.whole_s):>12}"
                     f"{show_time(best.seconds):>12}  {cut}, {best.kernel}")
    lines += [f"from {tokens} tokens on: use kernel {after} instead of {before}"
              for tokens, before, after in found.kernels]
    return "\n".join([*lines, "", "for one fixed length, set parallel.d (pieces) and parallel.cut; "
                      "for any length, set parallel.prefill: true"])
