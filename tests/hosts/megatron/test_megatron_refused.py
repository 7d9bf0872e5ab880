"""Arguments that do not fit: the training script ends before the first step, and its message has
the value and what to use instead.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import pytest

from moe_plugin.config import run_from_dict
from moe_plugin.hosts.megatron.run import check_replicas, check_resizing
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import MODEL, VERSION, arguments_of, argv_for, refusal

# arguments, in which {} is a folder, and parts of the message
REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "no data": ("--data-path /nowhere/corpus",
                ("/nowhere/corpus.bin is missing", "moe_plugin.hosts.megatron.data")),
    "sizes": ("--tensor-model-parallel-size 3", ("world size (1)", "total_model_size=3")),
    "batch": ("--global-batch-size 7", (
        "global batch size (7) is not divisible by" if VERSION < (0, 18) else
        "batch_size (7) must be divisible by",)),
    "yaml": (f"--moe-config {shlex.quote(__file__)}", ("is not YAML",)),
    "no yaml": ("--moe-config /nowhere.yaml", ("/nowhere.yaml", "cannot be read")),
    "flag": ("--moe-capacity-factor wide", ("--moe-capacity-factor 'wide'",)),
    "megatron's own check": ("--moe-router-topk 1", ("pre-softmax",)),
    "absurd experts": ("--num-experts 1000000000000", ("num_experts=1000000000000", "<=")),
    "a device": ("--moe-stats-jsonl /dev/null", ("observe.jsonl='/dev/null'", "a device")),
    "a folder": ("--log-file /tmp", ("log_file='/tmp'", "a folder", "regular file")),
    "a long value": (f"--moe-router {'x' * 5000}", ("unknown router 'xxx", "characters)")),
    "few positions": ("--max-position-embeddings 8", ("max_position_embeddings (8)", "32")),
    "a coefficient too many": (
        "--moe-aux-loss-coeff 0.01 0.001",
        ("moe_aux_loss_coeff=[0.01, 0.001]", "needs 1", "'aux_loss'")),
    "a coefficient too few": (
        "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.01",
        ("moe_aux_loss_coeff", "moe_router_load_balancing_type")),
    "a type twice": (
        "--moe-router-load-balancing-type aux_loss aux_loss --moe-aux-loss-coeff 0.01 0.001",
        ("moe_router_load_balancing_type=['aux_loss', 'aux_loss']", "sum")),
    "no distributed optimizer": ("--overlap-param-gather --overlap-grad-reduce",
                                 ("distributed optimizer",)),
    "two precisions": ("--bf16 --fp16", ("not args.",)),
    "a native router with pre-gates": (
        "--moe-pre-gate 1 --moe-router-load-balancing-type sinkhorn",
        ("router.pre_gate=1 cannot be used with Megatron's own router",)),
    "activations recomputed twice": ("--moe-activations swap --recompute-granularity selective",
                                     ("does not fit Megatron's recompute_granularity",)),
    "policies": ("--moe-activations keep,swap,keep",
                 ("has 3 policies, but the model has 2 layers",)),
    # of evaluation
    "experts in training": ("--moe-experts-on host",
                            ("experts.store=host cannot be used for training",)),
    "few documents": ("--eval-interval 1 --split 9999,1,0",
                      ("leaves no document for the valid set",)),
    "no documents": ("--eval-interval 50 --split 100,0,0",
                     ("eval_interval=50 has nothing to evaluate with split=",)),
    "no documents, evaluation alone": (
        "--skip-train --load {} --split 1,0,0",
        ("skip_train=True has nothing to evaluate with split=",)),
    "no batches": ("--eval-interval 50 --eval-iters 0",
                   ("eval_iters=0 is out of bounds: it must be >= 1",)),
    "no checkpoint": ("--skip-train", ("skip_train=True needs a checkpoint to evaluate",)),
    "an empty folder": ("--skip-train --load {} --split 80,20,0",
                        ("there is nothing to evaluate. Set --load to",)),
    "no file of experts": ("--skip-train --load {} --moe-experts-on disk",
                           ("experts.store_path=None cannot be used with",)),
}


@pytest.mark.parametrize(("flags", "parts"), REFUSED.values(), ids=REFUSED.keys())
def test_arguments_that_do_not_fit_are_named(flags: str, parts: tuple[str, ...], data: str,
                                             tmp_path: Path) -> None:
    [message] = on_ranks(1, refusal, argv_for(data, 2, *shlex.split(flags.format(tmp_path))))
    assert all(part in message for part in parts), message


UNGUARDED = {
    "--moe-votes 4": "odd and >= 3", "--moe-votes 3": "larger than the number of workers, 2",
    "--moe-votes 3 --expert-model-parallel-size 2": "larger than the number of workers, 1",
    "--moe-votes 3 --pipeline-model-parallel-size 2":
        "use --untie-embeddings-and-output-weights",
    "--moe-votes 3 --context-parallel-size 2": "--context-parallel-size",
    "--moe-votes 3 --use-distributed-optimizer":
        "ranks cannot vote on parameters that only one rank",
    "--moe-votes 3 --moe-router sigmoid_bias": "without a vote",
    "--moe-votes 3 --moe-router-enable-expert-bias --moe-router-score-function sigmoid":
        "follow the loads that every rank reports",
    "--moe-votes 3 --tensor-model-parallel-size 2": "--tensor-model-parallel-size",
    "--moe-check-twins 2 --expert-model-parallel-size 2":
        "no two of 2 ranks store the same experts",
    "--moe-check-twins 2 --pipeline-model-parallel-size 2": "--pipeline-model-parallel-size",
}


@pytest.mark.parametrize("flags", UNGUARDED)
def test_what_cannot_be_guarded_is_refused(flags: str, data: str) -> None:
    for found in on_ranks(2, refusal, argv_for(data, 1, *flags.split())):
        assert UNGUARDED[flags] in found


@pytest.mark.parametrize(("flags", "message"), [
    ("--bf16", "--fp16, --bf16 and --use-distributed-optimizer: leave these three out"),
    ("--use-distributed-optimizer", "--moe-lighthouse does not fit --fp16"),
    ("--moe-router-enable-expert-bias", "use --moe-router sigmoid_bias"),
    ("--moe-replica 1048576", "replica=1048576 is out of bounds"),
    ("--moe-lighthouse= --moe-replica 2", "replica=2 requires a lighthouse, "
     "because this run would train alone without it"),
])
def test_what_replicas_cannot_be_is_named(flags: str, message: str) -> None:
    """Replicas that come and go are in tests/faults."""
    pytest.importorskip("torchft", reason="needs torchft: pip install 'moe-plugin[elastic]'")
    args = arguments_of([*MODEL, "--train-iters", "2", "--moe-lighthouse", "http://a:1",
                         *flags.split()])
    with pytest.raises(ValueError, match=message):
        check_replicas(args)


def given(**changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"optimizer": "adam", "num_experts": 4, **changed})


@pytest.mark.parametrize(("changed", "said"), [
    ({"tensor_model_parallel_size": 2}, "does not fit --tensor-model-parallel-size: use 1, because "
     "experts move between whole data-parallel ranks"),
    ({"async_save": True}, "does not fit --async-save: leave it out, because the parameters could"),
    ({"cuda_graph_impl": "local"}, "does not fit --cuda-graph-impl local: leave it out"),
    ({"optimizer": "muon"}, "does not fit --optimizer muon: use adam or sgd"),
    ({"num_experts": 6}, "does not fit --num-experts 6: .* must be divisible by 4")])
def test_what_cannot_follow_another_size_is_refused(changed: dict[str, Any], said: str) -> None:
    run = run_from_dict({"resize": {"expert_parallel_at": {3: 4}}})
    check_resizing(given(), run)
    with pytest.raises(ValueError, match="resize.expert_parallel_at={3: 4} " + said):
        check_resizing(given(**changed), run)
