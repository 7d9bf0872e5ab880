"""Folders of `transformers` models through neutral names and back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.checkpoint import CheckpointError
from moe_plugin.checkpoint.conversion import summary
from moe_plugin.checkpoint.derived import cast, in_memory
from moe_plugin.checkpoint.formats import all as checkpoint_formats  # noqa: F401 - registers all formats
from moe_plugin.checkpoint.formats.base import (
    CheckpointSizes,
    WriteProgress,
    convert,
    detect,
    formats,
    open_source,
)
from moe_plugin.checkpoint.formats.huggingface.families import FAMILIES
from moe_plugin.checkpoint.formats.huggingface.files import open_safetensors, write_folder
from moe_plugin.checkpoint.formats.huggingface.names import _block_rules
from moe_plugin.checkpoint.neutral import DecoderSettings, check_names
from moe_plugin.checkpoint.source import MODEL, DerivedSource, Source, View
from tests.checkpoint.hf_models import DENSE, MODELS, logits, tiny, tokens

transformers = pytest.importorskip("transformers", minversion="5.20")


def values(source: Source) -> dict[str, torch.Tensor]:
    """All tensors by name."""
    return {key[1]: source.read(key) for key in source.entries}


def equal(got: Source, want: Source) -> None:
    """The same names and bits."""
    left, right = values(got), values(want)
    assert sorted(left) == sorted(right)
    for name, value in right.items():
        assert torch.equal(left[name], value), name


def there_and_back(source: Source) -> Source:
    neutral = convert(source, "neutral")
    check_names(name for _, name in neutral.entries)
    # what another format would make of it: nothing is left of Hugging Face's own settings
    bare = View(neutral, [neutral.tensor(key) for key in neutral.entries],
                values={"model": neutral.values["model"]})
    return convert(bare, "hf")


class Kept(WriteProgress):
    """Of a conversion that had completed some files; counts bytes as conversions do."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder, self.names = folder, names
        self.done: list[int] = []
        self.written: list[str] = []

    def keeps(self, name: str) -> bool:
        if name in self.names:
            self.advance((self.folder / name).stat().st_size)
        return name in self.names

    def advance(self, nbytes: int) -> None:
        self.done.append(nbytes)

    def wrote(self, name: str) -> None:
        self.written.append(name)


def test_files_are_kept_and_each_is_counted_once(tmp_path: Path) -> None:
    tiny("mixtral").save_pretrained(tmp_path / "theirs")
    source = open_source(tmp_path / "theirs")
    progress = Kept(tmp_path, [])
    write_folder(tmp_path, source.values["config"], source, 30_000, progress)
    names = sorted(path.name for path in tmp_path.glob("model-*"))
    assert len(names) > 2 and sorted(progress.written)[1:-1] == names
    size = sum(entry.nbytes for entry in source.entries.values())
    assert sum(progress.done) == size
    again = Kept(tmp_path, names[:2])
    before = [(tmp_path / name).read_bytes() for name in names]
    write_folder(tmp_path, source.values["config"], source, 30_000, again)
    assert not set(names[:2]) & set(again.written)
    assert [(tmp_path / name).read_bytes() for name in names] == before
    assert size < sum(again.done) < size * 1.1  # kept ones with their headers


def test_a_disk_that_is_full_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    tiny("mixtral").save_pretrained(tmp_path / "theirs")
    source = open_source(tmp_path / "theirs")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_folder(tmp_path, source.values["config"], source, 30_000)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("kind", [*MODELS, *DENSE])
