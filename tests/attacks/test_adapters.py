"""Adapters of strangers: pickles are not read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.attacks.payload import Payload


def test_an_adapter_that_is_a_pickle_is_not_read(tmp_path: Path) -> None:
    marker = tmp_path / "code has run"
    from moe_plugin.hosts.plain.adapters import load_adapter

    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    torch.save({"code": Payload(marker)}, tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match="adapter_model.bin is a pickle.*safe_serialization"):
        load_adapter(torch.nn.Linear(1, 1), tmp_path)
    assert not marker.exists()
