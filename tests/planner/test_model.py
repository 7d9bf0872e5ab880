"""Whole plans: search equal to trying everything, memory, explanation, what is written for the
hosts.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from moe_plugin.cli.main import main
from moe_plugin.cli.planning.answer import explain, head_room
from moe_plugin.cli.planning.launch import host_flags, plan_yaml
from moe_plugin.config import both_from_yaml, from_dict
from moe_plugin.planner.choice import LayoutChoice, divisors, legal_choices
from moe_plugin.planner.cluster import Device
from moe_plugin.planner.layer_cost import layer_cost
from moe_plugin.planner.model import ModelPlan, ModelShape, load_model
from moe_plugin.planner.model_search import Space, alternatives, search, value_of
from moe_plugin.planner.once import rows_of_token
from moe_plugin.planner.plan_cost import PlanCost, gradient_s, lower_bound_s, plan_cost
from moe_plugin.planner.units import record
from tests.cli.examples import Shell, commands
from tests.planner.problems import A100, cluster, model

SPACE = Space(degrees=(1, 2), micro_batches=(1, 2, 4))


def exhaustive(m: ModelShape, c, device: Device, space: Space) -> list[PlanCost]:
    """Every plan in every layout, by plain loops that share nothing with the search."""
    found, ranks, hidden = [], c.ranks, m.hidden_dim or m.ffn_dim
    for tp in range(1, ranks + 1):
        for pp in range(1, ranks + 1):
            if ranks % (tp * pp) or tp > c.ranks_per_node or m.heads % tp or m.layers % pp:
                continue
            dp = ranks // (tp * pp)
            for group in range(1, tp * dp + 1):
                if tp * dp % group or (m.experts % group and group % m.experts):
                    continue
                etp = group // m.experts if group > m.experts else 1
                if hidden % etp or m.model_dim % etp:
                    continue
                for micro in space.micro_batches:
                    if m.global_batch % (dp * micro) or micro * m.sequence % tp:
                        continue
                    sends = ["rows"]
                    if m.capacity_factor is None and m.top_k > 1:
                        # consecutive ranks: several nodes of several only beyond one node
                        sends += ["ranks", *["nodes"] * (1 < c.ranks_per_node < group)]
                    for choice in legal_choices(m.experts, group, degrees=space.degrees,
                                                algorithms=space.algorithms, sends=sends):
                        found.append(
                            plan_cost(
                                m, c, device,
                                ModelPlan(tp=tp, pp=pp, dp=dp, ep=group // etp, etp=etp,
                                          micro_batch=micro, layout=choice)))
    return [f for f in found if f.memory_bytes <= 0.92 * device.memory_bytes]


@pytest.mark.parametrize("nodes,per_node,inter,changes,memory", [
    (1, 4, 22e9, {}, 80e9),
    (2, 4, 22e9, {}, 80e9),
    (2, 4, 1e9, {}, 80e9),
    (4, 2, 5e9, {"experts": 2}, 80e9),
    (2, 4, 22e9, {"experts": 32}, 12e9),
    (1, 8, 22e9, {"experts": 2, "top_k": 1, "sequence": 128}, 80e9),
    (2, 4, 22e9, {"capacity_factor": 1.25, "gated": True}, 16e9),
    (2, 4, 22e9, {"capacity_factor": 0.5, "experts": 4}, 80e9),
    (2, 2, 0.1e9, {"layers": 12, "global_batch": 16, "moe_every": 1}, 9e9),
])
def test_search_equals_trying_everything(nodes: int, per_node: int, inter: float, changes: dict,
                                         memory: float) -> None:
    m, c, device = model(**changes), cluster(nodes, per_node,
                                             inter), dataclasses.replace(A100, memory_bytes=memory)
    every = exhaustive(m, c, device, SPACE)
    found = search(m, c, device, SPACE, keep=3)
    best = min(every, key=lambda f: (f.seconds, f.plan))
    assert found.plans[0].plan == best.plan and found.plans[0].seconds == best.seconds
    by_outline: dict = {}
    for cost in every:
        key = dataclasses.replace(cost.plan, layout=LayoutChoice(r=1))
        by_outline[key] = min(by_outline.get(key, cost.seconds), cost.seconds)
    assert [p.seconds for p in found.plans] == pytest.approx(sorted(by_outline.values())[:3])


def test_the_bound_is_one() -> None:
    m, c = model(experts=4, capacity_factor=0.5), cluster(2, 4)
    for cost in exhaustive(m, c, A100, SPACE):
        assert lower_bound_s(m, c, A100, cost.plan) <= cost.seconds * (1 + 1e-12)


def test_memory_and_time_by_hand() -> None:
    m = ModelShape(layers=2, model_dim=64, ffn_dim=256, sequence=128, global_batch=8, experts=4,
                   moe_every=2)
    plan = ModelPlan(tp=1, pp=1, dp=4, ep=4, etp=1, micro_batch=2, layout=LayoutChoice(r=1))
    cost = plan_cost(m, cluster(1, 4), A100, plan)
    dense = 2 * 4 * 64**2 + 2 * 64 * 256 + 64 * 4
    assert m.dense_parameters == dense and m.expert_parameters == 4 * 2 * 64 * 256
    # bf16 weights, fp32 gradients, fp32 weights and two moments of Adam
    for kind, parameters in (("dense", dense), ("expert", 2 * 64 * 256)):
        assert [cost.memory[f"{kind} {part}"]
                for part in ("parameters", "gradients", "optimizer state")] == [
                    2 * parameters, 4 * parameters, 12 * parameters]
    lean = dataclasses.replace(m, element_bytes=4, state_bytes=4)  # SGD
    assert lean.parameter_bytes() == {"parameters": 4, "gradients": 4, "optimizer state": 0}
    assert cost.memory["activations"] == 34 * 2 * 128 * 64 * 2
    assert cost.time["pipeline bubble"] == 0 and plan.micro_batches(m) == 1 and plan.expert_dp == 1
    assert gradient_s(m, cluster(1, 4), plan) == pytest.approx(2 * 3 * (3e-6 + dense / 250e9))


@pytest.mark.parametrize("layers, every", [(7, 2), (8, 3), (6, 2), (5, 1), (2, 3)])
def test_layers_with_experts_are_those_of_the_host(layers: int, every: int) -> None:
    m = model(layers=layers, moe_every=every)
    for host, there in (("megatron", range(0, layers, every)),  # --moe-layer-freq
                        ("fairseq", range(every - 1, layers, every))):  # --moe-freq
        own = m.in_host(host)
        assert [i for i in range(layers) if own.has_experts(i)] == list(there)
        assert own.moe_layers == len(there)
        assert own.expert_parameters == len(there) * 8 * 2 * 1024 * 4096


def test_the_stage_with_most_experts_counts() -> None:
    plan = ModelPlan(tp=1, pp=2, dp=4, ep=4, etp=1, micro_batch=1, layout=LayoutChoice(r=1))
    six, c = model(layers=6).in_host("megatron"), cluster(1, 8)  # experts in 0, 2 and 4
    assert six.fullest(2) == (3, 2) and six.fullest(1) == (6, 3) and six.fullest(6) == (1, 1)
    assert [list(stage) for stage in model(layers=5).stages(2)] == [[0, 1, 2], [3, 4]]
    two = model(layers=6, moe_every=3).in_host("megatron")  # one in each stage
    made, even = (plan_cost(m, c, A100, plan) for m in (six, two))
    assert made.memory["expert parameters"] == 2 * even.memory["expert parameters"]
    assert made.time["MoE layers"] == pytest.approx(2 * even.time["MoE layers"])
    assert made.memory["MoE rows and gathered"] == 2 * even.memory["MoE rows and gathered"]


def test_the_bubble_is_that_of_1f1b() -> None:
    m = model(vocab=0)
    one, two = (plan_cost(
        m, cluster(1, 8), A100,
        ModelPlan(tp=1, pp=pp, dp=8 // pp, ep=4, etp=1, micro_batch=1, layout=LayoutChoice(r=1)))
                for pp in (1, 2))
    work = sum(v for k, v in two.time.items() if k not in ("pipeline bubble", "gradient reduction"))
    assert two.time["pipeline bubble"] == pytest.approx(work / two.plan.micro_batches(m))
    assert one.time["pipeline bubble"] == 0


def test_slow_networks_keep_experts_inside_the_node() -> None:
    fast, slow = (search(model(experts=32), cluster(4, 8, inter), A100, Space()).plans[0].plan
                  for inter in (200e9, 0.2e9))
    assert slow.expert_ranks <= 8 < fast.expert_ranks


def test_no_memory_is_an_error_that_says_how_much() -> None:
    with pytest.raises(ValueError, match="the smallest needs"):
        search(model(), cluster(1, 4), dataclasses.replace(A100, memory_bytes=1e6))
    with pytest.raises(ValueError, match="no plan can divide 4 ranks"):
        search(model(global_batch=3), cluster(1, 4), A100, Space(data_parallel_only=True))


def test_explanation() -> None:
    m, c = model(), cluster(2, 4)
    found = search(m, c, A100, SPACE)
    text = explain(m, c, A100, found, SPACE)
    assert found.plans[0].plan.label in text
    assert "alternatives: the best plan with a different value" in text
    assert "memory of the fullest rank" in text
    assert any(line.startswith("  expert group ")
               for line in text.splitlines()) and "%, mostly" in text


@pytest.mark.parametrize("changes, memory", [({}, 80e9), ({"experts": 32}, 12e9)])
def test_why_not_is_the_best_plan_with_another_value(changes: dict, memory: float) -> None:
    m, c = model(**changes), cluster(2, 4, 5e9)
    device = dataclasses.replace(A100, memory_bytes=memory)
    every = exhaustive(m, c, device, SPACE)  # those that fit
    best = min(every, key=lambda f: (f.seconds, f.plan))
    found = alternatives(m, c, device, best, SPACE)
    assert set(found) == {"tp", "pp", "expert_ranks", "micro_batch", "r", "d", "algorithm",
                          "send"}
    several = 0
    for axis, other in found.items():
        fit = [f for f in every if value_of(f.plan, axis) != value_of(best.plan, axis)]
        if fit:
            assert other.seconds == min(f.seconds for f in fit) >= best.seconds
        else:
            assert other.memory_bytes > memory
        several += sum(value_of(other.plan, a) != value_of(best.plan, a) for a in found) > 1
    assert several, "no alternative needs another number changed, too"


def test_megatrons_optimizer_state_is_divided_by_the_ranks_that_replicate_parameters() -> None:
    m = ModelShape(layers=2, model_dim=64, ffn_dim=256, sequence=128, global_batch=8, experts=4)
    plan = ModelPlan(tp=1, pp=1, dp=8, ep=2, etp=1, micro_batch=1, layout=LayoutChoice(r=1))
    megatron, fairseq = (plan_cost(m.in_host(host), cluster(1, 8), A100, plan).memory
                         for host in ("megatron", "fairseq"))
    dense, experts = 2 * 4 * 64**2 + 2 * 64 * 256 + 64 * 4, 2 * 2 * 64 * 256
    for kind, parameters, ranks in (("dense", dense, 8), ("expert", experts, 4)):
        name = f"{kind} optimizer state"
        assert (megatron.pop(name), fairseq.pop(name)) == (12 * parameters / ranks, 12 * parameters)
    assert megatron == fairseq  # parameters and gradients are whole
    flag = "--use-distributed-optimizer"
    alone = dataclasses.replace(plan, tp=8, dp=1)
    assert flag in host_flags(m, plan, "megatron") and flag not in host_flags(m, alone, "megatron")
    assert flag not in host_flags(m, plan, "fairseq")


def test_plans_leave_memory_free() -> None:
    m, c = model(), cluster(1, 4)
    needs = min(cost.memory_bytes for cost in search(m, c, A100, SPACE, keep=1000).plans)
    fits = dataclasses.replace(A100, memory_bytes=needs / 0.92 * 1.001)
    assert search(m, c, fits, SPACE).plans[0].memory_bytes <= fits.usable_bytes
    with pytest.raises(ValueError, match="8 % must remain free"):
        search(m, c, dataclasses.replace(A100, memory_bytes=needs * 1.05), SPACE)
    assert "8 % stay free" in head_room(fits)


@pytest.mark.parametrize("host", ["megatron", "fairseq"])
@pytest.mark.parametrize("auto", [False, True])
def test_what_is_written_can_be_read(host: str, auto: bool, tmp_path: Path) -> None:
    m = model(experts=2, capacity_factor=1.25)
    best = search(m, cluster(1, 4), A100, Space(data_parallel_only=host == "fairseq")).plans[0].plan
    (tmp_path / "moe.yaml").write_text(plan_yaml(
        m, best, host, auto, "a note", ("keep", "recompute") if auto else ()))
    settings, run = both_from_yaml(str(tmp_path / "moe.yaml"))
    assert settings.parallel.mode == ("auto" if auto else "fixed")
    assert run.offload.activations == ("keep,recompute" if auto else "keep")
    assert (settings.parallel.r, settings.parallel.d,
            settings.comm.all_to_all) == (best.layout.r, best.layout.d, best.layout.algorithm)
    assert settings.dispatch.capacity_factor == 1.25
    if host == "fairseq":
        assert settings.num_experts == 2 and settings.experts.hidden_dim == 4096


def test_a_host_that_cannot_is_told() -> None:
    plan = ModelPlan(tp=2, pp=1, dp=2, ep=4, etp=1, micro_batch=1, layout=LayoutChoice(r=1))
    with pytest.raises(ValueError, match="Search for a plan with --host fairseq"):
        host_flags(model(), plan, "fairseq")
    with pytest.raises(ValueError, match="unknown host"):
        host_flags(model(), plan, "other")


@pytest.mark.parametrize("values,words", [
    ({"layer": 2}, "unknown key 'layer'. Known keys: layers"),
    ({"layers": 2}, "missing mandatory value: model_dim"),
    ({"layers": 0, "model_dim": 8, "ffn_dim": 8}, "layers=0"),
])
def test_wrong_model_files(values, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        record(ModelShape, values, "model")


ARGS = [
    "plan", "--model", "configs/plans/gpt_64_experts.yaml", "--cluster",
    "configs/clusters/a100_ib.yaml", "--device", "configs/devices/a100_80g.yaml", "--nodes", "2"
]


def test_command_text_and_files(tmp_path: Path, capsys) -> None:
    assert main([
        *ARGS, "--top", "3", "--write",
        str(tmp_path / "out"), "--plot",
        str(tmp_path / "p.png"), "--auto"
    ]) == 0
    text = capsys.readouterr().out
    assert "plans, fastest first" in text and "wrote" in text
    unfitted = "(device a100_80g: not fitted to measurements; cluster a100_ib: not fitted"
    assert "predicted step: " in text and unfitted in text
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert from_dict(yaml.safe_load(
        (tmp_path / "out" / "moe.yaml").read_text())).parallel.mode == "auto"
    script = (tmp_path / "out" / "launch.sh").read_text()
    assert "torchrun --nnodes 2 --nproc_per_node 8" in script
    assert f"--moe-config {tmp_path}" in script
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "launch.sh", "moe.yaml"]


@pytest.mark.parametrize("more", [[], ["--script", "pretrain_gpt.py", "--data", "a prefix"],
                                  ["--host", "fairseq", "--data", "folder"]])
def test_the_command_writes_a_line_that_its_host_takes(more: list[str], tmp_path: Path,
                                                       capsys) -> None:
    assert main([*ARGS, "--write", str(tmp_path / "out"), *more]) == 0
    assert "launch.sh, the launch script:" in capsys.readouterr().out
    [words] = commands((tmp_path / "out" / "launch.sh").read_text().replace(' "$@"', ""))
    Shell(tmp_path)(words, runs=False)


@pytest.mark.parametrize("more", [["--data", "x"], ["--script", "x"], ["--auto"]])
def test_what_only_writing_reads_is_refused_without_it(more: list[str], capsys) -> None:
    assert main([*ARGS, *more]) == 2
    assert f"{more[0]} only affects the files of --write DIR" in capsys.readouterr().err


def test_command_json(capsys) -> None:
    assert main([*ARGS, "--json", "--host", "fairseq"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plans"][0]["plan"]["tp"] == 1 and set(
        found["plans"][0]["moe_layer"]["phases"]) >= {"a2a_out", "experts"}


def test_command_scale(capsys) -> None:
    assert main([*ARGS, "--scale", "1,4,16"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main([*ARGS, "--scale", "few"]) == 2


def test_shipped_models() -> None:
    for path in sorted(Path("configs/plans").glob("*.yaml")):
        assert load_model(path).layers > 0
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_groups_of_experts_bound_the_rows_that_are_predicted() -> None:
    """Eight of 64 experts in two of four groups, which are the nodes: rows to nodes cost what two
    nodes cost, and the plan, its file and its flags say how the router is limited.
    """
    free = dataclasses.replace(model(), experts=64, top_k=8)
    limited = dataclasses.replace(free, groups=4, group_top_k=2)
    nodes, choice = cluster(4, 4), LayoutChoice(r=1, send="nodes")
    rows = [rows_of_token(nodes, 8, limits=m.layer(128).limits).nodes for m in (free, limited)]
    assert rows[0] > 3.5 and rows[1] == pytest.approx(2 * (1 - 2**-8))
    seconds = [layer_cost(m.layer(4096), nodes, A100, choice).seconds for m in (free, limited)]
    assert seconds[1] < seconds[0]
    by_rows = [layer_cost(m.layer(4096), nodes, A100, LayoutChoice(r=1)) for m in (free, limited)]
    assert by_rows[0].seconds == by_rows[1].seconds
    plan = ModelPlan(tp=1, pp=1, dp=16, ep=16, etp=1, micro_batch=1, layout=choice)
    tree = yaml.safe_load(plan_yaml(limited, plan, "fairseq", False, "note"))
    assert from_dict({"model_dim": 64, **tree}).router.group_top_k == 2
    flags = " ".join(host_flags(limited, plan, "megatron"))
    assert "--moe-router-num-groups 4 --moe-router-group-topk 2" in flags
    assert "num-groups" not in " ".join(host_flags(free, plan, "megatron"))


@pytest.mark.parametrize("values,words", [
    ({"groups": 3}, "groups=3 does not divide experts=64"),
    ({"groups": 16, "group_top_k": 1}, "group_top_k=1 is not possible with top_k=8 and groups=16; "
     "it must be from 2 to 16"),
    ({"groups": 4, "group_top_k": 5}, "must be from 1 to 4"), ({"groups": 0}, "groups=0")])
def test_groups_that_do_not_fit_are_refused(values: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(model(), experts=64, top_k=8, **values)


def test_skew_lengthens_what_the_busiest_rank_does() -> None:
    plan = ModelPlan(tp=1, pp=1, dp=8, ep=8, etp=1, micro_batch=2, layout=LayoutChoice(r=1))
    m, c = model(), cluster(2, 4)
    skewed = dataclasses.replace(m, skew=2.0)
    even, found = (plan_cost(one, c, A100, plan) for one in (m, skewed))
    assert all(1 < b / a <= 2 for a, b in (
        (even.time["MoE layers"], found.time["MoE layers"]),
        (even.memory["MoE rows and gathered"], found.memory["MoE rows and gathered"])))
    made = dataclasses.replace(plan, layout=LayoutChoice(r=0))
    assert plan_cost(skewed, c, A100, made).time == plan_cost(m, c, A100, made).time
    with pytest.raises(ValueError, match=f"model skew=99 is larger than experts={m.experts}"):
        dataclasses.replace(m, skew=99)
