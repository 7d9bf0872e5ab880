"""Pipeline schedules: the seam, and equal numbers under each of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moe_plugin.config import PipelineConfig
from moe_plugin.hosts.megatron.pipeline import scheduled, schedules
from moe_plugin.planner.pipeline.choice import choose
from moe_plugin.planner.trials import Steady
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import (
    EP2,
    MODEL,
    PP2,
    RECOMPUTE,
    TP2,
    VERSION,
    Run,
    argv_for,
    ran,
    refusal,
    trained,
)

DENSE = ["--moe-layer-freq", "[0,0]"]
logs_dense = pytest.mark.skipif(VERSION >= (0, 20), reason="Megatron's log refuses --num-experts "
                                "without a layer of experts")


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
    with pytest.raises(ValueError, match="is not supported by this Megatron.*get_forward_backward"):
        script.check_seam(PipelineConfig(schedule="eager-1f1b"))


@pytest.mark.parametrize("made_by", ["local", "transformer_engine", "full_iteration"])
def test_graphs_are_refused(made_by: str) -> None:
    """Megatron's own schedules alone say in which micro-batch a graph is."""
    from moe_plugin.hosts.megatron.pipeline.eager import EagerSchedule

    schedule: Any = EagerSchedule.__new__(EagerSchedule)
    schedule.settings = PipelineConfig(schedule="eager-1f1b")
    EagerSchedule.check(schedule, {}, SimpleNamespace(cuda_graph_impl="none"))
    with pytest.raises(ValueError, match=f"cuda_graph_impl='{made_by}', which must be 'none'"):
        EagerSchedule.check(schedule, {}, SimpleNamespace(cuda_graph_impl=made_by))


def test_fairseq_has_no_stages() -> None:
    from moe_plugin.hosts.fairseq.translate import run_config

    class Flags:
        pipeline_schedule = "eager-1f1b"

    with pytest.raises(ValueError, match="pipeline.schedule='eager-1f1b'.*no pipeline stages"):
        run_config(Flags())


def test_slices_need_a_schedule_that_cuts() -> None:
    with pytest.raises(ValueError, match="pipeline.slices='4'.*terapipe"):
        PipelineConfig(slices="4")


SGD = ["--optimizer", "sgd", "--sgd-momentum", "0", "--lr", "0.3", "--lr-decay-style", "constant",
       "--train-iters", "3"]


def steps(argv: list[str], schedule: list[Any] | None = None) -> dict[str, Any]:
    """Losses, gradient norms, and after each step all gradients and weights of this stage.

    schedule: gets what runs the passes.
    """
    found: dict[str, Any] = {}

    def stepped(run: Run) -> None:
        for name, parameter in run.model.named_parameters():
            found[f"{len(found)} {name} grad"] = parameter.main_grad.clone()
            found[f"{len(found)} {name}"] = parameter.detach().clone()

    if schedule is not None:
        _note(schedule)
    run = ran(argv, stepped=stepped)
    records = run.steps_logged
    found["losses"] = torch.tensor([r["lm_loss"] for r in records])
    found["balance"] = torch.tensor([list(r["aux_losses"].values()) for r in records])
    found["norms"] = torch.tensor([r["grad_norm"] for r in records])
    return found


def _note(schedule: list[Any]) -> None:
    """Append what takes the place of Megatron's passes, when it is made."""
    from moe_plugin.hosts.megatron import pipeline

    build = pipeline.forward_backward_func

    def noted(*given: Any) -> Any:
        schedule.append(build(*given))
        return schedule[-1]

    pipeline.forward_backward_func = noted


def begun(world: int, argv: list[str], folder: Path,
          count: int = 3) -> tuple[list[str], list[float]]:
    """Arguments that go on from one step of a run, and that run's losses of the next steps."""
    more = ["--train-iters", str(count + 1)]
    found, *_ = on_ranks(world, _losses, [*argv, *more, "--save", str(folder), "--save-interval",
                                          "1"])
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    return [*argv, *more, "--load", str(folder)], found[1:]


def _losses(argv: list[str]) -> list[float]:
    return [record["lm_loss"] for record in ran(argv).steps_logged]


def without(argv: list[str], name: str) -> list[str]:
    """The arguments without a flag and its value."""
    at = argv.index(name)
    return argv[:at] + argv[at + 2:]


