"""Train several replicas that may join and leave at any time, with torchft.

Gradients are averaged over the active replicas. If a replica is lost, the other replicas lose one
step. A replica that restarts loads the weights of an active replica. Each replica contains the
whole model. Each replica is a separate job with its own torchrun. The ranks of a replica share the
experts as usual. A *lighthouse* (the program `torchft_lighthouse`, which runs once for all
replicas) keeps track of the active replicas. `scripts/train_plain.py` contains an example loop.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_plugin.comm.base import CommError
from moe_plugin.comm.host_collectives import gather_objects
from moe_plugin.routing.contract import RouterModule
from moe_plugin.training.resilience.step_votes import LIVING, Quorums, retries
from moe_plugin.utils.messages import short
from moe_plugin.utils.quiet import TORCHFT, TORCHFT_LINES, hide
from moe_plugin.utils.run_feature import LostStep, RunFeature, StepGradients

QUORUM_S = 600.0  # time to wait for a replica that validates or saves, or for the lighthouse
MAX_LOST = 100  # consecutive lost steps; replicas do not join and leave that often
MOST_REPLICAS = 1 << 20
_MOST_STEPS = (LIVING >> 20) - 2


class ElasticReplica:
    """The connection of this replica to the other replicas, over which gradients are averaged. All
    ranks of the replica must call the constructor.

    Args:
        lighthouse: address of the lighthouse in the form `http://HOST:PORT`.
        replica: index of this replica, which stays the same if the replica restarts.
        state: function that returns this rank's state (nested values and tensors). If another
            replica returns after a failure, the same rank of that replica loads this state.
        load: function that loads a state that `state` has returned.
        timeout_s: seconds after which a replica that does not answer is excluded from a step.
        progress: number of completed steps, as stored in the replica's checkpoint. If replicas
            start together, all of them load the state of the replica with the most steps.

    Attributes:
        members: number of replicas whose gradients were included in the most recent averaging.
        healed: whether this replica loaded the state of another replica during the most recent
            averaging. If so, its own gradients were not included.
        lost: total number of lost steps.
    Raises:
        ValueError: If torchft is missing, the lighthouse does not answer, or a number is out of
            bounds.
    """

    def __init__(self, lighthouse: str, replica: int, state: Callable[[], Any],
                 load: Callable[[Any], None], timeout_s: float = 60.0, progress: int = 0) -> None:
        check_settings(replica)
        if not 0 <= progress <= _MOST_STEPS:
            raise ValueError(f"progress={progress} is out of bounds: must be in 0..{_MOST_STEPS}; "
                             "pass the number of completed steps")
        torchft = _torchft()
        host = _own_address(lighthouse, timeout_s)
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        store = None
        if rank == 0:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        place = (host, store.port) if store is not None else None
        places: list[Any] = gather_objects(place, "stores") if ranks > 1 else [place]
        host, port = places[0]
        wait, quorum_s = timedelta(seconds=timeout_s), max(timeout_s, QUORUM_S)
        self._store = store  # keeps the store alive as long as this object
        self.members, self.lost, self.healed = 0, 0, False
        self._load, self._lost_in_a_row = load, 0
        self._name = f"replica {replica}, lighthouse {lighthouse}"
        self._group = torchft.ProcessGroupGloo(timeout=wait)
        self._manager = torchft.Manager(
            pg=self._group, state_dict=state, load_state_dict=self._take,
            min_replica_size=1, replica_id=f"replica{replica}", timeout=wait,
            quorum_timeout=timedelta(seconds=quorum_s), connect_timeout=wait,
            quorum_retries=retries(quorum_s), rank=rank, world_size=ranks, store_addr=host,
            store_port=port, lighthouse_addr=lighthouse, hostname=host, init_sync=False)
        self._quorums = self._manager._client = Quorums(self._manager._client)
        # With equal step counts, torchft would let the ranks of a starting replica load states of
        # different replicas. With distinct counts, all load the state with the largest count.
        self._count_steps(1 + progress * MOST_REPLICAS + MOST_REPLICAS - 1 - replica)

    def _count_steps(self, step: int) -> None:
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def average(self, gradients: Sequence[Tensor | None]) -> bool:
        """Replace the gradients by their mean over the active replicas. Collective in the replica.

        Call it before the optimizer's step. A returning replica loads the state of an active
        replica during this call, so that all replicas perform the same step afterwards.

        Args:
            gradients: gradients of this rank, with any shapes and dtypes. All replicas must pass
                the same shapes and dtypes. Integer tensors are treated as counts, which are summed,
                not averaged. Entries that are None are ignored. If an entry is None on one replica,
                it must be None on all replicas.
        Returns:
            False if a replica was lost during this step. In that case, the gradients must not be
                used, no parameter may be changed, and counts are set to zero.
        Raises:
            CommError: If the lighthouse (or a new lighthouse at the same address) does not answer
                for `QUORUM_S` seconds, or if `MAX_LOST` consecutive steps are lost.
            ValueError: If the replicas have different models.
        """
        tensors = [gradient for gradient in gradients if gradient is not None]
        self.healed = False
        self._meet()
        reduced = self._reduce(tensors)
        if not self._commit():
            for counts in (x for x in tensors if not x.dtype.is_floating_point):
                counts.zero_()  # the step is discarded
            return False
        _give_back(reduced)
        return True

    def average_parts(self, parts: Iterable[Sequence[Tensor]]) -> bool:
        """Replace tensors by their mean over the active replicas, one group of tensors at a time.

        All ranks of the replica must call this method. A returning replica receives the mean over
        the other replicas instead of their state. The return value and the errors are those of
        `average`. If the return value is False, the tensors must be discarded.

        parts: iterable of groups of tensors. All replicas must pass the same shapes and dtypes.
        Each group is averaged in place before `parts` is asked for the next group.
        """
        self.healed, made = False, False
        before = self._manager.current_step()
        self._meet()
        comes = not self._manager.is_participating()
        try:
            for part in parts:
                _give_back(self._reduce(part))
            made = self._commit()
        finally:
            if comes and not made:
                # torchft counts a replica as active once it has the state of the other replicas.
                # Without the mean, it would contribute different weights to the next average.
                self._count_steps(before)
        return made

    @property
    def joining(self) -> bool:
        """True on all replicas if any replica joins or returns during the current average."""
        if self._manager.errored() is not None:  # the average has failed
            return False
        return self._group.size() > self._manager.num_participants()

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of the first active replica. All replicas must call this method.

        Only `parts` may call it, while `average_parts` requests the next group.
        """
        if self._manager.participating_rank() != 0:
            for x in tensors:
                x.zero_()
        _give_back(self._reduce(tensors, dist.ReduceOp.SUM))

    def _reduce(self, tensors: Sequence[Tensor], floats: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG
                ) -> list[tuple[list[Tensor], Tensor]]:
        """Reduce tensors over replicas. Return the tensors and one reduced vector for each dtype.

        Integers are summed. `floats` is the reduction operation for floating-point tensors.
        """
        reduced = []
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            alike = [x for x in tensors if x.dtype == dtype]
            flat_N = torch.cat([x.reshape(-1) for x in alike])
            how = floats if dtype.is_floating_point else dist.ReduceOp.SUM
            self._manager.allreduce(flat_N, reduce_op=how).wait()
            reduced.append((alike, flat_N))
        return reduced

    def _commit(self) -> bool:
        if not self._manager.should_commit():
            self.lost, self._lost_in_a_row = self.lost + 1, self._lost_in_a_row + 1
            if self._lost_in_a_row >= MAX_LOST:
                raise CommError(
                    f"{self._name}: {MAX_LOST} steps in a row were lost; use the same model "
                    "and settings in all replicas, and see torchft's messages above")
            return False
        self._lost_in_a_row = 0
        # A replica may complete a step that fails for other replicas, which then repeat the step in
        # a new quorum without it. Its step count must be smaller than theirs, or it would count as
        # up to date despite its different weights.
        self._count_steps(max(self._manager.current_step(), self._quorums.least_count))
        self.members = self._manager.num_participants()
        return True

    def _meet(self) -> None:
        self._manager.start_quorum()
        try:
            self._manager.wait_quorum()
        except (RuntimeError, OSError) as error:
            raise CommError(
                f"{self._name}: the active replicas are not known ({short(error)}); check that the "
                "lighthouse is running and reachable, then restart this replica") from error

    def _take(self, state: Any) -> None:
        self.healed = True
        self._load(state)

    def close(self) -> None:
        """Leave the averages. The other replicas continue without this replica."""
        self._manager.shutdown(wait=False)


