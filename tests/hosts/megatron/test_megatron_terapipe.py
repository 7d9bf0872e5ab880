"""Slices of sequences through pipeline stages: the numbers of 1F1B and of one stage."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin.planner.pipeline.choice import predict
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.test_megatron_pipeline import RECOMPUTE, SGD, _one_stage, _steps, _without
from tests.hosts.megatron.training import EP2, MODEL, PP2, TP2, refusal

pytestmark = pytest.mark.megatron
# balance losses count a slice; the z loss is a mean over tokens, and equal
MOE = [*MODEL, *SGD, "--moe-aux-loss-coeff", "0"]
ROPE = ["--position-embedding-type", "rope", "--group-query-attention", "--num-query-groups", "2"]
TERAPIPE = ["--pipeline-schedule", "terapipe", "--pipeline-slices"]


def _runs(every: list[list[str]], save: str = "", started: bool = False) -> list[dict[str, Any]]:
    """What each of these runs computes, see `_steps`.

    save: folder for the first weights of the first one. started: groups are there.
    """
    from moe_plugin.hosts.megatron.trainer import arguments, train

    found: list[dict[str, Any]] = []
    for argv in every:
        args = arguments.parser().parse_args(argv)
        if started or found:
            arguments.check(args, torch.distributed.get_world_size())
        else:
            train.start(args)
        found.append(_steps(args, arguments.transformer_config(args, cpu=True),
                            save="" if found else save))
    return found


def _worst(cases: list[tuple[list[str], str]], save: str) -> list[tuple[float, str, list[float]]]:
    """For each case of arguments and slices: the largest error of gradients, weights and losses of
    three steps relative to the largest number of its tensor, its name, and the losses.
    """
    found = []
    for number, (argv, slices) in enumerate(cases):
        native, sliced = _runs([argv, [*argv, *TERAPIPE, slices]], save and f"{save}/{number}",
                               started=bool(number))
        error, name = max((float((native[name] - sliced[name]).abs().max())
                           / (float(native[name].abs().max()) + 1e-6), name) for name in native
                          if native[name].numel())
        found.append((error, name, sliced["losses"].tolist()))
    return found


@pytest.mark.distributed
def test_slices_equal_1f1b_and_one_stage(data: str, tmp_path: Path) -> None:
    """MoE, dense with rotary positions and grouped queries, recomputation; unequal slices, four
    micro-batches a step; gradients and weights of three steps.
    """
    moe = [*MOE, "--data-path", data]
    cases = [(moe, "11,9,8,4"), ([*_without(moe, "--num-experts"), *ROPE], "20,11,1"),
             ([*moe, *ROPE, *RECOMPUTE, "--calculate-per-token-loss", "--moe-layer-freq", "0,1"],
              "3")]
    ranks = on_ranks(2, _worst, [([*argv, *PP2], slices) for argv, slices in cases],
                     str(tmp_path))
    one = on_ranks(1, _one_stage, [argv for argv, _ in cases], str(tmp_path))[0]
    for number, case in enumerate(zip(*ranks, strict=True)):
        assert all(error < 1e-4 for error, *_ in case), case
        assert case[0][2] == case[1][2] and case[0][2][0] - case[0][2][-1] > 0.1
        torch.testing.assert_close(case[0][2], one[number], rtol=2e-5, atol=0)


WIDE = ["--num-layers", "4", "--global-batch-size", "8"]
PP4 = ["--pipeline-model-parallel-size", "4", *WIDE]
SHARED = ["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "2",
          "--num-layers", "4"]
PPMOE = [*SHARED, "--moe-dispatch", "index_slice"]
PARM = [*SHARED, "--moe-replicas", "2", "--moe-replicas-schedule"]
# a capacity of the busiest expert
EVERY_ROW = ["--moe-dispatch", "padded", "--moe-capacity-factor", "0"]
ADAM = ["--optimizer", "adam", "--lr", "3e-3", "--use-distributed-optimizer"]
MANY = {
    "four stages": (4, PP4, "13,11,7,1"),
    "four stages, recomputation": (4, [*PP4, *RECOMPUTE], "14,9,9"),
    "four stages, dense, recomputation": (
        4, [*PP4, "--moe-layer-freq", "0,0,0,0", *ROPE, "--recompute-granularity", "selective"],
        "4"),
    "PP2 EP2": (4, [*PP2, *EP2, "--overlap-grad-reduce"], "17,15"),
    "TP2 PP2": (4, [*PP2, *TP2, *ROPE], "14,10,8"),
    "one micro-batch": (4, [*PP2, *EP2, "--global-batch-size", "4"], "9,9,8,6"),
    "PPMoE": (4, [*PP2, *PPMOE], "17,9,6"),
    "PPMoE, sequence parallel, recomputation": (
        4, [*PP2, *PPMOE, "--sequence-parallel", *RECOMPUTE], "14,10,8"),
    "PPMoE, four stages, recomputation": (
        8, ["--pipeline-model-parallel-size", "4", *PPMOE, *RECOMPUTE], "13,11,7,1"),
    "Parm S1": (4, [*PP2, *PARM, "s1"], "17,9,6"),
    "Parm S2, recomputation": (4, [*PP2, *PARM, "s2", *EVERY_ROW, *RECOMPUTE], "14,10,8"),
    "Parm, four stages": (8, ["--pipeline-model-parallel-size", "4", *PARM, "s1"], "13,11,7,1"),
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("world", "sizes", "slices"), MANY.values(), ids=MANY.keys())
def test_slices_equal_1f1b_on_many_ranks(world: int, sizes: list[str], slices: str, data: str,
                                         tmp_path: Path) -> None:
    argv = [*MOE, "--data-path", data]
    ranks = on_ranks(world, _worst, [([*argv, *sizes], slices)], str(tmp_path), timeout_s=500)
    assert all(error < 1e-4 for [(error, *_)] in ranks), ranks
    if sizes is MANY["four stages"][1]:
        one = on_ranks(1, _one_stage, [[*argv, *WIDE]], str(tmp_path))[0]
        torch.testing.assert_close(ranks[0][0][2], one[0], rtol=2e-5, atol=0)


def _distances(argv: list[str], narrow: list[str], slices: str) -> list[tuple[float, ...]]:
    """How far the first gradients and the losses of 1F1B and of slices with the arguments `narrow`
    are from those of 1F1B without: norms of the differences relative to those of the run.
    """
    runs = _runs([argv, [*argv, *narrow], [*argv, *narrow, *TERAPIPE, slices]])

    def numbers(run: dict[str, Any], name: str) -> torch.Tensor:
        if name == "losses":
            return run[name].double()
        grads = [tensor.flatten() for key, tensor in run.items() if key.endswith(" grad")]
        return torch.cat(grads[:len(grads) // 3]).double()

    return [tuple(float((numbers(run, name) - numbers(runs[0], name)).norm()
                        / numbers(runs[0], name).norm()) for name in ("grads", "losses"))
            for run in runs[1:]]


# every expert for every token: a choice that another rounding turns moves a gradient by more than
# all other rounding does
ALL_EXPERTS = ["--moe-router-topk", "4", *RECOMPUTE]
FULL = {
    "Adam": ([*PP2, *EP2, "--overlap-grad-reduce", "--overlap-param-gather"], [], "17,15"),
    "bf16": ([*PP2, *EP2, *ALL_EXPERTS], ["--bf16"], "17,9,6"),
    "bf16, four stages": ([*PP4, *ALL_EXPERTS], ["--bf16"], "13,11,7,1"),
    "bf16, PPMoE": ([*PP2, *PPMOE, *ALL_EXPERTS], ["--bf16"], "17,9,6"),
    "bf16, Parm": ([*PP2, *PARM, "s1", *ALL_EXPERTS], ["--bf16"], "17,9,6"),
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("sizes", "narrow", "slices"), FULL.values(), ids=FULL.keys())
def test_adam_and_bf16_are_as_near_as_under_1f1b(sizes: list[str], narrow: list[str], slices: str,
                                                 data: str) -> None:
    """Adam with its state over replicas, several micro-batches a step; bf16 against fp32."""
    argv = [*MOE, *ADAM, "--data-path", data, *sizes]
    for native, sliced in on_ranks(4, _distances, argv, narrow, slices, timeout_s=500):
        assert native[0] > 1e-4 or not narrow
        for mine, of_slices in zip(native, sliced, strict=True):
            assert of_slices <= 1.2 * mine + 1e-4, (native, sliced)


def _refusals(every: list[list[str]]) -> list[str]:
    from moe_plugin.hosts.megatron.compat import core

    found = []
    for argv in every:
        found.append(refusal(argv))
        core.destroy_groups()
    return found


REFUSED = {
    "lengths that sum to seq_length=32": ["--pipeline-slices", "16,8"],
    "or how many equal ones": ["--pipeline-slices", "33"],
    "router.pre_gate=1.*recompute": ["--pipeline-slices", "2", "--moe-pre-gate", "1", *RECOMPUTE],
    "virtual stages.*=2": ["--pipeline-slices", "2", "--num-layers", "4",
                           "--num-virtual-stages-per-pipeline-rank", "2"],
    "offload.activations='recompute'": ["--pipeline-slices", "2", "--moe-activations",
                                        "recompute"],
    "deterministic_mode=True.*slices": ["--deterministic-mode"],
}


@pytest.mark.distributed
def test_what_does_not_combine_is_refused_by_name(data: str) -> None:
    argv = [*MOE, *PP2, "--data-path", data, "--pipeline-schedule", "terapipe"]
    ranks = on_ranks(2, _refusals, [[*argv, *more] for more in REFUSED.values()])
    for found in ranks:
        for pattern, message in zip(REFUSED, found, strict=True):
            assert re.search(pattern, message), (pattern, message)


class _Shortened:
    """Micro-batches cut to as many tokens as the run's sequences have at the time."""

    def __init__(self, batches: Any, args: Any) -> None:
        self.batches, self.args = batches, args

    def __iter__(self) -> _Shortened:
        return self

    def __next__(self) -> Any:
        batch, length = next(self.batches), self.args.seq_length
        return type(batch)(*(getattr(batch, one.name)[:, :length] for one in fields(batch)))


