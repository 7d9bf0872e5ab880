"""Commands for checkpoints: `inspect`, `reshard`, `upcycle` and `check-hf`."""

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
    "world": "total number of ranks (fairseq: data-parallel ranks)",
    "ep": "expert-parallel ranks", "tp": "tensor-parallel ranks", "pp": "pipeline stages",
    "etp": "expert-tensor-parallel ranks", "shards": "ranks over which each expert is split",
}
SCREEN, LAYERS, COLUMNS = 40, 8, 160  # limits of the output of `inspect` without --all
WHOLE = 10_000  # largest number of characters of a line with --all
_OF_EXPERTS = re.compile("moe|expert|router|gate")


def _add_source_options(p: argparse.ArgumentParser) -> None:
    from moe_plugin.checkpoint import trust
    from moe_plugin.checkpoint.formats.all import formats

    p.add_argument("--from", dest="origin", choices=formats.names(),
                   help="format of the checkpoint (default: detected automatically)")
    p.add_argument("--trust", trust.FLAG, action="store_true",
                   help="read files with classes that are not listed as safe, which can run code")


def inspect_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin inspect`."""
    p.description = ("Shows the format, step, layout, layers, experts, data types, sizes and "
                     "settings of a checkpoint. Tensors are not read, and checksums are not "
                     "verified.")
    p.add_argument("checkpoint", metavar="CKPT", type=Path, help="folder or file of a checkpoint")
    _add_source_options(p)
    p.add_argument("--json", action="store_true", help="print JSON, with every tensor")
    p.add_argument("--all", action="store_true",
                   help=f"print all layers and settings (default: at most {SCREEN} lines)")


def inspect(args: argparse.Namespace) -> int:
    """Print what a checkpoint contains, without reading its tensors."""
    import moe_plugin.checkpoint.formats.all  # noqa: F401 - registers
    from moe_plugin.checkpoint.conversion import summary
    from moe_plugin.checkpoint.formats.base import open_source

    with open_source(args.checkpoint, args.origin, args.trust) as source:
        contents = summary(source)
    print(json.dumps(contents, indent=1, default=str) if args.json
          else "\n".join(inspection_lines(contents, args.all)))
    return 0


def inspection_lines(found: Mapping[str, Any], every: bool) -> list[str]:
    """Return the lines that `moe-plugin inspect` prints. If `every` is true, return all lines;
    otherwise return at most `SCREEN` lines.
    """
    from moe_plugin.planner.units import show_size

    layout = ", ".join(f"{name} {value}" for name, value in found["layout"].items())
    step = "not known" if found["step"] is None else found["step"]
    lines = [f"format     {found['format']}", f"step       {step}",
             f"layout     {layout or 'one file'}",
             f"files      {found['files']}, {show_size(found['file_bytes'])}"]
    if unsealed := found.get("files_without_checksum"):
        lines.append(f"checksums  none in {unsealed} of {found['files']} files: damage in "
                     "these files is not detected")
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
        # settings of experts come first, because one screen may not show all settings
        order = sorted(settings, key=lambda name: not _OF_EXPERTS.search(name))
        values = ["settings", *(f"  {name} = {settings[name]}" for name in order)]
    if every:
        return [printable(line, WHOLE) for line in (*lines, *layers, *values)]
    lines += _cut(layers, LAYERS, "layers")
    rest = _cut(values, max(4, SCREEN - len(lines)), "settings")
    return [line if len(line) <= COLUMNS else line[:COLUMNS - 4] + " ..."
            for line in map(printable, (*lines, *rest))]


def _cut(lines: list[str], most: int, what: str) -> list[str]:
    """Truncate a list to at most `most` lines. If lines were left out, the last returned line
    states how many.
    """
    if len(lines) <= most:
        return lines
    return [*lines[:most - 1], f"  and {len(lines) - most + 1} more {what} (--all prints them)"]


def reshard_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin reshard`."""
    from moe_plugin.checkpoint.formats.all import formats

    p.description = ("Writes the checkpoint IN as the folder OUT, tensor by tensor. If a "
                     "conversion was interrupted, the same command continues it. OUT gets its "
                     "name when it is complete.")
    p.add_argument("source", metavar="IN", type=Path, help="folder or file of a checkpoint")
    p.add_argument("target", metavar="OUT", type=Path, help="folder to write")
    _add_source_options(p)
    p.add_argument("--to", choices=formats.names(), help="format of OUT (default: that of IN)")
    for name, text in SIZES.items():
        p.add_argument(f"--{name}", type=int, metavar="N", help=text)
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"),
                   help="dtype of the model's tensors (default: unchanged); optimizer state is not "
                        "changed")
    p.add_argument("--model-only", action="store_true", help="leave out the optimizer state")
    p.add_argument("--force", action="store_true", help="replace an existing folder OUT")


def reshard(args: argparse.Namespace) -> int:
    """Convert a checkpoint, and print the written files, the speed and the peak memory."""
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
        print(printable(f"{args.target}: already exists and is complete"))
        return 0
    size = sum(path.stat().st_size for path in args.target.rglob("*") if path.is_file())
    seconds = time.perf_counter() - start
    kept = f", {len(conversion.kept)} files reused from an earlier try" if conversion.kept else ""
    print(printable(
        f"{args.target}: {origin} to {to}, {show_size(size)} in {show_time(seconds)} "
        f"({show_size(size / seconds)}/s){kept}; peak memory {show_size(peak_bytes())}"))
    return 0


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes, including resident pages of memory-mapped
    files.
    """
    try:  # counts only this program; getrusage includes what ran earlier in the same process
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def upcycle_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin upcycle`."""
    p.description = (
        "Turns the MLPs of a dense checkpoint into experts. Initially the model computes the same. "
        "The experts are copies of the MLP, or with --granularity G pieces of it. The optimizer "
        "state is left out.")
    p.add_argument("source", type=Path, metavar="IN", help="dense checkpoint, of any format")
    p.add_argument("target", type=Path, metavar="OUT", help="folder to write; must not exist yet")
    p.add_argument("--experts", type=int, required=True, metavar="E",
                   help="number of experts in each MoE layer; must be a multiple of G")
    p.add_argument("--top-k", type=int, required=True, metavar="K",
                   help="number of experts per token, at least 2 and a multiple of G")
    p.add_argument("--granularity", type=int, default=1, metavar="G",
                   help="split each MLP into G experts along its inner width (default: 1, copies)")
    p.add_argument("--shared", type=float, default=0.0, metavar="SHARE",
                   help="share of the MLP's output that a shared expert computes, from 0 to below "
                        "1 (default: 0, no shared expert)")
    p.add_argument("--shared-gate", action="store_true",
                   help="add a gate to the shared expert, as in Qwen2-MoE")
    p.add_argument("--every", type=int, default=1, metavar="N",
                   help="make every N-th layer an MoE layer (default: 1, all layers)")
    for stack in ("encoder", "decoder"):
        p.add_argument(f"--{stack}-every", type=int, metavar="N",
                       help=f"like --every, for the {stack} of a fairseq translation model; 0: no "
                            "layer (default: as --every)")
    p.add_argument("--router-std", type=float, default=0.02, metavar="STD",
                   help="standard deviation of the routers' initial weights (default: 0.02)")
    p.add_argument("--seed", type=int, default=0, help="seed of the routers (default: 0)")
    _add_source_options(p)
    p.add_argument("--to", default=None, metavar="FORMAT", help="format of OUT (default: that of "
                   "IN)")


def upcycle(args: argparse.Namespace) -> int:
    """Convert a dense checkpoint to a Mixture of Experts."""
    from moe_plugin.checkpoint.formats.all import formats
    from moe_plugin.checkpoint.formats.base import check_pair, convert, detect, open_source
    from moe_plugin.checkpoint.formats.fairseq import neutral as fairseq_models
    from moe_plugin.checkpoint.neutral import NEUTRAL
    from moe_plugin.checkpoint.upcycle import Upcycling, write_new
    from moe_plugin.checkpoint.upcycle import upcycle as upcycled
    from moe_plugin.hosts.fairseq.translate import check_flags

    plan = Upcycling(experts=args.experts, top_k=args.top_k, granularity=args.granularity,
                     shared=args.shared, shared_gate=args.shared_gate, every=args.every,
                     encoder_every=args.encoder_every, decoder_every=args.decoder_every,
                     router_std=args.router_std, seed=args.seed)
    name = args.origin or detect(args.source, args.trust)
    to = formats.get(args.to or name)()
    check_pair(name, to.name)
    with open_source(args.source, name, args.trust) as source:
        result = (fairseq_models.upcycle(source, plan, check_flags)
                  if fairseq_models.translates(source) else
                  upcycled(convert(source, NEUTRAL), plan))
        write_new(convert(result, to.name), to, args.target)
    print(f"{args.target}: {len(result.layers)} MoE layers of {plan.experts} experts, "
          f"{plan.top_k} per token, format {to.name}")
    return 0


_THEIR_FAULTS = """\
Faults of transformers that affect a Trainer. Both are corrected for models whose experts
moe-plugin computes by name (docs/transformers.md#trainer). For other models:
  resuming does not restore experts that are selected by name (transformers issue 48805): start
  from from_pretrained(checkpoint), or use swap_moe_blocks, whose blocks are restored
  the auxiliary loss is multiplied by the ranks and accumulation steps (transformers issue 48690):
  divide router_aux_loss_coef by their product"""


def check_hf_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin check-hf`."""
    p.description = (
        "Loads a Mixture-of-Experts model with transformers, computes the logits of random tokens, "
        "replaces its MoE blocks by our layers, computes the logits again, and compares them. "
        "Under torchrun the experts are distributed over the ranks.")
    p.add_argument("model", type=Path, metavar="MODEL", help="folder of the model")
    p.add_argument("--tokens", type=int, default=64,
                   help="number of tokens (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="seed of the tokens (default: %(default)s)")
    p.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"),
                   help="default: %(default)s")
    p.add_argument("--tolerance", type=float, default=None, metavar="T",
                   help="largest accepted difference, relative to the largest logit (default: "
                        "1e-4; bfloat16: 0.05)")


def _say_unused_code(folder: Path, config: Mapping[str, Any]) -> None:
    """Print a note if the configuration of a model refers to Python code in the model's folder. The
    Python code in a model's folder is never executed.

    Raises:
        ValueError: If the configuration refers to code in a different repository, because
            transformers would download and run that code.
    """
    for name, value in config.items():
        if name.endswith("_implementation") and "/" in str(value):
            raise ValueError(f"{str(folder)!r} has {short(name)}={short(value)} in config.json, "
                             "which refers to code in another repository. Such code is not run. "
                             "Remove the entry")
    if "auto_map" in config:
        print(printable(f"{folder}: the model's own code (auto_map in config.json) is not run; the "
                        f"class of transformers for {short(config.get('model_type'))} is used"))


def _has_unaligned_experts(model: Any) -> bool:
    """Return whether torch's grouped products, the default of `transformers`, refuse the experts.

    These products need rows whose length is a multiple of 16 bytes.
    """
    from moe_plugin.experts.matrices import of_transformers  # loads torch

    return any(width * weight.element_size() % 16
               for experts in model.modules() if of_transformers(experts)
               for weight in experts.parameters() if weight.dim() == 3
               for width in weight.shape[1:])


def _kept_router(model: Any, ids: Any) -> str:
    """Return why the model keeps its router, or an empty string if we replace the router."""
    from moe_plugin.checkpoint.formats.huggingface.families import moe_block_of
    from moe_plugin.checkpoint.formats.huggingface.kept_families import KEPT
    from moe_plugin.hosts.plain.huggingface import settings_of
    from moe_plugin.hosts.plain.router_probe import probe_router

    config = settings_of(model)
    kind = str(config.get("model_type"))
    if moe_block_of(config) is not None:
        return ""
    if kind in KEPT:
        return f"model_type={kind!r} keeps its own router, because it has {KEPT[kind][1]}"
    return (f"model_type={short(kind)} is in no table of families, so it keeps its own router: "
            f"{probe_router(model, ids)}")


def check_hf(args: argparse.Namespace) -> int:
    """Compare the logits of a Hugging Face model before and after its MoE layers are replaced by
    layers of this package. Return exit status 0 if the difference is within the tolerance, and 1
    otherwise.
    """
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
        raise ValueError(f"tokens={args.tokens} must be >= 1, e.g. 64")
    if not args.model.is_dir():
        raise ValueError(f"there is no folder {str(args.model)!r}. Pass the folder of a downloaded "
                         "model")
    spread = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if spread:
        dist.init_process_group("gloo")
    dtype = getattr(torch, args.dtype)
    config = read_json(args.model / CONFIG)
    quant = quantization_of(config)
    with open_safetensors(args.model) as source:
        check_counts(source)
        if quant is None:
            check_plain(source)
    plain = Mxfp4Config if quant and quant.get("quant_method") == "mxfp4" else FineGrainedFP8Config
    _say_unused_code(args.model, config)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=dtype, local_files_only=True, trust_remote_code=False,
        **({"quantization_config": plain(dequantize=True)} if quant else {})
    ).eval()
    if dtype == torch.float64 or _has_unaligned_experts(model):
        model.set_experts_implementation("eager")  # grouped products do not support these experts
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(model.config.vocab_size, (1, args.tokens), generator=generator)

    def logits() -> tuple[torch.Tensor, float]:
        with torch.no_grad():
            model(ids)  # the first call also decides and allocates, so it is not timed
            start = time.perf_counter()
            return model(ids).logits.float(), time.perf_counter() - start

    want, theirs_s = logits()
    kept = _kept_router(model, ids)
    blocks = swap_moe_blocks(model)
    got, ours_s = logits()
    off = float((got - want).abs().max() / want.abs().max())
    most = args.tolerance or (0.05 if dtype == torch.bfloat16 else 1e-4)
    if not spread or dist.get_rank() == 0:
        print(f"{len(blocks)} MoE blocks, {args.tokens} tokens, {args.dtype}: logits differ by "
              f"{off:.2g} of the largest (tolerance {most:g}); transformers {show_time(theirs_s)}"
              f", ours {show_time(ours_s)}")
        if kept:
            print(kept)
        print(_THEIR_FAULTS)
    if spread:
        dist.destroy_process_group()
    return int(not off <= most)
