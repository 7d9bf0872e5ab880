"""Checkpoints of all formats, of any content: refused by name, or what is read is in the files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from moe_plugin import MoELayer
from moe_plugin.checkpoint import CheckpointError, load, save
from moe_plugin.checkpoint.formats.base import convert, detect, open_source
from moe_plugin.checkpoint.source import Key, Source, full_window
from moe_plugin.config import from_dict
from moe_plugin.utils import checksums
from scripts.emulate.damage import WAYS, damage, files_of
from tests.fuzz.hostile import VALUES, bounded, is_named, replaced
from tests.fuzz.samples import TARGETS, damage_content, format_of, sample

# Checkpoints of all formats whose files hold anything: what is read is what is said to be there,
# or the checkpoint is refused by name.


LARGE = 1 << 24  # bytes of a tensor that is not read


def _all_tensors(source: Source) -> dict[Key, Tensor]:
    found = {}
    for key in source.entries:
        one = source.tensor(key)
        if one.entry.nbytes <= LARGE:
            found[key] = one.read(full_window(one.entry.shape))
            assert tuple(found[key].shape) == one.entry.shape, key
            assert found[key].dtype == one.entry.dtype, key
    return found


def _read(path: Path, name: str) -> dict[Key, Tensor] | None:
    """All that a checkpoint holds, also by the names of other formats; None: refused."""
    try:
        detect(path)
    except ValueError as error:
        assert is_named(error), error
    found = None
    try:
        with open_source(path, format_of(name)) as source:
            for file in source.files():
                checksums.verify(file)
            source.describe()
            found = _all_tensors(source)
            for to in TARGETS[name]:
                _all_tensors(convert(source, to))
    except ValueError as error:
        assert is_named(error), error
    return found


def _copy(format: str, path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(sample(format), path)
    return path


@pytest.mark.parametrize("format", TARGETS)
def test_samples_are_whole(format: str, tmp_path: Path) -> None:
    assert detect(sample(format)) == format_of(format)
    with open_source(_copy(format, tmp_path / "ckpt")) as source:
        assert _all_tensors(source)
        for to in TARGETS[format]:
            assert _all_tensors(convert(source, to))


@given(st.sampled_from(sorted(TARGETS)), st.data())
@bounded(200)
def test_content_of_checkpoints(tmp_path: Path, format: str, data: st.DataObject) -> None:
    path = _copy(format, tmp_path / "ckpt")
    for _ in range(data.draw(st.integers(1, 2))):
        try:
            damage_content(data.draw(st.sampled_from(files_of(path))), data.draw)
        except (ValueError, TypeError, AttributeError, RuntimeError, RecursionError,
                OverflowError):  # nothing writes this
            continue
    _read(path, format)


# formats whose files all have checksums
SEALED = ("fairseq", "plain")


@given(st.sampled_from(sorted(TARGETS)), st.sampled_from(WAYS), st.integers(0, 1 << 30))
@bounded(200)
def test_bytes_of_checkpoints(tmp_path: Path, format: str, way: str, seed: int) -> None:
    path = _copy(format, tmp_path / "ckpt")
    files = files_of(path)
    try:
        damage(files[seed % len(files)], way, seed)
    except ValueError:  # it is the only one, or empty
        return
    found = _read(path, format)
    if found is not None and format in SEALED:
        with open_source(sample(format)) as source:
            wanted = _all_tensors(source)
        assert all(torch.equal(found[key], value) for key, value in wanted.items())


@pytest.mark.parametrize(("setting", "value"), [
    ("hidden_act", []), ("model_type", {}), ("rms_norm_eps", "small"), ("rope_parameters", "yes"),
    ("layer_types", 3), ("num_attention_heads", 0), ("num_local_experts", "two")])
def test_settings_of_other_types_are_named(tmp_path: Path, setting: str, value: Any) -> None:
    config = _copy("hf", tmp_path / "ckpt") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), setting: value}))
    with open_source(tmp_path / "ckpt") as source:
        try:
            _all_tensors(convert(source, "plain"))
            _all_tensors(convert(source, "megatron"))
        except CheckpointError as error:
            assert is_named(error), error


@pytest.mark.parametrize(("setting", "value"), [
    ("quant_method", None), ("quant_method", ["fp8"]), ("quant_method", "9" * 1000),
    ("weight_block_size", [0, 12]), ("weight_block_size", [16]), ("weight_block_size", {}),
    ("weight_block_size", [True, 12]), ("weight_block_size", [1 << 70, 1 << 70])])
def test_quantizations_of_other_types_are_named(tmp_path: Path, setting: str, value: Any) -> None:
    config = _copy("hf-float8", tmp_path / "ckpt") / "config.json"
    read = json.loads(config.read_text())
    read["quantization_config"][setting] = value
    config.write_text(json.dumps(read))
    with pytest.raises(CheckpointError) as found:
        open_source(tmp_path / "ckpt")
    assert is_named(found.value)


@given(st.data())
@bounded(200)
def test_quantizations(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever `config.json` says of it: the numbers of the sample, or refused by name."""
    path = _copy("hf-float8", tmp_path / "ckpt") / "config.json"
    read = json.loads(path.read_text())
    path.write_text(json.dumps({**read, "quantization_config": replaced(
        read["quantization_config"], data.draw)}, default=str))
    _read(path.parent, "hf-float8")


def test_a_long_setting_is_shortened_for_each_family(tmp_path: Path) -> None:
    index = _copy("plain", tmp_path / "ckpt") / "index.json"
    values, _ = checksums.open_json(index.read_text())
    values["extra"]["model"]["activation"] = ["9" * 1000]
    index.write_text(checksums.seal_json(values))
    with open_source(tmp_path / "ckpt") as source, pytest.raises(CheckpointError) as found:
        convert(source, "hf")
    assert is_named(found.value) and "no Hugging Face family" in str(found.value)


@pytest.mark.parametrize("name", ["files", "checksums", "layout", "model", "settings"])
def test_a_description_of_other_types_is_named(tmp_path: Path, name: str) -> None:
    path = _copy("megatron", tmp_path / "ckpt")
    [meta] = path.rglob("moe_plugin.json")
    values, _ = checksums.open_json(meta.read_text())
    meta.write_text(checksums.seal_json({**values, name: [1]}))
    with pytest.raises(CheckpointError, match=f"{name}=.* must be a mapping"):
        open_source(path, "megatron")


def test_names_that_are_not_text_are_named(tmp_path: Path) -> None:
    path = _copy("fairseq_branch", tmp_path / "ckpt")
    for file in path.iterdir():
        state = torch.load(file, weights_only=False)
        torch.save({**state, "model": {**state["model"], 5: torch.zeros(3)}}, file)
    with pytest.raises(CheckpointError, match="matches no known format"):
        detect(path)
    with pytest.raises(CheckpointError, match="it does not contain a model"):
        open_source(path, "fairseq_branch")


# Checkpoints whose files are whole and hold something else than a save writes: refused by name.


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
