"""`moe-plugin profile-device`: measure this processor into a file for `plan` and `parallel: auto`.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from moe_plugin.regular_files import check_output, write_regular


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    p.description = ("Times matmuls of few and many rows, copies and the smallest operation, as "
                     "one rank sees them.")
    p.add_argument("--device", default="cpu", help="torch device (default: %(default)s)")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"),
                   help="of the matmuls (default: %(default)s)")
    p.add_argument("--model-dim", type=int, default=512,
                   help="width of a token (default: %(default)s)")
    p.add_argument("--hidden-dim", type=int, default=2048,
                   help="inner width of an expert (default: %(default)s)")
    p.add_argument("--out", type=Path, default=Path("device.yaml"), metavar="FILE",
                   help="file to write (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure and write."""
    import torch
    import yaml

    from moe_plugin.lab.bench.device import measure_device
    from moe_plugin.planner.units import show_time

    check_output(args.out)
    found = measure_device(args.device, getattr(torch, args.dtype), args.model_dim, args.hidden_dim)
    values = {
        k: v if isinstance(v, str) else float(f"{v:.4g}")
        for k, v in dataclasses.asdict(found).items()
    }
    text = (f"# Measured by `moe-plugin profile-device`: {args.dtype} on {args.device}, width "
            f"{args.model_dim}, inner width {args.hidden_dim}.\n")
    write_regular(args.out, text + yaml.safe_dump(values, sort_keys=False))
    print(f"{args.out}: {found.flops / 1e9:.1f} GFLOP/s, half of it at {found.half_rows:.0f} rows, "
          f"{found.memory_bytes_s / 1e9:.1f} GB/s, {show_time(found.launch_s)} per operation")
    return 0
