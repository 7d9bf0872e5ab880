"""Whole models on Megatron's own loop in every layout: from one checkpoint each takes the steps of
one rank with Megatron's own layers, or of one rank that replays rollouts.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch

from tests.hosts.megatron.ranks import ROOT, run_main
from tests.hosts.megatron.training import SCRIPT, own_loop

pytestmark = own_loop
NATIVE = str(Path(ROOT, "tests", "hosts", "megatron", "native_script.py"))
LAUNCH = "moe_plugin.hosts.megatron.launch"
# SGD shows a wrong gradient scale in the next loss; clipping in force shows a wrong norm. With TP 2
# the vocabulary is padded to a multiple of twice the number, and padding counts in Megatron's loss
MODEL = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --vocab-size 257
--make-vocab-size-divisible-by 8 --split 100,0,0 --seed 3 --num-workers 0 --eval-iters 0
--log-interval 1 --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --num-experts 4
--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1
--moe-z-loss-coeff 0.01 --moe-router-dtype fp32 --init-method-std 0.2 --optimizer sgd
--sgd-momentum 0 --lr 0.3 --min-lr 0.3 --lr-decay-style constant --clip-grad 0.8
--use-cpu-initialization --no-load-optim --no-load-rng --no-save-optim --no-save-rng
--override-opt_param-scheduler --untie-embeddings-and-output-weights""".split()
Steps = list[tuple[float, ...]]


def steps(world: int, flags: str, folder: Path, *, native: bool = False,
          script: str = SCRIPT) -> Steps:
    """Loss, gradient norm and mean balance losses of steps 2 to 4, from the checkpoint in
    `folder`.
    """
    log = folder / f"{len(list(folder.glob('*.jsonl')))}.jsonl"
    _launched(world, folder, NATIVE if native else script, *flags.split(), "--load",
              str(folder / "start"), "--train-iters", "4", "--log-file", str(log))
    rows = [row for row in map(json.loads, log.read_text().splitlines()) if "lm_loss" in row]
    assert [row["iteration"] for row in rows] == [2, 3, 4]
    return [(row["lm_loss"], row["grad_norm"], *(
        sum(values) for _, values in sorted(row["aux_losses"].items()) if any(values)))
        for row in rows]


def same(got: Steps, wanted: Steps) -> None:
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=2e-4, atol=0)


def _launched(world: int, folder: Path, script: str, *flags: str) -> None:
    run_main(LAUNCH, ["--moe-cpu", script, *MODEL, "--data-path", (folder / "data").read_text(),
                      *flags], world, folder)


def begin(folder: Path, data: str, flags: str = "") -> tuple[Path, Steps]:
    """A folder with a checkpoint of Megatron's own layers, and the steps of one rank from there."""
    (folder / "data").write_text(data)
    _launched(1, folder, NATIVE, *flags.split(), "--train-iters", "1", "--save",
              str(folder / "start"), "--save-interval", "1")
    wanted = steps(1, flags, folder, native=True)
    assert wanted[0][0] - wanted[-1][0] > 0.05
    return folder, wanted


@pytest.fixture(scope="module")
def start(data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Steps]:
    return begin(tmp_path_factory.mktemp("layouts"), data)


