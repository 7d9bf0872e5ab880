"""Saving and loading of models with streamed weights. A checkpoint has one safetensors file per
block.

Blocks are saved and loaded one at a time.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_plugin.experts.base import with_current_names
from moe_plugin.memory.safetensors_file import SafetensorsFile
from moe_plugin.memory.weights.blocks import StreamedBlock
from moe_plugin.memory.weights.optimizer_state import set_state, state_of
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.planner.offload.weight_streaming import Layer, StreamPlan, plan
from moe_plugin.utils import checksums
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_input, make_folder, move_into_place, write_remedy


# Segments of a model with streamed weights, planned from measurements of its blocks.
def measured_layers(trainer: StreamedTrainer, micro_batches: int) -> list[Layer]:
    """Describe the blocks for the planner, using measurements of the last step.

    The sizes of segments do not include gradients and optimizer state, because the gradients and
    state of only one block exist at a time.

    Args:
        trainer: trainer that has completed a step of `micro_batches` micro-batches.
        micro_batches: number of micro-batches in the last step.
    Raises:
        ValueError: If the trainer has not completed a step, or if the step copied no bytes.
    """
    moved = trainer.copier.counters
    if not trainer.steps or not moved.busy_s or not moved.bytes:
        raise ValueError(f"{trainer.steps} steps and {moved.bytes} copied bytes are not enough to "
                         "measure the blocks: run a step with one block per segment first")
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches} is not valid: it must be >= 1, and equal "
                         "to the number in the last step")
    bytes_s, layers = moved.bytes / moved.busy_s, []
    for block, took in zip(trainer.blocks, trainer.profile, strict=True):
        loaded = block.layout.nbytes if block.streams else 0
        layers.append(Layer(
            name=f"block {block.number}", forward_s=took.forward_s / micro_batches,
            backward_s=(took.backward_s + took.step_s) / micro_batches, load_s=loaded / bytes_s,
            out_s=block.returned_bytes / bytes_s, weight_bytes=loaded,
            kept_bytes=took.input_bytes))
    return layers


def plan_segments(trainer: StreamedTrainer, limit: int, micro_batches: int) -> StreamPlan:
    """Choose segments that minimize the step time within a memory limit, and use these segments.

    Args:
        trainer: the trainer.
        limit: maximum number of bytes on the device for weights, stored inputs, and the gradients
            and optimizer state of one block.
        micro_batches: number of micro-batches per step, which must be that of the last step.
    Returns: the plan. The `hides` attribute of the returned plan is True if all copies overlap with
        computation.
    Raises:
        ValueError: If no choice of segments fits in the limit, or if `measured_layers` raises an
            error. If no choice of segments fits, the message contains the required memory.
    """
    segment_plan = plan(measured_layers(trainer, micro_batches), micro_batches, limit,
                        trainer.bytes_beside_segments)
    trainer.use_segments(segment_plan.counts)
    return segment_plan


class SegmentsOnce:
    """A callback for host frameworks. The callback plans the segments once, after the first step.

    Args:
        trainer: the trainer. If no limit is set, the callback does not change the segments.
        logger: logger that receives a message about the size of the weights and the segments.
    """

    def __init__(self, trainer: StreamedTrainer, logger: logging.Logger) -> None:
        self.trainer, self.logger, self._done = trainer, logger, trainer.limit is None
        held = sum(block.layout.nbytes for block in trainer.blocks)
        logger.info("weights: %.1f MiB in %s, streamed in %d parts through %.1f MiB", held / 2**20,
                    "files" if trainer.device.type == "cpu" else "host memory",
                    len(trainer.blocks), trainer.device_bytes / 2**20)

    def __call__(self, micro_batches: int) -> None:
        """Plan the segments after a step of this many micro-batches; see `plan_segments`."""
        limit = self.trainer.limit
        if self._done or limit is None:
            return
        self._done, found = True, plan_segments(self.trainer, limit, micro_batches)
        self.logger.info("segments of %s parts, planned for %.1f MiB: copies %s",
                         ", ".join(map(str, found.counts)), limit / 2**20,
                         "are hidden" if found.hides else "are not hidden behind computation")


_STEP, _WEIGHT, _BUFFER, _STATE = "step", "weight.", "buffer.", "state."
_BESIDE = "beside."

Beside = Mapping[str, Sequence[Tensor]]  # by name: one tensor of each weight's shape


def save_weights(trainer: StreamedTrainer, folder: str | os.PathLike[str],
                 beside: Callable[[int], Beside] | None = None, *,
                 finite: bool = False) -> Path:
    """Save weights, buffers and optimizer state to a folder.

    If the folder already exists, it is replaced only after the new folder is complete.

    Args:
        trainer: the trainer.
        folder: the folder.
        beside: function that maps the index of a block to additional tensors to save with the
            block. Use `read_beside` to read the additional tensors. Optional.
        finite: if True and a value is not finite, the function raises an error and writes nothing.
    Raises:
        ValueError: If the folder cannot be written. The error message states the reason.
        FloatingPointError: If `finite` is True and a value is not finite. The error message names
            the block and the tensor.
    """
    safetensors = _safetensors()
    folder = Path(folder)
    half = folder.with_name(folder.name + ".new")
    trainer.settle()
    try:
        shutil.rmtree(half, ignore_errors=True)
        make_folder(half)
        for block in trainer.blocks:
            metadata = {_STEP: str(trainer.steps)} | {
                f"{_STATE}{i}.{name}": repr(float(x))
                for (i, name), x in state_of(block.optimizer, numbers=True).items()}
            more = {} if beside is None else _additional_tensors(block, beside(block.number))
            tensors = _tensors(block)
            if finite:
                _refuse_not_finite(folder, block, tensors)
            safetensors.torch.save_file(tensors | more, half / _name(block),
                                        metadata | checksums.METADATA)
            checksums.seal(half / _name(block))
        move_into_place(half, folder)
    except FloatingPointError:
        shutil.rmtree(half, ignore_errors=True)
        raise
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(half, ignore_errors=True)
        raise ValueError(f"{folder} cannot be written ({error}); "
                         f"{write_remedy(error, folder.parent)}") from error
    return folder


def load_weights(trainer: StreamedTrainer, folder: str | os.PathLike[str]) -> None:
    """Load weights, buffers, optimizer state and the number of steps from a folder.

    All files are checked before anything is changed.

    Raises:
        ValueError: If a file is missing or belongs to a different model. The error message names
            the file, the tensor and the shapes.
    """
    folder = _existing_folder(Path(folder))
    for block in trainer.blocks:
        # a wrong file must be found before the first weight changes
        _check(block, folder / _name(block))
    trainer.settle()
    for block in trainer.blocks:
        with _open(folder / _name(block)) as file:
            read = {name: file.read(name) for name in file.held if not name.startswith(_BESIDE)}
            numbers = file.metadata
        block.write([read[_WEIGHT + name] for name in block.names])
        with torch.no_grad():
            for name, buffer in block.saved_buffers().items():
                buffer.copy_(read[_BUFFER + name])
        block.load_state({_key(name): x for name, x in read.items() if name.startswith(_STATE)})
        set_state(block.optimizer, {_key(name): torch.tensor(float(text))
                                    for name, text in numbers.items() if name.startswith(_STATE)})
        trainer.steps = int(numbers[_STEP])
    trainer.forget_places()


def read_beside(folder: str | os.PathLike[str], block: StreamedBlock) -> dict[str, list[Tensor]]:
    """Return the additional tensors that were saved with the weights of a block, by name.

    Raises:
        ValueError: If the file is missing or belongs to a different model.
    """
    path = _existing_folder(Path(folder)) / _name(block)
    _check(block, path)
    with _open(path) as file:
        names = [name for name in file.held if name.startswith(_BESIDE)]
        labels = sorted({name.split(".")[1] for name in names})
        return {label: [file.read(f"{_BESIDE}{label}.{name}") for name in block.names]
                for label in labels}


def _existing_folder(folder: Path) -> Path:
    """Return the folder. Return the folder to read. If the process was killed while it replaced the
    folder, return the previous version of the folder.
    """
    old = folder.with_name(folder.name + ".old")
    return old if old.exists() and not folder.exists() else folder


def _refuse_not_finite(folder: Path, block: StreamedBlock, tensors: Mapping[str, Tensor]) -> None:
    for name, x in tensors.items():
        if x.is_floating_point() and not x.isfinite().all():
            raise FloatingPointError(
                f"{short(name)} of block {block.number} is not finite, so {folder} is not written; "
                "the previous folder is kept. Continue from it with a lower learning rate or other "
                "data")


def _additional_tensors(block: StreamedBlock, beside: Beside) -> dict[str, Tensor]:
    return {f"{_BESIDE}{label}.{name}": x.contiguous() for label, tensors in beside.items()
            for name, x in zip(block.names, tensors, strict=True)}


def _name(block: StreamedBlock) -> str:
    return f"block_{block.number:05d}.safetensors"


def _tensors(block: StreamedBlock) -> dict[str, Tensor]:
    tensors = {_WEIGHT + name: x for name, x in zip(block.names, block.read(), strict=True)}
    # safetensors cannot store two tensors that share a storage
    tensors |= {_BUFFER + name: x.detach().cpu().clone()
                for name, x in block.saved_buffers().items()}
    tensors |= {f"{_STATE}{i}.{name}": x for (i, name), x in block.state_tensors().items()}
    return {name: x.contiguous() for name, x in tensors.items()}


def _key(name: str) -> tuple[int, str]:
    number, _, field = name.removeprefix(_STATE).partition(".")
    return int(number), field


def _check(block: StreamedBlock, path: Path) -> None:
    check_input(path, "weights")
    wanted = {_WEIGHT + name: p.shape for name, p in zip(block.names, block.params, strict=True)}
    wanted |= {_BUFFER + name: x.shape for name, x in block.saved_buffers().items()}
    with _open(path, verify=True) as file:
        found = {name: held.shape for name, held in file.held.items()}
    kinds = {name.split(".")[1] for name in found if name.startswith(_BESIDE)}
    wanted |= {f"{_BESIDE}{kind}.{name}": p.shape for kind in kinds
               for name, p in zip(block.names, block.params, strict=True)}
    for name, shape in wanted.items():
        if found.get(name) != tuple(shape):
            there = f"has shape {list(found[name])}" if name in found else "is missing"
            raise ValueError(f"{path}: {short(name)} {there}, but block {block.number} needs shape "
                             f"{list(shape)}; use a folder to which this model was saved")
    more = sorted(name for name in set(found) - set(wanted) if not name.startswith(_STATE))
    if more:
        raise ValueError(f"{path}: {short(more[0])} is not a tensor of block {block.number}; use a "
                         "folder to which this model was saved")


def _open(path: Path, verify: bool = False) -> SafetensorsFile:
    try:
        file = SafetensorsFile(path, verify)
        file.held = with_current_names(file.held)
        return file
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); use a folder to which a model was "
                         "saved") from error


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ValueError("saving weights needs safetensors; install it with pip install "
                         "'moe-plugin[hf]'"
                         ) from error
    return safetensors
