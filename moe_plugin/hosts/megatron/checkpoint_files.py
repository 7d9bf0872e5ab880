"""Read and write checkpoint files.

The file `moe_plugin.json` in a checkpoint folder stores the sizes and checksums of all files in the
folder, and a checksum of its own contents. The checksums are computed in parallel: each rank
processes a subset of the files.

A checkpoint is written to a temporary folder, which is renamed to its final name when the
checkpoint is complete. The file `latest_checkpointed_iteration.txt` is updated last.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from moe_plugin.checkpoint import CheckpointError
from moe_plugin.checkpoint.formats.megatron.common import BACKEND, COMMON, METADATA
from moe_plugin.checkpoint.trust import UntrustedFile
from moe_plugin.comm import CommError
from moe_plugin.comm.host_collectives import gather_objects
from moe_plugin.hosts.megatron.compat import optimizer as optimizers
from moe_plugin.hosts.megatron.compat.finite import all_finite
from moe_plugin.utils import checksums
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_input, system_error, write_remedy, write_whole

logger = logging.getLogger(__name__)
META, LATEST = "moe_plugin.json", "latest_checkpointed_iteration.txt"
_KEYS = {"files": dict, "model": dict, "layout": dict, "iteration": int, "consumed_samples": int}


def folder(root: str, iteration: int) -> str:
    """Return the path of the checkpoint folder for an iteration."""
    return os.path.join(root, f"iter_{iteration:07d}")


def part_of(final: str) -> str:
    """Create the empty temporary folder for a checkpoint. The folder is renamed to `final` when the
    checkpoint is complete.

    This is a collective operation, so all ranks must call this function. Returns the path of the
    temporary folder.
    """
    part = final + ".part"

    def make() -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(part, ignore_errors=True)
            os.makedirs(part)

    together(final, make)
    return part


def refuse_not_finite(root: str, models: Iterable[torch.nn.Module], optimizer: Any) -> None:
    """Raise an error on every rank if a weight, buffer or optimizer state is not finite on any
    rank. This is a collective operation.

    Args:
        root: folder that contains the checkpoints. The error message names this folder.
        models: model chunks whose weights and buffers are checked.
        optimizer: Megatron's optimizer, or None if there is no optimizer.
    Raises:
        FloatingPointError: If a weight, buffer or optimizer state is not finite on any rank. The
            message names the first such rank and its first such tensor.
    """
    tensors = [(f"{name!r}", tensor) for model in models
               for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)]
    for part in optimizers.parts(optimizer) if optimizer is not None else ():
        states = part.optimizer.state.values() if part.optimizer is not None else ()
        tensors += [(f"the optimizer state {name!r} of a parameter", tensor) for state in states
                    for name, tensor in state.items() if isinstance(tensor, torch.Tensor)]
    # one synchronization with the device; the tensors are checked separately only for the message
    first = "" if all_finite(tensor for _, tensor in tensors) else next(
        name for name, tensor in tensors if not all_finite([tensor]))
    for rank, name in enumerate(gather(first)):
        if name:
            raise FloatingPointError(
                f"rank {rank}: {name} is not finite, so no checkpoint is written. Resume from the "
                f"newest checkpoint in {root} with a lower learning rate or other data.")


def together(folder: str, work: Callable[[], None]) -> None:
    """Call `work` on every rank, and raise an error on all ranks if it fails on any rank. This is a
    collective operation.

    Raises:
        CheckpointError: If `work` failed on any rank.
    """
    error: BaseException | None = None
    try:
        work()
    # errors of any type, because the other ranks must learn of them; torch's CheckpointException
    # is not an `Exception`
    except (Exception, CheckpointException) as caught:
        error = caught
    # a CheckpointException is raised on all ranks; the rank that failed may have a more precise
    # error, so other types of errors are sorted first
    told = isinstance(error, CheckpointException)
    failed = sorted(each for each in gather(
        None if error is None else (told, _not_written(folder, error))) if each)
    if failed:
        raise CheckpointError(failed[0][1]) from error


def cause(error: BaseException) -> tuple[int, BaseException]:
    """Return the error that caused a save to fail, and the index of the rank that raised it.

    When one rank fails, torch raises the same `CheckpointException` on all ranks. The
    `CheckpointException` contains the error of the failed rank.
    """
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = min(error.failures.items())
        return rank, error
    # arguments are read from a checkpoint before the process group exists
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0")), error


def _not_written(folder: str, error: BaseException) -> str:
    rank, error = cause(error)
    root = os.path.dirname(folder)
    behind = system_error(error)
    said = f"{type(error).__name__}: {short(error)}" if behind is None else short(behind)
    newest = tracked(root)
    kept = f"the newest complete checkpoint is iteration {newest}" if newest else "there are none"
    return (f"checkpoint {folder!r} cannot be written on rank {rank}: {said}; older checkpoints "
            f"are unchanged ({kept}); {write_remedy(error, root)} (--save)")


def abandon(final: str) -> None:
    """Remove the files of a checkpoint on the first rank if saving failed on any rank."""
    if dist.get_rank() == 0:
        shutil.rmtree(final + ".part", ignore_errors=True)
        with suppress(OSError):  # Megatron creates the final folder before it writes any file
            os.rmdir(final)


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Convert errors raised while the block loads a checkpoint to a `ValueError` that tells the
    user what to do.

    If a file is damaged, Megatron, torch and pickle raise many different types of errors.
    """
    try:
        yield
    except (UntrustedFile, CheckpointError, CommError):
        raise
    except (Exception, CheckpointException) as error:
        raise unreadable(path, error) from error