class ModuleState:
    """Transfers the weights and buffers of models between replicas.

    Args:
        models: models, without wrappers that change the names of parameters.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models

    def __call__(self) -> list[dict[str, Any]]:
        return [nn.Module.state_dict(model) for model in self.models]

    def load(self, given: Sequence[dict[str, Any]]) -> None:
        """Load another replica's state. Raise a `ValueError` if its models are different."""
        try:
            for model, state in zip(self.models, given, strict=True):
                # torch's own method, because hosts override it to rename or ignore entries
                nn.Module.load_state_dict(model, state)
        except (RuntimeError, ValueError) as error:
            raise ValueError("replicas have different models; use the same arguments for all of "
                             f"them: {error}") from error

    def step_sums(self) -> list[Tensor]:
        """Return the sums that all routers accumulate during a step. If these sums are averaged,
        the routers of all replicas remain identical.
        """
        return [sums for model in self.models for module in model.modules()
                if isinstance(module, RouterModule) for sums in module.step_sums()]


@dataclass(frozen=True)
class ReplicaPlace:
    """Information from a host framework about a run that is one of several replicas of a model.

    Attributes:
        lighthouse: see `ElasticReplica`.
        replica: see `ElasticReplica`.
        timeout_s: see `ElasticReplica`.
        models: models of this rank, without wrappers that change the names of parameters.
        optimizers: function that returns the optimizers of this rank. Each optimizer must have
            `state_dict` and `load_state_dict`.
        progress: function that returns the number of completed steps and other progress values.
        take: function that sets the progress of this replica to that of another replica.
    """

    lighthouse: str
    replica: int
    timeout_s: float
    models: Sequence[nn.Module]
    optimizers: Callable[[], Sequence[Any]]
    progress: Callable[[], tuple[int, ...]]
    take: Callable[..., None]

    @property
    def done(self) -> int:
        """The number of completed steps."""
        return self.progress()[0]


