"""Whole training steps: the command runs in both hosts, all sides learn alike, and the page says
what the numbers say. No time is asserted.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.cli.main import main
from moe_plugin.comm import LocalComm
from moe_plugin.planner.cluster import load_cluster
from scripts.bench.studies import STUDIES, losses
from scripts.bench.studies.train import hardware
from scripts.bench.study import ROOT, read_numbers
from scripts.bench.train.results import (
    PACKAGE,
    TrainReport,
    comparison,
    merged,
    newest,
    reports,
    side_pages,
    sides_table,
    spread,
)
from scripts.bench.train.run import measure
from scripts.bench.train.sides import (
    PIECES,
    SHAPES,
    Side,
    SideTimes,
    TrainShape,
    batch,
    for_host,
    parse_shapes,
)

TINY = "16x16x4x2x256"
COMMAND = f"bench train --shapes {TINY} --steps 2 --warm-up 1"
SIDES = {
    "moe-plugin": "ours", "moe-plugin, auto": "ours", "moe-plugin, linear": "ours",
    "moe-plugin, native": "ours", "moe-plugin, r=0": "ours", "moe-plugin, all_gather": "ours"
}


def side(name: str, kind: str, ms: list[float], losses: list[float]) -> SideTimes:
    return SideTimes(name, kind, [t / 1e3 for t in ms], [0.25 * t / 1e3 for t in ms], losses, 1000,
                     "r=1 d=1 linear auto")


def report(host: str = "megatron", place: str = "one machine, 2 ranks", name: str = "few",
           version: str = "1.0", date: str = "2020-01-01") -> TrainReport:
    sides = [
        side("moe-plugin", "ours", [10, 12, 11, 40], [3.0, 2.0]),
        side(PIECES, "ours", [10, 10, 10, 10], [3.0, 2.0]),
        side("Megatron, alltoall", "native", [30, 23, 23, 20], [3.0, 2.0001]),
        side("Megatron, allgather", "native", [19, 50, 50, 50], [3.0, 2.5]),
        side("dense", "dense", [5, 5, 5, 5], [3.0, 2.7])
    ]
    return TrainReport(host, place, 2, SHAPES[name], sides, (0.5, 1.5), {
        "torch": "1.0", PACKAGE[host]: version, "date": date})


def test_ratios_are_of_the_better_native_side() -> None:
    found = report()
    assert found.best("native").name == "Megatron, alltoall"
    of_medians, of_minima = found.ratio()
    assert of_medians == pytest.approx(23 / 11.5)
    assert of_minima == pytest.approx(19 / 10)  # the least step of any native side
    assert found.behind() == pytest.approx(0.15)
    assert found.loss_gap() == pytest.approx(1e-4)
    low, _, high = statistics.quantiles([10, 12, 11, 40], n=4)
    assert spread(found.side("moe-plugin")) == pytest.approx((high - low) / 11.5)


def test_tables_are_made_from_the_json_alone() -> None:
    made = [report(), report(place="2x2 emulated nodes"), report("fairseq")]
    again = reports(json.loads(json.dumps([one.as_dict() for one in made])))
    assert again == [TrainReport.from_dict(one.as_dict()) for one in made]
    row = comparison(again[:1])[0].splitlines()[-1]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["few", SHAPES["few"].label(), "1.0", "11.5 ms", "23 ms", "2.00",
                     "1.90", "15 %", "5 ms", "4.60", "25% / 25%", "1e-04"]
    assert "Megatron, allgather        | 50 ms" in sides_table(again[0])
    assert "| 356,174 " in sides_table(again[0])  # 4,096 tokens in 11.5 ms


def test_pages_are_a_summary_and_one_for_each_host_and_place() -> None:
    made = [report(), report(name="wide"), report(place="2x2 emulated nodes, 200 Mbit/s"),
            report("fairseq")]
    sides = side_pages(made)
    names = ["train_megatron_one_machine.md", "train_megatron_2x2_emulated_nodes.md",
             "train_fairseq_one_machine.md"]
    assert list(sides) == names
    summary = STUDIES["train"].page([one.as_dict() for one in made])
    megatron, _, fairseq = sides.values()
    for title in ("# Megatron-core, one machine, 2 ranks", "# fairseq, one machine, 2 ranks",
                  "# Megatron-core, 2x2 emulated nodes, 200 Mbit/s", "Training: one machine",
                  "Training: 2x2 emulated nodes", "Evaluation"):
        assert summary.count(f"\n## {title}\n") + summary.count(f"\n##{title}\n") == 1
    assert all(f"({name})" in summary for name in names)
    assert sides_table(made[0]) in megatron and "machine, 2 ranks: wide, 1.0\n" in megatron
    assert "wide" not in fairseq and "# Whole training steps: fairseq, one machine\n" in fairseq
    words = " ".join(summary.split())
    assert "torch 1.0" in words and "bench train --host" in words
    assert all(len(line) <= 100 or line.startswith("|")
               for page in (summary, megatron, fairseq) for line in page.splitlines())


def test_results_of_the_same_shape_and_place_are_replaced() -> None:
    old, other = report(), report(name="wide")
    new = TrainReport(**{**vars(old), "load": (9.0, 9.0)})
    assert merged([old, other], [new]) == [new, other]


def test_versions_of_a_host_stay_apart_the_newest_measured_first() -> None:
    old, other = report(name="wide"), report(version="0.9", date="2019-01-01")
    new = report(version="2.0", date="2021-01-01")
    every = merged([other, old], [new])
    assert every == [other, old, new] and newest(every) == [new]
    assert [row.split("|")[3].strip() for row in main_table(every)] == ["2.0", "1.0", "0.9"]


def main_table(every: list[TrainReport]) -> list[str]:
    page = STUDIES["train"].page([one.as_dict() for one in every])
    return [line for line in page.splitlines() if line.startswith(("| few", "| wide"))]


def test_evaluations_have_a_section_of_their_own() -> None:
    trained, evaluated = report(), replace(report(), evaluate=True)
    assert "Not measured yet" in STUDIES["train"].page([trained.as_dict()])
    every = merged([trained], [evaluated])
    assert newest(every) == [trained] and newest(every, evaluate=True) == [evaluated]
    training, _, evaluation = STUDIES["train"].page([one.as_dict() for one in every]).partition(
        "## Evaluation")
    row = next(line for line in evaluation.splitlines() if line.startswith("| few"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:] == ["1.0", "23 ms", f"11.5 ms ({spread(evaluated.side('moe-plugin')):.0%})",
                         "10 ms (0%)", "2.00", "2.30", "1.15",
                         "tokens sent by all-to-all linear, one piece", "1e-04"]
    assert training.count("| few") == 1


def test_pieces_are_planned_for_links_of_the_measured_rate(tmp_path: Path) -> None:
    fitted = load_cluster(ROOT / "configs" / "clusters" / "emulated.yaml")
    settings = hardware(50e6, tmp_path)
    assert load_cluster(settings["comm.cluster"]).inter.beta_s == 4 * fitted.inter.beta_s


def test_files_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="was not written by `bench train`"):
        reports([{"bound_ms": 1}])


def test_shapes() -> None:
    assert len(parse_shapes("all")) == 10 and parse_shapes("few,wide")[1] is SHAPES["wide"]
    assert parse_shapes(TINY) == [
        TrainShape(name=TINY, width=16, inner=16, experts=4, top_k=2, tokens=256, length=8)]
    assert [s.top_k for s in for_host(parse_shapes("fine,few"), "fairseq")] == [2, 2]
    assert len(for_host(parse_shapes("all"), "fairseq")) == 8
    with pytest.raises(ValueError, match="gated has gated experts, which fairseq's moe branch"):
        for_host(parse_shapes("gated"), "fairseq")
    assert SHAPES["few"].sentences(4) == 8
    for text, words in (("huge", "'huge' is not a known shape"),
                        ("1x1x2x3x64", "must be <= experts=2")):
        with pytest.raises(ValueError, match=words):
            parse_shapes(text)
    with pytest.raises(ValueError, match="must be a multiple of 384"):
        SHAPES["few"].sentences(3)


def test_sides_train_in_turn_on_equal_data_and_settle_before_they_count() -> None:
    calls: list[tuple[str, int]] = []
    text = torch.arange(200, dtype=torch.uint8)

    def made(name: str, settled_after: int) -> Side:
        weight = torch.nn.Parameter(torch.zeros(3))  # the optimizer's copy
        weight_16 = torch.zeros(3, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

        def step(number: int) -> float:
            calls.append((name, number))
            loss = float(batch(text, number, 2, 4, 0).sum() + weight_16.sum())
            weight.grad = torch.ones(3)
            optimizer.step()
            weight_16.copy_(weight.detach())
            return loss

        return Side(name, "ours", step, [optimizer],
                    lambda: sum(n == name for n, _ in calls) >= settled_after,
                    parameters=[weight_16])

    one, two = measure([made("one", 1), made("two", 5)], LocalComm(), steps=3, warm_up=2)
    assert calls == [*(("one", n) for n in range(2)), *(("two", n) for n in range(5)),
                     *(("two", n) for n in range(2)),
                     *((name, n + 2) for n in range(3) for name in ("one", "two"))]
    assert one.losses == two.losses  # weights and moments of before: two began again
    assert len(one.seconds) == len(two.optimizer_s) == 3
    assert all(0 < o < s for o, s in zip(one.optimizer_s, one.seconds, strict=True))
    assert one.parameters == 3


def test_bad_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", "--host", "megatron", "--steps", "0"]) == 2
    assert "--steps 0 is out of bounds: must be >= 1" in capsys.readouterr().err


def learned_alike(folder: Path, host: str, native: set[str]) -> None:
    found, *evaluated = reports(read_numbers(folder / "data" / "train.json"))
    assert (found.host, found.place, found.ranks) == (host, "one machine, 2 ranks", 2)
    assert {s.name: s.kind for s in found.sides} == {
        **SIDES, **dict.fromkeys(native, "native"), "dense": "dense"}
    assert all(len(s.seconds) == 2 and len(s.losses) >= 3 for s in found.sides)
    first = [s.losses[0] for s in found.sides if s.kind != "dense"]
    assert max(first) - min(first) < 2e-3, first  # equal weights and data (fairseq logs 3 digits)
    assert found.loss_gap() < 5e-3
    assert found.ratio()[0] > 0 and TINY in (folder / "train.md").read_text()
    for one in evaluated:
        assert one.evaluate and {s.name: s.kind for s in one.sides} == {
            "moe-plugin": "ours", PIECES: "ours", **dict.fromkeys(native, "native"),
            "dense": "dense"}
        # equal weights and data, which stay: fairseq logs 3 digits
        assert one.loss_gap() < (2e-3 if host == "fairseq" else 1e-5)
        losses = one.side(PIECES).losses
        assert losses == one.side("moe-plugin").losses and len(set(losses)) > 1
    assert [one.shape.name for one in evaluated] == [
        TINY, *(["gated"] if host == "megatron" else [])]


@pytest.mark.distributed
@pytest.mark.parametrize("host, native", [
    pytest.param("megatron", {"Megatron, alltoall", "Megatron, allgather"},
                 marks=pytest.mark.megatron),
    pytest.param("fairseq", {"fairseq's moe branch"}, marks=pytest.mark.fairseq)])
def test_command(host: str, native: set[str], tmp_path: Path) -> None:
    pytest.importorskip({"megatron": "megatron.core"}.get(host, host))
    words = [*COMMAND.split(), "--host", host, "--out", str(tmp_path)]
    shapes = f"{TINY},gated" if host == "megatron" else TINY
    assert main(words) == 0 and main([*words, "--evaluate", "--shapes", shapes]) == 0
    learned_alike(tmp_path, host, native)


def parted(*values: Any) -> dict[str, Any]:
    return dict(zip(("side", "step", "layer", "rank", "token", "took", "other", "margin",
                     "rounding"), values, strict=True))


def test_the_first_token_that_parts_has_its_margin_and_its_rounding() -> None:
    """By hand: token 1 stands between experts 0 and 2, which the other side's rounding turns."""
    tracer = losses.Tracer(rank=3)
    mine_TE = torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.0, 0.75], [0.0, 1.0, 0.0]])
    theirs_TE = mine_TE + torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.5], [0.0, 0.0, 2.0]])
    tracer.step = 4
    first_TK = tracer.first(0, mine_TE, mine_TE.topk(1).indices)
    assert first_TK.tolist() == [[0], [0], [1]]
    assert tracer.other("other", 0, theirs_TE, theirs_TE.topk(1).indices).equal(first_TK)
    assert tracer.parted == [parted("other", 4, 0, 3, 1, 0, 2, 0.25, 0.5)]
    tracer = losses.Tracer(0, ordered=True)
    tracer.first(0, torch.tensor([[1.0, 0.5, 0.0]]), torch.tensor([[0, 1]]))
    tracer.other("other", 0, torch.tensor([[0.5, 1.0, 0.0]]), torch.tensor([[1, 0]]))
    assert tracer.parted == [parted("other", 0, 0, 0, 0, 0, 1, 0.5, 1.0)]
    assert losses.gap([[1.0, 1.0, 1.5], [1.0, 0.75, 1.0]]) == 0.5
    assert losses.first_apart([[1.0, 1.0], [1.0, 1.1]]) == 1 and losses.first_apart(
        [[1.0, 1.0 + 1e-6]]) is None


