"""Patches that make fairseq run on CPUs, and with current versions of numpy, torch and hydra."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.comm.host_collectives import gather_objects
from moe_plugin.experts.base import is_expert
from moe_plugin.hosts.fairseq.compat.patching import Overlay, patch, replaces
from moe_plugin.utils.data_workers import report_lost_batches

logger = logging.getLogger(__name__)
# parameters of fairseq's encoder layers that are read only by torch's fused inference path
FUSED_PATH_COPIES = ("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias",
                     "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")


@patch
def numpy_names() -> None:
    """Restore names that fairseq's modules use but that newer numpy versions have removed.

    fairseq <= 0.12.3 uses `np.int` and `np.float`, which numpy >= 1.24 does not define, and
    `np.compat`, which numpy >= 2 does not define.
    """
    import numpy
    from fairseq.data import data_utils, language_pair_dataset, token_block_dataset
    from fairseq.modules import dynamic_crf_layer

    old = Overlay(numpy, compat=SimpleNamespace(long=numpy.int64), int=int, float=float)
    for module in (data_utils, language_pair_dataset, token_block_dataset):
        module.np = old
    dynamic_crf_layer.np = old


@patch
def full_checkpoints() -> None:
    """Make fairseq load checkpoints and broadcasts that contain config objects.

    By default, torch >= 2.6 loads only tensors and plain values. fairseq's checkpoints also contain
    settings. Broadcasts contain settings too. Loading settings from broadcasts is safe, because
    broadcasts come only from ranks of the same run.
    """
    from fairseq import checkpoint_utils
    from fairseq.distributed import utils

    from moe_plugin.checkpoint.formats.fairseq import files
    from moe_plugin.hosts.fairseq.groups import current_evaluation

    def load(*args: Any, **kwargs: Any) -> Any:
        return torch.load(*args, **{"weights_only": False, **kwargs})

    def load_checkpoint(file: Any, **options: Any) -> Any:
        if current_evaluation() is None or not isinstance(file, io.BufferedReader):
            return files.load(file, **options)
        return files.load(file.name, mmap=True, **options)  # leaves the optimizer state on disk

    utils.torch = Overlay(torch, load=load)
    checkpoint_utils.torch = Overlay(torch, load=load_checkpoint)


@patch
def hydra_of_its_time() -> None:
    """While fairseq composes its settings, set hydra's `version_base` to 1.1.

    fairseq <= 0.12.3 imports the module `hydra.experimental`. If any code in the process has
    started hydra with a `version_base` of 1.2 or more, hydra >= 1.2 rejects `hydra.experimental`.
    The previous `version_base` is restored afterwards.
    """
    from fairseq.dataclass import utils
    from hydra import initialize_config_dir
    from hydra.version import VersionBase

    here = os.path.dirname(utils.__file__)

    @contextmanager
    def initialize(config_path: str) -> Iterator[None]:
        before = VersionBase.instance().version_base
        try:
            with initialize_config_dir(os.path.normpath(os.path.join(here, config_path)),
                                       version_base="1.1"):
                yield
        finally:
            VersionBase.instance().version_base = before

    utils.initialize = initialize


@patch
def loaders_that_end() -> None:
    """Stop the run with an error if a data loader worker (`--num-workers`) cannot deliver a batch.

    torch 2.6 to 2.13 would wait forever for this batch.
    """
    report_lost_batches()


@replaces("distributed.utils.all_gather_list")
def gather_lists_without_cuda(original: Callable[..., Any], data: Any, group: Any = None,
                              max_size: int = 16384) -> list[Any]:
    """Gather Python objects from all ranks without CUDA.

    fairseq <= 0.12.3 uses `torch.cuda.ByteTensor` to gather objects.
    """
    from fairseq.distributed import utils

    if torch.cuda.is_available() and dist.get_backend(group) == "nccl":
        return original(data, group, max_size)
    group = utils.get_global_group() if group is None else group
    return gather_objects(data, "a step's numbers", group)


@replaces("models.distributed_fairseq_model.DistributedDataParallel")
def ddp_wrapping(original: Callable[..., Any], module: torch.nn.Module, device_ids: Any = None,
                 output_device: Any = None, **options: Any) -> Any:
    """On CPU, wrap models in torch's DDP without device ids. Copies of weights that are not used
    are also removed.

    fairseq always passes `device_ids`, which DDP rejects for parameters on CPU. fairseq 0.12.2 and
    0.12.3 store copies of weights in each encoder layer, for torch's fused inference path. These
    copies of weights never receive a gradient, so DDP would wait forever.
    """
    if all(parameter.device.type == "cpu" for parameter in module.parameters()):
        device_ids = output_device = None
    read_by_ddp: Any = module
    read_by_ddp._ddp_params_and_buffers_to_ignore = [
        *getattr(module, "_ddp_params_and_buffers_to_ignore", []), *_encoder_copies(module)]
    return original(module, device_ids=device_ids, output_device=output_device, **options)


@replaces("options.parse_args_and_arch")
def bf16_without_tpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make `--bf16` run without torch_xla.

    fairseq <= 0.12.3 interprets `--bf16` as a request for a TPU (in options.py), and then fails
    with an import error.
    """
    parsed = original(*args, **kwargs)
    namespace = parsed[0] if isinstance(parsed, tuple) else parsed
    if getattr(namespace, "tpu", False) and importlib.util.find_spec("torch_xla") is None:
        namespace.tpu = False
    return parsed


