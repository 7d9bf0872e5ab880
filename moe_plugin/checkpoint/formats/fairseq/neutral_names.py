"""Conversion between the tensor names of fairseq's decoder language models and
framework-independent names.

The models may be dense or have this package's MoE layers.

    neutral                      fairseq, below `decoder.`
    embed, output, final_norm    embed_tokens, output_projection, layer_norm
    position                     embed_positions, after the rows up to the padding row
    attention.q, k, v, o         self_attn.q_proj, k_proj, v_proj (joined in older releases:
                                 self_attn.in_proj_weight), out_proj
    norm1, norm2                 self_attn_layer_norm, final_layer_norm
    mlp.w_in, w_out              fc1, fc2
    moe                          moe_layer.moe

The optimizer state of a parameter is stored under the parameter's name. If a model of another
format has no biases, they are set to zero in fairseq's model. The padding rows of the position
embeddings are set to zero as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch

from moe_plugin.checkpoint.derived import filled, joined, part_of
from moe_plugin.checkpoint.layers import NEUTRAL_NAMES
from moe_plugin.checkpoint.name_table import KINDS, NameRule, NameTable, both_kinds, same_parts
from moe_plugin.checkpoint.neutral import zeros
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Derived, Source, View

POSITIONS = "decoder.embed_positions.weight"
PADDING_ROWS = 2  # fairseq's positions start after the number of the padding word, which is 1
_BUFFERS = {"decoder.version": 3.0, "decoder.embed_positions._float_tensor": 0.0}
_OUTER = {"decoder.embed_tokens.weight": "embed.weight", POSITIONS: "position.weight",
          "decoder.output_projection.weight": "output.weight",
          "decoder.layer_norm.weight": "final_norm.weight",
          "decoder.layer_norm.bias": "final_norm.bias"}
_INNER = {"self_attn.k_proj": "attention.k", "self_attn.v_proj": "attention.v",
          "self_attn.q_proj": "attention.q", "self_attn.out_proj": "attention.o",
          "self_attn_layer_norm": "norm1", "fc1": "mlp.w_in", "fc2": "mlp.w_out",
          "final_layer_norm": "norm2"}  # in the order of a layer's parameters
_WEIGHT = re.compile(rf"(layers\.\d+\.(?:{'|'.join(_INNER.values())}))\.weight")
_MOE = "moe_layer.moe."
_RULES = (
    *same_parts("", "", _OUTER),
    *same_parts("decoder.layers.{n}.", "layers.{n}.", both_kinds(_INNER)),
    *same_parts(f"decoder.layers.{{n}}.{_MOE}", "layers.{n}.moe.", NEUTRAL_NAMES),
)
_WRITTEN = NameTable(_RULES)
_READ = NameTable((*_RULES, *(
    NameRule(f"decoder.layers.{{n}}.self_attn.in_proj_{kind}",
         tuple(f"layers.{{n}}.attention.{part}.{kind}" for part in "qkv")) for kind in KINDS)))


def our_prefix(prefix: str) -> str:
    """Convert a prefix such as `layers.N.moe.` to `decoder.layers.N.moe_layer.moe.`."""
    return f"decoder.{prefix.removesuffix('moe.')}{_MOE}"


def neutral_tensors(source: Source, tied: bool) -> Iterator[Derived]:
    """Yield the tensors of a `fairseq` source under framework-independent names.

    Args:
        source: the source.
        tied: whether the output matrix is the same as the embedding matrix. If `tied` is True, the
            output matrix is not yielded.
    """
    found = (source.tensor(key) for key in source.entries if key[1] not in _BUFFERS
             and not (tied and key[1] == "decoder.output_projection.weight"))
    return _READ.neutral((part_of(one, (slice(PADDING_ROWS, one.entry.shape[0]),))
                          if one.key[1] == POSITIONS else one for one in found), _without_name)


def _without_name(tensor: Derived) -> Derived:
    name = tensor.key[1]
    if width := re.search(r"\bproject_(in|out)_dim\b", name):
        raise CheckpointError(
            f"tensor {name!r} projects embeddings of another width (fairseq's default width is 512 "
            "for any --decoder-embed-dim), and such a model cannot be upcycled; train with "
            f"--decoder-{width[1]}put-dim equal to --decoder-embed-dim")
    raise CheckpointError(f"tensor {name!r} cannot be upcycled: only decoder language models "
                          "(transformer_lm) with the standard tensors are supported")


def fairseq_tensors(source: Source) -> Iterator[Derived]:
    """Yield the tensors of a framework-independent source under fairseq's names."""
    tensors = [source.tensor(key) for key in source.entries]
    biases = [zeros(one, f"{found[1]}.bias") for one in tensors
              if (found := _WEIGHT.fullmatch(one.key[1]))
              and (one.key[0], f"{found[1]}.bias") not in source.entries]
    for one in _WRITTEN.theirs(View(source, [*tensors, *biases]), _without_place):
        yield _with_padding(one) if one.key[1] == POSITIONS else one


def _without_place(one: Derived) -> Derived:
    raise CheckpointError(f"fairseq's transformer_lm has no counterpart for tensor {one.key[1]!r}; "
                          "choose another format")


def _with_padding(one: Derived) -> Derived:
    return joined([filled(one.key, (PADDING_ROWS, one.entry.shape[1]), one.entry.dtype), one], 0)


def more_tensors(tensors: Sequence[Derived], tied: bool, sinusoidal: bool) -> Iterator[Derived]:
    """Yield the tensors of a fairseq file that are not parameters. If the output matrix is tied, it
    is also yielded.

    Args:
        tensors: the tensors that `fairseq_tensors` yielded.
        tied: whether the output matrix is the same as the embedding matrix.
        sinusoidal: whether the model uses sinusoidal positions.
    """
    if tied:
        for tensor in tensors:
            if tensor.key == (MODEL, "decoder.embed_tokens.weight"):
                yield tensor.renamed("decoder.output_projection.weight")
    for name, value in _BUFFERS.items():
        if name == "decoder.version" or sinusoidal:
            yield filled((MODEL, name), (1,), torch.float32, value)
