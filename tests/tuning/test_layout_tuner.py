"""`parallel: auto` in the layer: agreement, switching, records, checkpoints, recomputation."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, LocalComm, Topology, run_simulated
from moe_plugin.config import CommConfig, MoEConfig, ObserveConfig, from_dict, to_dict
from moe_plugin.observe.recorder import StatsRecorder
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.routing.replay import checkpoint
from moe_plugin.tuning import layout_tuner as auto_module
from moe_plugin.tuning.exchange_tuner import ExchangeTuner
from moe_plugin.tuning.placement import resolve_open_settings
from tests.distributed import run_gloo


def config(tuner: dict | None = None, **parallel) -> MoEConfig:
    return from_dict({
        "model_dim": 8, "num_experts": 2, "experts": {"hidden_dim": 16},
        "parallel": {"mode": "auto", **parallel}, "tuner": {"tries": 6, **(tuner or {})}
    })


class FakeWatch:
    """Reports a time of its own: what `seconds(choice, call)` says, different on every rank."""

    def __init__(self, auto, seconds) -> None:
        self.over, self.auto, self.tell = True, auto, seconds
        self.choice = None

    def start(self):
        self.choice = self.auto.current

    def started(self, x, anchor):
        return x

    def stopped(self, y):
        return y

    def seconds(self) -> float:
        return self.tell(self.choice)


def drive(comm: Comm, seconds, calls: int, tokens=lambda call: 16,
          settings: MoEConfig | None = None) -> tuple[MoELayer, list[str], list]:
    layer = MoELayer(settings or config(), comm)
    noise = random.Random(comm.rank)
    auto = layer.routed_experts.tuner
    auto.measure = lambda device: FakeWatch(
        auto, lambda choice: seconds(choice) * noise.uniform(0.9, 1.1))
    labels, decisions = [], []
    for call in range(calls):
        out = layer(torch.randn(tokens(call), 8))
        out.output.sum().backward()
        labels.append(out.stats.layout)
        decisions += out.stats.decisions
    return layer, labels, decisions


def test_ranks_with_different_clocks_and_loads_run_the_same_layouts() -> None:
    def rank(comm):
        comm.prepare(Topology.uniform(8, 4))
        return drive(comm, lambda c: {0: 3.0, 1: 2.0, 2: 1.0, 4: 4.0}[c.r] + c.d / 10, 80,
                     lambda call: (5 + 3 * comm.rank) * (1 + 3 * (call > 50)))[1:]

    results = run_simulated(8, rank)
    assert all(labels == results[0][0] for labels, _ in results)
    assert all(json.dumps(d) == json.dumps(results[0][1]) for _, d in results)
    labels, decisions = results[0]
    assert len(set(labels)) > 3  # it did try
    assert {d["event"] for d in decisions} >= {"predict", "explore", "settle"}
    assert len({tuple(d["bucket"]) for d in decisions}) >= 2  # it saw the load change


def test_settles_on_the_fastest_measured() -> None:
    for labels in run_simulated(
            4, lambda comm: drive(comm, lambda c: 1.0 if (c.r, c.d) == (1, 1) else 2.0, 60)[1]):
        assert labels[-1].startswith("r=1 d=1 ")


@pytest.mark.parametrize(("share", "looks"), [(0.0, 4), (1e6, 32)], ids=["dear", "cheap"])
def test_once_settled_ranks_agree_as_often_as_it_costs_little(monkeypatch: pytest.MonkeyPatch,
                                                              share: float, looks: int) -> None:
    monkeypatch.setattr(auto_module, "SHARE", share)

    def rank(comm):
        layer, _, _ = drive(comm, lambda c: 1.0 + c.r, 80)
        calls = []
        auto = layer.routed_experts.tuner
        auto.agree = lambda routing, old=auto.agree: calls.append(1) or old(routing)
        for _ in range(32):
            layer(torch.randn(16, 8)).output.sum().backward()
        return len(calls)

    assert run_simulated(2, rank) == [looks, looks]


@pytest.mark.fast
def test_ranks_agree_in_every_third_call() -> None:
    engine = SimpleNamespace(exploring=lambda bucket: False, wants_time=lambda bucket: False,
                             choose=lambda bucket, calls: (bucket, calls))
    tuner = SimpleNamespace(since=0, every=3, due=False, bucket=0, current=None, tuner=engine,
                            agree=lambda routing: routing)
    assert [auto_module.LayoutTuner._choose(tuner, call) for call in range(1, 8)] == [
        None, None, (3, 3), (3, 3), (3, 3), (6, 3), (6, 3)]


@pytest.mark.fast
def test_calls_between_looks() -> None:
    pace = auto_module.calls_between
    assert [
        pace(1e-3, 45e-3),
        pace(1e-3, 1.0),
        pace(0.0, 1.0),
        pace(1.0, 1.0),
        pace(math.inf, 1.0),
        pace(1e-3, 0.0),
        pace(0.0, 0.0)
    ] == [3, 1, 1, 8, 8, 8, 8]


def test_evaluation_keeps_the_latest_choice_and_asks_nobody() -> None:
    def rank(comm):
        layer, labels, _ = drive(comm, lambda c: 1.0 + c.r, 40)
        layer.eval()
        layer.routed_experts.tuner.agree = None
        return layer(torch.randn(3, 8)).stats.layout == labels[-1]

    assert all(run_simulated(2, rank))


def test_numbers_are_those_of_a_fixed_layout() -> None:
    def rank(comm):
        auto = drive(comm, lambda c: 1.0, 1)[0].double()
        fixed = MoELayer(config(mode="fixed"), comm).double()
        fixed.load_state_dict({k: v for k, v in auto.state_dict().items()})
        for call in range(30):
            x = torch.randn(9, 8, generator=torch.Generator().manual_seed(call),
                            dtype=torch.float64)
            torch.testing.assert_close(auto(x).output, fixed(x).output, rtol=1e-9, atol=1e-10)
        return len({d.choice for d in auto.routed_experts.tuner.tuner.log})

    run_simulated(4, rank)


def test_state_travels_in_checkpoints() -> None:
    def rank(comm):
        layer, labels, _ = drive(comm, lambda c: 1.0 + abs(c.r - 1) + c.d, 60)
        state = copy.deepcopy(layer.state_dict())
        again = MoELayer(config(), comm)
        again.load_state_dict(state)
        first = again(torch.randn(16, 8)).stats
        MoELayer(config(mode="fixed"), comm).load_state_dict(state)  # and where nothing is tuned
        again.load_state_dict(MoELayer(config(mode="fixed"), comm).state_dict())  # and without
        return first.layout == labels[-1], [d["event"] for d in first.decisions]

    assert run_simulated(2, rank) == [(True, ["restore"])] * 2


def test_recomputation_repeats_the_layout() -> None:
    def rank(comm):
        layer = MoELayer(config(), comm)
        used = []
        at = layer.routed_experts.layouts.at
        layer.routed_experts.layouts.at = lambda choice: used.append(choice) or at(choice)
        for _ in range(6):
            x = torch.randn(16, 8, requires_grad=True)
            checkpoint(lambda v: layer(v).output, x).sum().backward()
        return used

    for used in run_simulated(2, rank):
        assert used[::2] == used[1::2] and len(set(used)) > 1


def test_records_hold_layouts_and_decisions(tmp_path) -> None:
    settings = config()
    recorder = StatsRecorder(ObserveConfig(jsonl=str(tmp_path / "log.jsonl"),
                                           tensorboard=str(tmp_path / "board")), LocalComm())
    layer = MoELayer(settings, LocalComm())
    for _ in range(3):
        recorder.add("0", layer(torch.randn(4, 8)).stats)
    recorder.flush(3)
    recorder.close()
    record = json.loads((tmp_path / "log.jsonl").read_text())
    assert record["layouts"] == {"r=1 d=1 linear auto": 3
                                 } and record["decisions"][0]["event"] == "predict"


def _decided(cases: list[tuple[int, dict]]) -> list[tuple[str | None, str | None]]:
    from moe_plugin import TorchComm

    found = []
    for nodes, settings in cases:
        comm = TorchComm()
        comm.prepare(Topology.uniform(4, 4 // nodes))
        made = MoELayer(from_dict({"model_dim": 8, "num_experts": 4, **settings}), comm)
        made(torch.randn(6, 8)).output.sum().backward()
        assert (made.routed_experts.tuner is not None) == (made.config.parallel.mode != "fixed")
        found.append((made.config.parallel.mode, made.config.comm.all_to_all))
    comm.prepare(Topology.uniform(4, 2))
    strict = from_dict({"model_dim": 8, "num_experts": 4, "deterministic": True})
    return [*found, (resolve_open_settings(strict, comm).parallel.mode, "deterministic")]


@pytest.mark.fast
def test_a_single_rank_tries_no_other_all_to_all() -> None:
    settings = dataclasses.replace(config(), comm=CommConfig(all_to_all="native"))
    assert MoELayer(settings, LocalComm()).routed_experts.tuner.algorithms() == ["native"]


@pytest.mark.distributed
def test_what_settings_leave_open_is_decided_by_the_group() -> None:
    """Over several nodes ranks choose while they train, on one node they predict, unless a layout
    is named, results must not depend on times, or there is but one layout.
    """
    cases = [
        (1, {}, "predicted", "linear"), (2, {}, "auto", "auto"), (4, {}, "auto", "auto"),
        (2, {"comm": {"all_to_all": "2dh"}}, "auto", "2dh"),
        (2, {"parallel": {"r": 1}}, "fixed", "auto"), (2, {"parallel": {"d": 2}}, "fixed", "auto"),
        (2, {"parallel": {"spill": "everywhere"}}, "fixed", "auto"),
        (2, {"dispatch": {"name": "all_gather"}}, "fixed", "auto"),
        (2, {"parallel": "fixed"}, "fixed", "auto"), (1, {"parallel": "auto"}, "auto", "linear"),
        (1, {"comm": {"all_to_all": "auto"}}, "predicted", "auto"),
        (1, {"parallel": {"r": 1}}, "fixed", "linear"),
        (1, {"dispatch": {"name": "all_gather"}}, "fixed", "linear"),
        # measuring would make the host wait
        (2, {"dispatch": {"name": "bounded"}}, "predicted", "linear"),
        (2, {"dispatch": {"name": "bounded"}, "parallel": "auto", "comm": {"all_to_all": "auto"}},
         "auto", "auto"),
    ]
    wanted = [(mode, exchange) for _, _, mode, exchange in cases] + [("fixed", "deterministic")]
    assert run_gloo(4, _decided, [case[:2] for case in cases]) == [wanted] * 4


def test_times_taken_while_all_to_alls_are_tried_do_not_count() -> None:
    def rank(comm: Comm) -> list[str]:
        comm.prepare(Topology.uniform(4, 2))
        tree = to_dict(config({"tries": 3, "max_d": 1}))
        layer = MoELayer(from_dict({**tree, "comm": {"all_to_all": "auto"}}), comm)
        auto, exchanges = layer.routed_experts.tuner, ExchangeTuner.of(comm)
        auto.measure = lambda device: FakeWatch(auto, lambda choice: 1.0)
        undisturbed = []
        record = auto.tuner.record
        auto.tuner.record = lambda bucket, choice, seconds: undisturbed.append(
            not choice.exchanges or not exchanges.exploring) or record(bucket, choice, seconds)
        for _ in range(80):
            layer(torch.randn(16, 8)).output.sum().backward()
        assert exchanges.trials > 5 and not auto.exploring
        return undisturbed

    for undisturbed in run_simulated(4, rank):
        assert len(undisturbed) >= 6 and all(undisturbed)


def _train_auto(calls: int) -> list[str]:
    from moe_plugin import TorchComm

    torch.manual_seed(1)
    layer = MoELayer(config({"max_d": 2, "tries": 5}), TorchComm())
    labels = []
    for call in range(calls):
        x = torch.randn(8 + 60 * (call > 30), 8, requires_grad=True)
        out = layer(x)
        out.output.square().sum().backward()
        labels.append(out.stats.layout)
    assert layer.routed_experts.tuner.tuner.explored > 4
    return labels


@pytest.mark.distributed
def test_over_processes_with_real_clocks() -> None:
    one, two = run_gloo(2, _train_auto, 60)
    assert one == two and len(set(one)) > 1


def test_choice_of_a_call_overrides() -> None:
    def rank(comm):
        return MoELayer(config(), comm)(torch.randn(3, 8), choice=LayoutChoice(r=0)).stats.layout

    assert run_simulated(2, rank) == ["r=0 d=1 linear auto"] * 2


def test_a_new_dimension_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field of `LayoutChoice` and its values: the product, the trials, the choice, the label and
    the saved state follow.
    """

    @dataclass(frozen=True, order=True, kw_only=True)
    class Wider(LayoutChoice):
        shadows: int = 0

    monkeypatch.setattr("moe_plugin.planner.choice.LayoutChoice", Wider)
    before = len(MoELayer(config(), LocalComm()).routed_experts.tuner.candidates((4, 0)))
    dimension = auto_module.Dimension("shadows", lambda tuner: [0, tuner.config.num_experts])
    monkeypatch.setattr(auto_module, "DIMENSIONS", [*auto_module.DIMENSIONS, dimension])

    def rank(comm: Comm) -> tuple[str, set[int]]:
        layer, labels, _ = drive(comm, lambda c: 1.0 if c.shadows else 2.0, 60)
        again = MoELayer(config(), comm)
        again.load_state_dict(copy.deepcopy(layer.state_dict()))
        assert again.routed_experts.tuner.tuner.state() == layer.routed_experts.tuner.tuner.state()
        assert again(torch.randn(16, 8)).stats.layout == labels[-1]
        return labels[-1], {c.shadows for c in layer.routed_experts.tuner.candidates((4, 0))}

    again = MoELayer(config(), LocalComm()).routed_experts.tuner
    assert len(again.candidates((4, 0))) == 2 * before
    for label, values in run_simulated(2, rank):
        assert label.endswith(" shadows=2") and values == {0, 2}


