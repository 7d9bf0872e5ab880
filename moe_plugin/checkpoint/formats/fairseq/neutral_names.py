"""Tensors of fairseq's decoder language models, with our MoE layers or none, under neutral names,
and back.

    neutral                      fairseq, below `decoder.`
    embed, output, final_norm    embed_tokens, output_projection, layer_norm
    position                     embed_positions, behind the rows up to that of padding
    attention.q, k, v, o         self_attn.q_proj, k_proj, v_proj (of older releases also joined,
                                 self_attn.in_proj_weight), out_proj
    norm1, norm2                 self_attn_layer_norm, final_layer_norm
    mlp.w_in, w_out              fc1, fc2
    moe                          moe_layer.moe

The optimizer's fields follow their parameters. Biases that a model of another format does not have
are zero in fairseq's; rows of positions that stand for no token are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch

from moe_plugin.checkpoint.layers import LAYER_NAMES, layer_tensors
from moe_plugin.checkpoint.neutral import zeros
from moe_plugin.checkpoint.source import (
    MODEL,
    CheckpointError,
    Derived,
    Source,
    TensorEntry,
    derive,
    joined,
    part_of,
    pieces_of,
    window_shape,
)

POSITIONS = "decoder.embed_positions.weight"
PADDING_ROWS = 2  # fairseq counts positions from behind the number of the padding word, which is 1
_BUFFERS = {"decoder.version": 3.0, "decoder.embed_positions._float_tensor": 0.0}
_OUTER = {"decoder.embed_tokens.weight": "embed.weight",
          "decoder.output_projection.weight": "output.weight",
          "decoder.layer_norm.weight": "final_norm.weight",
          "decoder.layer_norm.bias": "final_norm.bias"}
_INNER = {"self_attn.k_proj": "attention.k", "self_attn.v_proj": "attention.v",
          "self_attn.q_proj": "attention.q", "self_attn.out_proj": "attention.o",
          "self_attn_layer_norm": "norm1", "fc1": "mlp.w_in", "fc2": "mlp.w_out",
          "final_layer_norm": "norm2"}  # in the order of a layer's parameters
_JOINED = re.compile(r"self_attn\.in_proj_(weight|bias)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_NEUTRAL_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
_MOE = "moe_layer.moe."


def neutral_prefix(prefix: str) -> str:
    """`decoder.layers.N.moe_layer.moe.` as `layers.N.moe.`."""
    return prefix.removeprefix("decoder.").removesuffix(_MOE) + "moe."


def our_prefix(prefix: str) -> str:
    """The reverse of `neutral_prefix`."""
    return f"decoder.{prefix.removesuffix('moe.')}{_MOE}"


def neutral_tensors(source: Source, tied: bool) -> Iterator[Derived]:
    """The tensors of a `fairseq` source by neutral names.

    Args:
        tied: the output matrix is the embedding, and is left out.
    Raises:
        CheckpointError: a tensor has no neutral name.
    """
    for prefix in source.layers:
        yield from layer_tensors(source, prefix, neutral_prefix(prefix))
    for key in source.entries:
        name = key[1]
        if name in _BUFFERS or name.startswith(tuple(source.layers)) or (
                tied and name == "decoder.output_projection.weight"):
            continue
        yield from _neutral(derive(source, key))


def _neutral(one: Derived) -> Iterator[Derived]:
    name = one.key[1]
    if name in _OUTER:
        yield one.renamed(_OUTER[name])
        return
    if name == POSITIONS:
        yield part_of(one, (slice(PADDING_ROWS, one.entry.shape[0]),)).renamed("position.weight")
        return
    if found := _LAYER.fullmatch(name):
        place, (part, _, kind) = f"layers.{found[1]}.", found[2].rpartition(".")
        if part in _INNER and kind in ("weight", "bias"):
            yield one.renamed(f"{place}{_INNER[part]}.{kind}")
            return
        if together := _JOINED.fullmatch(found[2]):
            for letter, third in zip("qkv", pieces_of(one, 3), strict=True):
                yield third.renamed(f"{place}attention.{letter}.{together[1]}")
            return
    if width := re.search(r"\bproject_(in|out)_dim\b", name):
        raise CheckpointError(
            f"tensor {name!r} projects embeddings of another width (fairseq's default is 512, "
            "whatever --decoder-embed-dim is), which no other format has; train with "
            f"--decoder-{width[1]}put-dim equal to --decoder-embed-dim, or convert to "
            "fairseq alone")
    raise CheckpointError(f"tensor {name!r} has no neutral name: only decoder language models "
                          "(transformer_lm) without parts of their own become another format's; "
                          "convert to fairseq alone")


def fairseq_tensors(source: Source) -> Iterator[Derived]:
    """The tensors of a neutral source by fairseq's names.

    Raises:
        CheckpointError: fairseq's `transformer_lm` has no place for a tensor.
    """
    parts = {neutral: theirs for theirs, neutral in _INNER.items()}
    outer = {neutral: theirs for theirs, neutral in _OUTER.items()}
    for key in source.entries:
        one, name = derive(source, key), key[1]
        prefix = next((prefix for prefix in source.layers if name.startswith(prefix)), None)
        found = _NEUTRAL_LAYER.fullmatch(name)
        if name in outer:
            yield one.renamed(outer[name])
        elif name == "position.weight":
            yield _with_padding(one)
        elif prefix is not None:
            if name == f"{prefix}router.bias":
                continue  # zero, see `from_neutral`
            yield one.renamed(our_prefix(prefix) + LAYER_NAMES[name.removeprefix(prefix)])
        elif found and found[2] in parts:
            yield one.renamed(f"decoder.layers.{found[1]}.{parts[found[2]]}.{found[3]}")
            bias = name.removesuffix("weight") + "bias"
            if found[3] == "weight" and (key[0], bias) not in source.entries:
                yield zeros(one, f"decoder.layers.{found[1]}.{parts[found[2]]}.bias")
        else:
            raise CheckpointError(f"tensor {name!r} has no place in fairseq's transformer_lm; "
                                  "choose another format")


def _with_padding(one: Derived) -> Derived:
    shape = (PADDING_ROWS, one.entry.shape[1])
    rows = Derived(one.key, TensorEntry(shape, one.entry.dtype),
                   lambda window: torch.zeros(window_shape(window), dtype=one.entry.dtype))
    return joined([rows, one], 0).renamed(POSITIONS)


def more_tensors(tensors: Sequence[Derived], tied: bool, sinusoidal: bool) -> Iterator[Derived]:
    """What a file of fairseq has besides parameters; the tied output matrix too.

    Args:
        tensors: of `fairseq_tensors`.
    """
    if tied:
        for one in tensors:
            if one.key == (MODEL, "decoder.embed_tokens.weight"):
                yield one.renamed("decoder.output_projection.weight")
    for name, value in _BUFFERS.items():
        if name == "decoder.version" or sinusoidal:
            yield Derived((MODEL, name), TensorEntry((1,), torch.float32),
                          lambda window, value=value: torch.full(window_shape(window), value))


def parameter_order(names: Sequence[str], moe: Sequence[str], tied: bool) -> list[str]:
    """Names of a model's parameters in the order in which fairseq registers them.

    Args:
        names: of the model's tensors. moe: names below an MoE layer, in its own order.
        tied: the output matrix is the embedding.
    """
    parts = [*(f"{part}.{kind}" for part in _INNER for kind in ("weight", "bias")),
             *(_MOE + name for name in moe)]
    ahead = ["decoder.embed_tokens.weight", POSITIONS]
    behind = ["decoder.layer_norm.weight", "decoder.layer_norm.bias",
              *([] if tied else ["decoder.output_projection.weight"])]
    known = set(names)
    numbers = sorted({int(found[1]) for found in map(_LAYER.fullmatch, names) if found})
    layers = (f"decoder.layers.{number}.{part}" for number in numbers for part in parts)
    return [name for name in (*ahead, *layers, *behind) if name in known]
