"""What is stored in 16 bit, with and without fp32 master weights, and files of fairseq's `moe`
branch: converted to Megatron's and back, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
pytest.importorskip("fairseq", reason="fairseq is not installed (see docs/fairseq.md)")

from moe_plugin.checkpoint.formats.base import CheckpointSizes, convert, formats, open_source
from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.checkpoint.source import MODEL, Source
from moe_plugin.cli.main import main
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.test_megatron_fairseq import (
    EXPERTS,
    MODEL_FLAGS,
    MOE,
    RUN,
    logits,
    same,
    tokens,
    write,
)
from tests.hosts.megatron.training import MODEL as TRAINED_MODEL
from tests.hosts.megatron.training import losses_of, trained

pytestmark = [pytest.mark.megatron, pytest.mark.fairseq]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OTHERS = ("megatron_native", "plain")


def reshard(source: Path, target: Path, to: str, *flags: str) -> Path:
    assert main(["reshard", str(source), str(target), "--to", to, *flags]) == 0
    return target


def written(source: Source, path: Path) -> Path:
    path.mkdir(parents=True)
    formats.get(source.format)().write(source, path, CheckpointSizes())
    return path


def test_the_branchs_files_become_megatrons_and_come_back(tmp_path: Path) -> None:
    """As ours do; optimizer state included."""
    model = write(tmp_path / "ours", MOE, optimizer=True)
    wanted = model(tokens())[0].detach()
    branch = reshard(tmp_path / "ours", tmp_path / "branch", "fairseq_branch", "--ep", "2")
    assert len(list(branch.glob("*-rank-*.pt"))) == 2
    for to in ("megatron", "megatron_native"):
        there = reshard(branch, tmp_path / to, to)
        direct = reshard(tmp_path / "ours", tmp_path / f"direct-{to}", to)
        back = reshard(there, tmp_path / f"back-{to}", "fairseq_branch", "--ep", "2")
        with open_source(there) as one, open_source(direct) as other:
            assert {field for field, _ in one.entries} == {MODEL, "exp_avg", "exp_avg_sq"}
            assert one.values["step"] == other.values["step"] == 3
            same(one, other)
        with open_source(branch) as one, open_source(back) as other:
            same(one, other)
    [found] = on_ranks(1, logits, [*MODEL_FLAGS, *EXPERTS, *RUN], str(tmp_path / "megatron"),
                       tokens())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("to", ["fairseq", "fairseq_branch"])
def test_fairseqs_weights_in_16_bit(name: str, to: str, tmp_path: Path,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron's master weights are made of them, exactly; fairseq's files hold none."""
    dtype, first = DTYPES[name], tmp_path / "fairseq"
    write(first, MOE, optimizer=True)
    state = files.read(str(first / "checkpoint_last.pt"))
    state["model"] = {key: value.to(dtype) if isinstance(value, torch.Tensor) else value
                      for key, value in state["model"].items()}
    files.write(state, str(first / "checkpoint_last.pt"))
    if to == "fairseq_branch":
        first = reshard(first, tmp_path / "branch", to)
    there = reshard(first, tmp_path / "megatron", "megatron")
    with open_source(there) as source:
        check_masters(source, dtype)
        for other in OTHERS:
            path = written(convert(source, other), tmp_path / other)
            with open_source(path) as read:
                check_masters(read, dtype)
                same(source, convert(read, "megatron"))
    assert main(["reshard", str(there), str(tmp_path / "x"), "--to", to]) == 2
    assert "float32 master weights" in capsys.readouterr().err
    back = reshard(there, tmp_path / "back", to, "--model-only")
    with open_source(first) as one, open_source(back) as other:
        names = {name for field, name in one.entries if field == "exp_avg"}
        assert {key for key in one.entries if key[0] == MODEL} == set(other.entries)
        for key in ((MODEL, name) for name in names):
            assert one.entries[key].dtype == other.entries[key].dtype == dtype
            assert torch.equal(one.read(key), other.read(key)), key


def check_masters(source: Source, dtype: torch.dtype, exact: bool = True) -> None:
    """Each 16-bit weight with optimizer state has an fp32 copy that rounds to it; exact: is it."""
    masters = {name for field, name in source.entries if field == "master"}
    assert masters == {name for field, name in source.entries if field == "exp_avg"
                       and source.entries[MODEL, name].dtype != torch.float32}
    assert masters
    differs = False
    for name in masters:
        copy, weight = source.read(("master", name)), source.read((MODEL, name))
        assert copy.dtype == torch.float32 and weight.dtype == dtype
        assert torch.equal(copy.to(dtype), weight), name
        differs |= not torch.equal(copy, weight.float())
    assert differs != exact


@pytest.mark.parametrize(("name", "flags", "through"), [
    ("bf16", ["--bf16"], OTHERS),
    ("bf16", ["--bf16", "--use-distributed-optimizer"], OTHERS[:1]),
    ("fp16", ["--fp16", "--initial-loss-scale", "128"], OTHERS[:1]),
], ids=["bf16", "bf16, distributed", "fp16"])
def test_a_run_in_16_bit_goes_through_every_format_and_on(
        name: str, flags: list[str], through: tuple[str, ...], data: str, tmp_path: Path) -> None:
    """Master weights, which differ from the rounded ones, and losses bit for bit; no other format
    than Megatron's has the place in the data.
    """
    argv = [*TRAINED_MODEL, *flags, "--data-path", data, "--train-iters", "4"]
    home = tmp_path / "run"
    on_ranks(1, trained, [*argv, "--save", str(home), "--save-interval", "2"])
    (home / "latest_checkpointed_iteration.txt").write_text("2")
    with open_source(home) as source:
        check_masters(source, DTYPES[name], exact=False)
        back: Any = source
        for number, other in enumerate((*through, "megatron")):
            with open_source(written(convert(back, other), tmp_path / str(number))) as read:
                check_masters(read, DTYPES[name], exact=False)
                if other == "megatron":
                    for key in source.entries:
                        assert read.entries[key] == source.entries[key], key
                        assert torch.equal(read.read(key), source.read(key)), key
            back = open_source(tmp_path / str(number))
    losses = []
    for number, folder in enumerate((home, tmp_path / str(len(through)))):
        log = tmp_path / f"{number}.jsonl"
        on_ranks(1, trained, [*argv, "--load", str(folder), "--log-file", str(log)])
        losses.append(losses_of(str(log)))
    assert sorted(losses[0]) == sorted(losses[1]) == [3, 4]
    assert "plain" in through or losses[0] == losses[1]
