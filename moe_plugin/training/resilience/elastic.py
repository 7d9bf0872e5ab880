"""A training job that is one replica of several which come and go, by torchft: gradients are
averaged over the replicas that live, a lost one costs the others one step, and one that comes back
takes the weights of a living one.

A replica holds the whole model: a job of its own, under its own torchrun, whose ranks share the
experts among them as always. A *lighthouse* (`torchft_lighthouse`, one process for all) says which
replicas live. `scripts/train_plain.py` shows a loop with it.
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
from moe_plugin.utils.run_feature import LostStep, RunFeature, StepGradients, refuse_unfit

QUORUM_S = 600.0  # that replicas wait for one that validates or saves, or for the lighthouse
MAX_LOST = 100  # steps lost in a row: no replica comes and goes that often
MOST_REPLICAS = 1 << 20
_MOST_STEPS = (LIVING >> 20) - 2


class ElasticReplica:
    """This replica's part in the averages. Making it is collective within the replica.

    Args:
        lighthouse: address of the lighthouse, `http://HOST:PORT`.
        replica: number of this replica; one that comes back has the number it had.
        state: this rank's state for the same rank of a replica that comes back: nested values and
            tensors.
        load: takes such a state.
        timeout_s: seconds until a replica that does not answer is given up in a step.
        progress: steps that this replica has done, by its own checkpoint. Of replicas that start
            together, all take the state of the one that has done most; of equals, of the first.

    Attributes: `members`: replicas whose gradients are in the last average. `healed`: whether this
        one took another's state in it; its own gradients were of older weights and are not in it.
        `lost`: steps that were lost so far.
    Raises:
        ValueError: torchft is not installed, the lighthouse does not answer, or a number is out of
            bounds.
    """

    def __init__(self, lighthouse: str, replica: int, state: Callable[[], Any],
                 load: Callable[[Any], None], timeout_s: float = 60.0, progress: int = 0) -> None:
        check_settings(replica)
        if not 0 <= progress <= _MOST_STEPS:
            raise ValueError(f"progress={progress} is out of bounds: must be in 0..{_MOST_STEPS}; "
                             "give the number of steps done")
        torchft = _torchft()
        host = _own_address(lighthouse, timeout_s)
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        store = None
        if rank == 0:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        place = (host, store.port) if store is not None else None
        host, port = (gather_objects(place, "stores") if ranks > 1 else [place])[0]
        wait, quorum_s = timedelta(seconds=timeout_s), max(timeout_s, QUORUM_S)
        self._store = store  # it ends with this object
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
        # torchft would let ranks of one replica that starts take the states of different replicas;
        # with counts that all differ, all take the state of the one with the largest
        self._count_steps(1 + progress * MOST_REPLICAS + MOST_REPLICAS - 1 - replica)

    def _count_steps(self, step: int) -> None:
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def average(self, gradients: Sequence[Tensor | None]) -> bool:
        """Make the gradients those of the mean over the living replicas, before the optimizer's
        step. Collective within the replica.

        A replica that has come back takes a living one's state here, and with the others' gradients
        makes the same step as they do.

        Args:
            gradients: of this rank; any shapes and dtypes, the same on every replica; integers are
                counts, which are summed. None is left out, on all replicas alike.
        Returns:
            False: a replica was lost in this step. Gradients are not usable, and no parameter may
            change; counts are zero.
        Raises:
            CommError: the lighthouse does not answer for `QUORUM_S` seconds (one that is started
                again at its address is found), or `MAX_LOST` steps in a row were lost.
            ValueError: the replicas' models differ.
        """
        here = [gradient for gradient in gradients if gradient is not None]
        self.healed = False
        self._meet()
        reduced = self._reduce(here)
        if not self._commit():
            for counts in (x for x in here if not x.dtype.is_floating_point):
                counts.zero_()  # of a step that is not made
            return False
        _give_back(reduced)
        return True

    def average_parts(self, parts: Iterable[Sequence[Tensor]]) -> bool:
        """Replace tensors that are never in memory together by their mean over the living replicas.
        Collective within the replica.

        A replica that has come back gets the mean of the others, and needs no state of them.

        Args:
            parts: the tensors in groups, the same on every replica; each group is changed in place
                before the next one is taken.
        Returns, raises: as `average`; where it returns False, what was changed is to be dropped.
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
                # torchft has counted it among the living as soon as it had their state; without the
                # mean it would be one of them in the next average, with weights of its own
                self._count_steps(before)
        return made

    @property
    def joining(self) -> bool:
        """Whether a replica joins or comes back in this average; the same on all replicas. While
        `average_parts` takes its groups, and afterwards.
        """
        if self._manager.errored() is not None:  # nothing will be taken
            return False
        return self._group.size() > self._manager.num_participants()

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of the first living replica, in place; while `average_parts`
        takes its groups. Collective over the replicas, and no part of what it averages.
        """
        if self._manager.participating_rank() != 0:
            for x in tensors:
                x.zero_()
        _give_back(self._reduce(tensors, dist.ReduceOp.SUM))

    def _reduce(self, tensors: Sequence[Tensor], floats: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG
                ) -> list[tuple[list[Tensor], Tensor]]:
        """By dtype the tensors and, as one, their means (`floats` may be sums; integers: sums)."""
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
                    f"{self._name}: {MAX_LOST} steps in a row were lost; give all replicas the "
                    "same model and settings, and see torchft's messages above")
            return False
        self._lost_in_a_row = 0
        # A replica may make a step that fails for the others, and then answer too late: they make
        # it again without it. Its count must be less than theirs, or it would be taken for one of
        # them, with other weights. They have met again, in another quorum.
        self._count_steps(max(self._manager.current_step(), self._quorums.least_count))
        self.members = self._manager.num_participants()
        return True

    def _meet(self) -> None:
        self._manager.start_quorum()
        try:
            self._manager.wait_quorum()
        except (RuntimeError, OSError) as error:
            raise CommError(
                f"{self._name}: the replicas could not be counted ({short(error)}); look whether "
                "the lighthouse runs and can be reached, then start this replica again") from error

    def _take(self, state: Any) -> None:
        self.healed = True
        self._load(state)

    def close(self) -> None:
        """Leave. The others go on without this replica."""
        self._manager.shutdown(wait=False)


class ModuleState:
    """Takes models' weights and buffers from one replica to another.

    Args:
        models: wrapped by nothing that changes their parameters' names.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models

    def __call__(self) -> list[dict[str, Any]]:
        return [nn.Module.state_dict(model) for model in self.models]

    def load(self, given: Sequence[dict[str, Any]]) -> None:
        """Take what another replica gave. `ValueError`: it is of other models."""
        try:
            for model, state in zip(self.models, given, strict=True):
                # as torch has it: hosts' own methods rename, prune or forgive
                nn.Module.load_state_dict(model, state)
        except (RuntimeError, ValueError) as error:
            raise ValueError("replicas have different models; give all of them the same "
                             f"arguments: {error}") from error

    def step_sums(self) -> list[Tensor]:
        """Those of all routers: with them in `average`, the routers of all replicas stay the
        same.
        """
        return [sums for model in self.models for module in model.modules()
                if isinstance(module, RouterModule) for sums in module.step_sums()]


