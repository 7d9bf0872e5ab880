"""Gradients that are correct even if some ranks compute arbitrarily wrong results (ByzShield).

A batch consists of several files. Each file is computed by several workers, as planned by
`planner.vote_assignments`. For each file, the votes select the gradient that the majority of the
file's workers computed. The gradients are compared bit by bit, so all workers of a file must
compute bitwise equal gradients. The gradients of all files are combined by the coordinate-wise
median.

A worker is either a single rank or a block of ranks over which a model is distributed. If workers
are blocks, the ranks with the same index in each block vote with each other. The votes for
different indices are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_plugin.comm import Comm, LocalComm, default_comm
from moe_plugin.dispatch.rows_limit import Limit, most_of, needed_of, settle
from moe_plugin.experts.base import is_expert
from moe_plugin.layer import layers_in, named_layers_in
from moe_plugin.planner.vote_assignments import Assignment
from moe_plugin.routing.contract import RouterModule
from moe_plugin.training.resilience.skipped_steps import RowsCheck, RowsFit, limits_of
from moe_plugin.training.resilience.twins import deterministic_layers
from moe_plugin.training.run import Run

CHUNK = 1 << 20  # elements of every file in one exchange
AGGREGATES = ("median", "mean")


def majority(copies: Sequence[Tensor]) -> tuple[int, list[int]]:
    """Find the most frequent answer. Answers are compared bit by bit.

    Args:
        copies: one tensor for each answer. All tensors have the same shape and dtype. Equal NaNs
            agree. If several answers are equally frequent, the first of them wins.
    Returns: The index of the first copy of the most frequent answer, and the indices of all copies
        that differ from it.
    """
    # compared as bytes, so that -0.0 and 0.0 differ and equal NaNs agree
    bytes_ = [copy.detach().contiguous().view(-1).view(torch.uint8) for copy in copies]
    alike = [[j for j, other in enumerate(bytes_) if torch.equal(answer, other)]
             for answer in bytes_]
    best = max(range(len(copies)), key=lambda i: (len(alike[i]), -i))
    return best, [j for j in range(len(copies)) if j not in alike[best]]


def coordinate_median(x_FN: Tensor) -> Tensor:
    """Return the median of a tensor [F, N] over axis 0, [N]. If F is even, the median is the mean
    of the two middle values.
    """
    sorted_FN = x_FN.sort(dim=0).values
    middle = x_FN.shape[0] // 2
    if x_FN.shape[0] % 2:
        return sorted_FN[middle]
    return (sorted_FN[middle - 1] + sorted_FN[middle]) / 2


@dataclass(frozen=True)
class Verdict:
    """The result of a vote.

    Attributes:
        outvoted: workers whose answer differed from the majority for at least one file, in
            ascending order.
        undecided: files without a majority. For an undecided file, the first of the most frequent
            answers is used.
    """

    outvoted: tuple[int, ...]
    undecided: tuple[int, ...]


def vote(answers_KLN: Tensor, assignment: Assignment) -> tuple[Tensor, Verdict]:
    """Return the majority answer for every file.

    Args:
        answers_KLN: for each worker, the answers for its files, in the order of its files.
        assignment: the files that each worker computes.
    Returns: The winning answer for each file, [F, N], and the verdict.
    """
    winners, outvoted, undecided = [], set(), []
    for file, workers in enumerate(assignment.workers_of):
        copies = [answers_KLN[w, assignment.files[w].index(file)] for w in workers]
        best, others = majority(copies)
        winners.append(copies[best])
        outvoted |= {workers[i] for i in others}
        if 2 * len(others) >= len(workers):
            undecided.append(file)
    return torch.stack(winners), Verdict(tuple(sorted(outvoted)), tuple(undecided))


class Ballots:
    """The answers of all workers for their files, and the votes on these answers.

    Args:
        assignment: the files that each worker computes. Worker w is rank w of `comm`.
        comm: group of the ranks that vote with this rank, that is, the ranks with the same index in
            their workers.
        aggregate: how the winning answers of all files are combined: by `median`, or by `mean` if
            it is certain that every winning answer is correct.
        sharing: optional. The ranks of this worker that compute each file together. Each of these
            ranks processes a part of the file's batches. By default, this rank computes its files
            without other ranks.
        worker: optional. All ranks of this worker, including ranks of other pipeline stages.
            Defaults to `sharing`.
    Raises:
        ValueError: If the number of ranks is not the number of workers, or if the value of
            `aggregate` is unknown.
    """

    def __init__(self, assignment: Assignment, comm: Comm, aggregate: str = "median",
                 sharing: Comm | None = None, worker: Comm | None = None) -> None:
        if comm.size != assignment.workers:
            raise ValueError(f"assignment {assignment.name!r} is for {assignment.workers} workers, "
                             f"but the group has {comm.size} ranks; there must be one rank per "
                             "worker")
        if aggregate not in AGGREGATES:
            raise ValueError(f"aggregate={aggregate!r} must be one of {', '.join(AGGREGATES)}")
        self.assignment, self.comm, self.aggregate = assignment, comm, aggregate
        self.sharing = LocalComm() if sharing is None else sharing
        self.worker = self.sharing if worker is None else worker
        self._outvoted: set[int] = set()
        self._undecided: set[int] = set()

    @property
    def files(self) -> tuple[int, ...]:
        """The indices of the files that this rank computes."""
        return self.assignment.files[self.comm.rank]

    def winners(self, mine_LN: Tensor) -> Tensor:
        """Vote on all answers, and return the winning answer for each file, [F, N]. Collective.

        Args:
            mine_LN: answers of this rank for its files, in the order of these files.
        """
        shape = (self.comm.size, *mine_LN.shape)
        every_KLN = self.comm.all_gather(mine_LN.contiguous()).view(shape)
        winners_FN, verdict = vote(every_KLN, self.assignment)
        self._outvoted.update(verdict.outvoted)
        self._undecided.update(verdict.undecided)
        return winners_FN

    def rows_needed(self, limits: Sequence[Limit], mine_LN: Tensor) -> Tensor:
        """Determine the argument of `dispatch.rows_limit.settle` by a vote. Collective.

        For each file, the answer of the majority of its workers is used. A single faulty rank
        therefore cannot make all ranks repeat a step or fail.

        Args:
            limits: row limits of the layers.
            mine_LN: for each file of this rank, the number of rows that each limit would have
                needed.
        """
        most_LK = self.worker.all_reduce(most_of(limits, mine_LN), "max")
        return self.winners(torch.cat([most_LK, mine_LN], dim=1)).amax(0)

    def result(self, mine_LN: Tensor, shared: int = 0) -> Tensor:
        """Vote on all files, combine the winning answers, and return the result [N]. Collective.

        Args:
            mine_LN: answers of this rank for its files.
            shared: number of leading elements that must be summed over the ranks of `sharing`.
        """
        parts = []
        for sums_up, part_LN in ((True, mine_LN[:, :shared]), (False, mine_LN[:, shared:])):
            for chunk_LN in part_LN.split(CHUNK, dim=1) if part_LN.numel() else ():
                winners_FN = self.winners(self.summed(chunk_LN) if sums_up else chunk_LN)
                parts.append(coordinate_median(winners_FN) if self.aggregate == "median"
                             else winners_FN.mean(0))
        return torch.cat(parts)

    def summed(self, part_LN: Tensor) -> Tensor:
        """Sum the partial answers of the ranks of `sharing`. Collective."""
        return self.sharing.all_reduce(part_LN.contiguous())

    def most_say(self, mine: bool) -> bool:
        """Return true if a majority of workers answers true. Collective.

        The answer of a worker is true if any of its ranks answers true.
        """
        return bool(self.most_need(torch.tensor([mine], device=self.comm.device).int()))

    def most_need(self, mine: Tensor) -> Tensor:
        """For each element, return the largest number that is reached or exceeded on a majority of
        workers. Collective.

        `mine` contains this rank's integers, [N]. The number of a worker is the maximum over its
        ranks.
        """
        every_K = self.comm.all_gather(self.worker.all_reduce(mine, "max")).view(-1, *mine.shape)
        return every_K.sort(0).values[(self.comm.size - 1) // 2]

    def verdict(self) -> Verdict:
        """Return the verdict of all votes since the last call, combined over the ranks of this
        worker. All ranks of the worker must call this method.
        """
        kinds = (self._outvoted, self.assignment.workers), (self._undecided, self.assignment.count)
        flags = torch.tensor([i in indices for indices, size in kinds for i in range(size)],
                             dtype=torch.int32, device=self.comm.device)
        flags_by_kind = self.worker.all_reduce(flags, "max").split([size for _, size in kinds])
        self._outvoted.clear()
        self._undecided.clear()
        outvoted, undecided = (tuple(kind_flags.nonzero().flatten().tolist())
                               for kind_flags in flags_by_kind)
        return Verdict(outvoted, undecided)


def shared_first(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], int]:
    """Return the trainable parameters, experts last, and the number of non-expert elements."""
    train = sorted((p for p in parameters if p.requires_grad), key=is_expert)
    return train, sum(p.numel() for p in train if not is_expert(p))


def flat_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """Return all gradients as one vector [N], whose dtype is the widest dtype of the gradients.
    Missing gradients are treated as zero.
    """
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1)
                      for p, g in zip(parameters, gradients, strict=True)])


@torch.no_grad()
def set_gradients(parameters: Sequence[nn.Parameter], gradient_N: Tensor,
                  gradient_of: Callable[[nn.Parameter], Tensor | None]) -> None:
    """Copy a vector that `flat_gradients` returned to the gradients of the parameters. Each
    gradient has the same dtype as its parameter.
    """
    parts = gradient_N.split([p.numel() for p in parameters])
    for parameter, part_N in zip(parameters, parts, strict=True):
        gradient = gradient_of(parameter)
        if gradient is None:
            parameter.grad = part_N.view_as(parameter).to(parameter.dtype, copy=True)
        else:
            gradient.copy_(part_N.view_as(gradient))


class VotedGradients:
    """Computes gradients by votes, for a model of which every worker stores a complete copy.

        voted = VotedGradients(model, mols(5, 3))
        for batch in batches:                     # f files of micro-batches each
            verdict = voted.backward(lambda file: loss_of(model, batch[file]))
            optimizer.step()

    Args:
        model: model that receives the gradients. The parameters must be equal on all ranks, except
            for experts, which are distributed over the ranks of a worker.
        assignment: see `Ballots`.
        comm: optional. Group of the ranks that store the same parameters as this rank, one rank per
            worker (see `gradients.replicas.replica_comm`). Defaults to the ranks of the default
            process group.
        aggregate: see `Ballots`.
        worker: optional. Expert-parallel group of the layers. By default, every rank stores all
            experts.
    Raises:
        ValueError: If the number of ranks is not the number of workers, if experts are distributed
            over ranks of several workers, if a router uses loads that ranks report, or if the value
            of `aggregate` is unknown.
    """

    def __init__(self, model: nn.Module, assignment: Assignment, comm: Comm | None = None, *,
                 aggregate: str = "median", worker: Comm | None = None) -> None:
        comm = default_comm() if comm is None else comm
        self.ballots = Ballots(assignment, comm, aggregate, worker)
        _refuse_other_groups(model, self.ballots.sharing.size)
        refuse_reported_loads(model)
        self.parameters, self._shared = shared_first(model.parameters())
        self._layers = layers_in(model)
        self._limits, self._needed = limits_of([model]), list[Tensor]()
        check = RowsCheck([model], comm, (bool(self._limits),
                                          any(limit.repeats for limit in self._limits)))
        self._run = Run([RowsFit([model], comm, check=check, votes=self)])

    @property
    def files(self) -> tuple[int, ...]:
        """The indices of the files that this rank computes."""
        return self.ballots.files

    def backward(self, loss_of: Callable[[int], Tensor]) -> Verdict:
        """Compute the files of this rank, vote on the gradients, and set the gradients of all
        parameters. Collective.

        If a majority of a file's workers reports that rows did not fit into a buffer
        (`dispatch.name: bounded`), all files are computed again, or an error is raised on all
        ranks. Do not call this method inside `until_rows_fit`, because it already repeats the
        computation if necessary.

        Args:
            loss_of: function that computes the loss of a file, given the index of the file. All
                workers of a file must compute bitwise equal losses, so random numbers may depend
                only on the index of the file. The function is called once for each file of this
                rank. If a worker has several ranks, each of them computes a part of the file, and
                the loss of the file is the sum over these ranks.
        Returns:
            The verdict, which is the same on all ranks.
        Raises:
            RowsOverflow: If rows did not fit into a buffer and `dispatch.on_overflow` is "error".
                Raised on all ranks.
        """
        def passes() -> Tensor:
            self._needed.clear()
            found = [self._gradients(loss_of(file)) for file in self.files]
            self._run.after_passes()
            return torch.stack(found)

        with deterministic_layers(self._layers) if self._layers else nullcontext():
            mine_LN = self._run.compute(passes)
        set_gradients(self.parameters, self.ballots.result(mine_LN, self._shared), lambda _: None)
        return self.ballots.verdict()

    def _gradients(self, loss: Tensor) -> Tensor:
        """Return the gradients for a file, and record how many rows the file needed."""
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        self._needed.append(needed_of(self._limits, self.ballots.comm.device))
        for limit in self._limits:
            limit.forget()
        return flat_gradients(self.parameters, gradients)

    def rows_overflowed(self) -> bool:
        """Return true if a vote decides that rows did not fit into a buffer; see
        `Ballots.rows_needed`. Collective.
        """
        return settle(self._limits, self.ballots.rows_needed(self._limits,
                                                             torch.stack(self._needed)))


def _refuse_other_groups(model: nn.Module, ranks: int) -> None:
    for name, layer in named_layers_in(model).items():
        if layer.comm.size != ranks:
            raise ValueError(
                f"experts of layer {name!r} are distributed over {layer.comm.size} ranks, but a "
                f"voting worker has {ranks} ranks; these must be equal. Pass worker=layer.comm and "
                "comm=replica_comm(layer.comm, world) to VotedGradients")


def refuse_reported_loads(model: nn.Module) -> None:
    """Raise a `ValueError` if a router uses loads that the ranks report to each other.

    Reported loads are not voted on, so a single faulty rank could change the biases on all ranks.
    """
    for name, module in model.named_modules():
        if isinstance(module, RouterModule) and module.step_sums():
            raise ValueError(
                f"router {type(module).__name__} of {name!r} cannot be used with votes: its biases "
                "follow loads that every rank reports without a vote. Use router.name=topk with "
                "losses.gshard, or router.bias_rate=0 (fixed biases) if the router has it")
