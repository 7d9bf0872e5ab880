"""Place replicas of experts on ranks, depending on the loads of the experts (DeepSeek's EPLB).

Each rank provides slots, which are called physical experts. Each slot stores one of the router's
experts, which are called logical experts. An expert with a high load is stored in several slots.
Placement consists of two greedy steps, both of which process the highest loads first. In the first
step, each additional replica is given to the expert with the highest load per replica. The first
step minimizes the maximum load of a slot. In the second step, each replica is placed on the least
loaded rank that still has a free slot. If the number of expert groups is a multiple of the number
of nodes, placement is hierarchical. Hierarchical placement first assigns groups to nodes, so that
all experts of a group, and all their replicas, are on the same node.

The loads of any two ranks differ by at most the load of the fullest slot, so the load of the
busiest rank is at most the mean load of a rank plus the load of the fullest slot.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

Loads = Sequence[float]


@dataclass(frozen=True)
class ReplicaMap:
    """Describes which logical expert each physical expert is a replica of.

    Attributes:
        logical: for each slot (physical expert), the index of the logical expert that the slot
            stores. The slots of a rank have consecutive indices.
        ranks: number of ranks.
    """

    logical: tuple[int, ...]
    ranks: int

    @property
    def slots(self) -> int:
        """Number of slots per rank."""
        return len(self.logical) // self.ranks

    @property
    def physical(self) -> Mapping[int, tuple[int, ...]]:
        """For each logical expert, the indices of its slots in ascending order."""
        slots: dict[int, list[int]] = {}
        for slot, expert in enumerate(self.logical):
            slots.setdefault(expert, []).append(slot)
        return {expert: tuple(slots[expert]) for expert in sorted(slots)}

    def rank_loads(self, loads: Loads) -> list[float]:
        """Return the load of each rank, assuming that the load of an expert is divided equally
        among its replicas.
        """
        copies = {expert: len(slots) for expert, slots in self.physical.items()}
        slot_loads = [loads[expert] / copies[expert] for expert in self.logical]
        return [sum(slot_loads[i:i + self.slots]) for i in range(0, len(slot_loads), self.slots)]

    def holders(self, expert: int) -> tuple[int, ...]:
        """Return the ranks that store a logical expert, in ascending order."""
        return tuple(sorted({slot // self.slots for slot in self.physical[expert]}))

    def incoming(self, before: ReplicaMap) -> list[tuple[int, ...]]:
        """For each rank, return the experts whose weights it must receive when the placement
        changes from `before` to this placement.
        """
        def experts(placed: ReplicaMap, rank: int) -> set[int]:
            return set(placed.logical[rank * placed.slots:(rank + 1) * placed.slots])

        return [tuple(sorted(experts(self, rank) - experts(before, rank)))
                for rank in range(self.ranks)]


def replicate(loads: Loads, slots: int, most: int | None = None) -> list[int]:
    """Return the number of replicas of each expert. Every expert has at least one replica, and the
    numbers sum to `slots`.


    The greedy method is optimal: no other numbers of replicas give a smaller maximum load per slot.

    Args:
        slots: total number of replicas of all experts.
        most: maximum number of replicas per expert. If `most` is given, some slots may remain
            unused. By default, it is not limited.
    """
    counts = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads) if most is None or most > 1]
    heapq.heapify(heap)
    for _ in range(slots - len(loads)):
        if not heap:
            break
        expert = heap[0][1]
        counts[expert] += 1
        if counts[expert] == most:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (-loads[expert] / counts[expert], expert))
    return counts


def pack(loads: Loads, packs: int) -> list[list[int]]:
    """Divide items into packs. All packs have the same number of items, and the maximum load of a
    pack is kept small.

    Returns: For each pack, its items in ascending order.

    Raises:
        ValueError: If the number of items is not a multiple of `packs`.
    """
    if packs < 1 or len(loads) % packs:
        raise ValueError(f"{len(loads)} items cannot be divided evenly among {packs} packs. The "
                         "number of items must be a multiple of the number of packs")
    size = len(loads) // packs
    packed: list[list[int]] = [[] for _ in range(packs)]
    heap = [(0.0, index) for index in range(packs)] if size else []
    for item in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        load, index = heapq.heappop(heap)
        packed[index].append(item)
        if len(packed[index]) < size:
            heapq.heappush(heap, (load + loads[item], index))
    return [sorted(items) for items in packed]


def place_replicas(loads: Loads, slots: int, ranks: int, *, nodes: int = 1,
                   groups: int = 1) -> ReplicaMap:
    """Place `slots` physical experts on `ranks` ranks.

    Args:
        loads: load >= 0 of each logical expert, in any unit.
        slots: number of physical experts. The number of slots must be a multiple of `ranks`, and at
            least the number of logical experts.
        ranks: number of ranks.
        nodes: number of nodes, which all have the same number of ranks. Defaults to 1.
        groups: number of groups of consecutive experts. All experts of a group are placed on the
            same node. If `groups` is not a multiple of `nodes`, both are ignored. Defaults to 1.

    Raises:
        ValueError: If a number is out of bounds or not divisible as required. The message contains
            the bound.
    """
    experts = len(loads)
    if min(loads, default=0) < 0:
        raise ValueError(f"loads must be >= 0, but the smallest load is {min(loads)}")
    for name, value, bound, ok in (
            ("slots", slots, f"a multiple of {ranks} ranks and >= {experts} experts",
             ranks > 0 and slots % ranks == 0 and slots >= experts > 0),
            ("nodes", nodes, f"a divisor of {ranks} ranks", nodes > 0 and ranks % nodes == 0),
            ("groups", groups, f"a divisor of {experts} experts",
             groups > 0 and experts % groups == 0)):
        if not ok:
            raise ValueError(f"{name}={value} is not possible; it must be {bound}")
    if groups % nodes:
        nodes = groups = 1
    run = experts // groups
    of_groups = [sum(loads[g * run:(g + 1) * run]) for g in range(groups)]
    logical: list[int] = []
    for node in pack(of_groups, nodes):
        here = [expert for g in node for expert in range(g * run, (g + 1) * run)]
        logical += _place(here, [loads[e] for e in here], slots // nodes, ranks // nodes)
    return ReplicaMap(tuple(logical), ranks)


def host_replicas(loads: Loads, ranks: int, guests: int,
                  speeds: Sequence[float] | None = None) -> ReplicaMap:
    """Return a placement in which each expert remains on its own rank and ranks additionally store
    replicas of other experts.

    Rank i stores the L experts with the indices `i L` to `(i + 1) L - 1`. As in `place_replicas`,
    each additional replica is given to the expert with the highest load per replica. Replicas are
    then placed in order of decreasing load, each on the least loaded rank that has a free slot and
    does not yet store the expert. Unused slots are filled with the rank's first expert.

    Args:
        loads: load >= 0 of each logical expert, in any unit.
        ranks: number of ranks.
        guests: number of slots per rank for replicas of other experts.
        speeds: speed of each rank. The load of a rank is divided by its speed. By default, all
            ranks are equally fast.
    """
    local = len(loads) // ranks
    counts = replicate(loads, len(loads) + ranks * guests, ranks)
    replica_loads = [load / count for load, count in zip(loads, counts, strict=True)]
    pace = [1.0] * ranks if speeds is None else speeds
    load = [sum(replica_loads[w * local:(w + 1) * local]) / pace[w] for w in range(ranks)]
    hosted: list[list[int]] = [[] for _ in range(ranks)]
    more = [e for e, count in enumerate(counts) for _ in range(count - 1) if replica_loads[e] > 0]
    for expert in sorted(more, key=lambda e: (-replica_loads[e], e)):
        free = [w for w in range(ranks) if len(hosted[w]) < guests and expert not in hosted[w]
                and w != expert // local]
        if free:
            rank = min(free, key=lambda w: (load[w] + replica_loads[expert] / pace[w], w))
            hosted[rank].append(expert)
            load[rank] += replica_loads[expert] / pace[rank]
    return hosting(hosted, local, guests)


def hosting(hosted: Sequence[Collection[int]], local: int, guests: int) -> ReplicaMap:
    """Return the placement in which each rank stores its own `local` experts and the replicas
    listed in `hosted`.
    """
    slots: list[int] = []
    for rank, guest in enumerate(hosted):
        stored = range(rank * local, (rank + 1) * local)
        slots += [*stored, *sorted(guest), *[stored[0]] * (guests - len(guest))]
    return ReplicaMap(tuple(slots), len(hosted))


def host_placed(loads: Loads, ranks: int, guests: int) -> ReplicaMap:
    """Return a placement that is similar to the result of `place_replicas`, but in which each
    expert remains on its own rank as in `host_replicas`.

    Each pack of experts from `place_replicas` is assigned, if possible, to the rank that stores the
    largest share of the pack's load. This rank then also hosts those experts of the pack that it
    does not store itself. Experts with the highest load per replica are hosted first. As a result,
    all rows of an expert may be computed on a rank other than its own.
    """
    local = len(loads) // ranks
    placed = place_replicas(loads, len(loads) + ranks * guests, ranks)
    each = {e: loads[e] / len(slots) for e, slots in placed.physical.items()}
    packs = [set(placed.logical[i:i + placed.slots])
             for i in range(0, len(placed.logical), placed.slots)]
    stored = [[sum(each[e] for e in pack if e // local == rank) for pack in packs]
              for rank in range(ranks)]
    pack_of: dict[int, int] = {}
    for rank, pack in sorted(product(range(ranks), repeat=2), key=lambda o: -stored[o[0]][o[1]]):
        if rank not in pack_of and pack not in pack_of.values():
            pack_of[rank] = pack
    return hosting([sorted((e for e in packs[pack_of[rank]] if e // local != rank and each[e] > 0),
                           key=lambda e: (-each[e], e))[:guests] for rank in range(ranks)],
                   local, guests)


def _place(experts: Sequence[int], loads: Loads, slots: int, ranks: int) -> list[int]:
    """Return the logical expert of each slot on a node. The slots are sorted by rank."""
    counts = replicate(loads, slots)
    items = [i for i, count in enumerate(counts) for _ in range(count)]
    packed = pack([loads[i] / counts[i] for i in items], ranks)
    return [experts[items[slot]] for rank in packed for slot in rank]
