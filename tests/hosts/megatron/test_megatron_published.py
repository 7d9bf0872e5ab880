"""Published launch scripts at small sizes: their flags as they stand, the losses of Megatron's own
layers.

Sources: Megatron-LM's examples/mixtral, its configurations of Nemotron 3 in examples/post_training
(without the layers that need Mamba's kernels) and of the functional test deepseekv3_proxy_flex;
Qwen3-30B-A3B of Megatron-MoE-ModelZoo.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.training import launched, own_loop

pytestmark = [
    pytest.mark.megatron, pytest.mark.distributed, own_loop,
    pytest.mark.skipif(importlib.metadata.version("megatron-core") < "0.19",
                       reason="flags of megatron-core 0.19")
]

OF_ALL = """--use-mcore-models --disable-bias-linear --normalization RMSNorm
--untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
--moe-grouped-gemm --clip-grad 1.0 --weight-decay 0.1 --lr-decay-style cosine
--use-distributed-optimizer --sequence-parallel --overlap-grad-reduce --overlap-param-gather"""
MODEL_ZOO = """--distributed-timeout-minutes 60 --use-flash-attn --manual-gc --manual-gc-interval 5
--exit-duration-in-mins 230 --transformer-impl transformer_engine --no-mmap-bin-files
--no-create-attention-mask-in-dataloader --norm-epsilon 1e-6 --adam-beta1 0.9 --adam-beta2 0.95
--auto-detect-ckpt-format --dist-ckpt-strictness log_all --log-timers-to-tensorboard
--log-memory-to-tensorboard --log-validation-ppl-to-tensorboard --log-throughput
--init-method-std 0.02 --moe-permute-fusion --moe-router-dtype fp32 --swiglu
--position-embedding-type rope --expert-tensor-parallel-size 1 --context-parallel-size 1"""
NEMOTRON = """--moe-token-dispatcher-type alltoall --enable-experimental --moe-permute-fusion
--use-fused-weighted-squared-relu --cross-entropy-loss-fusion --cross-entropy-fusion-impl native
--moe-router-score-function sigmoid --moe-aux-loss-coeff 1e-4 --moe-router-enable-expert-bias
--moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss --attention-backend flash
--position-embedding-type none --squared-relu --group-query-attention --num-query-groups 2"""
# what stands in the script, and the layout and sizes of here
SCRIPTS = {
    "Mixtral 8x7B": ("""--position-embedding-type rope --swiglu --group-query-attention
        --num-query-groups 8 --no-masked-softmax-fusion --no-position-embedding
        --rotary-base 1000000 --init-method-std 0.01 --moe-router-topk 2
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
        --moe-token-dispatcher-type alltoall --no-load-optim --no-load-rng""",
                     "--num-layers 2 --num-query-groups 2 --expert-model-parallel-size 2"),
    "Qwen3 30B-A3B": (MODEL_ZOO + """ --rotary-percent 1.0 --rotary-base 1000000
        --rotary-seq-len-interpolation-factor 1 --group-query-attention --num-query-groups 4
        --qk-layernorm --moe-router-load-balancing-type aux_loss --moe-router-topk 8
        --moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall --log-num-zeros-in-grad
        --log-params-norm""",
                      "--num-layers 2 --num-query-groups 2 --num-experts 16 --kv-channels 16 "
                      "--tensor-model-parallel-size 2 --expert-model-parallel-size 2"),
    "DeepSeek-V3": (MODEL_ZOO + """ --no-check-for-nan-in-loss-and-grad --cross-entropy-loss-fusion
        --cross-entropy-fusion-impl native --multi-latent-attention --rotary-base 10000
        --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --qk-layernorm
        --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8
        --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep
        --moe-router-pre-softmax --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4
        --moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5
        --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --moe-router-bias-update-rate 1e-3 --moe-router-fusion --rotary-scaling-factor 40
        --mscale 1.0 --mscale-all-dim 1.0 --enable-experimental""",
                    "--num-layers 4 --num-experts 16 --moe-shared-expert-intermediate-size 32 "
                    "--moe-layer-freq ([0]*2+[1]*2) --q-lora-rank 32 --kv-lora-rank 16 "
                    "--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --kv-channels 16 "
                    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*2|t*2mL"),
    "Nemotron 3 Nano": (NEMOTRON + """ --moe-router-topk 6 --moe-router-topk-scaling-factor 2.5
        --init-method-std 0.0173""",
                        "--hybrid-layer-pattern *E*E --num-experts 16 "
                        "--moe-shared-expert-intermediate-size 48 --expert-model-parallel-size 2"),
    "Nemotron 3 Super": (NEMOTRON + """ --moe-router-topk 22 --moe-router-topk-scaling-factor 5.0
        --is-hybrid-model --init-method-std 0.014""",
                         "--hybrid-layer-pattern *E-E --num-experts 32 --moe-latent-size 16 "
                         "--moe-shared-expert-intermediate-size 48 --tensor-model-parallel-size 2"),
}
SMALL = """--hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 64 --moe-ffn-hidden-size 32 --micro-batch-size 1 --global-batch-size 4
--train-iters 4 --lr 1e-2 --min-lr 1e-3 --lr-decay-iters 3 --log-interval 1 --split 90,10,0"""


def _losses(name: str, data: str, folder: Path, log: str,
            *more: str) -> list[dict[str, torch.Tensor]]:
    published, sizes = SCRIPTS[name]
    experts = [] if "--num-experts" in sizes else ["--num-experts", "8"]
    launched([*OF_ALL.split(), *published.split(), *SMALL.split(), *sizes.split(), *experts,
              "--data-path", data, "--log-file", log, *more], 2, folder, model=())
    rows = map(json.loads, (folder / log).read_text().splitlines())
    return [{key: torch.tensor(value) for key, value in row.items()
             if key == "grad_norm" or key.endswith("loss") and not isinstance(value, dict)}
            for row in rows if "lm_loss" in row]


@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_are_those_of_megatrons_layers(name: str, data: str, tmp_path: Path) -> None:
    """From one checkpoint of theirs; their latent layers need Transformer Engine."""
    latent = "--moe-latent-size" in SCRIPTS[name][1]
    native = [] if latent else ["--native-moe"]
    _losses(name, data, tmp_path, "first.jsonl", *native, "--exit-interval", "1", "--save", "first",
            "--save-interval", "1")
    goes_on = ["--load", "first", "--no-load-optim", "--no-load-rng"]
    ours = _losses(name, data, tmp_path, "ours.jsonl", *goes_on)
    assert len(ours) == 3 and ours[2]["lm_loss"] < ours[0]["lm_loss"]
    if not latent:
        wanted = _losses(name, data, tmp_path, "native.jsonl", *goes_on, *native)
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-7)
