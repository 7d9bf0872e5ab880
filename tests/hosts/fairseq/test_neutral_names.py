"""Tensors of fairseq's models that no other format has: the error names the flags."""

from __future__ import annotations

import pytest
import torch

from moe_plugin.checkpoint import CheckpointError
from moe_plugin.checkpoint.formats.fairseq.neutral_names import (
    PADDING_ROWS,
    POSITIONS,
    neutral_tensors,
)
from tests.checkpoint.test_source import InMemory

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(("name", "message"), [
    ("decoder.project_in_dim.weight", "--decoder-input-dim equal to --decoder-embed-dim"),
    ("decoder.project_out_dim.weight", "--decoder-output-dim equal to --decoder-embed-dim"),
    ("decoder.adaptive_softmax.head.weight", "cannot be upcycled: only decoder language models")])
def test_parts_of_fairseq_alone_are_named(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name}' .*{message}"):
        list(neutral_tensors(InMemory(**{name: torch.zeros(2, 3)}), tied=True))


def test_rows_of_padding_are_cut_from_positions_alone() -> None:
    words, positions = torch.arange(12.0).view(6, 2), torch.arange(10.0).view(5, 2)
    found = {one.key[1]: one for one in neutral_tensors(InMemory(**{
        "decoder.embed_tokens.weight": words, POSITIONS: positions}), tied=True)}
    for name, want in (("embed.weight", words), ("position.weight", positions[PADDING_ROWS:])):
        assert found[name].entry.shape == want.shape
        assert torch.equal(found[name].read(tuple(slice(0, n) for n in want.shape)), want)
