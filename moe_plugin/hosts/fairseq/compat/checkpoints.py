"""Checkpoint shims: checksums, and evaluation from the files of several ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from moe_plugin.hosts.fairseq.compat.overlay import Overlay


def checksums() -> None:
    """fairseq <= 0.12.3 writes files without checksums, and after an error again into the same
    half-written file.
    """
    from fairseq import checkpoint_utils

    from moe_plugin.hosts.fairseq import checkpoint_files as files

    original = checkpoint_utils.torch_persistent_save
    manager = checkpoint_utils.PathManager

    def torch_persistent_save(obj: Any, filename: str, async_write: bool = False) -> None:
        if async_write or manager.path_requires_pathmanager(filename):
            original(obj, filename, async_write=async_write)
        else:
            files.write(obj, filename)

    checkpoint_utils.torch_persistent_save = torch_persistent_save


def trust_flag() -> None:
    """Every command of fairseq that reads a checkpoint takes `--trust-checkpoint`."""
    from fairseq import options

    from moe_plugin.checkpoint import trust

    original = options.get_parser

    def get_parser(*args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        parser.add_argument(
            trust.FLAG, action="store_true",
            help="load checkpoints that hold other classes than fairseq's, which can run code")
        return parser

    options.get_parser = get_parser


def evaluation_from_rank_files() -> None:
    """Let `--path X.pt` also stand for `X-rank-0.pt`, `X-rank-1.pt`, ... in evaluation.

    fairseq <= 0.12.3 evaluates from one file. A process gets the experts that are its part of the
    `Evaluation`: all of them, where it evaluates alone.
    """
    from fairseq import checkpoint_utils

    from moe_plugin.hosts.fairseq import checkpoint_files as files
    from moe_plugin.hosts.fairseq.compat.expert_store import place_experts
    from moe_plugin.hosts.fairseq.groups import current_evaluation, evaluating
    from moe_plugin.hosts.fairseq.part_state import part_state

    build, name_of, load = (checkpoint_utils.load_model_ensemble_and_task,
                            checkpoint_utils.get_maybe_sharded_checkpoint_filename,
                            checkpoint_utils.load_checkpoint_to_cpu)

    def load_model_ensemble_and_task(filenames: Any, arg_overrides: Any = None, *args: Any,
                                     **kwargs: Any) -> Any:
        with evaluating() as evaluation:
            evaluation.asked = int((arg_overrides or {}).get("moe_expert_parallel_size") or 0)
            return build(filenames, arg_overrides, *args, **kwargs)

    def get_maybe_sharded_checkpoint_filename(filename: str, *args: Any, **kwargs: Any) -> str:
        name = name_of(filename, *args, **kwargs)
        first = files.with_rank(name, 0)
        return first if not os.path.exists(name) and os.path.exists(first) else name

    def load_checkpoint_to_cpu(path: str, *args: Any, **kwargs: Any) -> Any:
        if os.path.exists(path):
            # its errors name the file and the remedy
            files.refuse_branch(path, files.read(path))
        state, evaluation = load(path, *args, **kwargs), current_evaluation()
        if evaluation is not None:  # its model is built by the settings in the checkpoint
            _refuse_imports(path, state, (args[0] if args else kwargs.get("arg_overrides")) or {})
            on_disk = place_experts(state) == "disk"
            if files.MANIFEST in state:
                size = evaluation.expert_ranks(state[files.MANIFEST]["num_experts"])
                state["model"] = part_state(path, evaluation.rank % size, size, on_disk)
        return state

    checkpoint_utils.load_model_ensemble_and_task = load_model_ensemble_and_task
    checkpoint_utils.get_maybe_sharded_checkpoint_filename = get_maybe_sharded_checkpoint_filename
    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu


@contextmanager
def giving(state: dict[str, Any]) -> Iterator[None]:
    """fairseq <= 0.12.3 gives `Trainer.load_checkpoint` what is in a file; inside, this state."""
    import torch
    from fairseq import checkpoint_utils

    before = checkpoint_utils.torch
    checkpoint_utils.torch = Overlay(torch, load=lambda *_, **__: state)
    try:
        yield
    finally:
        checkpoint_utils.torch = before


def _refuse_imports(path: str, state: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """`UntrustedFile` where a checkpoint names modules that building its model would import."""
    from moe_plugin.checkpoint import trust

    settings = (state.get("cfg") or {}).get("model") or state.get("args")
    named = {name: value for name in ("moe_import", "moe_trust_imports")
             if name not in overrides and (value := _value(settings, name)) is not None}
    if named and trust.FLAG not in sys.argv:
        raise trust.UntrustedFile(f"checkpoint {path!r}, in its settings,",
                                  (f"{name}={value}" for name, value in named.items()))


def _value(settings: Any, name: str) -> Any:
    if isinstance(settings, Mapping):
        return settings.get(name)
    return getattr(settings, name, None)  # a namespace of fairseq's, of any release


SHIMS: tuple[Callable[[], None], ...] = (checksums, trust_flag,
                                          evaluation_from_rank_files)