def _eager_equals(world: int, argv: list[str], sizes: list[str]) -> list[float]:
    """Nothing of a rank is other than under 1F1B, bit for bit; the losses."""
    argv = [*argv, *sizes, "--pipeline-schedule"]
    for native, eager in zip(*(on_ranks(world, steps, [*argv, name], timeout_s=500)
                               for name in ("1f1b", "eager-1f1b")), strict=True):
        assert [name for name in native if not torch.equal(native[name], eager[name])] == []
    return eager["losses"].tolist()


@pytest.mark.parametrize("dense", [False, pytest.param(True, marks=logs_dense)],
                         ids=["MoE", "dense"])
def test_eager_equals_1f1b_and_one_stage(dense: bool, data: str, tmp_path: Path) -> None:
    """Four micro-batches a step; bit for bit, gradients and weights of three steps."""
    moe = [*MODEL, "--data-path", data, *SGD]
    argv, one = begun(1, [*moe, *DENSE] if dense else moe, tmp_path)
    losses = _eager_equals(2, argv, PP2)
    assert losses[0] - losses[-1] > 0.1
    torch.testing.assert_close(losses, one, rtol=2e-5, atol=0)


SIZES = [(1,), (1 << 20,), (3, 7), (1 << 21,), (2,)]


def _crossing() -> list[float]:
    """Both stages send everything before they receive anything; sums of what arrives."""
    from moe_plugin.hosts.megatron.pipeline.executor import Links

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


def _left_over() -> list[float]:
    """What two steps begin with; of the first a second tensor is left over."""
    from moe_plugin.hosts.megatron.pipeline.executor import Links

    group, shapes = torch.distributed.group.WORLD, [(2,)]
    links = [Links(group, group, shapes, shapes, torch.float32, torch.device("cpu"))
             for _ in range(2)]
    if group.rank() == 0:
        for number, step in ((1.0, 0), (2.0, 0), (3.0, 1)):
            links[step].outputs.send(torch.full((2,), number))
        found = [float(each.output_grads.next()[0]) for each in links]
    else:
        found = [float(each.inputs.next()[0]) for each in links]
        for each, value in zip(links, found, strict=True):
            each.input_grads.send(torch.full((2,), value))
        # let it leave
        torch.distributed.recv(torch.empty(2), 0, tag=links[1 if found[1] == 2.0 else 0].inputs.tag)
    for each in links:
        each.finish()
    return found


def test_what_a_step_leaves_over_is_not_taken_for_the_next_ones() -> None:
    assert on_ranks(2, _left_over) == 2 * [[1.0, 3.0]]


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
    return most


def _chosen(argv: list[str]) -> tuple[dict[str, Any], str, Any]:
    """What a run with auto computes, the choice, the profile."""
    from moe_plugin.hosts.megatron.pipeline import auto

    auto.Steady = partial(Steady, least=1, within=1e9)  # not up to this machine's clock
    schedule: list[Any] = []
    found = steps(argv, schedule)
    return found, schedule[0].chosen.schedule, schedule[0].profile


def test_auto_measures_and_takes_what_fits(data: str) -> None:
    argv = [*MODEL, *PP2, "--data-path", data, *SGD]
    auto = [*argv, "--pipeline-schedule", "auto", "--pipeline-memory"]
    every = on_ranks(2, _chosen, [*auto, "8GiB"])
    for native, (found, chosen, profile) in zip(on_ranks(2, steps, argv), every, strict=True):
        assert [name for name in native if not torch.equal(native[name], found[name])] == []
        assert profile == every[0][2] and chosen == choose(profile).schedule
        assert profile.transport == "gloo" and min(profile.activation_bytes) > 2**16
        assert min([*profile.forward_s, *profile.backward_s, profile.transfer_s]) > 0
    for message in on_ranks(2, refusal, [*auto, "1KiB"]):
        assert "memory_bytes=1024 is too small" in message


def test_transfers_of_any_sizes_cross() -> None:
    assert on_ranks(2, _crossing) == 2 * [[2.0, 4.0, 6.0, 8.0, 10.0]]


