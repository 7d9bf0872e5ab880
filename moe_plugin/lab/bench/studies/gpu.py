"""Layers with every installed peer, and operations, on one GPU and one page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from moe_plugin.lab.bench import kernels, report
from moe_plugin.lab.bench.kernels import KernelReport
from moe_plugin.lab.bench.layer import LayerReport
from moe_plugin.lab.bench.layers import OPTIONS as OF_LAYERS
from moe_plugin.lab.bench.layers import layers, problems
from moe_plugin.lab.bench.study import Option

OPTIONS = OF_LAYERS | {"checks": Option("", "a file whose text the page shows, too")}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All problems of the layers, the first three of the operations."""
    found = [one.as_dict() for one in layers(problems(args), args.rounds, args.attempts)]
    measured = [kernels.run(one, args.rounds).as_dict() for one in problems(args)[:3]]
    checks = Path(args.checks).read_text(encoding="utf-8").strip() if args.checks else ""
    return {"layers": found, "operations": measured, "checks": checks}


def page(found: dict[str, Any]) -> str:
    """All tables."""
    parts = [report.layer_table(LayerReport.from_dict(one)) for one in found["layers"]]
    parts += [report.kernel_table(KernelReport.from_dict(one)) for one in found["operations"]]
    if found["checks"]:
        parts.append(f"Checked on the same GPU before:\n\n```text\n{found['checks']}\n```")
    return report.page("One GPU", "bash scripts/bench_gpu.sh", found["layers"][0]["versions"],
                       "\n\n".join(parts))
