"""Pipeline schedules: the seam, and equal numbers under each of them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin.config import PipelineConfig
from moe_plugin.hosts.megatron.pipeline import scheduled, schedules
from moe_plugin.planner.pipeline.choice import choose
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, PP2, TP2, refusal, trained

pytestmark = pytest.mark.megatron


def _native(**passes: Any) -> list[Any]:
    return [passes]


def test_what_a_schedule_returns_takes_the_place_of_megatrons_function(
        own_entries: None) -> None:
    built = []

    def counted(settings: PipelineConfig, native: Any) -> Any:
        """Counts how often it is built."""
        built.append(settings.schedule)
        return lambda **passes: native(**passes) + ["scheduled"]

    get = scheduled(lambda size=None: _native, PipelineConfig)
    assert get() is get(size=2) is _native
    schedules.forget("terapipe")
    schedules.register("terapipe")(counted)
    get = scheduled(lambda size=None: _native, lambda: PipelineConfig(schedule="terapipe"))
    assert get()(forward_only=True) == get(size=2)(forward_only=True) == [
        {"forward_only": True}, "scheduled"]
    assert built == ["terapipe"]


def test_a_script_without_the_seam_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_plugin.hosts.megatron import script

    monkeypatch.setattr(script, "training_module", lambda name: ModuleType(name))
    script.check_seam(PipelineConfig())
    with pytest.raises(ValueError, match="must be '1f1b' with this Megatron.*get_forward_backward"):
        script.check_seam(PipelineConfig(schedule="eager-1f1b"))


def test_fairseq_has_no_stages() -> None:
    from moe_plugin.checkpoint.formats.fairseq.translate import run_config

    class Flags:
        pipeline_schedule = "eager-1f1b"

    with pytest.raises(ValueError, match="pipeline.schedule='eager-1f1b'.*no pipeline stages"):
        run_config(Flags())


def test_slices_need_a_schedule_that_cuts() -> None:
    with pytest.raises(ValueError, match="pipeline.slices='4'.*terapipe"):
        PipelineConfig(slices="4")


SGD = ["--optimizer", "sgd", "--sgd-momentum", "0", "--lr", "0.3", "--lr-decay-style", "constant",
       "--train-iters", "3"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform",
             "--recompute-num-layers", "1"]


def _steps(args: Any, config: Any, start: str = "", save: str = "",
           schedule: list[Any] | None = None) -> dict[str, Any]:
    """Losses, gradient norms, and after each step all gradients and weights of this stage."""
    from moe_plugin.hosts.megatron.report import RunLog
    from moe_plugin.hosts.megatron.trainer import arguments, checkpoint, model, train
    from moe_plugin.hosts.megatron.trainer.train import seed_everything

    seed_everything(args.seed)
    tokenizer, train_set, _ = train.make_datasets(args)
    training = model.build(args, config, arguments.our_settings(args), tokenizer.vocab_size)
    if start:
        checkpoint.load(start, training)
    if save:
        checkpoint.save(save, training, checkpoint.Progress())
    loop = train.Loop(args, training, RunLog(None), train_set, None)
    records: list[dict[str, Any]] = []
    loop.log.write = records.append  # type: ignore[method-assign]
    if schedule is not None:
        schedule.append(loop.schedule)
    found: dict[str, Any] = {}
    step = loop.step

    def kept(batches: list[Any], rate: float) -> Any:
        done = step(batches, rate)
        for name, parameter in training.bare()[0].named_parameters():
            found[f"{len(found)} {name} grad"] = parameter.main_grad.clone()
            found[f"{len(found)} {name}"] = parameter.detach().clone()
        return done

    loop.step = kept  # type: ignore[method-assign]
    loop.run(checkpoint.Progress())
    found["losses"] = torch.tensor([r["lm_loss"] for r in records])
    found["balance"] = torch.tensor([list(r["aux_losses"].values()) for r in records])
    found["norms"] = torch.tensor([r["grad_norm"] for r in records])
    return found


def _differences(cases: list[list[str]], save: str = "") -> list[tuple[list[str], list[float]]]:
    """For each case: what is not bit for bit that of 1F1B, and the losses."""
    from moe_plugin.hosts.megatron.trainer import arguments, train

    found = []
    for number, argv in enumerate(cases):
        by_schedule = []
        for schedule in ("1f1b", "eager-1f1b"):
            args = arguments.parser().parse_args([*argv, "--pipeline-schedule", schedule])
            if number == 0 and schedule == "1f1b":
                train.start(args)
            else:
                arguments.check(args, torch.distributed.get_world_size())
            first = save if not by_schedule else ""
            by_schedule.append(_steps(args, arguments.transformer_config(args, cpu=True),
                                      save=first and f"{first}/{number}"))
        native, eager = by_schedule
        found.append(([name for name in native if not torch.equal(native[name], eager[name])],
                      eager["losses"].tolist()))
    return found


def _one_stage(cases: list[list[str]], start: str) -> list[list[float]]:
    from moe_plugin.hosts.megatron.trainer import arguments, train

    found = []
    for number, argv in enumerate(cases):
        args = arguments.parser().parse_args(argv)
        if number == 0:
            train.start(args)
        else:
            arguments.check(args, 1)
        config = arguments.transformer_config(args, cpu=True)
        found.append(_steps(args, config, start=f"{start}/{number}")["losses"].tolist())
    return found


def _without(argv: list[str], name: str) -> list[str]:
    at = argv.index(name)
    return argv[:at] + argv[at + 2:]


@pytest.mark.distributed
def test_eager_equals_1f1b_and_one_stage(data: str, tmp_path: Path) -> None:
    """MoE and dense, four micro-batches a step; bit for bit, gradients and weights of three steps.
    """
    moe = [*MODEL, "--data-path", data, *SGD]
    cases = [moe, _without(moe, "--num-experts")]
    ranks = on_ranks(2, _differences, [[*argv, *PP2] for argv in cases], str(tmp_path))
    one = on_ranks(1, _one_stage, cases, str(tmp_path))[0]
    for number, case in enumerate(zip(*ranks, strict=True)):
        assert all(not wrong for wrong, _ in case), case
        assert case[0][1] == case[1][1] and case[0][1][0] - case[0][1][-1] > 0.1
        torch.testing.assert_close(case[0][1], one[number], rtol=2e-5, atol=0)


SIZES = [(1,), (1 << 20,), (3, 7), (1 << 21,), (2,)]


def _crossing() -> list[float]:
    """Both stages send everything before they receive anything; sums of what arrives."""
    from moe_plugin.hosts.megatron.pipeline.links import Links

    group = torch.distributed.group.WORLD
    links = Links(group, group, SIZES, SIZES, torch.float32, torch.device("cpu"))
    sender = links.outputs or links.input_grads
    receiver = links.inputs or links.output_grads
    for number, shape in enumerate(SIZES):
        sender.send(torch.full(shape, number + 1.0))
    got = [receiver.next() for _ in SIZES]
    links.finish()
    assert [tuple(tensor.shape) for tensor in got] == SIZES
    return [float(tensor.min() + tensor.max()) for tensor in got]


def _alive(argv: list[str]) -> list[int]:
    """Most micro-batches alive on this stage in each step of eager 1F1B."""
    from moe_plugin.hosts.megatron.pipeline import executor

    most, run = [], executor.Step.run

    def counted(self: Any) -> Any:
        done = run(self)
        most.append(self.most_alive)
        return done

    executor.Step.run = counted  # type: ignore[method-assign]
    trained(argv)
    executor.Step.run = run  # type: ignore[method-assign]
    return most


def _chosen(argv: list[str], memories: list[str]) -> list[Any]:
    """With auto and each memory: what is not bit for bit that of 1F1B, the choice, the profile."""
    from moe_plugin.hosts.megatron.trainer import arguments, train

    found: list[Any] = []
    for number, extra in enumerate([["--pipeline-schedule", "1f1b"], *(
            ["--pipeline-schedule", "auto", "--pipeline-memory", memory] for memory in memories)]):
        args = arguments.parser().parse_args([*argv, *extra])
        if number == 0:
            train.start(args)
        else:
            arguments.check(args, torch.distributed.get_world_size())
        schedule: list[Any] = []
        found.append((_steps(args, arguments.transformer_config(args, cpu=True),
                             schedule=schedule), schedule))
    (native, _), *others = found
    return [([name for name in native if not torch.equal(native[name], auto[name])],
             schedule.chosen.schedule, schedule.profile) for auto, [schedule] in others]


@pytest.mark.distributed
def test_auto_measures_and_takes_what_fits(data: str) -> None:
    argv = [*MODEL, *PP2, "--data-path", data, *SGD]
    every = on_ranks(2, _chosen, argv, ["8GiB"])
    for [(wrong, chosen, profile)] in every:
        assert not wrong and profile == every[0][0][2] and chosen == choose(profile).schedule
        assert profile.transport == "gloo" and min(profile.activation_bytes) > 2**16
        assert min([*profile.forward_s, *profile.backward_s, profile.transfer_s]) > 0
    for message in on_ranks(2, refusal, [*argv, "--pipeline-schedule", "auto",
                                         "--pipeline-memory", "1KiB"]):
        assert "memory_bytes=1024 is too little" in message


@pytest.mark.distributed
def test_transfers_of_any_sizes_cross() -> None:
    assert on_ranks(2, _crossing) == 2 * [[2.0, 4.0, 6.0, 8.0, 10.0]]


@pytest.mark.distributed
def test_activations_alive_and_virtual_stages(data: str) -> None:
    eager = [*MODEL, *PP2, "--data-path", data, "--train-iters", "2", "--pipeline-schedule",
             "eager-1f1b"]
    assert on_ranks(2, _alive, eager) == [[3, 3], [1, 1]]
    virtual = [*eager, "--num-virtual-stages-per-pipeline-rank", "2", "--num-layers", "4"]
    for message in on_ranks(2, refusal, virtual):
        assert "virtual stages, num_virtual_stages_per_pipeline_rank=2" in message, message
        assert "use pipeline.schedule=1f1b" in message


WIDE = ["--num-layers", "4", "--global-batch-size", "16"]  # eight micro-batches
SHARED = ["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "2",
          "--num-layers", "4"]
PPMOE = [*SHARED, "--moe-dispatch", "index_slice"]
PARM = [*SHARED, "--moe-replicas", "2", "--moe-replicas-schedule"]
SLOTS = ["--moe-dispatch", "padded", "--moe-capacity-factor", "1.25"]
BF16 = ["--bf16", "--use-distributed-optimizer", "--optimizer", "adam", "--lr", "3e-3"]
MANY = {
    "four stages": ["--pipeline-model-parallel-size", "4", *WIDE],
    "four stages, dense, recomputation": [
        "--pipeline-model-parallel-size", "4", *WIDE, "--moe-layer-freq", "0,0,0,0", *RECOMPUTE],
    "PP2 EP2": [*PP2, *EP2, "--overlap-grad-reduce"],
    "PP2 EP2, Adam": [*PP2, *EP2, "--use-distributed-optimizer", "--overlap-grad-reduce",
                      "--overlap-param-gather", "--optimizer", "adam", "--lr", "3e-3"],
    "recomputation, unequal layers": [*PP2, *RECOMPUTE, "--calculate-per-token-loss",
                                      "--moe-layer-freq", "0,1"],
    "TP2 PP2": [*PP2, *TP2],
    "PPMoE": [*PP2, *PPMOE],
    "PPMoE, sequence parallel": [*PP2, *PPMOE, "--sequence-parallel", *RECOMPUTE],
    "PPMoE, bf16": [*PP2, *PPMOE, *BF16, *RECOMPUTE],
    "dropout, jitter": [*PP2, "--hidden-dropout", "0.1", "--attention-dropout", "0.1",
                        "--moe-input-jitter-eps", "0.1", *RECOMPUTE],
    "activations recomputed": [*PP2, "--moe-activations", "recompute"],
    "activations swapped": [*PP2, "--moe-activations", "swap", "--moe-activation-smallest", "1KiB"],
    "Parm S1": [*PP2, *PARM, "s1"],
    "Parm S2": [*PP2, *PARM, "s2", *SLOTS, *RECOMPUTE],
    "Parm, bf16": [*PP2, *PARM, "auto", *SLOTS, *BF16],
}
PP4 = ["--pipeline-model-parallel-size", "4"]
EIGHT = {"PPMoE, four stages": [*PP4, *PPMOE, *RECOMPUTE], "Parm, four stages": [*PP4, *PARM, "s1"]}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("sizes", MANY.values(), ids=MANY.keys())
def test_eager_equals_1f1b_on_four_ranks(sizes: list[str], data: str, tmp_path: Path) -> None:
    """Bit for bit; the losses of stages are also those of one rank."""
    argv = [*MODEL, "--data-path", data, *SGD]
    alone = sizes is MANY["four stages"]
    ranks = on_ranks(4, _differences, [[*argv, *sizes]], str(tmp_path) if alone else "",
                     timeout_s=400)
    assert all(not wrong for [(wrong, _)] in ranks), ranks
    if alone:
        one = on_ranks(1, _one_stage, [[*argv, *WIDE]], str(tmp_path))[0]
        torch.testing.assert_close(ranks[0][0][1], one[0], rtol=2e-5, atol=0)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("sizes", EIGHT.values(), ids=EIGHT.keys())
def test_experts_without_an_exchange_between_nodes_under_eager_1f1b(sizes: list[str],
                                                                    data: str) -> None:
    """Four stages of two tensor-parallel ranks, which share the experts."""
    argv = [*MODEL, "--data-path", data, *SGD, *sizes, "--global-batch-size", "16"]
    ranks = on_ranks(8, _differences, [argv], timeout_s=500)
    assert all(not wrong for [(wrong, _)] in ranks), ranks


def _virtual(argv: list[str], save: str) -> list[dict[str, list[Any]]]:
    """Losses, balance losses and gradient norms of 1F1B and, from the same weights, of the
    interleaved schedule of two virtual stages a rank.
    """
    from moe_plugin.hosts.megatron.compat import core
    from moe_plugin.hosts.megatron.trainer import arguments, train

    found = []
    for own in ([], ["--num-virtual-stages-per-pipeline-rank", "2"]):
        core.destroy_groups()
        args = arguments.parser().parse_args([*argv, *own])
        train.start(args)
        steps = _steps(args, arguments.transformer_config(args, cpu=True),
                       start=save if own else "", save="" if own else save)
        found.append({name: steps[name].tolist() for name in ("losses", "balance", "norms")})
    return found


VIRTUAL = {
    "PP2 EP2": [*PP2, *EP2, "--num-layers", "4"],
    "PPMoE": [*PP2, *PPMOE],
    "PPMoE, sequence parallel, recomputation": [*PP2, *PPMOE, "--sequence-parallel", *RECOMPUTE],
    "Parm S1": [*PP2, *PARM, "s1"],
    "Parm S2, recomputation": [*PP2, *PARM, "s2", *SLOTS, *RECOMPUTE],
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("sizes", VIRTUAL.values(), ids=VIRTUAL.keys())
def test_virtual_stages_equal_1f1b(sizes: list[str], data: str, tmp_path: Path) -> None:
    """SGD, so that a gradient that counts twice shows in the next loss."""
    argv = [*MODEL, "--data-path", data, *SGD, *sizes]
    for native, virtual in on_ranks(4, _virtual, argv, str(tmp_path), timeout_s=400):
        assert native["losses"][0] - native["losses"][-1] > 0.1
        for name, values in native.items():
            torch.testing.assert_close(torch.tensor(virtual[name]), torch.tensor(values),
                                       rtol=1e-4, atol=1e-6)
