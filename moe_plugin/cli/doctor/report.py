"""The doctor's report: collected as plain data, rendered as text."""

from __future__ import annotations

from typing import Any

import torch

from moe_plugin import __version__
from moe_plugin.cli.doctor import hardware, hosts, packages, registries, selfcheck


def collect() -> dict[str, Any]:
    """Everything, JSON-ready. `works` is the self check's verdict."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    failed_imports = registries.import_everything()
    checks = selfcheck.check_rows([torch.device("cpu"), *([device] if gpu else [])])
    return {
        "moe_plugin": __version__, **hardware.environment(), "works": bool(checks)
        and all(row["ok"] for row in checks), "self_check": checks, "devices": hardware.devices(),
        "backends": hardware.backends(), "hosts": hosts.host_rows(), "fused": hosts.fused_rows(),
        "packages": packages.package_rows(gpu), "registries": registries.registry_rows(device),
        "failed_imports": failed_imports, "expert_compute_choices": registries.choice_rows(),
    }


def render(report: dict[str, Any]) -> str:
    """The report for a person."""
    parts = [f"moe-plugin {report['moe_plugin']}, Python {report['python']}, {report['platform']}"]
    parts.append(_table("Devices", [(r["name"], r["state"], r["what"]) for r in report["devices"]]))
    parts.append(
        _table("torch.distributed",
               [(r["name"], r["state"], r["what"]) for r in report["backends"]]))
    parts.append(
        _table("Packages", [(r["name"], r["version"] or "-", r["state"], r["use"])
                            for r in report["packages"]]))
    parts.append(
        _table("Hosts", [(r["name"], r["version"] or "-", r["state"], r["reason"] or "")
                         for r in report["hosts"]]))
    parts.append(
        _table("Fused parts the hosts use by themselves where they import",
               [(r["name"], r["state"], r["reason"] or r["use"]) for r in report["fused"]]))
    parts.append("Registered names (active: used by the default settings on this machine)")
    parts += [_kind(kind, rows) for kind, rows in report["registries"].items()]
    parts.append(
        _table(
            "Ways to compute experts that auto has measured (for other loads it goes by rule: "
            "docs/kernels.md)",
            [(r["name"], _load(r["load"]), r["why"]) for r in report["expert_compute_choices"]]
            or [("none yet",)]))
    parts.append(
        _table("Self check: largest relative difference from a dense computation",
               [_check_line(r) for r in report["self_check"]]))
    parts.append(_missing(report))
    parts.append("Verdict: the layer works here." if report["works"] else
                 "Verdict: the layer does NOT work here; the self check above says what is wrong.")
    return "\n\n".join(part for part in parts if part)


def _table(title: str, rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = [
        "  " + "  ".join(cell.ljust(width)
                         for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([title, *lines])


def _kind(kind: str, rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        lines.append((row["name"], row["state"], row["reason"] or row["summary"]))
        if "implementations" in row:
            lines[-1] = (row["name"], ", ".join(_implementation(i)
                                                for i in row["implementations"]), row["summary"])
    return _table(f"  {kind}",
                  [("  " + name, _short(state, 80), _short(text, 110 if kind != "kernel" else 80))
                   for name, state, text in lines])


def _short(text: str, width: int = 110) -> str:
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


def _implementation(row: dict[str, Any]) -> str:
    return f"{row['name']} {row['state']}" + (f" ({row['reason']})" if row["reason"] else "")


def _check_line(row: dict[str, Any]) -> tuple[str, ...]:
    where = (row["device"], row["dtype"], row["dispatcher"],
             f"{row['ranks']} rank" + ("s" if row["ranks"] > 1 else ""))
    if row["output_error"] is None:
        return (*where, "FAILED", row["reason"])
    return (*where, "good" if row["ok"] else "FAILED",
            f"output {row['output_error']:.0e}, gradients {row['gradient_error']:.0e}")


def _missing(report: dict[str, Any]) -> str:
    lines = [
        f"  {r['name']} ({r['use']}):\n    {r['install']}" for r in report["packages"]
        if r["install"]
    ]
    lines += [f"  {r['module']} does not import: {r['reason']}" for r in report["failed_imports"]]
    return "\n".join(["Missing, and the command that adds it", *lines]) if lines else ""


def _load(load: str) -> str:
    """Without device, versions and the list of candidates, which `why` has; `--json` has all."""
    return load.split(": ", 1)[-1].split(", of ")[0]
