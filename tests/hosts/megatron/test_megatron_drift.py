"""Megatron warns if replicas of experts or routers no longer have equal weights."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.drift import drift
from tests.hosts.lost_rank import is_last
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, trained

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]


def _train_and_drift(part: str, argv: list[str]) -> list[str]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_plugin.experts.overwrites").addHandler(handler)
    if is_last() and part != "nothing":
        drift(part)
    trained(argv)
    return [text for text in texts if "have become different" in text]


@pytest.mark.parametrize(("part", "words", "router"), [
    ("experts", "ranks 1 and 3 store the same experts, which were equal and have become different",
     []),
    ("router", "were equal on ranks 0 and 3 and have become different", ["--moe-router", "topk"]),
    ("router", "were equal on ranks 0 and 3 and have become different", []),
    ("nothing", None, [])], ids=["experts", "router", "native-router", "nothing"])
def test_replicas_that_drift_apart_are_warned_of(data: str, part: str, words: str | None,
                                                 router: list[str]) -> None:
    argv = [*MODEL, *EP2, "--data-path", data, "--train-iters", "6", *router]
    first, *others = on_ranks(4, _train_and_drift, part, argv)
    assert others == [[], [], []]
    assert bool(first) == (words is not None)
    assert all(words in text for text in first if words is not None)
