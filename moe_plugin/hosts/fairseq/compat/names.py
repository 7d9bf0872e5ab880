"""fairseq symbols whose import path may differ between versions. Symbols are imported on first use.

The table lists the module in which fairseq 0.12.2 defines each symbol. If a symbol moves, only this
table has to change. All other modules may import only `fairseq.dataclass`, `fairseq.metrics` and
the functions that register models and criteria directly from fairseq.
`tests/packaging/test_names.py` checks this rule.
"""

from __future__ import annotations

import importlib
from typing import Any

# module below fairseq -> names defined in it
_PLACES = {
    "criterions.cross_entropy": ("CrossEntropyCriterion", "CrossEntropyCriterionConfig"),
    "criterions.label_smoothed_cross_entropy": ("LabelSmoothedCrossEntropyCriterion",
                                                "LabelSmoothedCrossEntropyCriterionConfig"),
    "data.iterators": ("EpochBatchIterator",),
    "dataclass.configs": ("FairseqConfig",),
    "dataclass.utils": ("convert_namespace_to_omegaconf", "gen_parser_from_dataclass"),
    "logging.meters": ("Meter",),
    "models": ("ARCH_CONFIG_REGISTRY", "ARCH_MODEL_NAME_REGISTRY", "ARCH_MODEL_REGISTRY",
               "MODEL_DATACLASS_REGISTRY"),
    "models.transformer": ("TransformerModel",),
    "models.transformer.transformer_legacy": ("base_architecture",),
    "models.transformer_lm": ("TransformerLanguageModel", "TransformerLanguageModelConfig",
                              "base_gpt3_architecture"),
    "modules.checkpoint_activations": ("checkpoint_wrapper",),
    "modules.transformer_layer": ("TransformerDecoderLayerBase", "TransformerEncoderLayerBase"),
    "optim": ("FairseqOptimizer", "FP16Optimizer", "MemoryEfficientFP16Optimizer",
              "build_optimizer"),
    "optim.lr_scheduler": ("build_lr_scheduler",),
    "registry": ("REGISTRIES",),
    "tasks": ("FairseqTask", "TASK_DATACLASS_REGISTRY"),
    "trainer": ("Trainer",),
}
MODULES = {"benchmark": "benchmark", "distributed_utils": "distributed.utils",
           "options": "options", "tasks": "tasks", "trainer": "trainer", "utils": "utils"}
PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return importlib.import_module(f"fairseq.{MODULES[name]}")
    if name not in PLACE_OF:
        raise AttributeError(f"{__name__} has no name {name!r}. Add the name to the table in this "
                             "module")
    return vars(importlib.import_module(f"fairseq.{PLACE_OF[name]}"))[name]
