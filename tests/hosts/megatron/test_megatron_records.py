"""What runs leave behind: one report over two stages, the records of a script that the launcher
starts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, PP2, trained

pytestmark = pytest.mark.megatron


def test_a_run_over_two_stages_has_one_report(data: str, tmp_path: Path) -> None:
    from moe_plugin.observe.history import read_run
    from moe_plugin.observe.report import render

    files = [
        "--log-file",
        str(tmp_path / "log.jsonl"), "--moe-stats-jsonl",
        str(tmp_path / "stats.jsonl"), "--moe-stats-interval", "1", "--moe-stats-timeline", "2"
    ]
    on_ranks(2, trained, [*MODEL, "--data-path", data, "--train-iters", "3", *files, *PP2])
    run = read_run(tmp_path)
    assert [r.step for r in run.steps
            ] == [1, 2, 3] and run.host == "megatron" and run.total_steps == 3 and run.notes == []
    assert {name: [r.step for r in records]
            for name, records in run.layers.items()} == {"layer1": [1, 2, 3], "layer2": [1, 2, 3]}
    shown = {
        rank: {s.name for s in spans if s.track == "layers"}
        for (_, rank), spans in run.timelines.items()
    }
    assert shown == {
        0: {"layer1 forward", "layer1 backward"}, 1: {"layer2 forward", "layer2 backward"}
    }
    assert 'id="timeline-1"' in render(run)


def _launched(argv: list[str], steps: int) -> None:
    """The parts of Megatron's `pretrain` that the launcher wraps, around a model of the training
    script: nothing of it is connected by hand.
    """
    import argparse
    from types import SimpleNamespace

    from moe_plugin.hosts.megatron import arguments, model, script, train
    from moe_plugin.hosts.megatron.report import RunLog

    args = arguments.parser().parse_args(argv)
    train.start(args)
    tokenizer, train_set, _ = train._datasets(args)
    state = argparse.Namespace(curr_iteration=0)
    training_module = SimpleNamespace()
    sys.modules["megatron.training.global_vars"] = SimpleNamespace(  # type: ignore[assignment]
        _GLOBAL_ARGS=state)
    sys.modules["megatron.training.training"] = training_module  # type: ignore[assignment]
    sys.modules.setdefault("megatron.training", SimpleNamespace())  # type: ignore[arg-type]
    built = model.build(args, arguments.transformer_config(args, cpu=True),
                        arguments.our_settings(args), tokenizer.vocab_size)
    for layer in built.moe_layers():  # as a script's model: no token ids yet
        layer.tokens_BT = None
    for chunk in built.bare():
        chunk._forward_pre_hooks.clear()
    idle = SimpleNamespace(layers=[])
    loop = train.Loop(args, built, idle, RunLog(None), train_set, None)
    batches = [loop._batches(train_set, 0) for _ in built.chunks]
    training_module.setup_model_and_optimizer = lambda: (built.chunks, built.optimizer, None)
    training_module.train_step = lambda: loop.step(batches, args.lr)
    training_module.evaluate = lambda: None
    script.observe_script()
    training_module.setup_model_and_optimizer()
    for state.curr_iteration in range(steps):
        training_module.train_step()


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [EP2, PP2], ids=["EP2", "PP2"])
def test_a_launched_script_writes_records_and_hands_over_token_ids(sizes: list[str], data: str,
                                                                    tmp_path: Path) -> None:
    files = ["--moe-stats-jsonl", str(tmp_path / "stats.jsonl"), "--moe-stats-interval", "2",
             "--moe-stats-timeline", "3"]
    argv = [*MODEL, "--moe-aux-loss-coeff", "0", "--moe-router", "hash", "--moe-hash-vocabulary",
            "384", "--data-path", data,
            "--train-iters", "4", *files, *sizes]
    on_ranks(2, _launched, argv, 4)
    rows = [json.loads(line) for path in sorted(tmp_path.glob("stats.jsonl*"))
            for line in path.read_text().splitlines()]
    balance = sorted((row["step"], row["layer"]) for row in rows if "layer" in row)
    assert balance == [(2, "layer1"), (2, "layer2"), (4, "layer1"), (4, "layer2")]
    calls = {row["calls"] for row in rows if "layer" in row}
    # two steps of all micro-batches and ranks of a stage
    assert calls == {8} and all(row["step"] == 3 for row in rows if "timeline" in row)
    assert len([row for row in rows if "timeline" in row]) == (2 if sizes == PP2 else 1)
