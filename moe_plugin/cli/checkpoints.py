"""Commands for checkpoints: `inspect`, `reshard`, `upcycle`, `check-hf`."""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_plugin.utils.messages import printable, short

SIZES = {
    "world": "ranks in total (fairseq: data-parallel ranks)", "ep": "expert-parallel ranks",
    "tp": "tensor-parallel ranks", "pp": "pipeline stages", "etp": "expert-tensor-parallel ranks",
    "shards": "ranks over which each expert is cut",
}
SCREEN, LAYERS, COLUMNS = 40, 8, 160  # what `inspect` prints without --all
WHOLE = 10_000  # characters of a line with --all
_OF_EXPERTS = re.compile("moe|expert|router|gate")


def _add_source_options(p: argparse.ArgumentParser) -> None:
    """The format of a checkpoint, and whether it is trusted."""
    from moe_plugin.checkpoint import trust
    from moe_plugin.checkpoint.formats.all import formats

    p.add_argument("--from", dest="origin", choices=formats.names(),
                   help="format of the checkpoint (default: found out)")
    p.add_argument("--trust", trust.FLAG, action="store_true",
                   help="read files that hold other classes than listed ones, which can run code")


def inspect_options(p: argparse.ArgumentParser) -> None:
    """`moe-plugin inspect`."""
    p.description = ("Shows format, step, layout, layers, experts, data types, sizes and settings "
                     "of a checkpoint. No tensor is read, no checksum verified.")
    p.add_argument("checkpoint", metavar="CKPT", type=Path, help="folder or file of a checkpoint")
    _add_source_options(p)
    p.add_argument("--json", action="store_true", help="as JSON, with every tensor")
    p.add_argument("--all", action="store_true",
                   help=f"print every layer and setting (default: at most {SCREEN} lines)")


def inspect(args: argparse.Namespace) -> int:
    """What a checkpoint holds, without its tensors."""
    import moe_plugin.checkpoint.formats.all  # noqa: F401 - registers
    from moe_plugin.checkpoint.formats.base import open_source
    from moe_plugin.checkpoint.inspection import summary

    with open_source(args.checkpoint, args.origin, args.trust) as source:
        found = summary(source)
    print(json.dumps(found, indent=1, default=str) if args.json
          else "\n".join(inspection_lines(found, args.all)))
    return 0


def inspection_lines(found: Mapping[str, Any], every: bool) -> list[str]:
    """What `inspect` prints of a checkpoint's `summary`; every: not only a screen of it."""
    from moe_plugin.planner.units import show_size

    layout = ", ".join(f"{name} {value}" for name, value in found["layout"].items())
    step = "not known" if found["step"] is None else found["step"]
    lines = [f"format     {found['format']}", f"step       {step}",
             f"layout     {layout or 'one file'}",
             f"files      {found['files']}, {show_size(found['file_bytes'])}"]
    if unsealed := found.get("files_without_checksum"):
        lines.append(f"checksums  none in {unsealed} of {found['files']} files: damage in "
                     "them goes unnoticed")
    for name, column in found["fields"].items():
        dtypes = ", ".join(f"{dtype} {show_size(size)}" for dtype, size in column["dtypes"].items())
        lines.append(f"{name:<10} {column['tensors']} tensors, {column['elements']:,} elements: "
                     f"{dtypes}")
    layers = []
    for prefix, layer in found["layers"].items():
        shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape in layer["experts"].items())
        layers.append(f"MoE layer  {prefix or '(the model)'} {layer['num_experts']} experts: "
                      f"{shapes}")
    layers = layers or ["MoE layer  none"]
    settings = found["settings"] or "not stored"
    if not isinstance(settings, Mapping):
        values = [f"settings   {settings}"]
    else:
        # settings of experts come first, because a screen may not show the others
        order = sorted(settings, key=lambda name: not _OF_EXPERTS.search(name))
        values = ["settings", *(f"  {name} = {settings[name]}" for name in order)]
    if every:
        return [printable(line, WHOLE) for line in (*lines, *layers, *values)]
    lines += _cut(layers, LAYERS, "layers")
    rest = _cut(values, max(4, SCREEN - len(lines)), "settings")
    return [line if len(line) <= COLUMNS else line[:COLUMNS - 4] + " ..."
            for line in map(printable, (*lines, *rest))]


def _cut(lines: list[str], most: int, what: str) -> list[str]:
    """At most so many lines; the last one says how many others there are."""
    if len(lines) <= most:
        return lines
    return [*lines[:most - 1], f"  and {len(lines) - most + 1} more {what} (--all prints them)"]


