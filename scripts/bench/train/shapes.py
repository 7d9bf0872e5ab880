"""The models whose training steps are measured, by name or as `WxFxExKxT`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from scripts.bench.train.host_sides import TrainShape

# three shapes from a study of native layers, and small versions of layers used in practice
SHAPES = {
    shape.name: shape for shape in (
        TrainShape(name="few", width=128, inner=128, experts=8, top_k=2, tokens=4096),
        TrainShape(name="fine", width=128, inner=64, experts=64, top_k=8, tokens=4096),
        TrainShape(name="wide", width=128, inner=512, experts=8, top_k=2, tokens=2048),
        TrainShape(name="switch", width=128, inner=256, experts=16, top_k=1, tokens=4096),
        TrainShape(name="mixture", width=256, inner=512, experts=8, top_k=2, tokens=2048),
        TrainShape(name="many", width=256, inner=128, experts=32, top_k=4, tokens=2048),
        # Gated experts have three matrices instead of two. With two thirds of the inner width
        # (rounded to a multiple of 32) they do as much work as the shapes above.
        TrainShape(name="gated", width=256, inner=352, experts=8, top_k=2, tokens=2048, gated=True),
        TrainShape(name="gated_fine", width=256, inner=96, experts=32, top_k=4, tokens=2048,
                   gated=True),
        TrainShape(name="few_bf16", width=128, inner=128, experts=8, top_k=2, tokens=4096,
                   bf16=True),
        TrainShape(name="mixture_bf16", width=256, inner=512, experts=8, top_k=2, tokens=2048,
                   bf16=True),
    )
}


def parse_shapes(text: str) -> list[TrainShape]:
    """Return the shapes of the option `--shapes`.

    Args:
        text: `all`, names separated by commas, or `WxFxExKxT` (width, inner width, experts, experts
            per
            token, tokens per step).

    Raises:
        ValueError: if a name is unknown.
    """
    return list(SHAPES.values()) if text == "all" else [_shape(item) for item in text.split(",")]


def _shape(text: str) -> TrainShape:
    if text in SHAPES:
        return SHAPES[text]
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)x(\d+)", text)
    if not match:
        raise ValueError(f"{text!r} is not a known shape. Use one of {', '.join(SHAPES)}, or "
                         "width x inner width x experts x k x tokens, such as 128x128x8x2x4096")
    width, inner, experts, top_k, tokens = map(int, match.groups())
    return TrainShape(name=text, width=width, inner=inner, experts=experts, top_k=top_k,
                      tokens=tokens, length=min(128, max(1, tokens // 32)))


def for_host(shapes: Sequence[TrainShape], host: str) -> list[TrainShape]:
    """Return the shapes as the host's own layer can run them.

    The layer of fairseq's moe branch supports at most two experts per token and no gated experts.
    The
    number of experts per token is reduced, and shapes with gated experts are removed.

    Raises:
        ValueError: if all shapes have gated experts, and the host is fairseq.
    """
    if host != "fairseq":
        return list(shapes)
    if found := [replace(one, top_k=min(one.top_k, 2)) for one in shapes if not one.gated]:
        return found
    raise ValueError(f"{shapes[0].name} has gated experts, which fairseq's moe branch does not "
                     "support. Use --host megatron, or another shape")
