"""What is stored in 16 bit, with fp32 master weights: to other formats and back, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin.checkpoint.formats.base import CheckpointSizes, convert, formats, open_source
from moe_plugin.checkpoint.source import MODEL, Source
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import MODEL as TRAINED_MODEL
from tests.hosts.megatron.training import losses_of, trained

pytestmark = pytest.mark.megatron
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OTHERS = ("megatron_native", "plain")


def written(source: Source, path: Path) -> Path:
    path.mkdir(parents=True)
    formats.get(source.format)().write(source, path, CheckpointSizes())
    return path


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
