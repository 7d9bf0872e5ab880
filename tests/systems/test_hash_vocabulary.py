"""HetuMoE's hash router takes the size of its vocabulary from the host: fairseq's dictionary,
Megatron's tokenizer. Its table is that of a balanced table by hand.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.config import MoEConfig
from moe_plugin.config.router import HashConfig, RouterConfig
from moe_plugin.routing.routers.hashing import make_table, with_vocabulary

HASH = "--moe-router hash"


@pytest.mark.fast
def test_the_first_size_counts_and_others_may_be_given() -> None:
    config = MoEConfig(router=RouterConfig(name="hash"))
    assert with_vocabulary(config, [257, 384], "it").router.hash.vocabulary == 257
    assert with_vocabulary(config, [], "it") == config
    other = MoEConfig()
    assert with_vocabulary(other, [257], "it") == other
    for given in (257, 384):
        config = MoEConfig(router=RouterConfig(name="hash", hash=HashConfig(vocabulary=given)))
        assert with_vocabulary(config, [257, 384], "it") == config
        with pytest.raises(ValueError, match=f"vocabulary={given} contradicts the dictionary of 9 "
                           "tokens. Use 9, or remove the setting"):
            with_vocabulary(config, [9], "the dictionary")


def balanced(sizes: int, experts: int) -> None:
    """Each expert has the same number of tokens, give or take one."""
    table_V = make_table(HashConfig(vocabulary=sizes), experts)
    counts_E = torch.bincount(table_V, minlength=experts)
    assert len(table_V) == sizes and counts_E.max() - counts_E.min() <= 1


@pytest.mark.fast
@pytest.mark.parametrize("sizes", [257, 384])
def test_tables_are_balanced(sizes: int) -> None:
    balanced(sizes, 4)


@pytest.mark.fairseq
@pytest.mark.skipif(importlib.util.find_spec("fairseq") is None, reason="needs fairseq")
def test_fairseqs_dictionary(tmp_path: Path) -> None:
    """Language models have one dictionary; encoder and decoder each have their own."""
    from fairseq.data import Dictionary

    from tests.hosts.fairseq import conftest

    (tmp_path / "text").mkdir()
    corpus = conftest.make_corpus(tmp_path / "text")
    words = len(Dictionary.load(str(corpus.lm / "dict.txt")))
    base = (f"{corpus.lm} {conftest.LANGUAGE_MODEL} {conftest.MOE} --moe-dispatch ragged "
            f"--moe-capacity-factor none {HASH} --max-update 2")
    conftest.run("fairseq-train", f"{base} --save-dir {tmp_path / 'lm'}").ok()
    state = torch.load(tmp_path / "lm" / "checkpoint_last.pt", weights_only=False)["model"]
    [table_V] = [value for name, value in state.items() if name.endswith("table_V")]
    assert torch.equal(table_V, make_table(HashConfig(vocabulary=words), 4))
    conftest.run("fairseq-train", f"{base} --moe-hash-vocabulary {words + 1} --no-save"
                 ).failed_with(f"vocabulary={words + 1} contradicts the decoder's dictionary of "
                               f"{words} tokens", "--moe-hash-vocabulary")
    conftest.run("fairseq-train", f"{base} --moe-hash-vocabulary {words} --no-save").ok()


def _table(argv: list[str]) -> tuple[torch.Tensor, Any]:
    from tests.hosts.megatron.training import ran

    run = ran(argv)
    return run.moe_layers()[0].router.table_V, run.steps_logged[-1]["lm_loss"]


@pytest.mark.distributed
@pytest.mark.megatron
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None or importlib.util.find_spec(
    "megatron.training") is None, reason="needs megatron.training")
def test_megatrons_tokenizer(tmp_path: Path) -> None:
    """The table does not depend on how many tensor-parallel ranks there are, for which the
    embedding is filled up; the size with these rows may be given.
    """
    from tests.hosts.megatron.conftest import make_data
    from tests.hosts.megatron.ranks import on_ranks
    from tests.hosts.megatron.training import MODEL, TP2, refusal

    base = [*MODEL, "--moe-aux-loss-coeff", "0", "--moe-z-loss-coeff", "0", "--data-path",
            make_data(tmp_path), "--train-iters", "2", *HASH.split()]
    expected = make_table(HashConfig(vocabulary=257), 4)
    for ranks, more in ((1, []), (2, TP2)):
        for table_V, loss in on_ranks(ranks, _table, [*base, *more]):
            assert torch.equal(table_V, expected) and loss > 0
    [(padded_V, _)] = on_ranks(1, _table, [*base, "--moe-hash-vocabulary", "384"])
    assert len(padded_V) == 384
    [message] = on_ranks(1, refusal, [*base, "--moe-hash-vocabulary", "300"])
    assert re.search(r"vocabulary=300 contradicts Megatron's vocabulary of 257 tokens. Use 257 or "
                     r"384, or remove the setting", message), message
