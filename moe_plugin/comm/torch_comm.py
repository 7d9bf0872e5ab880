"""`TorchComm`, a `Comm` that uses torch.distributed (gloo or NCCL)."""

# mypy: disable-error-code=no-any-return
# (collectives under torch.compile have no types)

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.comm.base import Comm, CommError, LocalComm, Messages, piece_lengths
from moe_plugin.comm.by_nodes import gather_by_nodes, reduce_scatter_by_nodes
from moe_plugin.comm.chunks import receive_first, ring_reduce_scatter, sizes_of
from moe_plugin.comm.graph_ops import collective
from moe_plugin.comm.group import key_of
from moe_plugin.comm.new_group import make_group
from moe_plugin.comm.state import PostedMessages, group_state
from moe_plugin.comm.topology import Topology, node_key
from moe_plugin.comm.watchdog import TimeoutWatch

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX} if dist.is_available() else {}
_TRACED_AS = {"sum": "all_reduce", "max": "all_max"}  # in `comm.graph_ops`
_KEY_BYTES = 16
# newer versions of torch deprecate the old name
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class TorchComm(Comm):
    """A group of ranks that uses a torch.distributed process group.

    Args:
        group: optional. The process group. Defaults to the default process group.
        timeout_s: maximum duration in seconds of a collective or a point-to-point exchange, even if
            the process group's own timeout is longer. Groups created by `subgroup` have the same
            timeout. On NCCL, if the process group's timeout is longer, a thread enforces
            `timeout_s`; see `comm.watchdog`. If a collective fails after its call has returned, a
            later collective raises the error, and the error message lists the earlier collectives.
            If NCCL's own watchdog terminates the process, NCCL's log names the collective.
    Raises:
        ValueError: If torch.distributed is not initialized.
    """

    separate = True

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = 1800.0) -> None:
        group = group if group is not None else dist.group.WORLD
        if group is None:
            raise ValueError("torch.distributed is not initialized; call "
                             "torch.distributed.init_process_group first")
        self.group: dist.ProcessGroup = group
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.ranks = dist.get_process_group_ranks(self.group)
        name = f"ranks {self.ranks}" if size <= 16 else f"{size} ranks from {self.ranks[0]}"
        super().__init__(rank, size, name, group_state(self.group))
        self.timeout = timedelta(seconds=timeout_s)
        # backends by device, e.g. cpu:gloo,cuda:nccl
        self.backend = str(dist.get_backend_config(self.group))
        self.receive_first = self.threaded = "gloo" in self.backend and "nccl" not in self.backend
        self.fails_later = not self.receive_first
        self.key = key_of(self)
        if "nccl" in self.backend:
            self._watch_longer_timeout()

    def _watch_longer_timeout(self) -> None:
        group_timeout = self.group._get_backend(torch.device("cuda")).options._timeout
        state = self.state
        if state.timeout_watch is not None:
            state.timeout_watch.timeout_s = min(state.timeout_watch.timeout_s,
                                                self.timeout.total_seconds())
        elif group_timeout > self.timeout:
            state.timeout_watch = TimeoutWatch(
                self.group, self.timeout.total_seconds(),
                f"rank {self.rank} of {self.size} in group {self.name!r}",
                lambda: f"; {state.watchdog.report()}" if state.watchdog is not None else "")

    def _passes(self, *tensors: object) -> None:
        if self.state.timeout_watch is not None:
            devices = (x.device for x in tensors if isinstance(x, Tensor))
            self.state.timeout_watch.add(self.state.started[-1], next(devices, self.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchComm:
        return self  # a copied model uses the same ranks; groups cannot be copied

    def __copy__(self) -> TorchComm:
        view = object.__new__(type(self))  # views, see `with_tag`
        view.__dict__.update(self.__dict__)
        return view

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a layer over the process group {self.name!r} cannot be pickled, because a process "
            "group exists only in its own process; save state_dict() and build the layer again, or "
            "use copy.deepcopy in this process")

    @property
    def device(self) -> torch.device:
        """The current CUDA device for NCCL, and the CPU otherwise."""
        return torch.device("cuda", torch.cuda.current_device(
        )) if "nccl" in self.backend and "gloo" not in self.backend else torch.device("cpu")

    @property
    def hosts(self) -> Comm:
        """See `Comm.hosts`. If the group supports only NCCL, a separate gloo group is used."""
        if self.device.type == "cpu":
            return self
        if self.state.hosts is None:
            made = group_state(dist.group.WORLD).groups_made
            with self.error_context(lambda: f"making a group of the hosts of {self.name}"):
                group = make_group(self.group, self.ranks, made, self.timeout, "gloo")
            self.state.hosts = TorchComm(group, self.timeout.total_seconds())
        return self.state.hosts

    @property
    def by_nodes(self) -> bool:
        """See `RankGroup.by_nodes`. True on gloo if there are several nodes that all have the same
        number of ranks, and at least two ranks per node.
        """
        topology = self.state.topology
        return self.receive_first and topology is not None and topology.two_steps

    def prepare(self, topology: Topology | None = None) -> Topology:
        """See `RankGroup.prepare`. On NCCL, this method runs a collective of all ranks, which
        creates the communicator. The communicator must exist before a hierarchical exchange runs,
        because not all ranks take part in that exchange's messages.
        """
        topology = super().prepare(topology)
        if self.fails_later and not self.state.connected:
            self.all_reduce(torch.zeros(1, device=self.device))
            self.state.connected = True
        return topology

    def detect_topology(self) -> Topology:
        """Detect which ranks share a node, by node index and host name. Collective."""
        key_bytes = torch.frombuffer(bytearray(node_key(_KEY_BYTES)), dtype=torch.uint8)
        key_bytes = key_bytes.to(self.device)
        keys = self.all_gather(key_bytes).cpu().view(self.size, _KEY_BYTES)
        return Topology.from_keys([bytes(key.tolist()) for key in keys])

    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None,
                   recv: Sequence[int] | None = None) -> Tensor:
        """See `Comm.all_to_all`. Tensors with unsupported dtypes are sent as bytes.

        On a tagged view, point-to-point messages are used instead.
        """
        if torch.compiler.is_compiling() and send is None and recv is None:
            return collective(x, self.key, self.size, "all_to_all", "none")
        # a tagged view runs in another thread, whose collectives would mix with the main thread's
        if self.tag:
            return receive_first(self, x, send, recv)
        send = piece_lengths(x.shape[0], self.size, send, "all_to_all send")
        recv = piece_lengths(x.shape[0], self.size, recv, "all_to_all receive")
        out = x.new_empty((sum(recv), *x.shape[1:]))
        others = [n for peer, n in enumerate(send) if peer != self.rank and n]
        self._count_rows(len(others), x, sum(others))
        source, target, factor = _as_supported(x.contiguous()), _as_supported(out), _widening(x)
        with self.error_context(
                lambda: f"all_to_all of {x.dtype} {tuple(x.shape)}, send {send}, receive {recv}"):
            self._bounded(dist.all_to_all_single, target, source, [n * factor for n in recv],
                          [n * factor for n in send])
        return out

    def start_all_to_all(self, x: Tensor) -> Callable[[], Tensor]:
        """See `Comm.start_all_to_all`. On gloo, the exchange runs while this rank computes."""
        if not self.receive_first or self.tag or torch.compiler.is_compiling():
            return super().start_all_to_all(x)
        x, out, rows = x.contiguous(), torch.empty_like(x), x.shape[0] // self.size
        self._count_rows((self.size - 1) * bool(rows), x, rows * (self.size - 1))
        return self._started(f"all_to_all of {x.dtype} {tuple(x.shape)} in equal pieces", out,
                       dist.all_to_all_single, _as_supported(out), _as_supported(x))

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """See `Comm.all_reduce`. `Collectives` counts the bytes of this collective."""
        if torch.compiler.is_compiling():
            return collective(x, self.key, self.size, _TRACED_AS[op], "none")
        out = x.clone()
        with self.error_context(lambda: f"all_reduce({op}) of {x.dtype} {tuple(x.shape)}"):
            self._bounded(dist.all_reduce, out, _OPS[op])
        return out

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """See `Comm.start_all_reduce`. The sum is computed in place while this rank computes."""
        return self._started(f"all_reduce(sum) of {x.dtype} {tuple(x.shape)}", x, dist.all_reduce,
                       x)

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Comm.all_gather`. On gloo with several nodes, the gather runs in two steps."""
        if torch.compiler.is_compiling():
            return collective(x, self.key, self.size, "all_gather", "none")
        if self.by_nodes:
            return gather_by_nodes(self, x)
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._count_rows(self.size - 1, x, x.shape[0] * (self.size - 1))
        with self.error_context(lambda: f"all_gather of {x.dtype} {tuple(x.shape)}"):
            self._bounded(getattr(dist, _GATHER), _as_supported(out), _as_supported(x.contiguous()))
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See `Comm.reduce_scatter`. On gloo, the sum is computed with a ring. On gloo with several
        nodes, the sum is computed in two steps.
        """
        if torch.compiler.is_compiling():
            return collective(x, self.key, self.size, "reduce_scatter", "none")
        if self.receive_first:
            two = self.by_nodes
            return reduce_scatter_by_nodes(self, x) if two else ring_reduce_scatter(self, x)
        length = piece_lengths(x.shape[0], self.size, None, "reduce_scatter")[0]
        out = x.new_empty((length, *x.shape[1:]))
        self._count_rows(self.size - 1, x, x.shape[0] - length)
        with self.error_context(lambda: f"reduce_scatter of {x.dtype} {tuple(x.shape)}"):
            self._bounded(dist.reduce_scatter_tensor, out, x.contiguous())
        return out

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """See `Comm.broadcast`; `root` is a rank of this group. Bytes are not counted."""
        out = x.clone()
        with self.error_context(lambda: f"broadcast from {root} of {x.dtype} {tuple(x.shape)}"):
            self._bounded(dist.broadcast, out, self.ranks[root])
        return out

    def send_receive(self, sends: Messages, recvs: Messages) -> None:
        """See `Comm.send_receive`. Raises a `CommError` if a peer fails or the timeout expires."""
        if not sends and not recvs:
            return
        if self.receive_first:
            self.post(sends, recvs)()
            return
        self.counters.sent(len(sends), sum(x.nbytes for _, x in sends))
        with self._watched(sends, recvs):
            self._batched(sends, recvs)

    def post(self, sends: Messages, recvs: Messages) -> Callable[[], None]:
        """See `Comm.post`. On gloo, messages run in the background, and `timeout_s` limits each
        wait.
        """
        if not self.receive_first:
            return super().post(sends, recvs)
        self.state.release_abandoned()
        self.counters.sent(len(sends), sum(x.nbytes for _, x in sends))
        group, tag = self.group, self.tag
        with self.error_context(lambda: sizes_of(sends, recvs)):
            # The methods that dist.isend calls. Calling them directly takes a third of the time per
            # small message.
            works = [group.recv([buffer], peer, tag) for peer, buffer in recvs]
            works += [group.send([x], peer, tag) for peer, x in sends]

        return PostedMessages(self.state, self.timeout.total_seconds(), self._wait_for_messages,
                              works, sends, recvs)

    @contextmanager
    def _watched(self, sends: Messages, recvs: Messages) -> Iterator[None]:
        """Notify the watchdog, if there is one, that this rank is waiting for these messages."""
        watchdog = self.state.watchdog
        if watchdog is not None:
            watchdog.begin(f"send_receive with {len(sends)} sends, {len(recvs)} receives")
        try:
            yield
        finally:
            if watchdog is not None:
                watchdog.end()

    def _wait_for_messages(self, works: Sequence[Any], sends: Messages, recvs: Messages) -> None:
        """On gloo, wait for each message separately, so that the error message can name the peer.
        """
        deadline = time.monotonic() + self.timeout.total_seconds()
        with self._watched(sends, recvs):
            for index, work in enumerate(works):
                try:
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
                except RuntimeError as error:
                    raise self._message_failed(index, sends, recvs, error) from error

    def _message_failed(self, index: int, sends: Messages, recvs: Messages,
                        error: RuntimeError) -> CommError:
        """Create the error for message number `index` of `recvs` followed by `sends`."""
        peer, x = [*recvs, *sends][index]
        what = "receive of {} bytes from" if index < len(recvs) else "send of {} bytes to"
        waiting = sorted({p for p, _ in recvs[index:]})
        return self.error(
            f"{what.format(x.nbytes)} rank {peer} failed (not received yet: from ranks {waiting}) "
            f"in {sizes_of(sends, recvs)}: {error}{self.missing_ranks()}")

    def _batched(self, sends: Messages, recvs: Messages) -> None:
        """On NCCL, run all messages in one grouped call on the current stream."""
        ops = [dist.P2POp(dist.irecv, _as_supported(buffer), self.ranks[peer], self.group)
               for peer, buffer in recvs]
        ops += [dist.P2POp(dist.isend, _as_supported(x), self.ranks[peer], self.group)
                for peer, x in sends]
        with self.error_context(lambda: sizes_of(sends, recvs)):
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            self._passes(*(x for _, x in (*sends, *recvs)))

    def subgroup(self, ranks: Sequence[int]) -> TorchComm | None:
        """See `Comm.subgroup`. Only the ranks of the new group need to call this method."""
        if self.rank not in ranks:
            return None
        made = group_state(dist.group.WORLD).groups_made
        with self.error_context(lambda: f"making a group of the ranks {list(ranks)}"):
            group = make_group(self.group, [self.ranks[r] for r in ranks], made, self.timeout)
        child = TorchComm(group, self.timeout.total_seconds())
        if self.state.topology is not None:
            child.prepare(self.topology.restrict([self.ranks.index(r) for r in child.ranks]))
        return child

    def store(self) -> dist.Store | None:  # type: ignore[name-defined]  # torch's stubs lack it
        """Return the job's store on a separate connection, so that other threads cannot block it.
        """
        job_store: Any = dist.distributed_c10d._get_default_store()
        return job_store.clone()

    def barrier(self) -> None:
        with self.error_context(lambda: "barrier"):
            self._bounded(dist.barrier)

    def _bounded(self, collective: Callable[..., Any], *args: Any) -> None:
        """Run a torch collective, for at most `timeout_s` seconds on gloo. On NCCL, the host does
        not wait, so only the process group's own timeout and the watchdog apply.
        """
        if not self.receive_first:
            collective(*args, group=self.group)
            self._passes(*args)
            return
        self._wait_for(collective(*args, group=self.group, async_op=True), *args)

    def _started(self, what: str, result: Tensor, collective: Callable[..., Any],
                 *args: Tensor) -> Callable[[], Tensor]:
        with self.error_context(lambda: what):
            work = collective(*args, group=self.group, async_op=True)

        def wait() -> Tensor:
            with self.error_context(lambda: what):
                self._wait_for(work, *args)
            return result

        return wait

    def _wait_for(self, work: Any, *args: Any) -> None:
        """Wait for a torch collective, for at most `timeout_s` seconds on gloo."""
        if not self.receive_first:
            work.wait()
            self._passes(*args)
            return
        begun = time.monotonic()
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            if time.monotonic() - begun < self.timeout.total_seconds():
                raise
            raise RuntimeError(f"a rank did not join within {self.timeout.total_seconds():g} s "
                               f"(comm.timeout_s): {error}") from error

    def _count_rows(self, messages: int, x: Tensor, rows: int) -> None:
        self.counters.sent(messages, rows * math.prod(x.shape[1:]) * x.element_size())


_WIDE = {torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.bool}


def _as_supported(x: Tensor) -> Tensor:
    """Return a view of `x` with a dtype that every backend can send."""
    return x.flatten().view(torch.uint8) if x.dtype in _WIDE else x


def _widening(x: Tensor) -> int:
    """Return how many rows `_as_supported(x)` has per row of `x`."""
    return math.prod(x.shape[1:]) * x.element_size() if x.dtype in _WIDE else 1


def default_comm(timeout_s: float = 1800.0) -> Comm:
    """Return the `Comm` of the default torch.distributed group. If there is no default group,
    return a group with one rank.

    Raises:
        ValueError: If a launcher started several processes but the default group is not
            initialized. Without this error, each process would silently train a separate model.
    """
    if dist.is_available() and dist.is_initialized():
        return TorchComm(None, timeout_s) if dist.get_world_size() > 1 else LocalComm()
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes.isdigit() and int(processes) > 1:
        raise ValueError(
            f"WORLD_SIZE={processes} requires a process group, without which each process "
            "would train a separate model. Call torch.distributed.init_process_group() before "
            "building the layer, or pass comm=LocalComm() for a layer in one process")
    return LocalComm()
