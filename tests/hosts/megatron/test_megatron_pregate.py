"""Pre-gates in Megatron's model: stages, recomputation, steps, checkpoints of ordinary gates."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin.pregate import has_own_gate
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, TP2, refusal

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]
RECOMPUTED = {
    "nothing": {},
    "layer by layer": {"recompute_granularity": "full", "recompute_method": "uniform",
                       "recompute_num_layers": 1},
    "by two layers": {"recompute_granularity": "full", "recompute_method": "uniform",
                      "recompute_num_layers": 2},
    "the first layer": {"recompute_granularity": "full", "recompute_method": "block",
                        "recompute_num_layers": 1},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def _curves(argv: list[str]) -> tuple[dict[str, list[tuple[float, ...]]], list[list[bool]]]:
    """Losses and gradient norms by what is recomputed, from the same checkpoint of ordinary gates;
    by chunk, which layers choose for themselves.
    """
    from moe_plugin.hosts.megatron.report import RunLog
    from moe_plugin.hosts.megatron.trainer import arguments, checkpoint, model, train
    from moe_plugin.hosts.megatron.trainer.train import seed_everything

    args = arguments.parser().parse_args(argv)
    train.start(args)
    tokenizer, train_set, _ = train.make_datasets(args)
    found, start, own = {}, None, []
    for args.moe_pre_gate, name in ((0, "ordinary"), *((1, name) for name in RECOMPUTED)):
        for setting in ("granularity", "method", "num_layers", "modules"):
            setattr(args, f"recompute_{setting}",
                    RECOMPUTED.get(name, {}).get(f"recompute_{setting}"))
        seed_everything(args.seed)
        training = model.build(args, arguments.transformer_config(args, cpu=True),
                               arguments.our_settings(args), tokenizer.vocab_size)
        if start is None:
            start = [chunk.state_dict() for chunk in training.bare()]
            start = copy.deepcopy(start)
        for chunk, state in zip(training.bare(), start, strict=True):
            chunk.load_state_dict(state)
        training.optimizer.reload_model_params()
        loop = train.Loop(args, training, RunLog(None), train_set, None)
        records: list[dict[str, Any]] = []
        loop.log.write = records.append  # type: ignore[method-assign]
        loop.run(checkpoint.Progress())
        found[name] = [(r["lm_loss"], r["grad_norm"], r["aux_losses"]["load_balancing_loss"][0])
                       for r in records]
        own = [[has_own_gate(layer.moe) for layer in chunk.modules()
                if type(layer).__name__ == "PluginMoELayer"] for chunk in training.bare()]
    return found, own


STAGES = ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"]


@pytest.mark.parametrize(("world", "layers", "sizes"),
                         [(2, 8, STAGES), (4, 2, [*EP2, *TP2])],
                         ids=["two by two stages", "EP2 TP2"])
def test_recomputation_changes_nothing(world: int, layers: int, sizes: list[str],
                                       data: str) -> None:
    argv = [*MODEL, "--data-path", data, "--train-iters", "2", "--optimizer", "sgd",
            "--num-layers", str(layers), "--clip-grad", "1.0", *sizes]
    for found, own in on_ranks(world, _curves, argv):
        for name in RECOMPUTED:
            assert found[name] == found["nothing"], name
        assert all(a != b for a, b in zip(found["ordinary"], found["nothing"], strict=True))
        # the first block of each stage has a gate of its own
        assert all(chunk == [True, *[False] * (len(chunk) - 1)] for chunk in own)
        assert len(own) == (2 if sizes is STAGES else 1) and len(own[0]) > 1


def test_what_does_not_fit_is_named(data: str) -> None:
    argv = [*MODEL, "--data-path", data, "--train-iters", "1", "--moe-pre-gate", "1"]
    assert "router.pre_gate=1 cannot be used with Megatron's own router" in on_ranks(
        1, refusal, [*argv, "--moe-router-load-balancing-type", "sinkhorn"])[0]
