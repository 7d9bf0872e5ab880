"""Forward and backward passes of Megatron's own loop, begun again where a feature of the run asks
for it, or computed by votes; and a look at a step's first micro-batch.

Megatron takes the function that runs the passes from `get_forward_backward_func`, and gives it
iterators over micro-batches.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state as ps

from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat.names import get_rerun_state_machine
from moe_plugin.hosts.megatron.guards import FileSteps, Logged
from moe_plugin.training.resilience.elastic import ReplicaSteps
from moe_plugin.training.resilience.overflow import RowsFit
from moe_plugin.training.run import Run


def computed_by(run: Callable[[], Run], get: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `get_forward_backward_func` whose passes a run's features see.

    run: as it is in each step.
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
    """The passes, begun again until their rows fit."""

    def once() -> Logged:
        logged = native(**given)
        run.after_passes()
        return logged

    rows = run.find(RowsFit)
    if rows is None or not rows.check.repeats:
        return run.compute(once)
    iterators, kept = given["data_iterator"], core.losses_so_far()
    several = isinstance(iterators, list)
    again = [None if each is None else Rewindable(each)
             for each in (iterators if several else [iterators])]
    given = {**given, "data_iterator": again if several else again[0]}

    def undo() -> None:
        core.set_logged_losses(kept)
        for iterator in filter(None, again):
            iterator.rewind()
        chunks = given["model"] if isinstance(given["model"], list) else [given["model"]]
        for chunk in () if given.get("forward_only") else chunks:
            chunk.zero_grad_buffer()

    return run.compute(once, undo)


class Rewindable:
    """An iterator whose items come again after `rewind`."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._seen, self.at = source, list[Any](), 0

    def __iter__(self) -> Rewindable:
        return self

    def __next__(self) -> Any:
        if self.at == len(self._seen):
            self._seen.append(next(self._source))
        self.at += 1
        return copy.copy(self._seen[self.at - 1])  # a script may take entries out of a batch

    def rewind(self) -> None:
        """Begin again."""
        self.at = 0

    def rest(self, begin: int) -> Iterator[Any]:
        """What follows so many items, of which none is kept any longer."""
        later = self._seen[begin:]
        return itertools.chain(later, self._source) if later else self._source


@contextmanager
def step_again(iterators: Any, run: Run) -> Iterator[Callable[[int], None]]:
    """Around a step, which is lost where a replica of the run is: to make it again, call what is
    yielded, and its micro-batches come again; with a number, those of the step so many later,
    whose state was taken. What the next iteration reads stays. Without replicas nothing is kept.
    """
    if run.find(ReplicaSteps) is None:
        yield lambda later: None
        return
    found = iterators if isinstance(iterators, list) else [iterators]
    found = [each for each in found if each is not None]
    logged = core.losses_so_far()
    kept = [Rewindable(each.iterable) for each in found]
    sizes = list[int]()  # what an attempt reads of each

    def again(later: int) -> None:
        core.set_logged_losses(logged)
        if not sizes:
            sizes.extend(each.at for each in kept)
        for each, size in zip(kept, sizes, strict=True):
            each.rewind()
            for _ in range(later * size):
                next(each)

    _read_from(found, kept)
    yield again
    _read_from(found, [each.rest(size) for each, size in zip(
        kept, sizes or [each.at for each in kept], strict=True)])


def _read_from(iterators: list[Any], sources: Sequence[Iterator[Any]]) -> None:
    # Megatron's iterator keeps what it has read of another one, to read it again
    for iterator, source in zip(iterators, sources, strict=True):
        iterator.iterable = source


def read_over(iterators: Any, count: int) -> None:
    """Take the micro-batches of a step that is not made from each iterator that this rank has.

    Megatron's `dummy_train_step` reads on the first tensor-parallel rank alone, where scripts may
    read on all, and knows no virtual stages.
    """
    found = iterators if isinstance(iterators, list) else [iterators]
    while get_rerun_state_machine().should_run_forward_backward(iterators):
        for iterator in found:
            for _ in range(0 if iterator is None else count):
                next(iterator)


def _voted(run: Run, votes: FileSteps, native: Callable[..., Logged],
           given: Mapping[str, Any]) -> Logged:
    """The passes of the files that this rank computes: what they logged is that of all files."""
    iterator = given["data_iterator"]
    iterator = iterator[0] if isinstance(iterator, list) else iterator
    total = given["num_microbatches"] * ps.get_data_parallel_world_size()
    run.batches([None] * total if iterator is None  # a stage between the first and the last
                else list(itertools.islice(Rewindable(iterator), total)))
    sizes = dict[str, int]()

    def passes(batches: list[Iterator[Any]], count: int) -> Logged:
        return native(**{**given, "data_iterator": batches[0], "num_microbatches": count})

    def sums(logged: Logged) -> torch.Tensor:
        sizes.update({name: value.numel() for name, value in logged[0].items()})
        return torch.cat([sum(entry[name].reshape(-1).float() for entry in logged)  # type: ignore[misc]
                          for name in sizes])

    kept = core.losses_so_far()

    def once() -> torch.Tensor:
        done = votes.compute(passes, sums)
        votes.log_once(kept)
        run.after_passes()
        return done

    agreed = run.compute(once, lambda: core.set_logged_losses(kept)).float()
    if not sizes:  # losses are the last stage's
        return []
    found = dict(zip(sizes, agreed.split([*sizes.values()]), strict=True))
    device = next(votes.chunk.parameters()).device
    # two numbers are a sum and its tokens, of which Megatron takes the ratio; one is a mean
    return [{name: (value if value.numel() > 1 else value / total).to(device)
             for name, value in found.items()}]


def first_batch(iterators: Any) -> Any:
    """The micro-batch that comes next, which comes all the same; None: this rank reads none."""
    iterator = iterators[0] if isinstance(iterators, list) else iterators
    if iterator is None:
        return None
    if not isinstance(iterator.iterable, _Ahead):
        _read_from([iterator], [_Ahead(iterator.iterable)])
    return iterator.iterable.ahead()


def loss_of(given: Mapping[str, Any], batch: Any) -> torch.Tensor:
    """The loss of a micro-batch, without the wrappers of the model.

    given: what Megatron gives to `train_step`.
    """
    with _results_not_validated():
        output, loss = given["forward_step_func"](iter([batch]), bare(given["model"][0]))
        found = loss(output)
    return found[0] if isinstance(found, tuple) else found


@contextmanager
def _results_not_validated() -> Iterator[None]:
    """Inside, a script's loss may ask Megatron to validate it, which it does in a step alone."""
    machine = get_rerun_state_machine()
    machine.validate_result = lambda *_, **__: None
    try:
        yield
    finally:
        del machine.validate_result


def bare(chunk: Any) -> Any:
    """A part of the model without wrappers of data parallelism and of precision."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


class _Ahead:
    """An iterator that can be asked what comes next."""

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
