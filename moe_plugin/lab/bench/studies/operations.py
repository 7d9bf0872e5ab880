"""Every operation of the layer on all problems of the page: time of each implementation that runs
here, and its bound, the larger of bytes over the measured copy bandwidth and FLOPs over the
measured rate of one large matmul.
"""

from __future__ import annotations

import argparse
from typing import Any

from moe_plugin.lab.bench import kernels, report
from moe_plugin.lab.bench.kernels import KernelReport
from moe_plugin.lab.bench.layers import OPTIONS, problems  # noqa: F401


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The first three problems."""
    return [kernels.run(one, args.rounds).as_dict() for one in problems(args)[:3]]


def page(found: list[dict[str, Any]]) -> str:
    """A table of each problem."""
    body = "\n\n".join(report.kernel_table(KernelReport.from_dict(one)) for one in found)
    return report.page("Each operation and its bound", "moe-plugin bench operations",
                       found[0]["versions"], body)