def test_activations_alive_and_virtual_stages(data: str) -> None:
    eager = argv_for(data, 2, *PP2, "--pipeline-schedule", "eager-1f1b")
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
        "--pipeline-model-parallel-size", "4", *WIDE, "--moe-layer-freq", "[0,0,0,0]", *RECOMPUTE],
    "PP2 EP2": [*PP2, *EP2, "--overlap-grad-reduce"],
    "PP2 EP2, Adam": [*PP2, *EP2, "--use-distributed-optimizer", "--overlap-grad-reduce",
                      "--overlap-param-gather", "--optimizer", "adam", "--lr", "3e-3"],
    "recomputation, unequal layers": [*PP2, *RECOMPUTE, "--calculate-per-token-loss",
                                      "--moe-layer-freq", "[0,1]"],
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
@pytest.mark.parametrize("sizes", MANY.values(), ids=MANY.keys())
def test_eager_equals_1f1b_on_four_ranks(sizes: list[str], data: str, tmp_path: Path) -> None:
    """Bit for bit; the losses of stages are also those of one rank."""
    argv = [*MODEL, "--data-path", data, *SGD]
    if sizes is not MANY["four stages"]:
        _eager_equals(4, argv, sizes)
        return
    argv, one = begun(1, [*argv, *WIDE], tmp_path)
    torch.testing.assert_close(_eager_equals(4, argv, sizes), one, rtol=2e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", EIGHT.values(), ids=EIGHT.keys())
def test_experts_without_an_exchange_between_nodes_under_eager_1f1b(sizes: list[str],
                                                                    data: str) -> None:
    """Four stages of two tensor-parallel ranks, which share the experts."""
    _eager_equals(8, [*MODEL, "--data-path", data, *SGD],
                  [*sizes, "--global-batch-size", "16"])


VIRTUAL = {
    "PP2 EP2": [*PP2, *EP2, "--num-layers", "4"],
    "PPMoE": [*PP2, *PPMOE],
    "PPMoE, sequence parallel, recomputation": [*PP2, *PPMOE, "--sequence-parallel", *RECOMPUTE],
    "Parm S1": [*PP2, *PARM, "s1"],
    "Parm S2, recomputation": [*PP2, *PARM, "s2", *SLOTS, *RECOMPUTE],
}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", VIRTUAL.values(), ids=VIRTUAL.keys())
def test_virtual_stages_equal_1f1b(sizes: list[str], data: str, tmp_path: Path) -> None:
    """SGD, so that a gradient that counts twice shows in the next loss."""
    argv, _ = begun(4, [*MODEL, "--data-path", data, *SGD, *sizes], tmp_path)
    for native, virtual in zip(*(on_ranks(4, _numbers, [*argv, *more], timeout_s=400) for more in (
            [], ["--num-virtual-stages-per-pipeline-rank", "2"])), strict=True):
        assert native["losses"][0] - native["losses"][-1] > 0.1
        for name, values in native.items():
            torch.testing.assert_close(virtual[name], values, rtol=1e-4, atol=1e-6)


def _numbers(argv: list[str]) -> dict[str, torch.Tensor]:
    found = steps(argv)
    return {name: found[name] for name in ("losses", "balance", "norms")}


def _split(argv: list[str]) -> tuple[dict[str, Any], list[int]]:
    """As `steps` with `--pipeline-delay-weights`; of how many linear layers and experts each
    backward pass has left the weights' gradients when its input's was sent.
    """
    from moe_plugin.hosts.megatron.pipeline.eager import SplitStep
    from moe_plugin.hosts.megatron.pipeline.executor import Sender

    counts, now = [], []
    backward, finish, send = SplitStep.backward, SplitStep.finish_backward, Sender.send

    def left() -> int:
        return sum(len(later) for later in now[-1].left.values())

    def begun(self: Any, *given: int) -> None:
        now.append(self)
        backward(self, *given)
        assert not left()

    def sent(self: Any, tensor: Any) -> None:
        if self.what == "a stage's gradients":
            counts.append(left())
        send(self, tensor)

    def finished(self: Any) -> None:
        if not self.links.input_grads:
            counts.append(left())
        finish(self)

    SplitStep.backward, SplitStep.finish_backward = begun, finished  # type: ignore[method-assign]
    Sender.send = sent  # type: ignore[method-assign]
    return steps([*argv, "--pipeline-delay-weights"]), counts


def _split_equals(world: int, argv: list[str]) -> list[list[int]]:
    """Nothing of a rank is other than under 1F1B, bit for bit; `_split`'s counts by rank."""
    native = on_ranks(world, steps, argv, timeout_s=500)
    delayed = on_ranks(world, _split, [*argv, "--pipeline-schedule", "eager-1f1b"], timeout_s=500)
    for wanted, (found, _) in zip(native, delayed, strict=True):
        assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    return [counts for _, counts in delayed]


def test_split_passes_equal_1f1b(data: str) -> None:
    """An odd number of micro-batches, a dense layer and one of experts, tied embeddings."""
    argv = [*MODEL, *PP2, "--data-path", data, *SGD, *RECOMPUTE, "--global-batch-size", "6",
            "--moe-layer-freq", "[0,1]"]
    # attention's two and those of the feed-forward layer; attention's, the experts, the output's
    assert [set(counts) for counts in _split_equals(2, argv)] == [{4}, {4}]


SPLIT = {
    "four stages": ["--pipeline-model-parallel-size", "4", *WIDE],
    "four stages, two micro-batches, recomputation, own output layer": [
        "--pipeline-model-parallel-size", "4", "--num-layers", "4", "--global-batch-size", "4",
        *RECOMPUTE, "--untie-embeddings-and-output-weights"],
    "PP2 EP2": MANY["PP2 EP2"], "TP2 PP2": MANY["TP2 PP2"],
    "TP2 PP2, whole sequences": [*PP2, *TP2[:2]],
    "PP2 EP2, Adam": [*MANY["PP2 EP2, Adam"], "--moe-shared-expert-intermediate-size", "16"],
    "PPMoE, bf16": MANY["PPMoE, bf16"],
    "strategy loop": [*PP2, "--moe-expert-compute", "loop"],
    "a second token predicted": [*PP2, "--mtp-num-layers", "1", "--position-embedding-type",
                                 "rope", "--overlap-grad-reduce"],
    "a second token predicted, own output layer": [
        *PP2, "--mtp-num-layers", "1", "--position-embedding-type", "rope",
        "--untie-embeddings-and-output-weights"],
    "activations swapped": MANY["activations swapped"],
}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SPLIT.values(), ids=SPLIT.keys())
def test_split_passes_equal_1f1b_on_four_ranks(sizes: list[str], data: str) -> None:
    """Bit for bit; every backward pass has left something."""
    assert min(min(counts) for counts in _split_equals(
        4, [*MODEL, "--data-path", data, *SGD, *sizes])) >= 2


