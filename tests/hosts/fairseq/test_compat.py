"""Stock fairseq runs on today's Python, torch, numpy and hydra, and its shims stay inside fairseq.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_plugin.experts.base import mark_expert
from tests.distributed import run_gloo
from tests.hosts.fairseq.conftest import (
    LANGUAGE_MODEL,
    Corpus,
    environment,
    run,
    run_on_its_own_ranks,
    run_stock,
)


def test_stock_training_needs_no_user_dir(corpus: Corpus, tmp_path: Path) -> None:
    result = run_stock(f"{corpus.lm} {LANGUAGE_MODEL} --criterion cross_entropy --max-update 8 "
                       f"--save-dir {tmp_path}").ok()
    assert len(result.losses) == 8
    assert result.losses[-1] < result.losses[0] - 0.2


@pytest.mark.distributed
def test_spawned_processes_train_and_two_ranks_validate(corpus: Corpus, tmp_path: Path) -> None:
    result = run_on_its_own_ranks(
        "fairseq-train",
        f"{corpus.lm} {LANGUAGE_MODEL} --criterion cross_entropy --max-update 4 --save-dir "
        f"{tmp_path} --distributed-world-size 2").ok()
    assert len(result.losses) == 4
    assert result.steps[0]["wpb"] == 256  # 2 ranks x 4 sentences x 32 tokens
    # one batch holds the whole set: the second rank has no data
    arguments = (f"{corpus.lm} --task language_modeling --path {tmp_path / 'checkpoint_last.pt'} "
                 "--cpu --batch-size 40")
    one = run("fairseq-validate", arguments).ok()
    two = run("fairseq-validate", arguments, ranks=2).ok()
    assert _valid_loss(two.log) == pytest.approx(_valid_loss(one.log), abs=2e-3)


def _valid_loss(log: str) -> float:
    return float(log.split("subset | ")[-1].split("loss ")[1].split(" |")[0])


def _reduced_by_legacy_ddp() -> torch.Tensor:
    from fairseq.distributed import LegacyDistributedDataParallel

    module = torch.nn.ModuleList([torch.nn.Linear(3, 3).bfloat16(), torch.nn.Linear(3, 3)])
    wrapped = LegacyDistributedDataParallel(module, dist.group.WORLD)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1 + 2.0**-(12 + dist.get_rank()))
    wrapped.all_reduce_grads()
    return torch.stack([p.grad.flatten()[0].float() for p in module.parameters()])


@pytest.mark.distributed
def test_legacy_ddp_reduces_float32_gradients_in_float32() -> None:
    for found in run_gloo(2, _reduced_by_legacy_ddp):
        exact = 1 + (2.0**-12 + 2.0**-13) / 2
        assert found.tolist() == [1.0, 1.0, exact, exact]


def _sent_by_legacy_ddp() -> tuple[list[int], list[float]]:
    """Elements that are reduced, and the sums of dense parameters and an expert."""
    from fairseq.distributed import LegacyDistributedDataParallel, utils

    module = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(50, 40)])
    for parameter in module[1].parameters():
        mark_expert(parameter)
    wrapped = LegacyDistributedDataParallel(module, dist.group.WORLD)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + 2 * dist.get_rank())
    sent, reduce = [], utils.all_reduce
    utils.all_reduce = lambda x, *args, **kwargs: (sent.append(x.numel()),
                                                   reduce(x, *args, **kwargs))[1]
    wrapped.all_reduce_grads()
    return sent, [float(p.grad.mean()) for p in module.parameters()]


@pytest.mark.distributed
def test_legacy_ddp_sends_no_buffer_of_experts() -> None:
    """As many elements as dense parameters have, not as many as all."""
    for rank, (sent, means) in enumerate(run_gloo(2, _sent_by_legacy_ddp)):
        assert sent == [3 * 3 + 3]
        assert means == [2.0, 2.0, 1.0 + 2 * rank, 1.0 + 2 * rank]


def test_other_packages_are_left_alone() -> None:
    assert not hasattr(np, "int")
    assert not hasattr(np, "compat")
    assert dataclasses.dataclass.__module__ == "dataclasses"

    @dataclasses.dataclass
    class Unhashable:
        value: int = 0

    assert Unhashable.__hash__ is None
    assert isinstance(torch.tensor(1.0), torch.Tensor)
    assert type(torch.tensor(1.0)) is torch.Tensor


def test_settings_are_composed_beside_an_application_of_a_newer_hydra() -> None:
    """Whoever started hydra before, with whatever `version_base`, finds it as it was."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from hydra import compose, initialize, version

    with initialize(version_base="1.3", config_path=None):
        compose(overrides=["+a=1"])
    arguments = [
        "data", "--task", "language_modeling", "--arch", "transformer_lm", "--max-update", "7"
    ]
    config = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(options.get_training_parser(), arguments))
    assert config.optimization.max_update == 7
    assert str(version.getbase()) == "1.3"


def test_interpreter_start_imports_nothing_heavy() -> None:
    code = ("import sys; print(sorted({'torch', 'numpy', 'fairseq', 'moe_plugin'} & "
            "set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True,
                          text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_another_copy_of_the_package_is_refused(tmp_path: Path) -> None:
    from fairseq import utils

    (tmp_path / "moe_plugin" / "models").mkdir(parents=True)
    with pytest.raises(ValueError, match=f"not the installed copy .*pip install -e {tmp_path}"):
        utils.import_user_module(argparse.Namespace(user_dir=str(tmp_path / "moe_plugin")))


def test_the_bare_name_is_the_installed_package_beside_a_checkout(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from fairseq import utils

    (tmp_path / "moe_plugin" / "models").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    utils.import_user_module(argparse.Namespace(user_dir="moe_plugin"))
    assert "not the copy in this folder" in caplog.text
    assert f"pip install -e {tmp_path}" in caplog.text


def test_stock_architecture_without_moe_flags_is_stock() -> None:
    from fairseq.models import ARCH_MODEL_REGISTRY

    from moe_plugin.hosts.fairseq.layers import moe_layers
    from tests.hosts.fairseq.small import language_model

    assert ARCH_MODEL_REGISTRY["transformer_lm_gpt"].__name__ == "MoETransformerLanguageModel"
    model = language_model(moe_freq=0)
    assert moe_layers(model) == []
    assert not any(hasattr(p, "expert") for p in model.parameters())