def test_pieces_are_chosen_by_direction_and_by_cut() -> None:
    """Where a backward pass in four pieces by peers is the fastest, it is found."""
    def rank(comm: Comm) -> tuple[set[str], set[int], str]:
        settings = config({"tries": 100, "max_d": 4})
        layer, labels, _ = drive(comm, lambda c: 1.0 if (c.d_backward, c.piece_axis) == (
            4, "peers") else 2.0, 300, settings=settings)
        found = layer.routed_experts.tuner.candidates((8, 0))
        return {c.piece_axis for c in found}, {c.d_backward for c in found}, labels[-1]

    for cuts, backward, label in run_simulated(2, rank):
        # one expert a rank: to cut by experts is to cut by rows
        assert cuts == {"rows", "peers"} and backward == {0, 1, 2, 4}
        assert "/4 " in label and " piece_axis=peers" in label


def test_a_cut_that_a_dispatcher_cannot_make_is_refused() -> None:
    settings = from_dict({"model_dim": 8, "num_experts": 2, "experts": {"hidden_dim": 16},
                          "dispatch": {"name": "padded", "capacity_factor": 1.0},
                          "parallel": {"d": 2, "cut": "peers"}})
    with pytest.raises(ValueError, match="parallel.cut='peers' cannot be combined with "
                       r"dispatch.name='padded'.*Choose one of \['rows'\]"):
        run_simulated(2, lambda comm: MoELayer(settings, comm))


