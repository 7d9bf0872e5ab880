"""Optional support for running Megatron's own training code (`megatron.training`) without CUDA.

This module builds on `compat.cpu`. `compat.cpu` is sufficient for Megatron-core, but the function
`pretrain` of the training code also requires CUDA when it starts. Each patch lists the functions it
replaces, the Megatron versions that need the patch, and the reason. `enable()` applies all patches
until the process ends. Call `enable()` before the script builds any object.
"""

from __future__ import annotations

import argparse
import enum
import functools
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from moe_plugin.hosts.megatron.compat import cpu
from moe_plugin.hosts.megatron.compat.settings import (
    Provider,
    plain_name,
    replace_training,
    training_module,
)
from moe_plugin.utils.messages import first_process
from moe_plugin.utils.replaced import replaced

logger = logging.getLogger(__name__)
PATCHES: list[cpu.Patch] = []

# defaults for a machine without Transformer Engine; arguments of the script override them
WITHOUT_ENGINE = {
    "transformer_impl": "local", "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True, "masked_softmax_fusion": False, "apply_rope_fusion": False
}
# defaults for features without a kernel or backend on CPU; use_cpu_initialization makes the initial
# weights independent of the parallel layout
DEFAULTS = {
    **WITHOUT_ENGINE, "distributed_backend": "gloo", "bias_gelu_fusion": False,
    "bias_dropout_fusion": False, "use_cpu_initialization": True
}
# arguments that choose between implementations of the same computation: values that need a GPU or a
# GPU package, and the value that a run on CPU uses instead
_IMPLEMENTATIONS: dict[str, tuple[tuple[Any, ...], Any]] = {
    **dict.fromkeys((
        "moe_permute_fusion", "moe_router_fusion", "moe_enable_deepep", "use_flash_attn",
        "cross_entropy_loss_fusion", "tp_comm_overlap", "gradient_accumulation_fusion",
        "use_transformer_engine_op_fuser", "moe_permute_fusion_into_hybridep", "use_nccl_ub",
        "nccl_ub", "moe_use_device_initiated_grouped_gemm"), ((True,), False)),
    "moe_token_dispatcher_type": (("flex",), "alltoall"),
    "transformer_impl": (("transformer_engine",), "local"),
    "distributed_backend": (("nccl",), "gloo"),
    "attention_backend": (("flash", "fused"), "auto"),
}


def enable() -> None:
    cpu.enable(force=True)
    for patch in PATCHES:
        patch.apply()


def with_defaults(defaults: Mapping[str, Any], provider: Provider | None) -> Provider:
    """Return an argument provider that also changes the defaults of some Megatron arguments."""

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = parser if provider is None else provider(parser)
        known = {action.dest for action in parser._actions}
        parser.set_defaults(**{name: value for name, value in defaults.items() if name in known})
        return parser

    return provide


def leave_out(args: argparse.Namespace) -> None:
    """Change arguments that select implementations that need CUDA, and log their names."""
    left = []
    for name, (lacking, instead) in _IMPLEMENTATIONS.items():
        value = getattr(args, name, None)
        if plain_name(value) not in map(str, lacking):
            continue
        value_class: Any = type(value)
        setattr(args, name, value_class[instead] if isinstance(value, enum.Enum) else instead)
        flag = f"--{name.replace('_', '-')}"
        left.append(flag if value is True else f"{flag} {plain_name(value)} ({instead})")
    if left and first_process():
        _say_once("arguments ignored on CPU, because they choose implementations for GPUs: "
                  + ", ".join(left))


@functools.cache
def _say_once(text: str) -> None:
    logger.info(text)  # cached, because scripts parse their arguments more than once


_patch = functools.partial(cpu.patch_in, PATCHES)


@_patch("initialize.initialize_megatron", "0.15 to 0.19",
        "it asserts that CUDA exists, and `pretrain` does not pass `allow_no_cuda`")
def _without_cuda() -> None:
    replace_training("initialize_megatron",
                     lambda start: functools.partial(start, allow_no_cuda=True))


@_patch("initialize._initialize_distributed, _set_random_seed", "0.15 to 0.19",
        "without a device they create no parallel groups and do not seed the tensor-parallel "
        "generator")
def _one_device() -> None:
    for name in ("_initialize_distributed", "_set_random_seed"):
        replace_training(name, replaced(torch.cuda, device_count=lambda: 1))


@_patch("initialize.set_jit_fusion_options; torch.compile", "0.15 to 0.19",
        "it warms up functions that torch.compile would compile for CPU, which takes 15 s for the "
        "first function; uncompiled functions are as fast on CPU")
def _uncompiled() -> None:
    importlib.import_module("torch._dynamo").config.disable = True
    replace_training("set_jit_fusion_options", lambda _: lambda *_args, **_kwargs: None)


@_patch("training.build_train_valid_test_data_iterators", "0.15 to 0.20",
        "loaders draw seeds from torch's generator after a checkpoint was loaded and only on ranks "
        "that read data; on CPU dropout uses the same generator")
def _seeds_of_loaders() -> None:
    replace_training("build_train_valid_test_data_iterators", torch.random.fork_rng(devices=[]))


@_patch("arguments.core_transformer_config_from_args", "0.15 to 0.17",
        "virtual stages free tensors before gloo has sent them, which makes losses wrong")
def _kept_until_sent() -> None:
    # imported late: this module imports Megatron, which may be located next to the script
    from moe_plugin.hosts.megatron.compat.sequence_parts import NUMBER

    if NUMBER < (0, 18):
        replace_training("core_transformer_config_from_args", _without_freeing)


def _without_freeing(function: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        config = function(*args, **kwargs)
        config.deallocate_pipeline_outputs = False
        return config

    return call


@_patch("utils.get_device_arch_version", "0.15 to 0.19",
        "argument checks read the GPU's architecture, to require CUDA_DEVICE_MAX_CONNECTIONS=1 "
        "before Blackwell (10)")
def _architecture() -> None:
    replace_training("get_device_arch_version", lambda _: lambda: 10)


@_patch("NCCL_ALGO", "0.17 to 0.18",
        "argument checks of --deterministic-mode require it even with gloo")
def _algorithm() -> None:
    os.environ.setdefault("NCCL_ALGO", "Ring")


@_patch("torch.cuda.get_device_capability", "0.15 to 0.19",
        "argument checks of --moe-grouped-gemm read it, to require GPUs of generation 8 or newer")
def _capability() -> None:
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda _device=None: (10, 0)


@_patch("legacy.fused_kernels.load", "0.15 to 0.16",
        "a source checkout compiles its CUDA kernels in this function, which requires nvcc")
def _kernels() -> None:
    kernels = vars(training_module("initialize")).get("fused_kernels")
    if kernels is not None:
        kernels.load = lambda _args: None


@_patch("transformer_config.is_te_min_version", "0.15 to main",
        "fp8 recipes with experts require Transformer Engine, but our experts do not need it")
def _recipes_without_engine() -> None:
    if cpu.engine_installed():
        return
    module: Any = importlib.import_module("megatron.core.transformer.transformer_config")
    least = module.is_te_min_version

    def is_te_min_version(version: str, *args: Any, **kwargs: Any) -> bool:
        # Megatron compares with these two versions only for fp8 with experts
        if version not in ("1.7.0.dev0", "1.11.0"):
            return bool(least(version, *args, **kwargs))
        if first_process():
            _say_once("Transformer Engine is not installed, so the fp8 recipe applies only to "
                      "moe-plugin's experts")
        return True

    module.is_te_min_version = is_te_min_version