Outcome = tuple[list[tuple[int, ...]], list[float], str]


def _of_lengths(runs: list[tuple[list[str], list[int]]]) -> list[Outcome]:
    """(slices by step, losses, what was refused) of each run: its arguments, its sequences' lengths
    by step. One and two equal slices are measured.
    """
    from moe_plugin.hosts.megatron.pipeline import slice_step, slice_trials
    from moe_plugin.hosts.megatron.trainer import arguments, train

    slice_trials.COUNTS, slice_trials.ROUNDS = (1, 2), 1
    taken: list[tuple[int, ...]] = []
    found, run = [], slice_step.SliceStep.run

    def noted(self: Any) -> Any:
        taken.append(self.slices)
        return run(self)

    slice_step.SliceStep.run = noted  # type: ignore[method-assign]
    for number, (argv, lengths) in enumerate(runs):
        args = arguments.parser().parse_args(argv)
        if number:
            arguments.check(args, torch.distributed.get_world_size())
        else:
            train.start(args)
        losses, refused = _steps_of_lengths(args, lengths)
        found.append((taken.copy(), losses, refused))
        taken.clear()
    slice_step.SliceStep.run = run  # type: ignore[method-assign]
    return found


def _steps_of_lengths(args: Any, lengths: list[int]) -> tuple[list[float], str]:
    from moe_plugin.hosts.megatron.report import RunLog
    from moe_plugin.hosts.megatron.trainer import arguments, model, train
    from moe_plugin.hosts.megatron.trainer.train import seed_everything

    seed_everything(args.seed)
    tokenizer, train_set, _ = train.make_datasets(args)
    training = model.build(args, arguments.transformer_config(args, cpu=True),
                           arguments.our_settings(args), tokenizer.vocab_size)
    loop = train.Loop(args, training, RunLog(None), train_set, None)
    batches, losses = [_Shortened(one, args) for one in loop.training_batches()], []
    try:
        for length in lengths:
            args.seq_length = length
            total, tokens = loop.step(batches, args.lr)[0].tolist()
            losses.append(total / tokens)
    except ValueError as error:
        return losses, str(error)
    return losses, ""


