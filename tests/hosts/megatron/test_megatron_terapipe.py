"""Slices of sequences through pipeline stages: the numbers of 1F1B and of one stage."""

from __future__ import annotations

import functools
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_plugin.hosts.megatron.pipeline import terapipe
from moe_plugin.hosts.megatron.pipeline.terapipe import given_slices
from moe_plugin.planner.pipeline.choice import StageProfile, choose, predict
from moe_plugin.planner.pipeline.slices import SliceProfile
from moe_plugin.planner.trials import Steady
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.test_megatron_pipeline import DENSE, SGD, begun, logs_dense, steps
from tests.hosts.megatron.training import EP2, MODEL, PP2, RECOMPUTE, TP2, Run, ran, refusal
from tests.tuning.test_noise import AIM, NOISES, STEPS, TRIALS, Noise

# balance losses count a slice; the z loss is a mean over tokens, and equal
MOE = [*MODEL, *SGD, "--moe-aux-loss-coeff", "0"]
ROPE = ["--position-embedding-type", "rope", "--group-query-attention", "--num-query-groups", "2"]
TERAPIPE = ["--pipeline-schedule", "terapipe", "--pipeline-slices"]


def _worst(world: int, argv: list[str], slices: str) -> tuple[float, list[float]]:
    """The largest error of a rank's gradients, weights and losses of three steps relative to the
    largest number of its tensor, and the losses.
    """
    worst = 0.0
    for native, sliced in zip(*(on_ranks(world, steps, [*argv, *more], timeout_s=500)
                                for more in ([], [*TERAPIPE, slices])), strict=True):
        worst = max(worst, *(float((native[name] - sliced[name]).abs().max())
                             / (float(native[name].abs().max()) + 1e-6) for name in native
                             if native[name].numel()))
    return worst, sliced["losses"].tolist()


CASES = {
    "MoE": ([], "11,9,8,4"),
    "dense, rotary, grouped queries": pytest.param([*DENSE, *ROPE], "20,11,1", marks=logs_dense),
    "recomputation, unequal layers": (
        [*ROPE, *RECOMPUTE, "--calculate-per-token-loss", "--moe-layer-freq", "[0,1]"], "3"),
}


@pytest.mark.parametrize(("more", "slices"), CASES.values(), ids=CASES.keys())
def test_slices_equal_1f1b_and_one_stage(more: list[str], slices: str, data: str,
                                         tmp_path: Path) -> None:
    """Unequal slices, four micro-batches a step; gradients and weights of three steps."""
    argv, one = begun(1, [*MOE, "--data-path", data, *more], tmp_path)
    error, losses = _worst(2, [*argv, *PP2], slices)
    assert error < 1e-4 and losses[0] - losses[-1] > 0.1
    torch.testing.assert_close(losses, one, rtol=2e-5, atol=0)


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
        4, [*PP4, "--moe-layer-freq", "[0,0,0,0]", *ROPE, "--recompute-granularity", "selective"],
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
@pytest.mark.parametrize(("world", "sizes", "slices"), MANY.values(), ids=MANY.keys())
def test_slices_equal_1f1b_on_many_ranks(world: int, sizes: list[str], slices: str, data: str,
                                         tmp_path: Path) -> None:
    argv = [*MOE, "--data-path", data]
    if sizes is not MANY["four stages"][1]:
        assert _worst(world, [*argv, *sizes], slices)[0] < 1e-4
        return
    argv, one = begun(1, [*argv, *WIDE], tmp_path)
    error, losses = _worst(world, [*argv, *sizes], slices)
    assert error < 1e-4
    torch.testing.assert_close(losses, one, rtol=2e-5, atol=0)


