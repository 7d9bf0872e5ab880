"""Pipeline stages: the layer in the steps of Megatron's overlapped schedule, and stages of unequal
layout in Megatron's own 1F1B.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from moe_plugin.cli.main import main as command
from moe_plugin.hosts.megatron import script
from moe_plugin.hosts.megatron.stage_layouts import stages_of
from tests.hosts.megatron.layers import Case, build, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import (
    EP2,
    MODEL,
    VERSION,
    arguments_of,
    argv_for,
    ran,
    records_of,
)

needs_steps = pytest.mark.skipif(VERSION < (0, 16),
                                 reason="the schedule has these steps from 0.16 on")
UNTIED_PP2 = ["--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights"]


SGD = ["--optimizer", "sgd", "--sgd-momentum", "0", "--lr", "0.3", "--clip-grad", "0.8",
       "--lr-decay-style", "constant", "--moe-aux-loss-coeff", "0"]


def _curve(world: int, argv: list[str], folder: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm by step."""
    log = folder / f"{len(list(folder.iterdir()))}.jsonl"
    return [(row["lm_loss"], row["grad_norm"]) for row in records_of(world, argv, log)
            if "lm_loss" in row]


def _scaled(argv: list[str]) -> tuple[float, list[tuple[float, int]]]:
    """This rank's loss scale at the end; scale and steps skipped so far, by step."""
    run = ran(argv)
    return float(run.optimizer.get_loss_scale()), [
        (row["loss_scale"], row["skipped_steps"]) for row in run.steps_logged]


@pytest.mark.parametrize("layouts,flags", [
    (["tp=2", "tp=1"], [[], ["--calculate-per-token-loss"]]),
    (["tp=1,ep=2", "tp=2"], [["--sequence-parallel"], []]),
    (["tp=2", "tp=1,ep=2"], [["--use-distributed-optimizer", "--overlap-param-gather",
                              "--overlap-grad-reduce"], ["--optimizer", "adam", "--lr", "3e-3"]]),
], ids=["tensor then data parallel", "expert then tensor and sequence parallel",
        "optimizer state over replicas"])
def test_curves_equal_those_of_equal_stages(data: str, layouts: list[str],
                                            flags: list[list[str]], tmp_path: Path) -> None:
    """SGD shows a wrong gradient scale; clipping in force shows a wrong norm.

    flags: of the run with unequal stages, and of both runs.
    """
    own, shared = flags
    argv = argv_for(data, 4, *UNTIED_PP2, *SGD, *shared)
    wanted = _curve(4, argv, tmp_path)
    got = _curve(4, [*argv, *own, "--stage-layouts", *layouts], tmp_path)
    assert len(wanted) == 4 and wanted[0][0] - wanted[-1][0] > 0.1
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_an_overflow_on_a_stage_lowers_the_loss_scale_of_all(data: str, tmp_path: Path) -> None:
    argv = [*MODEL, *UNTIED_PP2, "--data-path", data, *SGD, "--fp16", "--hysteresis", "1"]
    layouts = ["--stage-layouts", "tp=2", "tp=1,ep=2"]
    ranks = on_ranks(4, _scaled, [*argv, *layouts, "--train-iters", "9", "--initial-loss-scale",
                                  str(2**22)])
    steps = ranks[0][1]
    assert 0 < steps[-1][1] < 9 and all(scale == 2**22 / 2**skipped for scale, skipped in steps)
    assert {scale for scale, _ in ranks} == {steps[-1][0]}
    argv = [*argv, "--train-iters", "3", "--initial-loss-scale", "1024"]
    wanted, got = (_curve(4, [*argv, *more], tmp_path) for more in ([], layouts))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=5e-3, atol=0)


ADAM = ["--train-iters", "6", "--moe-aux-loss-coeff", "0"]
FIRST, SECOND = ["--stage-layouts", "tp=2", "tp=1,ep=2"], ["--stage-layouts", "tp=1,ep=2", "tp=2"]


