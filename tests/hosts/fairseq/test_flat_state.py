"""Optimizer state of fairseq's fp16 runs that flatten their parameters."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.checkpoint.conversion import Conversion
from moe_plugin.checkpoint.formats import all as checkpoint_formats  # noqa: F401 - registers
from moe_plugin.checkpoint.formats.base import CheckpointSizes, convert, open_source
from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.checkpoint.reshard import GROUPS
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Source
from tests.hosts.fairseq.commands import run_command
from tests.hosts.fairseq.conftest import Corpus, fork

FLAGS = ("--task language_modeling --arch transformer_lm --decoder-embed-dim 32 "
         "--decoder-ffn-embed-dim 64 --decoder-layers 1 --decoder-attention-heads 2 "
         "--decoder-input-dim 32 --decoder-output-dim 32 --decoder-normalize-before "
         "--decoder-learned-pos --share-decoder-input-output-embed --activation-fn gelu "
         "--optimizer adam --adam-betas (0.9,0.98) --lr 0.001 --tokens-per-sample 32 --batch-size "
         "4 --cpu --fp16 --fp16-init-scale 4 --clip-norm 0 --disable-validation --max-update 3 "
         "--max-target-positions 32")


def _train(flags: list[str], flat: bool) -> None:
    """`fairseq-train`; flat: as on a GPU, where fairseq itself packs all parameters."""
    from fairseq.optim import FP16Optimizer

    if flat:
        ours = FP16Optimizer.build_optimizer.__func__
        FP16Optimizer.build_optimizer = classmethod(inspect.getclosurevars(ours).nonlocals[
            "original"])
        torch.cuda.current_device = lambda: None  # the index of the CPU
    run_command("fairseq-train", flags)


@pytest.fixture(scope="module")
def runs(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same run with a vector of all parameters, and without."""
    home = tmp_path_factory.mktemp("runs")
    for flat in (True, False):
        fork(1, _train, f"{corpus.lm} {FLAGS} --save-dir {home / str(flat)}".split(), flat).ok()
    return home / "True", home / "False"


def _state(folder: Path) -> dict[str, Any]:
    return files.read(str(folder / "checkpoint_last.pt"))


def _same(one: Source, other: Source) -> None:
    assert dict(one.entries) == dict(other.entries)
    for key in one.entries:
        assert torch.equal(one.read(key), other.read(key)), key


def test_one_vector_is_the_state_of_each_parameter(runs: tuple[Path, Path],
                                                   tmp_path: Path) -> None:
    flat, apart = runs
    [vector] = _state(flat)["last_optimizer_state"]["state"].values()
    assert vector["exp_avg"].dim() == 1 and len(_state(apart)["last_optimizer_state"]["state"]) > 9
    with open_source(flat) as one, open_source(apart) as other:
        assert any(field == "exp_avg_sq" for field, _ in one.entries)
        _same(one, other)
        _same(convert(one, "neutral"), convert(other, "neutral"))
        key = next(key for key, entry in one.entries.items() if len(entry.shape) == 2
                   and key[0] == "exp_avg")
        window = (slice(1, 3), slice(2, 5))
        assert torch.equal(one.read(key, window), other.read(key)[window])
        assert one.values[GROUPS] == other.values[GROUPS]
        for name, source in (("flat", one), ("apart", other)):
            Conversion(source, tmp_path / name, "fairseq", CheckpointSizes()).run()
    first, second = (_state(tmp_path / name)["last_optimizer_state"] for name in ("flat", "apart"))
    assert first["param_groups"] == second["param_groups"]
    assert list(first["state"]) == list(second["state"])


def test_a_run_goes_on_from_what_was_one_vector(runs: tuple[Path, Path], corpus: Corpus,
                                                tmp_path: Path) -> None:
    losses = []
    for name, folder in zip(("flat", "apart"), runs, strict=True):
        with open_source(folder) as source:
            Conversion(source, tmp_path / name, "fairseq", CheckpointSizes()).run()
        flags = FLAGS.replace("--max-update 3", "--max-update 5 --log-format json --log-interval 1")
        done = fork(1, _train, f"{corpus.lm} {flags} --save-dir {tmp_path / name}".split(), False)
        losses.append(done.ok().losses)
    assert len(losses[0]) == 2 and losses[0] == losses[1]


def test_a_vector_of_another_length_is_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    state = _state(runs[0])
    vector = state["last_optimizer_state"]["state"][0]
    vector["exp_avg"] = vector["exp_avg"][:-1]
    (tmp_path / "short").mkdir()
    files.write(state, str(tmp_path / "short" / "checkpoint_last.pt"))
    with open_source(tmp_path / "short") as source:
        assert {field for field, _ in source.entries} == {MODEL}
        with pytest.raises(CheckpointError, match="--model-only"):
            Conversion(source, tmp_path / "out", "fairseq", CheckpointSizes()).run()
