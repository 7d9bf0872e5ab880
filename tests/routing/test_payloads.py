"""Routed experts that slime and verl pass to training, as their code writes them: numbers of tokens
stand for experts, so that the order of each rank's tokens can be read.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_plugin.routing.payloads import sglang_sample, slime_batch, verl_batch
from moe_plugin.routing.rollouts import tokens_of_rank

pytestmark = pytest.mark.fast
LAYERS, K = 2, 2


def rows(*numbers: int) -> Tensor:
    """[T, L, K]: token, layer and choice in one number."""
    return torch.tensor(numbers)[:, None, None] + 1000 * torch.arange(LAYERS)[:, None] \
        + 10000 * torch.arange(K)


def first(ids: Tensor) -> list[int]:
    """The numbers of the tokens; all layers and choices belong together."""
    known_TLK = ids[(ids >= 0).all(-1).all(-1)]
    assert torch.equal(known_TLK, rows(*known_TLK[:, 0, 0].tolist()))
    return ids[:, 0, 0].tolist()


def of_rank(batch: tuple[Tensor, list[int] | None], rank: int, ranks: int,
            part: tuple[int, int] = (0, 1)) -> list[int]:
    ids_BSLK, lengths = batch
    return first(tokens_of_rank(ids_BSLK, context=(rank, ranks), lengths=lengths, sequence=part))


SAMPLES, TOKENS = [rows(*range(100, 106)), rows(*range(200, 203))], [7, 4]
LEFT = -1  # the router chooses


def test_a_packed_batch_of_slime() -> None:
    """The last token of a sample was never computed; the end is padded."""
    ids, lengths = slime_batch(SAMPLES, TOKENS, multiple=8)
    assert lengths == [7, 4, 5]
    assert first(ids[0]) == [*range(100, 106), LEFT, 200, 201, 202, *[LEFT] * 6]
    whole = slime_batch([rows(*range(100, 107)), SAMPLES[1].numpy()], TOKENS, multiple=8)
    assert first(whole[0][0])[6] == 106


def test_slimes_two_parts_of_each_sample() -> None:
    """Samples of 7 and 4 tokens become 8 and 4; each rank is padded to 8 tokens at its end."""
    batch = slime_batch(SAMPLES, TOKENS, context=2, multiple=8)
    assert batch[1] == [8, 4, 4]
    ranks = [[100, 101, LEFT, LEFT, 200, LEFT, LEFT, LEFT],
             [102, 103, 104, 105, 201, 202, LEFT, LEFT]]
    for rank, wanted in enumerate(ranks):
        assert of_rank(batch, rank, 2) == wanted
        for part in range(2):
            assert of_rank(batch, rank, 2, (part, 2)) == wanted[4 * part:4 * part + 4]


def test_slimes_adjacent_tokens() -> None:
    batch = slime_batch(SAMPLES, TOKENS, context=2, multiple=2, allgather_cp=True)
    assert batch[1] is None
    assert of_rank(batch, 0, 2) == [*range(100, 106)]
    assert of_rank(batch, 1, 2) == [LEFT, 200, 201, 202, LEFT, LEFT]
    ids, _ = slime_batch(SAMPLES, TOKENS, multiple=2, allgather_cp=True)
    assert first(ids[0]) == [*range(100, 106), LEFT, 200, 201, 202, LEFT, LEFT]


def of_verl(dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Two samples in a batch of 10 tokens: prompts end at token 4, zeros for other tokens."""
    ids_BSLK = torch.zeros(2, 10, LAYERS, K, dtype=dtype)
    mask_BS = torch.zeros(2, 10, dtype=torch.int64)
    for sample, (start, ids_TLK) in enumerate(zip((1, 3), SAMPLES, strict=True)):
        end = start + len(ids_TLK)
        ids_BSLK[sample, start:end] = ids_TLK.to(dtype)
        mask_BS[sample, start:end + 1] = 1
    return ids_BSLK, mask_BS


@pytest.mark.parametrize(("context", "tensor", "lengths", "ranks"), [
    (1, 1, [7, 4], [[*range(100, 106), LEFT, 200, 201, 202, LEFT]]),
    (1, 4, [8, 4], [[*range(100, 106), LEFT, LEFT, 200, 201, 202, LEFT]]),
    (2, 1, [8, 4], [[100, 101, LEFT, LEFT, 200, LEFT], [102, 103, 104, 105, 201, 202]]),
    (2, 2, [8, 8], [[100, 101, LEFT, LEFT, 200, 201, LEFT, LEFT],
                    [102, 103, 104, 105, 202, LEFT, LEFT, LEFT]]),
])
def test_a_batch_of_verl(context: int, tensor: int, lengths: list[int],
                         ranks: list[list[int]]) -> None:
    ids_BSLK, mask_BS = of_verl()
    batch = verl_batch(ids_BSLK.numpy(), mask_BS, context=context, tensor=tensor)
    assert batch[1] == lengths
    for rank, wanted in enumerate(ranks):
        assert of_rank(batch, rank, context) == wanted
        size = len(wanted) // tensor
        for part in range(tensor if len(wanted) % tensor == 0 else 0):
            assert of_rank(batch, rank, context, (part, tensor)) == wanted[part * size:][:size]


