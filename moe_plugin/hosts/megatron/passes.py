"""Let run features control the forward and backward passes in Megatron's own training loop.

A feature can repeat the passes, or compute them redundantly on several ranks that then vote on the
gradients. This module can also read the first micro-batch of a step ahead of time.

For `--stage-layouts`, this module sets the arguments for the pipeline stage of each rank and builds
the process groups of all layouts. Checkpoints then store the tensors of each layer separately.

Megatron calls `get_forward_backward_func` to obtain the function that runs the passes, and then
calls this function with iterators over micro-batches.
"""

from __future__ import annotations

import argparse
import copy
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps

from moe_plugin.hosts.megatron.compat import aux_losses, core
from moe_plugin.hosts.megatron.compat.checkpointing import wrap
from moe_plugin.hosts.megatron.compat.core import bare
from moe_plugin.hosts.megatron.compat.names import get_model_config, get_rerun_state_machine
from moe_plugin.hosts.megatron.compat.settings import replace_training, script_arguments
from moe_plugin.hosts.megatron.run import FileSteps, Logged
from moe_plugin.hosts.megatron.stage_layouts import (
    StageLayouts,
    initialize,
    stages_of,
    unequal_passes,
)
from moe_plugin.training.resilience.elastic import ReplicaSteps
from moe_plugin.training.resilience.skipped_steps import RowsFit
from moe_plugin.training.run import Run
from moe_plugin.utils.replaced import replaced

_APART = "non_homogeneous_layers"


