"""Generate text with a model whose experts are ten times as large as its memory limit, and compare
four ways to load the experts.

The study requires cgroups (version 1 or 2) with a writable memory controller and 6 GiB of disk
space, and takes about 3 minutes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_plugin import MoELayer
from moe_plugin.comm.placement import HostContext
from moe_plugin.memory.experts.stored import StoredExperts
from moe_plugin.routing.pregate import link
from scripts.bench.child import AnonymousPeak, compare_limited
from scripts.bench.report import page
from scripts.bench.study import Option
from scripts.bench.toy import ToyBlock

TITLE = "Text generation with a model larger than its memory"
VOCABULARY, WIDTH, HEADS, MIB = 256, 512, 8, 1 << 20
MODES = ("resident", "on demand", "prefetch all", "pre-gated")
TEXT = b"The experts of a layer are many, and a token needs few of them. "


def block(number: int, args: argparse.Namespace, mode: str, store: dict[str, Any]) -> ToyBlock:
    """Return a block with experts, and with a shared expert of inner width `shared`."""
    moe = MoELayer(
        WIDTH, num_experts=args.experts, losses={}, host=HostContext(number, training=False),
        router={"name": "topk", "top_k": 1, "normalize": "none",
                "pre_gate": int(mode == MODES[3])},
        experts={"hidden_dim": args.hidden, "bias": False, "shared_hidden_dim": args.shared,
                 "compute": "grouped", **store})
    return ToyBlock(moe, HEADS, remembers=True)


class WritingModel(nn.Module):
    def __init__(self, args: argparse.Namespace, mode: str, file: str) -> None:
        super().__init__()
        store: dict[str, Any] = {"store": "device"}
        if mode != MODES[0]:
            most = 2 * args.experts if mode == MODES[2] else 2 * args.batch
            one = 2 * WIDTH * args.hidden * 4
            store = {"store": "disk", "store_path": file, "cache": str(most * one),
                     "store_throttle": args.throttle, "cache_policy": "next-layer"}
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block(i, args, mode, store) for i in range(args.layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.all = range(args.experts) if mode == MODES[2] else None

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Return the logits [B, V] for the next token."""
        x_BSD = self.embed(ids_BS)
        for block, after in zip(self.blocks, [*self.blocks[1:], self.blocks[0]], strict=True):
            if self.all is not None:
                after.moe.experts.store.prefetch(self.all)
            x_BSD = block(x_BSD)
        return self.head(F.layer_norm(x_BSD, (WIDTH,))[:, -1])


def write_experts(path: Path, args: argparse.Namespace) -> int:
    """Write the experts of all layers to a safetensors file, and return the number of bytes
    written.
    """
    from safetensors.torch import save_file

    shapes = {"w_in_LDF": (WIDTH, args.hidden), "w_out_LFD": (args.hidden, WIDTH)}
    random = torch.Generator().manual_seed(7)
    experts = {f"layers.{layer:03d}.experts.{name}": torch.randn(
        args.experts, *shape, generator=random).mul_(shape[0] ** -0.5)
        for layer in range(args.layers) for name, shape in shapes.items()}
    save_file(experts, path)
    return sum(value.nbytes for value in experts.values())


def load_experts(model: WritingModel, path: str) -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file, torch.no_grad():
        for number, block in enumerate(model.blocks):
            for name, value in block.moe.experts.named_parameters():
                value.copy_(file.get_tensor(f"layers.{number:03d}.experts.{name}"))


@torch.no_grad()
def child(args: argparse.Namespace, mode: str, file: str) -> dict[str, Any]:
    """Generate text with one mode in this process. Return the text, the times, the memory and the
    counters.
    """
    peak, model = AnonymousPeak(), WritingModel(args, mode, file).eval()
    if mode == MODES[0]:
        load_experts(model, file)
    link(model)
    prompt = [TEXT[i:] + TEXT[:i] for i in range(args.batch)]
    ids_BS = torch.tensor([list(text) for text in prompt])[:, :args.prompt]
    text, seconds, counted = [ids_BS], [], {}
    for call in range(args.tokens + 1):  # the first call reads the prompt
        if call == 1:
            counted = counts(model)
        began = time.perf_counter()
        ids_BS = model(ids_BS).argmax(-1, keepdim=True)
        seconds.append(time.perf_counter() - began)
        text.append(ids_BS)
    seen: dict[str, Any] = {
        "tokens_s": args.batch * args.tokens / sum(seconds[1:]),
        "text": torch.cat(text, 1).tolist(), "anonymous_bytes": peak.bytes, "seconds": seconds[1:]}
    if mode != MODES[0]:
        seen["counters"] = {name: value - counted[name] for name, value in counts(model).items()}
    return seen


def counts(model: WritingModel) -> dict[str, float]:
    """Return the sums of the counters over all stores, or an empty dict if the experts are
    resident.
    """
    stores = [block.moe.experts.store for block in model.blocks
              if isinstance(block.moe.experts, StoredExperts)]
    if not stores:
        return {}
    sums = {name: sum(store.counters.as_dict()[name] for store in stores)
            for name in stores[0].counters.as_dict()}
    return {**sums, "stalled_s": stores[0].cache.copier.counters.stalled_s}


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all modes, and check that all modes except the pre-gated model generate the same text."""
    limit, file = args.limit_mib * MIB or None, folder / "experts.safetensors"
    size = write_experts(file, args)
    # prefetching all experts needs memory for two whole layers, which is more than the limit
    rows = compare_limited(limit, MODES, child, args, str(file), unlimited=MODES[2:3])
    for row in rows[:3]:
        if row["text"] != rows[0]["text"]:
            raise ValueError(f"{row['mode']}: the tokens differ from those of the resident model")
    return {"limit": limit, "experts_bytes": size, "rows": rows, **{
        name: getattr(args, name) for name in ("layers", "experts", "hidden", "shared", "batch",
                                               "prompt", "tokens", "throttle")}}


def body(seen: dict[str, Any]) -> list[str]:
    rate = {row["mode"]: row["tokens_s"] for row in seen["rows"]}
    rows = []
    for row in seen["rows"]:
        counted = row.get("counters", {})
        rows.append({
            **row, "resident": rate[MODES[0]], "on_demand": rate[MODES[1]],
            "limit": f"{row['limit'] / MIB:.0f}" if row["limit"] else "none",
            "stalled_s": counted.get("stalled_s"),
            "read": counted["bytes"] / seen["tokens"] if counted else None,
            "hit_rate": f"{100 * counted['hits'] / (counted['hits'] + counted['misses']):.0f} %"
                        if counted else ""})
    return page(__name__, seen, modes=rows)


OPTIONS = {
    "layers": Option(8, "number of blocks", quick=2),
    "experts": Option(160, "experts per layer", quick=4),
    "hidden": Option(1024, "inner width of an expert", quick=64),
    "shared": Option(8192, "inner width of the shared expert", quick=128),
    "batch": Option(4, "number of sequences", quick=2),
    "prompt": Option(8, "tokens of the prompt"),
    "tokens": Option(16, "tokens to generate in each sequence", quick=3),
    "limit-mib": Option(500, "memory limit in MiB; 0 sets no limit", quick=0),
    "throttle": Option(2500.0, "maximum rate of reading the file in MB/s"),
    "scratch": Option("", "folder for the file of experts (default: a new one here)"),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.scratch or Path.cwd()) as scratch:
        return compare(args, Path(scratch))
