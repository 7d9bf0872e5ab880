"""What `--moe-lighthouse` refuses; replicas that come and go are in tests/faults."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from tests.hosts.fairseq.conftest import LANGUAGE_MODEL

pytest.importorskip("torchft", reason="needs torchft: pip install 'moe-plugin[elastic]'")

from moe_plugin.config import MoEConfig, RunConfig
from moe_plugin.hosts.fairseq import run  # after fairseq knows our models
from moe_plugin.hosts.fairseq.run import wants_replicas


def _settings(flags: str) -> Any:
    arguments = f"data {LANGUAGE_MODEL.replace('--arch transformer_lm', '--arch moe_lm_tiny')}"
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(
        options.get_training_parser(), f"{arguments} --moe-lighthouse http://a:1 {flags}".split()))


def _wants(flags: str) -> bool:
    """The answer for a model with experts, whose settings are the defaults."""
    with (mock.patch.object(run, "config_of", lambda model: MoEConfig()),
          mock.patch.object(run, "run_settings", lambda model: RunConfig())):
        return wants_replicas(_settings(flags), torch.nn.Module())


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
        _wants(flags)


def test_replicas_need_experts_and_are_not_the_default() -> None:
    with pytest.raises(ValueError, match="a model without experts: use --moe-freq"):
        wants_replicas(_settings(""), torch.nn.Module())
    assert _wants("")
    assert not _wants("--moe-lighthouse=")
    with pytest.raises(ValueError, match="replica=2 requires a lighthouse, because this run "
                                         "would train alone without it"):
        _wants("--moe-lighthouse= --moe-replica 2")
