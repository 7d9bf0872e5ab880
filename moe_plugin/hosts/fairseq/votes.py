"""Votes in fairseq. This module detects where each file (a group of batches) begins, and which
batches are included in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.experts.base import is_expert
from moe_plugin.training.gradients import fused
from moe_plugin.training.resilience.step_votes import StepVotes
from moe_plugin.training.resilience.vote import Ballots
from moe_plugin.utils.run_feature import StepInput

logger = logging.getLogger(__name__)
NORM_ERROR = 1e-6  # largest accepted relative difference, as in fairseq


class FileTurns(StepVotes):
    """`StepVotes` for fairseq's training step, which calls the criterion once for each batch.

    Args:
        ballots: see `StepVotes`.
        model: the model without its wrapper.
        criterion: the criterion without its wrapper.
        group: process group of the data-parallel ranks.
    """

    def __init__(self, ballots: Ballots, model: nn.Module, criterion: nn.Module,
                 group: Any) -> None:
        super().__init__(ballots, [model, criterion], group=group)
        self.criterion = criterion

    def reduce_by_vote(self, module: nn.Module) -> None:
        """Vote on the gradients. Replaces the optimizer's method `all_reduce_grads`."""
        # fairseq averages gradients over ranks, and an expert's gradient is already divided by its
        # group
        scale = self.ballots.assignment.count / self.ballots.comm.size
        self.finish(scale / self.ballots.sharing.size, scale)

    def norm_squared(self, parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
        """Return the squared norm of a worker's gradients after the vote, as a float64 tensor.

        Each parameter is counted once. This is a collective operation of the worker's ranks.
        """
        grads: dict[bool, list[Any]] = {
            expert: [p.grad for p in parameters if is_expert(p) == expert]
            for expert in (False, True)}
        shared, experts = (fused.squared_norm(some, device) for some in grads.values())
        return shared + self.ballots.sharing.all_reduce(experts)

    def check_norm(self, norm: Tensor) -> None:
        """Log a warning if some ranks have a different gradient norm than the majority. This is a
        collective operation.

        This method replaces fairseq's check that all ranks have the same norm.

        Raises:
            FloatingPointError: On all ranks, if there is no majority.
        """
        norms_K = self.ballots.comm.all_gather(norm.detach().double().view(1)).cpu()
        # the median is the norm of the majority, if there is one
        middle = norms_K.nan_to_num(float("inf")).sort().values[len(norms_K) // 2]
        if not middle.isfinite():
            return
        wrong = (~((norms_K - middle).abs() <= NORM_ERROR * middle)).nonzero().flatten().tolist()
        if 2 * len(wrong) >= len(norms_K):
            raise FloatingPointError(
                f"step {self.step}: no majority of the {len(norms_K)} workers has the same "
                f"gradient norm ({norms_K.tolist()}), although they voted on the gradients. Their "
                "weights differ. Resume from the newest checkpoint, and check these machines")
        if wrong and self.ballots.comm.rank == self.ballots.worker.rank == 0:
            logger.warning("step %d: these ranks have another gradient norm than the majority: %s",
                           self.step,
                           self.ranks_of(wrong))

    @contextmanager
    def around_step(self, step: StepInput) -> Iterator[None]:
        """Run the training step, with hooks before and after each call of the criterion."""
        hooks = (self.criterion.register_forward_pre_hook(self._begin),
                 self.criterion.register_forward_hook(self._end))
        try:
            with super().around_step(step):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _restart(self) -> None:
        super()._restart()
        self._at = 0
        self._sizes: list[float] = []

    def _begin(self, criterion: nn.Module, args: Any) -> None:
        if self._at < len(self.dealt) and self.dealt[self._at].begins:
            self.begin_file()
            self._sizes.append(0.0)

    def _end(self, criterion: nn.Module, args: Any, output: Any) -> None:
        if self._at < len(self.dealt):
            self._sizes[-1] += float(output[1]) if self.dealt[self._at].batch else 0.0
            self._at += 1

    def counted(self, logged: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the logged values of the batches on this rank that are included in the log."""
        kept = [entry for entry, batch in zip(logged, self.dealt, strict=False) if batch.counts]
        return kept or [{name: value * 0 for name, value in entry.items()} for entry in logged[:1]]

    def sample_size(self) -> float:
        """Return the total sample size of all files. The ranks agree on this number by vote. This
        is a collective operation.
        """
        sizes = torch.tensor(self._sizes or [0.0], dtype=torch.float64)
        return float(self.agreed_sums(sizes.split(1)))