def computed_by(run: Callable[[], Run], get: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's `get_forward_backward_func` so that the features of a run control the passes.

    run: function that returns the current run object.
    """

    def found(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        native = get(*args, **kwargs)

        @functools.wraps(native)
        def passes(**given: Any) -> Logged:
            votes = run().find(FileSteps)
            if votes is not None and not given.get("forward_only"):
                return _voted(run(), votes, native, given)
            return _repeated(run(), native, given)

        return passes

    return found


def _repeated(run: Run, native: Callable[..., Logged], given: Mapping[str, Any]) -> Logged:
    """Run the passes, and repeat them until all rows fit into their buffers."""

    def once() -> Logged:
        logged = native(**given)
        run.after_passes()
        return logged

    rows = run.find(RowsFit)
    if rows is None or not rows.check.repeats:
        return run.compute(once)
    iterators, kept = given["data_iterator"], aux_losses.losses_so_far()
    several = isinstance(iterators, list)
    again = [None if each is None else Rewindable(each)
             for each in (iterators if several else [iterators])]
    given = {**given, "data_iterator": again if several else again[0]}

    def undo() -> None:
        aux_losses.set_logged_losses(kept)
        for iterator in filter(None, again):
            iterator.rewind()
        chunks = given["model"] if isinstance(given["model"], list) else [given["model"]]
        for chunk in () if given.get("forward_only") else chunks:
            chunk.zero_grad_buffer()

    return run.compute(once, undo)


class Rewindable:
    """An iterator that starts again from the first item after `rewind` is called."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._seen, self.at = source, list[Any](), 0

    def __iter__(self) -> Rewindable:
        return self

    def __next__(self) -> Any:
        if self.at == len(self._seen):
            self._seen.append(next(self._source))
        self.at += 1
        return copy.copy(self._seen[self.at - 1])  # a script may remove entries from a batch

    def rewind(self) -> None:
        """Start again from the first item."""
        self.at = 0

    def rest(self, begin: int) -> Iterator[Any]:
        """Return an iterator over all items after the first `begin` items. Items after the first
        `begin` items are not stored, so `rewind` does not apply to them.
        """
        later = self._seen[begin:]
        return itertools.chain(later, self._source) if later else self._source


@contextmanager
def step_again(iterators: Any, run: Run) -> Iterator[Callable[[int], None]]:
    """Yield a function that rewinds the data iterators to repeat a step. Call the yielded function
    when a replica of the run was lost, so that the current step must be repeated.

    The yielded function accepts an integer `n`. If `n` is 0, the micro-batches of the current step
    are read again. If `n` is positive, the micro-batches of the n-th following step are read. A
    positive `n` is needed if the run received a newer state from another replica. The micro-batches
    of the next iteration are not consumed. If the run has no replicas, no data is stored.
    """
    if run.find(ReplicaSteps) is None:
        yield lambda later: None
        return
    present = iterators if isinstance(iterators, list) else [iterators]
    present = [each for each in present if each is not None]
    logged = aux_losses.losses_so_far()
    kept = [Rewindable(each.iterable) for each in present]
    sizes = list[int]()  # number of micro-batches that one attempt reads from each iterator

    def again(later: int) -> None:
        aux_losses.set_logged_losses(logged)
        if not sizes:
            sizes.extend(each.at for each in kept)
        for each, size in zip(kept, sizes, strict=True):
            each.rewind()
            for _ in range(later * size):
                next(each)

    _read_from(present, kept)
    yield again
    _read_from(present, [each.rest(size) for each, size in zip(
        kept, sizes or [each.at for each in kept], strict=True)])


def _read_from(iterators: list[Any], sources: Sequence[Iterator[Any]]) -> None:
    # Megatron's rerun iterator wraps another iterator and replays its items; only the wrapped
    # iterator is replaced
    for iterator, source in zip(iterators, sources, strict=True):
        iterator.iterable = source


def read_over(iterators: Any, count: int) -> None:
    """Skip a step: read and discard its micro-batches from all data iterators of the current rank.

    Megatron's `dummy_train_step` cannot be used for this purpose. `dummy_train_step` reads data
    only on the first tensor-parallel rank, although a script may read data on all ranks.
    Furthermore, `dummy_train_step` does not support virtual stages.
    """
    present = iterators if isinstance(iterators, list) else [iterators]
    while get_rerun_state_machine().should_run_forward_backward(iterators):
        for iterator in present:
            for _ in range(0 if iterator is None else count):
                next(iterator)


def _voted(run: Run, votes: FileSteps, native: Callable[..., Logged],
           given: Mapping[str, Any]) -> Logged:
    """Run the passes for the files (groups of micro-batches) assigned to the current rank. Return
    the logged values of all files.
    """
    iterator = given["data_iterator"]
    iterator = iterator[0] if isinstance(iterator, list) else iterator
    total = given["num_microbatches"] * ps.get_data_parallel_world_size()
    run.batches([None] * total if iterator is None  # a middle stage reads no data
                else list(itertools.islice(Rewindable(iterator), total)))
    sizes = dict[str, int]()

    def passes(batches: list[Iterator[Any]], count: int) -> Logged:
        return native(**{**given, "data_iterator": batches[0], "num_microbatches": count})

    def sums(logged: Logged) -> torch.Tensor:
        sizes.update({name: value.numel() for name, value in logged[0].items()})
        return torch.cat([sum(entry[name].reshape(-1).float() for entry in logged)  # type: ignore[misc]
                          for name in sizes])

    kept = aux_losses.losses_so_far()

    def once() -> torch.Tensor:
        done = votes.compute(passes, sums)
        votes.log_once(kept)
        run.after_passes()
        return done

    agreed = run.compute(once, lambda: aux_losses.set_logged_losses(kept)).float()
    if not sizes:  # only the last stage has losses
        return []
    sums_by_name = dict(zip(sizes, agreed.split([*sizes.values()]), strict=True))
    device = next(votes.chunk.parameters()).device
    # two numbers are a sum and its number of tokens, and Megatron computes their ratio; a single
    # number is a mean
    return [{name: (value if value.numel() > 1 else value / total).to(device)
             for name, value in sums_by_name.items()}]


def first_batch(iterators: Any) -> Any:
    """Return the next micro-batch without consuming it, or None if this rank reads no data."""
    iterator = iterators[0] if isinstance(iterators, list) else iterators
    if iterator is None:
        return None
    if not isinstance(iterator.iterable, _Ahead):
        _read_from([iterator], [_Ahead(iterator.iterable)])
    return iterator.iterable.ahead()


def loss_of(given: Mapping[str, Any], batch: Any) -> torch.Tensor:
    """Return the loss of a micro-batch. The model is called without its wrappers.

    given: dict of the arguments that Megatron passed to `train_step`.
    """
    # the loss function of a script may validate results, which Megatron supports only in a step
    with replaced(get_rerun_state_machine(), validate_result=lambda *_, **__: None):
        output, loss = given["forward_step_func"](iter([batch]), core.bare(given["model"][0]))
        result = loss(output)
    return result[0] if isinstance(result, tuple) else result


class _Ahead:
    """An iterator that can return its next item without consuming the item."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._next = source, list[Any]()

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Any:
        return self._next.pop() if self._next else next(self._source)

    def ahead(self) -> Any:
        if not self._next:
            self._next.append(next(self._source))
        return copy.copy(self._next[0])


def prepared(args: argparse.Namespace) -> StageLayouts | None:
    """Return the pipeline stages that the parsed arguments describe. The arguments for the stage of
    the current rank are set in `args`.

    Raises:
        ValueError: see `stages_of`.
    """
    # arguments from a file (--yaml-cfg) do not include our arguments
    stages = stages_of(args, args.world_size) if getattr(args, "stage_layouts", None) else None
    if stages is None:
        return None
    vars(args).update(vars(stages.arguments(args, stages.stage_of(args.rank))))
    # all stages use the same padded vocabulary, so every stage must be able to split it evenly
    args.make_vocab_size_divisible_by = math.lcm(
        args.make_vocab_size_divisible_by, *(layout.tp for layout in stages.layouts)
    ) // args.tensor_model_parallel_size
    # Megatron saves random states by tensor-parallel rank, which does not work with different
    # layouts: a resumed run starts again from the seed
    args.no_save_rng = args.no_load_rng = True
    args.dist_ckpt_optim_fully_reshardable = True
    return stages


def passes_of(stages: StageLayouts, chunks: list[Any], optimizer: Any) -> Callable[..., Any]:
    """Return the function that runs the forward and backward passes of a step. See
    `unequal_passes`. This is a collective operation.
    """
    unequal = unequal_passes(stages, argparse.Namespace(**script_arguments()),
                             get_model_config(chunks[0]), optimizer)
    # Megatron's model-parallel group, in which ranks agree whether to make a step, would differ
    # between stages
    ps._MODEL_PARALLEL_GROUP = dist.group.WORLD
    for groups in (getattr(bare(chunk), "pg_collection", None) for chunk in chunks):
        if groups is not None:
            groups.mp = dist.group.WORLD
    return unequal


def use_stage_layouts(stages: Callable[[], StageLayouts | None]) -> None:
    """Until the process ends, make Megatron use the stages' groups and checkpoint format.

    stages: function that returns the stages of the run, or None if all stages have the same layout.
        `stages` is called after the script has parsed its arguments.
    """
    make = ps.initialize_model_parallel
    signature = inspect.signature(make)

    @functools.wraps(make)
    def groups(*args: Any, **kwargs: Any) -> None:
        layouts, given = stages(), signature.bind(*args, **kwargs).arguments
        if layouts is None:
            make(**given)
        else:
            initialize(layouts, lambda **sizes: make(**{**given, **sizes}))

    def loaded(load: Callable[..., Any], given: dict[str, Any]) -> Any:
        if stages() is not None and not (
                dist_checkpointing.load_content_metadata(given["checkpoint_dir"]) or {}
        ).get(_APART):
            # the checkpoint stores all layers in one tensor, from which these stages request
            # parts of different sizes
            given = {**given, "validate_access_integrity": False}
        return load(**given)

    ps.initialize_model_parallel = groups
    wrap("load", loaded)
    replace_training("_build_sharded_state_dict_metadata", lambda build: functools.wraps(build)(
        lambda *args, **kwargs: {**build(*args, **kwargs),
                                 **({} if stages() is None else {_APART: True})}))
