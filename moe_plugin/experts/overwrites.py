"""Detect code that overwrites experts, and shared parameters that differ between ranks.

Data-parallel tools and loops over `model.parameters()` often treat all parameters as replicas, and
copy or average experts, or their gradients, over ranks that store different experts. `DDPCheck`
recognizes known wrappers. Other tools cannot be recognized by name, so `OverwriteCheck` compares
samples of parameter values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_plugin.comm.base import Comm
from moe_plugin.experts.base import Experts, is_expert
from moe_plugin.experts.optimizers import INSTEAD, refuse_tools, watch_optimizers
from moe_plugin.utils.machine import capturing, inside_backward
from moe_plugin.utils.tensors import is_sharded

logger = logging.getLogger(__name__)
# Calls 2, 4, 7, ... run after 1, 3, 6, 12, ... steps. If experts are averaged every few steps, then
# for any such period they are equal after some of these numbers of steps.
_CALLS = (2, 4, 7, 13, 25, 61, 121, 241)
LAST_CALL = _CALLS[-1]
VALUES = 256  # the size of a rank's sample of expert values, and of its sample of shared values
AVERAGED = (f"{INSTEAD.partition(', and use')[0]}, or call "
            "moe_plugin.training.gradients.sync.sync_gradients after backward")
_APART = 0.05  # experts with a larger distance, relative to their norms, count as different


class OverwriteCheck:
    """A comparison of the experts of all expert-parallel ranks, which runs in training calls 2, 4,
    7, 13, 25, 61, 121 and 241 of each layer.

    Each comparison uses one all-gather of 4 KiB from each rank (5 KiB the first time), and a
    second all-gather over `world`. The ranks compare changes since the previous comparison, so
    experts that are equal from the start do not cause an error. The first comparison covers two
    periods: from building or loading the layer to the first call, and from the first to the second
    call. An error is raised if, in two comparisons, experts have changed and are equal.

    Args:
        comm: the expert-parallel group.
        experts: the experts of this rank.

    Attributes:
        calls: the number of training calls of the layer so far.
        world: the ranks that store the same shared parameters. This group includes the ranks that
            store replicas of this rank's experts. The host sets this attribute. If `world` is None,
            replicas are not compared.
    """

    def __init__(self, comm: Comm, experts: nn.Module) -> None:
        watch_optimizers()
        self.comm, self.calls = comm, 0
        self.world: Comm | None = None
        self.begin(experts)

    def begin(self, experts: nn.Module) -> None:
        """Set the current values of the experts as the baseline from which the next comparison
        measures changes.
        """
        self._before_N = _sample(experts.parameters())
        self._built_N: Tensor | None = None  # `_before_N` before the first call
        self._shared_N: Tensor | None = None
        self._equal_RR: Tensor | int = 0  # number of comparisons with moved, equal experts

    def __call__(self, experts: nn.Module, layer: nn.Module | None) -> None:
        """Count one training call, and run the comparison that is scheduled for this call.

        This method is collective over `comm` and `world`.

        Args:
            experts: the experts of this rank.
            layer: the layer. All parameters of the layer that do not belong to experts are shared
                parameters. None if the layer is unknown.
        Raises:
            ValueError: If the caller runs inside a tool that is known to overwrite experts. All
                ranks also raise the error if different experts have become equal or nearly equal,
                or have changed by the same amounts. All ranks also raise it if experts have changed
                and are equal although the router assigns different tokens to them.
        """
        self.calls += 1
        if self.calls == 1:
            refuse_tools(self.comm.size)
        elif self.calls not in _CALLS:
            return
        if capturing(self.comm.device):  # the host cannot wait while a CUDA graph is captured
            return
        shared = () if layer is None else (p for p in layer.parameters() if not is_expert(p))
        now_N, shared_N = _sample(experts.parameters()), _sample(shared)
        if self.calls == 1:
            self._built_N = self._before_N
        else:
            router = None if layer is None else layer.get_submodule("router")
            self._exchange(now_N, shared_N, router)
        self._before_N, self._shared_N = now_N, shared_N

    @torch.no_grad()
    def _exchange(self, now_N: Tensor, shared_N: Tensor, router: nn.Module | None) -> None:
        earlier_N = torch.zeros_like(shared_N) if self._shared_N is None else self._shared_N
        # Samples may be on other devices: the layer may have moved since the last comparison, and
        # the sample of a router without parameters is on the CPU.
        built, self._built_N = [] if self._built_N is None else [self._built_N], None
        mine_SN = torch.stack([sample_N.to(self.comm.device) for sample_N in
                               (self._before_N, now_N, earlier_N, shared_N, *built)])
        all_RSN = self.comm.all_gather(mine_SN[None]).cpu()
        before_RN, now_RN, earlier_RN, shared_RN, *built_RN = all_RSN.double().unbind(1)
        for earliest_RN in built_RN:
            self._compare(earliest_RN, before_RN, True, router)
        self._compare(before_RN, now_RN, False, router)
        world = self.world
        # inside backward, replicas may be averaging gradients in the same group at the same time
        if world is None or world.size == self.comm.size or inside_backward():
            return _compare_shared(self.comm, earlier_RN, shared_RN)
        place_S1 = torch.full_like(mine_SN[:4, :1], self.comm.rank)
        all_RSN = world.all_gather(torch.cat([mine_SN[:4], place_S1], 1).to(world.device)[None])
        before_RN, now_RN, earlier_RN, shared_RN = all_RSN[..., :-1].cpu().double().unbind(1)
        _compare_shared(world, earlier_RN, shared_RN)
        if (ranks := _drifted(before_RN, now_RN, all_RSN[:, 0, -1].cpu())) is not None:
            _warn(world, "ranks %d and %d store the same experts, which were equal and have become "
                  "different, because their gradients are not averaged over these ranks. %s",
                  *ranks, AVERAGED)

    def _compare(self, before_RN: Tensor, now_RN: Tensor, first: bool,
                 router: nn.Module | None) -> None:
        was_RR, is_RR = _distances(before_RN), _distances(now_RN)
        apart_RR = was_RR / _norms(before_RN)
        closer_RR = ((apart_RR > _APART) & (is_RR < 0.1 * was_RR)
                     & (is_RR / _norms(now_RN) < 0.1 * apart_RR))
        equal_RR = closer_RR | ((apart_RR > 1e-3) & (is_RR == 0))
        change_RN = now_RN - before_RN
        moved_R = change_RN.norm(dim=1)
        # smaller changes may be rounding errors of float32
        moves_R = moved_R > 1e-4 * now_RN.norm(dim=1)
        alike_RR = ((apart_RR > _APART) & (moves_R[:, None] & moves_R)
                    & (_distances(change_RN) < 0.01 * moved_R))
        if first:  # only a warning, because the values may have been set on purpose
            if (ranks := _pair(equal_RR)) is not None:
                _warn(self.comm, "experts of ranks %d and %d differed when the layer was built and "
                      "are equal in the first training call. If something has copied all "
                      "parameters from one rank to the others, at least half of the experts are "
                      "lost. %s", *ranks, INSTEAD)
            return
        self._equal_RR = self._equal_RR + _equal_and_moved(before_RN, now_RN, is_RR)
        still_RR = self._equal_RR >= 2
        for found_RR, what in ((equal_RR, "experts of ranks {} and {} were different and have "
                                "become equal: something copies or averages all parameters"),
                               (alike_RR, "experts of ranks {} and {} are different, but have "
                                "changed equally: something averages the gradients of all "
                                "parameters"),
                               (still_RR, "experts of ranks {} and {} were trained and are "
                                "equal: something copies or averages all parameters, or their "
                                "gradients,")):
            if (ranks := _pair(found_RR)) is None:
                continue
            text = (f"{what.format(*ranks)} over the ranks (a broadcast or all-reduce in a loop "
                    "over model.parameters(), a model averager of torch, LocalSGD of accelerate, "
                    "...). These ranks hold different experts: leave out every parameter with "
                    f"is_expert(parameter) of moe_plugin.experts. {INSTEAD}")
            if found_RR is not still_RR or _tells_apart(router):
                raise ValueError(text)
            self._equal_RR = -LAST_CALL  # warn once
            _warn(self.comm, "%s. Or the router gives these experts the same tokens with the same "
                  "weights, so that they always stay equal. Then add noise to the experts or to "
                  "the router", text)


def _compare_shared(comm: Comm, before_RN: Tensor, now_RN: Tensor) -> None:
    if not before_RN.any() or (before_RN != before_RN[0]).any():
        return
    if (ranks := _drifted(before_RN, now_RN, torch.zeros(len(now_RN)))) is not None:
        _warn(comm, "the routers, or other parameters of the layer that all ranks share, were "
              "equal on ranks %d and %d and have become different, because their gradients are "
              "not averaged. %s", *ranks, AVERAGED)


def _warn(comm: Comm, text: str, *values: object) -> None:
    if comm.rank == 0:
        logger.warning(text, *values)


def _equal_and_moved(before_RN: Tensor, now_RN: Tensor, is_RR: Tensor) -> Tensor:
    """Return the pairs of ranks whose experts are equal now and were trained after `before_RN` was
    sampled.

    Weight decay alone changes the weights of an expert without tokens, and moves every large value
    towards zero. Therefore an expert counts as trained only if the magnitude of a large value has
    increased. Small values are ignored, because an optimizer that normalizes the gradient may move
    them across zero.
    """
    large_RN = before_RN.abs() >= before_RN.abs().mean(1, keepdim=True)
    grew_R = (large_RN & ((now_RN - before_RN) * before_RN > 0)).any(1)
    return (is_RR == 0) & grew_R[:, None] & grew_R


def _tells_apart(router: nn.Module | None) -> bool:
    """Return whether the rows of the router's weights differ between experts.

    If the router's weights are equal, experts may receive the same tokens.
    """
    weights = () if router is None else router.parameters()
    return any(w.dim() == 2 and not is_sharded(w) and len(w.unique(dim=0)) == len(w)
               for w in weights)


def _drifted(before_RN: Tensor, now_RN: Tensor, part_R: Tensor) -> tuple[int, int] | None:
    """Return two ranks that store the same experts but no longer have equal values, or None if all
    values are equal.
    """
    first_R = (part_R[:, None] == part_R).int().argmax(1)
    drift_R = (now_RN - now_RN[first_R]).norm(dim=1) > 1e-4 * now_RN.norm(dim=1)
    drifted = (drift_R & (before_RN == before_RN[first_R]).all(1)).nonzero().flatten().tolist()
    return (int(first_R[drifted[0]]), drifted[0]) if drifted else None


def _sample(parameters: Iterable[Tensor]) -> Tensor:
    """Return a float32 sample of `VALUES` values, with the same number of values from each
    parameter.

    If there are fewer values, the sample is padded with zeros. Parameters without storage and
    sharded parameters are skipped.
    """
    samples, sampled = [], [p for p in parameters if p.numel() and p.is_floating_point()]
    per_parameter = max(1, VALUES // max(1, len(sampled)))
    for parameter in sampled[:VALUES]:
        if parameter.is_meta or is_sharded(parameter):
            continue
        whole = parameter.detach()
        count = min(per_parameter, whole.numel())
        # selected by position in memory, because a transposed parameter would otherwise be copied
        values = whole.as_strided((count,), (whole.numel() // count,), whole.storage_offset())
        samples.append(values.to(torch.float32, copy=True))
    sample_N = torch.zeros(VALUES, device=samples[0].device if samples else "cpu")
    if samples:
        taken = torch.cat([values.to(sample_N.device) for values in samples])[:VALUES]
        sample_N[:len(taken)] = taken
    return sample_N


def _distances(x_RN: Tensor) -> Tensor:
    return torch.cdist(x_RN, x_RN, compute_mode="donot_use_mm_for_euclid_dist")


def _norms(x_RN: Tensor) -> Tensor:
    """For each pair of ranks, return the mean of the norms of both ranks, [R, R]."""
    norm_R = x_RN.norm(dim=1)
    return (norm_R[:, None] + norm_R) / 2


def _pair(found_RR: Tensor) -> tuple[int, int] | None:
    """Return the first pair of ranks for which the matrix is true, or None."""
    pairs = found_RR.triu(1).nonzero()
    return None if len(pairs) == 0 else (int(pairs[0, 0]), int(pairs[0, 1]))


_TORCH_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


class DDPCheck:
    """A check in the forward pass that raises a `ValueError` if other code treats experts as
    replicas of each other.

    The check detects torch's DDP and FSDP, DeepSpeed, other code that overwrites experts
    (`OverwriteCheck`), and parameters that were replaced after `reduce_experts`. Once the check has
    found a wrapper that excludes the experts, it no longer looks for wrappers.

    The check is skipped if the expert-parallel group has only one rank, because all data-parallel
    ranks then store the same experts, which may be averaged.

    Args:
        comm: the expert-parallel group.
        experts: the experts of this rank.
    """

    def __init__(self, comm: Comm, experts: Experts) -> None:
        self.passed, self._wrapped = comm.size == 1, False
        # the parameters of experts that are stored outside the device do not contain their values
        self.overwrites = None
        if comm.size > 1 and not experts.stored:
            self.overwrites = OverwriteCheck(comm, experts)

    def begin(self, experts: nn.Module) -> None:
        """Accept the current expert values as correct, for example after loading a checkpoint."""
        if self.overwrites is not None:
            self.overwrites.begin(experts)

    def expect_wrapper(self) -> None:
        """Check for a wrapper again in the next call, because the model is about to be wrapped."""
        self.passed = self._wrapped = False

    def compare_replicas(self, world: Comm | None) -> None:
        """Also compare shared parameters and replicas over the ranks in `world` (see
        `OverwriteCheck`).
        """
        if self.overwrites is not None:
            self.overwrites.world = world

    def __call__(self, built: Experts, layer: nn.Module) -> None:
        """Run the check. The layer calls this method in every forward pass.

        Args:
            built: the layer's experts, without any adapters that wrap them.
            layer: the layer.
        """
        experts: nn.Module = layer.experts  # type: ignore[assignment]
        if torch.compiler.is_compiling():
            return
        trains = built.training and torch.is_grad_enabled()
        if built.reduced and trains:
            _refuse_new(experts)
        if self.passed:
            return
        if not self._wrapped:
            # torch (>= 2.1) sets this attribute on all modules that FSDP1 or FSDP2 manages. It is
            # read from __dict__, because looking up a missing attribute of a module is slow.
            if experts.__dict__.get("_is_fsdp_managed_module"):
                _refuse_sharded(experts)
            # private in torch (>= 1.11); without it nothing is checked
            ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
            if ddp is not None:
                _refuse_averaged(ddp, experts)
                if built.reduced:
                    _refuse_hooks(ddp)
                self._wrapped = True
        watch = self.overwrites
        if watch is None or watch.calls >= LAST_CALL:
            self.passed = self._wrapped
        elif trains:
            # `layer.experts` may be an adapter, or the experts of another layer
            watch(experts if isinstance(experts, Experts) else built, layer)


def _refuse_new(experts: nn.Module) -> None:
    """Raise an error if a trainable parameter does not have the hooks registered by
    `reduce_experts`.

    Without these hooks, the parameter would be trained with the gradient of only one rank.
    """
    for name, parameter in experts.named_parameters():
        if parameter.requires_grad and not getattr(parameter, "reduced", False):
            raise ValueError(
                f"gradients of the experts' {name!r} are not reduced over ranks, because the "
                "parameter was replaced or became trainable after the model was wrapped. "
                "Parameters are replaced by load_state_dict(assign=True), by copying a model, and "
                "by leaving the meta device. Load and unfreeze parameters before ddp_model or "
                "fully_shard_model, and wrap a copy of the model again")


def _refuse_averaged(ddp: DistributedDataParallel, experts: nn.Module) -> None:
    mine = {id(parameter) for parameter in experts.parameters()}
    for name, parameter in ddp.module.named_parameters(remove_duplicate=False):
        if id(parameter
              ) in mine and parameter.requires_grad and name not in ddp.parameters_to_ignore:
            raise ValueError(
                f"DistributedDataParallel averages {name!r}, but every rank has different experts. "
                "Wrap the model with moe_plugin.ddp_model(model), or call "
                "moe_plugin.training.gradients.sync.exclude_experts(model) before wrapping it and "
                "sync_gradients after backward")


def _refuse_hooks(ddp: DistributedDataParallel) -> None:
    """Raise an error for a communication hook that might not divide gradients by the number of
    ranks.
    """
    # private in torch (>= 2.0); without it nothing is checked
    for hook, _ in getattr(ddp, "_comm_hooks", []):
        name = getattr(hook, "__name__", type(hook).__name__)
        averages = (getattr(hook, "__module__", "").startswith(_TORCH_HOOKS)
                    and name not in ("noop_hook", "post_localSGD_hook"))
        if not averages and not getattr(hook, "averages", False):
            raise ValueError(
                f"the communication hook {name!r} of DistributedDataParallel might not average "
                "gradients over all ranks, but the gradients of experts are averaged. Divide by "
                "the number of ranks in the hook and set its attribute averages=True, or leave the "
                "hook out")


def _refuse_sharded(experts: nn.Module) -> None:
    # the parameters of an FSDP unit are new tensors without the mark; FSDP1 leaves none
    kept = [name for name, parameter in experts.named_parameters() if is_expert(parameter)]
    taken = [name for name, parameter in experts.named_parameters() if not is_expert(parameter)]
    if taken or not kept:
        raise ValueError(
            f"FSDP shards the experts' parameters ({', '.join(taken) or 'all'}), but every rank "
            "has different experts. Wrap the model with moe_plugin.fully_shard_model(model) "
            "instead of torch's fully_shard or FullyShardedDataParallel")
