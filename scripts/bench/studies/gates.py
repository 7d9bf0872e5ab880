"""Train the quick start's model with every router in both hosts.

The study takes about 15 minutes. Run `bash scripts/setup.sh` first. The exit status is 1 if a loss
does not decrease, or if the load imbalance of a router exceeds its bound after 100 steps or more.
`--quick` does not check the imbalance. A second run trains only the models that are missing in
runs/gates. Use --fresh to start with an empty folder.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from moe_plugin.utils.regular_files import make_folder, write_regular
from scripts.bench.quickstart import HOSTS, begin, command_of, data_of, settings, train
from scripts.bench.report import page
from scripts.bench.study import Option, run_options

log = logging.getLogger(__name__)
TITLE = "Training with every router"
VOCABULARY = 512  # larger than any token id of the hosts
# The bounds of balance apply after this number of steps. Before, the initial weights determine it.
BALANCED_AFTER = 100
SWITCH = {"switch": 0.01}


@dataclass(frozen=True)
class Gate:
    """The settings used to train with one router.

    Attributes:
        most: upper bound on the largest expert load divided by the mean load at the end of
            training.
        router: settings of the `router` section.
        losses: weights of the balance losses.
        capacity: capacity factor of the padded dispatcher. None means that no tokens are dropped.
        top_k: number of experts per token.
        apart: whether each rank counts as a separate node.
    """

    most: float
    router: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    capacity: float | None = 1.25
    top_k: int = 2
    apart: bool = False


# The bound is 3 for routers that send equal tokens to equal experts, because a third of the text
# consists of spaces. topology_quota and ta_moe have no effect on one node, so each rank counts as a
# node.
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


def faults(row: dict[str, Any]) -> list[str]:
    """Return a list of texts that describe the bounds exceeded by a run."""
    found = [] if row["last_loss"] < 0.8 * row["first_loss"] else [
        "the loss changed only from {first_loss:.3f} to {last_loss:.3f}".format(**row)]
    if row["steps"] >= BALANCED_AFTER and row["busiest"] > row["most"]:
        found.append("the busiest expert has {busiest:.2f} times the mean load; the bound is {most}"
                     .format(**row))
    return found


def counts(host: str, corpus: Path) -> list[int]:
    """Return the number of occurrences of each token id in a host's training text."""
    if host == "megatron":
        seen = Counter((corpus / "train.txt").read_bytes())
        return [seen[i] for i in range(VOCABULARY)]
    found = [0] * VOCABULARY
    for i, line in enumerate((corpus / "dict.txt").read_text(encoding="utf-8").splitlines()):
        found[i + 4] = int(line.rsplit(" ", 1)[1])  # fairseq has four special symbols before
    return found


def settings_file(name: str, host: str, corpus: Path, folder: Path) -> Path:
    """Write the router's settings as YAML to a folder next to the run's folder."""
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


def run(name: str, host: str, s: dict[str, Any], data: Path, corpus: Path,
        folder: Path) -> dict[str, Any]:
    """Train with one router in one host and return the results. Losses are in nats per byte.
    `busiest` (the largest expert load divided by the mean load) and `drops` are read from the last
    record, for the worst layer.
    """
    extra = ["--moe-config", str(settings_file(name, host, corpus, folder))]
    command = command_of(host, s, data, folder)
    if host == "fairseq":
        i = command.index("--moe-capacity-factor")
        del command[i : i + 2]  # the flag would override the settings file
        command += [*extra, "--moe-gate-loss-wt", "1", "--moe-gate-loss-combine-method", "sum"]
    else:
        command += [*extra, "--moe-aux-loss-coeff", "0", "--moe-router-topk",
                    str(GATES[name].top_k)]
        if name == "sigmoid_bias":
            command += ["--moe-router-score-function", "sigmoid"]
        if GATES[name].top_k == 1:
            command += ["--moe-router-pre-softmax"]  # Megatron requires this flag for k = 1
    result = train(host, folder, command, s["steps"])
    last = last_records(folder)
    return {
        "gate": name, "host": host,
        **{key: result[key] for key in ("steps", "first_loss", "last_loss", "valid_loss")},
        "busiest": max(row["max_over_mean"] for row in last), "most": GATES[name].most,
        "drops": max(row["drop_fraction"] for row in last),
        "step_ms": 1e3 * s["ranks"] * s["batch"] * s["length"] / result["tokens_per_s"]}


def last_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the last step that has layer statistics, one per layer."""
    rows = [
        json.loads(line)
        for line in (folder / "stats.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    rows = [row for row in rows if "load" in row]
    return [row for row in rows if row["step"] == max(r["step"] for r in rows)]


def body(found: dict[str, Any]) -> list[str]:
    rows = [{**row, "valid": "-" if row["valid_loss"] is None else f"{row['valid_loss']:.3f}"}
            for row in found["rows"]]
    gates = [{
        "name": name, "gate": gate,
        "capacity": "dropless" if gate.capacity is None else f"{gate.capacity:g}",
        "losses": ", ".join(f"{loss} {weight:g}" for loss, weight in gate.losses.items()) or "-",
        "router": json.dumps(gate.router) if gate.router else "-"} for name, gate in GATES.items()]
    return page(__name__, found, results=rows, gates=gates, s=settings(rows[0]["steps"]),
                note=found.get("note", ""))


OPTIONS = {
    "steps": Option(100, "number of steps of each run", quick=20),
    "gates": Option(tuple(GATES), "routers to train", quick=("topk",), choices=GATES),
    "hosts": Option(HOSTS, "hosts that train", choices=HOSTS),
    **run_options("gates"),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    place, corpus, about = begin(args)
    rows = []
    for host in args.hosts:
        data = data_of(host, corpus)
        for name in args.gates:
            rows.append(run(name, host, settings(args.steps), data, corpus,
                            place / f"{name}-{host}"))
            log.info("%s in %s: %s", name, host, faults(rows[-1]) or "within its bounds")
    return {**about, "rows": sorted(rows, key=lambda row: list(GATES).index(row["gate"]))}


def failures(found: dict[str, Any]) -> list[str]:
    return [f"{row['gate']} in {row['host']}: {fault}" for row in found["rows"]
            for fault in faults(row)]