@pytest.mark.distributed
def test_sequences_of_another_length_are_cut_anew_or_refused(data: str) -> None:
    """While slices are measured, another length starts again; then its slices follow from the
    times of the measured one. Lengths that are given fit one length alone.
    """
    argv, lengths = [*MOE, *PP2, "--data-path", data], [16, 32, 32, 32, 32, 16, 24]
    sliced = [*argv, "--pipeline-schedule", "terapipe"]
    auto = [*argv, "--pipeline-schedule", "auto", "--pipeline-slices", "best"]
    first, second = on_ranks(2, _of_lengths, [
        (argv, lengths), (sliced, lengths), ([*sliced, "--pipeline-slices", "3"], lengths),
        (auto, [32] * 5 + [16]), ([*sliced, "--pipeline-slices", "20,12"], [32, 16])])
    assert first == second
    native, measured, equal, chosen, given = first
    for taken, losses, refused in (measured, equal):
        assert not refused and [sum(cut) for cut in taken] == lengths
        torch.testing.assert_close(losses, native[1], rtol=1e-3, atol=0)
    assert [len(cut) for cut in measured[0][:4]] == [2, 2, 1, 2]
    assert {len(cut) for cut in equal[0]} == {3}
    assert len(chosen[1]) == 6 and not chosen[2]
    assert len(given[1]) == 1 and "lengths that sum to seq_length=16" in given[2]


