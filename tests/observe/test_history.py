"""Reading a run's files: both hosts' real logs, lines cut short, lines that are wrong, folders that
hold none or several.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from moe_plugin.observe.history import RunRecord, StepRecord, read_run, read_runs
from moe_plugin.observe.history.host_logs import CHANGED, parse_settings, parse_step
from moe_plugin.observe.history.words import comparable, written
from moe_plugin.observe.model_layers import OFF, ON, chosen

pytestmark = pytest.mark.fast

DATA = Path(__file__).parent / "data"


def layer_row(step: int, layer: str = "layer1", **fields: object) -> str:
    return json.dumps({
        "step": step, "time": 1000.0 + step, "layer": layer, "load": [3, 1], "max_over_mean": 1.5,
        **fields
    }) + "\n"


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_megatron_run_has_what_its_files_say() -> None:
    run = read_run(DATA / "megatron")
    rows = [json.loads(line) for line in (DATA / "megatron" / "log.jsonl").read_text().splitlines()]
    losses = {row["iteration"]: row["lm_loss"] for row in rows if "lm_loss" in row}
    valid = {row["iteration"]: row["valid_loss"] for row in rows if "valid_loss" in row}
    assert run.host == "megatron" and len(losses) == 12 and len(valid) == 2
    assert {r.step: r.loss for r in run.steps} == losses
    assert {r.step: r.valid_loss for r in run.steps if r.valid_loss is not None} == valid
    assert run.seconds == pytest.approx(sum(row.get("seconds", 0) for row in rows))
    assert run.total_steps == 24 and run.settings["moe-router-topk"] == "2" and run.notes == []


@pytest.mark.parametrize("host", ["megatron", "fairseq"])
def test_layers_have_what_the_statistics_say(host: str) -> None:
    run = read_run(DATA / host)
    rows = [json.loads(line) for line in (DATA / host / "stats.jsonl").read_text().splitlines()]
    wanted = {(r["layer"], r["step"]): r for r in rows if "layer" in r}
    found = {(name, r.step): r for name, records in run.layers.items() for r in records}
    assert set(found) == set(wanted) and len(wanted) == 24
    for key, row in wanted.items():
        record = found[key]
        assert list(
            record.load
        ) == row["load"] and record.losses == row["losses"] and record.layouts == row["layouts"]
        assert (record.max_over_mean, record.entropy,
                record.drop_fraction) == (row["max_over_mean"], row["entropy"],
                                          row["drop_fraction"])
        assert sum(record.shares) == pytest.approx(len(record.load)) and max(
            record.shares) == pytest.approx(row["max_over_mean"])
    assert len(run.decisions) == sum(len(r["decisions"]) for r in rows if "layer" in r) > 0
    ((step, rank), spans), = run.timelines.items()
    assert (step, rank) == (20, 0) and {"layers", "exchange", "matmuls"
                                        } == {s.track
                                              for s in spans} and all(s.end_s >= s.start_s >= 0
                                                                      for s in spans)


def test_fairseq_run_is_in_nats() -> None:
    run = read_run(DATA / "fairseq")
    text = (DATA / "fairseq" / "train.log").read_text()
    rows = [
        json.loads(line.split("| train_inner | ")[1]) for line in text.splitlines()
        if "| train_inner | " in line
    ]
    assert run.host == "fairseq" and run.total_steps == 24 and run.settings[
        "moe-expert-count"] == "4"
    assert [r.step for r in run.steps] == [int(row["num_updates"]) for row in rows]
    assert [r.loss for r in run.steps
            ] == [pytest.approx(float(row["inner_loss"]) * math.log(2)) for row in rows]
    assert [r.tokens_per_s for r in run.steps] == [float(row["wps"]) for row in rows]
    assert [r.step for r in run.steps if r.valid_loss is not None] == [12, 24]


def test_fairseq_text_lines_say_the_same_as_json_lines() -> None:
    run = read_run(DATA / "fairseq_simple")
    assert [r.step for r in run.steps] == [2, 4, 6] and run.steps[0].loss == pytest.approx(
        8.354 * math.log(2))
    assert run.steps[-1].valid_loss == pytest.approx(
        6.462 * math.log(2)) and run.steps[0].extra["entropy_gating"] == 0.998


@pytest.mark.parametrize("host", ["fairseq", "fairseq_simple"])
def test_the_log_file_of_fairseq_is_read_as_its_output_is(host: str, tmp_path: Path) -> None:
    """`--log-file` has the messages of fairseq's own loggers, without time and name."""
    lines = [re.sub(r"^.*? \| INFO \| (fairseq_cli\.train|train|train_inner|valid) \| ", "", line)
             for line in (DATA / host / "train.log").read_text().splitlines()]
    kept = [line for line in lines if " | INFO | " not in line and " | WARNING | " not in line]
    assert any(line.startswith(('{"epoch', "epoch 001:")) for line in kept)
    write(tmp_path, run_log="\n".join(kept) + "\n")
    run, same = read_run(tmp_path), read_run(DATA / host)
    assert run.host == "fairseq" and run.steps == same.steps and len(run.steps) >= 3
    assert any(r.valid_loss is not None for r in run.steps)
    assert run.settings == same.settings and run.finished == same.finished
    # once more, as a run that goes on appends to it
    write(tmp_path, run_log="\n".join(2 * kept) + "\n")
    assert read_run(tmp_path).steps == same.steps


