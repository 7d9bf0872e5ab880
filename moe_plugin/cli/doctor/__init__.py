"""`moe-plugin doctor`, which checks whether the MoE layer works on this machine and which packages
are missing.

The command also prints the commands that install the missing packages. With `--all`, it also prints
all packages, the features that each host does not support, and the stored measurements.

The exit status is 0 if the layer works, and 1 otherwise. The check runs a small forward and
backward pass of the layer and compares the results with a dense computation. The report is
collected as plain values and then formatted as text.
"""

from __future__ import annotations

import argparse
import json
import platform
import textwrap
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin import MoEConfig, MoELayer, __version__
from moe_plugin.cli.doctor import packages
from moe_plugin.comm import LocalComm, run_simulated
from moe_plugin.comm.base import Comm
from moe_plugin.config import DispatchConfig
from moe_plugin.dispatch import dispatchers
from moe_plugin.tuning.compute_times import ChoiceFiles
from moe_plugin.utils.messages import aligned, tracked
from moe_plugin.utils.quiet import quiet

# the self check: a tiny forward and backward pass of every dispatcher, compared in float64
TOKENS, WIDTH, EXPERTS, RANKS = 24, 16, 4, 2
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def check_rows(kinds: list[torch.device]) -> list[dict[str, Any]]:
    """Check the layer on each device. Return one row for each combination of device, dtype,
    dispatcher and number of (simulated) ranks.

    Each row contains the largest relative error of the output, the largest relative error of the
    gradients, and whether both errors are within the tolerance. On a GPU, the layer is checked only
    with a single rank. With several simulated ranks, the backward passes would deadlock, because
    torch runs all backward passes on a GPU in a single thread.
    """
    cases = []
    for device in kinds:
        on_cpu = device.type == "cpu"
        for dtype in (torch.float32,) if on_cpu else (torch.float32, torch.bfloat16):
            for entry in dispatchers:
                if entry.why_not() is None:
                    cases += [(device, dtype, entry.name, ranks)
                              for ranks in ((1, RANKS) if on_cpu else (1,))]
    return [_row(*case) for case in tracked(cases, "self check", "check")]


def _row(device: torch.device, dtype: torch.dtype, dispatcher: str, ranks: int) -> dict[str, Any]:
    row = {"device": str(device), "dtype": str(dtype).removeprefix("torch."),
           "dispatcher": dispatcher, "ranks": ranks}
    try:
        output, gradients = _errors(device, dtype, dispatcher, ranks)
    except Exception as error:  # noqa: BLE001 - the report shows any failure
        return {**row, "ok": False, "output_error": None, "gradient_error": None,
                "reason": f"{type(error).__name__}: {error}"}
    ok = max(output, gradients) <= TOLERANCE[dtype]
    reason = f"differs from the dense computation by more than {TOLERANCE[dtype]}"
    return {**row, "ok": ok, "output_error": output, "gradient_error": gradients,
            "reason": None if ok else reason}


def _errors(device: torch.device, dtype: torch.dtype, dispatcher: str,
            ranks: int) -> tuple[float, float]:
    # capacity 0 never drops tokens and fits every dispatcher; the default needs no capacity
    factor = None if dispatcher == DispatchConfig().name else 0.0
    config = MoEConfig(model_dim=WIDTH, num_experts=EXPERTS,
                       dispatch=DispatchConfig(name=dispatcher, capacity_factor=factor))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = MoELayer(config, LocalComm(), dtype=dtype, device=device)
        x_TD = torch.randn(TOKENS, WIDTH).to(device, dtype)
        target_TD = torch.randn(TOKENS, WIDTH).to(device, dtype)
        # some dispatchers require that all ranks have the same tokens
        same_tokens = dispatchers.get(dispatcher).traits.shares_tokens

        def piece(x_TD: Tensor, comm: Comm) -> Tensor:
            return x_TD if same_tokens else x_TD.chunk(comm.size)[comm.rank]

        shards = run_simulated(
            ranks, lambda comm: _run(_share(whole, config, comm), piece(x_TD, comm),
                                     piece(target_TD, comm)))
        if same_tokens:
            shards = [
                shard if rank == 0 else (shard[0][:0], shard[1][:0], *shard[2:])
                for rank, shard in enumerate(shards)
            ]
        out_TD, *gradients = (torch.cat(parts) for parts in zip(*shards, strict=True))
        want_TD, *expected = dense(whole, x_TD, target_TD)
    errors = [_relative(g, w) for g, w in zip(gradients, expected, strict=True)]
    return _relative(out_TD, want_TD), max(errors)


