"""Training by our command: the same curve as Megatron's own layer, settings that reach it, bad
input.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging.handlers
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.hosts.megatron.layers import copy_native_weights
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import (
    EP2,
    MODEL,
    PP2,
    TP2,
    Run,
    argv_for,
    ran,
    trained,
)
from tests.logs import warned


def _curve(argv: list[str], weights: dict[str, torch.Tensor] | None = None
           ) -> tuple[list[tuple[float, ...]], dict[str, torch.Tensor]]:
    """(loss, gradient norm, balance loss) of every step, and the first weights.

    weights: of Megatron's own layer, from which this run begins; None: its own.
    """
    first = dict[str, torch.Tensor]()

    def built(run: Run) -> None:
        if weights is not None:
            copy_native_weights(weights, run.model)
            run.optimizer.reload_model_params()
        first.update((name, p.detach().clone()) for name, p in run.model.named_parameters())

    run = ran(argv, built)
    return [(r["lm_loss"], r["grad_norm"], r["aux_losses"]["load_balancing_loss"][0])
            for r in run.steps_logged], first


def _of_weights(argv: list[str], every: list[dict[str, torch.Tensor]]) -> Any:
    return _curve(argv, every[torch.distributed.get_rank()])[0]


@pytest.mark.parametrize(("world", "sizes"),
                         [(1, []), (2, EP2), (2, PP2),
                          (4, [*EP2, *TP2, "--expert-tensor-parallel-size", "1"])],
                         ids=["one rank", "EP2", "PP2", "EP2 TP2"])
def test_twenty_steps_equal_native(world: int, sizes: list[str], data: str) -> None:
    """SGD shows a wrong gradient scale; clipping in force shows a wrong norm."""
    argv = argv_for(data, 20, "--optimizer", "sgd", "--sgd-momentum", "0", "--lr", "0.3",
                    "--clip-grad", "0.8", "--lr-decay-style", "constant", *sizes)
    natives, weights = zip(*on_ranks(world, _curve, [*argv, "--native-moe"]), strict=True)
    for native, ours in zip(natives, on_ranks(world, _of_weights, argv, list(weights)),
                            strict=True):
        assert native[0][0] - native[-1][0] > 0.5 and max(row[1] for row in native) > 0.8
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(native), rtol=2e-4, atol=2e-4)


def _train_with_warnings(argv: list[str]) -> tuple[Any, list[str]]:
    handler = logging.handlers.BufferingHandler(100)
    logging.getLogger("moe_plugin").addHandler(handler)
    record = trained(argv)
    return record, [entry.getMessage() for entry in handler.buffer
                    if entry.levelno == logging.WARNING]


def _said(argv: list[str]) -> list[tuple[int, str]]:
    """Status and words of a script that fails on both ranks, and on the second one alone."""
    from moe_plugin.hosts.megatron import launch
    from moe_plugin.hosts.megatron import train as command
    from moe_plugin.hosts.megatron.compat.settings import SettingsError

    found = []
    for failing in ((0, 1), (1,)):

        def run(*_: Any, failing: tuple[int, ...] = failing) -> None:
            if dist.get_rank() in failing:
                raise SettingsError(f"of ranks {failing}")

        words = io.StringIO()
        with mock.patch.object(dist, "destroy_process_group"), \
                contextlib.redirect_stderr(words), mock.patch.object(launch, "run", run):
            found.append((command.main(argv), words.getvalue()))
        dist.barrier()
    return found


def test_an_error_is_said_once_whichever_rank_has_it(data: str) -> None:
    first, second = on_ranks(2, _said, argv_for(data, 1))
    assert [status for status, _ in (*first, *second)] == [2, 0, 2, 2]
    assert (first[0][1] + second[0][1]).count("error: of ranks (0, 1)") == 1
    assert first[1][1] == "" and second[1][1].endswith("error: of ranks (1,) (rank 1)\n")


def test_yaml_and_flags_reach_the_layers(data: str, tmp_path: Path) -> None:
    (tmp_path / "moe.yaml").write_text("dispatch: {name: padded, capacity_factor: 0.5}\n")
    log = str(tmp_path / "stats.jsonl")
    argv = argv_for(data, 2, "--moe-config", str(tmp_path / "moe.yaml"), "--moe-stats-jsonl", log,
                    "--moe-stats-interval", "1")
    [(record, warnings)] = on_ranks(1, _train_with_warnings, argv)
    # half of the slots: one warning for both steps, with what to change
    [warning] = [text for text in warnings if "found no slot at their expert" in text]
    assert warning.startswith("step 1: ") and "--moe-capacity-factor none" in warning
    assert set(record["balance"]) == {"layer1", "layer2"
                                      } and record["balance"]["layer1"]["drop_fraction"] > 0
    rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
    assert rows[0]["layer"] == "layer1" and rows[0]["capacity"] > 0


def test_drops_in_validation_are_said_once(data: str) -> None:
    argv = argv_for(data, 2, "--eval-interval", "1", "--eval-iters", "1", "--split", "80,20,0",
                    "--moe-capacity-factor", "8.0", "--moe-eval-capacity-factor", "0.25",
                    "--moe-dispatch", "padded")
    [(_, warnings)] = on_ranks(1, _train_with_warnings, argv)
    # a quarter of the slots of an even load: three quarters of the choices, or more
    [warning] = [text for text in warnings if "found no slot at their expert" in text]
    words = warning.split(" % of the choices")[0]
    assert words.startswith("validation at step 1: ") and int(words.split()[-1]) >= 70
    assert "--moe-eval-capacity-factor" in warning


def _balance_warnings(argv: list[str]) -> list[str]:
    with warned("moe_plugin.routing.registry") as shown:
        trained(argv)
    return shown


def test_training_without_a_balance_loss_is_warned_of_once(data: str) -> None:
    argv = argv_for(data, 1)
    off = ["--moe-aux-loss-coeff", "0"]
    assert on_ranks(2, _balance_warnings, [*argv, *EP2]) == [[], []]
    first, second = on_ranks(2, _balance_warnings, [*argv, *off, *EP2])
    assert len(first) == 1 and "--moe-aux-loss-coeff 0.01" in first[0] and second == []
    # Megatron's own router: by its expert bias, or by nothing
    native = ["--moe-router-num-groups", "2", "--moe-router-group-topk", "1"]
    biased = [*native, "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"]
    for extra, count in ((native, 1), (biased, 0)):
        [said] = on_ranks(1, _balance_warnings, [*argv, *off, "--moe-z-loss-coeff", "0", *extra])
        assert len(said) == count, (extra, said)


def _query_groups(argv: list[str]) -> tuple[int, tuple[int, ...], float]:
    run = ran(argv)
    weight = run.model.decoder.layers[0].self_attention.linear_qkv.weight
    return run.model.config.num_query_groups, tuple(weight.shape), run.records[-1]["lm_loss"]


def test_grouped_query_attention_trains(data: str) -> None:
    [(groups, shape, loss)] = on_ranks(1, _query_groups, [
        *MODEL, "--data-path", data, "--train-iters", "2", "--group-query-attention",
        "--num-query-groups", "2"
    ])
    # 32 rows of queries, 2 groups of 8 keys and 8 values
    assert groups == 2 and shape == (32 + 2 * 2 * 8, 32) and 0 < loss < 10


def test_empty_text_writes_nothing(tmp_path: Path) -> None:
    from moe_plugin.hosts.megatron.data import documents, write_indexed

    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(ValueError, match="no text to write"):
        write_indexed(documents(str(tmp_path / "empty.txt")), str(tmp_path / "corpus"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.txt"]
