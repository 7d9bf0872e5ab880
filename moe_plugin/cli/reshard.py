"""`moe-plugin reshard`: a checkpoint in another format, or for other numbers of ranks."""

from __future__ import annotations

import argparse
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SIZES = {
    "world": "ranks in total (fairseq: data-parallel ranks)", "ep": "expert-parallel ranks",
    "tp": "tensor-parallel ranks", "pp": "pipeline stages", "etp": "expert-tensor-parallel ranks",
    "shards": "ranks over which each expert is cut",
}
DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    from moe_plugin.checkpoint import trust
    from moe_plugin.checkpoint.formats.all import formats

    p.description = ("Writes the checkpoint IN as the folder OUT, tensor by tensor. A conversion "
                     "that was interrupted goes on where it stopped when the same command is given "
                     "again; OUT gets its name when it is complete.")
    p.add_argument("source", metavar="IN", type=Path, help="folder or file of a checkpoint")
    p.add_argument("target", metavar="OUT", type=Path, help="folder to write")
    add_source_options(p)
    p.add_argument("--to", choices=formats.names(), help="format (default: that of IN)")
    for name, text in SIZES.items():
        p.add_argument(f"--{name}", type=int, metavar="N", help=text)
    p.add_argument("--dtype", choices=DTYPES,
                   help="of the model's tensors (default: as they are); optimizer state keeps its")
    p.add_argument("--model-only", action="store_true", help="leave optimizer state out")
    p.add_argument("--force", action="store_true", help="replace another folder at OUT")
    p.add_argument("--trust", trust.FLAG, action="store_true",
                   help="read files that hold other classes than listed ones, which can run code")


def add_source_options(p: argparse.ArgumentParser) -> None:
    """The option of a checkpoint's format."""
    from moe_plugin.checkpoint.formats.all import formats

    p.add_argument("--from", dest="origin", choices=formats.names(),
                   help="format of the checkpoint (default: found out)")


def run(args: argparse.Namespace) -> int:
    """Convert, and say what was written, how fast, and in how much memory."""
    import torch

    from moe_plugin.checkpoint.conversion import Conversion
    from moe_plugin.checkpoint.formats.base import CheckpointSizes, formats, open_source
    from moe_plugin.planner.units import show_size, show_time

    sizes = {name: vars(args)[name] for name in SIZES}
    dtype = args.dtype and getattr(torch, args.dtype)  # one of DTYPES
    layout = CheckpointSizes(**sizes, dtype=dtype)
    start = time.perf_counter()
    with open_source(args.source, args.origin, args.trust) as source:
        to = args.to or source.format
        reads = sum(path.stat().st_size for path in source.files())
        writes = formats.get(to)().nbytes(source, layout)
        with _bar(reads + writes) as advance:
            conversion = Conversion(source, args.target, to, layout, args.model_only, args.force,
                                    advance)
            written = conversion.run()
        origin = source.format
    if not written:
        print(f"{args.target}: there already, complete")
        return 0
    size = sum(path.stat().st_size for path in args.target.rglob("*") if path.is_file())
    seconds = time.perf_counter() - start
    kept = f", {len(conversion.kept)} files kept of an earlier try" if conversion.kept else ""
    print(f"{args.target}: {origin} to {to}, {show_size(size)} in "
          f"{show_time(seconds)} ({show_size(size / seconds)}/s){kept}; "
          f"peak memory {show_size(peak_bytes())}")
    return 0


def peak_bytes() -> int:
    """The most memory that this process had, mapped file pages included."""
    try:  # of this program alone; the other figure includes what ran before it in the process
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar of rich on a terminal, where it is installed."""
    try:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
    except ImportError:
        yield lambda _: None
        return
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("reshard", total=total)
        yield lambda nbytes: progress.advance(task, nbytes)
