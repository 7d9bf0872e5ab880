"""A rank that dies, stalls, or whose weights drift away from those of its replicas."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.hosts.common.adapters import cases
from tests.hosts.common.host import Host
from tests.hosts.drift import drift
from tests.hosts.lost_rank import lose, on_last


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_the_other_rank_says_what_it_waited_for(host: Host, tmp_path: Path, how: str) -> None:
    """In time, by an error that names rank, group and collective."""
    ended = host.train(tmp_path, 12, "--moe-timeout 2",
                       attack=partial(on_last, lose, how, "send_receive", 9))
    ended.failed_with("CommError: rank 0 of 2 in group 'ranks [0, 1]': ", "from rank 1 failed",
                      "send_receive of torch.")


EXPERTS = "ranks 1 and 3 store the same experts, which were equal and have become different"
ROUTER = "were equal on ranks 0 and 3 and have become different"
DRIFTS = {"experts": ("experts", EXPERTS, ""), "router": ("router", ROUTER, "--moe-router topk"),
          "nothing": ("nothing", "have become different", "")}
NATIVE = {"native router": ("router", ROUTER, "")}


@cases({"fairseq": DRIFTS, "megatron": {**DRIFTS, **NATIVE}})
def test_replicas_that_drift_apart_are_warned_of(host: Host, case: tuple[str, str, str],
                                                 tmp_path: Path) -> None:
    part, words, more = case
    attack = None if part == "nothing" else partial(on_last, drift, part)
    log = host.train(tmp_path, 6, more, ranks=4, ep=2, attack=attack).ok().log
    # the first rank says it, once for each layer
    assert log.count(words) == log.count("have become different")
    assert log.count(words) == (0 if part == "nothing" else len(host.layers))
