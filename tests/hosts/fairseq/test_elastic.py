"""What `--moe-lighthouse` and `--moe-expert-parallel-at` refuse; replicas that come and go are in
tests/faults.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from moe_plugin.config import MoEConfig, RunConfig, run_from_dict
from moe_plugin.hosts.fairseq import run  # after fairseq knows our models
from moe_plugin.hosts.fairseq.run import wants_replicas
from tests.hosts.fairseq.conftest import LANGUAGE_MODEL


def _settings(flags: str) -> Any:
    arguments = f"data {LANGUAGE_MODEL.replace('--arch transformer_lm', '--arch moe_lm_tiny')}"
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(
        options.get_training_parser(), f"{arguments} --moe-lighthouse http://a:1 {flags}".split()))


def _wants(flags: str) -> bool:
    """The answer for a model with experts, whose settings are the defaults."""
    pytest.importorskip("torchft", reason="needs torchft: pip install 'moe-plugin[elastic]'")
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
    assert _wants("")
    with pytest.raises(ValueError, match="a model without experts: use --moe-freq"):
        wants_replicas(_settings(""), torch.nn.Module())
    assert not _wants("--moe-lighthouse=")
    with pytest.raises(ValueError, match="replica=2 requires a lighthouse, because this run "
                                         "would train alone without it"):
        _wants("--moe-lighthouse= --moe-replica 2")


@pytest.mark.parametrize(("section", "name", "value", "said"), [
    ("distributed_training", "distributed_world_size", 1, "does not fit one rank: use several"),
    ("distributed_training", "zero_sharding", "os", "does not fit --ddp-backend fully_sharded and "
     "--zero-sharding os: it assigns parts of parameters to ranks"),
    ("model", "moe_lighthouse", "http://a:1", "does not fit --moe-lighthouse: "),
    ("ema", "store_ema", True, "does not fit --store-ema: averages would not be moved"),
    ("common", "amp", True, "does not fit --amp: use --bf16"),
    ("optimizer", "_name", "adafactor", "does not fit --optimizer adafactor: its state"),
    ("optimizer", "_name", "composite", "does not fit --optimizer composite: its state")])
def test_what_cannot_follow_is_refused(monkeypatch: pytest.MonkeyPatch, section: str, name: str,
                                       value: Any, said: str) -> None:
    wanted = run_from_dict({"resize": {"expert_parallel_at": {3: 2}}})
    monkeypatch.setattr(run, "run_settings", lambda model: wanted)
    cfg = SimpleNamespace(
        model=SimpleNamespace(moe_lighthouse=None),
        distributed_training=SimpleNamespace(distributed_world_size=4, ddp_backend="legacy_ddp",
                                             zero_sharding="none"),
        ema=SimpleNamespace(store_ema=False), common=SimpleNamespace(amp=False),
        optimizer=SimpleNamespace(_name="adam"))
    model: Any = None
    run.check_resizing(cfg, model)
    setattr(getattr(cfg, section), name, value)
    with pytest.raises(ValueError, match=f"--moe-expert-parallel-at 3=2 {said}"):
        run.check_resizing(cfg, model)