def reshard_options(p: argparse.ArgumentParser) -> None:
    """`moe-plugin reshard`."""
    from moe_plugin.checkpoint.formats.all import formats

    p.description = ("Writes the checkpoint IN as the folder OUT, tensor by tensor. A conversion "
                     "that was interrupted goes on where it stopped when the same command is given "
                     "again; OUT gets its name when it is complete.")
    p.add_argument("source", metavar="IN", type=Path, help="folder or file of a checkpoint")
    p.add_argument("target", metavar="OUT", type=Path, help="folder to write")
    _add_source_options(p)
    p.add_argument("--to", choices=formats.names(), help="format (default: that of IN)")
    for name, text in SIZES.items():
        p.add_argument(f"--{name}", type=int, metavar="N", help=text)
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"),
                   help="of the model's tensors (default: as they are); optimizer state keeps its")
    p.add_argument("--model-only", action="store_true", help="leave optimizer state out")
    p.add_argument("--force", action="store_true", help="replace another folder at OUT")


def reshard(args: argparse.Namespace) -> int:
    """Convert a checkpoint; say what was written, how fast, and in how much memory."""
    import torch

    from moe_plugin.checkpoint.conversion import Conversion
    from moe_plugin.checkpoint.formats.base import CheckpointSizes, formats, open_source
    from moe_plugin.planner.units import show_size, show_time
    from moe_plugin.utils.messages import progress

    layout = CheckpointSizes(**{name: vars(args)[name] for name in SIZES},
                             dtype=args.dtype and getattr(torch, args.dtype))
    start = time.perf_counter()
    with open_source(args.source, args.origin, args.trust) as source:
        to = args.to or source.format
        reads = sum(path.stat().st_size for path in source.files())
        writes = formats.get(to)().nbytes(source, layout)
        with progress(reads + writes, "reshard", unit="B") as bar:
            conversion = Conversion(source, args.target, to, layout, args.model_only, args.force,
                                    bar.update)
            written = conversion.run()
        origin = source.format
    if not written:
        print(printable(f"{args.target}: there already, complete"))
        return 0
    size = sum(path.stat().st_size for path in args.target.rglob("*") if path.is_file())
    seconds = time.perf_counter() - start
    kept = f", {len(conversion.kept)} files kept of an earlier try" if conversion.kept else ""
    print(printable(
        f"{args.target}: {origin} to {to}, {show_size(size)} in {show_time(seconds)} "
        f"({show_size(size / seconds)}/s){kept}; peak memory {show_size(peak_bytes())}"))
    return 0


def peak_bytes() -> int:
    """The most memory that this process had, mapped file pages included."""
    try:  # of this program alone; the other figure includes what ran before it in the process
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def upcycle_options(p: argparse.ArgumentParser) -> None:
    """`moe-plugin upcycle`."""
    p.description = (
        "Turns the MLPs of a dense checkpoint into experts that compute the same at first: copies, "
        "or with --granularity G pieces of it. Optimizer state is left out.")
    p.add_argument("source", type=Path, metavar="IN", help="dense checkpoint, of any format")
    p.add_argument("target", type=Path, metavar="OUT", help="folder to write; must not exist")
    p.add_argument("--experts", type=int, required=True, metavar="E",
                   help="experts of each MoE layer, a multiple of G")
    p.add_argument("--top-k", type=int, required=True, metavar="K",
                   help="experts per token, at least 2 and a multiple of G")
    p.add_argument("--granularity", type=int, default=1, metavar="G",
                   help="cut each MLP into G experts along its inner width (default: 1, copies)")
    p.add_argument("--shared", type=float, default=0.0, metavar="SHARE",
                   help="share of the MLP's output that a shared expert gives, from 0 to below 1 "
                        "(default: 0, none)")
    p.add_argument("--shared-gate", action="store_true",
                   help="give the shared expert a gate, as Qwen2-MoE has it")
    p.add_argument("--every", type=int, default=1, metavar="N",
                   help="make every Nth layer an MoE layer (default: 1, all)")
    for stack in ("encoder", "decoder"):
        p.add_argument(f"--{stack}-every", type=int, metavar="N",
                       help=f"the same of the {stack} of a fairseq translation model, 0: no layer "
                            "of it (default: as --every)")
    p.add_argument("--router-std", type=float, default=0.02, metavar="STD",
                   help="standard deviation of the routers' initial weights (default: 0.02)")
    p.add_argument("--seed", type=int, default=0, help="of the routers (default: 0)")
    _add_source_options(p)
    p.add_argument("--to", default=None, metavar="FORMAT", help="format of OUT (default: IN's)")


