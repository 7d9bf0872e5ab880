"""`--weights-on host` in Megatron's training script: the bits of a model on the device; the losses
of layers that recompute or swap their activations; `--skip-train` evaluates a checkpoint, and
continues a text, wherever its experts lie.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.observe.history import read_run
from moe_plugin.planner.offload.schedule import load_profile
from tests.hosts.megatron.layers import Case, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks, run_main
from tests.hosts.megatron.training import (
    EP2,
    MODEL,
    PP2,
    TRAIN,
    Run,
    argv_for,
    parsed,
    ran,
    records_of,
    refusal,
    trained,
    when_built,
)

UNTIED = [*MODEL, "--untie-embeddings-and-output-weights", "--train-iters", "4",
          "--eval-interval", "2", "--eval-iters", "3", "--split", "80,20,0"]
KINDS = {
    "adam": [],
    "sgd": ["--optimizer", "sgd", "--clip-grad", "0.1"],
    "rope, dense layers": ["--position-embedding-type", "rope", "--swiglu", "--normalization",
                           "RMSNorm", "--num-layers", "3", "--moe-layer-freq", "2",
                           "--clip-grad", "0", "--moe-router", "sigmoid_bias"],
    "fused, biases": ["--moe-fused-adam", "--moe-router-score-function", "sigmoid"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_a_model_on_the_device(kind: str, data: str, tmp_path: Path) -> None:
    stats = ["--moe-stats-jsonl", str(tmp_path / "stats" / "stats.jsonl"), "--moe-stats-interval",
             "2"]
    argv = [*UNTIED, *KINDS[kind], "--data-path", data]
    if "biases" in kind:
        argv.remove("--disable-bias-linear")
    host = ["--weights-on", "host", "--moe-activation-path", str(tmp_path)]
    whole, streamed = (records_of(1, [*argv, *more], tmp_path / name) for more, name in (
        ([], "whole.jsonl"), ([*host, *stats], "streamed.jsonl")))
    assert [row["iteration"] for row in whole][:6] == [1, 2, 2, 3, 4, 4]
    assert whole[0]["lm_loss"] != whole[4]["lm_loss"]
    norms = [[record.pop("grad_norm", None) for record in run] for run in (whole, streamed)]
    assert streamed == whole
    if "--clip-grad" not in KINDS[kind] or "0" != argv[argv.index("--clip-grad") + 1]:
        assert norms[0] == norms[1] and norms[0][0] > 0
    copies = read_run(tmp_path / "stats").copies["weights"]
    assert sum(record.bytes for record in copies) > 0


def test_the_scale_of_auxiliary_losses_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_plugin.hosts.megatron.compat import aux_losses, core

    scaler = core.moe_utils.MoEAuxLossAutoScaler
    monkeypatch.setattr(scaler, "main_loss_backward_scale", torch.tensor(8.0))
    with aux_losses.auxiliary_scale(torch.ones(1) / 4), aux_losses.scaled_losses(2.0):
        assert float(scaler.main_loss_backward_scale) == 0.5
    assert float(scaler.main_loss_backward_scale) == 8.0


def test_a_resumed_run_goes_on(data: str, tmp_path: Path) -> None:
    host = ["--weights-on", "host", "--moe-activation-path", str(tmp_path), "--weights-memory",
            "2MiB", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    argv = [*UNTIED, *host, "--data-path", data, "--lr-decay-iters", "4"]
    saved = str(tmp_path / "saved")
    whole, first, rest, valid = (records_of(1, [*argv, *more], tmp_path / f"{name}.jsonl")
                                 for name, more in {
        "whole": [],
        "first": ["--exit-interval", "2", "--save", saved, "--save-interval", "2"],
        "rest": ["--load", saved], "valid": ["--load", saved, "--skip-train"]}.items())
    assert first == whole[:3] and rest == whole[3:]
    assert [row["iteration"] for row in valid] == [2]


def test_a_lone_peer_goes_on_with_its_outer_optimizer(data: str, tmp_path: Path) -> None:
    """Its average is of its own weights; with an outer optimizer it is not, and goes on, too."""
    coordination = pytest.importorskip("torchft.coordination")
    argv = [*UNTIED, "--weights-on", "host", "--moe-activation-path", str(tmp_path), "--data-path",
            data, "--lr-decay-iters", "4"]
    outer = ["--moe-average-every", "2", "--moe-outer-lr", "0.5"]
    saved = str(tmp_path / "saved")

    def records(name: str, *more: str) -> list[dict[str, float]]:
        lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
        peer = ["--moe-lighthouse", lighthouse.address()] if more else []
        try:
            found = records_of(1, [*argv, *more, *peer], tmp_path / f"{name}.jsonl")
        finally:
            lighthouse.shutdown()
        members = [row.pop("replicas") for row in found if "replicas" in row]
        assert members == [1] * len(members) and bool(members) == bool(peer)
        return found

    assert records("mean", "--moe-average-every", "2") == records("alone")
    whole = records("whole", *outer)
    first = records("first", *outer, "--exit-interval", "2", "--save", saved)
    rest = records("rest", *outer, "--load", saved)
    assert first == whole[:3] and rest == whole[3:]


def test_a_checkpoint_of_other_settings_is_named(data: str, tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    argv = [*UNTIED, "--weights-on", "host", "--moe-activation-path", str(tmp_path),
            "--data-path", data, "--train-iters"]
    assert on_ranks(1, refusal, [*argv, "1", "--save", saved]) == [""]
    for more, said in ((["--optimizer", "sgd"], "has optimizer='AdamW', but this run has optimizer="
                        "'SGD'"), (["--norm-epsilon", "0.1"], ""),
                       (["--add-qkv-bias"], "has add_qkv_bias=False, but this run"),
                       (["--optimizer", "sgd", "--skip-train"], "")):
        [found] = on_ranks(1, refusal, [*argv, "2", *more, "--load", saved])
        assert said in found and bool(said) == bool(found), found


def test_dropout_is_repeated_in_backward(data: str, tmp_path: Path) -> None:
    """A recomputation with other masks would not descend: gradients would be those of another
    function.
    """
    [(same, again)] = on_ranks(1, _gradients, [
        *UNTIED, "--data-path", data, "--weights-on", "host", "--moe-activation-path",
        str(tmp_path), "--hidden-dropout", "0.3", "--attention-dropout", "0.3"])
    assert same and again


def _gradients(argv: list[str]) -> tuple[bool, bool]:
    """Whether a part's two passes draw the same numbers, and different ones in other parts."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    chunk = when_built(argv, lambda run: run.chunks[0])

    def drawn(part: int) -> torch.Tensor:
        with chunk.trainer.randomness(0, part):
            own = torch.rand(8)
            with get_cuda_rng_tracker().fork():
                return torch.cat([own, torch.rand(8)])

    first = drawn(1)
    torch.rand(3)
    return torch.equal(first, drawn(1)), not (first[:8, None] == torch.cat(
        [first[8:], drawn(2)])).any()


