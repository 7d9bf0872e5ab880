"""Models of files that users already have: what is read, how many parameters are counted, and what
is refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_plugin.cli.main import main
from moe_plugin.cli.measure.model_files import read_source
from moe_plugin.cli.planning.launch import flags_of, launch_text, with_flags
from moe_plugin.planner.cluster import BETWEEN, DEVICES, cluster_of, device_of
from tests.cli.planning.published_models import MODELS

pytest.importorskip("transformers.integrations.moe")
SHORT = 64  # tokens per sequence
TINY = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 100}
MEGATRON = r"""#!/bin/bash
GPUS=8
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 1024   # the width
    --num-attention-heads 16 --seq-length 2048 --swiglu
)
MOE_ARGS="--num-experts 64 \
  --moe-router-topk 6 --moe-ffn-hidden-size 512"
torchrun --nproc_per_node $GPUS pretrain_gpt.py "${MODEL_ARGS[@]}" $MOE_ARGS --bf16 \
    --global-batch-size ${BATCH:-512}
"""
FAIRSEQ = """fairseq-train data-bin --task language_modeling --arch moe_lm_tiny \\
  --moe-freq 2 --moe-expert-count 32 --tokens-per-sample 1024 --fp16
"""


def written(folder: Path, values: dict) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("name", MODELS)
def test_parameters_equal_those_of_the_real_class(name: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = MODELS[name]
    model = read_source(written(tmp_path, values), 8, SHORT, 8).model
    config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(config)
    assert model.outside + model.in_experts == sum(p.numel() for p in real.parameters())
    experts = values.get("num_local_experts") or values.get("n_routed_experts") or values.get(
        "num_experts") or values["moe_num_experts"]
    inner = values.get("moe_intermediate_size", values["intermediate_size"])
    weights = 3 * values["hidden_size"] * inner * experts
    assert (model.experts, model.hidden_dim, model.gated) == (experts, inner, True)
    assert model.top_k == (values.get("num_experts_per_tok") or values["moe_k"])
    assert model.layers == values["num_hidden_layers"]
    # biases of experts are not part of the product
    assert weights <= model.in_experts / model.moe_layers <= 1.01 * weights
    dense = values.get("first_k_dense_replace", values.get("moe_layer_start_index", 0))
    assert [model.has_experts(i) for i in range(model.layers)] == [
        i >= dense for i in range(model.layers)]
    assert (model.dense_saved > 0) == (dense > 0) and model.moe_saved > 0


def test_the_flags_of_a_script_are_read_without_running_it(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(MEGATRON + "\nrm -rf $(echo nothing) --not-this\n")
    _, flags = flags_of(path, "num-layers")
    assert flags["hidden-size"] == "1024" and flags["moe-router-topk"] == "6"
    assert flags["global-batch-size"] == "512" and "not-this" not in flags
    assert flags["bf16"] == "true"


def test_the_launch_line_keeps_what_the_plan_does_not_determine(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.sh"
    path.write_text("""SIZES="--num-layers 4 --hidden-size 256 --num-attention-heads 4 --swiglu"
        MOE=(--num-experts 8 --moe-grouped-gemm)
        torchrun --nproc_per_node $GPUS --nnodes 1 pretrain_gpt.py $SIZES ${MOE[@]} $MORE \\
            --lr 1e-4 --group-query-attention --num-query-groups 2 --fp16 --global-batch-size 64 \\
            --tensor-model-parallel-size 2 --context-parallel-size 2 --data-path a b --save $OUT $@
        """)
    assert 0 == main(["plan", "--model", str(path), "--gpus", "8", "--device", "h100",
                       "--network", "ib400"])
    out = capsys.readouterr().out
    line = out[out.index("torchrun"):].replace("\\\n", " ").split()
    assert line.count("--nproc_per_node") == 1 and line.count("--num-layers") == 1
    after = dict(zip(line, line[1:], strict=False))
    assert after["--num-query-groups"] == "2" and after["--lr"] == "1e-4"
    assert after["--save"] == "$OUT" and after["--data-path"] == "a" and after["a"] == "b"
    assert "pretrain_gpt.py" in line and "--fp16" in line and "--bf16" not in line
    assert "--moe-grouped-gemm" in line and "--context-parallel-size" not in line
    assert line.count("--tensor-model-parallel-size") == 1 and line.count("--lr") == 1


@pytest.mark.parametrize(("written", "printed"), [
    ("""--tokenizer-model $(cat "a b" ')/x.model')/y""",) * 2,
    ("""--tokenizer-model "$(dirname "$0")/x y.model\"""",) * 2,
    ("""--tokenizer-model "my tok\"""", "--tokenizer-model 'my tok'"),
    ("--attention-softmax-in-fp32 true --lr 1e-4", "--attention-softmax-in-fp32 true --lr 1e-4"),
    ("--attention-softmax-in-fp32=true --tokenizer-model=`cat x`",
     "--attention-softmax-in-fp32 true --tokenizer-model `cat x`"),
    ('--save "$OUT/a b" --swiglu', '--save "$OUT/a b" --swiglu'),
    ('"${MORE[@]}"', "--save 'two words' --tokenizer-model $(cat a)/b"),
])
def test_quotes_and_commands_in_values_are_kept(written: str, printed: str,
                                                tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("MORE=(--save 'two words' --tokenizer-model $(cat a)/b)\n"
                    f"torchrun pretrain_gpt.py --num-layers 2 {written}\n")
    script, flags = flags_of(path, "num-layers")
    assert script == "pretrain_gpt.py"
    flags = {name: value for name, value in flags.items() if name != "num-layers"}
    words = with_flags([], [], flags)
    assert launch_text(["torchrun", *words]) == f"torchrun {printed}"


def test_megatron_script(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(MEGATRON)
    source = read_source(path, 8, None, None)
    m = source.model
    assert source.host == "megatron"
    assert (m.layers, m.model_dim, m.heads, m.sequence, m.global_batch) == (24, 1024, 16, 2048, 512)
    assert (m.experts, m.top_k, m.hidden_dim, m.gated, m.element_bytes) == (64, 6, 512, True, 2)


def test_megatron_arguments_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "arguments.txt"
    path.write_text("--num-layers\n4\n--hidden-size=32\n--num-attention-heads 4\n--num-experts 8\n")
    m = read_source(path, 8, 128, 16).model
    assert (m.layers, m.model_dim, m.ffn_dim, m.experts, m.sequence) == (4, 32, 128, 8, 128)


@pytest.mark.fairseq
def test_fairseq_command_and_yaml(tmp_path: Path) -> None:
    command, file = tmp_path / "train.sh", tmp_path / "train.yaml"
    command.write_text(FAIRSEQ)
    file.write_text("task: {_name: language_modeling, tokens_per_sample: 1024}\n"
                    "common: {fp16: true}\n"
                    "model: {_name: moe_lm_tiny, moe_freq: 2, moe_expert_count: 32}\n")
    sources = [read_source(path, 8, None, 64) for path in (command, file)]
    assert [source.host for source in sources] == ["fairseq"] * 2
    assert sources[0].model == sources[1].model
    assert (sources[0].model.experts, sources[0].model.moe_every,
            sources[0].model.element_bytes) == (32, 2, 2)


def test_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, TINY)
    assert main(["plan", "--model", str(path), "--gpus", "4", "--device", "h100", "--network",
                 "ib400", "--sequence", str(SHORT)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("fits: TP1 PP1 DP4 EP")
    for word in ("weights", "gradients", "optimizer", "activations", "buffers",
                 "computed from data sheets, nothing was measured"):
        assert word in first
    assert lines[0].startswith("lowest expert-parallel size that fits: 1 ")
    assert any("256 sequences per step" in line for line in lines)
    assert any("fsdp_size=4" in line for line in lines)


def test_named_devices_and_networks() -> None:
    for name in DEVICES:
        assert device_of(name).memory_bytes > 1e10
        for network in BETWEEN:
            cluster = cluster_of(network, 64, name)
            assert (cluster.nodes, cluster.ranks_per_node) == (8, 8)
            assert cluster.intra.beta_s < cluster.inter.beta_s
    assert cluster_of("ib400", 4, "h100").nodes == 1
    assert cluster_of("pcie4+ib400", 8, "h100").intra.beta_s > cluster_of(
        "nvlink+ib400", 8, "h100").intra.beta_s


@pytest.mark.parametrize(("changes", "options", "message"), [
    ({}, {"--device": "h1000"}, "did you mean h100"),
    ({}, {"--network": "ib40"}, "known names: ib100"),
    ({}, {"--gpus": "12"}, "multiple of 8"),
    ({"model_type": "llama"}, {}, "has no routed experts. Plan a model with experts"),
    ({"model_type": "unheard"}, {}, "is unknown to the installed transformers"),
    ({"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
      "num_local_experts": 8}, {"--gpus": "1"}, "With less memory: recompute all layers: "),
])
def test_errors_name_a_remedy(changes: dict, options: dict, message: str, tmp_path: Path,
                              capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--model": str(written(tmp_path, {**TINY, **changes})), "--gpus": "8", "--device":
             "h100", "--network": "ib400", "--sequence": str(SHORT), **options}
    assert main(["plan", *(word for pair in given.items() for word in pair)]) == 2
    assert message in capsys.readouterr().err


def test_a_megatron_model_without_experts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(MEGATRON.replace("--num-experts 64", ""))
    with pytest.raises(ValueError, match="without experts. Add --num-experts"):
        read_source(path, 8, None, None)


def test_the_planner_does_not_import_torch() -> None:
    code = ("import sys, moe_plugin.planner.traced_model, moe_plugin.planner.cluster; "
            "assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)
