"""Parm: the schedule for tensor x expert x expert-tensor parallelism (Pan et al. 2024).

B L tokens per rank, M model dimension, T = k f B L / E slots per expert, N_MP ranks with the same
tokens, N_ESP shards of an expert.

| schedule | forward |
|---|---|
| baseline (DeepSpeed-MoE) | AG(BLM N_ESP) + AR(ETM N_ESP) + 2 A2A(ETM N_ESP) |
| s1: tokens split before the gate | 2 A2A(ETM N_ESP / N_MP) + AG(BLM) |
| s2: slots split after the gate | A2A(v) + max(A2A(v), AG(ETM)), v = ETM N_ESP / N_MP |

Without overlap, s2 takes the sum instead of the maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.collectives import GroupShape, all_gather_s, all_reduce_s, all_to_all_s
from moe_plugin.planner.events import Task

SCHEDULES = ("baseline", "s1", "s2")


@dataclass(frozen=True, kw_only=True)
class ParmShape:
    """A layer in Parm's terms.

    Attributes:
        tokens: BL of a rank.
        model_dim: M.
        rows_factor: k f.
        replicas: N_MP.
        shards: N_ESP.
    """

    tokens: int
    model_dim: int
    rows_factor: float
    element_bytes: int = 4
    replicas: int = 1
    shards: int = 1

    @property
    def bytes_in(self) -> float:
        """BLM in bytes."""
        return self.tokens * self.model_dim * self.element_bytes

    @property
    def bytes_rows(self) -> float:
        """ETM in bytes."""
        return self.rows_factor * self.bytes_in


def schedule_tasks(shape: ParmShape, cluster: Cluster, schedule: str, overlap: bool = False,
                   pieces: int = 1) -> list[Task]:
    """Exchanges of one forward pass.

    overlap: S2's gather runs at the same time as the all-to-all, in `pieces` steps.
    """
    world, mp, esp = GroupShape(cluster.ranks), GroupShape(shape.replicas), GroupShape(shape.shards)
    if schedule == "baseline":
        volume = shape.bytes_rows * shape.shards
        parallel = GroupShape(max(1, cluster.ranks // shape.shards), shape.shards)
        return [
            Task("esp gather", "network",
                 all_gather_s(cluster, esp, shape.bytes_in) if shape.shards > 1 else 0.0),
            Task("out", "network", all_to_all_s(cluster, parallel, "linear", volume),
                 ("esp gather",)),
            Task("esp reduce", "network", all_reduce_s(cluster, esp, volume), ("out",)),
            Task("back", "network", all_to_all_s(cluster, parallel, "linear", volume),
                 ("esp reduce",))
        ]
    volume = shape.bytes_rows * shape.shards / shape.replicas
    out = Task("out", "network", all_to_all_s(cluster, world, "linear", volume))
    gathered = shape.bytes_in if schedule == "s1" else shape.bytes_rows
    pieces = pieces if schedule == "s2" and overlap else 1
    gather = all_gather_s(cluster, mp, gathered / shape.replicas) if shape.replicas > 1 else 0.0
    tasks = [out]
    for i in range(pieces):
        tasks.append(Task(f"back{i}", "network", out.seconds / pieces, ("out",)))
        tasks.append(
            Task(f"gather{i}", "inside" if pieces > 1 else "network", gather / pieces,
                 (f"back{i}",)))
    return tasks


def schedule_s(shape: ParmShape, cluster: Cluster, schedule: str, overlap: bool = False) -> float:
    """Seconds of the closed form."""
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}")
    times = {t.name: t.seconds for t in schedule_tasks(shape, cluster, schedule)}
    if schedule == "s2" and overlap:
        return times["out"] + max(times["back0"], times["gather0"])
    return sum(times.values())


def run_s(shape: ParmShape, cluster: Cluster, schedule: str, pieces: int = 1) -> float:
    """Seconds of the exchanges of one forward pass as layers run them, of `s1` or `s2`.

    In `pieces`, each with messages of its own. S2's gather of a piece runs beside the all-to-all of
    the next one where it has links of its own: inside nodes of a cluster of several.
    """
    world, mp = GroupShape(cluster.ranks), GroupShape(shape.replicas)
    volume = shape.bytes_rows * shape.shards / shape.replicas
    step = all_to_all_s(cluster, world, "linear", volume / pieces)
    if schedule == "s1":
        return 2 * pieces * step + all_gather_s(cluster, mp, shape.bytes_in / shape.replicas)
    gather = all_gather_s(cluster, mp, shape.bytes_rows / shape.replicas / pieces)
    if cluster.nodes == 1 or shape.replicas > cluster.ranks_per_node:
        return 2 * pieces * step + pieces * gather
    return pieces * step + step + (pieces - 1) * max(step, gather) + gather


def choose_run(shape: ParmShape, cluster: Cluster, pieces: int = 1) -> str:
    """The faster of `s1` and `s2` as layers run them (`run_s`); if equal s1."""
    return min(("s1", "s2"), key=lambda s: run_s(shape, cluster, s, pieces))
