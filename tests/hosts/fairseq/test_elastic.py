"""What `--moe-lighthouse` refuses; replicas that come and go are in tests/faults."""

from __future__ import annotations

from typing import Any

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from tests.hosts.fairseq.conftest import LANGUAGE_MODEL

pytest.importorskip("torchft", reason="needs torchft: pip install 'moe-plugin[elastic]'")

from moe_plugin.hosts.fairseq.run import wants_replicas  # after fairseq knows our models


def _settings(flags: str) -> Any:
    arguments = f"data {LANGUAGE_MODEL.replace('--arch transformer_lm', '--arch moe_lm_tiny')}"
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(
        options.get_training_parser(), f"{arguments} --moe-lighthouse http://a:1 {flags}".split()))


@pytest.mark.parametrize(("flags", "message"), [
    ("--fp16", "--fp16, --bf16 and --amp: leave them out"),
    ("--zero-sharding os", "--zero-sharding os and .*: leave them out"),
    ("--ddp-backend fully_sharded", "--ddp-backend fully_sharded: leave them out"),
    ("--store-ema", "--store-ema: leave it out"),
    ("--lr 0.1,0.05", "rates by epoch .*: use one --lr and a schedule by updates"),
    ("--force-anneal 3", "rates by epoch"),
    ("--lr-scheduler reduce_lr_on_plateau", "rates by epoch"),
    ("--moe-replica -2", "replica=-2 is out of bounds"),
])
def test_what_replicas_cannot_be_is_named(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wants_replicas(_settings(flags), has_experts=True)


def test_replicas_need_experts_and_are_not_the_default() -> None:
    with pytest.raises(ValueError, match="a model without experts: give --moe-freq"):
        wants_replicas(_settings(""), has_experts=False)
    assert wants_replicas(_settings(""), has_experts=True)
    assert not wants_replicas(_settings("--moe-lighthouse="), has_experts=True)
    with pytest.raises(ValueError, match="replica=2 does not fit a run without a lighthouse"):
        wants_replicas(_settings("--moe-lighthouse= --moe-replica 2"), has_experts=True)