class _Model(torch.nn.Module):
    """Called like a GPT model."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """What it is called with."""
        return torch.stack([input_ids, position_ids])


def test_a_batch_of_another_length_than_the_slices_is_refused() -> None:
    from moe_plugin.hosts.megatron.pipeline.attention import Sequences, SlicePart
    from moe_plugin.hosts.megatron.pipeline.cutting import CutModel

    model, x = _Model(), torch.arange(32)[None]
    cut = CutModel(model, 16)
    with cut.cutting():
        cut.begin(SlicePart(Sequences(16, x.device), 6, 8))
        assert model(x[:, :16], position_ids=x[:, :16]).tolist() == [[[*range(6, 14)]]] * 2
        with pytest.raises(ValueError, match=r"shape\[1\]=32.*must be seq_length=16.*1f1b"):
            model(x, x)
    assert torch.equal(model(x, x)[0], x)


def _chosen(argv: list[str]) -> tuple[Any, Any, list[float], list[int]]:
    """(slices of the trials and after them, profile, losses, most slices alive by step) of a run
    without given slices.
    """
    from moe_plugin.hosts.megatron.pipeline import slice_step, slice_trials
    from moe_plugin.hosts.megatron.trainer import arguments, train

    args = arguments.parser().parse_args(argv)
    train.start(args)
    taken: list[tuple[int, ...]] = []
    profiles: list[Any] = []
    alive: list[int] = []
    run, after = slice_step.SliceStep.run, slice_trials.SliceTrials.after

    def noted(self: Any) -> Any:
        taken.append(self.slices)
        logged = run(self)
        alive.append(self.most_alive)
        return logged

    def after_noted(self: Any, step: Any) -> None:
        after(self, step)
        profiles.append(self.profile)

    slice_step.SliceStep.run = noted  # type: ignore[method-assign]
    slice_trials.SliceTrials.after = after_noted  # type: ignore[method-assign]
    try:
        losses = _steps(args, arguments.transformer_config(args, cpu=True))["losses"].tolist()
    finally:
        slice_step.SliceStep.run = run  # type: ignore[method-assign]
        slice_trials.SliceTrials.after = after  # type: ignore[method-assign]
    return taken, profiles[-1], losses, alive


@pytest.mark.distributed
def test_the_first_steps_measure_slices_and_all_ranks_choose_the_same(data: str) -> None:
    argv = [*MOE, *PP2, "--data-path", data, "--train-iters", "11"]
    ranks = on_ranks(2, _chosen, [*argv, "--pipeline-schedule", "terapipe"])
    (taken, profile, losses, alive), (*other, alive_there) = ranks
    assert [taken, profile, losses] == other
    for stage, most in enumerate((alive, alive_there)):  # n - i + S - 1
        assert most[:5] == [2 - stage + slices - 1 for slices in (8, 1, 2, 4, 8)]
    assert [len(slices) for slices in taken[:9]] == [8, 1, 2, 4, 8, 1, 2, 4, 8]
    assert taken[9] == taken[10] == profile.best()[0] and sum(taken[9]) == 32
    assert profile.forward(32, 0) > 0 and profile.send_s > 0 and losses[0] - losses[-1] > 0.3


def _automatic(argv: list[str], choices: list[str]) -> list[tuple[str, tuple[int, ...], Any]]:
    """With auto and slices: what was chosen, how it cuts, and the losses. What is the fastest
    is not up to this machine's clock: each choice in turn.
    """
    from moe_plugin.hosts.megatron.pipeline import auto, base
    from moe_plugin.hosts.megatron.trainer import arguments, train

    found, agreed, second, made = [], auto.choose, base._second, []
    base._second = lambda group: made.append(group) or second(group)
    for number, forced in enumerate(choices):
        args = arguments.parser().parse_args(argv)
        if number:
            arguments.check(args, torch.distributed.get_world_size())
        else:
            train.start(args)
        auto.choose = lambda profile, forced=forced: next(
            one for one in predict(profile) if one.schedule == forced)
        schedule: list[Any] = []
        try:
            losses = _steps(args, arguments.transformer_config(args, cpu=True),
                            schedule=schedule)["losses"].tolist()
        finally:
            auto.choose = agreed
        chosen = schedule[0].chosen
        found.append((chosen.schedule, chosen.slices, losses))
    base._second = second
    assert len(made) == len(choices)  # one group for gradients, whatever is measured and chosen
    return found


@pytest.mark.distributed
def test_auto_tries_slices_where_they_are_allowed(data: str) -> None:
    argv = [*MOE, *PP2, "--data-path", data, "--train-iters", "13", "--pipeline-schedule", "auto",
            "--pipeline-slices"]
    first, second = on_ranks(2, _automatic, [*argv, "best"], ["terapipe", "eager-1f1b"])
    assert first == second
    (sliced, slices, losses), (eager, none, others) = first
    assert (sliced, eager, none) == ("terapipe", "eager-1f1b", ()) and sum(slices) == 32
    torch.testing.assert_close(losses, others, rtol=2e-4, atol=0)
    given = on_ranks(2, _automatic, [*argv, "20,12"], ["terapipe"])
    assert given[0][0][1] == (20, 12)
    one = on_ranks(2, _automatic, [*argv, "best", "--global-batch-size", "2"], ["terapipe"])
    assert one[0] == one[1] and sum(one[0][0][1]) == 32  # one micro-batch a step is measured, too
    for message in on_ranks(2, refusal, [*argv, "best", "--deterministic-mode"]):
        assert "deterministic_mode=True" in message