def _goes_on(data: str, folder: Path, writer: list[str],
             *readers: tuple[int, list[str]]) -> None:
    """What `writer`, on four ranks, saved after three of six steps, each reader (ranks, sizes)
    goes on with: losses and norms of steps 4 to 6.
    """
    argv, saved = [*MODEL, *UNTIED_PP2[2:], "--data-path", data, *ADAM], str(folder / "saved")
    wanted = _curve(4, [*argv, *UNTIED_PP2[:2], *writer], folder)
    saving = [*argv, *UNTIED_PP2[:2], *writer, "--save", saved, "--save-interval", "3",
              "--exit-interval", "3"]
    assert _curve(4, saving, folder) == wanted[:3]
    for world, sizes in readers:
        got = _curve(world, [*argv, *sizes, "--load", saved], folder)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted[3:]), rtol=1e-3, atol=0)


def test_a_checkpoint_of_unequal_stages_continues_in_other_layouts(data: str,
                                                                   tmp_path: Path) -> None:
    _goes_on(data, tmp_path, FIRST, (4, [*UNTIED_PP2[:2], *SECOND]), (1, []))


def _validation(argv: list[str]) -> dict[str, Any]:
    return next(row for row in ran(argv).records if "valid_loss" in row)


def test_a_checkpoint_of_unequal_stages_is_shown_converted_and_evaluated(
        data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*MODEL, *UNTIED_PP2[2:], "--data-path", data, *ADAM, "--split", "80,20,0"]
    saved, unequal = str(tmp_path / "saved"), [*UNTIED_PP2[:2], *FIRST]
    _curve(4, [*argv, *unequal, "--save", saved, "--exit-interval", "1"], tmp_path)
    assert command(["inspect", saved]) == 0
    shown = capsys.readouterr().out
    assert "stage_layouts ['tp=2,ep=1', 'tp=1,ep=2']" in shown
    assert shown.count("4 experts: ") == 2
    evaluation = [*argv, "--skip-train", "--load"]
    wanted = on_ranks(4, _validation, [*evaluation, saved, *unequal, "--eval-iters", "2"])[0]
    for form, more in (("megatron", []), ("megatron_native", ["--native-moe"])):
        folder = str(tmp_path / form)
        assert command(["reshard", saved, folder, "--to", form]) == 0
        [got] = on_ranks(1, _validation, [*evaluation, folder, *more, "--eval-iters", "2"])
        assert got["valid_loss"] == pytest.approx(wanted["valid_loss"], rel=1e-5)
    again = [*evaluation, str(tmp_path / "megatron"), *unequal, "--eval-iters", "2"]
    assert on_ranks(4, _validation, again)[0] == wanted


SHARDED = ["--use-distributed-optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize("writer", [
    [*FIRST, *SHARDED], SECOND, SHARDED, ["--expert-model-parallel-size", "2"]],
    ids=["unequal, distributed optimizer", "unequal", "equal, distributed optimizer", "equal"])
def test_checkpoints_of_equal_and_unequal_stages(writer: list[str], data: str,
                                                 tmp_path: Path) -> None:
    shared = [flag for flag in writer if flag in SHARDED]
    sizes = [[*UNTIED_PP2[:2], *FIRST], [*UNTIED_PP2[:2], *SECOND, "--sequence-parallel"],
             ["--tensor-model-parallel-size", "2", *UNTIED_PP2[:2]], []]
    _goes_on(data, tmp_path, writer,
             *((4 if more else 1, [*more, *shared]) for more in sizes))


@pytest.mark.parametrize("further,said", [
    (["--stage-layouts", "tp=2,tp=1", "tp=1"], "stage_layouts='tp=2,tp=1' is not a layout"),
    (["--stage-layouts", "tp=0", "tp=1"], "stage_layouts='tp=0' is not a layout"),
    (["--stage-layouts", "tp=2"], "one layout for each of at least 2 stages"),
    (["--stage-layouts", "tp=2", "tp=3"], "stage_layouts=tp=3,ep=1 needs a multiple of 3 ranks"),
    (["--stage-layouts", "tp=2", "tp=1", "--tensor-model-parallel-size", "2"], "must be left out"),
    (["--stage-layouts", "tp=2", "tp=1", "--num-virtual-stages-per-pipeline-rank", "2"],
     "num_virtual_stages_per_pipeline_rank=2 .*must be 1"),
    (["--stage-layouts", "tp=2", "tp=1", "--pipeline-schedule", "eager-1f1b"],
     "pipeline.schedule=eager-1f1b .*must be 1f1b"),
])
def test_what_does_not_fit_is_refused_by_name(further: list[str], said: str) -> None:
    argv = [*MODEL, *UNTIED_PP2, "--data-path", "x", "--train-iters", "1", *further]
    with pytest.raises(ValueError, match=said):
        stages_of(arguments_of(argv), 4)


