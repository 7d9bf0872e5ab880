"""StatsRecorder: what is summed, what is averaged, over calls and ranks."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from moe_plugin import MoEConfig, MoELayer
from moe_plugin.comm import run_simulated
from moe_plugin.config import DispatchConfig, ObserveConfig, from_dict
from moe_plugin.memory.activations.auto import manage
from moe_plugin.memory.copier import Copier
from moe_plugin.memory.tiers import DiskTier
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.observe import StatsRecorder, sinks
from moe_plugin.observe.history import read_run
from moe_plugin.observe.recorder import summary
from moe_plugin.observe.report.page import render
from moe_plugin.observe.sinks import JsonlSink
from moe_plugin.output import FOLD_AT, LayerStats
from moe_plugin.records import TokenInfo
from moe_plugin.routing import routers
from moe_plugin.routing.contract import balances_by_itself
from moe_plugin.utils.regular_files import open_append
from tests.routing.references import NEEDED

pytestmark = pytest.mark.fast

DATA = Path(__file__).parent / "data"


def stats(load: list[int], *, dropped: int = 0, entropy: float = 1.0, loss: float | None = 2.0,
          **host: int) -> LayerStats:
    load_KE = torch.tensor([load])
    kept_KE = load_KE.clone()
    kept_KE[0, 0] -= dropped
    losses = {} if loss is None else {"gshard": torch.tensor(loss)}
    return LayerStats(load_KE, kept_KE, torch.tensor(entropy), torch.tensor(sum(load)), losses,
                      **host)


def test_sums_and_means_over_calls() -> None:
    recorder = StatsRecorder(ObserveConfig(interval=1))
    recorder.add("a",
                 stats([4, 0], dropped=1, entropy=1.0, loss=2.0, bytes_sent=10, rows=4, capacity=3))
    recorder.add("a", stats([1, 1], entropy=4.0, loss=4.0, bytes_sent=5, rows=2, rows_sent=3,
                              rows_between=1, capacity=5))
    record = recorder.reduce()["a"]
    assert record["load"] == [5, 1] and record["tokens"] == 6 and record["calls"] == 2
    assert record["dropped"] == 1 and record["drop_fraction"] == pytest.approx(1 / 6)
    assert record["max_over_mean"] == pytest.approx(
        5 / 3) and record["max_over_mean_call"] == pytest.approx((2 + 1) / 2)
    assert record["entropy"] == pytest.approx((1.0 * 4 + 4.0 * 2) / 6)  # weighed by tokens
    assert record["losses"] == {"gshard": pytest.approx(3.0)}
    assert (record["bytes_sent"], record["rows"], record["rows_sent"], record["rows_between"],
            record["capacity"], record["unused_experts"]) == (15, 6, 3, 1, 4.0, 0)
    logs = summary({"a": record, "b": {**record, "rows_sent": 0}})  # b sends none
    assert logs["moe_rows_sent_per_token"] == 3 / 6
    assert logs["moe_rows_between_nodes_per_token"] == 1 / 6
    assert logs["moe_rows_saved_by_sending_once"] == 1 - 3 / 5  # of 6 choices one was dropped


def test_a_record_says_whether_the_router_balances_without_a_loss() -> None:
    """As every router declares it."""
    recorder, declared = StatsRecorder(ObserveConfig(interval=1)), {}
    for name in routers.names():
        layer = MoELayer(from_dict({"model_dim": 4, "num_experts": 4, "losses": {},
                                    "router": {"name": name, **NEEDED.get(name, {})}}))
        out = layer(torch.randn(8, 4), info=TokenInfo(token_ids_T=torch.arange(8)))
        recorder.add(name, out.stats)
        declared[name] = int(balances_by_itself(layer.router))
    records = recorder.reduce()
    assert {name: one["self_balanced_calls"] for name, one in records.items()} == declared
    assert {name for name, balanced in declared.items() if balanced} >= {
        "sigmoid_bias", "sinkhorn", "base", "hash"} and not declared["topk"]


def test_ranks_with_the_same_tokens_count_once() -> None:
    def work(comm) -> dict:
        recorder = StatsRecorder(ObserveConfig(interval=1), comm)
        recorder.add("a", stats([4, 1], dropped=1, entropy=2.0, rows=5, copies=3))
        recorder.add("a", stats([0, 1], copies=3))
        return recorder.reduce()["a"]

    for record in run_simulated(3, work):
        assert record["load"] == [
            4, 2
        ] and record["tokens"] == 6 and record["dropped"] == 1 and record["rows"] == 15
        assert record["max_over_mean_call"] == pytest.approx(
            (1.6 + 2) / 2) and record["entropy"] == pytest.approx((2.0 * 5 + 1.0) / 6)


def test_a_loss_that_only_some_calls_have_is_averaged_over_these() -> None:
    recorder = StatsRecorder(ObserveConfig(interval=1))
    recorder.add("a", stats([1, 1], loss=None))
    recorder.add("a", stats([1, 1], loss=6.0))
    assert recorder.reduce()["a"]["losses"] == {"gshard": pytest.approx(6.0)}


def test_many_calls_fold_to_the_same_sums() -> None:
    recorder = StatsRecorder(ObserveConfig(interval=1))
    kept = WeakSet[torch.Tensor]()
    for _ in range(2 * FOLD_AT + 3):
        kept.add((call := stats([2, 1])).load_KE)
        recorder.add("a", call)
    del call
    assert len(kept) == 3  # the tensors of the others are gone
    record = recorder.reduce()["a"]
    assert record["load"] == [2 * (2 * FOLD_AT + 3), 2 * FOLD_AT + 3
                              ] and record["losses"]["gshard"] == pytest.approx(2.0)


@pytest.mark.parametrize("before", [0, 3, FOLD_AT - 1])
def test_a_step_that_is_repeated_counts_once(before: int) -> None:
    plain, repeated = StatsRecorder(ObserveConfig()), StatsRecorder(ObserveConfig())
    for _ in range(before):
        for recorder in (plain, repeated):
            recorder.add("a", stats([2, 3], bytes_sent=1))
    undo = repeated.mark()
    for attempt in range(3):
        for _ in range(2):
            repeated.add("a", stats([5, attempt], loss=float(attempt), bytes_sent=7))
        repeated.add("b", stats([1, 1]))
        if attempt < 2:
            undo()
    for _ in range(2):
        plain.add("a", stats([5, 2], loss=2.0, bytes_sent=7))
    plain.add("b", stats([1, 1]))
    assert repeated.reduce() == plain.reduce()


def test_ranks_are_summed_with_one_all_reduce_and_rank_0_writes(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "stats.jsonl"

    def work(comm) -> dict[str, float]:
        calls = []
        inner, comm.all_reduce = comm.all_reduce, lambda x, op="sum": calls.append(1) or inner(
            x, op)
        recorder = StatsRecorder(ObserveConfig(interval=2, jsonl=str(path)), comm)
        logs = {}
        for step in range(4):
            for layer in ("b", "a"):
                recorder.add(layer, stats([comm.rank + 1, 0]))
            logs = recorder.step(step) or logs
        assert len(calls) == 2, "one all-reduce an interval"
        recorder.close()
        return logs

    logs = run_simulated(2, work)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["layer"]) for r in records] == [(1, "a"), (1, "b"), (3, "a"), (3, "b")]
    assert all(r["load"] == [6, 0] and r["unused_experts"] == 1 and r["calls"] == 4
               for r in records)
    assert logs[0] == logs[1] and logs[0]["moe_max_over_mean"] == 2.0 and logs[0][
        "moe_loss_gshard"] == 2.0


def test_fields_agree_with_as_dict_of_a_real_layer() -> None:
    config = MoEConfig(model_dim=8, num_experts=4,
                       dispatch=DispatchConfig(name="padded", capacity_factor=0.5))
    out = MoELayer(config)(torch.randn(32, 8))
    recorder = StatsRecorder(ObserveConfig())
    recorder.add("a", out.stats)
    record, plain = recorder.reduce()["a"], out.stats.as_dict()
    assert plain["dropped"] > 0
    for key, value in plain.items():
        assert record[key] == pytest.approx(value, rel=1e-6), key


def test_a_rank_without_tokens_gives_numbers() -> None:
    config = MoEConfig(model_dim=8, num_experts=4)
    recorder = StatsRecorder(ObserveConfig())
    recorder.add("a", MoELayer(config)(torch.randn(0, 8)).stats)
    record = recorder.reduce()["a"]
    assert record["tokens"] == 0 and record["entropy"] == 0 and record["max_over_mean"] == 0
    assert recorder.reduce() == {} and recorder.flush(5) == {}


def test_nothing_is_read_from_the_device_before_the_interval_ends() -> None:
    """On the meta device any copy to the host raises."""
    recorder = StatsRecorder(ObserveConfig(interval=1000))
    meta = {"device": "meta"}
    for step in range(2 * FOLD_AT):
        recorder.add(
            "a",
            LayerStats(torch.ones(1, 2, dtype=torch.int64, **meta),
                       torch.ones(1, 2, dtype=torch.int64, **meta), torch.ones((), **meta),
                       torch.ones((), **meta), {"z": torch.ones((), **meta)}))
        assert recorder.step(step) == {}
    with pytest.raises(RuntimeError):
        recorder.flush(0)


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder = StatsRecorder(ObserveConfig(interval=1, tensorboard=str(tmp_path)))
    recorder.add("layer0", stats([3, 1]))
    recorder.watch("weights", Copier("cpu"))
    recorder.step(7)
    recorder.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    (point,) = events.Scalars("moe/layer0/max_over_mean")
    assert point.step == 7 and point.value == pytest.approx(1.5)
    assert events.Scalars("moe/layer0/loss/gshard")[0].value == pytest.approx(2.0)
    assert events.Scalars("moe/layer0/share/expert000")[0].value == pytest.approx(0.75)
    assert events.Scalars("moe/copies/weights/bytes")[0].value == 0


def test_tensorboard_gets_what_the_log_warns_of(tmp_path: Path,
                                                caplog: pytest.LogCaptureFixture) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder = StatsRecorder(ObserveConfig(interval=1, tensorboard=str(tmp_path)))
    for step in range(8):
        recorder.add("layer0", stats([0, 40]))  # collapse
        recorder.step(step)
    recorder.training(8, loss=math.nan)
    recorder.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    names = [f"moe/alerts/{rule}/text_summary" for rule in ("collapse", "not_finite")]
    assert set(names) <= set(events.Tags()["tensors"])
    for name, record in zip(names, [r for r in caplog.records if "collapse" in r.getMessage() or
                                    "not_finite" in r.getMessage()], strict=True):
        (point,) = events.Tensors(name)
        (text,) = point.tensor_proto.string_val
        assert f"step {point.step}: {text.decode()}" == record.getMessage().rpartition(" [")[0]


def test_missing_tensorboard_names_the_extra(tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"moe-plugin\[observe\]"):
        StatsRecorder(ObserveConfig(tensorboard=str(tmp_path)))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="observe.jsonl="):
        StatsRecorder(ObserveConfig(jsonl=str(tmp_path)))


class _Full:
    """A file on a disk that takes `room` more bytes."""

    def __init__(self, stream: Any, room: int) -> None:
        self.stream, self.room = stream, room

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.stream.write(data[: self.room])
        self.room -= written
        return written

    def close(self) -> None:
        self.stream.close()


def test_a_full_disk_loses_records_with_a_warning_and_training_goes_on(
        tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = _Full(open_append(str(tmp_path / "stats.jsonl")), 100)
    monkeypatch.setattr(sinks, "open_append", lambda path: disk)
    sink = JsonlSink(str(tmp_path / "stats.jsonl"))
    sink.write({"step": 0})
    disk.room = 5
    for step in (1, 2):
        sink.write({"step": step})
    assert len(caplog.records) == 1 and "disk is full" in caplog.text
    disk.room = 10_000
    sink.write({"step": 3})
    assert "can be written again; 2 records were lost" in caplog.text
    sink.close()
    lines = (tmp_path / "stats.jsonl").read_text().splitlines()
    assert [json.loads(lines[0]), json.loads(lines[-1])] == [{"step": 0}, {"step": 3}]
    assert lines[1:-1] == ['{"ste']


def test_a_line_that_a_killed_run_left_unfinished_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    path.write_text('{"step": 1}\n{"st')
    for step in (2, 3):
        sink = JsonlSink(str(path))
        sink.write({"step": step})
        sink.close()
    assert path.read_text() == '{"step": 1}\n{"st\n{"step": 2}\n{"step": 3}\n'


def test_statistics_are_appended_to_regular_files_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null"), tmp_path):
        with pytest.raises(ValueError, match="observe.jsonl=.*regular file"):
            JsonlSink(str(path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="observe.jsonl=.*cannot be written.*another path"):
        JsonlSink(str(tmp_path / "file" / "stats.jsonl"))


def test_tensorboard_on_a_full_disk_warns_once(tmp_path: Path,
                                               caplog: pytest.LogCaptureFixture,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = StatsRecorder(ObserveConfig(interval=1, tensorboard=str(tmp_path)))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    for step in range(3):
        recorder.add("layer0", stats([3, 1]))
        assert recorder.step(step)
    assert len(caplog.records) == 1 and "observe.tensorboard=" in caplog.text
    assert "disk is full" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(SummaryWriter, "close", full)
        recorder.close()
    recorder.close()
    assert len(caplog.records) == 1


def test_copies_of_weights_and_activations_are_counted(tmp_path: Path) -> None:
    """By record and name, in the file and in the report; without layers, too."""
    path = tmp_path / "stats.jsonl"
    recorder = StatsRecorder(ObserveConfig(interval=2, jsonl=str(path)))
    trainer = StreamedTrainer([torch.nn.Linear(4, 4) for _ in range(4)],
                              lambda y, target: y.square().mean(),
                              partial(torch.optim.SGD, lr=0.1), DiskTier(tmp_path / "weights"))
    recorder.watch("weights", trainer.copier, trainer.on_device)
    idle, moved = Copier("cpu"), []
    recorder.watch("activations", idle)
    activations = manage([torch.nn.Linear(4, 4) for _ in range(3)],
                         ["keep", "swap", "swap"], folder=tmp_path, smallest=1)
    recorder.watch("managed", activations.swapper.copier, activations.on_device)
    for step in range(4):
        trainer.step([(torch.randn(3, 4), None)])
        trainer.settle()
        trainer.copier.close()  # all jobs are counted
        y = torch.randn(16, 4, requires_grad=True)
        for block in activations.blocks:
            y = block(y).tanh()
        y.sum().backward()
        activations.after_step()
        recorder.step(step)
        moved.append(trainer.copier.counters.bytes)
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    assert [(row["step"], row["copier"]) for row in rows] == [
        (step, name) for step in (1, 3) for name in ("activations", "managed", "weights")]
    assert [row["bytes"] for row in rows[::3]] == [0, 0]
    assert [row["bytes"] for row in rows[2::3]] == [moved[1], moved[3] - moved[1]]
    assert rows[2]["copies"] > 0 < rows[2]["busy_s"] and "load" not in rows[2]
    run = read_run(tmp_path)
    assert [r.resident_bytes for r in run.copies["weights"]] == [trainer.device_bytes] * 2
    for record in run.copies["managed"]:
        assert (record.keep, record.recompute, record.swap) == (1, 0, 2)
        assert 16 * 4 * 4 <= record.resident_bytes <= 4 * 16 * 4 * 4
    assert [record.bytes for record in run.copies["weights"]] == [moved[1], moved[3] - moved[1]]
    page = render(run)
    for title in ("Copied to and from the device", "Waiting for copies", "Bytes on the device",
                  "Activations kept, recomputed, swapped"):
        assert title in page
    activations.release()
    assert "Waiting for copies" not in render(read_run(DATA / "megatron"))
    trainer.close()
    recorder.close()


def test_files_of_pipeline_stages_are_summed(tmp_path: Path) -> None:
    for name, nbytes in (("stats.jsonl", 10), ("stats.jsonl.stage1", 5)):
        row = {"step": 3, "time": 1.0, "copier": "activations", "ranks": 2, "bytes": nbytes,
               "swap": 4}
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    [record] = read_run(tmp_path).copies["activations"]
    assert (record.ranks, record.bytes, record.step, record.swap) == (4, 15, 3, 8)


def test_a_store_of_experts_is_counted(tmp_path: Path) -> None:
    layer = MoELayer(8, num_experts=4, router={"top_k": 1}, experts={"store": "host"}).eval()
    path = tmp_path / "stats.jsonl"
    recorder = StatsRecorder(ObserveConfig(interval=2, jsonl=str(path)))
    bytes_of_one = 4 * sum(p[0].numel() for p in layer.experts.parameters())
    used = []
    for step in range(4):
        with torch.no_grad():
            stats = layer(torch.randn(64, 8)).stats
        used.append(4 - stats.as_dict()["unused_experts"])
        recorder.add("layer0", stats)
        recorder.step(step)
    first, second = (json.loads(line)["store"] for line in path.read_text().splitlines())
    assert first["misses"] * bytes_of_one == first["bytes"] > 0
    asked = [sum(record.get(name, 0) for name in ("hits", "misses")) for record in (first, second)]
    assert asked == [sum(used[:2]), sum(used[2:])]
    page = render(read_run(tmp_path))
    assert "Experts found on the device" in page
    assert "Experts found" not in render(read_run(DATA / "megatron"))
