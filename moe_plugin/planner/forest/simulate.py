"""Simulate collectives whose data is divided into chunks. Each wire transfers one chunk at a time.

A simulated program consists of pieces of the collective's result, and of moves that transfer a
piece along a tree. ForestColl schedules can be converted to programs, and the module `baselines`
creates programs for rings and binary trees. Each piece is divided into consecutive chunks, which
ranks and switches forward as soon as they have received the whole chunk. Let D be the number of
wires on the longest path of a piece. A schedule then takes at most `1 + (D - 1) / chunks` times as
long as the bandwidths of the wires require.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from moe_plugin.planner.events import Task, simulate, simulate_ready
from moe_plugin.planner.forest.network import Network
from moe_plugin.planner.forest.schedule import COLLECTIVES, Schedule, Tree
from moe_plugin.utils.messages import short

MAX_TASKS = 4_000_000
Route = tuple[str, ...]  # node names from one rank to another


@dataclass(frozen=True, slots=True)
class ShareMove:
    """The transfer of one piece between two ranks.

    Attributes:
        piece: index of the piece.
        source, target: ranks that send and receive the piece.
        routes: pairs of a path through the network and the fraction of the piece that is sent along
            this path. The fractions sum to 1.
        sums: if True, the target adds the piece to its own data. If `sums` is False, the piece
            replaces the target's own data.
    """

    piece: int
    source: int
    target: int
    routes: tuple[tuple[Route, Fraction], ...]
    sums: bool = False


@dataclass(frozen=True)
class Program:
    """A collective operation, represented as a list of moves.

    Attributes:
        name: name of the program.
        collective: name of the collective, one of `COLLECTIVES`.
        network: the network.
        roots: for each piece, the rank that stores the piece initially or receives the sum.
        shares: for each piece, the fraction of the collective's result that this piece contains.
        moves: moves, ordered such that every rank stores a piece before it sends the piece.
    """

    name: str
    collective: str
    network: Network
    roots: tuple[int, ...]
    shares: tuple[Fraction, ...]
    moves: tuple[ShareMove, ...]

    def loads(self) -> dict[tuple[str, str], Fraction]:
        """For each wire, return the fraction of the collective's result that is sent over this
        wire.
        """
        loads: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
        for move in self.moves:
            for route, share in move.routes:
                for ends in zip(route, route[1:]):
                    loads[ends] += share * self.shares[move.piece]
        return loads

    def inverse_bandwidth(self) -> Fraction:
        """Return the time in seconds for which the busiest wire is in use, per GB of the
        collective's result. The time of the busiest wire is a lower bound on the total time for any
        number of chunks.
        """
        loads = self.loads()
        return max((loads[w.ends] / w.bandwidth for w in self.network.wires), default=Fraction(0))

    @property
    def tasks(self) -> int:
        """Number of transfers over single wires that are simulated if each piece is one chunk."""
        return sum(len(route) - 1 for move in self.moves for route, _ in move.routes)


@dataclass(frozen=True)
class Simulated:
    """The result of simulating a program.

    Attributes:
        seconds: simulated time.
        chunks: number of chunks per piece.
        depth: number of wires on the longest path of a piece.
    """

    seconds: float
    chunks: int
    depth: int


def program_of(schedule: Schedule) -> Program:
    """Convert a schedule to a program. The program has one piece per tree or, for all_reduce, one
    piece per pair of trees.
    """
    first = [t for t in schedule.trees if t.inward] or list(schedule.trees)
    second = [t for t in schedule.trees if not t.inward] if first[0].inward else []
    moves = _moves(first) + _moves(second)
    return Program("forest", schedule.collective, schedule.network, tuple(t.root for t in first),
                   tuple(Fraction(t.weight, schedule.weight) for t in first), tuple(moves))


def _moves(trees: Sequence[Tree]) -> list[ShareMove]:
    return [ShareMove(piece, e.source, e.target,
                      tuple((path, Fraction(count, tree.weight)) for path, count in e.paths),
                      tree.inward)
            for piece, tree in enumerate(trees) for e in tree.edges]


def verify(program: Program) -> None:
    """Check a program by simulating, for each copy of a piece, which ranks have contributed to the
    copy.

    Raises:
        ValueError: If a rank sends data that it does not have, receives or adds data twice, or
        lacks data at the end. ValueError: Also if the pieces do not add up to the whole result, or
        if a route is invalid.
    """
    ranks = len(program.network.ranks)
    if program.collective not in COLLECTIVES:
        raise ValueError(f"collective {short(program.collective)} is unknown. Choose from "
                         f"{', '.join(COLLECTIVES)}")
    _verify_shares(program, ranks)
    everything, gathers = (1 << ranks) - 1, program.collective == "all_gather"
    held = [[everything * (rank == root) if gathers else 1 << rank for rank in range(ranks)]
            for root in program.roots]
    wires = {wire.ends for wire in program.network.wires}
    for move in program.moves:
        _verify_move(program, move, held[move.piece], everything, wires)
    for piece, (root, sums) in enumerate(zip(program.roots, held, strict=True)):
        wanted = [root] if program.collective == "reduce_scatter" else range(ranks)
        for rank in wanted:
            if sums[rank] != everything:
                raise ValueError(f"{program.name}: at the end, rank {rank} lacks a part of piece "
                                 f"{piece} of root {root}. Plan the schedule again")


def _verify_shares(program: Program, ranks: int) -> None:
    by_root: dict[int, Fraction] = defaultdict(Fraction)
    for root, share in zip(program.roots, program.shares, strict=True):
        by_root[root] += share
    even = program.collective == "all_reduce" or all(
        by_root[rank] == Fraction(1, ranks) for rank in range(ranks))
    if sum(by_root.values()) != 1 or not even or min(program.shares) <= 0:
        raise ValueError(f"{program.name}: the pieces do not make up the result exactly once. Plan "
                         "the schedule again")


def _verify_move(program: Program, move: ShareMove, held: list[int], everything: int,
                 wires: set[tuple[str, str]]) -> None:
    ranks = program.network.ranks
    what = (f"{program.name}: the move of piece {move.piece} from rank {move.source} to rank "
            f"{move.target}")
    for route, _ in move.routes:
        ends = (route[0], route[-1]) == (ranks[move.source], ranks[move.target])
        if not ends or any(hop not in wires for hop in zip(route, route[1:])):
            raise ValueError(f"{what} uses the route {short(route)}, which does not lead to the "
                             "target. Plan the schedule again")
    if sum(share for _, share in move.routes) != 1:
        raise ValueError(f"{what} does not transfer the whole piece exactly once. Plan the "
                         "schedule again")
    sent, present = held[move.source], held[move.target]
    if move.sums:
        if sent & present:
            raise ValueError(f"{what} adds a contribution twice. Plan the schedule again")
        held[move.target] = sent | present
    else:
        if sent != everything or present == everything:
            wrong = "sends missing data" if sent != everything else "delivers the piece twice"
            raise ValueError(f"{what} {wrong}. Plan the schedule again")
        held[move.target] = everything


def run(program: Program, size: float, chunks: int = 64) -> Simulated:
    """Simulate a program for a result of `size` bytes. Each piece is divided into `chunks` chunks.

    Raises:
        ValueError: If `verify` raises an error, if the number of chunks is less than 1, or if the
            simulation would have too many steps.
    """
    if chunks < 1 or size < 0:
        raise ValueError(f"chunks={short(chunks)} must be >= 1, and size={size} must be >= 0")
    if program.tasks * chunks > MAX_TASKS:
        raise ValueError(f"{chunks} chunks result in {program.tasks * chunks} steps, more than the "
                         f"limit of {MAX_TASKS}. Use at most "
                         f"{max(1, MAX_TASKS // program.tasks)} chunks")
    verify(program)
    depth = starts(program)[1]
    # earlier chunks go first and, among hops of a chunk, those with the longest remaining path
    hops = sorted(_hops(program, size, chunks), key=lambda hop: -hop.rest)
    seconds = simulate_ready(
        [hop.task(chunk) for chunk in range(chunks) for hop in hops]).seconds
    promised = float(program.inverse_bandwidth()) * size / 1e9 * (1 + (depth - 1) / chunks)
    if seconds > promised:
        seconds = min(seconds, simulate(_by_wave(program, size, chunks)).seconds)
    return Simulated(seconds, chunks, depth)


def starts(program: Program) -> tuple[list[int], int]:
    """For each move, return how many wires the first chunk has passed before the move starts, and
    return the depth of the program.
    """
    arrived: dict[tuple[int, int], int] = defaultdict(int)
    waves = []
    for move in program.moves:
        wave = arrived[move.piece, move.source]
        waves.append(wave)
        end = wave + max(len(route) - 1 for route, _ in move.routes)
        arrived[move.piece, move.target] = max(arrived[move.piece, move.target], end)
    return waves, max(arrived.values(), default=0)


@dataclass(frozen=True)
class _Hop:
    """The transfers of a move's chunks over one wire of a route.

    Attributes:
        name: unique name of the hop.
        wave: index of the wave in which the first chunk is transferred.
        rest: number of wires on the longest path that starts with this wire, for a chunk or for
            data that depends on the chunk.
        wire: name of the wire. The simulation uses it as the name of a resource.
        seconds: time to transfer one chunk, in seconds.
        after: names of the hops that must transfer a chunk before this hop can transfer the same
            chunk. The names do not contain the index of the chunk.
    """

    name: str
    wave: int
    rest: int
    wire: str
    seconds: float
    after: tuple[str, ...]

    def task(self, chunk: int) -> Task:
        """Return the task that simulates the transfer of the given chunk."""
        return Task(f"{self.name}.{chunk}", self.wire, self.seconds,
                    tuple(f"{name}.{chunk}" for name in self.after))


def _hops(program: Program, size: float, chunks: int) -> list[_Hop]:
    wires = {wire.ends: wire for wire in program.network.wires}
    rests, waves = _rests(program), starts(program)[0]
    into: dict[tuple[int, int], list[str]] = defaultdict(list)
    hops: list[_Hop] = []
    for index, move in enumerate(program.moves):
        # a source forwards or adds everything that has reached it before
        after = tuple(into[move.piece, move.source])
        for way, (route, share) in enumerate(move.routes):
            part, before = size * float(share * program.shares[move.piece]) / chunks, after
            for hop, ends in enumerate(zip(route, route[1:])):
                wire, name = wires[ends], f"{index}.{way}.{hop}"
                hops.append(_Hop(name, waves[index] + hop, rests[index] - hop,
                                 f"{ends[0]} > {ends[1]}",
                                 wire.alpha_s + part / (1e9 * float(wire.bandwidth)), before))
                before = (name,)
            into[move.piece, move.target] += before
    return hops


def _rests(program: Program) -> list[int]:
    """For each move, return the number of wires on the longest path that starts with this move."""
    longest: dict[tuple[int, int], int] = defaultdict(int)
    rests = []
    for move in reversed(program.moves):
        rests.append(longest[move.piece, move.target] + max(len(r) - 1 for r, _ in move.routes))
        start = move.piece, move.source
        longest[start] = max(longest[start], rests[-1])
    return rests[::-1]


def _by_wave(program: Program, size: float, chunks: int) -> Iterator[Task]:
    """Yield the tasks of all waves, in the order of the waves. The tasks of a wave wait only for
    tasks of earlier waves.

    If each wire can transfer its chunks of any wave in one unit of time, wave n ends after at most
    n units of time.
    """
    waves = defaultdict(list)
    for hop in _hops(program, size, chunks):
        waves[hop.wave].append(hop)
    for now in range(max(waves, default=0) + chunks):
        for chunk in range(max(0, now - max(waves)), min(chunks - 1, now) + 1):
            for hop in waves[now - chunk]:
                yield hop.task(chunk)
