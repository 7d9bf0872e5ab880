"""gpt-oss as it is released: bytes of two numbers with scales are the numbers that `transformers`
makes of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin.checkpoint import CheckpointError
from moe_plugin.checkpoint.formats.base import open_source
from moe_plugin.checkpoint.formats.huggingface.files import open_safetensors
from moe_plugin.checkpoint.formats.huggingface.format import state_source
from moe_plugin.checkpoint.formats.huggingface.quantization import dequantized
from moe_plugin.checkpoint.source import MODEL
from moe_plugin.cli.main import main
from tests.checkpoint.hf_models import logits, tiny, tokens
from tests.checkpoint.quantized import config_of, read_all, write

transformers = pytest.importorskip("transformers", minversion="5.20")
NAME = "model.layers.0.mlp.experts.gate_up_proj"
CONFIG = {"model_type": "gpt_oss", "dtype": "float32",
          "quantization_config": {"quant_method": "mxfp4"}}
NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def drawn(experts: int, outer: int, groups: int) -> tuple[Tensor, Tensor]:
    """Random bytes, and scales between 2^-4 and 2^3."""
    return (torch.randint(0, 256, (experts, outer, groups, 16), dtype=torch.uint8),
            torch.randint(123, 131, (experts, outer, groups), dtype=torch.uint8))


def by_hand(blocks: Tensor, scales: Tensor) -> Tensor:
    """[E, I, O] number by number, in float64."""
    experts, outer, groups, half = blocks.shape
    made = torch.empty(experts, groups * 2 * half, outer, dtype=torch.float64)
    for e in range(experts):
        for o in range(outer):
            for i in range(groups * 2 * half):
                group, at = divmod(i, 2 * half)
                byte = int(blocks[e, o, group, at // 2])
                code = byte // 16 if at % 2 else byte % 16
                value = NUMBERS[code % 8] * (-1 if code >= 8 else 1)
                made[e, i, o] = value * 2.0 ** (int(scales[e, o, group]) - 127)
    return made


def read(state: dict[str, Tensor]) -> Any:
    return dequantized(state_source(state, CONFIG))


@pytest.mark.fast
def test_numbers_and_windows() -> None:
    torch.manual_seed(0)
    blocks, scales = drawn(2, 6, 3)
    source = read({f"{NAME}_blocks": blocks, f"{NAME}_scales": scales})
    assert list(source.entries) == [(MODEL, NAME)]
    want = by_hand(blocks, scales)
    assert torch.equal(source.read((MODEL, NAME)).double(), want)
    for window in ((slice(1, 2), slice(30, 67), slice(2, 5)), (slice(0, 2), slice(32, 64)),
                   (slice(0, 1), slice(40, 40)), (slice(0, 0),)):
        assert torch.equal(source.read((MODEL, NAME), window).double(), want[window])
    assert source.decoded(torch.bfloat16).read((MODEL, NAME)).dtype == torch.bfloat16


@pytest.mark.fast
def test_what_is_damaged_is_named() -> None:
    blocks, scales = drawn(2, 6, 3)
    for state, words in (({f"{NAME}_blocks": blocks}, "one of them is missing"),
                         ({f"{NAME}_scales": scales}, "one of them is missing"),
                         ({f"{NAME}_blocks": blocks, f"{NAME}_scales": scales[:1]},
                          r"needs bytes \[E, O, I / 32, 16\]"),
                         ({f"{NAME}_blocks": blocks.float(), f"{NAME}_scales": scales}, "float32")):
        with pytest.raises(CheckpointError, match=words):
            read(state)


def test_a_folder_of_gpt_oss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `transformers` unpacks it: every tensor, the logits, and `check-hf`."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tiny("gpt_oss", intermediate_size=32).save_pretrained(tmp_path / "plain")
    with open_safetensors(tmp_path / "plain") as source:
        state, config = read_all(source), source.values["config"]
    wanted = {name: value.bfloat16() for name, value in state.items()}
    torch.manual_seed(1)
    packed = dict(wanted)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = packed.pop(name).shape
        blocks, scales = drawn(experts, outer, inner // 32)
        wanted[name] = convert_moe_packed_tensors(blocks, scales)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
    write(tmp_path / "in", packed, {**config, "dtype": "bfloat16", "quantization_config": {
        "quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}})
    with open_source(tmp_path / "in") as source:
        assert source.describe()["quantization"] == "mxfp4, blocks of 32, read as bfloat16"
        assert source.layers["model.layers.0.mlp."]["num_experts"] == 6
    assert main(["reshard", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert "quantization_config" not in config_of(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    assert logits(model, tokens(model)).isfinite().all()
    pytest.importorskip("accelerate")  # transformers asks for it
    assert main(["check-hf", str(tmp_path / "in"), "--tokens", "9"]) == 0
    assert "2 MoE blocks, 9 tokens" in capsys.readouterr().out