def test_settings_of_a_model_with_arguments_are_read() -> None:
    found = parse_settings(
        "{'_name': None, 'common': {'seed': 7}, 'model': Namespace(moe_freq=2, arch='transformer', "
        "adam_betas='(0.9, 0.98)', seed=1, lr=[0.1], none=None, moe_capacity_factor='none')}")
    assert found == {"seed": "7", "moe-freq": "2", "arch": "transformer", "lr": "[0.1]",
                     "adam-betas": "(0.9, 0.98)", "moe-capacity-factor": "none"}


def test_statistics_say_which_host_wrote_them(tmp_path: Path) -> None:
    write(tmp_path / "a", stats_jsonl=layer_row(1, host="fairseq"))
    write(tmp_path / "b", stats_jsonl=layer_row(1, host="pytorch"))
    write(tmp_path / "c", stats_jsonl=layer_row(1, host=["odd"]))
    write(tmp_path / "d", stats_jsonl='{"step": 1, "training": {"loss": 2.0}}\n')
    found = [read_run(tmp_path / name).host for name in "abcd"]
    assert found == ["fairseq", "pytorch", "unknown", "pytorch"]
    write(tmp_path / "a" / "logs", train_log='| train_inner | {"loss": "2", "num_updates": "7"}\n')
    assert read_run(tmp_path / "a").last_step == 7  # one run, whose log is in another folder