@dataclass(frozen=True)
class ReplicaPlace:
    """A run among those that train the same model, as its host tells of it.

    Attributes:
        lighthouse, replica, timeout_s: see `ElasticReplica`.
        models: of this rank, without wrappers that change names.
        optimizers: of this rank, asked each time; any with `state_dict` and `load_state_dict`.
        progress: steps done first, once a checkpoint is loaded, and what else says how far it is.
        take: another run's progress, in its place.
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
        """Steps."""
        return self.progress()[0]


class ReplicaSteps(RunFeature):
    """Averages a run's gradients over the replicas that live.

    Attributes: `replica`: what is known of the replicas. `lost`: whether the last step was.
    """

    def __init__(self, place: ReplicaPlace) -> None:
        logging.getLogger("torchft").setLevel(logging.WARNING)  # it has lines for each step
        self._place, self._modules = place, ModuleState(place.models)
        self.replica: ElasticReplica | None = None
        self.lost = False

    @property
    def replaced(self) -> bool:  # type: ignore[override]
        return self.replica is not None and self.replica.healed

    def begin(self) -> None:
        """Meet the others with the state of the checkpoint."""
        place = self._place
        self.replica = ElasticReplica(place.lighthouse, place.replica, self._state, self._take,
                                      place.timeout_s, place.done)

    def after_backward(self, gradients: StepGradients) -> None:
        """Average the gradients. Collective. `LostStep`: a replica was lost."""
        assert self.replica is not None
        here = [x for x in gradients.tensors() if x is not None]
        if gradients.bad:  # all replicas must skip this step
            here[0].fill_(float("nan"))
        routed = self._modules.step_sums()
        self.lost = not self.replica.average([*here, *routed])
        if self.lost:
            for sums in routed:
                sums.zero_()
            raise LostStep("a replica was lost: this step is made again")

    def numbers(self) -> dict[str, float]:
        return {} if self.replica is None else {"replicas": self.replica.members}

    def close(self) -> None:
        if self.replica is not None:
            self.replica.close()

    def _state(self) -> dict[str, Any]:
        return {"modules": self._modules(), "progress": self._place.progress(),
                "optimizers": [each.state_dict() for each in self._place.optimizers()]}

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


def is_replica(lighthouse: str | None, replica: int,
               unfit: Callable[[], Iterable[tuple[str, bool, str]]]) -> bool:
    """Whether a run is one replica of several.

    Args:
        lighthouse, replica: as its flags give them.
        unfit: settings of its host, see `refuse_unfit`; asked of a replica alone.
    Raises:
        ValueError: it cannot be one: torchft is not installed, there can be no replica of this
            number, or a setting does not fit; or a run without a lighthouse has a number.
    """
    if lighthouse:
        refuse_unfit("--moe-lighthouse", unfit())
        check_settings(replica)
    elif replica:
        raise ValueError(f"replica={replica} does not fit a run without a lighthouse, which would "
                         "train alone: must be 0; give the lighthouse's address (--moe-lighthouse)")
    return bool(lighthouse)


def check_settings(replica: int) -> None:
    """`ValueError`: torchft is not installed, or there can be no replica of this number."""
    if not 0 <= replica < MOST_REPLICAS:
        raise ValueError(f"replica={replica} is out of bounds: must be in 0..{MOST_REPLICAS - 1}; "
                         "number the replicas from 0 on")
    _torchft()


def _torchft() -> Any:
    # otherwise it logs seven lines per rank and step; it reads this when it is imported
    os.environ.setdefault("RUST_LOG", "warn")
    hide(TORCHFT, TORCHFT_LINES)
    try:
        import torchft
    except ImportError as error:
        raise ValueError(
            "replicas that come and go need torchft: pip install 'moe-plugin[elastic]'") from error
    return torchft


def _own_address(lighthouse: str, wait_s: float) -> str:
    """This machine's address, as the lighthouse's machine sees it; a lighthouse that is starting
    has so many seconds.
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
                "0.0.0.0:29510 --min_replicas 1` and give http://HOST:29510") from error