@replaces("modules.transformer_layer.TransformerEncoderLayerBase.__init__")
def encoder_layers_by_their_own_code(original: Callable[..., None], self: Any, *args: Any,
                                     **kwargs: Any) -> None:
    """During evaluation, run fairseq's own encoder code instead of torch's fused operator.

    fairseq 0.12 calls the fused operator without the type of the mask. torch >= 1.13 requires the
    type of the mask for batches with padding. In addition, the operator changes the order of
    dimensions for all layers of an encoder at once, which MoE layers do not support.
    """
    original(self, *args, **kwargs)
    self.can_use_fastpath = False


def fused_path_copies(layer: torch.nn.Module) -> list[str]:
    """Return the names of an encoder layer's parameter copies for torch's fused inference."""
    return [name for name in FUSED_PATH_COPIES if hasattr(layer, name)]


def drop_fused_path_copies(layer: torch.nn.Module) -> None:
    """Delete the copies of parameters in a layer that does not use torch's fused inference."""
    for name in fused_path_copies(layer):
        delattr(layer, name)


def fp32_copies(optimizer: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the pairs (parameter, fp32 copy) of an fp16 optimizer, or [] for other optimizers.

    fairseq <= 0.12.3 stores the fp32 copies as a list only with `--fp16-no-flatten-grads`. Other
    optimizers do not have the attribute in which this list is stored.
    """
    copies = getattr(optimizer, "fp32_params", None)
    return list(zip(optimizer.fp16_params, copies, strict=True)) if isinstance(copies, list) else []


def follow_parameters(wrapped: Any, optimizer: Any,
                      changed: Mapping[torch.Tensor, torch.nn.Parameter],
                      copies: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Replace old parameters with new parameters in the lists that fairseq stores.

    Args:
        wrapped: the model with its data-parallel wrapper.
        optimizer: fairseq's optimizer.
        changed: dict that maps each old parameter to its replacement.
        copies: dict that maps new parameters to their fp32 copies (see `fp32_copies`). `copies` is
            empty if the optimizer has no fp32 copies.
    """
    for params in getattr(wrapped, "per_device_params", ()):  # an attribute of `legacy_ddp`
        params[:] = [changed.get(p, p) for p in params]
    if copies:
        optimizer.fp16_params = [changed.get(p, p) for p in optimizer.fp16_params]
        optimizer.fp32_params = [copies[p] for p in optimizer.fp16_params]


def shards_optimizer_state(cfg: Any) -> bool:
    """Return True if fairseq's settings request sharding of the optimizer state.

    The optimizer state is sharded with `--ddp-backend fully_sharded` and with `--zero-sharding os`.
    """
    settings = cfg.distributed_training
    return settings.ddp_backend == "fully_sharded" or settings.zero_sharding == "os"


def _encoder_copies(model: torch.nn.Module) -> list[str]:
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    return [
        f"{path}.{name}" for path, layer in model.named_modules()
        if isinstance(layer, TransformerEncoderLayerBase) for name in fused_path_copies(layer)
    ]


class _HostScalar(torch.Tensor):
    def cuda(self, *_: Any, **__: Any) -> torch.Tensor:
        return self


@patch
def skipped_steps_without_cuda() -> None:
    """After a gradient overflow, skip the step without using CUDA.

    fairseq <= 0.12.3 calls `torch.tensor(0.0).cuda()` even on machines without CUDA.
    """
    from fairseq import trainer

    if not torch.cuda.is_available():
        trainer.torch = Overlay(
            torch, tensor=lambda *a, **k: torch.tensor(*a, **k).as_subclass(_HostScalar))


@replaces("optim.FP16Optimizer.build_optimizer")
def separate_fp32_copies(original: Callable[..., Any], cls: type, cfg: Any, params: Any,
                         **kwargs: Any) -> Any:
    """Enable `--fp16-no-flatten-grads` for models with experts, on CPU, and with sharding.

    Without this flag, fairseq <= 0.12.3 packs all fp32 copies of the weights into a single tensor
    on the current CUDA device. The packed tensor preserves neither the boundaries between
    parameters nor the attributes that mark expert parameters.
    """
    from omegaconf import open_dict

    params = list(params)
    needed = shards_optimizer_state(cfg) or any(
        is_expert(p) or p.device.type == "cpu" for p in params)
    if needed and not cfg.common.bf16 and not cfg.common.fp16_no_flatten_grads:
        logger.info("--fp16-no-flatten-grads is enabled because the model has experts, is sharded "
                    "or is trained on CPU")
        with open_dict(cfg):
            cfg.common.fp16_no_flatten_grads = True
    return original(cls, cfg, params, **kwargs)


@replaces("distributed.LegacyDistributedDataParallel.__init__")
def gradients_in_their_own_dtype(original: Callable[..., None], self: Any, module: torch.nn.Module,
                                 *args: Any, **kwargs: Any) -> None:
    """With `legacy_ddp`, reduce each gradient in its own dtype, and do not allocate buffer space
    that is not needed.

    fairseq <= 0.12.3 copies all gradients into one buffer, which has the dtype of the first
    parameter. With `--fp16` and `--bf16`, the buffer therefore lowers the precision of the
    gradients of parameters that stay in float32 (`router.fp32`). With this patch, gradients whose
    dtype differs from the buffer's dtype are reduced one by one, without the buffer.

    fairseq's buffer is as large as all parameters together (up to 2^28 elements). The buffer is
    reduced as a whole, although it contains no gradients of experts. With this patch, the buffer is
    only as large as the gradients in it.
    """
    original(self, module, *args, **kwargs)
    dtype, lists = next(module.parameters()).dtype, self.per_device_params
    self.per_device_params = [
        *([p for p in params if p.dtype == dtype] for params in lists),
        *([p] for params in lists for p in params if p.dtype != dtype)
    ]
    self.buffer_size = min(self.buffer_size, max(
        (sum(p.numel() for p in params if p.requires_grad and not is_expert(p))
         for params in self.per_device_params), default=0))


@replaces("tasks.FairseqTask.valid_step")
def empty_validation_batches(original: Callable[..., Any], self: Any, sample: Any, model: Any,
                             criterion: Any, **kwargs: Any) -> Any:
    """Support validation when some ranks have no data.

    If `fairseq-validate` of fairseq <= 0.12.3 runs on several ranks, ranks without data receive an
    empty batch and fail with a `KeyError`. With this patch, a rank without data runs one sentence,
    so that all ranks run the same collectives. The results do not include this sentence.
    """
    if sample:
        return original(self, sample, model, criterion, **kwargs)
    dataset = next(iter(self.datasets.values()))
    loss, _, logged = original(self, dataset.collater([dataset[0]]), model, criterion, **kwargs)
    return loss * 0, 0, {key: value * 0 for key, value in logged.items()}


@replaces("nan_detector.NanDetector.add_hooks")
def records_have_gradients(original: Callable[..., None], self: Any,
                           module: torch.nn.Module) -> None:
    """Let fairseq find the first module whose output contains a non-finite value.

    After fairseq <= 0.12.3 has detected a non-finite value, it repeats the step with torch's
    deprecated `register_backward_hook`. If a module returns a record of several tensors, as routers
    and this package's layers do, the hooks of fairseq fail with a `TypeError`, which hides the
    original error. With this patch, each tensor in the record is checked separately.
    """
    from moe_plugin.memory.activations.offload import tensors
    from moe_plugin.routing.contract import RouterModule

    if not type(module).__module__.startswith("moe_plugin.") and not isinstance(
            module, RouterModule):
        original(self, module)
        return

    def look(_: torch.nn.Module, given: Any, output: Any) -> None:
        for x in tensors(output):
            if self.forward:
                self.fhook_fn(module, given, x)
            if self.backward and x.requires_grad:
                x.register_hook(lambda gradient: self.bhook_fn(module, (), gradient))

    self.fhooks.append(module.register_forward_hook(look))


@replaces("models.ema.ema.EMA.__init__")
def averages_of_floating_point(original: Callable[..., None], self: Any, model: torch.nn.Module,
                               config: Any, device: Any = None, skip_keys: Any = None) -> None:
    """Make `--store-ema` work for models whose state contains integer tensors.

    fairseq <= 0.12.3 multiplies integer tensors (such as a router's step count) by the decay
    factor, and torch raises an error. This patch copies integer tensors instead.
    """
    integers = {name for name, value in model.state_dict().items()
                if isinstance(value, torch.Tensor) and not value.is_floating_point()}
    original(self, model, config, device, {*(skip_keys or ()), *integers})


@replaces("models.ema.ema.EMA.build_fp32_params")
def averages_of_tensors(original: Callable[..., None], self: Any, state_dict: Any = None) -> None:
    """Make `--ema-fp32` ignore state that is not a tensor (fairseq <= 0.12.3 fails on it)."""
    state = self.model.state_dict() if state_dict is None else state_dict
    original(self, {name: value for name, value in state.items()
                    if isinstance(value, torch.Tensor)})
