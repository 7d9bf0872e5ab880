"""Gradients of data-parallel ranks of which some may send anything (ByzShield).

Every file of a batch is computed by several workers, as `planner.vote_assignments` assigns them. Of
a file the answer counts that most of its workers gave, bit by bit, so that they must compute alike;
over the files the coordinate-wise median is taken. A worker is a rank, or a block of ranks among
which a model is spread: then ranks of the same place in their blocks vote, each for itself, on what
this place computes, and nothing that they vote on travels any further.
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
from moe_plugin.training.resilience.overflow import RowsCheck, RowsFit, limits_of
from moe_plugin.training.resilience.twins import alike
from moe_plugin.training.run import Run

CHUNK = 1 << 20  # elements of every file that travel together
AGGREGATES = ("median", "mean")


def majority(copies: Sequence[Tensor]) -> tuple[int, list[int]]:
    """Which of several answers most agree with bit by bit, and which differ from it.

    copies: of one shape and dtype; NaN equals the same NaN. Of equally many the first counts.
    Returns: index of the first that agrees with most; indices of those that differ.
    """
    # as bytes: -0.0 and 0.0 are different answers, equal NaNs are not
    bytes_ = [copy.detach().contiguous().view(-1).view(torch.uint8) for copy in copies]
    alike = [[j for j, other in enumerate(bytes_) if torch.equal(mine, other)] for mine in bytes_]
    best = max(range(len(copies)), key=lambda i: (len(alike[i]), -i))
    return best, [j for j in range(len(copies)) if j not in alike[best]]


def coordinate_median(x_FN: Tensor) -> Tensor:
    """The median over axis 0 of [F, N], the mean of the middle two where F is even; [N]."""
    sorted_FN = x_FN.sort(dim=0).values
    middle = x_FN.shape[0] // 2
    if x_FN.shape[0] % 2:
        return sorted_FN[middle]
    return (sorted_FN[middle - 1] + sorted_FN[middle]) / 2


@dataclass(frozen=True)
class Verdict:
    """What a vote found.

    Attributes:
        outvoted: workers that differed from the majority of a file, ascending.
        undecided: files of which no answer had a majority; the first of the most frequent ones
            counted.
    """

    outvoted: tuple[int, ...]
    undecided: tuple[int, ...]


def vote(answers_KLN: Tensor, assignment: Assignment) -> tuple[Tensor, Verdict]:
    """The answer of most workers to every file.

    answers_KLN: of each worker for its files, in their order.
    Returns: winners [F, N] by file, and who was outvoted.
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
    """Answers of all workers to the files that each of them computes, and what counts of them.

    Args:
        assignment: its worker w has rank w of `comm`.
        comm: the ranks that vote with this one: one of each worker, of the same place in it.
        aggregate: over the files: `median`, or `mean` where no file may be spoiled.
        sharing: ranks of this worker that compute a file together, each a part of its batches.
        worker: all ranks of this worker, with those of other pipeline stages; None: `sharing`.
    Raises:
        ValueError: another number of ranks than workers, or an unknown aggregate.
    """

    def __init__(self, assignment: Assignment, comm: Comm, aggregate: str = "median",
                 sharing: Comm | None = None, worker: Comm | None = None) -> None:
        if comm.size != assignment.workers:
            raise ValueError(f"assignment {assignment.name!r} is for {assignment.workers} workers, "
                             f"the group has {comm.size} ranks: must be equal")
        if aggregate not in AGGREGATES:
            raise ValueError(f"aggregate={aggregate!r} must be one of {', '.join(AGGREGATES)}")
        self.assignment, self.comm, self.aggregate = assignment, comm, aggregate
        self.sharing = LocalComm() if sharing is None else sharing
        self.worker = self.sharing if worker is None else worker
        self._outvoted: set[int] = set()
        self._undecided: set[int] = set()

    @property
    def files(self) -> tuple[int, ...]:
        """Files that this rank computes."""
        return self.assignment.files[self.comm.rank]

    def winners(self, mine_LN: Tensor) -> Tensor:
        """The answers that count, [F, N] by file. Collective.

        mine_LN: of this rank to its files, in their order.
        """
        shape = (self.comm.size, *mine_LN.shape)
        every_KLN = self.comm.all_gather(mine_LN.contiguous()).view(shape)
        winners_FN, verdict = vote(every_KLN, self.assignment)
        self._outvoted.update(verdict.outvoted)
        self._undecided.update(verdict.undecided)
        return winners_FN

    def rows_needed(self, limits: Sequence[Limit], mine_LN: Tensor) -> Tensor:
        """What `dispatch.rows_limit.settle` takes: of a file what most of its workers say, so that
        no wrong rank makes all others repeat a step or end. Collective.

        mine_LN: what the limits needed in each of this rank's files.
        """
        most_LK = self.worker.all_reduce(most_of(limits, mine_LN), "max")
        return self.winners(torch.cat([most_LK, mine_LN], dim=1)).amax(0)

    def result(self, mine_LN: Tensor, shared: int = 0) -> Tensor:
        """What counts, over all files: [N]. Collective.

        shared: of so many first numbers a file's answer is the sum over the ranks of `sharing`.
        """
        parts = []
        for sums_up, part_LN in ((True, mine_LN[:, :shared]), (False, mine_LN[:, shared:])):
            for chunk_LN in part_LN.split(CHUNK, dim=1) if part_LN.numel() else ():
                winners_FN = self.winners(self.summed(chunk_LN) if sums_up else chunk_LN)
                parts.append(coordinate_median(winners_FN) if self.aggregate == "median"
                             else winners_FN.mean(0))
        return torch.cat(parts)

    def summed(self, part_LN: Tensor) -> Tensor:
        """The answers of which every rank of `sharing` has a part. Collective."""
        return self.sharing.all_reduce(part_LN.contiguous())

    def most_say(self, mine: bool) -> bool:
        """Whether most workers say so, each of which does where one of its ranks does. Collective.
        """
        return bool(self.most_need(torch.tensor([mine], device=self.comm.device).int()))

    def most_need(self, mine: Tensor) -> Tensor:
        """The largest numbers that most workers reach, each by one of its ranks: integers of the
        shape [N] of mine. Collective.
        """
        every_K = self.comm.all_gather(self.worker.all_reduce(mine, "max")).view(-1, *mine.shape)
        return every_K.sort(0).values[(self.comm.size - 1) // 2]

    def verdict(self) -> Verdict:
        """Of all votes since the last call, at any place of this worker. Collective in it."""
        kinds = (self._outvoted, self.assignment.workers), (self._undecided, self.assignment.count)
        flags = torch.tensor([i in found for found, size in kinds for i in range(size)],
                             dtype=torch.int32, device=self.comm.device)
        said = self.worker.all_reduce(flags, "max").split([size for _, size in kinds])
        self._outvoted.clear()
        self._undecided.clear()
        outvoted, undecided = (tuple(each.nonzero().flatten().tolist()) for each in said)
        return Verdict(outvoted, undecided)


def shared_first(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], int]:
    """Those that train, experts last, and how many numbers are not experts'."""
    train = sorted((p for p in parameters if p.requires_grad), key=is_expert)
    return train, sum(p.numel() for p in train if not is_expert(p))


