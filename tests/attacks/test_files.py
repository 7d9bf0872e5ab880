"""Files of strangers: code in them does not run, errors name the class and the flag, and small
files do not take much memory, disk or time.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open

import moe_plugin
from moe_plugin.checkpoint import CheckpointError, trust
from moe_plugin.checkpoint.formats import all as _registered  # noqa: F401
from moe_plugin.checkpoint.formats.base import detect, open_source
from moe_plugin.checkpoint.formats.fairseq import files as of_fairseq
from moe_plugin.checkpoint.formats.huggingface.files import check_counts, open_safetensors
from moe_plugin.cli.main import main
from moe_plugin.memory.safetensors_file import SafetensorsFile
from moe_plugin.observe.history import read_run
from moe_plugin.utils.yaml_file import read_yaml
from tests.attacks.payload import Payload
from tests.fuzz.samples import CONFIG, sample

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


# Where this package can unpickle without a limit, or make objects of text: each place with the
# reason why no file of a stranger gets there.


ROOT = Path(moe_plugin.__file__).parent
CALLS = re.compile(
    r"weights_only=False|\"weights_only\": False|(?<!r)pickle\.loads?\(|torch[._]load\(|"
    r"allow_pickle=True|yaml\.(?:load|unsafe_load|full_load)\(|(?<![\w.])(?:eval|exec)\((?!\))|"
    r"trust_remote_code=True")
TRUSTED = "only with --trust-checkpoint"
REASONS = {
    "checkpoint/torch_files.py": f"{TRUSTED}; and the skeleton of a file that it has just written",
    "checkpoint/trust.py": "the restricted loading itself",
    "checkpoint/formats/fairseq/files.py": TRUSTED,
    "checkpoint/formats/megatron/source.py": TRUSTED,
    "checkpoint/formats/megatron/torch_dist.py": TRUSTED,
    "hosts/megatron/restricted.py": TRUSTED,
    "hosts/fairseq/compat/runtime.py": "what ranks of a run send to each other",
    "hosts/plain/fairseq2.py": "with weights_only=True, only tensors and plain values are read",
    "hosts/transformers/compat/checkpoints.py": "the scheduler, with weights_only=True",
    "training/resilience/twins.py": "what ranks of a run send to each other",
}


def _code(path: Path) -> str:
    """A module without its comments and without what its docstrings quote."""
    text = re.sub(r'"""(?:.|\n)*?"""', "", path.read_text(encoding="utf-8"))
    return re.sub(r"#.*", "", text)


def test_every_place_that_unpickles_without_a_limit_has_a_reason() -> None:
    found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")
             if CALLS.search(_code(path))}
    assert found == set(REASONS)


# Small files that would take much memory, disk or time.


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
