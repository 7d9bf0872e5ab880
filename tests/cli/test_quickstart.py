"""The quick start's own logic: what it reads from logs, when it trains again, what it says. The
training itself is in the slow test.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from moe_plugin.observe.history import read_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "scripts" / "quickstart.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def fake_run(quickstart: ModuleType, folder: Path, code: str, steps: int = 2):
    return quickstart.Run("fake", folder, [sys.executable, "-c", code], steps)


def log_writer(folder: Path, steps: int) -> str:
    rows = [{"iteration": i + 1, "lm_loss": 5.0 - i, "tokens_per_s": 10.0 * (i + 1)}
            for i in range(steps)] + [{"iteration": steps, "valid_loss": 3.5}]
    return (f"open({str(folder / 'log.jsonl')!r}, "
            f"'a').write({''.join(json.dumps(r) + chr(10) for r in rows)!r})")


def test_reads_fairseq_logs_in_nats(quickstart: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(
        'x | INFO | train_inner | {"inner_loss": "4.0", "loss": "9.9", "wps": "1500.5", '
        '"num_updates": "10"}\n'
        'x | INFO | valid | {"valid_inner_loss": "3.0", "valid_num_updates": "10"}\nsome warning\n')
    (record,) = quickstart.steps_of(tmp_path)
    assert (record.step, record.tokens_per_s) == (10, 1500.5)
    assert record.loss == pytest.approx(4 * math.log(2))
    assert record.valid_loss == pytest.approx(3 * math.log(2))


def test_reads_megatron_logs_without_an_unfinished_line(quickstart: ModuleType,
                                                        tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"iteration": 10, "lm_loss": 2.5, "tokens_per_s": 7}\n{"iteration": 20, "lm_')
    (record,) = quickstart.steps_of(tmp_path)
    assert (record.step, record.loss, record.tokens_per_s, record.valid_loss) == (10, 2.5, 7, None)
    assert quickstart.steps_of(tmp_path / "none") == []


def test_balance_is_the_worst_layer_of_the_last_record(quickstart: ModuleType,
                                                       tmp_path: Path) -> None:
    rows = [(10, "a", 9.0), (20, "a", 1.5), (20, "b", 2.5)]
    (tmp_path / "stats.jsonl").write_text("".join(
        json.dumps({"step": s, "layer": n, "load": [1, 1], "max_over_mean": m}) + "\n"
        for s, n, m in rows))
    assert quickstart.balance(tmp_path) == 2.5 and quickstart.balance(tmp_path / "none") is None


def test_a_finished_run_is_not_repeated(quickstart: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = fake_run(quickstart, folder, log_writer(folder, 2))
    result, reused = quickstart.train(run)
    assert not reused and (result["first_loss"], result["last_loss"], result["valid_loss"],
                           result["tokens_per_s"]) == (5.0, 4.0, 3.5, 15.0)
    again, reused = quickstart.train(run)
    assert reused and again == result and len((folder / "log.jsonl").read_text().splitlines()) == 3


def test_other_settings_train_anew_and_keep_the_old_run(quickstart: ModuleType,
                                                        tmp_path: Path) -> None:
    folder = tmp_path / "run"
    quickstart.train(fake_run(quickstart, folder, log_writer(folder, 2)))
    result, reused = quickstart.train(fake_run(quickstart, folder, log_writer(folder, 3), steps=3))
    assert not reused and result["steps"] == 3
    (kept,) = tmp_path.glob("run-*")
    assert json.loads((kept / "result.json").read_text())["steps"] == 2


def test_a_copied_command_writes_to_a_new_folder(quickstart: ModuleType, tmp_path: Path) -> None:
    """Next to the quick start's, named by the time, or where its argument says."""
    folder = tmp_path / "a run"
    code = log_writer(folder, 2).replace(repr(str(folder / "log.jsonl")),
                                         "__import__('sys').argv[1] + '/log.jsonl'")
    command = [sys.executable, "-c", code, str(folder), "--k", str(folder / "sub")]
    quickstart.train(quickstart.Run("fake", folder, command, 2))
    before = {path: path.read_bytes() for path in folder.rglob("*")}
    copy = tmp_path / "mine.sh"
    copy.write_text((folder / "command.sh").read_text().replace("'5.0", "'6.0"))
    for arguments in ([], [str(tmp_path / "other one")]):
        subprocess.run(["bash", str(copy), *arguments], check=True, capture_output=True)
    new, named = sorted(set(tmp_path.iterdir()) - {folder, copy})
    assert new.name.startswith("a run-") and named.name == "other one"
    assert {path: path.read_bytes() for path in folder.rglob("*")} == before
    for made in (new, named):
        assert (made / "log.jsonl").read_bytes() == before[folder / "log.jsonl"]
        assert (made / "command.sh").read_text() == copy.read_text()
        assert quickstart.read_run(made).settings["k"] == "$OUT/sub"


def test_a_failed_run_shows_the_end_of_its_log_and_leaves_no_result(quickstart: ModuleType,
                                                                    tmp_path: Path) -> None:
    run = fake_run(quickstart, tmp_path / "run", "print('the disk is full'); raise SystemExit(3)")
    with pytest.raises(quickstart.Failed, match=r"(?s)status 3.*the disk is full"):
        quickstart.train(run)
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("name", ["command.sh", "result.json", "train.log"])
def test_what_is_no_file_is_named_before_a_run(quickstart: ModuleType, tmp_path: Path,
                                               name: str) -> None:
    folder = tmp_path / "run"
    (folder / name).mkdir(parents=True)
    run = fake_run(quickstart, folder, log_writer(folder, 2))
    with pytest.raises(ValueError, match=f"{name} cannot be written .it is a folder"):
        quickstart.train(run)
    assert not (folder / "log.jsonl").exists()