@pytest.mark.parametrize("name,value", [
    ("mtp_num_layers", 1), ("mtp_detach_heads", True), ("use_tp_pp_dp_mapping", True),
    ("eval_micro_batch_size", 7), ("log_num_zeros_in_grad", True)])
def test_arguments_of_megatrons_own_parser_are_refused_by_name(name: str, value: Any) -> None:
    args = _arguments()
    setattr(args, name, value)
    with pytest.raises(ValueError, match=f"{name}={value} cannot be used with stages of"):
        stages_of(args, 4)


def test_checkpoints_name_the_divisor_of_the_vocabulary_that_was_given(
        monkeypatch: pytest.MonkeyPatch) -> None:
    args = _arguments(make_vocab_size_divisible_by=128, world_size=4, rank=0)
    made = script.Script()
    made.prepare(args)
    assert args.make_vocab_size_divisible_by == 64 and args.tensor_model_parallel_size == 2
    monkeypatch.setattr(script, "script_arguments", lambda: vars(args))
    made.around_load({}, lambda: None)
    assert args.make_vocab_size_divisible_by == 128


def _arguments(**further: Any) -> argparse.Namespace:
    args = arguments_of([
        *MODEL, *UNTIED_PP2, "--data-path", "x", "--train-iters", "1", "--stage-layouts", "tp=2",
        "tp=1"])
    vars(args).update(further)
    return args


def test_tied_embeddings_are_cut_alike() -> None:
    argv = [*MODEL, *UNTIED_PP2[:2], "--data-path", "x", "--train-iters", "1", "--stage-layouts"]
    alike = arguments_of([*argv, "tp=2,ep=1", "tp=2,etp=1"])
    stages = stages_of(alike, 4)
    assert stages is not None and (stages.ranks, stages.samples, stages.replicas(1)) == (2, 2, 1)
    with pytest.raises(ValueError, match="--untie-embeddings-and-output-weights"):
        stages_of(arguments_of([*argv, "tp=2", "tp=1"]), 4)


def test_parsed_arguments_get_the_sizes_of_their_ranks_stage() -> None:
    from moe_plugin.hosts.megatron.passes import prepared

    argv = [*MODEL, *UNTIED_PP2, "--data-path", "x", "--train-iters", "1"]

    def sizes(rank: int, *more: str) -> tuple[int, ...]:
        args = arguments_of([*argv, *more])
        vars(args).update(world_size=4, rank=rank, make_vocab_size_divisible_by=128)
        assert (prepared(args) is not None) == bool(more)
        return (args.tensor_model_parallel_size, args.expert_model_parallel_size,
                args.micro_batch_size, args.make_vocab_size_divisible_by)

    assert [sizes(rank, *FIRST) for rank in (1, 2)] == [(2, 1, 4, 64), (1, 2, 2, 128)]
    assert sizes(3) == (1, 1, 2, 128)


OVERLAP = "--overlap-moe-expert-parallel-comm"
CASES = {
    "own router": [], "slots": ["--moe-dispatch", "padded", "--moe-capacity-factor", "1"],
    "gathered experts": ["--moe-parallel-r", "0"],
    "native router, shared expert": [
        "--moe-router-num-groups", "2", "--moe-router-group-topk", "1",
        "--moe-shared-expert-intermediate-size", "16"
    ], "dense layers between": ["--num-layers", "3", "--moe-layer-freq", "2"],
}