def _share(whole: MoELayer, config: MoEConfig, comm: Comm) -> MoELayer:
    """Create this rank's layer and copy its share of the weights from the full layer `whole`."""
    weight_ED = whole.router.get_parameter("weight_ED")
    layer = MoELayer(config, comm, dtype=weight_ED.dtype, device=weight_ED.device)
    first, local = comm.rank * layer.placement.local, layer.placement.local
    with torch.no_grad():
        layer.router.get_parameter("weight_ED").copy_(weight_ED)
        for shard, full in zip(layer.experts.parameters(), whole.experts.parameters(), strict=True):
            shard.copy_(full[first : first + local])
    return layer


def _run(layer: MoELayer, x_TD: Tensor, target_TD: Tensor) -> tuple[Tensor, ...]:
    """Compute one forward and backward pass with the loss `sum(output * target)`.

    Return the output [T, D], the input gradient [T, D], and the gradients of both expert matrices.
    """
    x_TD = x_TD.clone().requires_grad_()
    experts: Any = layer.experts
    out_TD = layer(x_TD).output
    (out_TD * target_TD).sum().backward()
    assert x_TD.grad is not None
    return out_TD.detach(), x_TD.grad, experts.w_in_LDF.grad, experts.w_out_LFD.grad


def dense(layer: MoELayer, x_TD: Tensor, target_TD: Tensor) -> tuple[Tensor, ...]:
    """Compute the same results as `_run` in float64, by applying every expert to every token.

    The output for token `t` is `y[t] = sum_e weight[t, e] * FFN_e(x[t])`. Both `x_TD` and
    `target_TD` have the shape [T, D] and any floating dtype.
    """
    layer, x_TD = deepcopy(layer).double(), x_TD.detach().double().requires_grad_()
    routing = layer.router(x_TD)
    weight_TE = torch.zeros(x_TD.shape[0], EXPERTS, dtype=torch.float64, device=x_TD.device)
    weight_TE = weight_TE.scatter(1, routing.ids_TK, routing.weights_TK)
    e: Any = layer.experts
    out_TD = x_TD.new_zeros(x_TD.shape)
    for i in range(EXPERTS):
        inner_TF = F.gelu(x_TD @ e.w_in_LDF[i] + e.bias_in_LF[i])
        out_TD = out_TD + weight_TE[:, i, None] * (inner_TF @ e.w_out_LFD[i] + e.bias_out_LD[i])
    (out_TD * target_TD.double()).sum().backward()
    assert x_TD.grad is not None
    return out_TD.detach(), x_TD.grad, e.w_in_LDF.grad, e.w_out_LFD.grad


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


def first() -> dict[str, Any]:
    """Collect the results of the self-check and the properties of the environment as plain values
    for JSON. The value `works` is True if all checks of the layer passed.
    """
    gpu = torch.cuda.is_available()
    checks = check_rows([torch.device("cpu"), *([torch.device("cuda")] if gpu else [])])
    return {
        "moe_plugin": __version__, "python": platform.python_version(),
        "platform": platform.platform(),
        "works": bool(checks) and all(row["ok"] for row in checks), "self_check": checks,
        "devices": packages.devices(), "unused_gpu": packages.unused_gpu(),
        "compiled": packages.compiled(), "packages": packages.package_rows(gpu),
    }


def rest() -> dict[str, Any]:
    """Collect the sections that only the full report has."""
    return {
        "failed_imports": packages.import_everything(), "fused": packages.fused_rows(),
        "missing": packages.missing_rows(), "runs": packages.run_rows(),
        "refused": packages.refusal_rows(),
        "expert_compute_choices": packages.choice_rows(),
    }