def _refused_by_name(given: dict[str, Any]) -> list[str]:
    from moe_plugin.hosts.megatron.streamed import build

    found = []
    for name, value in given.items():
        args = parsed([*UNTIED, "--data-path", "x", "--train-iters", "1",
                       "--weights-on", "host"])
        args.gradient_accumulation_fusion = False
        setattr(args, name, value)
        try:
            build(None, args, {"offload.weights": "host"})  # type: ignore[arg-type]
        except ValueError as error:
            found.append(str(error))
    return found


def test_arguments_of_megatrons_own_parser_are_refused_by_name() -> None:
    names = ["freeze_all_layers", "use_mup", "no_load_optim", "no_save_optim",
             "exit_on_missing_checkpoint", "ckpt_convert_format", "no_weight_decay_cond_type",
             "fp8"]
    sizes = {"pipeline_model_parallel_size": 2, "context_parallel_size": 4}
    [found] = on_ranks(1, _refused_by_name, {
        **sizes, **dict.fromkeys([*names, "gradient_accumulation_fusion"], True)})
    said = ["--pipeline-model-parallel-size 2 in Megatron: use 1, because a rank computes all",
            "--context-parallel-size 4 in Megatron: use 1, because sequences"]
    said += ["--" + name.replace("_", "-") for name in names]
    for message, part in zip(found, [*said, "--no-gradient-accumulation-fusion"], strict=True):
        assert part in message


