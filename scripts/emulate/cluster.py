"""The class `EmulatedCluster`. The nodes of the cluster are network namespaces, which are connected
by a switch whose ports have a limited bandwidth and a delay.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from moe_plugin.planner.forest.network import Network, shortest_paths
from scripts.emulate.namespaces import Node, build_switch, make_node, why_not
from scripts.emulate.ranks import (
    RankEnd,
    RankProcess,
    collect,
    fork,
    initialise,
    serve_store,
    stop,
)

MAX_NODES, MAX_PER_NODE = 64, 256
FASTEST_BIT_S = 1e12  # rate of a node's own link if the wires of a network set the speed
ERRORS_SHOWN = 3


@dataclass(frozen=True)
class PortStats:
    """Counters of the frames sent and received by one node.

    Attributes:
        frames_in: number of frames sent by the node.
        bytes_in: number of bytes on the wire that were sent by the node.
        frames_out: number of frames delivered to the node.
        bytes_out: number of bytes on the wire that were delivered to the node.
        drops: number of frames that were dropped.
        messages: number of frames that were the last frame of a message.
    """

    frames_in: int
    bytes_in: int
    frames_out: int
    bytes_out: int
    drops: int
    messages: int


class EmulatedCluster:
    """A context manager that emulates a cluster of `nodes` x `ranks_per_node` ranks on this
    machine.

    Each node has its own network namespace, host name and link. Ranks on the same node communicate
    over the loopback interface of the node. Nothing remains of the cluster however this process
    ends, because namespaces have no names, the switch exits when its control socket is closed, and
    ranks exit with their parent process.

    Args:
        rate_bit_s: bandwidth of each node's link in each direction, in bits per second.
        delay_s: latency of a link in one direction, in seconds.
        message_s: additional time per message that a node's network card needs, in seconds.
        mtu: maximum transmission unit of the links, in bytes.
        network: network over which frames between nodes are routed, see `set_network`. Optional.
            Defaults to one switch.

    Raises:
        ValueError: if a value is out of bounds, or if this machine cannot run an emulated cluster.
            The error message states the reason.
    """

    def __init__(self, nodes: int, ranks_per_node: int, rate_bit_s: float = 200e6,
                 delay_s: float = 1e-3, message_s: float = 0.0, mtu: int = 1500,
                 network: Network | None = None) -> None:
        if not 1 <= nodes <= MAX_NODES or not 1 <= ranks_per_node <= MAX_PER_NODE:
            raise ValueError(
                f"emulated cluster {nodes}x{ranks_per_node} is out of bounds. Use 1 to {MAX_NODES} "
                f"nodes and 1 to {MAX_PER_NODE} ranks per node, because each rank is a process on "
                "this machine")
        if rate_bit_s <= 0 or delay_s < 0 or message_s < 0:
            raise ValueError(
                f"emulated cluster: rate {rate_bit_s} must be > 0, and delay {delay_s} and message "
                f"cost {message_s} must be >= 0. For example, use rate 200mbit and delay 1ms")
        self.nodes_wanted, self.ranks_per_node = nodes, ranks_per_node
        self.rate_bit_s, self.delay_s = rate_bit_s, delay_s
        self.message_s, self.mtu, self.network = message_s, mtu, network
        self.nodes: list[Node] = []
        self.running: list[RankProcess] = []
        self.commands: list[subprocess.Popen] = []
        self._switch: subprocess.Popen | None = None
        self._control: socket.socket | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.nodes_wanted * self.ranks_per_node

    def __enter__(self) -> EmulatedCluster:  # noqa: PYI034 - Self needs Python 3.11
        reason = why_not()
        if reason:
            raise ValueError(reason)
        try:
            self._start_switch(build_switch())
            if self.network is not None:
                self.set_network(self.network)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        stop(self.running)
        for command in self.commands:
            if command.poll() is None:
                command.kill()
            command.wait()
        if self._control is not None:
            self._control.close()
        if self._switch is not None:
            self._switch.wait(10)
            if self._switch.stdout:
                self._switch.stdout.close()
        for node in self.nodes:
            node.close()
        self.nodes, self.running, self.commands = [], [], []
        self._control = self._switch = None

    def _start_switch(self, program: os.PathLike) -> None:
        self.nodes = [make_node(i) for i in range(self.nodes_wanted)]
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(10)
        inherited = [theirs.fileno(), *(node.net for node in self.nodes)]
        numbers = [
            theirs.fileno(), self.rate_bit_s, self.delay_s * 1e6, self.message_s * 1e6, self.mtu,
            *inherited[1:]
        ]
        self._switch = subprocess.Popen([str(program), *map(str, numbers)], stdout=subprocess.PIPE,
                                        text=True, pass_fds=inherited)
        theirs.close()
        answer = self._switch.stdout.readline()
        if not answer.startswith("ready"):
            raise ValueError(
                f"The emulated cluster's switch did not start: {answer.strip() or 'no output'}. "
                "Run the command as root, or run `moe-plugin doctor` for details")

    def start(self, fn: Callable[..., Any], *args: Any, group_timeout_s: float = 60.0,
              join: bool = True) -> list[RankProcess]:
        """Start `fn(*args)` on every rank. Each rank's environment contains the variables that a
        launcher sets.

        Args:
            fn: function that every rank calls.
            args: arguments of the function.
            group_timeout_s: timeout of collectives in the gloo group, in seconds.
            join: whether to initialize the gloo group of all ranks first.

        Returns: The processes, ordered by rank.
        """
        ours = [self._control.fileno()] if self._control else []
        store, port = serve_store(self.nodes[0], ours)
        self.running.append(store)
        ranks = []
        for rank in range(self.size):
            node = self.nodes[rank // self.ranks_per_node]
            work = partial(_rank, self._environment(rank, port), group_timeout_s if join else None,
                           fn, args)
            ranks.append(fork(work, node, rank, ours))
        self.running += ranks
        return ranks

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0,
            group_timeout_s: float = 60.0) -> list[Any]:
        """Run `fn(*args)` on every rank, and return the results ordered by rank.

        Raises:
            RuntimeError: if a rank failed. The error message contains the tracebacks.
        """
        ends = self.collect(self.start(fn, *args, group_timeout_s=group_timeout_s), timeout_s)
        failed = [end.error for end in ends if end.error is not None]
        if failed:
            rest = len(failed) - ERRORS_SHOWN
            more = f"\nand {rest} more ranks failed" if rest > 0 else ""
            raise RuntimeError("\n".join(failed[:ERRORS_SHOWN]) + more)
        return [end.value for end in ends]

    def collect(self, ranks: Sequence[RankProcess], timeout_s: float) -> list[RankEnd]:
        """Wait for all ranks to end, return how each of them ended, and stop the stores.

        Ranks that are still running after `timeout_s` seconds are killed.
        """
        ends = collect(ranks, timeout_s)
        stop([process for process in self.running if process.rank < 0])
        self.running = []
        return ends

    def command(self, node: int, argv: Sequence[str], **popen: Any) -> subprocess.Popen:
        """Run a program on a node, such as torchrun.

        The program and its child processes are stopped when this cluster is closed.
        """
        where = self.nodes[node]
        environment = {**os.environ, **popen.pop("env", {}), "GLOO_SOCKET_IFNAME": "eth0"}
        enter = ["nsenter", f"--net=/proc/self/fd/{where.net}", f"--uts=/proc/self/fd/{where.uts}"]
        seal = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        # setpriv ends when this process ends, and then unshare --kill-child ends the program
        started = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *enter, *seal, *argv],
                                   env=environment, pass_fds=[where.net, where.uts], **popen)
        self.commands.append(started)
        return started

    def set_rate(self, node: int, rate_bit_s: float) -> None:
        """Change the link bandwidth of one node."""
        self._tell(f"rate {node} {rate_bit_s}")

    def set_network(self, network: Network) -> None:
        """Route frames between nodes over the links of a network. Each link has its own bandwidth.

        Rank i of the network corresponds to node i of the cluster. Each frame takes the path with
        the fewest links. If several paths are equally short, the frame takes the path whose links
        come first in the network. The nodes' own links are set to the highest possible bandwidth.

        Raises:
            ValueError: if the network and the cluster have different numbers of ranks and nodes, or
                if the network has more links than the switch supports.
        """
        if len(network.ranks) != self.nodes_wanted:
            raise ValueError(
                f"network {network.name!r} has {len(network.ranks)} ranks, but the emulated "
                f"cluster has {self.nodes_wanted} nodes. Use a network with one rank per node")
        index = {wire.ends: i for i, wire in enumerate(network.wires)}
        for wire, i in zip(network.wires, index.values(), strict=True):
            self._tell(f"wire {i} {float(wire.bandwidth) * 8e9}")
        for source, node in enumerate(network.ranks):
            for path in shortest_paths(network, node).values():
                if path[-1] in network.ranks and len(path) > 1:
                    hops = " ".join(str(index[hop]) for hop in pairwise(path))
                    self._tell(f"route {source} {network.ranks.index(path[-1])} {hops}")
        for node in range(self.nodes_wanted):
            self.set_rate(node, FASTEST_BIT_S)

    def set_loss(self, node: int, probability: float) -> None:
        """Drop frames of one node at random, with the given probability in each direction."""
        self._tell(f"loss {node} {probability}")

    def set_hole(self, node: int, on: bool = True) -> None:
        """Silently drop all frames from and to one node, like a black hole in a network."""
        self._tell(f"hole {node} {int(on)}")

    def set_link(self, node: int, up: bool) -> None:
        """Bring the network interface of one node up or down."""
        self._tell(f"link {node} {int(up)}")

    def stats(self) -> list[PortStats]:
        """For every node, return the counters of its port since the start of the cluster."""
        return [PortStats(*map(int, line.split())) for line in self._tell("stats").splitlines()[1:]]

    @property
    def switch_pid(self) -> int:
        """The process ID of the switch."""
        return self._switch.pid

    def _tell(self, message: str) -> str:
        self._control.send(message.encode())
        answer = self._control.recv(1 << 15).decode()
        if answer.startswith("error"):
            raise ValueError(f"The emulated cluster's switch refused {message!r}: {answer}")
        return answer

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        local = rank % self.ranks_per_node
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_RANK": str(rank // self.ranks_per_node),
            "GROUP_WORLD_SIZE": str(self.nodes_wanted),
            "MASTER_ADDR": self.nodes[0].address,
            "MASTER_PORT": str(port),
            # the store exists already, so rank 0 must not create another one for env://
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1"
        }


def _rank(environment: dict[str, str], join_timeout_s: float | None, fn: Callable[..., Any],
          args: tuple) -> Any:
    import torch
    import torch.distributed as dist

    os.environ.update(environment)
    torch.set_num_threads(1)
    if join_timeout_s is None:
        return fn(*args)
    initialise(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]),
               int(environment["RANK"]), int(environment["WORLD_SIZE"]), join_timeout_s)
    value = fn(*args)
    if dist.is_initialized():  # `fn` may have destroyed the group
        dist.barrier()
        dist.destroy_process_group()
    return value
