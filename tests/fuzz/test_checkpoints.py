"""Checkpoints whose files are whole and hold something else than a save writes: refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moe_plugin import MoELayer
from moe_plugin.checkpoint import CheckpointError, load, save
from moe_plugin.config import from_dict
from tests.fuzz.hostile import VALUES, bounded, is_named

TENSORS = st.sampled_from([torch.zeros(0), torch.zeros(3, 3), torch.ones(8, dtype=torch.int64),
                           torch.zeros(()), torch.zeros(4, 8, 16, dtype=torch.bfloat16)])
ANYTHING = st.one_of(VALUES, TENSORS)


def _model() -> nn.Module:
    return MoELayer(from_dict({"model_dim": 8, "num_experts": 4, "experts": {"hidden_dim": 16}}))


def _damaged(value: Any, draw: st.DrawFn) -> Any:
    """A copy in which one value, somewhere, is another or gone."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value, key=str)))
        rest = {k: v for k, v in value.items() if k != key}
        return rest if draw(st.booleans()) else {**rest, key: _damaged(value[key], draw)}
    if isinstance(value, list) and value and draw(st.booleans()):
        return [_damaged(value[0], draw), *value[1:]]
    return draw(ANYTHING)


@given(st.data())
@bounded(120)
def test_values_that_no_save_writes(tmp_path: Path, data: st.DataObject) -> None:
    model, path = _model(), tmp_path / "ckpt"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 8)).output.sum().backward()
    optimizer.step()
    save(path, model, optimizer)
    part = path / "part-00000-of-00001.pt"
    state = torch.load(part, weights_only=True)
    torch.save(_damaged(state, data.draw), part)
    index = {"version": 1, "parts": 1, "bytes": [part.stat().st_size], "extra": {}}
    if data.draw(st.booleans()):
        index = _damaged(index, data.draw)
    try:
        (path / "index.json").write_text(json.dumps(index, default=str))
    except ValueError:  # an integer that Python does not write
        return
    try:
        load(path, model, optimizer)
    except CheckpointError as error:
        assert is_named(error), error


def test_other_widths_are_named(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", _model())
    wide = MoELayer(from_dict({"model_dim": 8, "num_experts": 4, "experts": {"hidden_dim": 24}}))
    before = wide.experts.w_in_LDF.clone()
    with pytest.raises(CheckpointError, match=r"w_in_LDF' has shape \(4, 8, 16\).*\(4, 8, 24\)"):
        load(tmp_path / "ckpt", wide)
    assert torch.equal(wide.experts.w_in_LDF, before)


def test_a_size_of_many_digits_is_not_written_out(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", _model())
    path = tmp_path / "ckpt" / "index.json"
    path.write_text(json.dumps({"version": 1, "parts": 1, "bytes": [10**3000], "extra": {}}))
    with pytest.raises(CheckpointError, match="index lists 1000.*truncated or missing") as found:
        load(tmp_path / "ckpt", _model())
    assert is_named(found.value)
