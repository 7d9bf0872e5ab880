"""Train the quick start's model with every router through both hosts, and write a table.

Takes about 15 minutes; run `bash scripts/setup.sh` first. Exit
status 1 if a loss does not fall or, after 100 steps or more, a router exceeds its bound of
imbalance: `--quick` does not judge balance. A second run trains only what is missing (runs/gates;
--fresh starts again).
"""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from moe_plugin.cli.figures import columns
from moe_plugin.utils.regular_files import make_folder, write_regular
from scripts.bench.quickstart import HOSTS, begin, quickstart, settings
from scripts.bench.study import Option

log = logging.getLogger(__name__)
TITLE = "Every gate, trained"
VOCABULARY = 512  # more than any of the hosts' ids
# steps after which bounds of balance hold: before, balance is that of the first weights
BALANCED_AFTER = 100
SWITCH = {"switch": 0.01}


@dataclass(frozen=True)
class Gate:
    """How a router is trained here.

    Attributes:
        most: bound of the largest expert load over the mean load at the end.
        capacity: of the padded dispatcher; None: dropless.
        apart: every rank counts as a node.
    """

    most: float
    router: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    capacity: float | None = 1.25
    top_k: int = 2
    apart: bool = False


# Bound 3: routers that send equal tokens to equal experts; a third of the text is spaces.
# topology_quota, ta_moe: with one node they would do nothing, so each rank counts as a node.
GATES = {
    "topk": Gate(2.0, losses=SWITCH),
    "switch": Gate(2.0, losses=SWITCH, top_k=1),
    "gshard": Gate(2.0, losses={"gshard": 0.01}),
    "ktop1": Gate(2.0, losses=SWITCH),
    "sam": Gate(2.5, {"groups": 2}, {"switch": 0.01, "sam_alignment": 0.01}),
    "group_limited": Gate(2.5, {"groups": 4, "group_top_k": 2}, SWITCH, top_k=4),
    "sigmoid_bias": Gate(2.5, {"score": "sigmoid", "bias_rate": 0.01}),
    "softmax_bias": Gate(2.5, {"bias_rate": 0.01}),
    "quantile": Gate(2.5),
    "sparsemixer": Gate(2.5, losses=SWITCH),
    "base": Gate(1.02, top_k=1),
    "hash": Gate(3.0, {"hash": {"kind": "balanced", "vocabulary": VOCABULARY}}, top_k=1),
    "dense_to_sparse": Gate(2.5, {"sparsity": {"steps": 100}}, SWITCH, None),
    "cosine": Gate(2.0, losses=SWITCH),
    "noisy_topk": Gate(2.5, losses={"importance": 0.01, "noisy_load": 0.01}),
    "expert_choice": Gate(1.0, capacity=None),
    "sinkhorn": Gate(3.0),
    "topology_quota": Gate(2.0, {"links": {"quota": 0.3}}, SWITCH, apart=True),
    "ta_moe": Gate(2.5, losses={"ta_moe": 0.01}, apart=True),
}


@dataclass(frozen=True)
class GateRow:
    """Result of one run.

    Losses are in nats per byte.

    Attributes:
        busiest: largest expert load over the mean, worst layer, last record.
        drops: share of choices without a slot, likewise.
        step_ms: median.
    """

    gate: str
    host: str
    steps: int
    first_loss: float
    last_loss: float
    valid_loss: float | None
    busiest: float
    most: float
    drops: float
    step_ms: float

    @property
    def faults(self) -> list[str]:
        """Which bounds the run exceeds."""
        found = [] if self.last_loss < 0.8 * self.first_loss else [
            f"loss {self.first_loss:.3f} -> {self.last_loss:.3f}"]
        if self.steps >= BALANCED_AFTER and self.busiest > self.most:
            found.append(f"busiest expert {self.busiest:.2f} times the mean, bound {self.most}")
        return found


def counts(host: str, corpus: Path) -> list[int]:
    """How often each token id of a host occurs in the training text."""
    found = [0] * VOCABULARY
    if host == "megatron":
        for byte in (corpus / "train.txt").read_bytes():
            found[byte] += 1
        return found
    for i, line in enumerate((corpus / "dict.txt").read_text(encoding="utf-8").splitlines()):
        found[i + 4] = int(line.rsplit(" ", 1)[1])  # after fairseq's own four symbols
    return found


def settings_file(name: str, host: str, corpus: Path, folder: Path) -> Path:
    """The router's settings as YAML, in a folder next to the run's."""
    gate, home = GATES[name], folder.with_name(f"{folder.name}.settings")
    make_folder(home)
    router = {"name": name, "top_k": gate.top_k, **gate.router}
    if name == "hash":
        path = home / "counts.txt"
        write_regular(path, "".join(f"{n}\n" for n in counts(host, corpus)))
        router["hash"] = {**router["hash"], "path": str(path)}
    dispatch = ({"name": "padded", "capacity_factor": gate.capacity} if gate.capacity else
                {"name": "ragged"})
    tree: dict[str, Any] = {"router": router, "losses": dict(gate.losses), "dispatch": dispatch}
    if gate.apart:
        write_regular(home / "nodes.yaml", "nodes: [[0], [1]]\n")
        tree["comm"] = {"topology": str(home / "nodes.yaml")}
    path = home / "moe.yaml"
    return write_regular(path, yaml.safe_dump(tree))