def _distance(run: dict[str, Any], wanted: dict[str, Any]) -> tuple[float, float]:
    """How far the first gradients and the losses of a run are from another one's: norms of the
    differences relative to those of the other.
    """
    def numbers(run: dict[str, Any], name: str) -> torch.Tensor:
        if name == "losses":
            return run[name].double()
        grads = [tensor.flatten() for key, tensor in run.items() if key.endswith(" grad")]
        return torch.cat(grads[:len(grads) // 3]).double()

    grads, losses = (float((numbers(run, name) - numbers(wanted, name)).norm()
                           / numbers(wanted, name).norm()) for name in ("grads", "losses"))
    return grads, losses


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
@pytest.mark.parametrize(("sizes", "narrow", "slices"), FULL.values(), ids=FULL.keys())
def test_adam_and_bf16_are_as_near_as_under_1f1b(sizes: list[str], narrow: list[str], slices: str,
                                                 data: str) -> None:
    """Adam with its state over replicas, several micro-batches a step; bf16 against fp32."""
    argv = [*MOE, *ADAM, "--data-path", data, *sizes]
    for whole, plain, cut in zip(*(on_ranks(4, steps, [*argv, *more], timeout_s=500) for more in (
            [], narrow, [*narrow, *TERAPIPE, slices])), strict=True):
        native, sliced = _distance(plain, whole), _distance(cut, whole)
        assert native[0] > 1e-4 or not narrow
        for mine, of_slices in zip(native, sliced, strict=True):
            assert of_slices <= 1.2 * mine + 1e-4, (native, sliced)


REFUSED = {
    "lengths that sum to seq_length=32": ["--pipeline-slices", "16,8"],
    "or the number of equal slices": ["--pipeline-slices", "33"],
    "router.pre_gate=1.*recompute": ["--pipeline-slices", "2", "--moe-pre-gate", "1", *RECOMPUTE],
    "virtual stages.*=2": ["--pipeline-slices", "2", "--num-layers", "4",
                           "--num-virtual-stages-per-pipeline-rank", "2"],
    "offload.activations='recompute'": ["--pipeline-slices", "2", "--moe-activations",
                                        "recompute"],
    "deterministic_mode=True.*slices": ["--deterministic-mode"],
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_does_not_combine_is_refused_by_name(pattern: str, data: str) -> None:
    argv = [*MOE, *PP2, "--data-path", data, "--pipeline-schedule", "terapipe"]
    for message in on_ranks(2, refusal, [*argv, *REFUSED[pattern]]):
        assert re.search(pattern, message), (pattern, message)


Outcome = tuple[list[tuple[int, ...]], list[float], str]


def _of_lengths(argv: list[str], lengths: list[int]) -> Outcome:
    """(slices by step, losses, what was refused) of a run whose sequences have these lengths, by
    step. One and two equal slices are measured.
    """
    from moe_plugin.hosts.megatron import script
    from moe_plugin.hosts.megatron.compat.settings import script_arguments
    from moe_plugin.hosts.megatron.pipeline import slice_step, terapipe

    terapipe.COUNTS, terapipe.ROUNDS = (1, 2), 1
    taken: list[tuple[int, ...]] = []
    run, step, seen = slice_step.SliceStep.run, script.Script.around_step, Run()

    def noted(self: Any) -> Any:
        taken.append(self.slices)
        return run(self)

    def shortened(batches: Any) -> Any:
        while True:
            length = script_arguments()["seq_length"]
            yield {name: (value[..., :length, :length] if name == "attention_mask"
                          else value[:, :length]).contiguous()
                   for name, value in next(batches).items()}

    def of_length(self: Any, given: Any, work: Any) -> Any:
        script_arguments()["seq_length"] = lengths[seen.steps]
        if not seen.steps:
            given["data_iterator"].iterable = shortened(given["data_iterator"].iterable)
        return step(self, given, work)

    slice_step.SliceStep.run, script.Script.around_step = noted, of_length  # type: ignore
    try:
        ran([*argv, "--train-iters", str(len(lengths))], run=seen)
    except ValueError as error:
        return taken, [record["lm_loss"] for record in seen.steps_logged], str(error)
    return taken, [record["lm_loss"] for record in seen.steps_logged], ""


def test_sequences_of_another_length_are_cut_anew_or_refused(data: str) -> None:
    """While slices are measured, another length starts again; then its slices follow from the
    times of the measured one. Lengths that are given fit one length alone.
    """
    argv, lengths = [*MOE, *PP2, "--data-path", data], [16, 32, 32, 32, 32, 16, 24]
    sliced = [*argv, "--pipeline-schedule", "terapipe"]
    auto = [*argv, "--pipeline-schedule", "auto", "--pipeline-slices", "best"]
    found = []
    for run, by_step in ((argv, lengths), (sliced, lengths),
                         ([*sliced, "--pipeline-slices", "3"], lengths), (auto, [32] * 5 + [16]),
                         ([*sliced, "--pipeline-slices", "20,12"], [32, 16])):
        first, second = on_ranks(2, _of_lengths, run, by_step)
        assert first == second
        found.append(first)
    native, measured, equal, chosen, given = found
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
    from moe_plugin.hosts.megatron.pipeline.slice_step import CutModel

    model, x = _Model(), torch.arange(32)[None]
    cut = CutModel(model, 16)
    with cut.cutting():
        cut.begin(SlicePart(Sequences(16, x.device), 6, 8))
        assert model(x[:, :16], position_ids=x[:, :16]).tolist() == [[[*range(6, 14)]]] * 2
        with pytest.raises(ValueError, match=r"shape\[1\]=32.*must be seq_length=16.*1f1b"):
            model(x, x)
    assert torch.equal(model(x, x)[0], x)


def _chosen(argv: list[str]) -> tuple[Any, Any, list[float], list[int]]:
    """(slices of the trials and after them, profile, losses, most slices alive by step, what was
    logged) of a run without given slices.
    """
    from moe_plugin.hosts.megatron.pipeline import slice_step, terapipe

    taken: list[tuple[int, ...]] = []
    profiles: list[Any] = []
    alive: list[int] = []
    said: list[str] = []
    run, after = slice_step.SliceStep.run, terapipe.SliceTrials.after

    def noted(self: Any) -> Any:
        taken.append(self.slices)
        logged = run(self)
        alive.append(self.most_alive)
        return logged

    def after_noted(self: Any, step: Any) -> None:
        after(self, step)
        profiles.append(self.profile)

    slice_step.SliceStep.run = noted  # type: ignore[method-assign]
    terapipe.SliceTrials.after = after_noted  # type: ignore[method-assign]
    terapipe.logger.info = lambda text, *values: said.append(text % values)
    losses = steps(argv)["losses"].tolist()
    return taken, profiles[-1], losses, alive, said


def test_the_first_steps_measure_slices_and_all_ranks_choose_the_same(data: str) -> None:
    argv = [*MOE, *PP2, "--data-path", data, "--train-iters", "11"]
    ranks = on_ranks(2, _chosen, [*argv, "--pipeline-schedule", "terapipe"])
    (taken, profile, losses, alive, said), (*other, alive_there, silent) = ranks
    assert [taken, profile, losses] == other and not silent
    samples = json.loads(said[1].split(": ")[1])  # what a plan of batch and slices takes
    assert len(samples) == 1 + 2 + 4 + 8 and {sample[0] for sample in samples} == {2}
    plan = choose(StageProfile(micro_batches=2, batch=4, forward_s=[1.0, 1.0], sequence=32,
                               backward_s=[2.0, 2.0], slice_samples=samples, granularity=4))
    assert plan.seconds > 0
    for stage, most in enumerate((alive, alive_there)):  # n - i + S - 1
        assert most[:5] == [2 - stage + slices - 1 for slices in (8, 1, 2, 4, 8)]
    assert [len(slices) for slices in taken[:9]] == [8, 1, 2, 4, 8, 1, 2, 4, 8]
    assert taken[9] == taken[10] == profile.best()[0] and sum(taken[9]) == 32
    assert profile.forward(32, 0) > 0 and profile.send_s > 0 and losses[0] - losses[-1] > 0.3


def _automatic(argv: list[str], forced: str) -> tuple[str, tuple[int, ...], Any]:
    """With auto and slices: what was chosen, how it cuts, and the losses. What is the fastest is
    not up to this machine's clock: it is given.
    """
    from moe_plugin.hosts.megatron.pipeline import auto, base

    auto.Steady = partial(Steady, least=1, within=1e9)
    second, made = base.gradient_group, []
    base.gradient_group = lambda group: made.append(group) or second(group)
    auto.choose = lambda profile: next(
        one for one in predict(profile) if one.schedule == forced)
    schedule: list[Any] = []
    losses = steps(argv, schedule)["losses"].tolist()
    assert len(made) == 1  # one group for gradients, whatever is measured and chosen
    chosen = schedule[0].chosen
    return chosen.schedule, chosen.slices, losses


def test_auto_tries_slices_where_they_are_allowed(data: str) -> None:
    argv = [*MOE, *PP2, "--data-path", data, "--train-iters", "13", "--pipeline-schedule", "auto",
            "--pipeline-slices"]
    found = []
    for name in ("terapipe", "eager-1f1b"):
        first, second = on_ranks(2, _automatic, [*argv, "best"], name)
        assert first == second
        found.append(first)
    (sliced, slices, losses), (eager, none, others) = found
    assert (sliced, eager, none) == ("terapipe", "eager-1f1b", ()) and sum(slices) == 32
    torch.testing.assert_close(losses, others, rtol=2e-4, atol=0)
    given = on_ranks(2, _automatic, [*argv, "20,12"], "terapipe")
    assert given[0][1] == (20, 12)
    one = on_ranks(2, _automatic, [*argv, "best", "--global-batch-size", "2"], "terapipe")
    assert one[0] == one[1] and sum(one[0][1]) == 32  # one micro-batch a step is measured, too
    for message in on_ranks(2, refusal, [*argv, "best", "--deterministic-mode"]):
        assert "deterministic_mode=True" in message


@pytest.mark.parametrize("noise", NOISES)
def test_chosen_slices_survive_noise(noise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best slices in the end, over 2,000 steps of simulated time that tuners of tests/tuning
    meet, too.
    """
    def forward(length: int, context: int) -> float:
        return 1.0 + length / 20 + 1e-4 * length * context

    @functools.cache
    def seconds(slices: tuple[int, ...]) -> float:
        return SliceProfile(length=64, multiple=1, stages=4, micro_batches=2, forward=forward,
                            backward=forward).pipeline(slices).simulate().seconds

    monkeypatch.setattr(terapipe, "transfer_s", lambda step, shape: 1e-3)
    monkeypatch.setattr(terapipe.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(terapipe, "comm_of",
                        lambda: SimpleNamespace(all_reduce=lambda x, op: x))
    best = min(seconds((64 // n,) * n) for n in (1, 2, 4, 8))
    for seed in range(3):
        found, clock, total, measured = terapipe.SliceTrials(64, 1), Noise(noise, seed), 0.0, 0
        for clock.step in range(STEPS):
            slices, timed = found.next(64)
            slow = clock()
            starts = [sum(slices[:i]) for i in range(len(slices))]
            found.after(SimpleNamespace(
                timed=timed, stages=4, batches=2, device=torch.device("cpu"),
                shapes=lambda: ((64, 1, 8), (64, 1, 8)),
                seconds={(kind, length, start): [slow * forward(length, start)] * 2
                         for length, start in zip(slices, starts, strict=True)
                         for kind in ("forward", "backward")} if timed else {}))
            total, measured = total + seconds(slices), measured + timed
        assert seconds(found.next(64)[0]) <= best / 0.95
        assert total <= AIM * STEPS * best and measured <= TRIALS * STEPS, (total, measured)


@pytest.mark.fast
def test_a_number_of_slices_may_be_as_large_as_the_sequence_allows() -> None:
    assert given_slices("4", 8, 2) == (2, 2, 2, 2) and given_slices("1", 8, 2) == (8,)
    for text in ("5", "0"):
        with pytest.raises(ValueError, match="pipeline.slices"):
            given_slices(text, 8, 2)