def test_nested_tensors_of_verl() -> None:
    """With and without a row for the last token; ranks have parts from both ends, or adjacent."""
    ids = torch.nested.as_nested_tensor([SAMPLES[0], rows(200, 201, 202, 203)], layout=torch.jagged)
    tokens = torch.nested.as_nested_tensor([torch.zeros(7), torch.zeros(4)], layout=torch.jagged)
    batch = verl_batch(ids, tokens, context=2)
    assert batch[1] == [8, 4]
    assert of_rank(batch, 0, 2) == [100, 101, LEFT, LEFT, 200, 203]
    batch = verl_batch(ids, tokens, context=2, contiguous=True)
    assert of_rank(batch, 0, 2) == [*range(100, 106)]
    assert of_rank(batch, 1, 2) == [LEFT, LEFT, 200, 201, 202, 203]
    with pytest.raises(ValueError, match="Sample 0 has the experts of 6 tokens, but 8"):
        verl_batch(ids, torch.nested.as_nested_tensor([torch.zeros(8), torch.zeros(4)],
                                                      layout=torch.jagged))


def test_verls_padding_for_fp8() -> None:
    """Each sample to a multiple of 16, and the last one until all have 128 times the ranks."""
    ids, lengths = verl_batch(*of_verl(), tensor=2, fp8_padding=True)
    assert lengths == [16, 240] and ids.shape == (1, 256, LAYERS, K)
    assert first(ids[0])[:8] == [*range(100, 106), LEFT, LEFT] and first(ids[0])[16] == 200


def test_verls_recording_of_its_own_routers_is_of_bytes() -> None:
    ids_BSLK, mask_BS = (torch.randint(1, 200, (1, 4, LAYERS, 1), dtype=torch.uint8),
                         torch.ones(1, 4))
    ids_BSLK[0, 1] = 0  # with one expert per token, 0 is an expert
    ids, _ = verl_batch(ids_BSLK, mask_BS)
    assert torch.equal(ids, ids_BSLK.long())


def answer(ids_TLK: Tensor, start: int | None = None) -> dict[str, Any]:
    text = base64.b64encode(ids_TLK.numpy().astype(np.int32).tobytes()).decode()
    offset = {} if start is None else {"routed_experts_start_len": start}
    return {"routed_experts": text, **offset}


def test_answers_of_sglang() -> None:
    ids_TLK = SAMPLES[0]
    raw = ids_TLK.numpy().astype(np.int32)
    for value in (answer(ids_TLK)["routed_experts"], raw.tobytes(), raw.flatten(), raw.tolist()):
        got = sglang_sample({"routed_experts": value}, 7, LAYERS, K)
        assert torch.equal(got, ids_TLK)
    more = sglang_sample(answer(rows(204, 205, 206), 4), 8, LAYERS, K, earlier=got)
    assert first(more) == [100, 101, 102, 103, 204, 205, 206]
    again = sglang_sample(answer(ids_TLK, 0), 7, LAYERS, K, earlier=more)
    assert torch.equal(again, ids_TLK)


@pytest.mark.parametrize(("call", "said"), [
    (lambda: sglang_sample(answer(SAMPLES[0]), 6, LAYERS, K), "experts of 6 tokens, but a .* 5"),
    (lambda: sglang_sample(answer(SAMPLES[0], 2), 9, LAYERS, K), r"start_len=2 must be in 0\.\.0"),
    (lambda: sglang_sample(answer(SAMPLES[0], -1), 6, LAYERS, K), r"=-1 must be in 0\.\.0"),
    (lambda: slime_batch(SAMPLES, [7, 5]), "Sample 1 has the experts of 3 tokens, but 5 .* 4 or 5"),
    (lambda: slime_batch(SAMPLES[:1], [6], context=2, allgather_cp=True),
     "6 tokens cannot be split into 4 equal parts"),
    (lambda: verl_batch(of_verl()[0], of_verl()[1][:, :9]), r"shape \(2, 10, 2, 2\).*\(2, 9\)"),
])
def test_what_does_not_match_is_an_error(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