def test_a_run_that_ends_early_is_no_success(quickstart: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(quickstart.Failed, match="before step 5"):
        quickstart.train(fake_run(quickstart, folder, log_writer(folder, 2), steps=5))


def test_data_is_made_once(quickstart: ModuleType, tmp_path: Path,
                           capsys: pytest.CaptureFixture[str]) -> None:
    made, log = tmp_path / "complete", tmp_path / "log"
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    for _ in range(2):
        quickstart.prepare([sys.executable, "-c", count], made, log, "data")
    assert (tmp_path / "count").read_text() == "x" and "already exists" in capsys.readouterr().out
    with pytest.raises(quickstart.Failed, match="status 1"):
        quickstart.prepare([sys.executable, "-c", "raise SystemExit(1)"], tmp_path / "other", log,
                           "data")
    assert not (tmp_path / "other").exists()


def test_the_table_is_aligned(quickstart: ModuleType) -> None:
    row = {
        "host": "fairseq", "tokens_per_s": 12345.6, "first_loss": 5.0, "last_loss": 2.0,
        "valid_loss": None, "balance": 1.234, "seconds": 60
    }
    rows = [row, {**row, "host": "megatron"}]
    lines = quickstart.table(rows).splitlines()
    assert len(set(map(len, lines))) == 1 and "12,346" in lines[2] and "1.23" in lines[2]
    info = SimpleNamespace(unigram_entropy=3.17)
    text = quickstart.summary(Path("a folder"), rows, info)
    assert all(f"  a folder/{host}/report.html" in text for host in ("fairseq", "megatron"))
    assert "3.170" in text and text.split("Next steps:")[1].count("\n  - ") == 3


def test_the_time_left_counts_the_runs_that_follow(quickstart: ModuleType, tmp_path: Path) -> None:
    run = quickstart.Run("fake", tmp_path, [], steps=200, later=200)
    assert run.seconds_left(50, 10.0) == 70.0
    assert quickstart.Run("fake", tmp_path, [], steps=200).seconds_left(200, 40.0) == 0.0


def test_settings(quickstart: ModuleType) -> None:
    path = ROOT / "configs" / "quickstart.yaml"
    assert quickstart.settings(path, None)["steps"] >= 100
    short = quickstart.settings(path, 10)
    assert (short["steps"], short["warmup"]) == (10, 5)
    with pytest.raises(ValueError, match="--steps 0"):
        quickstart.settings(path, 0)


def test_a_megatron_without_its_loop_is_named_before_anything_is_trained(
        quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python 3.10 has it."""
    monkeypatch.setattr(quickstart, "find_spec",
                        {"megatron": object(), "megatron.training": None}.get)
    quickstart.check_hosts(["fairseq"])
    with pytest.raises(ValueError, match="requires Megatron's own training loop.*--hosts fairseq"):
        quickstart.check_hosts(["fairseq", "megatron"])


def test_bad_arguments_are_named() -> None:
    done = subprocess.run(
        [sys.executable,
         str(ROOT / "scripts" / "quickstart.py"), "--hosts", "fairsec"], capture_output=True,
        text=True, check=False)
    assert done.returncode == 2
    assert "fairsec is unknown. Use one or more of fairseq, megatron" in done.stderr


@pytest.mark.slow
@pytest.mark.fairseq
@pytest.mark.megatron
@pytest.mark.distributed
def test_both_hosts_train_below_the_unigram_entropy_and_a_second_run_reuses_them(
        tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "scripts" / "quickstart.py"), "--steps", "80", "--out",
        str(tmp_path / "a folder")
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    entropy = json.loads(
        (tmp_path / "a folder" / "corpus" / "corpus.json").read_text())["unigram_entropy"]
    for host in ("fairseq", "megatron"):
        result = json.loads((tmp_path / "a folder" / host / "result.json").read_text())
        assert result["last_loss"] < entropy - 0.3 and result["valid_loss"] < entropy - 0.3, result
        assert (tmp_path / "a folder" / host / "report.html").stat().st_size > 20_000
        assert result["first_loss"] > entropy and any(Path(result["checkpoints"]).iterdir())
    again = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert again.stdout.count("already finished") == 2
    for host, steps in (("fairseq", "--max-update"), ("megatron", "--train-iters")):
        copied_and_edited(tmp_path / "a folder" / host, tmp_path / f"{host}.sh", steps)


def copied_and_edited(folder: Path, copy: Path, steps: str) -> None:
    """The copy trains from its first step, in a folder of its own."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    script = (folder / "command.sh").read_text()
    assert f"{steps} 80" in script
    copy.write_text(script.replace(f"{steps} 80", f"{steps} 4"))
    done = subprocess.run(["bash", str(copy), str(copy.with_suffix(""))], capture_output=True,
                          text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    made = read_run(copy.with_suffix(""))
    assert [record.step for record in made.steps if record.loss is not None] == [1, 2, 3, 4]
