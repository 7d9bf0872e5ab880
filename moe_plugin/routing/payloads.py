"""Read the routed experts that reinforcement learning frameworks pass from an inference engine to
training.

The functions return the arguments of Megatron's `replay_rollouts` and of `tokens_of_rank`: the
chosen experts of a whole micro-batch, and the lengths of its packed sequences. Both frameworks pack
the samples of a micro-batch into one sequence, and pad each sample so that context parallelism can
split it:

    with replay_rollouts(model, *slime_batch(batch["rollout_routed_experts"], lengths, context=2)):
        ...

Tokens without a recorded choice get the value -1, so that the router chooses their experts. Such
tokens are padding and the last token of a sample.

Sources: slime (THUDM/slime) `slime/utils/types.py` and `slime/backends/megatron_utils/cp_utils.py`
of August 2026; verl (verl-project/verl) `verl/experimental/agent_loop/agent_loop.py`,
`verl/utils/megatron/router_replay_utils.py` and `verl/models/mcore/util.py` of January and August
2026.

Notation: B is the number of samples, S the number of tokens of a padded sample or of the packed
sequence, T the number of tokens of a sample, L the number of layers, and K the number of experts
per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.routing.rollouts import check_parts, packed, rollout
from moe_plugin.utils.messages import short


def sglang_sample(meta_info: Mapping[str, Any], tokens: int, layers: int, top_k: int,
                  earlier: Tensor | None = None) -> Tensor:
    """Return the experts of a sample, int64 [T - 1, L, K], from a response of SGLang.

    In a conversation with several turns, a response may contain only the rows from position
    `routed_experts_start_len`. The rows before this position are taken from the earlier response.

    Args:
        meta_info: dict `meta_info` of the response. Its entry `routed_experts` is a base64 string,
            bytes or a sequence of int32 numbers.
        tokens: number of tokens of the sample after this response, T.
        layers: number of layers of the model, L. SGLang also counts layers without experts.
        top_k: number of experts per token, K.
        earlier: the sample's experts before this response, [at least the start position, L, K].
            Required only if the start position is greater than 0.
    Raises:
        ValueError: If the number of values does not match the sample, or if earlier rows are
            missing.
    """
    value, start = meta_info["routed_experts"], int(meta_info.get("routed_experts_start_len") or 0)
    if isinstance(value, (bytes, bytearray)):
        value = torch.frombuffer(bytearray(value), dtype=torch.int32)
    if not isinstance(value, str):
        value = torch.as_tensor(value).reshape(-1, layers, top_k)
    ids_TLK = rollout(value, layers, top_k)
    available = 0 if earlier is None else len(earlier)
    if not 0 <= start <= available:
        raise ValueError(f"routed_experts_start_len={start} must be in 0..{available}, the number "
                         "of tokens with known experts. Pass `earlier`, the experts that were "
                         "returned for the sample before.")
    if len(ids_TLK) != max(0, tokens - 1 - start):
        raise ValueError(f"The response has the experts of {len(ids_TLK)} tokens, but a sample of "
                         f"{tokens} tokens that starts at routed_experts_start_len={start} needs "
                         f"{max(0, tokens - 1 - start)}. Pass the sample of this response.")
    return ids_TLK if earlier is None else torch.cat([earlier[:start].long().cpu(), ids_TLK])


def slime_batch(samples: Sequence[Any], tokens: Sequence[int], *, context: int = 1,
                multiple: int = 1, allgather_cp: bool = False
                ) -> tuple[Tensor, list[int] | None]:
    """Return the experts of a micro-batch of slime, int64 [1, S, L, K], and the lengths of its
    packed sequences.

    Args:
        samples: entry `rollout_routed_experts` of the micro-batch: for each sample, the experts
            [T - 1, L, K]. A row for the last token may follow.
        tokens: number of tokens of each sample, T (slime's `total_lengths`).
        context: `context_parallel_size`.
        multiple: `tensor_model_parallel_size * data_pad_size_multiplier` of slime. slime pads the
            tokens of a rank to a multiple of this number.
        allgather_cp: slime's setting `allgather_cp`, with which each rank processes adjacent
            tokens. The lengths are then None.
    Raises:
        ValueError: If the numbers of rows and tokens do not match, or if a rank's tokens cannot be
            split into two equal parts.
    """
    ids = [rollout(sample) for sample in samples]
    _check_rows(ids, tokens)
    if allgather_cp:
        ids_1SLK = packed(ids, tokens)
        ids_1SLK = F.pad(ids_1SLK, (0, 0, 0, 0, 0, -sum(tokens) % (context * multiple)), value=-1)
        return _adjacent(ids_1SLK, context), None
    parts = 2 * context if context > 1 else 1
    lengths = [count + -count % parts for count in tokens]
    missing = -(sum(lengths) // context) % multiple * context
    if missing:
        lengths.append(missing)
        ids.append(ids[0][:0])
    return packed(ids, lengths), lengths


def verl_batch(routed_experts: Any, attention_mask: Any, *, context: int = 1, tensor: int = 1,
               fp8_padding: bool = False, contiguous: bool = False
               ) -> tuple[Tensor, list[int] | None]:
    """Return the experts of a micro-batch of verl, int64 [1, S, L, K], and the lengths of its
    packed sequences.

    verl sets the experts of tokens without a recorded choice to 0. With two or more experts per
    token, rows of zeros are therefore read as -1. With one expert per token, they cannot be
    distinguished from expert 0.

    Args:
        routed_experts: entry `routed_experts` of the batch, integers [B, S, L, K]. Prompts are
            padded on the left, and responses on the right. Newer versions of verl pass a nested
            tensor with the experts [T - 1, L, K] or [T, L, K] of each sample.
        attention_mask: bool or integers [B, S], nonzero for tokens that are not padding. With a
            nested tensor of experts, the nested tensor `input_ids`.
        context: `context_parallel_size`.
        tensor: `tensor_model_parallel_size`.
        fp8_padding: verl's `use_fp8_padding`.
        contiguous: True if verl's context-parallel layout is "contiguous" instead of "zigzag", so
            that each rank processes adjacent tokens. The lengths are then None.
    Raises:
        ValueError: If the two shapes do not match, or if a rank's tokens cannot be split into two
            equal parts.
    """
    if getattr(routed_experts, "is_nested", False):
        samples = [rollout(sample) for sample in routed_experts.unbind()]
        tokens = [len(sample) for sample in attention_mask.unbind()]
        _check_rows(samples, tokens)
    else:
        samples = _unpadded(routed_experts, attention_mask)
        tokens = [len(sample) for sample in samples]
    if samples[0].shape[-1] > 1:
        samples = [ids_TLK.masked_fill((ids_TLK == 0).all(-1, keepdim=True), -1)
                   for ids_TLK in samples]
    parts = tensor * context * (2 if context > 1 and not contiguous else 1)
    unit = math.lcm(16, parts) if fp8_padding else parts
    lengths = [count + -count % unit for count in tokens]
    if fp8_padding:
        lengths[-1] += -sum(lengths) % (128 * parts)
    if contiguous:
        return _adjacent(packed(samples, lengths), context), None
    return packed(samples, lengths), lengths


def _check_rows(samples: Sequence[Tensor], tokens: Sequence[int]) -> None:
    """Raise a `ValueError` unless each sample has a row for each token, or for all but the last."""
    for number, (ids_TLK, count) in enumerate(zip(samples, tokens, strict=True)):
        if len(ids_TLK) not in (count - 1, count):
            raise ValueError(
                f"Sample {number} has the experts of {len(ids_TLK)} tokens, but {count} tokens, so "
                f"it must have {count - 1} or {count} rows. Pass the numbers of tokens of this "
                "micro-batch.")


def _unpadded(routed_experts: Any, attention_mask: Any) -> list[Tensor]:
    """Return the experts of each sample's tokens, int64 [T, L, K]. See `verl_batch`."""
    ids_BSLK = torch.as_tensor(routed_experts).long().cpu()
    mask_BS = torch.as_tensor(attention_mask).bool().cpu()
    if ids_BSLK.dim() != 4 or ids_BSLK.shape[:2] != mask_BS.shape:
        raise ValueError(f"routed_experts has shape {short(tuple(ids_BSLK.shape))}, and "
                         f"attention_mask has shape {short(tuple(mask_BS.shape))}. They must be "
                         "[samples, tokens, layers, top_k] and [samples, tokens] of one batch.")
    return [ids_SLK[mask_S] for ids_SLK, mask_S in zip(ids_BSLK, mask_BS, strict=True)]


def _adjacent(ids_1SLK: Tensor, context: int) -> Tensor:
    """Reorder tokens so that Megatron's split for context parallelism, which gives each rank one
    part from the start and one from the end, gives each rank adjacent tokens.
    """
    if context == 1:
        return ids_1SLK
    check_parts("context", ids_1SLK.shape[1], 2 * context)
    parts = ids_1SLK.chunk(2 * context, 1)
    return torch.cat([*parts[::2], *reversed(parts[1::2])], 1)
