"""The share of time that counts in runs that fail every ten minutes: small models by each host's
real training program, killed at random times, with replicas and without; afterwards losses and
routing must be those of a run in which nothing happened.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moe_plugin.cli.figures import table
from moe_plugin.observe.traces import trace_path
from scripts.bench.report import document
from tests.faults import replica_hosts
from tests.faults.host_replicas import JOB_S, difference
from tests.faults.meeting import HEARTBEAT_MS
from tests.faults.recorded import RECORD, read, steps_of
from tests.faults.replicas import ROOT
from tests.faults.time_lost import LOSSES, Lane, Spent, spent, stays, young_daly
from tests.faults.timed_rank import STARTS, TIMES, TRACE, Timed
from tests.faults.timed_runs import RANKS, TimedReplicas, alone, arguments
from tests.hosts import kills

PAGE = ROOT / "docs" / "benchmarks" / "effective.md"
HOSTS = {"fairseq": "fairseq", "megatron": "Megatron"}
MTBF_S, PAUSE_S, REPLICAS = 600.0, 0.1, 2
AIM, PUBLISHED = 0.97, 0.94
EVERY_S = 20.0  # from a run that is whole again to the next failure, mean
SEED, TOLERANCE = 1, 1e-5


@dataclass
class Row:
    """A run with failures, and how it compares with its reference.

    Attributes:
        save_every, save_s: steps between checkpoints and seconds that one takes; 0: none.
        spent: where the time went.
        passes: of layers in steps that stay, whose routing was compared; others: of them not equal.
        loss: the largest difference.
        load: average of the machine before the run.
    """

    host: str
    replicas: int
    steps: int
    failures: int
    save_every: int
    save_s: float
    spent: Spent
    passes: int
    others: int
    loss: float
    load: float = 0.0

    @property
    def ratio(self) -> float:
        """Here, with failures as often as they were injected."""
        return self.spent.useful_s / self.spent.wall_s

    @property
    def lost_s(self) -> float:
        """Seconds for each failure."""
        lost = sum(self.spent.lost[name] for name in LOSSES if name != "writing")
        return lost / max(1, self.failures)

    @property
    def compressed(self) -> float:
        """How often more failures than one every `MTBF_S` came."""
        return MTBF_S * self.failures / self.spent.wall_s

    @property
    def writing(self) -> float:
        """Seconds of checkpoints for each second of steps."""
        return self.save_s / (self.save_every * self.spent.step_s) if self.save_every else 0.0

    def hour(self, mtbf_s: float = MTBF_S) -> float:
        """In an hour with a failure every `mtbf_s`."""
        return (1 - self.lost_s / mtbf_s) / (1 + self.writing)


Choices = Mapping[int, list[Any]]  # by step, from 1, of each pass of a layer


def choices(folder: Path, rank: int) -> Choices:
    """What a rank's tokens chose, in the order of the passes."""
    found: dict[int, list[Any]] = {}
    for line in read(trace_path(str(folder), rank)):
        found.setdefault(line["step"] + 1, []).append((line["layer"], line["top_indices"]))
    return found


def compared(found: Choices, wanted: Choices, steps: Sequence[int]) -> tuple[int, int]:
    """Passes of these steps, and how many of them differ."""
    pairs = [(mine, other) for step in steps
             for mine, other in zip(found[step], wanted[step], strict=True)]
    return len(pairs), sum(mine != other for mine, other in pairs)


def lane(folder: Path, killed: Sequence[float], members: Mapping[int, Any] | None = None,
         number: int = 0) -> Lane:
    """Of a run or replica in this folder."""
    starts = [line["at"] for line in read(folder / STARTS) if line["rank"] == 0]
    return Lane(stays(read(folder / TIMES), members, number), starts, killed)