def on_first_rank(path: str, work: Callable[[], Any]) -> Any:
    """Call `work`, which reads a checkpoint, on the first rank and return the result on all ranks.

    This is a collective operation.

    Raises:
        ValueError: On all ranks, if `work` failed on the first rank. `unreadable` converts errors
            of other types to a `ValueError`.
    """
    result: Any = None
    error: ValueError | None = None
    error_class, said = ValueError, ""
    if dist.get_rank() == 0:
        try:
            result = work()
        # errors of any type, because the other ranks must learn of them
        except (Exception, CheckpointException) as caught:
            error = caught if isinstance(caught, ValueError) else unreadable(path, caught)
            if isinstance(error, CheckpointError):
                error_class = CheckpointError
            said = str(error)
    result, error_class, said = gather((result, error_class, said))[0]
    if error is not None:
        raise error
    if said:
        raise error_class(said)
    return result


def unreadable(path: str, error: BaseException) -> ValueError:
    """Return the error for an unreadable checkpoint, which recommends an earlier checkpoint."""
    rank, what = cause(error)
    where = f" on rank {rank}" if rank != cause(what)[0] else ""
    said = (f"{what.filename}: {what.strerror}" if isinstance(what, OSError) and what.filename
            else f"{type(what).__name__}: {short(what, 300)}")
    return ValueError(
        f"checkpoint {path!r} cannot be loaded{where}: {said}; to use an earlier checkpoint, write "
        f"its iteration number into {os.path.join(os.path.dirname(path), LATEST)}")


def gather(value: Any) -> list[Any]:
    """Gather a value from every rank and return the list of values."""
    return gather_objects(value, "the ranks' parts of a checkpoint")


def _share(names: list[str]) -> Iterator[str]:
    yield from sorted(names)[dist.get_rank() :: dist.get_world_size()]


def sums(folder: str) -> dict[str, str]:
    """Return the checksums of all files in a folder by name. This is a collective operation."""
    checksums_of_rank = {name: f"{checksums.crc_of(os.path.join(folder, name)):08x}"
                         for name in _share(os.listdir(folder))}
    return {name: crc for part in gather(checksums_of_rank) for name, crc in part.items()}


def write_meta(folder: str, values: Mapping[str, Any], sums_by_name: Mapping[str, str]) -> None:
    """Write the description of a checkpoint: the sizes and checksums of all its files."""
    sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in sorted(sums_by_name)}
    write_whole(Path(folder, META), checksums.seal_json(
        {**values, "files": sizes, "checksums": dict(sums_by_name)}))


def verified_meta(folder: str) -> dict[str, Any]:
    """Verify all files of a checkpoint and return the description of the checkpoint. This is a
    collective operation.

    Raises:
        CheckpointError: On all ranks, if a file does not match the description of the checkpoint.
    """
    meta, sealed = _read_meta(folder)
    if not sealed and dist.get_rank() == 0:
        logger.warning("checkpoint %s was written without checksums, so damage may go unnoticed. "
                       "The next checkpoint will have checksums.", folder)
    try:
        text = next(filter(None, (_wrong(folder, name, meta) for name in _share([*meta["files"]]))),
                    "")
    except OSError as error:
        text = f"checkpoint {folder!r} cannot be read: {error}. Use another checkpoint."
    for text in filter(None, gather(text)):
        raise CheckpointError(text)
    return meta


