"""Functions that describe the schedule of a collective: its speed, why no schedule is faster, and
how it compares with other algorithms.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from moe_plugin.planner.forest.baselines import baselines
from moe_plugin.planner.forest.network import Network
from moe_plugin.planner.forest.schedule import Schedule
from moe_plugin.planner.forest.simulate import Program, Simulated, program_of, run
from moe_plugin.planner.units import show_size, show_time
from moe_plugin.utils.messages import aligned, tracked

MOST_STEPS = 200_000  # limit of a simulation, so that it takes only seconds
MOST_RANKS = 128  # largest number of ranks for which other algorithms are compared
_NAMED = 8  # largest number of nodes listed by name


@dataclass(frozen=True)
class Compared:
    """One of the collective algorithms in a comparison.

    Attributes:
        run: simulation of the algorithm at the requested size.
        limit_s: lower bound on the time in seconds, given by the busiest link.
    """

    name: str
    run: Simulated
    limit_s: float


@dataclass(frozen=True)
class Report:
    """The data for the report about a schedule.

    Attributes:
        size: size of the collective's result in bytes.
        ways: the algorithms to compare. The first item is the planned schedule. The tuple is empty
            if there is only one rank.
        planned_s: time in seconds that planning took.
        note: assumptions made about the network.
    """

    schedule: Schedule
    size: int
    ways: tuple[Compared, ...]
    planned_s: float
    note: str = ""


def compare(schedule: Schedule, size: int, chunks: int) -> tuple[Compared, ...]:
    """Simulate the planned schedule and the baseline algorithms. Each message is split into up to
    `chunks` chunks, which are sent one after the other.
    """
    if len(schedule.network.ranks) == 1:
        return ()
    programs = [program_of(schedule)]
    if len(schedule.network.ranks) <= MOST_RANKS:
        programs += baselines(schedule.network, schedule.collective)
    return tuple(_compared(program, size, chunks)
                 for program in tracked(programs, "simulate", "schedule"))


def _compared(program: Program, size: int, chunks: int) -> Compared:
    fitting = max(1, min(chunks, MOST_STEPS // max(1, program.tasks)))
    return Compared(program.name, run(program, size, fitting),
                    float(program.inverse_bandwidth()) * size / 1e9)


def cut_words(schedule: Schedule) -> str:
    """Explain why no schedule is faster. The text names the cut of the network that limits the
    bandwidth, the data that must cross it, and its bandwidth.
    """
    network = schedule.network
    inside = [rank for rank in network.ranks if rank in schedule.cut]
    if len(network.ranks) == 1:
        return "With one rank, nothing moves."
    if schedule.overlap:
        return _parts_words(schedule)
    width = network.out_of(schedule.cut)
    what, way = {
        "all_gather": (f"{_shards(len(inside))} must leave", "out of it"),
        "reduce_scatter": (f"the sums of {_shards(len(inside))} need what the other ranks add, "
                           "which must enter", "into it"),
        "all_reduce": (f"{_shards(len(inside))} must enter, then leave", "each way"),
    }[schedule.collective]
    crossing = sum(w.source in schedule.cut and w.target not in schedule.cut
                   for w in network.wires)
    wires = "1 wire leads" if crossing == 1 else f"{crossing} wires lead"
    return (f"{_nodes(network, schedule.cut)}: {what}; {wires} {way}, {number(width)} GB/s in "
            f"total. {len(inside)} / {number(width)} = {schedule.inverse_rate} s per GB of a "
            "shard.")


def _parts_words(schedule: Schedule) -> str:
    """Explain the lower bound for an overlapping all-reduce, which is given by a partition of the
    nodes instead of a cut.
    """
    network, parts = schedule.network, schedule.parts
    width = sum((network.out_of(part) for part in parts), Fraction(0))
    single = all(sum(rank in part for rank in network.ranks) == 1 for part in parts)
    members = ("Each rank separately" if single and len(parts) == len(network.ranks) else
               "; ".join(_nodes(network, part) for part in parts[:3]) + "; ..." * (len(parts) > 3))
    return (f"{members}, {len(parts)} parts: every part except the root's must send its share of a "
            f"piece and receive the sum; {number(width)} GB/s lead out of the parts in total. "
            f"2 ({len(parts)} - 1) / {number(width)} = "
            f"{schedule.inverse_rate / len(network.ranks)} s per GB of the result.")


def _shards(count: int) -> str:
    return f"{count} shard{'s' * (count != 1)}"


def _nodes(network: Network, cut: frozenset[str]) -> str:
    """Return a string that lists a set of nodes and its number of ranks. If the set contains most
    nodes, the string lists the nodes that are not in the set.
    """
    inside = [node for node in network.nodes if node in cut]
    outside = [node for node in network.nodes if node not in cut]
    ranks = sum(node in cut for node in network.ranks)
    if len(outside) < len(inside):
        names = f"All nodes but {_listed(outside)}"
    else:
        names = _listed(inside)
    return f"{names} ({ranks} of {len(network.ranks)} ranks)"


def _listed(names: list[str]) -> str:
    if len(names) > _NAMED:
        return f"{', '.join(names[:_NAMED - 1])}, ... ({len(names)} nodes)"
    return ", ".join(names)


def number(value: Fraction | float) -> str:
    """Format a number with at most six significant digits. The number is exact if six digits
    suffice.
    """
    return f"{float(value):.6g}"


def trees_words(schedule: Schedule) -> str:
    """Describe the number of trees and the bandwidth of each tree."""
    kinds = len(schedule.trees)
    whose = "together" if schedule.overlap else "per rank"
    return (f"k = {schedule.k} trees {whose}, {number(schedule.unit)} GB/s each; {kinds} different "
            f"tree{'s' * (kinds != 1)} in total")


def share_words(schedule: Schedule) -> str:
    """Describe whether the given trees reach the optimal bandwidth of the network."""
    best = len(schedule.network.ranks) / (schedule.phases * schedule.inverse_rate)
    if schedule.algorithmic_bandwidth == best:
        return "the optimum"
    share = float(schedule.algorithmic_bandwidth / best)
    return f"{100 * share:.2f} % of the optimum, which needs more trees ({number(best)} GB/s)"


def network_words(network: Network) -> str:
    """Describe the number of nodes and links in a network."""
    return (f"{len(network.ranks)} ranks, {len(network.switches)} switches, "
            f"{len(network.wires)} wires")


COLUMNS = ("simulated", "limit", "rate", "slower by", "chunks")


def comparison(report: Report) -> list[tuple[str, ...]]:
    """Return one row for each algorithm, with its name and the values of `COLUMNS`."""
    return [(way.name, show_time(way.run.seconds), show_time(way.limit_s),
             f"{report.size / way.run.seconds / 1e9:.5g} GB/s",
             f"{way.run.seconds / report.ways[0].run.seconds:.2f}x", f"{way.run.chunks:,}")
            for way in report.ways]


def text(report: Report) -> str:
    """Format the report for a terminal."""
    schedule, network = report.schedule, report.schedule.network
    lines = [f"{network.name}: {network_words(network)}"]
    if report.note:
        lines.append(report.note)
    if not report.ways:
        return "\n".join([*lines, cut_words(schedule)])
    ours, size = report.ways[0], report.size
    lines += [
        f"{schedule.collective}: {number(schedule.algorithmic_bandwidth)} GB/s of result, "
        f"{share_words(schedule)}; 1/x* = {schedule.inverse_rate}",
        f"No schedule is faster. {cut_words(schedule)}",
        f"{trees_words(schedule)}; planned in {show_time(report.planned_s)}",
        f"{show_size(size)}: at least {show_time(schedule.bound_s(size))}; these trees "
        f"{show_time(schedule.seconds(size))}, simulated with {ours.run.chunks} chunks each "
        f"{show_time(ours.run.seconds)}",
        "", aligned([("", *COLUMNS), *comparison(report)])
    ]
    if len(report.ways) == 1:
        lines.append(f"(other algorithms are compared only up to {MOST_RANKS} ranks)")
    lines.append("limit: time of the busiest wire, approached as the number of chunks grows")
    return "\n".join(lines)
