"""The doctor's report: collected as plain data, rendered as text."""

from __future__ import annotations

import textwrap
from typing import Any

import torch

from moe_plugin import __version__
from moe_plugin.cli.doctor import hardware, packages, registries, selfcheck
from moe_plugin.utils.messages import aligned


def first() -> dict[str, Any]:
    """What says whether the layer works, ready for JSON. `works`: whether the self check passed."""
    gpu = torch.cuda.is_available()
    checks = selfcheck.check_rows([torch.device("cpu"),
                                   *([torch.device("cuda")] if gpu else [])])
    return {
        "moe_plugin": __version__, **hardware.environment(),
        "works": bool(checks) and all(row["ok"] for row in checks), "self_check": checks,
        "devices": hardware.devices(), "unused_gpu": hardware.unused_gpu(),
        "compiled": hardware.compiled(), "packages": packages.package_rows(gpu),
    }


def rest(everything: bool) -> dict[str, Any]:
    """What a verdict does not need: what is missing and why, and what was measured and kept.

    everything: False: nothing of it.
    """
    if not everything:
        return {}
    return {
        "failed_imports": registries.import_everything(), "fused": packages.fused_rows(),
        "missing": registries.missing_rows(), "runs": registries.run_rows(),
        "expert_compute_choices": registries.choice_rows(),
    }


def verdict(report: dict[str, Any]) -> str:
    """The first lines: what was checked, and whether the layer works."""
    checks = report["self_check"]
    differences = [d for row in checks for d in (row["output_error"], row["gradient_error"])
                   if d is not None]
    worst = f", largest relative difference {max(differences):.0e}" if differences else ""
    what = (f"{sum(row['ok'] for row in checks)} of {len(checks)} checks agree with a dense "
            f"computation{worst}")
    return "\n".join([
        f"Verdict: the layer {'works' if report['works'] else 'does NOT work'} here ({what}).",
        f"moe-plugin {report['moe_plugin']}, Python {report['python']}, {report['platform']}"])


def problems(report: dict[str, Any]) -> list[str]:
    """What is wrong, a line each."""
    return [
        *(f"self check, {row['device']} {row['dtype']}, dispatch.name={row['dispatcher']}, "
          f"{_ranks(row)}: {row['reason']}" for row in report["self_check"] if not row["ok"]),
        *(f"{row['module']} does not import: {row['reason']}"
          for row in report.get("failed_imports", [])),
        *(f"{row['name']} {row['version']}: {row['reason']}" for row in report["hosts"]
          if row["version"] and row["state"] != "available"),
        *([report["unused_gpu"]] if report.get("unused_gpu") else []),
        *(f"{row['name']}: {row['what']}, which is slower" for row in report["compiled"]
          if row["state"] != "active"),
    ]


def render(report: dict[str, Any]) -> str:
    """What follows the verdict, as text: problems first."""
    found = problems(report)
    parts = [
        "\n".join(["Problems:", *(f"  {line}" for line in found)]) if found else "Problems: none",
        _table("Devices", report["devices"], "name", "state", "what"),
        _table("Hosts", report["hosts"], "name", "version", "state", "reason"),
        _missing(report), *(_everything(report) if "missing" in report else [
            "Packages, what cannot run here, what hosts lack, kept decisions: moe-plugin doctor "
            "--all"])
    ]
    return "\n\n".join(part for part in parts if part)


def _everything(report: dict[str, Any]) -> list[str]:
    return [
        _table("Compiled for this CPU (docs/kernels.md)", report["compiled"], "name", "state",
               "what"),
        _table("Packages", report["packages"], "name", "version", "state", "use"),
        _table("What the hosts use for optimizers, norms and gradients, and why",
               report["fused"], "name", "state", "reason"),
        _table("Names that cannot be chosen here, and why", report["missing"], "kind", "name",
               "reason"),
        _table("What hosts do around a run's steps, and why another does not",
               [{**r, "what": _short(r["what"], 110)} for r in report["runs"]],
               "name", "state", "what"),
        _table("Kept decisions: how auto computes experts, with the age and the spread of its "
               "measurements (docs/kernels.md). moe-plugin doctor --forget-decisions removes them",
               [{**r, "load": _load(r["load"]), "age": f"{r['age']} ago",
                 "spread": f"spread {r['spread']}"} for r in report["expert_compute_choices"]]
               or [{"name": "none yet"}], "name", "load", "why", "age", "spread"),
        _table("Self check: largest relative difference from a dense computation",
               [_check(r) for r in report["self_check"]],
               "device", "dtype", "dispatcher", "ranks", "verdict", "what"),
    ]


def _table(title: str, rows: list[dict[str, Any]], *keys: str) -> str:
    cells = [[row.get(key) or ("-" if key == "version" else "") for key in keys] for row in rows]
    return "\n".join([title, textwrap.indent(aligned(cells), "  ")])


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


def _check(row: dict[str, Any]) -> dict[str, Any]:
    what = row["reason"] if row["output_error"] is None else (
        f"output {row['output_error']:.0e}, gradients {row['gradient_error']:.0e}")
    return {**row, "ranks": _ranks(row), "verdict": "good" if row["ok"] else "FAILED", "what": what}


def _ranks(row: dict[str, Any]) -> str:
    return f"{row['ranks']} rank" + "s" * (row["ranks"] > 1)


def _missing(report: dict[str, Any]) -> str:
    lines = [f"  {r['name']} ({r['use']}):\n    {r['install']}"
             for r in report["packages"] if r["install"]]
    return "\n".join(["Missing, and the command that installs it", *lines]) if lines else ""


def _load(load: str) -> str:
    """The load alone; `why` has the candidates, `--json` has device and versions, too."""
    return load.split(": ", 1)[-1].split(", of ")[0]