def test_a_released_folder_goes_there_and_back(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    model.save_pretrained(tmp_path / "theirs")
    assert detect(tmp_path / "theirs") == "hf"
    source = open_source(tmp_path / "theirs")
    made = there_and_back(source)
    equal(made, source)
    (tmp_path / "ours").mkdir()
    write_folder(tmp_path / "ours", made.values["config"], made, most=30_000)
    assert len(list((tmp_path / "ours").glob("model-*-of-*.safetensors"))) > 1
    equal(open_source(tmp_path / "ours"), source)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    # GLM's models hold Solar's, too
    assert type(again) is type(model) or kind == "solar_open"
    ids = tokens(model)
    assert torch.equal(logits(again, ids), logits(model, ids))


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_fused_experts_are_read(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = tiny(kind)
    model.save_pretrained(tmp_path / "separate")
    model.config.save_pretrained(tmp_path / "fused")
    save_file({name: value.contiguous() for name, value in model.state_dict().items()},
              tmp_path / "fused" / "model.safetensors")
    fused, separate = (convert(open_source(tmp_path / name), "neutral")
                       for name in ("fused", "separate"))
    equal(fused, separate)
    assert fused.layers == separate.layers
    key = MODEL, "layers.2.moe.experts.w_gate_LDF"
    window = slice(1, 5), slice(3, 9), slice(2, 11)
    for source in (fused, separate):
        assert torch.equal(source.read(key, window), source.read(key)[window])


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    """Its checkpoints have a `model_type` of their own, and that model's settings and names."""
    tiny("deepseek_v3").save_pretrained(tmp_path / "in")
    want = convert(open_source(tmp_path / "in"), "neutral")
    file = tmp_path / "in" / "config.json"
    file.write_text(file.read_text().replace('"deepseek_v3"', '"kimi_k2"'))
    found = convert(open_source(tmp_path / "in"), "neutral")
    equal(found, want)
    assert found.layers == want.layers
    (tmp_path / "out").mkdir()
    formats.get("hf")().write(convert(found, "hf"), tmp_path / "out", CheckpointSizes())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = tokens(again)
    assert torch.equal(logits(again, ids), logits(tiny("deepseek_v3"), ids))


def test_the_data_type_can_change(tmp_path: Path) -> None:
    model = tiny("olmoe")
    model.save_pretrained(tmp_path / "in")
    (tmp_path / "out").mkdir()
    source = open_source(tmp_path / "in")
    lower = View(source, [cast(source.tensor(key), torch.bfloat16) for key in source.entries])
    formats.get("hf")().write(lower, tmp_path / "out", CheckpointSizes())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.lm_head.weight, model.lm_head.weight.bfloat16())
    with pytest.raises(ValueError, match="format 'hf' does not support --ep"):
        formats.get("hf")().write(open_source(tmp_path / "in"), tmp_path / "out",
                                  CheckpointSizes(ep=2))


def folder(tmp_path: Path, change: Callable[[Path, dict[str, Any]], None]) -> Path:
    """A saved model with its files or configuration changed."""
    tiny("mixtral").save_pretrained(tmp_path, max_shard_size="20KB")
    config = json.loads((tmp_path / "config.json").read_text())
    change(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def _truncate(path: Path, config: dict[str, Any]) -> None:
    file = sorted(path.glob("model-*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])


def _point_elsewhere(path: Path, config: dict[str, Any]) -> None:
    index = path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["lm_head.weight"] = "../lm_head.safetensors"
    index.write_text(json.dumps(values))


def _name_a_lost_tensor(path: Path, config: dict[str, Any]) -> None:
    index = path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    file = values["weight_map"]["lm_head.weight"]
    values["weight_map"]["lm_head.bias"] = file
    index.write_text(json.dumps(values))


def _pickle(path: Path, config: dict[str, Any]) -> None:
    for file in path.glob("model*"):
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(b"")


@pytest.mark.parametrize(("change", "message"), [
    (_truncate, "cannot be read"), (_point_elsewhere, "files in its folder"),
    (_name_a_lost_tensor, "has no tensor 'lm_head.bias'"),
    (_pickle, "pytorch_model.bin is a pickle"),
])
def test_damaged_folders_are_errors(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_safetensors(folder(tmp_path, change))


@pytest.mark.parametrize(("settings", "message"), [
    ({"model_type": "gpt2"}, "model_type='gpt2' is not supported; supported types: afmoe"),
    ({"hidden_act": "tanh"}, "hidden_act='tanh' is not supported"),
    ({"num_attention_heads": None}, "num_attention_heads=None must be an integer"),
])
def test_settings_that_nothing_holds_are_named(settings: dict[str, Any], message: str,
                                               tmp_path: Path) -> None:
    path = folder(tmp_path, lambda _, config: config.update(settings))
    with pytest.raises(CheckpointError, match=message):
        convert(open_source(path), "neutral")


def test_what_no_family_holds_is_named(tmp_path: Path) -> None:
    tiny("mixtral").save_pretrained(tmp_path)
    neutral = convert(open_source(tmp_path), "neutral")

    def changed(**settings: Any) -> Source:
        model = {**neutral.values["model"], **settings}
        DecoderSettings.from_dict(model)
        return View(neutral, [neutral.tensor(key) for key in neutral.entries],
                    values={"model": model})

    form = formats.get("hf")()
    with pytest.raises(CheckpointError, match="mixtral: router_scale=2.0 .the family supports"):
        convert(changed(router_scale=2.0), "hf")
    with pytest.raises(CheckpointError, match="mixtral: odd=1 .the family does not support it"):
        convert(changed(extra={"odd": 1}), "hf")
    with pytest.raises(CheckpointError, match=r"whose norm is 'layernorm'; train it in Megatron "
                                              r"with --normalization RMSNorm, or"):
        convert(changed(norm="layernorm"), "hf")
    moment = replace(neutral.tensor((MODEL, "embed.weight")), key=("exp_avg", "embed.weight"))
    trained = View(neutral, [*(neutral.tensor(key) for key in neutral.entries), moment])
    with pytest.raises(CheckpointError, match="does not support optimizer state, .* has exp_avg"):
        form.write(convert(trained, "hf"), tmp_path, CheckpointSizes())


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "llama"])
def test_layers_and_settings_are_shown(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    model.save_pretrained(tmp_path)
    with open_source(tmp_path) as source:
        found = summary(source)
        neutral = convert(source, "neutral")
    assert found["settings"]["model_type"] == found["layout"]["model_type"] == kind
    assert len(found["layers"]) == len(neutral.layers)
    for (name, layer), wanted in zip(found["layers"].items(), neutral.layers.values(), strict=True):
        assert layer["num_experts"] == wanted["num_experts"] and "shared" not in name
        # one line for all experts, which are stored one by one
        assert len(layer["experts"]) == 3 and all(one.startswith("*.") for one in layer["experts"])


@pytest.mark.fast
@pytest.mark.parametrize("most", [1 << 20, 16])
def test_files_as_safetensors_writes_them(most: int, tmp_path: Path) -> None:
    """The tensors of each file begin at a multiple of 8 bytes. A single file needs no index."""
    for width in range(8):
        folder = tmp_path / str(width)
        folder.mkdir()
        source = DerivedSource([in_memory((MODEL, name + "x" * width), torch.ones(4))
                                for name in "ab"], "hf", {}, {}, "", ())
        write_folder(folder, {}, source, most, WriteProgress())
        files = sorted(folder.glob("*.safetensors"))
        assert all(int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0 for path in files)
        assert (folder / "model.safetensors.index.json").exists() == (len(files) > 1)
    assert len(files) == (1 if most > 16 else 2)


@pytest.mark.fast
def test_only_the_bias_of_a_router_is_stored_as_a_row() -> None:
    rules = {rule.ours[0].rpartition("moe.")[2]: rule.row for family in FAMILIES.values()
             if family.block is not None and family.block.bias_row
             for rule in _block_rules(family.block, "model.", True)}
    assert [name for name, row in rules.items() if row] == ["router.expert_bias"] != list(rules)
