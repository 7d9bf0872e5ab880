"""Which folders the launcher takes for checkpoints of Megatron's own loop; one rank, no training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
from moe_plugin.checkpoint import CheckpointError
from moe_plugin.hosts.megatron import checkpoint_files as files
from moe_plugin.hosts.megatron import script_checkpoint as checkpoint

pytestmark = pytest.mark.megatron
NATIVE = ".metadata", "metadata.json", "common.pt"


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _folder(root: Path, step: int, *names: str) -> Path:
    path = Path(files.folder(str(root), step))
    path.mkdir()
    for name in names:
        (path / name).write_text("")
    return path


def test_a_first_save_that_was_killed_is_no_checkpoint(tmp_path: Path) -> None:
    _folder(tmp_path, 10)
    _folder(tmp_path, 20, "common.pt", "__0_0.distcp")
    assert checkpoint.latest_iteration(str(tmp_path)) is None


def test_an_empty_file_of_the_newest_is_written_again(tmp_path: Path) -> None:
    tracker = tmp_path / files.LATEST
    tracker.write_text("")
    _folder(tmp_path, 20)
    assert checkpoint.latest_iteration(str(tmp_path)) is None
    assert not tracker.exists()
    tracker.write_text("")
    _folder(tmp_path, 10, *NATIVE)
    assert checkpoint.latest_iteration(str(tmp_path)) == 10
    assert tracker.read_text() == "10"


def test_a_missing_checkpoint_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      caplog: pytest.LogCaptureFixture) -> None:
    given = {"load": str(tmp_path / "typo"), "ckpt_format": "torch_dist", "skip_train": False}
    monkeypatch.setattr(checkpoint, "script_arguments", lambda: given)
    load = checkpoint.loads_whole(lambda load_arg="load": "native")
    assert load() == "native" and "no checkpoint found in" in caplog.text
    given["skip_train"] = True
    with pytest.raises(ValueError, match="nothing to evaluate"):
        load()
    given["pretrained_checkpoint"] = "elsewhere"
    assert load() == "native"
    del given["pretrained_checkpoint"]
    Path(given["load"]).mkdir()
    Path(given["load"], files.LATEST).write_text("release")
    assert load() == "native"


@pytest.mark.parametrize(("error", "kind"), [
    (CheckpointError("damaged"), CheckpointError), (ValueError("other settings"), ValueError),
    (KeyError("settings"), ValueError), (OSError("gone"), ValueError)])
def test_every_rank_hears_why_the_first_cannot_read(
        error: Exception, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, which reads, and another one, which does not."""
    sent: list[Any] = []

    def gather(value: Any) -> list[Any]:
        sent.append(value)
        return sent

    def work() -> None:
        raise error

    monkeypatch.setattr(files, "gather", gather)
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        with pytest.raises(ValueError, match=f"{error.args[0]}") as raised:
            files.on_first_rank("runs/iter_0000002", work)
        assert type(raised.value) is kind
    assert len(sent) == 2 and sent[1][2] == ""


@pytest.mark.parametrize("names", [["mp_rank_00"], ["mp_rank_00_000"], [".metadata", "x.distcp"],
                                   NATIVE])
def test_formats_of_megatron_are_its_own_business(tmp_path: Path, names: list[str]) -> None:
    assert checkpoint.verified(str(_folder(tmp_path, 10, *names))) == {}


def test_a_folder_that_is_written_again_in_place_is_not_whole(tmp_path: Path) -> None:
    path = _folder(tmp_path, 10, *NATIVE, files.META)
    checkpoint.begin_again(str(path))
    # newer releases write no common.pt, and read it first where one is there
    assert not list(path.iterdir())
    with pytest.raises(CheckpointError, match="incomplete"):
        checkpoint.verified(str(path))
