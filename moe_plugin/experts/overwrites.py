"""A check that nothing copies or averages experts, or their gradients, over the ranks that store
different ones; and that what these ranks share does not drift apart.

Tools for data parallelism, and loops over `model.parameters()`, take all parameters for replicas.
Not all of them can be recognised, so the check compares samples of the values instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.dtensors import is_sharded
from moe_plugin.experts.optimizers import INSTEAD, refuse_tools, watch_optimizers
from moe_plugin.machine import capturing

logger = logging.getLogger(__name__)
LAST_CALL = 256
VALUES = 256  # of the experts, and as many of the router: the sample of a rank
_APART = 0.05  # distance of experts, relative to their norms, at which they count as different


class OverwriteCheck:
    """Compares the experts of expert-parallel ranks in training calls 2, 4, 8, ..., 256.

    Every comparison costs one all-gather of 4 KiB from each rank (5 KiB the first time); there are
    8 in the life of a layer. The ranks compare each other's changes since the previous comparison
    (at first those until the first call, since the layer was built or loaded, and those after it),
    so that experts that start equal do not raise an error.

    Args:
        comm: the expert-parallel group.
        experts: of this rank.

    Attributes: `calls`: training calls of the layer so far.
    """

    def __init__(self, comm: Comm, experts: nn.Module) -> None:
        watch_optimizers()
        self.comm, self.calls = comm, 0
        self.begin(experts)

    def begin(self, experts: nn.Module) -> None:
        """Compare with the values that the experts have now. Local."""
        self._before_N = _sample(experts.parameters())
        self._built_N: Tensor | None = None  # what `_before_N` was before the first call
        self._router_N: Tensor | None = None

    def __call__(self, experts: nn.Module, router: nn.Module | None) -> None:
        """Count a training call, and compare if it is its turn; collective over `comm`.

        Raises:
            ValueError: a tool that overwrites experts is recognised, or, on all ranks, experts that
                were different are equal, or nearly so, or have changed equally.
        """
        self.calls += 1
        if self.calls & (self.calls - 1) or self.calls > LAST_CALL:
            return
        if self.calls == 1:
            refuse_tools(self.comm.size)
        if capturing(self.comm.device):  # a CUDA graph, in which the host cannot wait
            return
        if self.calls > 1:
            return self._exchange(experts, router)
        self._built_N, self._before_N = self._before_N, _sample(experts.parameters())
        self._router_N = _sample(() if router is None else router.parameters())

    @torch.no_grad()
    def _exchange(self, experts: nn.Module, router: nn.Module | None) -> None:
        now_N = _sample(experts.parameters())
        router_N = _sample(() if router is None else router.parameters())
        earlier_N = torch.zeros_like(router_N) if self._router_N is None else self._router_N
        # layers may have moved since, and routers may have no parameters
        built = [] if self._built_N is None else [self._built_N]
        mine_SN = torch.stack([sample_N.to(self.comm.device) for sample_N in
                               (self._before_N, now_N, earlier_N, router_N, *built)])
        all_RSN = self.comm.all_gather(mine_SN[None]).cpu()
        self._before_N, self._router_N, self._built_N = now_N, router_N, None
        before_RN, now_RN, earlier_RN, router_RN, *built_RN = all_RSN.double().unbind(1)
        for earliest_RN in built_RN:
            self._compare(earliest_RN, before_RN, True)
        self._compare(before_RN, now_RN, False)
        self._compare_routers(earlier_RN, router_RN)

    def _compare(self, before_RN: Tensor, now_RN: Tensor, first: bool) -> None:
        was_RR, is_RR = _distances(before_RN), _distances(now_RN)
        apart_RR = was_RR / _norms(before_RN)
        closer_RR = ((apart_RR > _APART) & (is_RR < 0.1 * was_RR)
                     & (is_RR / _norms(now_RN) < 0.1 * apart_RR))
        equal_RR = closer_RR | ((apart_RR > 1e-3) & (is_RR == 0))
        change_RN = now_RN - before_RN
        moved_R = change_RN.norm(dim=1)
        # float32 rounds the changes of values
        moves_R = moved_R > 1e-4 * now_RN.norm(dim=1)
        alike_RR = ((apart_RR > _APART) & (moves_R[:, None] & moves_R)
                    & (_distances(change_RN) < 0.01 * moved_R))
        if first:  # values may have been set on purpose
            if (ranks := _pair(equal_RR)) is not None:
                self._warn("experts of ranks %d and %d differed when the layer was built and are "
                           "equal in the first training call. If something has copied all "
                           "parameters from one rank to the others, then half of the experts or "
                           "more are lost. %s", *ranks, INSTEAD)
            return
        for found_RR, what in ((equal_RR, "experts of ranks {} and {} were different and have "
                                "become equal: something copies or averages all parameters"),
                               (alike_RR, "experts of ranks {} and {} are different, but have "
                                "changed equally: something averages the gradients of all "
                                "parameters")):
            if (ranks := _pair(found_RR)) is not None:
                raise ValueError(
                    f"{what.format(*ranks)} over the ranks (a broadcast or all-reduce in a loop "
                    "over model.parameters(), a model averager of torch, LocalSGD of accelerate, "
                    "...). These ranks hold different experts: leave out every parameter with "
                    f"is_expert(parameter) of moe_plugin.experts. {INSTEAD}")

    def _compare_routers(self, before_RN: Tensor, now_RN: Tensor) -> None:
        if not before_RN.any() or _distances(before_RN).any():
            return
        drift_RR = _distances(now_RN) > 1e-4 * _norms(now_RN)
        if (ranks := _pair(drift_RR)) is not None:
            self._warn("the routers of ranks %d and %d were equal and have become different: the "
                       "gradients of the parameters that all ranks share are not averaged. %s, or "
                       "call moe_plugin.gradients.sync.sync_gradients after backward", *ranks,
                       INSTEAD.partition(", and use")[0])

    def _warn(self, text: str, *values: object) -> None:
        if self.comm.rank == 0:
            logger.warning(text, *values)


def _sample(parameters: Iterable[Tensor]) -> Tensor:
    """Take VALUES values from all parameters, float32, the same number from each. There are zeros
    where a parameter has too few values, no memory, or is in shards.
    """
    found, several = [], [p for p in parameters if p.numel() and p.is_floating_point()]
    each = max(1, VALUES // max(1, len(several)))
    for parameter in several[:VALUES]:
        if parameter.is_meta or is_sharded(parameter):
            continue
        whole = parameter.detach()
        count = min(each, whole.numel())
        # by position in memory: parameters may be transposed, and must not be copied for this
        values = whole.as_strided((count,), (whole.numel() // count,), whole.storage_offset())
        found.append(values.to(torch.float32, copy=True))
    sample_N = torch.zeros(VALUES, device=found[0].device if found else "cpu")
    if found:
        taken = torch.cat([values.to(sample_N.device) for values in found])[:VALUES]
        sample_N[:len(taken)] = taken
    return sample_N


def _distances(x_RN: Tensor) -> Tensor:
    return torch.cdist(x_RN, x_RN, compute_mode="donot_use_mm_for_euclid_dist")


def _norms(x_RN: Tensor) -> Tensor:
    """Mean norm of each pair of ranks, [R, R]."""
    norm_R = x_RN.norm(dim=1)
    return (norm_R[:, None] + norm_R) / 2


def _pair(found_RR: Tensor) -> tuple[int, int] | None:
    """The first pair of ranks that was found."""
    pairs = found_RR.triu(1).nonzero()
    return None if len(pairs) == 0 else (int(pairs[0, 0]), int(pairs[0, 1]))
