"""Launch lines: the hosts' own parsers take every word, and read the sizes of the plan."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_plugin.cli.planning.launch import (
    COLUMNS,
    FAIRSEQ_TRAIN,
    SCRIPT,
    LaunchCommand,
    launch_text,
    launch_words,
)
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.model import ModelPlan
from tests.cli import megatron_flags
from tests.cli.examples import Shell, commands
from tests.planner.problems import model

PLAN = ModelPlan(tp=2, pp=2, dp=2, ep=4, etp=1, micro_batch=4, layout=LayoutChoice(r=1, d=2))
DATA_PARALLEL = ModelPlan(tp=1, pp=1, dp=8, ep=4, etp=1, micro_batch=2, layout=LayoutChoice(r=1))
STARTS = [LaunchCommand(nodes=1, ranks_per_node=8, cpu=True, threads=2, data="a folder/data"),
          LaunchCommand(nodes=2, ranks_per_node=4, head="10.0.0.1")]


@pytest.mark.parametrize("start", STARTS, ids=["one node", "two nodes"])
@pytest.mark.parametrize("host, script", [("fairseq", None), ("megatron", None),
                                          ("megatron", "pretrain_gpt.py")])
@pytest.mark.parametrize("changes", [{}, {"element_bytes": 4, "vocab": 257, "gated": True}])
def test_the_hosts_parsers_take_every_word(host: str, script: str | None, start: LaunchCommand,
                                           changes: dict, tmp_path: Path) -> None:
    plan = DATA_PARALLEL if host == "fairseq" else PLAN
    start = dataclasses.replace(start, script=script)
    text = launch_text(launch_words(model(**changes), plan, host, start))
    assert all(len(line) <= COLUMNS for line in text.splitlines())
    [words] = commands(text)
    if start.cpu:
        assert words.pop(0) == "OMP_NUM_THREADS=2"
    (tmp_path / "moe.yaml").write_text("{}\n")  # a command writes it beside the line
    Shell(tmp_path)(words, runs=False)
    assert ("--bf16" in words) == (not changes)


@pytest.mark.megatron
def test_megatron_reads_the_sizes_of_the_plan() -> None:
    m = model()
    words = launch_words(m, PLAN, "megatron", LaunchCommand(ranks_per_node=8, data="prefix"))
    args = SimpleNamespace(**megatron_flags.read(words[words.index(SCRIPT) + 1:]))
    assert (args.num_layers, args.hidden_size, args.num_experts, args.vocab_size) == (
        m.layers, m.model_dim, m.experts, m.vocab)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size,
            args.expert_model_parallel_size) == (2, 2, 4)
    assert (args.micro_batch_size, args.global_batch_size) == (4, m.global_batch)
    assert args.data_path == ["prefix"] and args.moe_config == "moe.yaml" and args.bf16


def test_fairseq_is_told_the_ranks_of_an_expert_group() -> None:
    words = launch_words(model(), DATA_PARALLEL, "fairseq", LaunchCommand(ranks_per_node=8))
    values = dict(zip(words, words[1:], strict=False))
    assert values["--moe-expert-parallel-size"] == "4" and values["--batch-size"] == "2"
    assert values["--update-freq"] == str(model().global_batch // (8 * 2))
    assert values["--decoder-embed-dim"] == "1024" and values["--moe-expert-count"] == "8"


def test_the_text_is_the_words_for_a_shell() -> None:
    words = launch_words(model(), DATA_PARALLEL, "fairseq",
                         LaunchCommand(data="a b'c", ranks_per_node=8))
    text = launch_text(words).replace(FAIRSEQ_TRAIN, "PROGRAM").replace("\\\n", " ")
    assert shlex.split(text) == ["PROGRAM" if word == FAIRSEQ_TRAIN else word for word in words]


def test_what_a_host_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="--script x.py is for Megatron only"):
        launch_words(model(), DATA_PARALLEL, "fairseq", LaunchCommand(script="x.py"))
    with pytest.raises(ValueError, match="uses tensor or pipeline parallelism"):
        launch_words(model(), PLAN, "fairseq", LaunchCommand())
