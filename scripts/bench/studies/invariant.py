"""Measure the cost of `batch_invariant`: one layer of gated experts with and without it, with the
same weights and inputs.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_plugin import MoELayer
from moe_plugin.config import from_dict
from scripts.bench.measure import interleaved, versions
from scripts.bench.report import page
from scripts.bench.study import Option

TITLE = "The cost of the same bits in any batch"
DTYPES = ("float32", "bfloat16")
LAYER = {"model_dim": 512, "num_experts": 8, "router": {"top_k": 2},
         "experts": {"kind": "gated_ffn", "activation": "silu", "bias": False, "hidden_dim": 1376}}
OPTIONS = {
    "tokens": Option((64, 512, 2048), "numbers of tokens per call", quick=(64,)),
    "rounds": Option(25, "number of timed rounds", quick=1),
    "threads": Option(1, "number of CPU threads"),
}


def _layers(dtype: torch.dtype) -> list[MoELayer]:
    """Create the layer without and with `batch_invariant`, with the same weights."""
    layers = [MoELayer(from_dict({**LAYER, "batch_invariant": on}), dtype=dtype)
              for on in (False, True)]
    layers[1].load_state_dict(layers[0].state_dict())
    return layers


def _call(layer: MoELayer, x_TD: Tensor, backward: bool) -> None:
    with torch.set_grad_enabled(backward):
        output = layer(x_TD).output
        if backward:
            output.sum().backward()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    rows = []
    for dtype in DTYPES:
        layers = _layers(getattr(torch, dtype))
        for tokens in args.tokens:
            x_TD = torch.randn(tokens, LAYER["model_dim"], dtype=getattr(torch, dtype))
            for backward in (False, True):
                times = interleaved([partial(_call, layer, x_TD, backward) for layer in layers],
                                    torch.device("cpu"), args.rounds)
                rows.append({"dtype": dtype, "tokens": tokens, "backward": backward,
                             "plain": times[0].median, "invariant": times[1].median})
    return {"rows": rows, "versions": versions("cpu")}


def body(found: dict[str, Any]) -> list[str]:
    rows = [{**row, "passes": "forward and backward" if row["backward"] else "forward"}
            for row in found["rows"]]
    return page(__name__, found, rows=rows)
