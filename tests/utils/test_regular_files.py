"""Files that commands write and read: regular ones only; YAML that ends in a named error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

from moe_plugin.checkpoint import CheckpointError, load
from moe_plugin.config import from_yaml
from moe_plugin.observe.history import read_run
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import begin_writing, write_regular

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
@pytest.mark.parametrize("name", ["out", "out.new"])
def test_only_regular_files_are_replaced(tmp_path: Path, kind: str, name: str) -> None:
    place, other = tmp_path / name, tmp_path / "other"
    other.write_text("kept")
    {"folder": place.mkdir, "link": lambda: place.symlink_to(other),
     "pipe": lambda: os.mkfifo(place)}[kind]()
    before = os.lstat(place)
    with pytest.raises(ValueError, match=f"is a {kind}.*regular file"):
        write_regular(tmp_path / "out", "text")
    assert os.lstat(place) == before and other.read_text() == "kept"


def test_a_device_is_not_replaced_and_files_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a device"):
        write_regular("/dev/null", "text")
    for text in ("first", "second"):
        assert write_regular(tmp_path / "out", text).read_text() == text
    with pytest.raises(ValueError, match="folder that exists"):
        write_regular(tmp_path / "none" / "out", "text")


def test_pipes_are_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(ValueError, match="is a pipe, not a regular file"):
        from_yaml(str(tmp_path / "config.yaml"))
    os.mkfifo(tmp_path / "log.jsonl")
    (tmp_path / "steps.jsonl").write_text('{"iteration": 1, "lm_loss": 2.0}\n')
    os.mkfifo(tmp_path / "command.sh")
    read_run(tmp_path)
    os.mkfifo(tmp_path / "index.json")
    with pytest.raises(CheckpointError, match="index.json.*is a pipe"):
        load(tmp_path, nn.Linear(1, 1))


LAUGHS = "a0: &a0 [1, 1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))


@pytest.mark.parametrize("text", [
    "model_dim: ${", "model_dim: ${a", 'model_dim: !!int ""', "model_dim: !!timestamp x",
    "model_dim: " + "[" * 2000 + "]" * 2000, "model_dim: " + "[" * 50_000, LAUGHS,
    "model_dim: " + "9" * 5000, "dispatch: {capacity_factor: " + "9" * 400 + "}",
    "model_dim: " + "x" * 5000, "? {a: b}\n: c", "!!python/object/apply:os.system [ls]", "5",
    "'true'",
    "model_dim: !!float x", "model_dim: !!binary 5", "model_dim: .inf",
])
def test_bad_yaml_ends_in_a_short_named_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=".") as error:
        from_yaml(str(tmp_path / "config.yaml"))
    assert len(str(error.value)) < 600


def test_short_shows_at_most_its_limit() -> None:
    assert short("a") == "'a'" and short(ValueError("one\n two")) == "one two"
    for value in ("x" * 1000, 10 ** 10_000, list(range(500))):
        assert len(short(value)) <= 200


def test_aliases_that_multiply_are_counted_and_a_few_are_not(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(LAUGHS)
    with pytest.raises(ValueError, match="more than 1000000 values; write out the aliases"):
        from_yaml(str(path))
    path.write_text("losses: &l {gshard: 0.5}\nmodel_dim: &d 8\nnum_experts: *d\n")
    assert from_yaml(str(path)).num_experts == 8 and from_yaml(str(path)).losses == {"gshard": 0.5}


def test_writing_can_begin_before_the_file_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "wb", buffering=0) as file:
        file.write(b"x" * 10_000)
        begin_writing(file.fileno(), 0, 8192)
        file.write(b"y")
    assert path.read_bytes() == b"x" * 10_000 + b"y"