def _overlapped_run(argv: list[str]) -> tuple[dict[str, Any], list[Tensor], list[str]]:
    """The last record, all parameters, and the steps of the layers' calls."""
    from moe_plugin.hosts.megatron import stages

    called: list[str] = []

    def noted(step: Any, name: str) -> Any:
        return lambda self, *args: called.append(name) or step(self, *args)

    stages.Stages.route = noted(stages.Stages.route, "route")
    stages.Stages.combine = noted(stages.Stages.combine, "combine")
    run = ran(argv)
    return run.records[-1], [p.detach().clone() for p in run.model.parameters()], called


@needs_steps
@pytest.mark.parametrize("name", CASES)
def test_the_overlapped_schedule_trains_the_same_model(name: str, data: str) -> None:
    """SGD without clipping, so that a wrong gradient would show in a parameter."""
    argv = argv_for(data, 3, "--optimizer", "sgd", "--sgd-momentum", "0", "--lr", "0.3",
                    "--clip-grad", "0", "--bf16", *EP2, *CASES[name])
    for plain, overlapped in zip(*(on_ranks(2, _overlapped_run, [*argv, *more])
                                   for more in ([], [OVERLAP])), strict=True):
        assert plain[2] == [] and overlapped[2].count("route") == overlapped[2].count("combine") > 0
        for key in ("lm_loss", "grad_norm"):
            assert overlapped[0][key] == pytest.approx(plain[0][key], rel=1e-3)
        for loss, by_layer in plain[0]["aux_losses"].items():
            assert overlapped[0]["aux_losses"][loss] == pytest.approx(by_layer, rel=1e-2)
        assert overlapped[0]["balance"].keys() == plain[0]["balance"].keys()
        for one, other in zip(overlapped[1], plain[1], strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


def _refusals(every: list[dict[str, Any]]) -> list[str]:
    messages = []
    for settings in every:
        native = {name: settings.pop(name) for name in list(settings) if "." not in name}
        case = Case(ep=2, dtype=torch.bfloat16, native={
            "overlap_moe_expert_parallel_comm": True, "num_layers": 2, **native})
        initialise_parallel(case)
        with pytest.raises(ValueError, match="overlap_moe_expert_parallel_comm=True") as refused:
            build(case, True, settings)
        messages.append(str(refused.value))
    return messages


@needs_steps
def test_what_cannot_be_cut_into_steps_is_refused() -> None:
    every = {
        "parallel.mode='auto'": {"parallel.mode": "auto"}, "parallel.d=2": {"parallel.d": 2},
        "parallel.spill='everywhere'": {"parallel.spill": "everywhere"},
        "dispatch.name='all_gather'": {"dispatch.name": "all_gather"},
        "dispatch.send='nodes'": {"dispatch.send": "nodes"},
        "moe_layer_freq=2": {"moe_layer_freq": 2},
        "experts.weights_first=True": {"moe_apply_probs_on_input": True},
        "router.pre_gate=1": {"router.pre_gate": 1},
        "router.name='hash'": {"router.name": "hash", "router.hash.vocabulary": 16},
        "moe_token_dispatcher_type='flex'": {"moe_token_dispatcher_type": "flex"},
        "cuda_graph_impl='transformer_engine'": {
            "cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]},
    }
    for messages in on_ranks(2, _refusals, list(every.values())):
        for name, message in zip(every, messages, strict=True):
            assert f"does not fit {name}: {name.split('=')[0]} must be" in message
            assert "or turn the overlap off" in message


@pytest.mark.fast
@needs_steps
def test_rows_and_weights_have_their_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's schedule frees the memory of a step's arguments before the next step. With one
    rank, the rows are the tokens themselves.
    """
    from moe_plugin.hosts.megatron import stages

    @dataclass
    class Work:
        x: Tensor

    monkeypatch.setattr(stages.parameters, "wait_for", lambda experts: None)
    tokens, weights = torch.ones(3, 4), torch.ones(3)
    layout = SimpleNamespace(dispatch=lambda x, *_, **__: [Work(x)])
    call = SimpleNamespace(plan=None, traffic=MagicMock(), layout=layout)
    moe = SimpleNamespace(_call=call, experts=None)
    found = stages.Stages.dispatch(moe, tokens, weights)
    assert found[0].data_ptr() != tokens.data_ptr()
    assert found[1].data_ptr() != weights.data_ptr()
