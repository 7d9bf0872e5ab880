"""Files of strangers: code in them does not run, and errors name the class and the flag."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe_plugin.checkpoint import CheckpointError, trust
from moe_plugin.checkpoint.formats import all as _registered  # noqa: F401
from moe_plugin.checkpoint.formats.base import detect, open_source
from moe_plugin.checkpoint.formats.fairseq import files as of_fairseq
from moe_plugin.cli.main import main
from moe_plugin.utils.yaml_file import read_yaml
from tests.attacks.payload import Payload

pytestmark = pytest.mark.fast


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "code has run"


def _fairseq(root: Path, code: Payload) -> Path:
    torch.save({"model": {"w": torch.ones(2)}, "args": None, "extra_state": code},
               root / "checkpoint_last.pt")
    return root


def _branch(root: Path, code: Payload) -> Path:
    gate = "decoder.layers.0.moe_layer.gate.wg.weight"
    torch.save({"model": {gate: torch.ones(2, 4)}, "cfg": code}, root / "a-shared.pt")
    torch.save({"model": {"decoder.layers.0.moe_layer.experts.0.fc1.weight": torch.ones(2)},
                "cfg": None}, root / "a-rank-0.pt")
    return root / "a.pt"


def _tutel(root: Path, code: Payload) -> Path:
    torch.save({"layer._num_global_experts": torch.tensor(2), "code": code}, root / "model.pt")
    return root / "model.pt"


def _legacy(root: Path, code: Payload) -> Path:
    torch.save({"model": {"w": torch.ones(2)}, "code": code}, root / "model.pt",
               _use_new_zipfile_serialization=False)
    return root / "model.pt"


def _pickle(root: Path, code: Payload) -> Path:
    (root / "model.pt").write_bytes(pickle.dumps({"model": {}, "code": code}))
    return root / "model.pt"


@pytest.mark.parametrize("command", ["inspect", "reshard"])
@pytest.mark.parametrize("write", [_fairseq, _branch, _tutel, _legacy, _pickle])
def test_a_hostile_class_is_named_with_the_flag(
        write: Callable[[Path, Payload], Path], command: str, tmp_path: Path, marker: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    """Not only that the format is not known; the exit status is that of an error."""
    path = write(tmp_path, Payload(marker))
    more = [str(tmp_path / "out")] if command == "reshard" else []
    assert main([command, str(path), *more]) == 2
    said = capsys.readouterr().err
    assert "makedirs" in said and "--trust-checkpoint" in said
    assert not marker.exists()


def test_the_flag_is_also_followed_where_the_format_is_found_out(
        tmp_path: Path, marker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _fairseq(tmp_path, Payload(marker))
    assert main(["inspect", str(path), "--trust-checkpoint"]) == 0
    assert marker.exists() and "fairseq" in capsys.readouterr().out


def test_paths_are_text_or_path(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "args": None, "extra_state": {}},
               tmp_path / "checkpoint_last.pt")
    assert detect(str(tmp_path)) == detect(tmp_path) == "fairseq"
    with open_source(str(tmp_path)) as source:
        assert source.format == "fairseq"
    with pytest.raises(CheckpointError, match="does not exist"):
        open_source(str(tmp_path / "nothing"))


def _inflating(path: Path) -> None:
    """A file of `torch.save` whose members are compressed: zeros become a thousandth."""
    made = io.BytesIO()
    torch.save({"model": {"w": torch.zeros(1 << 20)}, "args": None, "extra_state": {}}, made)
    with zipfile.ZipFile(made) as small, zipfile.ZipFile(path, "w") as bomb:
        for member in small.infolist():
            bomb.writestr(member.filename, small.read(member), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 15
    torch.load(path, weights_only=True)  # torch itself reads it


def _sharing(path: Path) -> None:
    """A file each of whose members says that it has the bytes of the whole file."""
    torch.save({"model": {"w": torch.zeros(9)}, "args": None, "extra_state": {}}, path)
    content, at = bytearray(path.read_bytes()), 0
    while (at := content.find(b"PK\x01\x02", at)) >= 0:
        struct.pack_into("<II", content, at + 20, len(content), len(content))
        at += 4
    path.write_bytes(content)


@pytest.mark.parametrize("write", [_inflating, _sharing])
def test_a_file_that_would_fill_the_memory_is_refused_before(
        write: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint_last.pt"
    write(path)
    with pytest.raises(ValueError, match="could exhaust the memory"):
        trust.load(str(path), (), "the file")
    with pytest.raises(ValueError, match="could exhaust the memory"):
        of_fairseq.load(str(path))
    with pytest.raises(CheckpointError, match="could exhaust the memory"):
        open_source(path, "tutel")


def test_values_of_files_cannot_forge_lines(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a new line, nor colours, nor another direction of writing."""
    hostile = "moe\nall checksums right\x1b[2J\x1b]0;title\x07\u202etxet\x9b1m"
    safetensors = pytest.importorskip("safetensors.torch")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": hostile, hostile: hostile}))
    safetensors.save_file({f"{hostile}.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    for more in ([], ["--all"]):
        assert main(["inspect", str(tmp_path), *more]) == 0
        said = capsys.readouterr().out
        assert "all checksums right" not in said.splitlines()
        assert all(one.isprintable() for one in said.replace("\n", "")), ascii(said)
    (tmp_path / hostile.replace("/", "")).mkdir()
    assert main(["inspect", str(tmp_path / hostile)]) == 2
    assert all(one.isprintable() for one in capsys.readouterr().err.rstrip("\n"))


def test_report_prints_its_paths_on_one_line(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run\n0 problems\x1b[31m"
    folder.mkdir()
    (folder / "log.jsonl").write_text(json.dumps({"iteration": 1, "lm_loss": 2.0}) + "\n")
    (folder / "trainer_state.json").write_text('{"log_history": [{"\\u001b[2J": "\\u001b[2J"}]}')
    assert main(["report", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "report.html" in said and "\x1b" not in said
    assert "0 problems\x1b[31m/report.html" not in said.splitlines()


@pytest.mark.parametrize("text", [
    "!!python/object/apply:os.mkdir ['{}']", "a: !!python/name:os.mkdir",
    "a: !!python/object/new:os.mkdir ['{}']"])
def test_yaml_makes_no_objects(text: str, tmp_path: Path, marker: Path) -> None:
    (tmp_path / "run.yaml").write_text(text.format(marker))
    with pytest.raises(ValueError, match="is not YAML"):
        read_yaml(tmp_path / "run.yaml")
    assert not marker.exists()


def test_a_value_on_the_command_line_makes_no_objects(marker: Path) -> None:
    from moe_plugin.hosts.megatron.file_arguments import file_arguments

    given = f"!!python/object/apply:os.mkdir ['{marker}']"
    assert file_arguments([f"megatron.num_layers={given}"]).section == {"num_layers": given}
    assert not marker.exists()


def test_a_stage_of_a_swarm_runs_no_code(tmp_path: Path, marker: Path) -> None:
    from moe_plugin.training.resilience.swarm import stage as saved

    saved.save_swarm(tmp_path, 1, [{}])
    [stage] = tmp_path.rglob("*.pt")
    torch.save({"code": Payload(marker)}, stage)
    with pytest.raises(ValueError, match="makedirs"):
        saved.load_swarm(tmp_path, 1)
    assert not marker.exists()
