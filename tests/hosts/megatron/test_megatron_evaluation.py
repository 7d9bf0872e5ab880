"""`--skip-train`: a checkpoint is evaluated, and continues a text, wherever its experts lie."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, PP2, Run, ran, refusal, trained
from tests.hosts.slow_hardware import slow_hardware

pytestmark = pytest.mark.megatron
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


@pytest.mark.distributed
@pytest.mark.parametrize("flags", [EP2, PP2, [*EP2, "--moe-pre-gate", "1", "--bf16"]],
                         ids=["EP2", "PP2", "EP2, pre-gates, bf16"])
def test_text_and_loss_are_those_of_the_resident_model(flags: list[str], data: str,
                                                       tmp_path: Path) -> None:
    """The host's store has one slot."""
    argv = [*MODEL, "--data-path", data, "--train-iters", "2", *flags, *EVALUATION]
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


def _cut(argv: list[str]) -> tuple[float, list[str]]:
    """(validation loss, pieces in the log)"""
    said: list[str] = []
    log = logging.getLogger("moe_plugin.tuning.predicted")
    log.addFilter(lambda record: said.append(record.getMessage()) or True)
    [*_, record] = [row for row in ran(argv).records if "valid_loss" in row]
    return record["valid_loss"], said


@pytest.mark.distributed
def test_pieces_follow_the_load(data: str, tmp_path: Path) -> None:
    """On slow hardware (EPS-MoE); the loss stays."""
    argv = [*MODEL, "--data-path", data, "--train-iters", "2", *EP2, *EVALUATION]
    folder = str(tmp_path / "run")
    on_ranks(2, trained, [*argv, "--save", folder])
    device, cluster = slow_hardware(tmp_path)
    evaluation = [*argv, "--skip-train", "--load", folder]
    whole, pieces = (on_ranks(2, _cut, [*evaluation, *more]) for more in ([], [
        "--moe-prefill-pieces", "true", "--moe-parallel-device", device, "--moe-cluster",
        cluster]))
    for (loss, none), (other, _) in zip(whole, pieces, strict=True):
        assert other == pytest.approx(loss, rel=1e-5) and none == []
    assert re.search(r"evaluation of about \d+ tokens on each rank: .*\d pieces.*; predicted",
                     "".join(pieces[0][1])), pieces[0][1]


@pytest.mark.parametrize(("flags", "message"), [
    ("--moe-experts-on host", "experts.store=host cannot be used for training"),
    ("--eval-interval 1 --split 9999,1,0", "leaves no document for the valid set"),
    ("--eval-interval 50 --split 100,0,0", "eval_interval=50 has nothing to evaluate with split="),
    ("--skip-train --load {} --split 1,0,0", "skip_train=True has nothing to evaluate with split="),
    ("--eval-interval 50 --eval-iters 0", "eval_iters=0 is out of bounds: it must be >= 1"),
    ("--skip-train", "skip_train=True needs a checkpoint to evaluate"),
    ("--skip-train --load {} --split 80,20,0", "there is nothing to evaluate. Set --load to"),
    ("--skip-train --load {} --moe-experts-on disk", "experts.store_path=None cannot be used with"),
])
def test_what_does_not_fit_is_refused(flags: str, message: str, data: str, tmp_path: Path) -> None:
    argv = [*MODEL, "--data-path", data, "--train-iters", "1", *flags.format(tmp_path).split()]
    assert message in on_ranks(1, refusal, argv)[0]