CONTEXT = {
    "CP2": (2, "--context-parallel-size 2"),
    "CP2 EP2": (2, "--context-parallel-size 2 --expert-model-parallel-size 2"),
    "CP2 TP2 PP2 EP2": (8, """--context-parallel-size 2 --tensor-model-parallel-size 2
        --sequence-parallel --pipeline-model-parallel-size 2 --expert-model-parallel-size 2
        --make-vocab-size-divisible-by 4"""),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", CONTEXT)
def test_parts_of_sequences(layout: str, start: tuple[Path, Steps]) -> None:
    world, flags = CONTEXT[layout]
    folder, wanted = start
    same(steps(world, flags, folder), wanted)


STAGES = {
    "first stage": (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
    "last stage": (4, """--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1
        --tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 4"""),
    "layout": (2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tL"),
    "layout, virtual": (
        2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tt||tL"),
    "virtual": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
}
FREQUENCY = "--moe-layer-freq [0,1,1,0]"


@pytest.fixture(scope="module")
def mixed(data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Steps]:
    """As `start`, with dense layers between."""
    return begin(tmp_path_factory.mktemp("mixed"), data, FREQUENCY)


@pytest.mark.slow
@pytest.mark.parametrize("layout", STAGES)
def test_stages_of_any_length_with_layers_of_every_kind(layout: str,
                                                        mixed: tuple[Path, Steps]) -> None:
    world, flags = STAGES[layout]
    folder, wanted = mixed
    same(steps(world, f"{flags} {FREQUENCY}", folder), wanted)


@pytest.mark.slow
def test_stages_of_unequal_layout_and_length(start: tuple[Path, Steps]) -> None:
    """Without balance losses, which are those of a replica's tokens."""
    folder, _ = start
    plain = "--moe-aux-loss-coeff 0 --moe-z-loss-coeff 0"
    wanted = steps(1, plain, folder, native=True)
    unequal = """--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1
        --micro-batch-size 1 --stage-layouts tp=2 tp=1,ep=2"""
    got = steps(4, f"{plain} {unequal}", folder)
    same([row[:2] for row in got], [row[:2] for row in wanted])


@pytest.mark.slow
def test_instances_of_the_distributed_optimizer(start: tuple[Path, Steps]) -> None:
    pytest.importorskip("einops", reason="Megatron needs einops for several instances")
    folder, _ = start
    sharded = """--expert-model-parallel-size 2 --micro-batch-size 1 --optimizer adam --lr 1e-2
        --min-lr 1e-2 --use-distributed-optimizer --num-distributed-optimizer-instances 2"""
    wanted = steps(4, sharded, folder, native=True)
    same(steps(4, sharded, folder), wanted)
    same(steps(4, f"{sharded} --overlap-grad-reduce --overlap-param-gather", folder), wanted)


def _short_documents(prefix: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    g = torch.Generator().manual_seed(1)
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    for length in torch.randint(4, 40, (200,), generator=g).tolist():
        builder.add_item(torch.randint(256, (length,), generator=g))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.mark.slow
@pytest.mark.skipif(importlib.metadata.version("megatron-core") < "0.19",
                    reason="its data sets mark no documents (needs >= 0.19)")
def test_packed_sequences(start: tuple[Path, Steps]) -> None:
    """Attention within documents; the balance loss is one of samples, in Megatron's router."""
    folder, _ = start
    _short_documents(folder / "short")
    flags = f"--data-path {folder}/short --moe-router-load-balancing-type seq_aux_loss"
    packed = f"{flags} --dataloader-inter-document-masking"
    wanted = steps(1, packed, folder, native=True)
    assert abs(wanted[0][0] - steps(1, flags, folder, native=True)[0][0]) > 1e-3
    same(steps(1, packed, folder), wanted)
    one = f"{packed} --micro-batch-size 1"
    same(steps(2, f"{one} --pipeline-model-parallel-size 2", folder), steps(
        1, one, folder, native=True))


ROLLOUTS = str(Path(ROOT, "tests", "hosts", "megatron", "rollout_script.py"))
REPLAYED = {
    "CP2 TP2": (4, """--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel
        --expert-model-parallel-size 2 --make-vocab-size-divisible-by 4"""),
    "TP2": (2, "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 4"),
    "PP2, recomputed": (2, """--pipeline-model-parallel-size 2 --recompute-granularity full
        --recompute-method uniform --recompute-num-layers 1"""),
}


ROUTER_REPLAY = str(Path(ROOT, "tests", "hosts", "megatron", "router_replay_script.py"))
DRIVEN = {
    "CP2 TP2": REPLAYED["CP2 TP2"],
    "PP2, recomputed": REPLAYED["PP2, recomputed"],
    "VPP2, recomputed": (2, f"""{REPLAYED["PP2, recomputed"][1]}
        --num-virtual-stages-per-pipeline-rank 2"""),
}


@pytest.fixture(scope="module")
def replayed(start: tuple[Path, Steps]) -> Steps:
    """The steps of one rank that replays rollouts."""
    folder, plain = start
    found = steps(1, "", folder, script=ROLLOUTS)
    assert abs(found[0][0] - plain[0][0]) > 1e-3  # other experts
    return found


@pytest.mark.parametrize("layout", [
    "CP2 TP2", *(pytest.param(name, marks=pytest.mark.slow) for name in [*REPLAYED][1:])])
def test_rollouts_have_the_losses_of_one_rank(layout: str, start: tuple[Path, Steps],
                                              replayed: Steps) -> None:
    world, flags = REPLAYED[layout]
    same(steps(world, flags, start[0], script=ROLLOUTS), replayed)


@pytest.mark.skipif(importlib.metadata.version("megatron-core") < "0.17",
                    reason="its script has no --moe-enable-routing-replay")
@pytest.mark.parametrize("layout", [
    "VPP2, recomputed",
    *(pytest.param(name, marks=pytest.mark.slow) for name in [*DRIVEN][:-1])])
def test_router_replay_has_the_losses_of_megatrons_layers(
        layout: str, start: tuple[Path, Steps], monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices that a framework gives to `RouterReplay`, in its order; on one rank to Megatron's own
    layers.
    """
    (folder, plain), (world, flags) = start, DRIVEN[layout]
    replay = "--moe-enable-routing-replay"
    monkeypatch.setenv("ROUTER_REPLAY_NATIVE", "1")
    wanted = steps(1, replay, folder, script=ROUTER_REPLAY)
    monkeypatch.delenv("ROUTER_REPLAY_NATIVE")
    assert abs(wanted[0][0] - plain[0][0]) > 1e-3  # other experts
    same(steps(world, f"{flags} {replay}", folder, script=ROUTER_REPLAY), wanted)