def flat_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """Gradients in one vector [N] of the widest of their dtypes; zero: a parameter has none."""
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1)
                      for p, g in zip(parameters, gradients, strict=True)])


@torch.no_grad()
def set_gradients(parameters: Sequence[nn.Parameter], gradient_N: Tensor,
                  gradient_of: Callable[[nn.Parameter], Tensor | None]) -> None:
    """Give parameters the parts of a vector that `flat_gradients` made, in their dtypes."""
    parts = gradient_N.split([p.numel() for p in parameters])
    for parameter, part_N in zip(parameters, parts, strict=True):
        gradient = gradient_of(parameter)
        if gradient is None:
            parameter.grad = part_N.view_as(parameter).to(parameter.dtype, copy=True)
        else:
            gradient.copy_(part_N.view_as(gradient))


class VotedGradients:
    """Gradients by vote, of a model that every rank has entirely, or every worker of several ranks.

        voted = VotedGradients(model, mols(5, 3))
        for batch in batches:                     # f files of micro-batches each
            verdict = voted.backward(lambda file: loss_of(model, batch[file]))
            optimizer.step()

    Args:
        model: its parameters, the same on all ranks but for the experts of a worker's ranks, get
            the gradients.
        assignment, aggregate: see `Ballots`.
        comm: the ranks that store what this one does, one of each worker
            (`gradients.replicas.replica_comm`); None: those of the default group.
        worker: the expert-parallel group of the layers; None: every rank has all experts.
    Raises:
        ValueError: another number of ranks than workers, experts that are spread over other ranks
            than a worker's, a router that follows loads which ranks report, or an unknown
            aggregate.
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
        """Files that this rank computes."""
        return self.ballots.files

    def backward(self, loss_of: Callable[[int], Tensor]) -> Verdict:
        """Compute this rank's files, vote, and set every parameter's gradient. Collective.

        Where rows of a file did not fit (`dispatch.name: bounded`), as most of its workers say, all
        files are computed again, or it is an error on all ranks: no `until_rows_fit` around it.

        loss_of: the loss of a file, the same bits on each of its workers: draw random numbers from
            the file's number. Called once for each of this rank's files. Of several ranks of a
            worker it is each one's part, and their sum the loss.
        Returns: the same on all ranks.
        Raises: RowsOverflow: on all ranks, where `dispatch.on_overflow` is error.
        """
        def passes() -> Tensor:
            self._needed.clear()
            found = [self._gradients(loss_of(file)) for file in self.files]
            self._run.after_passes()
            return torch.stack(found)

        with alike(self._layers) if self._layers else nullcontext():
            mine_LN = self._run.compute(passes)
        set_gradients(self.parameters, self.ballots.result(mine_LN, self._shared), lambda _: None)
        return self.ballots.verdict()

    def _gradients(self, loss: Tensor) -> Tensor:
        """Of a file; what its rows needed is noted."""
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        self._needed.append(needed_of(self._limits, self.ballots.comm.device))
        for limit in self._limits:
            limit.forget()
        return flat_gradients(self.parameters, found)

    def rows_overflowed(self) -> bool:
        """See `Ballots.rows_needed`. Collective."""
        return settle(self._limits, self.ballots.rows_needed(self._limits,
                                                             torch.stack(self._needed)))


def _refuse_other_groups(model: nn.Module, ranks: int) -> None:
    for name, layer in named_layers_in(model).items():
        if layer.comm.size != ranks:
            raise ValueError(
                f"experts of layer {name!r} are spread over ranks, {layer.comm.size} of them, and "
                f"a worker that votes has {ranks}: must be equal; give VotedGradients "
                "worker=layer.comm and comm=replica_comm(layer.comm, world)")


def refuse_reported_loads(model: nn.Module) -> None:
    """`ValueError` where a router follows loads that all ranks report, which are not voted on: one
    wrong rank would move the biases of all.
    """
    for name, module in model.named_modules():
        if isinstance(module, RouterModule) and module.step_sums():
            raise ValueError(
                f"router {type(module).__name__} of {name!r} does not fit votes: its biases follow "
                "what every rank reports, and this is not voted on: use router.name=topk with "
                "losses.gshard, or router.bias_rate=0 (biases stay) where the router has it")
