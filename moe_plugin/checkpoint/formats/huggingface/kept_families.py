"""The families of `transformers` whose models keep their own routers when their experts are
replaced, and the families whose experts cannot be replaced.

The experts of a family that is in no table are also replaced if their class is decorated by
`use_experts_implementation`, because the decorator declares how the experts are called and stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_plugin.utils.messages import short

# model_type -> name and publisher, and what our routers and layers cannot compute
KEPT: Mapping[str, tuple[str, str]] = {
    "axk1": ("A.X-K1 (SK Telecom)", "a norm after the routed experts and the shared expert"),
    "axk2": ("A.X-K2 (SK Telecom)", "groups that were not chosen have the score 0 and can still be "
             "chosen"),
    "cohere2_moe": ("Command A+ (Cohere)", "the mean of routed and shared experts"),
    "dbrx": ("DBRX (Databricks)", "weights divided by their p-norm"),
    "deepseek_v4": ("DeepSeek-V4", "the root of softplus as score, experts chosen by token ids, a "
                    "shared expert that is not clamped"),
    "diffusion_gemma_text": ("DiffusionGemma (Google), its text model", "a norm and a scale of the "
                             "router's input, a scale for each expert"),
    "ernie4_5_vl_moe_text": ("Ernie 4.5 VL (Baidu), its text model", "separate routers and experts "
                             "for text and images"),
    "gemma4_text": ("Gemma 4 (Google), its text model", "a norm and a scale of the router's input, "
                    "a scale for each expert"),
    "hy_v4": ("Hunyuan 4 (Tencent)", "a shared expert that is not clamped"),
    "hy_v4_vl_text": ("Hunyuan 4 VL (Tencent), its text model", "a shared expert that is not "
                      "clamped"),
    "inkling_text": ("Inkling (Thinking Machines), its text model", "weights shared with the "
                     "shared experts"),
    "inkling2_text": ("Inkling 2 (Thinking Machines), its text model", "caps on the gate and on "
                      "the other factor"),
    "inkling2_loop_text": ("Inkling 2 Mini (Thinking Machines), its text model", "caps on the gate "
                           "and on the other factor"),
    "kolibri1": ("Kolibri 1 (Aleph Alpha)", "a bias on logits that is used only to select experts"),
    "laguna": ("Laguna (Poolside)", "a cap on logits"),
    "longcat_flash": ("LongCat-Flash (Meituan)", "experts that return their input"),
    "minimax_m3_vl_text": ("MiniMax-M3 (MiniMax), its text model", "a shared expert that stores "
                           "its gate and up weights in one matrix"),
    "muse_spark_text": ("Muse Spark (Meta), its text model", "a norm of each expert's output"),
    "openai_privacy_filter": ("Privacy Filter (OpenAI)", "weights divided by k, outputs multiplied "
                              "by k"),
    "step3p5": ("Step 3.7 (StepFun), its text model", "gates that are clamped after the "
                "activation"),
    "zaya": ("Zaya (Zyphra)", "a router with hidden layers that reads the router before it, an "
             "expert that is skipped"),
}

# model_type -> name and publisher, why its experts cannot be replaced, and what would be needed
REFUSED: Mapping[str, tuple[str, str, str]] = {
    "doge": ("Doge (SmallDoge)", "each of its many experts is one row of an embedding, and its "
             "router mixes the tokens of a batch", "a layer that looks up experts by product keys"),
    "jetmoe": ("JetMoE", "its attention heads are experts too, and its blocks sort the tokens "
               "themselves", "a layer whose experts are the projections of attention"),
    "nllb-moe": ("NLLB-MoE (Meta)", "each expert is a separate module with its own dropouts",
                 "experts with biases and two dropouts, stacked from separate modules"),
    "switch_transformers": ("Switch Transformers (Google)", "each expert is a separate module, and "
                            "its router drops the tokens of each sequence that exceed a capacity",
                            "a capacity for each sequence, and experts stacked from modules"),
    "vitpose_backbone": ("ViTPose++", "the data set of an image chooses the expert, not a router, "
                         "and an expert computes a part of the output's columns",
                         "experts chosen by the caller"),
}


def refusal(config: Mapping[str, Any]) -> str:
    """Return why the experts of a model cannot be replaced.

    config: the contents of the model's `config.json`.
    """
    kind = str(config.get("model_type"))
    if kind in REFUSED:
        _, why, needed = REFUSED[kind]
        return (f"the experts of model_type={kind!r} cannot be replaced: {why}. This would need "
                f"{needed}")
    return (f"model_type={short(kind)} has no experts that can be replaced. At least one class "
            "must be decorated by use_experts_implementation of transformers. The supported "
            "families are listed in docs/families.md")