def verdict(report: dict[str, Any]) -> str:
    """Return the first lines of the report: the checks, and whether the layer works."""
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
    """Return one line for each problem that the report contains."""
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
    """Format the report, except for its first lines. Problems come first."""
    wrong = problems(report)
    parts = [
        "\n".join(["Problems:", *(f"  {line}" for line in wrong)]) if wrong else "Problems: none",
        _table("Devices", report["devices"], "name", "state", "what"),
        _table("Hosts", report["hosts"], "name", "version", "state", "reason"),
        _missing(report), *(_everything(report) if "missing" in report else [
            "moe-plugin doctor --all also shows packages, what cannot run here, what hosts lack or "
            "refuse, and kept decisions"])
    ]
    return "\n\n".join(part for part in parts if part)


def _everything(report: dict[str, Any]) -> list[str]:
    return [
        _table("Compiled for this CPU (docs/kernels.md)", report["compiled"], "name", "state",
               "what"),
        _table("Packages", report["packages"], "name", "version", "state", "use"),
        _table("What the hosts use for optimizers, norms and gradients, and why",
               report["fused"], "name", "state", "reason"),
        _table("Names that cannot be selected here, and why", report["missing"], "kind", "name",
               "reason"),
        _table("Features around a run's steps: the hosts that support them, and why others do not",
               [{**r, "what": _short(r["what"], 110)} for r in report["runs"]],
               "name", "state", "what"),
        _table("Settings that a host refuses together (docs/refusals_HOST.md)",
               [{**r, "what": _short(r["what"], 110)} for r in report["refused"]],
               "host", "name", "what"),
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
    text = row["reason"] if row["output_error"] is None else (
        f"output {row['output_error']:.0e}, gradients {row['gradient_error']:.0e}")
    return {**row, "ranks": _ranks(row), "verdict": "good" if row["ok"] else "FAILED", "what": text}


def _ranks(row: dict[str, Any]) -> str:
    return f"{row['ranks']} rank" + "s" * (row["ranks"] > 1)


def _missing(report: dict[str, Any]) -> str:
    lines = [f"  {r['name']} ({r['use']}):\n    {r['install']}"
             for r in report["packages"] if r["install"]]
    return "\n".join(["Missing packages, with install commands", *lines]) if lines else ""


def _load(load: str) -> str:
    """Shorten the text that describes the load of a measurement. The omitted details are shown in
    other columns and in the output of `--json`.
    """
    return load.split(": ", 1)[-1].split(", of ")[0]


def doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin doctor`."""
    parser.description = ("Checks whether the layer works in this installation, and lists problems "
                          "and missing packages. The exit status is 0 if the layer works, and "
                          "otherwise 1.")
    parser.add_argument("--all", action="store_true",
                        help="also show packages, names that cannot be selected here, features "
                             "that hosts lack, settings that hosts refuse together, and the stored "
                             "measurements of auto")
    parser.add_argument("--forget-decisions", action="store_true",
                        help="only delete the stored measurements of auto on this machine, so that "
                             "later runs measure again")
    parser.add_argument("--json", action="store_true",
                        help="print everything as one JSON object instead of text")


def doctor(args: argparse.Namespace) -> int:
    """Run the checks. Print whether the layer works. Then collect and print the sections of the
    report that take longer to compute.

    Returns: 0 if the layer works, and 1 otherwise.
    """
    if args.forget_decisions:
        files = ChoiceFiles()
        print(f"{files.forget_all()} kept decisions removed from {files.place()}")
        return 0
    # quiet, because the self check's simulated groups log their choices; hosts are checked in
    # parallel, because importing them takes longest
    with quiet(), ThreadPoolExecutor(1) as background:
        imports = background.submit(packages.host_rows)
        report = first()
        if not args.json:
            print(verdict(report), flush=True)
        if args.all or args.json:
            report |= rest()
        report["hosts"] = imports.result()
    print(json.dumps(report, indent=1) if args.json else render(report))
    return 0 if report["works"] else 1