def test_what_does_not_leave_weights_is_refused() -> None:
    from moe_plugin.hosts.megatron.pipeline.eager import check_split

    class Engine(torch.nn.Linear):
        __module__ = "megatron.core.extensions.transformer_engine"

    plain = torch.nn.Linear(2, 2)
    check_split([plain], SimpleNamespace(gradient_accumulation_fusion=False))
    for model, fused, message in (
            (plain, True, "gradient_accumulation_fusion=True, which must be off"),
            (torch.nn.Sequential(Engine(2, 2)), False, "'Engine', which must be one of")):
        with pytest.raises(ValueError, match=f"pipeline.delay_weights=True.*{message}"):
            check_split([model], SimpleNamespace(gradient_accumulation_fusion=fused))
    with pytest.raises(ValueError, match="pipeline.delay_weights=True.*eager-1f1b"):
        PipelineConfig(delay_weights=True)


@pytest.mark.fast
def test_messages_between_stages_use_the_group_of_the_stages(
        monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_plugin.hosts.megatron.pipeline import executor

    used: list[tuple[str, Any]] = []
    work = SimpleNamespace(is_completed=lambda: False)
    for name in ("isend", "irecv"):
        monkeypatch.setattr(executor.dist, name, lambda tensor, peer, group=None, tag=0, name=name:
                            used.append((name, group)) or work)
    executor.Receiver(0, [(2,)], torch.empty, "stages", 3, "outputs")
    executor.Sender(1, "stages", 3, "outputs").send(torch.ones(2))
    assert used == [("irecv", "stages"), ("isend", "stages")]


@pytest.mark.fast
def test_sent_tensors_have_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo refuses other tensors, and NCCL sends the memory between their elements."""
    from moe_plugin.hosts.megatron.pipeline import executor

    sent: list[torch.Tensor] = []
    work = SimpleNamespace(is_completed=lambda: False)
    monkeypatch.setattr(executor.dist, "isend",
                        lambda tensor, *_, **__: sent.append(tensor) or work)
    value = torch.arange(6.0).view(2, 3).t().requires_grad_()
    executor.Sender(1, "stages", 3, "outputs").send(value)
    assert sent[0].is_contiguous() and not sent[0].requires_grad and torch.equal(sent[0], value)
