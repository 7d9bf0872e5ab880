"""`moe-plugin inspect`: what a checkpoint holds, without its tensors."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    from moe_plugin.checkpoint import trust
    from moe_plugin.cli.reshard import add_source_options

    p.description = ("Shows format, step, layout, layers, experts, data types, sizes and settings "
                     "of a checkpoint. No tensor is read, no checksum verified.")
    p.add_argument("checkpoint", metavar="CKPT", type=Path, help="folder or file of a checkpoint")
    add_source_options(p)
    p.add_argument("--json", action="store_true", help="as JSON, with every tensor")
    p.add_argument("--trust", trust.FLAG, action="store_true",
                   help="read files that hold other classes than listed ones, which can run code")


def run(args: argparse.Namespace) -> int:
    """Open and print."""
    import moe_plugin.checkpoint.formats.all  # noqa: F401 - registers
    from moe_plugin.checkpoint.formats.base import open_source
    from moe_plugin.checkpoint.inspection import summary

    with open_source(args.checkpoint, args.origin, args.trust) as source:
        found = summary(source)
    if args.json:
        print(json.dumps(found, indent=1, default=str))
        return 0
    for line in _lines(found):
        print(line)
    return 0


def _lines(found: Mapping[str, Any]) -> list[str]:
    from moe_plugin.planner.units import show_size

    layout = ", ".join(f"{name} {value}" for name, value in found["layout"].items())
    lines = [f"format     {found['format']}", f"step       {_or(found['step'])}",
             f"layout     {layout or 'one file'}",
             f"files      {found['files']}, {show_size(found['file_bytes'])}"]
    for name, column in found["fields"].items():
        dtypes = ", ".join(f"{dtype} {show_size(size)}" for dtype, size in column["dtypes"].items())
        lines.append(f"{name:<10} {column['tensors']} tensors, {column['elements']:,} elements: "
                     f"{dtypes}")
    for prefix, layer in found["layers"].items():
        shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape in layer["experts"].items())
        lines.append(f"MoE layer  {prefix or '(the model)'} {layer['num_experts']} experts: "
                     f"{shapes}")
    if not found["layers"]:
        lines.append("MoE layer  none")
    return [*lines, *_settings(found["settings"])]


def _or(value: Any) -> Any:
    return "not known" if value is None else value


def _settings(settings: Any) -> list[str]:
    if not settings:
        return ["settings   not stored"]
    if not isinstance(settings, Mapping):
        return [f"settings   {settings}"]
    return ["settings", *(f"  {name} = {value}" for name, value in settings.items())]