@pytest.mark.parametrize(("more", "message"), [
    (["--moe-pre-gate", "1"], "router.pre_gate"),
    (["--moe-router", "hash", "--moe-hash-vocabulary", "257"],
     "router hash .* do not receive token ids"),
    (["--moe-activations", "swap"], "offload.activations=swap"),
    (["--moe-lighthouse", "http://a:1"], "--moe-lighthouse without --moe-average-every"),
    (["--moe-average-every", "5"], "--moe-average-every 5 without --moe-lighthouse"),
    (["--weights-memory", "64KiB"], "limit=65536 bytes is smaller than two segments"),
    (["--load", "here"], "was not written with --weights-on host"),
])
def test_what_does_not_fit_is_refused(more: list[str], message: str, data: str, tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "iter_0000002").mkdir(parents=True)
    (tmp_path / "here" / "latest_checkpointed_iteration.txt").write_text("2")
    argv = [*UNTIED, "--data-path", data, "--weights-on", "host", *more,
            "--train-iters", "2"]
    log = run_main(TRAIN, ["--cpu", *argv], 1, tmp_path, fails=True)
    assert re.search("error: .*" + message, log), log


def _curve(argv: list[str]) -> tuple[Any, Any]:
    """(losses, norms and balance losses, policies and bytes that were copied) of a run."""
    from moe_plugin.memory.activations.offload import Activations

    used: list[Any] = []

    def built(run: Run) -> None:
        used.append(run.feature(Activations))

    run = ran(argv, built)
    curve = [(r["lm_loss"], r["grad_norm"], r["aux_losses"]) for r in run.steps_logged]
    return curve, used[0] and (used[0].policies, used[0].swapper.copier.counters.bytes)


@pytest.mark.parametrize("sizes", [EP2, PP2], ids=["EP2", "PP2"])
def test_losses_are_those_of_keeping(sizes: list[str], data: str, tmp_path: Path) -> None:
    profile = str(tmp_path / "profile.json")
    argv = argv_for(data, 4, "--num-layers", "4", "--hidden-dropout", "0.1", "--attention-dropout",
                    "0.1", *sizes)
    moved = ["--moe-activation-path", str(tmp_path), "--moe-activation-smallest", "0"]
    stats = ["--moe-stats-jsonl", str(tmp_path / "stats" / "stats.jsonl"),
             "--moe-stats-interval", "1"]
    ways = [[], ["--moe-activations", "recompute"], ["--moe-activations", "swap", *moved, *stats],
            ["--moe-activations", "auto", "--moe-activation-memory", "400KiB",
             "--moe-activation-profile", profile, *moved],
            ["--moe-activations", "keep,recompute,keep,keep"]]
    pre_gate, stages_layers = ["--moe-pre-gate", "1"], []
    # `auto` swaps in its first step, and recomputes in the next two
    for rank in zip(*(on_ranks(2, _curve, [*argv, *way]) for way in (
            *ways, pre_gate, [*pre_gate, *ways[3]])), strict=True):
        (kept, nothing), *others = rank
        (pre_gated, _), *others_pre_gated = others[4:]
        *others, (named, (given, _)) = others[:4]
        assert [curve for curve, _ in others_pre_gated] == [pre_gated] and pre_gated != kept
        assert nothing is None and len(kept) == 4
        assert [curve for curve, _ in others] == [kept] * 3
        (_, (_, again)), (_, (_, swapped)), (_, (policies, _)) = others
        copied = read_run(tmp_path / "stats").copies["activations"]
        assert sum(record.bytes for record in copied) > 0 and {r.ranks for r in copied} == {2}
        assert again == 0 < swapped and len(policies) == (2 if sizes is PP2 else 4)
        assert set(policies) != {"keep"} and named == kept
        stages_layers.append(given)
    assert sorted(stages_layers) == ([("keep", "keep"), ("keep", "recompute")] if sizes is PP2
                                     else [("keep", "recompute", "keep", "keep")] * 2)
    files = [tmp_path / f"profile.stage{n}.json" for n in range(2)] if sizes is PP2 else [profile]
    assert all(len(load_profile(file).blocks) == len(policies) for file in files)


def _with_graphs(made_by: str) -> str:
    from moe_plugin.config import OffloadConfig
    from moe_plugin.hosts.megatron.script_features import activations_of

    case = Case()
    initialise_parallel(case)
    config = case.config()
    config.cuda_graph_impl = made_by
    with pytest.raises(ValueError) as refused:
        activations_of(OffloadConfig(activations="swap"), config, [])
    return str(refused.value)


