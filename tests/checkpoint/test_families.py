"""Every family of `transformers`: our layers in its MoE blocks give its logits and gradients, and
what is written of them is what it would write itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin.checkpoint import CheckpointError, save
from moe_plugin.checkpoint.formats.base import convert, open_source
from moe_plugin.checkpoint.formats.huggingface.families import FAMILIES
from moe_plugin.checkpoint.formats.huggingface.format import state_source, to_neutral
from moe_plugin.checkpoint.layers import LAYER_NAMES
from moe_plugin.checkpoint.source import MODEL
from moe_plugin.cli.main import main
from moe_plugin.hosts.plain.huggingface import (
    restore_moe_blocks,
    swap_moe_blocks,
    swapped_blocks,
)
from tests.checkpoint.all_families import folders
from tests.checkpoint.hf_models import ALONE, COMMON, MODELS, logits, outputs, tiny, tokens

transformers = pytest.importorskip("transformers", minversion="5.20")
KINDS = [name for name, family in FAMILIES.items() if family.block is not None]


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_every_family_has_a_tiny_model() -> None:
    others = {name for name in KINDS if name.removesuffix("_text") in folders()}
    assert set(KINDS) == {*MODELS, *ALONE, *others} and len(KINDS) >= 16
    for name, family in FAMILIES.items():
        whole = family.decoder is not None
        assert whole == (name in MODELS or family.block is None) != bool(family.alone)


def gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    ids = tokens(model)
    loss = model(ids, labels=ids).get("loss")
    (outputs(model, ids).square().mean() if loss is None else loss).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_gradients_and_what_is_saved(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    ids = tokens(model)
    want, grads = logits(model, ids), gradients(model)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    trains = {name: p.requires_grad for name, p in model.named_parameters()}
    model.save_pretrained(tmp_path / "theirs")
    swap_moe_blocks(model)
    close(logits(model, ids), want)
    _compare(model, gradients(model), grads)
    model.save_pretrained(tmp_path / "ours")
    for file in (tmp_path / "theirs").iterdir():
        assert file.read_bytes() == (tmp_path / "ours" / file.name).read_bytes(), file.name
    _loads(model, own, tmp_path / "theirs", want)
    if hasattr(model, "lm_head"):  # folders are written for models with a head
        _converts(model, own, tmp_path)
    restore_moe_blocks(model)
    assert list(model.state_dict()) == list(own)
    for name, value in own.items():
        assert torch.equal(model.state_dict()[name], value), name
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trains


def _compare(model: Any, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Gradients of our layers with those of the blocks in whose place they are, and of the rest."""
    blocks = dict(swapped_blocks(model))
    inside = {name: grad for name, grad in theirs.items()
              if name.startswith(tuple(f"{block}." for block in blocks))}
    neutral = to_neutral(state_source(inside, model.config.to_dict()))
    compared = 0
    for name in blocks:
        prefix = f"layers.{name.rpartition('layers.')[2].partition('.')[0]}.moe."
        for _, key in neutral.entries:
            if key.startswith(prefix):
                mine = ours[f"{name}.moe.{LAYER_NAMES[key.removeprefix(prefix)]}"]
                close(mine, neutral.read((MODEL, key)))
                compared += 1
    assert compared == sum(".moe." in name for name in ours) >= 3 * len(blocks)
    rest = theirs.keys() - inside.keys()
    assert rest == {name for name in ours if ".moe." not in name}
    for name in rest:
        close(ours[name], theirs[name])


def _loads(model: Any, own: dict[str, Tensor], folder: Path, want: Tensor) -> None:
    """Names of the model; of its files, where what surrounds the blocks is called the same."""
    from safetensors.torch import load_file

    saved = load_file(folder / "model.safetensors")
    around = {name for name in own if not name.startswith(
        tuple(f"{name}." for name, _ in swapped_blocks(model)))} - {"lm_head.weight"}
    for state in (own, saved):
        if not around <= state.keys():
            continue
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        model.load_state_dict(state, strict=False)
        close(logits(model, tokens(model)), want)


def _converts(model: Any, own: dict[str, Tensor], folder: Path) -> None:
    """A checkpoint of training becomes a folder of `transformers`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save(folder / "plain", model, optimizer, extra={"hf_config": model.config.to_dict()})
    assert main(["reshard", str(folder / "plain"), str(folder / "hf"), "--to", "hf",
                 "--model-only"]) == 0
    again = type(model).from_pretrained(folder / "hf")
    for name, value in again.state_dict().items():
        assert torch.equal(value, own[name]), name


IN_MEGATRON = {"mixtral": "", "qwen2_moe": "", "qwen3_moe": "", "dots1": "", "glm4_moe": "",
               "solar_open": "", "olmoe": "all", "deepseek_v2": "latent", "deepseek_v3": "latent"}


@pytest.mark.parametrize("kind", MODELS)
def test_whole_models_in_megatron_and_back(kind: str, tmp_path: Path) -> None:
    """Names and bits; logits are in `test_megatron_formats.py`."""
    more = {"n_group": 1, "topk_group": 1} if "n_group" in MODELS[kind][1] else {}
    more |= {"sliding_window": None} if kind == "mixtral" else {}
    more |= {"clip_qkv": None} if kind == "olmoe" else {}
    tiny(kind, **more).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    if lacks := IN_MEGATRON[kind]:
        with pytest.raises(CheckpointError, match=lacks):
            convert(source, "megatron")
        return
    back = convert(convert(source, "megatron"), "hf")
    assert back.values["config"]["model_type"] == kind
    assert sorted(back.entries) == sorted(source.entries)
    for key in source.entries:
        assert torch.equal(back.read(key), source.read(key)), key


def test_the_decoder_of_a_model_that_sees_is_swapped(tmp_path: Path) -> None:
    text = {**COMMON, "num_hidden_layers": 2, **ALONE["qwen3_5_moe_text"][1]}
    torch.manual_seed(0)
    model = transformers.Qwen3_5MoeForConditionalGeneration(transformers.Qwen3_5MoeConfig(
        text_config=text, vision_config={
            "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
            "out_hidden_size": 32, "num_position_embeddings": 16})).eval()
    for value in model.parameters():
        if not value.any():  # some are not drawn
            torch.nn.init.normal_(value, 0.0, 0.2)
    ids = torch.randint(3, 60, (2, 9))
    want = logits(model, ids)
    model.save_pretrained(tmp_path / "theirs")
    assert swap_moe_blocks(model) == [f"model.language_model.layers.{n}.mlp" for n in (0, 1)]
    close(logits(model, ids), want)
    model.save_pretrained(tmp_path / "ours")
    for file in (tmp_path / "theirs").iterdir():
        assert file.read_bytes() == (tmp_path / "ours" / file.name).read_bytes(), file.name
    restore_moe_blocks(model)
    assert torch.equal(logits(model, ids), want)


@pytest.mark.parametrize("to", ["plain", "megatron"])
def test_a_folder_of_a_family_of_blocks_alone_is_refused(to: str, tmp_path: Path) -> None:
    tiny("gpt_oss").save_pretrained(tmp_path / "in")
    assert main(["inspect", str(tmp_path / "in")]) == 0
    with pytest.raises(CheckpointError,
                       match="no framework-independent form .attention with sinks.*swap_moe"):
        convert(open_source(tmp_path / "in"), to)