def upcycle(args: argparse.Namespace) -> int:
    """A dense checkpoint becomes a Mixture of Experts."""
    from moe_plugin.checkpoint.formats.all import formats
    from moe_plugin.checkpoint.formats.base import check_pair, convert, detect, open_source
    from moe_plugin.checkpoint.formats.fairseq import upcycling
    from moe_plugin.checkpoint.neutral import NEUTRAL
    from moe_plugin.checkpoint.upcycle import Upcycling, write_new
    from moe_plugin.checkpoint.upcycle import upcycle as upcycled

    plan = Upcycling(experts=args.experts, top_k=args.top_k, granularity=args.granularity,
                     shared=args.shared, shared_gate=args.shared_gate, every=args.every,
                     encoder_every=args.encoder_every, decoder_every=args.decoder_every,
                     router_std=args.router_std, seed=args.seed)
    name = args.origin or detect(args.source, args.trust)
    to = formats.get(args.to or name)()
    check_pair(name, to.name)
    with open_source(args.source, name, args.trust) as source:
        made = (upcycling.upcycle(source, plan) if upcycling.translates(source) else
                upcycled(convert(source, NEUTRAL), plan))
        write_new(convert(made, to.name), to, args.target)
    print(f"{args.target}: {len(made.layers)} MoE layers of {plan.experts} experts, "
          f"{plan.top_k} per token, format {to.name}")
    return 0


_THEIR_FAULTS = """\
Faults of transformers that a Trainer meets (docs/transformers.md#trainer):
  resuming leaves experts that are run by name as they were (issue 48805): start from
  from_pretrained(checkpoint), or use swap_moe_blocks, whose blocks resume
  the auxiliary loss is multiplied by ranks and accumulation steps (issue 48690): divide
  router_aux_loss_coef by their product"""


def check_hf_options(p: argparse.ArgumentParser) -> None:
    """`moe-plugin check-hf`."""
    p.description = (
        "Loads a Mixture-of-Experts model with transformers, computes logits of random tokens, "
        "puts our layer in place of its MoE blocks, computes them again and compares. Under "
        "torchrun the experts are spread over the ranks.")
    p.add_argument("model", type=Path, metavar="MODEL", help="folder of the model")
    p.add_argument("--tokens", type=int, default=64, help="tokens (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of the tokens (default: %(default)s)")
    p.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"),
                   help="default: %(default)s")
    p.add_argument("--tolerance", type=float, default=None, metavar="T",
                   help="largest difference, relative to the largest logit (default: 1e-4; "
                        "bfloat16: 0.05)")


def _say_unused_code(folder: Path, config: Mapping[str, Any]) -> None:
    """Say that code which comes with a model is not run; `ValueError` if its configuration asks for
    code of others, which transformers would get from the network.
    """
    for name, value in config.items():
        if name.endswith("_implementation") and "/" in str(value):
            raise ValueError(f"{str(folder)!r}: {short(name)}={short(value)} in config.json "
                             "names code of others, which is not run; remove the entry")
    if "auto_map" in config:
        print(printable(f"{folder}: the model's own code (auto_map in config.json) is not run; "
                        f"transformers' {short(config.get('model_type'))} takes its place"))


def check_hf(args: argparse.Namespace) -> int:
    """Compare our layers with a Hugging Face model's own. 0: within the tolerance."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

    from moe_plugin.checkpoint.formats.huggingface.files import (
        CONFIG,
        check_counts,
        open_safetensors,
        read_json,
    )
    from moe_plugin.checkpoint.formats.huggingface.quantization import check_plain, quantization_of
    from moe_plugin.hosts.plain.huggingface import swap_moe_blocks
    from moe_plugin.planner.units import show_time

    if args.tokens < 1:
        raise ValueError(f"tokens={args.tokens}: must be >= 1; use 64")
    if not args.model.is_dir():
        raise ValueError(f"there is no folder {str(args.model)!r}; give that of a downloaded model")
    spread = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if spread:
        dist.init_process_group("gloo")
    dtype = getattr(torch, args.dtype)
    config = read_json(args.model / CONFIG)
    found = quantization_of(config)
    with open_safetensors(args.model) as source:
        check_counts(source)
        if found is None:
            check_plain(source)
    plain = Mxfp4Config if found and found.get("quant_method") == "mxfp4" else FineGrainedFP8Config
    _say_unused_code(args.model, config)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=dtype, local_files_only=True, trust_remote_code=False,
        **({"quantization_config": plain(dequantize=True)} if found else {})
    ).eval()
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # its grouped products have no float64
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(model.config.vocab_size, (1, args.tokens), generator=generator)

    def logits() -> tuple[torch.Tensor, float]:
        with torch.no_grad():
            model(ids)  # what is decided or allocated at the first call
            start = time.perf_counter()
            return model(ids).logits.float(), time.perf_counter() - start

    want, theirs_s = logits()
    blocks = swap_moe_blocks(model)
    got, ours_s = logits()
    off = float((got - want).abs().max() / want.abs().max())
    most = args.tolerance or (0.05 if dtype == torch.bfloat16 else 1e-4)
    if not spread or dist.get_rank() == 0:
        print(f"{len(blocks)} MoE blocks, {args.tokens} tokens, {args.dtype}: logits differ by "
              f"{off:.2g} of the largest (tolerance {most:g}); transformers {show_time(theirs_s)}"
              f", ours {show_time(ours_s)}")
        print(_THEIR_FAULTS)
    if spread:
        dist.destroy_process_group()
    return int(not off <= most)