def run(name: str, host: str, s: dict[str, Any], data: Path, corpus: Path, folder: Path) -> GateRow:
    extra = ["--moe-config", str(settings_file(name, host, corpus, folder))]
    if host == "fairseq":
        command = quickstart().fairseq_command(s, data, folder, False)
        i = command.index("--moe-capacity-factor")
        del command[i : i + 2]  # it would override the file
        command += [*extra, "--moe-gate-loss-wt", "1", "--moe-gate-loss-combine-method", "sum"]
    else:
        command = [
            *quickstart().megatron_command(s, data, folder, False), *extra, "--moe-aux-loss-coeff",
            "0", "--moe-router-topk",
            str(GATES[name].top_k)
        ]
        if name == "sigmoid_bias":
            command += ["--moe-router-score-function", "sigmoid"]
        if GATES[name].top_k == 1:
            command += ["--moe-router-pre-softmax"]  # Megatron requires it
    result, _ = quickstart().train(quickstart().Run(host, folder, command, s["steps"]))
    last = last_records(folder)
    return GateRow(gate=name, host=host, steps=result["steps"], first_loss=result["first_loss"],
               last_loss=result["last_loss"], valid_loss=result["valid_loss"],
               busiest=max(row["max_over_mean"] for row in last), most=GATES[name].most, drops=max(
                   row["drop_fraction"] for row in last),
               step_ms=1e3 * s["ranks"] * s["batch"] * s["length"] / result["tokens_per_s"])


def last_records(folder: Path) -> list[dict[str, Any]]:
    """The statistics of the last step that has some, a row per layer."""
    rows = [
        json.loads(line)
        for line in (folder / "stats.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    rows = [row for row in rows if "load" in row]
    return [row for row in rows if row["step"] == max(r["step"] for r in rows)]


def body(found: dict[str, Any]) -> list[str]:
    rows = [GateRow(**row) for row in found["rows"]]
    s = settings(rows[0].steps)
    return [
        f"Numbers in `docs/benchmarks/data/gates.json`. {s['steps']} steps of the quick start's "
        f"model ({s['layers']} layers, every second with {s['experts']} experts, width "
        f"{s['width']}) on its corpus, {s['ranks']} ranks on CPU, torch {found['torch']}.",
        "Losses are nats per byte without the balance loss; the corpus' unigram entropy is "
        f"{found['unigram_entropy']:.3f}. Balance and drops are the worst layer's in the last "
        "record (both steps of it); *bound* is the limit of the balance. So few steps do not rank "
        "the routers: they show that each one learns and stays balanced."
        f"{found.get('note', '')}",
        columns(rows, {
            "gate": "{0.gate}", "host": "{0.host}", "first loss": "{0.first_loss:.3f}",
            "last loss": "{0.last_loss:.3f}",
            "valid loss": lambda r: "-" if r.valid_loss is None else f"{r.valid_loss:.3f}",
            "busiest expert / mean": "{0.busiest:.2f}", "bound": "{0.most:g}",
            "drops": "{0.drops:.1%}", "ms per step": "{0.step_ms:.0f}"}),
        "How each was set:",
        columns(GATES, {
            "gate": str, "top_k": lambda name: str(GATES[name].top_k),
            "capacity factor": lambda name: (
                "dropless" if GATES[name].capacity is None else f"{GATES[name].capacity:g}"),
            "losses": lambda name: ", ".join(
                f"{loss} {weight:g}" for loss, weight in GATES[name].losses.items()) or "-",
            "other settings": lambda name: (
                json.dumps(GATES[name].router) if GATES[name].router else "-")})]


OPTIONS = {
    "steps": Option(100, "of each run", quick=20),
    "gates": Option(tuple(GATES), "routers", quick=("topk",), choices=GATES),
    "hosts": Option(HOSTS, "trainers", choices=HOSTS),
    "runs": Option("runs/gates", "folder of corpus and runs"),
    "fresh": Option(False, "discard earlier runs"),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    place, corpus, about = begin(args)
    rows = []
    for host in args.hosts:
        data = quickstart().HOST_STEPS[host][0](corpus)
        for name in args.gates:
            rows.append(run(name, host, settings(args.steps), data, corpus,
                            place / f"{name}-{host}"))
            log.info("%s in %s: %s", name, host, rows[-1].faults or "as it should be")
    if args.steps < BALANCED_AFTER:
        log.info("balance is not judged: its bounds hold after %d steps", BALANCED_AFTER)
    rows.sort(key=lambda r: list(GATES).index(r.gate))
    return {**about, "rows": [asdict(r) for r in rows]}


def failures(found: dict[str, Any]) -> list[str]:
    rows = [GateRow(**row) for row in found["rows"]]
    return [f"{r.gate} in {r.host}: {fault}" for r in rows for fault in r.faults]