def test_spilling_is_tried_for_an_uneven_load() -> None:
    """Of all layouts, those that spill are tried where one expert has most tokens, and kept where
    they are the fastest; under an even load they are other names of the others.
    """
    settings = from_dict({
        "model_dim": 8, "num_experts": 8, "experts": {"hidden_dim": 16}, "router": {"top_k": 1},
        "parallel": "auto", "tuner": {"tries": 16, "max_d": 1}
    })

    def rank(comm: Comm) -> tuple[set[str], set[str], str, str]:
        layer = MoELayer(settings, comm)
        auto, labels = layer.routed_experts.tuner, []
        auto.measure = lambda device: FakeWatch(
            auto, lambda choice: 2.0 - (choice.spill == "least_loaded"))
        even, hot = ({c.spill for c in auto.candidates((20, skew))} for skew in (0, 1))
        with torch.no_grad():
            layer.router.weight_ED[0] += 9
        for _ in range(60):
            labels.append(layer(torch.rand(16, 8)).stats.layout)
        named = MoELayer(dataclasses.replace(settings, parallel=dataclasses.replace(
            settings.parallel, spill="everywhere")), comm)
        (spill,) = {c.spill for c in named.routed_experts.tuner.candidates((20, 1)) if c.exchanges}
        return even, hot, labels[-1], spill

    for even, hot, label, named in run_simulated(4, rank):
        assert even == {"never"} and hot == {"never", "least_loaded"}
        assert label.endswith("spill=least_loaded") and named == "everywhere"


