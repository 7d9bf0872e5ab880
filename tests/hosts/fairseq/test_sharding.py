"""`--ddp-backend fully_sharded` and `--zero-sharding os`: the same curves, less on every rank,
whole checkpoints.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moe_plugin.hosts.fairseq import sharding
from tests.hosts.fairseq import conftest
from tests.hosts.fairseq.attacks import poison, tell_bytes
from tests.hosts.fairseq.conftest import DROPLESS, Corpus, Result, run
from tests.hosts.lost_rank import on_last

FULLY, OS = "--ddp-backend fully_sharded", "--zero-sharding os"


def train(corpus: Corpus, home: Path, flags: str, **options: Any) -> Result:
    """Two ranks."""
    return conftest.train(corpus, home, flags, 2, **options).ok()


def same_curve(seen: list[dict[str, float]], wanted: list[dict[str, float]],
               abs_: float = 2.1e-3) -> None:
    assert [step["num_updates"] for step in seen] == [step["num_updates"] for step in wanted]
    for mine, theirs in zip(seen, wanted, strict=True):
        for name in ("loss", "gnorm"):  # the log line has three decimals
            assert mine[name] == pytest.approx(theirs[name], abs=abs_), (name, mine["num_updates"])


def stored(result: Result) -> list[dict[str, int]]:
    """What each rank stored in its last step, by rank."""
    lines = [json.loads(text) for text in re.findall(r"BYTES (\{[^}]*\})", result.log)]
    return [[line for line in lines if line["rank"] == rank][-1] for rank in range(2)]


@pytest.mark.distributed
@pytest.mark.parametrize("flags", [
    FULLY, f"{FULLY} --moe-expert-parallel-size 1 --no-reshard-after-forward",
    f"{FULLY} --checkpoint-activations --fp32-reduce-scatter", f"{OS} --ddp-backend legacy_ddp",
    f"{OS} --ddp-backend c10d --moe-expert-parallel-size 1",
])
def test_sharding_changes_no_number(corpus: Corpus, tmp_path: Path, flags: str,
                                    ep2: tuple[Path, Result]) -> None:
    # clipping is active: a norm that counts a shard twice, or not, would move the losses
    same_curve(train(corpus, tmp_path, f"{flags} --max-update 12").steps, ep2[1].steps)


@pytest.mark.distributed
def test_routers_in_fp32_are_units_of_their_own(corpus: Corpus, tmp_path: Path) -> None:
    """FSDP2 takes one dtype in a unit."""
    flags = "--bf16 --moe-router-fp32 --max-update 6"
    wanted = train(corpus, tmp_path, f"{flags} --ddp-backend legacy_ddp")
    for more in ("", "--no-reshard-after-forward"):
        same_curve(train(corpus, tmp_path, f"{flags} {FULLY} {more}").steps, wanted.steps)


@pytest.mark.distributed
def test_each_rank_stores_its_part(corpus: Corpus, tmp_path: Path) -> None:
    adam = "--optimizer adam --lr 0.001 --max-update 4 --bf16 --update-freq 2"
    runs = {flags: train(corpus, tmp_path, f"{adam} {flags}", attack=tell_bytes)
            for flags in ("--ddp-backend legacy_ddp", FULLY, OS)}
    whole, fully, state_alone = map(stored, runs.values())
    for rank in range(2):
        assert whole[rank]["parameters"] == whole[rank]["all"] == whole[rank]["gradients"]
        assert whole[rank]["state"] == 2 * whole[rank]["masters"] == 4 * whole[rank]["all"]
        # what does not divide evenly is padded
        for name in ("parameters", "gradients", "masters", "state"):
            assert fully[rank][name] == pytest.approx(whole[rank][name] / 2, rel=0.02), name
        for name in ("masters", "state"):
            assert state_alone[rank][name] == pytest.approx(whole[rank][name] / 2, rel=0.02), name
        assert fully[rank]["experts"] == state_alone[rank]["experts"] == whole[rank]["experts"] > 0
    for result in list(runs.values())[1:]:
        same_curve(result.steps, runs["--ddp-backend legacy_ddp"].steps, abs_=0.02)


@pytest.mark.distributed
def test_replicated_experts_have_sharded_state_and_one_reduction(corpus: Corpus,
                                                                 tmp_path: Path) -> None:
    flags = ("--optimizer adam --lr 0.001 --max-update 2 --moe-expert-parallel-size 1 "
             "--update-freq 2")
    whole, state_alone = (stored(train(corpus, tmp_path, f"{flags} {more}", attack=tell_bytes))
                          for more in ("", OS))
    for rank in range(2):
        assert state_alone[rank]["experts"] == whole[rank]["experts"] / 2 > 0
        # one all-reduce a step for all experts, before backward ends
        assert whole[rank]["reductions"] == whole[rank]["behind"] == 1


@pytest.mark.distributed
def test_checkpoints_are_whole_and_resume_with_and_without_sharding(
        corpus: Corpus, tmp_path: Path, ep2: tuple[Path, Result]) -> None:
    seen = []
    for flags in (f"{FULLY} --max-update 4", "--ddp-backend legacy_ddp --max-update 6",
                  f"{OS} --max-update 8", f"{FULLY} --max-update 12"):
        seen += train(corpus, tmp_path, flags, save=True).steps
    same_curve(seen, ep2[1].steps)
    mine, theirs = (torch.load(home / "checkpoint_last-rank-1.pt", weights_only=False)
                    for home in (tmp_path, ep2[0]))
    for state in (mine["model"], theirs["model"]):
        [extra] = [value for name, value in state.items() if name.endswith("_extra_state")]
        assert extra.pop("tuner")["predicted"]["algorithm"]  # text is not close to text
    for name, value in theirs["model"].items():
        if not name.endswith("_float_tensor"):  # fairseq leaves it without values
            torch.testing.assert_close(mine["model"][name], value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine["last_optimizer_state"]["state"],
                               theirs["last_optimizer_state"]["state"], rtol=1e-3, atol=1e-4)
    run("fairseq-validate", f"{corpus.lm} --user-dir moe_plugin --path "
        f"{tmp_path / 'checkpoint_last.pt'} --task language_modeling --cpu --batch-size 4").ok()


@pytest.mark.distributed
@pytest.mark.parametrize("flags", [FULLY, OS])
def test_dense_models_are_sharded_and_resume_from_one_file(corpus: Corpus, tmp_path: Path,
                                                           flags: str) -> None:
    dense = "--user-dir moe_plugin --share-decoder-input-output-embed"
    wanted = train(corpus, tmp_path / "whole", "--max-update 6", model=dense).steps
    seen = [step for last in (3, 6) for step in
            train(corpus, tmp_path, f"{flags} --max-update {last}", model=dense, save=True).steps]
    same_curve(seen, wanted)
    assert sorted(path.name for path in tmp_path.glob("*last*")) == ["checkpoint_last.pt"]


@pytest.mark.distributed
def test_fp16_skips_a_step_on_all_ranks(corpus: Corpus, tmp_path: Path) -> None:
    for flags in (FULLY, OS):
        result = train(corpus, tmp_path, f"{flags} --fp16 --max-update 6",
                       attack=partial(on_last, poison, 3))
        assert "setting loss scale to: 64.0" in result.log
        assert result.losses[-1] < result.losses[0] - 0.3


@pytest.mark.distributed
def test_translation_models_are_sharded(corpus: Corpus, tmp_path: Path) -> None:
    flags = (f"{corpus.mt} --user-dir moe_plugin --arch transformer --task translation "
             "--encoder-embed-dim 32 --decoder-embed-dim 32 --encoder-ffn-embed-dim 64 "
             "--decoder-ffn-embed-dim 64 --encoder-layers 2 --decoder-layers 2 "
             "--encoder-attention-heads 2 --decoder-attention-heads 2 --dropout 0 "
             "--share-all-embeddings --moe-freq 2 --moe-expert-count 4 --criterion "
             f"moe_cross_entropy --moe-gate-loss-wt 0.01 {DROPLESS} --optimizer adam --lr 0.003 "
             "--batch-size 4 --max-update 4 --log-format json --log-interval 1 --cpu "
             "--num-workers 0 --no-progress-bar --clip-norm 0.5 --no-save --save-dir "
             f"{tmp_path}")
    wanted, seen = (run("fairseq-train", f"{flags} {more}", ranks=2).ok()
                    for more in ("--ddp-backend legacy_ddp", FULLY))
    same_curve(seen.steps, wanted.steps)


def settings(**changes: Any) -> Any:
    """As much of fairseq's settings as the check reads."""
    tree = {
        "distributed_training": {"ddp_backend": "fully_sharded", "zero_sharding": "none",
                                 "cpu_offload": False, "use_sharded_state": False},
        "common": {"amp": False}, "ema": {"store_ema": False}, "task": {"eval_bleu": False},
        "optimization": {"use_bmuf": False}, "checkpoint": {"no_last_checkpoints": False},
    }
    for path, value in changes.items():
        section, name = path.split("__")
        tree[section][name] = value
    return SimpleNamespace(**{key: SimpleNamespace(**values) for key, values in tree.items()})


@pytest.mark.parametrize(("changes", "words"), [
    ({"distributed_training__zero_sharding": "os"}, "--zero-sharding os"),
    ({"distributed_training__cpu_offload": True}, "--cpu-offload"),
    ({"common__amp": True}, "use --bf16 or --fp16"),
    ({"ema__store_ema": True}, "--store-ema"), ({"task__eval_bleu": True}, "fairseq-generate"),
    ({"optimization__use_bmuf": True}, "--use-bmuf"),
    ({"checkpoint__no_last_checkpoints": True}, "--no-last-checkpoints"),
])
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    sharding.check(settings(), nn.Identity())
    with pytest.raises(ValueError, match=words):
        sharding.check(settings(**changes), nn.Identity())


def test_optimizers_that_are_not_element_by_element_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be used with SimpleNamespace.*Use adam"):
        sharding.shard_optimizer(SimpleNamespace(supports_flat_params=False), [])
