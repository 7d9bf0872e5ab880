"""Fine-tune a quantized model under a memory limit of 0.30 times the memory of its bf16 weights.

    python -m scripts.bench.fine_tune_limit --folder /tmp/quantized

The command writes a model with random frozen weights to the folder, in which each file contains one
layer. Two new processes then load the model, add adapters, and train the adapters: the first one
without a limit, the second one in a cgroup with the limit. The command fails if the second process
is killed, or if the losses differ. With the default sizes, the bf16 weights have 24.1 GiB. The
folder needs 6.3 GiB, and the command takes about 14 minutes on two cores. Setting the limit needs
root.
"""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_plugin.hosts.plain.adapters import add_lora, freeze_experts
from moe_plugin.hosts.plain.huggingface import swap_moe_blocks
from moe_plugin.kernels.frozen import FROZEN_FORMATS, PARTS, quantized
from moe_plugin.layer import layers_in
from moe_plugin.planner.units import show_size, show_time
from scripts.bench.child import AnonymousPeak, call_limited, status_bytes

SHARE = 0.30  # of the memory of the bf16 weights
WIDTHS = {"hidden_size": 4096, "moe_intermediate_size": 4096, "num_experts": 32}
TOKENS, STEPS = 8, 3


def built(format: str, layers: int, widths: dict[str, int]) -> tuple[Any, int]:
    """Return a model whose parameters have no values, and the size of its weights in bf16."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(**widths, num_hidden_layers=layers, num_experts_per_tok=2, head_dim=64,
                            num_attention_heads=8, num_key_value_heads=2, vocab_size=512,
                            intermediate_size=512)
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    size = sum(2 * p.numel() for p in model.parameters())
    swap_moe_blocks(model)
    freeze_experts(model, format)
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty_like(p, device="cpu"), False))
    for layer in layers_in(model):
        layer.follow_parameters()
    return model, size


def parts_of(model: Any) -> dict[str, nn.Module]:
    """Return the modules of a model that are stored in files of their own."""
    return {**{f"layer{i}": layer for i, layer in enumerate(model.model.layers)},
            "embedding": model.model.embed_tokens, "norm": model.model.norm, "head": model.lm_head}


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a module's state."""
    return {key: value for key, value in module.state_dict().items()
            if isinstance(value, torch.Tensor)}


@torch.no_grad()
def write(folder: str, format: str, layers: int, widths: dict[str, int]) -> dict[str, Any]:
    """Write random weights, and return the size of the weights in bf16 and of the files."""
    from safetensors.torch import save_file

    model, size = built(format, layers, widths)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, module in parts_of(model).items():
        values = {}
        for key, value in tensors_of(module).items():
            values[key] = torch.ones_like(value) if "norm" in key or name == "norm" else (
                value if value.dtype == torch.uint8 else torch.randn(value.shape).mul_(
                    0.02).to(value.dtype))
        for weight, parts in PARTS.items() if name.startswith("layer") else ():
            _, outer, size = values[f"mlp.moe.experts.{parts[0]}"].shape
            inner = size * 8 // FROZEN_FORMATS[format].bits
            made = quantized(torch.randn(outer, inner) * inner**-0.5, format)
            for part, value in zip(parts, made, strict=False):
                stack = values[f"mlp.moe.experts.{part}"]
                for expert in range(len(stack)):  # experts with different rows
                    stack[expert] = value if value.dim() == 1 else value.roll(expert, 0)
        save_file({key: value.contiguous() for key, value in values.items()},
                  Path(folder, f"{name}.safetensors"))
    return {"bf16": size, "files": sum(p.stat().st_size for p in Path(folder).iterdir())}


def train(folder: str, format: str, layers: int, widths: dict[str, int],
          rank: int) -> dict[str, Any]:
    """Load the model of a folder, train adapters, and return the losses and the peak memory."""
    from safetensors import safe_open

    base, begin = status_bytes("VmRSS"), time.monotonic()
    peak = AnonymousPeak()
    model, _ = built(format, layers, widths)
    for name, module in parts_of(model).items():
        with safe_open(Path(folder, f"{name}.safetensors"), "pt") as file:
            for key, value in tensors_of(module).items():
                stored = file.get_slice(key)
                step = 1 if value.dim() == 3 else len(value)  # one expert at a time
                for i in range(0, len(value), step):
                    value[i:i + step] = stored[i:i + step]
    add_lora(model, rank=rank)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    ids, losses = torch.randint(512, (1, TOKENS), generator=torch.Generator().manual_seed(1)), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "anonymous": peak.bytes, "base": base,
            "adapters": sum(p.numel() for p in trained), "seconds": time.monotonic() - begin}


def compare(folder: str, format: str, layers: int, widths: dict[str, int], rank: int,
            share: float, besides: int = 0) -> dict[str, Any]:
    """Train the model without and with the limit.

    Args:
        share: the limit as a share of the bf16 weights.
        besides: bytes that are added to the limit.
    Returns: the sizes, the limit, and the results of both runs.
    Raises:
        RuntimeError: If the run with the limit is killed, or if its losses differ.
    """
    sizes = call_limited(None, write, folder, format, layers, widths)
    assert sizes is not None
    limit = int(share * sizes["bf16"]) + besides
    runs = {name: call_limited(bound, train, folder, format, layers, widths, rank)
            for name, bound in (("without", None), ("with", limit))}
    without, limited = runs["without"], runs["with"]
    if without is None or limited is None:
        raise RuntimeError(f"the process was killed under the limit of {show_size(limit)}")
    if limited["losses"] != without["losses"]:
        raise RuntimeError(f"the losses {limited['losses']} under the limit differ from "
                           f"{without['losses']} without it")
    return {**sizes, "limit": limit, "without": without, "with": limited}


def main() -> None:
    """Print the sizes, the losses and the peaks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", required=True, help="new folder of the model")
    parser.add_argument("--format", choices=list(FROZEN_FORMATS), default="nf4_double")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--share", type=float, default=SHARE)
    args = parser.parse_args()
    found = compare(args.folder, args.format, args.layers, WIDTHS, args.rank, args.share)
    print(f"bf16 weights {show_size(found['bf16'])}, files {show_size(found['files'])}, limit "
          f"{show_size(found['limit'])} = {found['limit'] / found['bf16']:.3f} of the bf16 weights")
    for name in ("without", "with"):
        run = found[name]
        print(f"{name} the limit: losses {run['losses']}, peak of the cgroup "
              f"{show_size(run['cgroup_peak_bytes'])}, of it anonymous "
              f"{show_size(run['anonymous'])}, {show_time(run['seconds'])}")


if __name__ == "__main__":
    # child processes find functions by the name of their module
    importlib.import_module("scripts.bench.fine_tune_limit").main()