def test_graphs_do_not_fit() -> None:
    [said], [without] = (on_ranks(1, _with_graphs, made_by)
                         for made_by in ("transformer_engine", "none"))
    assert "does not fit Megatron's cuda_graph_impl" in said
    assert "no transformer layer" in without


# in one layout, where bits are equal: training may leave another one to the resident model
EVALUATION = ["--split", "8,2,0", "--eval-iters", "3", "--moe-parallel", "fixed"]
LENGTH = 32


def _continued(run: Run) -> tuple[list[int], float]:
    """Greedy tokens after three given ones, by Megatron's cache of keys and values, and the sum of
    all logits; one pipeline stage.
    """
    from megatron.core.inference.contexts import StaticInferenceContext

    tokens_BT = torch.zeros(1, LENGTH, dtype=torch.int64)
    tokens_BT[0, :3] = torch.tensor([72, 101, 108])
    model = run.model.eval()
    context, total, begin = StaticInferenceContext(1, LENGTH), 0.0, 0
    with torch.no_grad():
        for end in range(3, 9):
            mask = torch.ones(1, 1, end - begin, end, dtype=torch.bool).triu(begin + 1)
            logits_BTV = model(tokens_BT[:, begin:end], torch.arange(begin, end)[None], mask,
                               inference_context=context, runtime_gather_output=True)
            context.increment_sequence_len_offset(end - begin)
            total += float(logits_BTV.double().sum())
            tokens_BT[0, end], begin = logits_BTV[0, -1].argmax(), end
    return tokens_BT[0, :9].tolist(), total


def _evaluated(argv: list[str]) -> tuple[Any, ...]:
    """(validation loss, text, counters of the store, parameters of experts, findings in the log)
    """
    said: list[str] = []
    log = logging.getLogger("moe_plugin.observe.sinks")
    log.addFilter(lambda record: said.append(record.getMessage()) or True)
    run = ran(argv)
    [*_, record] = [row for row in run.records if "valid_loss" in row]
    assert record["iteration"] == 2 and (run.optimizer is None) == ("--skip-train" in argv)
    stores = [layer.experts.store.counters.as_dict() for layer in run.moe_layers()
              if layer.experts.stored]
    count = sum(1 for layer in run.moe_layers() for _ in layer.experts.parameters())
    text = None if "--pipeline-model-parallel-size" in argv else _continued(run)
    return record["valid_loss"], text, stores, count, tuple(said)


def _write_experts(folder: str, path: str) -> None:
    from moe_plugin.checkpoint.formats.base import open_source
    from moe_plugin.checkpoint.formats.megatron import format as _registers  # noqa: F401
    from moe_plugin.checkpoint.layers import write_experts

    with open_source(Path(folder)) as source:
        write_experts(source, Path(path))


@pytest.mark.parametrize("flags", [EP2, PP2, [*EP2, "--moe-pre-gate", "1", "--bf16"]],
                         ids=["EP2", "PP2", "EP2, pre-gates, bf16"])
def test_text_and_loss_are_those_of_the_resident_model(flags: list[str], data: str,
                                                       tmp_path: Path) -> None:
    """The host's store has one slot."""
    argv = argv_for(data, 2, *flags, *EVALUATION)
    folder, path = str(tmp_path / "run"), str(tmp_path / "experts.safetensors")
    on_ranks(2, trained, [*argv, "--save", folder])
    _write_experts(folder, path)
    evaluation = [*argv, "--skip-train", "--load", folder]
    resident, host, disk = (on_ranks(2, _evaluated, [*evaluation, *more]) for more in (
        [], ["--moe-experts-on", "host", "--moe-experts-cache",
             "6KiB" if "--bf16" in flags else "12KiB"],
        ["--moe-experts-on", "disk", "--moe-experts-store-path", path]))
    assert host[1][4] == ()  # rank 0 says it
    if "--moe-pre-gate" not in flags:
        assert [said.endswith("[waits_for_experts]") for said in host[0][4]] == [True]
        assert "% of the calls of layer1 wait for experts" in host[0][4][0]  # most, by time
    for kept, in_memory, in_file in zip(resident, host, disk, strict=True):
        assert kept[:2] == in_memory[:2] == in_file[:2]
        assert kept[3] == in_memory[3] > 0 == in_file[3] and not kept[2] and kept[4] == ()
        for stores in (in_memory[2], in_file[2]):
            assert stores and all(store["misses"] + store["prefetched"] > 0 for store in stores)
        assert (kept[1] is None) == (flags is PP2)