@pytest.mark.parametrize("ranks, top_k, tried", [(4, 1, True), (8, 1, False), (8, 2, True)])
def test_gathered_tokens_are_tried_on_few_ranks_however_slow_they_are_predicted(
        ranks: int, top_k: int, tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = from_dict({
        "model_dim": 8, "num_experts": 8, "experts": {"hidden_dim": 16}, "parallel": "auto",
        "router": {"top_k": top_k}, "tuner": {"tries": 1, "max_d": 1}})
    real = auto_module.LayoutTuner.candidates
    monkeypatch.setattr(auto_module.LayoutTuner, "candidates", lambda self, bucket: {
        c: 9.0 if c.gather_tokens else s for c, s in real(self, bucket).items()})

    def rank(comm: Comm) -> list[str]:
        return drive(comm, lambda c: 2.0 - c.gather_tokens, 40, settings=settings)[1]

    for labels in run_simulated(ranks, rank):
        assert labels[-1].endswith("gather_tokens=True") is tried
        assert any("gather_tokens" in label for label in labels) is tried


def test_a_load_on_a_border_stays_in_its_bucket() -> None:
    """Loads that swing by a fifth around a bucket's border share one; a load that leaves for good
    gets its own.
    """
    layer, _, _ = drive(LocalComm(), lambda c: 1.0, 60, tokens=lambda call: 14 + 3 * (call % 2))
    assert len(layer.routed_experts.tuner.tuner.entries) == 1
    layer, _, _ = drive(LocalComm(), lambda c: 1.0, 60, tokens=lambda call: 14 if call < 30 else 60)
    assert len(layer.routed_experts.tuner.tuner.entries) >= 2


def test_a_time_that_one_rank_lacks_is_taken_by_none() -> None:
    """Forward passes without backward on one rank: the others wait with theirs, and all go on
    deciding alike.
    """
    def rank(comm):
        layer = MoELayer(config(), comm)
        auto, labels = layer.routed_experts.tuner, []

        class Late(FakeWatch):
            def __init__(self, device) -> None:
                super().__init__(auto, lambda choice: 1.0 + comm.rank + choice.d)
                self.over = comm.rank == 0 or len(labels) % 3 > 0

        auto.measure = Late
        for _ in range(150):
            with torch.no_grad():
                labels.append(layer(torch.randn(16, 8)).stats.layout)
        assert len(auto.runs) <= 65
        return labels, json.dumps(auto.tuner.state())

    one, two = run_simulated(2, rank)
    assert one == two
