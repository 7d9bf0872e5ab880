"""Multicasts of a resharding: what one costs, and in which order several run (AlpaComm).

One multicast, `size` bytes from one device to receivers on A hosts, t = seconds of `size` bytes
between hosts:

- send and receive: t for each receiver.
- local all-gather: disjoint parts to the g receivers of a host, which gather them: A t + t_intra
  (g - 1) / g.
- broadcast: a chain through the hosts in K chunks: t (1 + A / K), almost independent of the
  number of receivers.

Several: each host does one multicast at a time, so that one starts when its sender and all its
receivers are free. To choose are the sender of each and the order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.events import Task, Timeline, simulate
from moe_plugin.planner.resharding import Slice

FEW = 8  # multicasts of which all orders are searched
BUDGET = 50_000  # steps of that search; not seconds, so that every rank finds the same
ROUNDS = 100  # of the randomised greedy order


@dataclass(frozen=True)
class Multicast:
    """A slice on its way.

    Attributes:
        seconds: it occupies a sender and all receivers.
        senders: hosts of which one is to be chosen.
        receivers: hosts.
    """

    name: str
    seconds: float
    senders: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class MulticastStep:
    """A multicast with the host that sends it."""

    multicast: Multicast
    sender: int

    @property
    def hosts(self) -> set[int]:
        """All hosts that it occupies."""
        return {self.sender, *self.multicast.receivers}


Steps = Sequence[MulticastStep]


def send_receive_s(cluster: Cluster, size: float, receivers: Sequence[int], sender: int) -> float:
    """Seconds of one message to each receiver, one after another. size: bytes."""
    node = cluster.ranks_per_node
    return sum((cluster.intra if r // node == sender // node else cluster.inter).seconds(1, size)
               for r in receivers)


def local_all_gather_s(cluster: Cluster, size: float, receivers: Sequence[int]) -> float:
    """Seconds of disjoint parts to each host's receivers, and their all-gather in the last host."""
    by_host = _by_host(cluster, receivers)
    most = max(map(len, by_host.values()))
    sent = sum(cluster.inter.seconds(len(devices), size) for devices in by_host.values())
    return sent + cluster.intra.seconds(most - 1, size * (most - 1) / most)


def broadcast_s(cluster: Cluster, size: float, receivers: Sequence[int], chunks: int) -> float:
    """Seconds of a chain through the receivers' hosts: t (1 + A / K), t of `size` bytes."""
    hosts = len(_by_host(cluster, receivers))
    return cluster.inter.seconds(chunks + hosts, size * (1 + hosts / chunks))


def best_chunks(cluster: Cluster, size: float, hosts: int) -> int:
    """K at which `broadcast_s` is least: sqrt(A t / alpha), at least 1."""
    if not cluster.inter.alpha_s:
        return max(1, int(size))
    best = math.sqrt(hosts * size * cluster.inter.beta_s / cluster.inter.alpha_s)
    return max(1, round(best))


def chain(seconds: float, hosts: int, chunks: int) -> Timeline:
    """The broadcast chain in the simulator: K chunks over A hops, each hop one chunk at a time.

    It takes seconds * (K + A - 1) / K; the cost model's (K + A) / K counts the last host's copying.
    """
    return simulate([
        Task(f"{chunk}/{hop}", f"hop {hop}", seconds / chunks,
             (f"{chunk}/{hop - 1}",) if hop else ())
        for chunk in range(chunks) for hop in range(hosts)])