class ReplicaSteps(RunFeature):
    """A run feature that averages gradients over the active replicas.

    Attributes:
        replica: connection to the other replicas. `replica` is None before the first step.
        lost: whether the last step was lost.
    """

    def __init__(self, place: ReplicaPlace) -> None:
        logging.getLogger("torchft").setLevel(logging.WARNING)  # torchft logs every step
        self._place, self._modules = place, ModuleState(place.models)
        self.replica: ElasticReplica | None = None
        self.lost = False

    @property
    def replaced(self) -> bool:  # type: ignore[override]
        return self.replica is not None and self.replica.healed

    def begin(self) -> None:
        """Join the other replicas. This replica is initialized with the state of the checkpoint."""
        place = self._place
        self.replica = ElasticReplica(place.lighthouse, place.replica, self._state, self._take,
                                      place.timeout_s, place.done)

    def after_backward(self, gradients: StepGradients) -> None:
        """Average the gradients. Collective. Raise `LostStep` if a replica was lost."""
        assert self.replica is not None
        tensors = [x for x in gradients.tensors() if x is not None]
        if gradients.bad:  # NaN makes all replicas skip this step
            tensors[0].fill_(float("nan"))
        routed = self._modules.step_sums()
        self.lost = not self.replica.average([*tensors, *routed])
        if self.lost:
            for sums in routed:
                sums.zero_()
            raise LostStep("a replica was lost: this step is repeated")

    def numbers(self) -> dict[str, float]:
        return {} if self.replica is None else {"replicas": self.replica.members}

    def close(self) -> None:
        if self.replica is not None:
            self.replica.close()

    def _state(self) -> dict[str, Any]:
        return {"modules": self._modules(), "progress": self._place.progress(),
                "optimizers": [optimizer.state_dict() for optimizer in self._place.optimizers()]}

    def _take(self, given: dict[str, Any]) -> None:
        self._modules.load(given["modules"])
        for mine, state in zip(self._place.optimizers(), given["optimizers"], strict=True):
            mine.load_state_dict(state)
        self._place.take(*given["progress"])


def _give_back(reduced: Sequence[tuple[list[Tensor], Tensor]]) -> None:
    for alike, flat_N in reduced:
        parts = flat_N.split([x.numel() for x in alike])
        for x, part_N in zip(alike, parts, strict=True):
            x.copy_(part_N.view_as(x))


def is_replica(lighthouse: str | None, replica: int, refuse: Callable[[], None]) -> bool:
    """Return true if this run is one of several replicas.

    refuse: function that raises an error if a setting of the host framework is incompatible with
    replicas.
    Raises:
        ValueError: If torchft is not installed, if the replica number is not valid, if a setting of
            the host is incompatible with replicas, or if a replica number is set without a
            lighthouse.
    """
    if lighthouse:
        refuse()
        check_settings(replica)
    elif replica:
        raise ValueError(f"replica={replica} requires a lighthouse, because this run would train "
                         "alone without it; use 0, or set the lighthouse's address "
                         "(--moe-lighthouse)")
    return bool(lighthouse)


def check_settings(replica: int) -> None:
    """Raise a `ValueError` if torchft is not installed or if the replica number is not valid."""
    if not 0 <= replica < MOST_REPLICAS:
        raise ValueError(f"replica={replica} is out of bounds: must be in 0..{MOST_REPLICAS - 1}; "
                         "number the replicas from 0")
    _torchft()


def _torchft() -> Any:
    # Read when torchft is imported. Otherwise torchft logs seven lines per rank and step.
    os.environ.setdefault("RUST_LOG", "warn")
    hide(TORCHFT, TORCHFT_LINES)
    try:
        import torchft
    except ImportError as error:
        raise ValueError(
            "elastic replicas require torchft; run: pip install 'moe-plugin[elastic]'") from error
    return torchft


def _own_address(lighthouse: str, wait_s: float) -> str:
    """Return the address under which the lighthouse can reach this machine. Wait up to `wait_s`
    seconds for the lighthouse to start.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            where = urlsplit(lighthouse)
            if not where.hostname or not where.port:
                raise ValueError("host or port is missing")
            with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
                return connection.getsockname()[0]
        except (OSError, ValueError) as error:
            if isinstance(error, ConnectionRefusedError) and time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise ValueError(
                f"no lighthouse at {lighthouse!r} ({error}): start `torchft_lighthouse --bind "
                "0.0.0.0:29510 --min_replicas 1` and use the address http://HOST:29510") from error
