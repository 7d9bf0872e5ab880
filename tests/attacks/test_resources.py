"""Small files that would take much memory, disk or time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open

from moe_plugin.checkpoint import CheckpointError
from moe_plugin.checkpoint.formats.base import open_source
from moe_plugin.checkpoint.formats.huggingface.files import check_counts, open_safetensors
from moe_plugin.memory.safetensors_file import SafetensorsFile
from moe_plugin.observe.history import read_run
from tests.fuzz.samples import CONFIG, sample

pytestmark = pytest.mark.fast


def _file(path: Path, places: list[tuple[int, int]], nbytes: int) -> Path:
    header = json.dumps({f"t{at}": {"dtype": "U8", "shape": [end - begin],
                                    "data_offsets": [begin, end]}
                         for at, (begin, end) in enumerate(places)}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(nbytes))
    return path


@pytest.mark.parametrize(("places", "nbytes"), [
    ([(0, 64), (0, 64)], 64), ([(0, 40), (30, 64)], 64), ([(0, 20), (30, 64)], 64),
    ([(8, 64)], 64), ([(0, 60)], 64)])
def test_safetensors_that_the_library_refuses(tmp_path: Path, places: list[tuple[int, int]],
                                              nbytes: int) -> None:
    path = _file(tmp_path / "x.safetensors", places, nbytes)
    with pytest.raises(SafetensorError):
        safe_open(path, "pt")
    with pytest.raises(ValueError, match="overlap|to no tensor"):
        SafetensorsFile(path)


def test_a_tensor_with_more_elements_than_stored(tmp_path: Path) -> None:
    torch.save({"x_num_global_experts": torch.tensor(2), "x": torch.zeros(1).expand(10**9)},
               tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a.pt.*1000000000 elements in only 4 bytes"):
        open_source(tmp_path / "a.pt", "tutel")


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_local_experts", "hidden_size",
                                  "vocab_size", "intermediate_size", "num_attention_heads"])
def test_counts_of_a_configuration_are_compared_with_the_files(tmp_path: Path, name: str) -> None:
    for file in sample("hf").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with open_safetensors(tmp_path) as source:
        check_counts(source)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, name: 10**12}))
    with open_safetensors(tmp_path) as source, pytest.raises(
            CheckpointError, match=f"{name}=1000000000000, but the files allow at most"):
        check_counts(source)


def _record(step: int) -> str:
    return json.dumps({"step": step, "layer": "a", "load": [step, 2, 3]}) + "\n"


@pytest.mark.parametrize("bad", [
    "\0" * 40 + "\n", '{"step": 3, "layer": "a", "load": [true]}\n',
    '{"step": -1, "layer": "a", "load": []}\n'])
def test_one_bad_line_hides_no_other(tmp_path: Path, bad: str) -> None:
    lines = [_record(step) for step in range(1, 31)]
    lines[2] = bad
    (tmp_path / "stats.jsonl").write_text("".join(lines))
    run = read_run(tmp_path)
    assert [record.step for record in run.layers["a"]] == [1, 2, *range(4, 31)]
    assert list(run.layers["a"][0].load) == [1, 2, 3]
    if "step" in bad:
        assert any("1 line of stats.jsonl" in note and "line 3" in note for note in run.notes)


def test_one_bad_entry_of_a_trainers_state_hides_no_other(tmp_path: Path) -> None:
    history: list[object] = [{"step": step, "loss": 1.0} for step in range(1, 31)]
    history[4] = {"step": -3, "loss": 1.0}
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    run = read_run(tmp_path)
    assert len(run.steps) == 29
    assert any("1 line of trainer_state.json" in note and "5" in note for note in run.notes)


def test_a_file_of_bad_lines_alone_says_so(tmp_path: Path) -> None:
    (tmp_path / "stats.jsonl").write_text('{"step": -1, "layer": "a", "load": []}\n')
    with pytest.raises(ValueError, match=r"no record of a run.*1 line of stats.jsonl.*line 1"):
        read_run(tmp_path)