@pytest.mark.distributed
@pytest.mark.parametrize("host", ["megatron", "fairseq"])
def test_sides_with_the_same_choices_have_the_same_losses(
        host: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the host's own layer, which takes choices that it would not make. In bfloat16, all sides
    are as near to float32 as a rounding permits.
    """
    pytest.importorskip({"megatron": "megatron.core"}.get(host, host))
    [shape] = parse_shapes(TINY)
    monkeypatch.setitem(SHAPES, "bf16", replace(shape, name="bf16", bf16=True))
    assert main(["bench", "losses", "--host", host, "--shapes", f"{TINY},bf16", "--steps", "3",
                 "--json"]) == 0
    found, narrow = json.loads(capsys.readouterr().out)["shapes"].values()
    assert narrow["sides"][-1] == losses.CHANGED and losses.FLOAT32 not in narrow["sides"]
    ours, native = (losses.from_float32(narrow, kind) for kind in (False, True))
    assert 0 < ours < 1.5 * native < 0.05 and losses.from_float32(found, True) is None
    others, one_rounding = losses.gaps(narrow)
    assert others < 3 * one_rounding
    assert len(found["sides"]) >= 6 and len(found["same"]) == 3
    assert losses.gap(found["same"]) < losses.SAME
    assert all(row[0] > 1.0 for row in found["same"])
    if host == "fairseq":  # models with GELU, and not the models with ReLU again
        assert losses.gelu_gap(found) < losses.SAME
        assert all(abs(smooth[0] - row[0]) > losses.SAME
                   for smooth, row in zip(found["gelu"], found["same"], strict=True))
    else:
        assert losses.gelu_gap(found) is None


def test_the_page_says_that_same_choices_give_same_losses() -> None:
    found = read_numbers(ROOT / "docs/benchmarks/data/losses.json")["shapes"]
    assert {where.split(",")[0] for where in found} == {"Megatron-core", "fairseq"}
    for where, one in found.items():
        others, one_rounding = losses.gaps(one)
        smooth = losses.gelu_gap(one)  # without ReLU, which part of the differences can come from
        if smooth is None or where.endswith("bf16"):
            assert others < max(losses.SAME, 3 * one_rounding), where
        else:
            assert smooth < losses.SAME / 10, where
        assert others < losses.SAME or where.startswith("fairseq") or where.endswith("bf16"), where
        apart = losses.first_apart(one["own"])
        assert apart is None or any(token["step"] <= apart for token in one["parted"]), where
        ours, native = (losses.from_float32(one, kind) for kind in (False, True))
        assert where.endswith("bf16") == (native is not None), where
        assert native is None or ours < 1.5 * native, where
