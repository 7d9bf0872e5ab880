"""`moe-plugin check-hf`: a Hugging Face MoE model with our layer in place of its blocks."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
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


def run(args: argparse.Namespace) -> int:
    """Compare; print the difference and both times. 0: within the tolerance."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    from moe_plugin.checkpoint.formats.huggingface.files import CONFIG, read_json
    from moe_plugin.checkpoint.formats.huggingface.quantization import quantization_of
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
    quantized = quantization_of(read_json(args.model / CONFIG)) is not None
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=dtype, local_files_only=True,
        **({"quantization_config": FineGrainedFP8Config(dequantize=True)} if quantized else {})
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
    if spread:
        dist.destroy_process_group()
    return int(not off <= most)