def _by_host(cluster: Cluster, devices: Sequence[int]) -> dict[int, list[int]]:
    hosts: dict[int, list[int]] = {}
    for device in devices:
        hosts.setdefault(device // cluster.ranks_per_node, []).append(device)
    return hosts


def multicasts(slices: Sequence[Slice], itemsize: int, cluster: Cluster) -> list[Multicast]:
    """Slices as multicasts between hosts, each in its cheapest form; those without a receiver
    are left out.
    """
    made = []
    for index, each in enumerate(slices):
        if not each.receivers:
            continue
        size, hosts = each.elements * itemsize, tuple(_by_host(cluster, each.receivers))
        made.append(Multicast(str(index), min(
            min(send_receive_s(cluster, size, each.receivers, s) for s in each.senders),
            local_all_gather_s(cluster, size, each.receivers),
            broadcast_s(cluster, size, each.receivers, best_chunks(cluster, size, len(hosts)))),
            tuple(_by_host(cluster, each.senders)), hosts))
    return made


def run(steps: Steps) -> Timeline:
    """Simulate multicasts in this order."""
    return simulate([Task(step.multicast.name, f"host {step.sender}", step.multicast.seconds,
                          also=tuple(f"host {h}" for h in step.multicast.receivers
                                     if h != step.sender)) for step in steps])


def lower_bound(tasks: Sequence[Multicast]) -> float:
    """Seconds that no order undercuts: what a host receives, or must send because no other has it;
    and all sending, spread evenly over the hosts that can send.
    """
    load: dict[int, float] = {}
    for task in tasks:
        for host in {*task.receivers, *(task.senders if len(task.senders) == 1 else ())}:
            load[host] = load.get(host, 0.0) + task.seconds
    senders = {host for task in tasks for host in task.senders}
    even = sum(task.seconds for task in tasks) / max(1, len(senders))
    return max([even, *load.values()])


def by_load(tasks: Sequence[Multicast]) -> list[MulticastStep]:
    """The largest first; see `_list_schedule`."""
    return _list_schedule(sorted(tasks, key=lambda t: (-t.seconds, t.name)))


def randomised(tasks: Sequence[Multicast], rounds: int = ROUNDS,
               seed: int = 0) -> list[MulticastStep]:
    """The best of `rounds` random orders, in each of which a maximal set of multicasts that do not
    conflict runs at any time.
    """
    dice = random.Random(seed)
    found = []
    for _ in range(rounds):
        order = list(tasks)
        dice.shuffle(order)
        found.append(_list_schedule(order))
    return min(found, key=lambda steps: run(steps).seconds)


def _list_schedule(tasks: Sequence[Multicast]) -> list[MulticastStep]:
    """At any time the first of the waiting multicasts whose hosts are free starts, from the free
    sender that has sent least.

    With one receiving host each, it ends within twice the largest load of a host: until the last
    multicast starts, its sender or its receiver is busy.
    """
    waiting, steps, now = list(tasks), [], 0.0
    free: dict[int, float] = {}
    sent: dict[int, float] = {}
    while waiting:
        for task in list(waiting):
            ready = [h for h in task.senders if free.get(h, 0.0) <= now]
            if not ready or any(free.get(h, 0.0) > now for h in task.receivers):
                continue
            step = MulticastStep(task, min(ready, key=lambda h: (sent.get(h, 0.0), h)))
            sent[step.sender] = sent.get(step.sender, 0.0) + task.seconds
            free.update(dict.fromkeys(step.hosts, now + task.seconds))
            steps.append(step)
            waiting.remove(task)
        now = min((end for end in free.values() if end > now), default=now)
    return steps


@dataclass
class _Search:
    """Depth first over orders and senders.

    Attributes:
        best: of all that were seen.
        left: steps to go.
    """

    best: list[MulticastStep]
    seconds: float
    left: int

    def go(self, waiting: list[Multicast], steps: list[MulticastStep], free: dict[int, float],
           last: float) -> None:
        """Try every next step that can still beat the best.

        Some best order has starts that never go back: sorting its multicasts by start lets none of
        them start later. last: the latest start so far.
        """
        if not waiting:
            if (seconds := max(free.values(), default=0.0)) < self.seconds:
                self.best, self.seconds = list(steps), seconds
            return
        if self.left <= 0 or _at_least(waiting, free) >= self.seconds:
            return
        self.left -= 1
        for step, start in self._next(waiting, free, last):
            rest = [task for task in waiting if task is not step.multicast]
            after = free | dict.fromkeys(step.hosts, start + step.multicast.seconds)
            self.go(rest, [*steps, step], after, start)

    def _next(self, waiting: list[Multicast], free: dict[int, float],
              last: float) -> Iterator[tuple[MulticastStep, float]]:
        seen = set()
        for task in waiting:
            for sender in task.senders:
                kind = (task.seconds, sender, task.senders, task.receivers)
                start = max(free.get(h, 0.0) for h in (sender, *task.receivers))
                if kind not in seen and start >= last:
                    seen.add(kind)
                    yield MulticastStep(task, sender), start


def _at_least(waiting: Sequence[Multicast], free: dict[int, float]) -> float:
    load = dict(free)
    for task in waiting:
        for host in {*task.receivers, *(task.senders if len(task.senders) == 1 else ())}:
            load[host] = load.get(host, 0.0) + task.seconds
    return max(load.values())


def depth_first(tasks: Sequence[Multicast], budget: int = BUDGET) -> tuple[list[MulticastStep],
                                                                           bool]:
    """The best order that a depth-first search with pruning finds, and whether it is the best there
    is: the search ended within `budget` steps.
    """
    first = by_load(tasks)
    search = _Search(first, run(first).seconds, budget)
    search.go(sorted(tasks, key=lambda t: (-t.seconds, t.name)), [], {}, 0.0)
    return search.best, search.left > 0


def plan_order(tasks: Sequence[Multicast]) -> list[MulticastStep]:
    """Senders and order: of a few multicasts by `depth_first`, else the better of both greedy ones.
    """
    if len(tasks) <= FEW:
        return depth_first(tasks)[0]
    return min(by_load(tasks), randomised(tasks), key=lambda steps: run(steps).seconds)