def without_replicas(host: str, home: Path, data: str, steps: int, every_s: float) -> Row:
    """Two ranks share the experts; the run goes on from its last checkpoint. Its reference is the
    same command, uninterrupted.
    """
    whole, killed = home / "whole", home / "killed"

    def run(folder: Path, save_every: int, pause_s: float, of_kills: float) -> list[float]:
        given = arguments(host, data, steps, str(folder / "save"), save_every)
        return alone(Timed(host, str(folder), given, pause_s), steps, of_kills, SEED)

    often = max(1, steps // 20)
    run(whole, often, 0.0, 0.0)
    calm = spent([lane(whole, [])], often)
    save_s = calm.lost["writing"] / calm.saves
    save_every = max(1, round(young_daly(save_s, MTBF_S) / (calm.step_s + PAUSE_S)))
    times = run(killed, save_every, PAUSE_S, every_s)
    counts = [compared(*(choices(folder / TRACE, rank) for folder in (killed, whole)),
                       range(1, steps + 1)) for rank in range(RANKS)]
    return Row(host, 0, steps, len(times), save_every, save_s, spent([lane(killed, times)],
               save_every), *map(sum, zip(*counts, strict=True)),
               difference([read(killed / TIMES)], [read(whole / TIMES)]))


def with_replicas(host: str, home: Path, data: str, server: Any, steps: int,
                  every_s: float) -> Row:
    """Each replica has the whole model; the others go on. The reference is an uninterrupted run
    whose means have the same members in every step.
    """
    home.mkdir(parents=True)
    job = TimedReplicas(home, steps, REPLICAS, host=host, data=data, server=server,
                        pause_s=PAUSE_S)
    killed = job.fail(every_s, SEED)
    every = range(REPLICAS)
    made = steps_of([job.lines(number, RECORD) for number in every], steps)
    members = {step: sorted(at.attempts) for step, at in made.items()}
    done = server.run(
        REPLICAS, replica_hosts.replay, host, str(home), data, steps, members,
        [job.batches(number, made) for number in every], TRACE + "_whole",
        environment=kills.environment(), timeout_s=JOB_S)
    assert done.code == 0, done.log
    lanes = [lane(home / str(number), [at for who, at in killed if who == number], members, number)
             for number in every]
    counts = [compared(choices(home / str(number) / TRACE, 0),
                       choices(home / str(number) / f"{TRACE}_whole", 0),
                       sorted({one.step for one in lanes[number].ended if one.stays}))
              for number in every]
    return Row(host, REPLICAS, steps, len(killed), 0, 0.0, spent(lanes, 0),
               *map(sum, zip(*counts, strict=True)), difference(*(
                   [job.lines(number, log) for number in every]
                   for log in ("log.jsonl", "replay.jsonl"))))


def data_of(host: str, home: Path) -> tuple[str, Any]:
    """The data of a host, and the server that forks its ranks."""
    home.mkdir(parents=True)
    if host == "fairseq":
        from tests.hosts.fairseq.conftest import make_corpus, server

        return str(make_corpus(home).lm), server
    from tests.hosts.megatron.conftest import make_data
    from tests.hosts.megatron.ranks import server

    return make_data(home), server


def body(rows: Sequence[Row]) -> list[str]:
    """Parts of the page below its title."""
    every = ", ".join(
        f"{HOSTS[row.host]} {row.save_every * row.spent.step_s:.1f} s ({row.save_every} steps, a "
        f"checkpoint takes {row.save_s:.2f} s)" for row in rows if not row.replicas)
    return [
        f"""Small MoE models are trained by each host's own program (fairseq-train and Megatron's
        training script) on two ranks (gloo, CPU) under torchrun. Ranks are killed by SIGKILL at
        random times. Either the two ranks share the experts and resume from the last checkpoint,
        or each rank is one of {REPLICAS} [replicas](../replicas.md) of the whole model, and the
        other replica continues. The heartbeat timeout is {HEARTBEAT_MS / 1000:g} s. This page is
        written by `python -m tests.faults.effective` in about 20 minutes.""",
        """*Time that counts* is the number of steps whose results are kept, multiplied by the mean
        time of the undisturbed steps. The ratio divides it by the total time of the ranks since
        the first step. The first start is not included. While a replica is away, its half of the
        processor time is lost. Let T be the seconds between checkpoints, C the seconds of one
        checkpoint, L the seconds lost by each failure (detection, restart, repeated steps), and M
        the mean time between failures. Then:""",
        "```text\nratio = (1 - L / M) / (1 + C / T),   T = sqrt(2 C M)  (Young, Daly)\n```",
        f"""An hour with M = 600 s has 6 failures. Here, the time between failures is compressed.
        The next failure comes after a random time with a mean of {EVERY_S:g} s, counted from the
        moment at which all ranks train again. No second failure is injected before that moment. The
        column *compressed* states the factor. Starts, checkpoints and detection are not compressed,
        and T is computed for M = 600 s: {every}. In each step, the ranks wait for {PAUSE_S:g} s, as
        they would for an accelerator.""",
        f"""*Here* is the ratio for the injected failures. *10 minutes* is the ratio of the formula
        with the numbers of this table; the aim is {AIM}. The seconds are means over the ranks for
        each failure. The load average of the machine (2 cores) before the runs was
        {", ".join(dict.fromkeys(f"{row.load:g}" for row in rows))}.""",
        table(["host", "replicas", "failures", "compressed", "steps made again", "detection, s",
               "restart, s", "made again, s", "writing", "here", "10 minutes"], [[
            HOSTS[row.host], str(row.replicas or "no"), str(row.failures),
            f"{row.compressed:.0f} times", str(row.spent.redone),
            *(f"{row.spent.lost[name] / max(1, row.failures):.1f}"
              for name in ("detection", "restart", "redone")),
            f"{row.writing:.1%}".replace("%", " %"), f"{row.ratio:.2f}", f"{row.hour():.3f}"]
            for row in rows]),
        f"""MoEvement publishes a ratio of {PUBLISHED} or more at one failure in 10 minutes (Gandhi
        and Kozyrakis, arXiv 2412.15411, abstract). It keeps checkpoints in memory, for models whose
        state has many gigabytes, on clusters of GPUs. The models on this page are small and run on
        a CPU, so the numbers do not compare the two systems.""",
        """Each run equals its reference. In all steps that are kept, every pass of every layer
        chose the same experts for every token, according to the runs' [routing
        traces](../rollouts.md#routing-traces). The losses differ by at most the value in the last
        column. If a run differs, the command ends with status 1.""",
        table(["host", "replicas", "reference", "passes compared", "of them not equal",
               "largest difference of a loss"], [[
            HOSTS[row.host], str(row.replicas or "no"), "an uninterrupted run whose means have the "
            "same members in each step" if row.replicas else "the same command, uninterrupted",
            str(row.passes), str(row.others), f"{row.loss:.1e}"] for row in rows]),
        """Without replicas, the time is lost in starts, which mainly consist of imports, and in
        checkpoints. Both take longer with larger models. With replicas, a failure costs the other
        replicas one step, and the time until the lighthouse considers a silent replica lost, which
        is its heartbeat timeout. The remaining loss is the absence of the failed replica."""]


def page(rows: Sequence[Row]) -> str:
    """The committed page."""
    return document("# Time that counts under failures", *body(rows))


def load(path: Path) -> list[Row]:
    """The rows of a file; none without one."""
    return [Row(**{**line, "spent": Spent(**line["spent"])}) for line in read(path)]


def measured(args: argparse.Namespace, home: Path) -> Iterator[Row]:
    """The rows that are asked for."""
    for host in args.hosts:
        data, server = data_of(host, home / f"{host}_data")
        load = round(os.getloadavg()[0], 1)
        if "without" in args.replicas:
            yield replace(without_replicas(host, home / host / "alone", data, args.steps,
                                           args.every), load=load)
        if "with" in args.replicas:
            yield replace(with_replicas(host, home / host / "replicas", data, server,
                                        2 * args.steps, args.every), load=load)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 if a run differs from its reference."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--hosts", type=lambda text: text.split(","), default=list(HOSTS))
    p.add_argument("--replicas", nargs="+", choices=("without", "with"),
                   default=("without", "with"))
    p.add_argument("--steps", type=int, default=600, help="without replicas; with them twice")
    p.add_argument("--every", type=float, default=EVERY_S,
                   help="seconds from a run that is whole again to the next failure, mean")
    p.add_argument("--out", type=Path, default=PAGE)
    p.add_argument("--redraw", action="store_true", help="the page alone, from committed numbers")
    args = p.parse_args(argv)
    data = args.out.parent / "data" / f"{args.out.stem}.jsonl"
    rows = {(row.host, row.replicas): row for row in load(data)}
    with tempfile.TemporaryDirectory() as home:
        for row in () if args.redraw else measured(args, Path(home)):
            rows[row.host, row.replicas] = row
            print(f"{HOSTS[row.host]}, {row.replicas} replicas: {row.failures} failures, "
                  f"{row.ratio:.2f} here, {row.hour():.3f} at {MTBF_S:g} s", flush=True)
            data.write_text("".join(json.dumps(asdict(rows[key])) + "\n" for key in sorted(rows)))
    made = [rows[key] for key in sorted(rows)]
    args.out.write_text(page(made))
    return int(any(row.others or row.loss > TOLERANCE for row in made))


if __name__ == "__main__":
    sys.exit(main())
