"""The table of decoder model families in Hugging Face's `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_plugin.checkpoint.formats.huggingface.family import (
    GATE,
    GATE_BIAS,
    Block,
    Decoder,
    Family,
    shared_names,
)
from moe_plugin.checkpoint.source import CheckpointError
from moe_plugin.utils.messages import short

# parts that several families share
LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
          "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK_V2 = Block(
    names={**GATE, **shared_names("shared_experts")}, shared="plain", normalize=False, scales=True,
    group_scores=1, methods=("greedy", "group_limited_greedy"),
    keys={"experts": "n_routed_experts"})
DEEPSEEK_V3 = Block(
    names={**GATE_BIAS, **shared_names("shared_experts")}, shared="plain", scores="sigmoid",
    expert_bias=True, scales=True, methods=("noaux_tc",), group_scores=2,
    float32=("gate.",), keys={"experts": "n_routed_experts"})
GRANITE_MOE = Block(
    module="block_sparse_moe", names={"router.weight": "router.weight"},
    files={"router.weight": "router.layer.weight", "gate_up": "input_linear.weight",
           "down": "output_linear.weight"},
    parts=(), normalize=True,
    keys={"experts": "num_local_experts", "width": "intermediate_size"})
MIXTRAL = Block(
    module_in_files="block_sparse_moe", parts=("w1", "w3", "w2"), normalize=True,
    keys={"experts": "num_local_experts", "width": "intermediate_size"})
PLAIN_SHARED = Block(  # a shared expert without a gate, unlike Qwen2-MoE
    shared="plain", names={**GATE, **shared_names("shared_expert")}, normalize_add=0.0)
QWEN2_MOE = Block(shared="gated", names={
    **GATE, **shared_names("shared_expert"), "shared.gate.weight": "shared_expert_gate.weight"})

_ALL = (
    Family(model_type="afmoe", architecture="AfmoeForCausalLM", title="Trinity (Arcee AI)",
           block=Block(
               names={"router.weight": "router.gate.weight", "router.expert_bias": "expert_bias",
                      **shared_names("shared_experts")},
               shared="plain", scores="sigmoid", expert_bias=True, normalize=True, scales=True,
               keys={"router_scale": "route_scale"}),
           alone="gates on attention, four norms per layer, windows in some layers"),
    Family(model_type="aria_text", architecture="AriaTextForCausalLM",
           title="Aria (Rhymes AI), its text model",
           block=Block(
               names={"router.weight": "router.weight", **shared_names("shared_experts")},
               files={"gate_up": "experts.fc1.weight", "down": "experts.fc2.weight"},
               transposed=True, parts=(), shared="plain", normalize=True,
               needs={"hidden_act": "silu"},
               keys={"top_k": "moe_topk", "experts": "moe_num_experts",
                     "width": "intermediate_size"}),
           alone="the experts of the published files are in a multimodal model"),
    Family(model_type="bailing_hybrid", architecture="BailingHybridForCausalLM",
           title="Ling 3.0 (inclusionAI)",
           block=replace(DEEPSEEK_V3, keys={
               "top_k": "num_experts_per_token", "normalize_top_k": "moe_renormalize",
               "groups": "num_expert_group"}),
           alone="delta attention next to latent attention"),
    Family(model_type="beam", architecture="BeamForCausalLM", title="Beam (Reflection AI)",
           block=replace(DEEPSEEK_V3, names=GATE_BIAS, shared="none", keys={}),
           alone="attention over a window in most layers, a cap on logits"),
    Family(model_type="deepseek_ocr2_text", architecture="DeepseekOcr2ForConditionalGeneration",
           title="DeepSeek-OCR 2, its text model", block=DEEPSEEK_V2,
           alone="a part of a multimodal model"),
    Family(model_type="deepseek_v2", architecture="DeepseekV2ForCausalLM", title="DeepSeek-V2",
           block=DEEPSEEK_V2,
           decoder=Decoder(dense="first", biases=("none", "all"), mlp_bias=True, latent=True,
                           defaults={**LATENT, "routed_scaling_factor": 1.0})),
    Family(model_type="deepseek_v3", architecture="DeepseekV3ForCausalLM",
           title="DeepSeek-V3, and Kimi-K2 (Moonshot AI), which uses the same model",
           also=("kimi_k2",), block=DEEPSEEK_V3,
           decoder=Decoder(
               dense="first", biases=("none", "all"), latent=True,
               defaults={**LATENT, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
                         "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
                         "rope_interleave": True})),
    Family(model_type="deepseek_v32", architecture="DeepseekV32ForCausalLM",
           title="DeepSeek-V3.2", block=DEEPSEEK_V3, alone="sparse attention with an indexer"),
    Family(model_type="dots1", architecture="Dots1ForCausalLM", title="dots.llm1 (rednote)",
           block=DEEPSEEK_V3,
           decoder=Decoder(
               dense="first", biases=("none", "all"), qk_norm=("head",),
               defaults={"num_key_value_heads": 32, "routed_scaling_factor": 1.0, "n_group": 1,
                         "topk_group": 1, "sliding_window": None})),
    Family(model_type="dots3_note_text", architecture="Dots3NoteForCausalLM",
           title="dots3-note (dots studio), its text model", block=DEEPSEEK_V3,
           alone="sparse attention with an indexer next to attention over a window"),
    Family(model_type="ernie4_5_moe", architecture="Ernie4_5_MoeForCausalLM",
           title="Ernie 4.5 (Baidu)",
           block=Block(
               names={**GATE, "router.expert_bias": "gate.moe_statics.e_score_correction_bias",
                      **shared_names("shared_experts")},
               files={"router.expert_bias": "moe_statics.e_score_correction_bias"},
               bias_row=True, shared="plain", expert_bias=True, normalize=True, float32=("gate.",),
               normalize_add=0.0, normalize_min="moe_norm_min",
               keys={"top_k": "moe_k", "experts": "moe_num_experts"}),
           alone="rotary positions that pair neighbors"),
    Family(model_type="exaone_moe", architecture="ExaoneMoeForCausalLM",
           title="K-EXAONE (LG AI Research)",
           block=replace(DEEPSEEK_V3, keys={},
                         files={"router.expert_bias": "e_score_correction_bias"}),
           alone="windows in some layers, no positions in some layers"),
    Family(model_type="flex_olmo", architecture="FlexOlmoForCausalLM", title="FlexOlmo (AI2)",
           block=Block(keys={"width": "intermediate_size"}),
           alone="norms after attention and experts"),
    Family(model_type="flint", architecture="FlintForCausalLM", title="Flint (RecursiveSI)",
           block=replace(PLAIN_SHARED, scores="sigmoid", float32=("gate.",)),
           alone="attention with sinks"),
    Family(model_type="glm4_moe", architecture="Glm4MoeForCausalLM",
           title="GLM-4.5 and its successors (Z.ai)",
           block=DEEPSEEK_V3,
           decoder=Decoder(
               dense="first", biases=("none", "qkv"), qk_norm=("none", "head"), part=True,
               defaults={"num_key_value_heads": 8, "routed_scaling_factor": 1.0, "n_group": 1,
                         "topk_group": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
                         "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
                         "first_k_dense_replace": 1})),
    Family(model_type="glm4_moe_lite", architecture="Glm4MoeLiteForCausalLM",
           title="GLM-4.7-Flash (Z.ai)",
           block=DEEPSEEK_V3,
           alone="latent attention, a list of dense layers"),
    Family(model_type="glm4v_moe_text", architecture="Glm4vMoeForConditionalGeneration",
           title="GLM-4.5V (Z.ai), its text model", block=DEEPSEEK_V3,
           alone="a part of a multimodal model"),
    Family(model_type="glm5_next_text", architecture="Glm5NextForConditionalGeneration",
           title="GLM-5.3-Flash (Z.ai), its text model",
           block=replace(DEEPSEEK_V3, settings={"activation": "silu"}, keys={
               "experts": "n_routed_experts", "gate_clamp": "swiglu_limit"}),
           alone="a part of a multimodal model"),
    Family(model_type="glm_moe_dsa", architecture="GlmMoeDsaForCausalLM", title="GLM-5 (Z.ai)",
           block=DEEPSEEK_V3,
           alone="sparse attention with an indexer"),
    Family(model_type="gpt_oss", architecture="GptOssForCausalLM", title="gpt-oss (OpenAI)",
           block=Block(
               names={"router.weight": "router.weight", "router.bias": "router.bias"},
               transposed=True, in_turn=True, parts=(), normalize=True, pair=True,
               keys={"experts": "num_local_experts", "width": "intermediate_size",
                     "gate_clamp": "swiglu_limit"},
               needs={"swiglu_alpha": 1.702},
               settings={"activation": "quick_gelu", "linear_offset": 1.0}),
           alone="attention with sinks, over a window in every other layer"),
    Family(model_type="granitemoe", architecture="GraniteMoeForCausalLM",
           title="Granite 3 MoE (IBM)",
           block=GRANITE_MOE,
           alone="factors on embeddings, attention, residuals and logits"),
    Family(model_type="granitemoe_swa", architecture="GraniteMoeSWAForCausalLM",
           title="Granite MoE with attention over a window (IBM)",
           block=replace(GRANITE_MOE, files={}),
           alone="attention over a window, a shared expert outside of the block, factors"),
    Family(model_type="granitemoehybrid", architecture="GraniteMoeHybridForCausalLM",
           title="Granite 4 (IBM)",
           block=GRANITE_MOE, alone="Mamba layers, a shared expert outside of the block, factors"),
    Family(model_type="granitemoeshared", architecture="GraniteMoeSharedForCausalLM",
           title="Granite MoE with shared experts (IBM)", block=GRANITE_MOE,
           alone="a shared expert outside of the block, factors"),
    Family(model_type="hunyuan_v1_moe", architecture="HunYuanMoEV1ForCausalLM",
           title="Hunyuan-A13B (Tencent)",
           block=Block(
               names={"router.weight": "gate.wg.weight", **shared_names("shared_mlp")},
               shared="plain", normalize=True, float32=("gate.",),
               keys={"top_k": "moe_topk", "width": "intermediate_size"}),
           alone="norms of queries and keys after their rotation"),
    Family(model_type="hy_v3", architecture="HYV3ForCausalLM", title="Hunyuan 3 (Tencent)",
           block=Block(
               names={**GATE, "router.expert_bias": "e_score_correction_bias",
                      **shared_names("shared_experts")},
               files={"router.weight": "router.gate.weight", "router.expert_bias": "expert_bias",
                      **shared_names("shared_mlp")},
               shared="plain", scores="sigmoid", expert_bias=True, normalize=True, scales=True,
               float32=("gate.", "router.gate."), keys={"router_scale": "router_scaling_factor"}),
           alone="a list of dense layers"),
    Family(model_type="jamba", architecture="JambaForCausalLM", title="Jamba (AI21)",
           block=Block(module="feed_forward", names={"router.weight": "router.weight"},
                       normalize=False, keys={"width": "intermediate_size"}),
           alone="Mamba layers"),
    Family(model_type="kimi_linear", architecture="KimiLinearForCausalLM",
           title="Kimi Linear (Moonshot AI)",
           block=replace(
               DEEPSEEK_V3, module_in_files="block_sparse_moe", parts=("w1", "w3", "w2"),
               keys={"top_k": "num_experts_per_token", "normalize_top_k": "moe_renormalize",
                     "groups": "num_expert_group"}),
           alone="delta attention next to latent attention without positions"),
    Family(model_type="lara_mini", architecture="LaraMiniForCausalLM",
           title="Lara 4 Mini (Translated)",
           block=replace(PLAIN_SHARED, parts=()),
           alone="gated delta networks in most layers"),
    Family(model_type="lfm2_moe", architecture="Lfm2MoeForCausalLM", title="LFM2-MoE (Liquid AI)",
           block=Block(module="feed_forward", names={**GATE, "router.expert_bias": "expert_bias"},
                       parts=("w1", "w3", "w2"), scores="sigmoid", expert_bias=True, scales=True,
                       normalize_add=1e-6, settings={"activation": "silu"}),
           alone="convolutions in most layers"),
    Family(model_type="llama", architecture="LlamaForCausalLM", title="Llama 2 and 3 (Meta); dense",
           decoder=Decoder(dense="any", biases=("none", "all"), mlp_bias=True)),
    Family(model_type="llama4_text", architecture="Llama4ForCausalLM",
           title="Llama 4 (Meta), its text model",
           block=Block(
               module="feed_forward",
               names={"router.weight": "router.weight", **shared_names("shared_expert")},
               transposed=True, parts=(), shared="plain", scores="sigmoid", normalize=False,
               pair=True, keys={"experts": "num_local_experts", "width": "intermediate_size"},
               settings={"weights_first": True}),
           alone="attention in chunks, layers without positions, norms without weights"),
    Family(model_type="mellum", architecture="MellumForCausalLM", title="Mellum 2 (JetBrains)",
           block=Block(), alone="attention over a window in some layers"),
    Family(model_type="mimo_v2_flash", architecture="MiMoV2FlashForCausalLM",
           title="MiMo-V2-Flash (Xiaomi)",
           block=replace(DEEPSEEK_V3, names=GATE_BIAS, shared="none"),
           alone="attention with sinks, over a window in most layers"),
    Family(model_type="minimax", architecture="MiniMaxForCausalLM",
           title="MiniMax-Text-01 (MiniMax)",
           block=MIXTRAL,
           alone="lightning attention, scaled residuals"),
    Family(model_type="minimax_m2", architecture="MiniMaxM2ForCausalLM",
           title="MiniMax-M2 (MiniMax)",
           block=replace(
               MIXTRAL, names={**GATE, "router.expert_bias": "e_score_correction_bias"},
               scores="sigmoid", expert_bias=True, normalize_add=0.0),
           alone="norms of all queries and keys together with rotary positions of a part of "
                 "each head"),
    Family(model_type="mistral", architecture="MistralForCausalLM",
           title="Mistral (Mistral AI); dense",
           decoder=Decoder(dense="any", bias_key="", window=True,
                           defaults={"num_key_value_heads": 8, "sliding_window": 4096})),
    Family(model_type="mistral4", architecture="Mistral4ForCausalLM",
           title="Mistral Small 4 (Mistral AI)",
           block=replace(DEEPSEEK_V3, names={**GATE, **shared_names("shared_experts")}, parts=(),
                         scores="softmax", expert_bias=False, float32=()),
           alone="latent attention whose queries are scaled by their position"),
    Family(model_type="mistral_large4_text",
           architecture="MistralLarge4ForConditionalGeneration",
           title="Mistral Large 4 (Mistral AI), its text model",
           block=replace(DEEPSEEK_V3, names={**GATE, **shared_names("shared_experts")}, parts=(),
                         scores="softmax", expert_bias=False, normalize=True),
           alone="sparse attention with an indexer, a part of a multimodal model"),
    Family(model_type="mixtral", architecture="MixtralForCausalLM", title="Mixtral (Mistral AI)",
           block=MIXTRAL,
           decoder=Decoder(
               bias_key="", window=True, extras=("router_jitter_noise",),
               defaults={"num_key_value_heads": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
                         "rope_theta": 1e6})),
    Family(model_type="nemotron_h", architecture="NemotronHForCausalLM",
           title="Nemotron 3 (NVIDIA), hybrids of Mamba, attention and MoE, with or without a "
                 "latent width",
           block=Block(
               module="mixer", gated=False, gate_up="experts.up_proj",
               parts=("up_proj", "down_proj"),
               names={**GATE_BIAS, **shared_names("shared_experts"),
                      "latent.down.weight": "fc1_latent_proj.weight",
                      "latent.up.weight": "fc2_latent_proj.weight"},
               shared="plain", scores="sigmoid", expert_bias=True, scales=True, group_scores=2,
               float32=("gate.",),
               keys={"activation": "mlp_hidden_act", "experts": "n_routed_experts"}),
           alone="Mamba layers; each layer has a single type"),
    Family(model_type="olmoe", architecture="OlmoeForCausalLM", title="OLMoE (AI2)",
           block=Block(keys={"width": "intermediate_size"}),
           decoder=Decoder(biases=("none", "all"), qk_norm=("all",), extras=("clip_qkv",),
                           defaults={"num_experts_per_tok": 8, "rms_norm_eps": 1e-5})),
    Family(model_type="phimoe", architecture="PhimoeForCausalLM", title="Phi-3.5-MoE (Microsoft)",
           block=Block(
               module_in_files="block_sparse_moe", names={"router.weight": "router.weight"},
               files={"router.weight": "gate.weight"}, parts=("w1", "w3", "w2"),
               scores="sparsemixer", normalize=False, needs={"num_experts_per_tok": 2},
               keys={"experts": "num_local_experts", "width": "intermediate_size",
                     "mixer_eps": "router_jitter_noise"}),
           alone="layer norms with biases, a bias of the output matrix"),
    Family(model_type="qwen2", architecture="Qwen2ForCausalLM", title="Qwen2 (Alibaba); dense",
           decoder=Decoder(dense="any", biases=("qkv",), bias_key="",
                           defaults={"num_key_value_heads": 32})),
    Family(model_type="qwen2_moe", architecture="Qwen2MoeForCausalLM", title="Qwen2-MoE (Alibaba)",
           block=QWEN2_MOE,
           decoder=Decoder(dense="any", biases=("none", "qkv"), bias_key="qkv_bias",
                           defaults={"num_key_value_heads": 16, "num_experts_per_tok": 4})),
    Family(model_type="qwen3", architecture="Qwen3ForCausalLM", title="Qwen3 (Alibaba); dense",
           decoder=Decoder(dense="any", biases=("none", "all"), qk_norm=("head",),
                           defaults={"num_key_value_heads": 32})),
    Family(model_type="qwen3_5_moe_text", architecture="Qwen3_5MoeForCausalLM",
           title="Qwen3.5-MoE (Alibaba), its text model",
           block=replace(QWEN2_MOE, normalize=True),
           alone="gated delta networks in three of four layers, gates on attention"),
    Family(model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", title="Qwen3-MoE (Alibaba)",
           block=Block(),
           decoder=Decoder(dense="any", biases=("none", "all"), qk_norm=("head",),
                           defaults={"num_key_value_heads": 4, "num_experts_per_tok": 8})),
    Family(model_type="qwen3_omni_moe_text",
           architecture="Qwen3OmniMoeThinkerForConditionalGeneration",
           title="Qwen3-Omni-MoE (Alibaba), the text model of its thinker", block=Block(),
           alone="a part of a multimodal model"),
    Family(model_type="qwen3_vl_moe_text", architecture="Qwen3VLMoeForConditionalGeneration",
           title="Qwen3-VL-MoE (Alibaba), its text model", block=Block(parts=(), normalize=True),
           alone="a part of a multimodal model"),
    Family(model_type="qwen3_next", architecture="Qwen3NextForCausalLM",
           title="Qwen3-Next (Alibaba)",
           block=QWEN2_MOE,
           alone="gated delta networks in three of four layers, gates on attention"),
    Family(model_type="qwen4_exp_text", architecture="Qwen4ExpForCausalLM",
           title="Qwen4-Exp (Alibaba), its text model", block=QWEN2_MOE,
           alone="gated delta networks, hyper-connections, embeddings of n-grams"),
    Family(model_type="sarvam_mla", architecture="DeepseekV3ForCausalLM",
           title="Sarvam with latent attention (Sarvam AI)", block=DEEPSEEK_V3,
           alone="defaults that differ from those of DeepSeek-V3"),
    Family(model_type="sarvam_moe", architecture="Glm4MoeForCausalLM", title="Sarvam (Sarvam AI)",
           block=DEEPSEEK_V3, alone="defaults that differ from those of GLM-4.5"),
    Family(model_type="solar_open", architecture="SolarOpenForCausalLM",
           title="Solar Open (Upstage)",
           block=DEEPSEEK_V3,
           decoder=Decoder(
               biases=("none", "qkv"), part=True,
               defaults={"num_key_value_heads": 8, "routed_scaling_factor": 1.0, "n_group": 1,
                         "topk_group": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
                         "rms_norm_eps": 1e-5, "rope_theta": 1e6})),
    Family(model_type="unlimited_ocr_text", architecture="UnlimitedOcrForConditionalGeneration",
           title="Unlimited-OCR (Baidu), its text model", block=DEEPSEEK_V2,
           alone="a part of a multimodal model"),
)

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}

BY_TYPE = {name: family for family in FAMILIES.values()
            for name in (family.model_type, *family.also)}


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the model family of a `config.json`, or raise `CheckpointError` if it is unknown."""
    name = config.get("model_type")
    if name not in BY_TYPE:
        raise CheckpointError(f"config.json: model_type={short(name)} is not supported; supported "
                              f"types: {', '.join(BY_TYPE)}")
    return BY_TYPE[name]


def moe_block_of(config: Mapping[str, Any]) -> Block | None:
    """Return the description of the MoE block for a `config.json`, or None if the model is dense or
    its family is unknown.
    """
    family = BY_TYPE.get(str(config.get("model_type")))
    return None if family is None else family.block
