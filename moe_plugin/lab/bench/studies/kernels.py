"""Every operation of the layer at one layer's sizes: time of each implementation that runs here,
and its bound, the larger of bytes over the measured copy bandwidth and FLOPs over the measured rate
of one large matmul.
"""

from __future__ import annotations

import argparse
from typing import Any

from moe_plugin.lab.bench import kernels, report
from moe_plugin.lab.bench.kernels import KernelReport
from moe_plugin.lab.bench.options import add_problem, problem_of

add_arguments = add_problem


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One problem."""
    return kernels.run(problem_of(args), args.rounds).as_dict()


def show(found: dict[str, Any]) -> str:
    """Its table."""
    return report.kernel_table(KernelReport.from_dict(found))


def page(found: dict[str, Any]) -> str:
    """The table, with what it was measured with."""
    return report.page("Operations of one layer", "moe-plugin bench kernels", found["versions"],
                       show(found))