def test_the_state_of_a_trainer_of_transformers(tmp_path: Path) -> None:
    """The last checkpoint has all steps; its statistics of layers name the same host."""
    state = pytest.importorskip("transformers").TrainerState
    for step in (9, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        history = [{"loss": 4.0 / n, "grad_norm": 1.5, "learning_rate": 1e-3, "epoch": 0.1 * n,
                    "step": n} for n in range(1, step + 1)]
        state(global_step=step, log_history=[
            *history, {"eval_loss": 0.5, "eval_runtime": 1.0, "step": step}]).save_to_json(
            str(folder / "trainer_state.json"))
    run = read_run(tmp_path)
    assert run.host == "transformers" and run.last_step == 10 and len(run.steps) == 10
    assert [r.loss for r in run.steps] == [4.0 / n for n in range(1, 11)]
    assert (run.steps[-1].valid_loss, run.steps[-1].learning_rate) == (0.5, 1e-3)
    write(tmp_path, stats_jsonl=layer_row(1, host="transformers"),
          notes_json='{"trainer": "state"}\n')
    assert read_run(tmp_path).host == "transformers"


@pytest.mark.parametrize("text", [
    '{"log_history": 3}', '{"log_history": [3]}', "[]", '{"log_history": [{"step": "x"}]}', "{",
    '{"log_history": [{"step": 1, "loss": 1' + "0" * 400 + "}]}"])
def test_a_damaged_state_of_a_trainer(tmp_path: Path, text: str) -> None:
    """The other files of the folder are read nevertheless."""
    (tmp_path / "trainer_state.json").write_text(text)
    write(tmp_path, stats_jsonl=layer_row(1, host="transformers"))
    run = read_run(tmp_path)
    assert run.host == "transformers" and len(run.layers["layer1"]) == 1
    assert all(record.loss is None for record in run.steps)


def test_losses_without_label_smoothing_are_compared() -> None:
    """Both criteria log the loss without label smoothing; one also logs the loss with it."""
    dense = parse_step('| train_inner | {"loss": "3.5", "nll_loss": "2.5", "num_updates": "7"}')
    experts = parse_step('| train_inner | {"inner_loss": "3.6", "loss": "3.7", "nll_loss": "2.6", '
                         '"num_updates": "7"}')
    assert dense is not None and experts is not None
    assert dense[1].loss == pytest.approx(2.5 * math.log(2))
    assert experts[1].loss == pytest.approx(2.6 * math.log(2))


@pytest.mark.parametrize(("one", "other"), [
    ("True", "on"), ("false", "off"), ("[0.003]", "3e-3"), ("none", "None"), ("1e-3", "0.001"),
    ("(0.9, 0.98)", "[0.9, 0.98]")])
def test_settings_that_mean_the_same_are_equal(one: str, other: str) -> None:
    assert comparable(one) == comparable(other) != comparable("other")


@pytest.mark.parametrize(("steps", "covered"), [
    (range(60), (0, 59)), (range(1, 61), (1, 60)), ((19, 39, 59), (0, 59)), ((59,), (0, 59)),
    (range(1000, 1060), (1000, 1059)), ((), (0, -1))])
def test_the_steps_that_records_are_about(steps: Iterable[int], covered: tuple[int, int]) -> None:
    run = RunRecord(name="r", host="pytorch", steps=[StepRecord(step=step) for step in steps])
    assert run.steps_covered == covered


@pytest.mark.parametrize("line", [
    '2026-01-01 | INFO | train_inner | {"loss": "4.0", "num_updates": "10", "wps": "5.5"}',
    '[2026-01-01 10:00:00,123][train_inner][INFO] - {"loss": "4.0", "num_updates": "10", "wps": '
    '"5.5"}',
    "2026-01-01 | INFO | train_inner | epoch 001:     10 / 20 loss=4, wps=5.5, num_updates=10",
])
def test_forms_of_fairseq_lines(line: str) -> None:
    kind, record = parse_step(line)
    assert kind == "train_inner" and (record.step, record.tokens_per_s) == (
        10, 5.5) and record.loss == pytest.approx(4 * math.log(2))


def test_other_lines_of_a_fairseq_log_are_no_records() -> None:
    assert parse_step("2026 | INFO | fairseq_cli.train | Start iterating over samples") is None
    assert parse_settings("2026 | INFO | fairseq_cli.train | task: x") == {}
    found = parse_settings(
        "2026 | INFO | fairseq_cli.train | {'_name': None, 'common': {'max_update': 24, 'lr': "
        "[0.1, 0.2], 'arch': 'a b', 'none': None}}"
    )
    assert found == {"max-update": "24", "lr": "[0.1, 0.2]", "arch": "a b"}


def test_defaults_of_the_settings_that_differ_are_known_where_the_host_wrote_them(
        tmp_path: Path) -> None:
    assert read_run(DATA / "fairseq").changed is None
    config = "x | INFO | fairseq_cli.train | {'_name': None, 'common': {'seed': 7, 'cpu': True}}\n"
    differs = f'x | INFO | moe_plugin | {CHANGED} {{"seed": ["8", "1"], "lr": ["2", "None"]}}\n'
    step = 'x | INFO | train_inner | {"loss": "2.0", "num_updates": "7"}\n'
    write(tmp_path, train_log=config + differs + step)
    run = read_run(tmp_path)
    assert run.changed == {"seed": ("8", "1"), "lr": ("2", "None")}
    assert run.settings == {"seed": "7", "cpu": "True"}
    row = {"host": "megatron", "settings": {"a_b": 2, "c": None}, "changed": {"a-b": ["2", "–"]}}
    (tmp_path / "settings.json").write_text(json.dumps(row))
    (tmp_path / "train.log").write_text(step)
    run = read_run(tmp_path)
    assert run.settings == {"a-b": "2"} and run.changed == {"a-b": ("2", "–")}


@pytest.mark.parametrize("text", ['{"seed": 7}', '{"seed": ["7"', "[7]", '{"seed": ["7"]}'])
def test_a_line_of_changed_settings_that_cannot_be_read_is_noted(tmp_path: Path,
                                                                 text: str) -> None:
    step = 'x | INFO | train_inner | {"loss": "2.0", "num_updates": "7"}\n'
    write(tmp_path, train_log=f'{step}x {CHANGED} {text}\n{step}')
    run = read_run(tmp_path)
    assert run.changed is None and len(run.notes) == 1


def test_epochs_stand_in_where_nothing_finer_was_logged(tmp_path: Path) -> None:
    write(
        tmp_path,
        train_log='x | INFO | train | {"epoch": 1, "train_loss": "2.0", "train_num_updates": "7"}\n'
    )
    assert [(r.step, r.loss)
            for r in read_run(tmp_path).steps] == [(7, pytest.approx(2 * math.log(2)))]


@pytest.mark.parametrize("cut", [1, 7, 40, 120])
def test_an_unfinished_last_line_is_left_out_and_said(tmp_path: Path, cut: int) -> None:
    lines = (DATA / "megatron" / "stats.jsonl").read_text().splitlines(keepends=True)
    write(tmp_path, stats_jsonl="".join(lines[:4]) + lines[4][:cut])
    run = read_run(tmp_path)
    assert sum(map(len, run.layers.values())) == 4
    (note,) = run.notes
    assert "last line of stats.jsonl is unfinished" in note and run.host == "unknown"


def test_an_unfinished_fairseq_line_is_said(tmp_path: Path) -> None:
    text = (DATA / "fairseq" / "train.log").read_text()
    cut = text[: text.rindex("| train_inner |") + 60]
    run = read_run(write(tmp_path, train_log=cut))
    assert run.steps[-1].step == 22 and "unfinished" in run.notes[0]


@pytest.mark.parametrize("bad", [
    '{"step": 4, "layer": "a", "load": "many"}', '{"step": "x", "layer": "a", "load": []}',
    '{"step": 4, "layer"', '{"step": NaN, "layer": "a", "load": [1]}',
    '{"step": 4, "layer": "a", "load": [true]}',
    '{"step": 4, "layer": "a", "load": [NaN, 1e40]}',
    '{"step": 4, "layer": "a", "load": [1], "decisions": [7]}',
    '{"step": 1e999, "layer": "a", "load": []}'
])
def test_a_wrong_line_is_left_out_and_said(tmp_path: Path, bad: str) -> None:
    write(tmp_path, stats_jsonl=layer_row(2) + bad + "\n" + layer_row(6))
    run = read_run(tmp_path)
    assert [r.step for r in run.layers["layer1"]] == [2, 6] and "a" not in run.layers
    assert len(run.notes) == 1 and "1 line of stats.jsonl could not be read" in run.notes[
        0] and "line 2" in run.notes[0]


def test_a_resumed_run_keeps_the_last_record_of_a_step(tmp_path: Path) -> None:
    rows = [(10, 5.0), (20, 4.0), (30, 3.5), (20, 3.9), (30, 3.3)]
    write(tmp_path, log_jsonl="".join(
        json.dumps({"iteration": i, "lm_loss": v}) + "\n" for i, v in rows),
          stats_jsonl=layer_row(10) + layer_row(10, max_over_mean=1.25))
    run = read_run(tmp_path)
    assert [(r.step, r.loss)
            for r in run.steps] == [(10, 5.0), (20, 3.9),
                                    (30, 3.3)] and "from step 30 to 20" in run.notes[0]
    assert [r.max_over_mean for r in run.layers["layer1"]] == [1.25]


def test_without_statistics_the_training_log_tells_the_balance(tmp_path: Path) -> None:
    shutil.copy(DATA / "megatron" / "log.jsonl", tmp_path / "anything.txt")
    run = read_run(tmp_path)
    assert set(run.layers) == {"layer1", "layer2"
                               } and run.layers["layer1"][0].max_over_mean > 1 and run.experts == 0


def test_later_pipeline_stages_and_deeper_folders_belong_to_the_run(tmp_path: Path) -> None:
    write(tmp_path, stats_jsonl=layer_row(2),
          stats_jsonl_stage1=layer_row(2, "layer10") + layer_row(2, "layer9"))
    write(tmp_path / "checkpoints", log_jsonl='{"iteration": 2, "lm_loss": 3.0}\n')
    run = read_run(tmp_path)
    assert list(run.layers) == ["layer1", "layer9", "layer10"
                                ] and run.host == "megatron" and run.last_step == 2


def test_settings_come_from_the_command_where_nothing_else_has_them(tmp_path: Path) -> None:
    write(tmp_path, stats_jsonl=layer_row(2),
          command_sh="cd /x\npython -m t --train-iters 50 --flag \\\n  --name 'a b' --k=v\n")
    assert read_run(tmp_path).settings == {
        "train-iters": "50", "flag": "true", "name": "a b", "k": "v"
    } and read_run(tmp_path).total_steps == 50


@pytest.mark.parametrize("host", ["fairseq", "fairseq_simple", "megatron"])
def test_a_run_that_has_ended_is_finished(tmp_path: Path, host: str) -> None:
    shutil.copytree(DATA / host, tmp_path / host)
    assert read_run(tmp_path / host).finished
    log = next((tmp_path / host).glob("*.log"), tmp_path / host / "log.jsonl")
    lines = log.read_text().splitlines(keepends=True)
    # without its last step, or, in fairseq, before its last line
    log.write_text("".join(lines[:-1] if host != "megatron" else lines[:-2]))
    (tmp_path / host / "stats.jsonl").unlink(missing_ok=True)
    assert not read_run(tmp_path / host).finished
    # a resumed run goes on after the end of the first process
    log.write_text("".join([*lines, *lines[:-1]]) if host != "megatron" else "".join(lines))
    assert read_run(tmp_path / host).finished is (host == "megatron")


def test_the_remaining_time_is_that_of_the_recent_speed(tmp_path: Path) -> None:
    rows = [{"iteration": i, "lm_loss": 3.0, "seconds": 2.0} for i in range(10, 101, 10)]
    write(tmp_path, log_jsonl="".join(json.dumps(row) + "\n" for row in rows),
          command_sh="python train.py --train-iters 150\n")
    run = read_run(tmp_path)
    assert run.clock[:2] == [(10, 2.0), (20, 4.0)] and run.seconds == 20.0
    assert run.remaining_s == pytest.approx(50 * 2.0 / 10) and not run.finished
    write(tmp_path, command_sh="python train.py\n")
    assert read_run(tmp_path).remaining_s is None


def test_times_of_layers_are_the_clock_without_a_log(tmp_path: Path) -> None:
    write(tmp_path, stats_jsonl=layer_row(2) + layer_row(4, "layer2") + layer_row(6),
          command_sh="python train.py --train-iters 10\n")
    run = read_run(tmp_path)
    assert run.clock == [(2, 0.0), (4, 2.0), (6, 4.0)] and run.remaining_s == pytest.approx(4.0)
    assert run.step_range == (2, 6) and set(run.last_records) == {"layer1", "layer2"}


def test_folders_that_hold_no_run_or_several_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a directory.*moe-stats-jsonl"):
        read_run(tmp_path / "none")
    with pytest.raises(
            ValueError,
            match="contains no record of a run. Searched for layer statistics.*fairseq's log"):
        read_run(
            write(tmp_path / "empty", notes_txt="hello\n{\n", other_json='{"a": 1}',
                  binary_log="\0" + layer_row(2)))
    with pytest.raises(ValueError, match="several runs: fairseq, megatron. Pass"):
        read_run(_both(tmp_path / "both"))
    mixed = write(tmp_path / "mixed", log_jsonl='{"iteration": 2, "lm_loss": 3.0}\n',
                  train_log='x | train_inner | {"loss": "1", "num_updates": "2"}\n')
    with pytest.raises(ValueError, match="logs of several hosts"):
        read_run(mixed)


def test_the_runs_of_a_folder_are_told_apart(tmp_path: Path) -> None:
    _both(tmp_path / "hosts")
    shutil.copytree(DATA / "megatron", tmp_path / "again" / "first")
    write(tmp_path / "notes", other_json='{"a": 1}')
    assert [(run.name, run.host) for run in read_runs(tmp_path)] == [
        ("again", "megatron"), ("hosts/fairseq", "fairseq"), ("hosts/megatron", "megatron")]
    (one,) = read_runs(tmp_path / "again" / "first")
    assert one.name == "first" and len(one.steps) == len(read_run(DATA / "megatron").steps)
    shutil.copy(DATA / "megatron" / "log.jsonl", tmp_path)  # a run around runs
    with pytest.raises(ValueError, match=r"several runs: \., again.first, .*in a separate folder"):
        read_runs(tmp_path)


# as Megatron's training loop makes them
NATIVE = """  seq_length ...................................... 128
  train_iters ..................................... 20
 [2026-01-02 03:04:05.1] iteration       10/      20 | consumed samples:           80 | \
elapsed time per iteration (ms): 500.0 | learning rate: 1.000000E-04 | global batch size:     8 | \
lm loss: 5.500000E+00 | load_balancing_loss: 1.250000E+00 | loss scale: 1.0 | grad norm: 2.500 | \
number of skipped iterations:   1 | number of nan iterations:   0 |
 validation loss at iteration 10 | lm loss value: 5.250000E+00 | lm loss PPL: 1.905663E+02 |
[default1]: iteration       20/      20 | elapsed time per iteration (ms): 250.0 | \
global batch size:     8 | lm loss: NAN | number of nan iterations:   1 |
iteration 20/20 | lm loss 5.7296 | 2910 tokens/s | of our own line
"""


def test_a_log_of_megatron_without_this_plugin_is_read(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, train_log=NATIVE))
    first, last = run.steps
    assert run.host == "megatron" and run.total_steps == 20 and run.finished and not run.notes
    assert first == StepRecord(step=10, loss=5.5, valid_loss=5.25, tokens_per_s=8 * 128 / 0.5,
                               learning_rate=1e-4, grad_norm=2.5, not_finite=1.0,
                               extra={"loss load_balancing_loss": 1.25})
    assert last.step == 20 and math.isnan(last.loss or 0) and last.not_finite == 1
    # of a run with a log of its own, or with the settings of one that begins, it says nothing new
    begun = tmp_path / "begun"
    write(begun, settings_json='{"host": "megatron", "settings": {"train_iters": 20}}\n')
    write(begun / "save", rank1_log=NATIVE)
    with pytest.raises(ValueError, match="contains no record of a run"):
        read_run(begun)
    shutil.rmtree(begun)
    write(tmp_path / "save", log_jsonl='{"iteration": 5, "lm_loss": 3.0}\n')
    assert [r.step for r in read_run(tmp_path).steps] == [5]


