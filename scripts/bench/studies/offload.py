"""Text from a model whose experts are ten times its memory limit: four ways to fetch them.

Needs version 1 or 2 of cgroups with a writable memory controller, 6 GiB of disk and about 3
minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_plugin import MoELayer
from moe_plugin.cli.figures import columns
from moe_plugin.comm.placement import HostContext
from moe_plugin.memory.experts.stored import StoredExperts
from moe_plugin.routing.pregate import link
from scripts.bench.memory_limit import AnonymousPeak, call_limited
from scripts.bench.study import Option
from scripts.bench.toy import ToyBlock

TITLE = "Text from a model larger than its memory"
VOCABULARY, WIDTH, HEADS, MIB = 256, 512, 8, 1 << 20
MODES = ("resident", "on demand", "prefetch all", "pre-gated")
TEXT = b"The experts of a layer are many, and a token needs few of them. "


def block(number: int, args: argparse.Namespace, mode: str, store: dict[str, Any]) -> ToyBlock:
    """With a dense map as wide as `shared`, too."""
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
        """Logits [B, V] of the token after the last."""
        x_BSD = self.embed(ids_BS)
        for block, after in zip(self.blocks, [*self.blocks[1:], self.blocks[0]], strict=True):
            if self.all is not None:
                after.moe.experts.store.prefetch(self.all)
            x_BSD = block(x_BSD)
        return self.head(F.layer_norm(x_BSD, (WIDTH,))[:, -1])


def write_experts(path: Path, args: argparse.Namespace) -> int:
    """The file of all layers' experts, one tensor after the other; returns its bytes."""
    shapes = {"w_in_LDF": (WIDTH, args.hidden), "w_out_LFD": (args.hidden, WIDTH)}
    header: dict[str, Any] = {}
    end = 0
    for layer in range(args.layers):
        for name, shape in shapes.items():
            size = 4 * args.experts * shape[0] * shape[1]
            header[f"layers.{layer:03d}.experts.{name}"] = {
                "dtype": "F32", "shape": [args.experts, *shape], "data_offsets": [end, end + size]}
            end += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    random = torch.Generator().manual_seed(7)
    with open(path, "wb") as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        for entry in header.values():
            scale = entry["shape"][1] ** -0.5
            for _ in range(args.experts):
                x = torch.randn(entry["shape"][1:], generator=random) * scale
                stream.write(x.numpy().tobytes())
    return end


def load_experts(model: WritingModel, path: str) -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file, torch.no_grad():
        for number, block in enumerate(model.blocks):
            for name, value in block.moe.experts.named_parameters():
                value.copy_(file.get_tensor(f"layers.{number:03d}.experts.{name}"))


@torch.no_grad()
def child(args: argparse.Namespace, mode: str, file: str) -> dict[str, Any]:
    """Write text in this process; what was seen."""
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
        "mode": mode, "tokens_s": args.batch * args.tokens / sum(seconds[1:]),
        "text": torch.cat(text, 1).tolist(), "anonymous_bytes": peak.bytes, "seconds": seconds[1:]}
    if mode != MODES[0]:
        seen["counters"] = {name: value - counted[name] for name, value in counts(model).items()}
    return seen


def counts(model: WritingModel) -> dict[str, float]:
    """What the stores of all blocks have done so far; {}: there are none."""
    stores = [block.moe.experts.store for block in model.blocks
              if isinstance(block.moe.experts, StoredExperts)]
    if not stores:
        return {}
    sums = {name: sum(store.counters.as_dict()[name] for store in stores)
            for name in stores[0].counters.as_dict()}
    return {**sums, "stalled_s": stores[0].cache.copier.counters.stalled_s}


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All modes; the text of all is the same, but for the pre-gated model's, which is another."""
    limit, file = args.limit_mib * MIB or None, folder / "experts.safetensors"
    size = write_experts(file, args)

    def run(mode: str, most: int | None) -> dict[str, Any] | None:
        return call_limited(most, child, args, mode, str(file))

    rows = [{**run(MODES[0], None), "limit": None}]
    if limit is not None and run(MODES[0], limit) is not None:
        raise ValueError("the resident model fits the limit: give a smaller one")
    for mode in MODES[1:]:
        # two whole layers are more than the limit
        own = None if mode == MODES[2] else limit
        seen = run(mode, own)
        if seen is None:
            raise ValueError(f"{mode}: killed under the limit; give a larger one")
        if mode != MODES[3] and seen["text"] != rows[0]["text"]:
            raise ValueError(f"{mode}: other tokens than those of the resident model")
        rows.append({**seen, "limit": own})
    return {"limit": limit, "experts_bytes": size, "rows": rows, **{
        name: getattr(args, name) for name in ("layers", "experts", "hidden", "shared", "batch",
                                               "prompt", "tokens", "throttle")}}


def body(seen: dict[str, Any]) -> list[str]:
    rate = {row["mode"]: row["tokens_s"] for row in seen["rows"]}

    def counted(show: Callable[[dict[str, float]], str]) -> Callable[[dict[str, Any]], str]:
        return lambda row: show(row["counters"]) if "counters" in row else ""

    return [
        f"A language model of {seen['layers']} blocks with {seen['experts']} experts of {WIDTH} x "
        f"{seen['hidden']} each, {seen['experts_bytes'] / MIB:,.0f} MiB of float32 weights, writes "
        f"{seen['tokens']} tokens in each of {seen['batch']} sequences, one expert a token. "
        "Each process runs in a cgroup whose limit counts all of its memory, torch and pages "
        "of files included; the resident model was killed under it and ran without one. "
        "Experts lie in a safetensors file, read at "
        f"{seen['throttle']:g} MB/s at most (`experts.store_throttle`). *on demand*: experts "
        "are read when a block needs them. *prefetch all*: all of the next block's while one "
        "computes, in a cache of two whole layers, without a limit. *pre-gated*: each block "
        "chooses the experts of the next one, which are read while it computes. The first "
        "three write the same tokens; the pre-gated model is another one, with the same "
        "weights. *found*: experts that a call found, or on their way. One thread computes, "
        "another reads.",
        columns(seen["rows"], {
            "experts": "{mode}",
            "limit MiB": lambda row: f"{row['limit'] / MIB:.0f}" if row["limit"] else "none",
            "peak of the process MiB": lambda row: f"{row['anonymous_bytes'] / MIB:.0f}",
            "tokens/s": "{tokens_s:.1f}",
            "of the resident model": lambda row: f"{row['tokens_s'] / rate[MODES[0]]:.2f}",
            "of on demand": lambda row: f"{row['tokens_s'] / rate[MODES[1]]:.2f}",
            "found": counted(lambda c: f"{100 * c['hits'] / (c['hits'] + c['misses']):.0f} %"),
            "MiB read a call": counted(lambda c: f"{c['bytes'] / MIB / seen['tokens']:.0f}"),
            "waited s": counted(lambda c: f"{c['stalled_s']:.1f}")})]


OPTIONS = {
    "layers": Option(8, "blocks", quick=2), "experts": Option(160, "of a layer", quick=4),
    "hidden": Option(1024, "of an expert", quick=64),
    "shared": Option(8192, "inner width of the expert of every token", quick=128),
    "batch": Option(4, "sequences", quick=2), "prompt": Option(8, "tokens that are given"),
    "tokens": Option(16, "written in each sequence", quick=3),
    "limit-mib": Option(500, "memory limit; 0: none", quick=0),
    "throttle": Option(2500.0, "MB/s of the file"),
    "scratch": Option("", "folder for the file (default: a new one here)"),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.scratch or Path.cwd()) as scratch:
        return compare(args, Path(scratch))
