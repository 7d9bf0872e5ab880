"""Files of every rank: resume after a kill, refusals, evaluation."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.hosts.fairseq import resume
from tests.attacks.payload import Payload
from tests.distributed import run_gloo
from tests.hosts.fairseq.conftest import Corpus, Result, run, train

WANTED = {"num_experts": 4, "world_size": 2, "rank": 0, "expert_parallel_size": 2}


def write(path: Path, step: int = 8, **changes: int) -> str:
    files.write({files.MANIFEST: {**WANTED, "num_updates": step, **changes},
                 "model": {"w": torch.zeros(1000)}}, str(path))
    return str(path)


def test_every_single_bit_flip_and_every_cut_is_detected(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "checkpoint_last-rank-0.pt"))
    whole = path.read_bytes()
    for offset in sorted({*range(64), *range(0, len(whole), 17),
                          *range(len(whole) - 64, len(whole))}):
        flipped = bytearray(whole)
        flipped[offset] ^= 1 << offset % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match="truncated or damaged"):
            resume.agree(str(path), WANTED, None)
    trailer = 27  # without it alone, the file is one of a release without checksums
    for size in sorted({*range(0, len(whole), 97), *range(len(whole) - 64, len(whole))}):
        path.write_bytes(whole[:size])
        if size != len(whole) - trailer:
            with pytest.raises(ValueError, match="truncated or damaged"):
                resume.agree(str(path), WANTED, None)


def test_a_file_without_checksum_loads_with_one_warning(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "checkpoint_last-rank-0.pt")
    os.truncate(path, os.path.getsize(path) - 27)
    resume.agree(path, WANTED, None)
    (record,) = (r for r in caplog.records if "without checksums" in r.getMessage())
    assert record.name == "moe_plugin.checkpoint.formats.fairseq.files"


def test_a_damaged_last_checkpoint_gives_way_to_an_older_one(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    last = write(tmp_path / "checkpoint_last-rank-0.pt", 12)
    for name, step in [("1_4", 4), ("1_8", 8), ("_best", 10)]:
        write(tmp_path / f"checkpoint{name}-rank-0.pt", step)
    write(tmp_path / "checkpoint_best-rank-1.pt", 12, rank=1)
    os.truncate(last, 500)
    os.truncate(tmp_path / "checkpoint_best-rank-0.pt", 500)
    assert resume.agree(last, WANTED, None) == str(tmp_path / "checkpoint1_8-rank-0.pt")
    assert "checkpoint_last-rank-0.pt" in caplog.text and "step 8" in caplog.text
    asked = str(tmp_path / "checkpoint_best-rank-0.pt")
    with pytest.raises(ValueError, match="checkpoint_best-rank-0.pt.*damaged"):
        resume.agree(asked, WANTED, None)


@pytest.mark.parametrize("name", ["checkpoint_last-rank-0.pt", "checkpoint_last-rank-1.pt"])
def test_a_checkpoint_of_the_branch_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    """Also where this rank has no file and another one has; in training and in evaluation."""
    from fairseq import checkpoint_utils

    path = str(tmp_path / name)
    files.write({"args": None, "cfg": {}, "extra_state": {}, "model": {
        "decoder.layers.1.moe_layer.experts.0.fc1.weight": torch.zeros(3)}}, path)
    words = (re.escape(name) + ".*was written by fairseq's moe branch"
             ".*moe_layer.experts.0.*moe-plugin reshard .*checkpoint_last.pt OUT --to fairseq"
             ".*run it in that branch.*--user-dir moe_plugin")
    with pytest.raises(ValueError, match=words):
        resume.agree(str(tmp_path / "checkpoint_last-rank-0.pt"), WANTED, None)
    with pytest.raises(ValueError, match=words):
        checkpoint_utils.load_checkpoint_to_cpu(path)


def test_no_code_runs_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, target = str(tmp_path / "checkpoint_last-rank-0.pt"), tmp_path / "code has run"
    files.write({files.MANIFEST: {**WANTED, "num_updates": 8}, "model": {},
                 "cfg": {"x": argparse.Namespace(a=1)}, "extra_state": {"best": np.float64(2.5)}},
                path)
    assert files.read(path)["cfg"]["x"].a == 1 and files.read(path)["extra_state"]["best"] == 2.5
    files.write({files.MANIFEST: {**WANTED, "num_updates": 8}, "model": Payload(target)}, path)
    write(tmp_path / "checkpoint_best-rank-0.pt", 4)
    for load in (lambda: resume.agree(path, WANTED, None), lambda: files.read(path)):
        with pytest.raises(ValueError, match="makedirs.*refused.*--trust-checkpoint"):
            load()
    with open(path, "rb") as stream, pytest.raises(ValueError, match="--trust-checkpoint"):
        files.load(stream)
    assert not target.exists()
    monkeypatch.setattr("sys.argv", ["fairseq-train", "--trust-checkpoint"])
    files.read(path)
    assert target.exists()


def test_a_full_disk_ends_with_the_remedy_and_keeps_what_is_there(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint_last-rank-0.pt"
    write(path, 4)
    before = path.read_bytes()

    def full(file: str, _write: Any) -> None:
        Path(file).write_bytes(b"PK")
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.checksums, "write_sealed", full)
    for code, words in [(errno.ENOSPC, "disk is full.*free space"), (errno.EROFS, "read-only")]:
        with pytest.raises(ValueError, match=f"{words}.*--save-dir"):
            files.save(str(path), lambda name: files.write({}, name), None)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_names() -> None:
    assert files.with_rank("a/checkpoint_last.pt", 3) == "a/checkpoint_last-rank-3.pt"
    assert files.with_rank("a/checkpoint_last-rank-1.pt", 3) == "a/checkpoint_last-rank-3.pt"
    assert files.without_rank("a/checkpoint_last-rank-1.pt") == "a/checkpoint_last.pt"
    assert files.with_rank_suffix("-x", 2) == "-x-rank-2"


def test_nothing_there_is_a_fresh_start(tmp_path: Path) -> None:
    resume.agree(str(tmp_path / "checkpoint_last-rank-0.pt"), WANTED, None)
    assert list(tmp_path.iterdir()) == []


def test_newest_whole_step_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoint_last-rank-0.pt", 4)
    write(Path(path + files.PENDING), 8)
    resume.agree(path, WANTED, None)
    assert files.read(path)[files.MANIFEST]["num_updates"] == 8
    assert not os.path.exists(path + files.PENDING)


def test_half_written_pending_file_is_ignored(tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoint_last-rank-0.pt", 4)
    Path(path + files.PENDING).write_bytes(Path(path).read_bytes()[:500])
    resume.agree(path, WANTED, None)
    assert files.read(path)[files.MANIFEST]["num_updates"] == 4


@pytest.mark.parametrize(("everyone", "step"), [
    ([{4: "a", 8: "b"}, {4: "c"}], 4),  # killed in the first phase
    ([{8: "b"}, {4: "c", 8: "d"}], 8),  # killed in the second phase
    ([{}, {}], None),
])
def test_newest_step_of_all_ranks(everyone: list[dict[int, str]], step: int | None) -> None:
    assert resume.newest_common("x.pt", everyone) == step


def test_ranks_without_a_common_step_are_refused() -> None:
    with pytest.raises(ValueError, match=r"incomplete.*rank 0: \[4\]; rank 1: none"):
        resume.newest_common("x-rank-0.pt", [{4: "a"}, {}])


def _agreed(folder: Path) -> str:
    rank = dist.get_rank()
    path = folder / f"checkpoint_last-rank-{rank}.pt"
    return Path(resume.agree(str(path), {**WANTED, "rank": rank}, dist.group.WORLD)).name


@pytest.mark.distributed
def test_a_first_save_that_ranks_did_not_finish_is_none(tmp_path: Path) -> None:
    """Killed when rank 0 had written its file and rank 1 had not."""
    write(tmp_path / "checkpoint_last-rank-0.pt.new", 4)
    assert run_gloo(2, _agreed, tmp_path) == [f"checkpoint_last-rank-{r}.pt" for r in range(2)]
    assert not (tmp_path / "checkpoint_last-rank-0.pt").exists()
    for rank in range(2):
        write(tmp_path / f"checkpoint_1_4-rank-{rank}.pt", 4, rank=rank)
    assert run_gloo(2, _agreed, tmp_path) == [f"checkpoint_1_4-rank-{r}.pt" for r in range(2)]


@pytest.mark.parametrize(("changes", "words"), [
    ({"num_experts": 8}, "num_experts=8.*num_experts=4.*--moe-expert-count 8"),
    ({"world_size": 4}, "world_size=4.*world_size=2.*4 data-parallel ranks"),
    ({"expert_parallel_size": 1}, "--moe-expert-parallel-size 1"),
    ({"rank": 1}, "belongs to rank 1"),
])
def test_files_of_another_run_are_refused(tmp_path: Path, changes: dict[str, int],
                                          words: str) -> None:
    path = write(tmp_path / "checkpoint_last-rank-0.pt", **changes)
    with pytest.raises(ValueError, match=words):
        resume.agree(path, WANTED, None)


def test_truncated_dense_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoint_last-rank-0.pt")
    Path(path).write_bytes(Path(path).read_bytes()[:-300])
    with pytest.raises(ValueError, match="truncated or damaged"):
        resume.agree(path, WANTED, None)
    torch.save({"model": {}}, path)
    with pytest.raises(ValueError, match="has no experts, but the model has 4"):
        resume.agree(path, WANTED, None)
    os.remove(path)
    write(tmp_path / "checkpoint_last.pt", world_size=1, expert_parallel_size=1)
    with pytest.raises(ValueError, match=r"written by 1 data-parallel ranks.*world_size=2"):
        resume.agree(path, WANTED, None)


def test_copies_are_whole(tmp_path: Path) -> None:
    source = write(tmp_path / "checkpoint1.pt")
    files.copy(source, str(tmp_path / "checkpoint_last.pt"))
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == Path(source).read_bytes()
    assert sorted(path.name
                  for path in tmp_path.iterdir()) == ["checkpoint1.pt", "checkpoint_last.pt"]


@pytest.mark.distributed
def test_every_rank_has_its_own_experts(ep2: tuple[Path, Result]) -> None:
    states = [files.read(str(ep2[0] / f"checkpoint_last-rank-{rank}.pt")) for rank in range(2)]
    assert [state[files.MANIFEST]["rank"] for state in states] == [0, 1]
    assert not (ep2[0] / "checkpoint_last.pt").exists()
    experts = [name for name in states[0]["model"] if "experts.w_in" in name]
    assert len(experts) == 1
    first, second = (state["model"][experts[0]] for state in states)
    assert first.shape[0] == second.shape[0] == 2
    assert not torch.equal(first, second)
    shared = "decoder.embed_tokens.weight"
    torch.testing.assert_close(states[0]["model"][shared], states[1]["model"][shared], rtol=0,
                               atol=0)


@pytest.mark.distributed
def test_validate_eval_lm_and_generate_read_the_rank_files(corpus: Corpus,
                                                           ep2: tuple[Path, Result]) -> None:
    home, trained = ep2
    common = f"{corpus.lm} --user-dir moe_plugin --cpu --path {home / 'checkpoint_last.pt'}"
    validated = run("fairseq-validate", f"{common} --task language_modeling --batch-size 4").ok()
    last = re.findall(r'"valid_inner_loss": "([\d.]+)"', trained.log)[-1]
    assert float(re.findall(r"inner_loss ([\d.]+)",
                            validated.log)[-1]) == pytest.approx(float(last), abs=2e-3)
    scored = run(
        "fairseq-eval-lm",
        f"{common} --is-moe --gen-subset valid --tokens-per-sample 32 --batch-size 4").ok()
    assert float(re.findall(r"Loss \(base 2\): ([\d.]+)",
                            scored.log)[-1]) == pytest.approx(float(last), abs=2e-3)
    generated = run(
        "fairseq-generate",
        f"{common} --task language_modeling --gen-subset test --tokens-per-sample 32 "
        "--sample-break-mode eos "
        "--beam 2 --max-len-b 8 --batch-size 4").ok()
    assert len(re.findall(r"^H-\d+\t", generated.log, re.MULTILINE)) == 20


@pytest.mark.distributed
def test_translation_model_trains_and_translates(corpus: Corpus, mt2: tuple[Path, Result]) -> None:
    home, trained = mt2
    assert trained.losses[-1] < trained.losses[0] - 0.5
    translated = run(
        "fairseq-generate",
        f"{corpus.mt} --user-dir moe_plugin --cpu --path {home / 'checkpoint_last.pt'} --beam "
        "2 --max-len-b 20 "
        "--batch-size 8").ok()
    assert len(re.findall(r"^D-\d+\t", translated.log, re.MULTILINE)) == 20
    assert "BLEU4" in translated.log


@pytest.mark.distributed
def test_the_branch_flags_about_saving_and_evaluation(corpus: Corpus, tmp_path: Path) -> None:
    trained = train(
        corpus, tmp_path, "--max-update 4 --save-interval-updates 2 --no-epoch-checkpoints "
        "--symlink-best-and-last-checkpoints --no-save-optimizer-state-on-training-finished "
        "--log-nvidia-smi --use-stable-embedding --block-wise", 2, save=True).ok()
    for flag in ("--log-nvidia-smi", "--use-stable-embedding", "--block-wise"):
        assert f"{flag} has no effect" in trained.log
    for rank in (0, 1):
        names = [f"checkpoint_{name}-rank-{rank}.pt" for name in ("1_2", "1_4", "best", "last")]
        middle, end, *copies = [tmp_path / name for name in names]
        assert [copy.samefile(end) for copy in copies] == [True, True]
        assert "last_optimizer_state" in files.read(str(middle))
        assert "last_optimizer_state" not in files.read(str(end))
    stats = tmp_path / "stats" / "scores"
    common = (f"{corpus.lm} --user-dir moe_plugin --cpu --path {tmp_path / 'checkpoint_last.pt'} "
              "--is-moe --gen-subset valid --tokens-per-sample 32 --batch-size 4 --num-workers 0")
    scored = run("fairseq-eval-lm", f"{common} --max-valid-steps 1 --stats-path {stats}").ok()
    [evaluated] = re.findall(r"Evaluated (\d+) tokens", scored.log)
    assert 0 < int(evaluated) <= 4 * 32  # one batch of about 15
    saved = json.loads(stats.with_suffix(".json").read_text())["valid"]
    assert f"Loss (base 2): {saved['loss']:.4f}" in scored.log and saved["wall_time"] > 0


def test_no_best_checkpoints(corpus: Corpus, tmp_path: Path) -> None:
    train(corpus, tmp_path, "--max-update 2 --no-best-checkpoints", save=True).ok()
    assert {path.name for path in tmp_path.glob("*.pt")} == {"checkpoint_last.pt"}
    extra = files.read(str(tmp_path / "checkpoint_last.pt"))["extra_state"]
    assert extra["best"] > 0


def test_modules_that_a_checkpoint_names_are_imported_only_where_it_is_trusted(
        ep2: tuple[Path, Result], corpus: Corpus, tmp_path: Path) -> None:
    mark, own = tmp_path / "code has run", tmp_path / "own.py"
    own.write_text(f"open({str(mark)!r}, 'w').close()\n")
    for rank in range(2):
        state = files.read(str(ep2[0] / f"checkpoint_last-rank-{rank}.pt"))
        state["cfg"]["model"]["moe_import"] = str(own)
        files.write(state, str(tmp_path / f"checkpoint_last-rank-{rank}.pt"))
    arguments = (f"{corpus.lm} --user-dir moe_plugin --path {tmp_path / 'checkpoint_last.pt'} "
                 "--cpu --batch-size 4 --tokens-per-sample 32 --gen-subset valid --is-moe "
                 "--num-workers 0")
    run("fairseq-eval-lm", arguments).failed_with("own.py", "refused", "--trust-checkpoint")
    assert not mark.exists()
    run("fairseq-eval-lm", f"{arguments} --model-overrides {{'moe_import':None}}").ok()
    assert not mark.exists()
    run("fairseq-eval-lm", f"{arguments} --trust-checkpoint").ok()
    assert mark.exists()