def test_what_a_command_says_is_as_it_is_written(tmp_path: Path) -> None:
    words = ["data", "--lr", "3e-3", "--moe_freq=2", "--cpu", "--betas", "0.9", "0.98", "--fp16",
             "+optimization.max_update=[5]", "--empty="]
    assert written(words, ["betas"]) == {
        "lr": "3e-3", "moe-freq": "2", "cpu": "", "betas": "0.9 0.98", "empty": "",
        "fp16": "+optimization.max_update=[5]"}
    assert written(["a.b/c.max_update=[5]"]) == {"max-update": "[5]"}
    (tmp_path / "m.yaml").write_text("router: {fp32: true, top_k: 2}\nmegatron: {num_layers: 4}\n")
    known = {"lr": ("0.003", "–"), "fp16": (ON, OFF), "derived": ("1", "2")}
    assert chosen([*words, "--moe-config", str(tmp_path / "m.yaml")], known) == {
        "lr": ("3e-3", "–"), "fp16": (ON, OFF), "router.fp32": ("True", "False")}


def _both(folder: Path) -> Path:
    for host in ("fairseq", "megatron"):
        shutil.copytree(DATA / host, folder / host)
    return folder


def test_changes_of_the_expert_parallel_size(tmp_path: Path) -> None:
    change = {"before": 2, "after": 4, "bytes": 2048, "seconds": 0.5}
    rows = [{"step": 5, "training": {"loss": 1.0}}, {"step": 6, "expert_parallel": change},
            {"step": 7, "expert_parallel": {"before": 2}}]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(tmp_path)
    assert [record.line() for record in run.resizes] == [
        "expert-parallel ranks 2 -> 4 before step 6: 2 KiB sent by all ranks, 500 ms"]
    assert any("line 3" in note for note in run.notes), run.notes


