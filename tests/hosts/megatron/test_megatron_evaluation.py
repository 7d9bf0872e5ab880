"""`--skip-train`: a checkpoint is evaluated, and continues a text, wherever its experts lie."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, PP2, refusal

pytestmark = pytest.mark.megatron
# in one layout, where bits are equal: training may leave another one to the resident model
EVALUATION = ["--split", "8,2,0", "--eval-iters", "12", "--moe-parallel", "fixed"]
LENGTH = 32


def _continued(training: Any) -> tuple[list[int], float]:
    """Greedy tokens after three given ones, by Megatron's cache of keys and values, and the sum of
    all logits; one pipeline stage.
    """
    from megatron.core.inference.contexts import StaticInferenceContext

    tokens_BT = torch.zeros(1, LENGTH, dtype=torch.int64)
    tokens_BT[0, :3] = torch.tensor([72, 101, 108])
    [model] = training.bare()
    model.eval()
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


def _evaluations(argv: list[str], folder: str) -> list[tuple[Any, ...]]:
    """(validation loss, text, counters of the store, parameters of experts, findings in the log) by
    store; first the loss that training saw at its last step. The host's store has one slot.
    """
    import torch.distributed as dist

    from moe_plugin.checkpoint.expert_file import write_experts
    from moe_plugin.checkpoint.formats.base import open_source
    from moe_plugin.checkpoint.formats.megatron import format as _registers  # noqa: F401
    from moe_plugin.hosts.megatron.trainer import arguments, checkpoint, model, train
    from moe_plugin.hosts.megatron.trainer.train import seed_everything

    seen: list[Any] = []
    built: list[Any] = []
    build = model.build

    def keep(*args: Any) -> Any:
        built[:] = [build(*args)]
        return built[0]

    model.build = keep  # what `run` evaluates
    path, one = Path(folder, "experts.safetensors"), "6KiB" if "--bf16" in argv else "12KiB"
    said: list[str] = []
    log = logging.getLogger("moe_plugin.observe.health")
    log.addFilter(lambda record: said.append(record.getMessage()) or True)
    ways = [["--train-iters", "2", "--save", folder, "--eval-interval", "2"],
            *(["--skip-train", "--load", folder, "--log-file", f"{folder}/log", *more] for more in (
                [], ["--moe-experts-on", "host", "--moe-experts-cache", one],
                ["--moe-experts-on", "disk", "--moe-experts-store-path", str(path)]))]
    for number, way in enumerate(ways):
        args = arguments.parser().parse_args([*argv, *EVALUATION, *way])
        if number == 0:
            train.start(args)
        seed_everything(args.seed + number)
        if number == 0:
            evaluated, evaluate = [], train.Loop.evaluate
            train.Loop.evaluate = lambda loop, at: evaluated.append(evaluate(loop, at))
            train.run(args)
            train.Loop.evaluate = evaluate
            record = evaluated[-1]
            if dist.get_rank() == 0:
                with open_source(Path(checkpoint.folder(folder, 2))) as source:
                    write_experts(source, path)
            dist.barrier()
        else:
            record = train.run(args)
        assert record["iteration"] == 2
        training, layers = built[0], built[0].moe_layers()
        assert (training.optimizer is None) == (number > 0)
        text = None if "--pipeline-model-parallel-size" in argv else _continued(training)
        stores = [layer.experts.store.counters.as_dict() for layer in layers
                  if layer.experts.stored]
        seen.append((record["valid_loss"], text, stores,
                     sum(1 for layer in layers for _ in layer.experts.parameters()), tuple(said)))
        said.clear()
    return seen


@pytest.mark.distributed
@pytest.mark.parametrize("flags", [EP2, PP2, [*EP2, "--moe-pre-gate", "1", "--bf16"]],
                         ids=["EP2", "PP2", "EP2, pre-gates, bf16"])
def test_loss_and_tokens_are_those_of_the_resident_model(flags: list[str], data: str,
                                                         tmp_path: Path) -> None:
    argv = [*MODEL, "--data-path", data, "--train-iters", "2", *flags]
    ranks = on_ranks(2, _evaluations, argv, str(tmp_path))
    waits = [ranks[0][2][4], ranks[1][2][4]]
    assert waits[1] == ()  # rank 0 says it
    if "--moe-pre-gate" not in flags:
        assert [said.endswith("[waits_for_experts]") for said in waits[0]] == [True]
        assert "% of the calls of layer1 wait for experts" in waits[0][0]  # most, by time
    for trained, resident, host, disk in ranks:
        assert trained[:2] == resident[:2] == host[:2] == disk[:2]
        assert resident[3] == host[3] > 0 == disk[3] and not resident[2]
        assert () == trained[4] == resident[4]
        for _, _, stores, _, _ in (host, disk):
            assert stores and all(store["misses"] + store["prefetched"] > 0 for store in stores)
        assert (trained[1] is None) == (flags is PP2)


@pytest.mark.parametrize(("flags", "message"), [
    ("--skip-train", "skip_train=True"),
    ("--skip-train --load {} --eval-iters 0", "eval_iters=0"),
    ("--eval-interval 1 --eval-iters 0", "eval_iters=0 is out of bounds: must be >= 1 with"),
    ("--moe-experts-on host", "experts.store=host does not fit training in Megatron"),
    ("--skip-train --load {} --split 1,0,0", "split='1,0,0' leaves nothing to evaluate"),
    ("--eval-interval 1 --split 1,0,0", "eval_interval=1: split='1,0,0' leaves nothing to eval"),
    ("--eval-interval 1 --split 9999,1,0", "leaves no document to evaluate"),
    ("--skip-train --load {} --split 80,20,0", "there is nothing to evaluate; give the folder"),
    ("--skip-train --load {} --moe-experts-on disk", "experts.store_path=None does not fit"),
])
def test_what_does_not_fit_is_refused(flags: str, message: str, data: str, tmp_path: Path) -> None:
    argv = [*MODEL, "--data-path", data, "--train-iters", "1", *flags.format(tmp_path).split()]
    assert message in on_ranks(1, refusal, argv)[0]
