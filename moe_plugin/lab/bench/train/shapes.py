"""The models whose training steps are measured, by name or as `WxFxExKxT`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class TrainShape:
    """A decoder language model whose every layer has experts.

    Attributes:
        width: of a token, D.
        inner: width inside an expert, F.
        experts: E.
        top_k: experts per token.
        tokens: of one step, over all ranks.
        layers, length: transformer layers, tokens of a sentence.
        gated: experts are SwiGLU ones.
        bf16: parameters and activations are in bfloat16, the optimizer's copies in float32.
    Raises: ValueError: sizes that do not fit together; it names value, bound and remedy.
    """

    name: str
    width: int
    inner: int
    experts: int
    top_k: int
    tokens: int
    layers: int = 2
    length: int = 128
    gated: bool = False
    bf16: bool = False

    def __post_init__(self) -> None:
        for field in ("width", "inner", "experts", "top_k", "tokens", "layers", "length"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} is out of bounds: must be >= 1; "
                                 "give a positive number")
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} is out of bounds: must be <= "
                             f"experts={self.experts}; lower it")

    def sentences(self, ranks: int) -> int:
        """Sentences of one rank in a step."""
        if self.tokens % (self.length * ranks):
            raise ValueError(
                f"tokens={self.tokens} does not fit {ranks} ranks and sentences of {self.length} "
                f"tokens: must be a multiple of {self.length * ranks}")
        return self.tokens // (self.length * ranks)

    def label(self) -> str:
        return (f"width {self.width}, inner {self.inner}, {self.experts} experts, k {self.top_k}, "
                f"{self.tokens:,} tokens" + ", gated" * self.gated + ", bf16" * self.bf16)


# three of a study of native layers, and small forms of layers that people train
SHAPES = {
    shape.name: shape for shape in (
        TrainShape(name="few", width=128, inner=128, experts=8, top_k=2, tokens=4096),
        TrainShape(name="fine", width=128, inner=64, experts=64, top_k=8, tokens=4096),
        TrainShape(name="wide", width=128, inner=512, experts=8, top_k=2, tokens=2048),
        TrainShape(name="switch", width=128, inner=256, experts=16, top_k=1, tokens=4096),
        TrainShape(name="mixture", width=256, inner=512, experts=8, top_k=2, tokens=2048),
        TrainShape(name="many", width=256, inner=128, experts=32, top_k=4, tokens=2048),
        # gated experts of as much work: two thirds of the inner width, in multiples of 32
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
    """The shapes of `--shapes`: `all`, names with commas, or `WxFxExKxT` (width, inner width,
    experts, experts per token, tokens of a step).

    Raises: ValueError: an unknown name.
    """
    return list(SHAPES.values()) if text == "all" else [_shape(item) for item in text.split(",")]


def _shape(text: str) -> TrainShape:
    if text in SHAPES:
        return SHAPES[text]
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)x(\d+)", text)
    if not match:
        raise ValueError(f"{text!r} is no shape; use one of {', '.join(SHAPES)}, or "
                         "width x inner x experts x k x tokens, e.g. 128x128x8x2x4096")
    width, inner, experts, top_k, tokens = map(int, match.groups())
    return TrainShape(name=text, width=width, inner=inner, experts=experts, top_k=top_k,
                      tokens=tokens, length=min(128, max(1, tokens // 32)))


def for_host(shapes: Sequence[TrainShape], host: str) -> list[TrainShape]:
    """The shapes as a host's own layer can run them: fairseq's has at most two choices, and no
    gated experts.

    Raises: ValueError: there are gated ones alone.
    """
    if host != "fairseq":
        return list(shapes)
    if found := [replace(one, top_k=min(one.top_k, 2)) for one in shapes if not one.gated]:
        return found
    raise ValueError(f"{shapes[0].name} has gated experts, which fairseq's moe branch lacks; use "
                     "--host megatron, or another shape")