def test_records_of_a_long_log_take_little_memory(tmp_path: Path) -> None:
    """Less than half of what tuples of loads and a dict for each count would take."""
    counts = {name: {"r=1 d=2": 10} for name in ("layouts", "exchanges", "routers", "collectives")}
    with (tmp_path / "stats.jsonl").open("w") as file:
        for step in range(400):
            row = {"step": step, "layer": "a", "load": [1000 * step + i for i in range(64)],
                   "tokens": 8.5, **counts}
            file.write(json.dumps(row) + "\n")
    tracemalloc.start()
    try:
        run = read_run(tmp_path)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert list(run.layers["a"][1].load) == [1000 + i for i in range(64)]
    assert size / 400 < 1000


@pytest.mark.parametrize("bad", [True, "3", None, 1e31, [1]])
@pytest.mark.parametrize("good", [1, 1.5, math.nan, 2**40])
def test_a_load_that_is_no_number_is_left_out_whatever_stands_beside_it(
        tmp_path: Path, good: float, bad: object) -> None:
    lines = [{"step": step, "layer": "a", "load": load, "layouts": counts}
             for step, load, counts in ((1, [good, good], {}), (2, [good, bad], {}),
                                        (3, [bad, good], {}),
                                        (4, [1], {"r": bad or "x", "d": good}),
                                        (5, [good], {"r": good}))]
    (tmp_path / "stats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    run = read_run(tmp_path)
    assert [record.step for record in run.layers["a"]] == [1, 5]
    assert "3 lines of stats.jsonl could not be read" in " ".join(run.notes)
