"""Runs on Megatron's own loop that go on from a checkpoint with other arguments, or from a damaged
one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
from moe_plugin.hosts.megatron.checkpoint_files import META
from tests.hosts.megatron.training import launched

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]


@pytest.fixture(scope="module")
def saved(data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with a checkpoint after 2 steps in `run`, and the arguments that made it."""
    folder = tmp_path_factory.mktemp("resume")
    words = ["--data-path", data, "--load", "run"]
    launched([*words, "--save", "run", "--train-iters", "2"], 1, folder)
    return folder, words


def test_a_longer_run_goes_on_and_says_what_is_computed_otherwise(
        saved: tuple[Path, list[str]]) -> None:
    folder, words = saved
    log = launched([*words, "--train-iters", "3", "--lr-decay-iters", "9", "--moe-router-topk", "1",
                    "--moe-router-pre-softmax", "--log-file", "log"], 1, folder)
    assert "iter_0000002 was trained with moe_router_topk=2, but this run uses 1" in log
    assert [json.loads(line)["iteration"] for line in (folder / "log").open()] == [3]


def test_another_model_is_refused_by_name(saved: tuple[Path, list[str]]) -> None:
    folder, words = saved
    log = launched([*words, "--train-iters", "3", "--qk-layernorm"], 1, folder, fails=True)
    assert "has qk_layernorm=False, but this run has qk_layernorm=True. Use the arguments" in log
    assert "Traceback" not in log


def test_what_cannot_be_read_is_named_with_its_remedy(saved: tuple[Path, list[str]]) -> None:
    """Of a checkpoint without our checksums, as Megatron writes it."""
    folder, words = saved
    checkpoint = folder / "run" / "iter_0000002"
    (checkpoint / META).unlink()
    for file in checkpoint.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    log = launched([*words, "--train-iters", "3"], 1, folder, fails=True)
    assert "iter_0000002' cannot be loaded: " in log and "to use an earlier checkpoint" in log
    assert "Traceback" not in log
