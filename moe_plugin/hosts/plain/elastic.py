"""A training job that is one replica of several which come and go, by torchft: gradients are
averaged over the replicas that live, a lost one costs the others one step, and one that comes back
takes the weights of a living one.

A replica holds the whole model: a job of its own, under its own torchrun, whose ranks share the
experts among them as always. A *lighthouse* (`torchft_lighthouse`, one process for all) says which
replicas live. `scripts/train_plain.py` shows a loop with it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.hosts.plain.named_errors import gather_objects

QUORUM_S = 600.0  # that replicas wait for one that validates or saves


class ElasticReplica:
    """This replica's part in the averages. Making it is collective within the replica.

    Args:
        lighthouse: address of the lighthouse, `http://HOST:PORT`.
        replica: number of this replica; one that comes back has the number it had.
        state: this rank's state for the same rank of a replica that comes back: nested values and
            tensors.
        load: takes such a state.
        timeout_s: seconds until a replica that does not answer is given up in a step.

    Attributes: `members`: replicas whose gradients are in the last average. `healed`: whether this
        one took another's state in it; its own gradients were of older weights and are not in it.
        `lost`: steps that were lost so far.
    Raises:
        ValueError: torchft is not installed, or the lighthouse does not answer.
    """

    def __init__(self, lighthouse: str, replica: int, state: Callable[[], Any],
                 load: Callable[[Any], None], timeout_s: float = 60.0) -> None:
        torchft = _torchft()
        host = _own_address(lighthouse, timeout_s)
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        store = None
        if rank == 0:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        place = (host, store.port) if store is not None else None
        host, port = (gather_objects(place, "stores") if ranks > 1 else [place])[0]
        wait = timedelta(seconds=timeout_s)
        self._store = store  # it ends with this object
        self.members, self.lost, self.healed = 0, 0, False
        self._load = load
        self._manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=wait), state_dict=state, load_state_dict=self._take,
            min_replica_size=1, replica_id=f"replica{replica}", timeout=wait,
            quorum_timeout=timedelta(seconds=max(timeout_s, QUORUM_S)), connect_timeout=wait,
            rank=rank, world_size=ranks, store_addr=host, store_port=port,
            lighthouse_addr=lighthouse, hostname=host)

    def average(self, gradients: Sequence[Tensor | None]) -> bool:
        """Make the gradients those of the mean over the living replicas, before the optimizer's
        step. Collective within the replica.

        A replica that has come back takes a living one's state here, and with the others' gradients
        makes the same step as they do.

        Args:
            gradients: of this rank; any shapes and dtypes, the same on every replica. None is left
                out, on all replicas alike.
        Returns:
            False: a replica was lost in this step. Gradients are not usable, and no parameter may
            change.
        """
        self.healed = False
        here = [gradient for gradient in gradients if gradient is not None]
        self._manager.start_quorum()
        flats = []
        for dtype in dict.fromkeys(gradient.dtype for gradient in here):
            alike = [gradient for gradient in here if gradient.dtype == dtype]
            flat_N = torch.cat([gradient.reshape(-1) for gradient in alike])
            self._manager.allreduce(flat_N).wait()
            flats.append((alike, flat_N))
        if not self._manager.should_commit():
            self.lost += 1
            return False
        self.members = self._manager.num_participants()
        for alike, flat_N in flats:
            parts = flat_N.split([gradient.numel() for gradient in alike])
            for gradient, part_N in zip(alike, parts, strict=True):
                gradient.copy_(part_N.view_as(gradient))
        return True

    def _take(self, state: Any) -> None:
        self.healed = True
        self._load(state)

    def close(self) -> None:
        """Leave. The others go on without this replica."""
        self._manager.shutdown(wait=False)


def _torchft() -> Any:
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