def _read_meta(folder: str) -> tuple[dict[str, Any], bool]:
    try:
        check_input(os.path.join(folder, META))
        with open(os.path.join(folder, META), encoding="utf-8") as stream:
            meta, sealed = checksums.open_json(stream.read())
        if not isinstance(meta, dict) or not all(
                isinstance(meta.get(key), value_type) for key, value_type in _KEYS.items()):
            raise ValueError("not a description of a checkpoint")
        if sealed and set(meta["checksums"]) != set(meta["files"]):
            raise ValueError("some files have no checksum")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {folder!r} has no readable {META} ({short(error)}). The checkpoint is "
            "incomplete or was not written by this script. Use another checkpoint."
        ) from error
    return meta, sealed


def _wrong(folder: str, name: str, meta: Mapping[str, Any]) -> str:
    path, size = os.path.join(folder, name), meta["files"][name]
    actual = os.path.getsize(path) if os.path.exists(path) else None
    if actual != size:
        return (f"checkpoint {folder!r} is damaged: {name} "
                f"{'is missing' if actual is None else f'has {actual} bytes'} but must have {size} "
                "bytes. Restore the file, or use another checkpoint.")
    wanted = meta.get("checksums", {}).get(name)
    if wanted is not None and wanted != f"{checksums.crc_of(path):08x}":
        return (f"checkpoint {folder!r} is damaged: the checksum of {name} has changed since the "
                "file was written. Restore the file, or use another checkpoint.")
    return ""


def older(root: str, iteration: int) -> list[int]:
    """Return the iterations of all checkpoints saved before `iteration`, in descending order.

    The list is identical on all ranks. Folders without a description are ignored, because they are
    left over from an interrupted save.
    """
    names = os.listdir(root) if os.path.isdir(root) else []
    numbers = [int(name[1]) for name in map(re.compile(r"iter_(\d{7,})").fullmatch, names) if name]
    return gather(sorted((number for number in numbers if number < iteration
                          and described(folder(root, number))), reverse=True))[0]


def described(path: str) -> bool:
    """Return True if a checkpoint has a description written by this package or by Megatron."""
    return (os.path.exists(os.path.join(path, META)) or of_megatron_alone(path)
            or of_another_format(path))


def of_megatron_alone(path: str) -> bool:
    """Return True for a `torch_dist` checkpoint without a description written by this package."""
    return not os.path.exists(os.path.join(path, META)) and all(
        os.path.exists(os.path.join(path, name)) for name in (BACKEND, METADATA))


def of_another_format(path: str) -> bool:
    """Return True if a checkpoint has a format that only Megatron can read.

    Two formats can be read only by Megatron: Megatron's format with one file per rank, and torch's
    distributed format without Megatron's files.
    """
    names = os.listdir(path) if os.path.isdir(path) else []
    return any(name.startswith("mp_rank_0") for name in names) or (
        METADATA in names and not {COMMON, BACKEND, META}.intersection(names))


def tracked(root: str) -> str | None:
    """Read the file that records the newest checkpoint. Return None if the file is missing."""
    path = os.path.join(root, LATEST)
    if not os.path.exists(path):
        return None
    check_input(path)
    with open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read().strip()


def latest(root: str) -> int | None:
    """Return the iteration of the newest checkpoint, or None if there is no checkpoint.

    Raises:
        ValueError: If the file that records the newest checkpoint is damaged.
    """
    text = tracked(root)
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 15:
        raise ValueError(
            f"{os.path.join(root, LATEST)} contains {short(text)}, but must contain the number of "
            "an iteration. Write the number of one of the folders iter_... into the file.")
    return int(text)


def newest_whole(root: str, iteration: int, verified: Callable[[str], dict[str, Any]] | None = None
                 ) -> tuple[str, dict[str, Any]]:
    """Find the newest intact checkpoint that was saved no later than an iteration, and return its
    folder and description. This is a collective operation.

    verified: function that verifies the checkpoint in a folder and returns the description of the
        checkpoint. Defaults to `verified_meta`.
    Raises:
        CheckpointError: If no checkpoint is intact.
    """
    verified = verified or verified_meta
    try:
        path = folder(root, iteration)
        return path, verified(path)
    except CheckpointError as error:
        for number in older(root, iteration):
            path = folder(root, number)
            try:
                meta = verified(path)
            except CheckpointError as other:
                logger.warning("%s", other)
                continue
            logger.warning("%s Training resumes from the older checkpoint %s", error, path)
            return path, meta
        raise


def nothing_found(root: str, evaluates: bool) -> None:
    """Handle a missing checkpoint: warn that training starts from scratch, or raise a `ValueError`
    in an evaluation run.
    """
    if evaluates:
        raise ValueError(f"no checkpoint found in {root}, so there is nothing to evaluate. Set "
                         "--load to the folder of a run that contains iter_... folders.")
    logger.warning("no checkpoint found in %s: training starts from the beginning", root)
