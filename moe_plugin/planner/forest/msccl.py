"""Convert a program to an XML file for MSCCL. The MSCCL runtime, which is also part of RCCL,
executes such files on GPUs.

Each thread block of a GPU either sends to or receives from a single peer. The thread blocks execute
their steps in an order that is the same on all GPUs. A step only waits for steps that come earlier
in this order. The earliest step that has not been executed can therefore always run, even if the
buffers between GPUs are small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd, lcm
from xml.etree import ElementTree

from moe_plugin.planner.forest.simulate import Program, ShareMove, starts, verify

# Limits of the runtime: MSCCL_MAX_NUM_STEPS, MSCCL_MAX_NUM_THREAD_BLOCKS,
# MSCCL_MAX_NUM_THREAD_BLOCKS_PER_CHANNEL, MAXCHANNELS, MSCCL_MAX_COUNT (counts must be smaller),
# and MSCCL_MAX_NODES of its parser.
MAX_STEPS, MAX_BLOCKS, MAX_PEERS, MAX_CHANNELS, MAX_COUNT, MAX_NODES = 256, 216, 32, 32, 72, 4096
NAMES = {"all_gather": "allgather", "reduce_scatter": "reducescatter", "all_reduce": "allreduce"}


@dataclass
class _Step:
    kind: str
    source: tuple[str, int]  # (buffer, offset)
    target: tuple[str, int]
    count: int
    after: _Step | None = None  # a step of another thread block
    block: _Block | None = None
    index: int = 0
    awaited: bool = False


@dataclass
class _Block:
    send: int
    receive: int
    channel: int
    number: int
    steps: list[_Step] = field(default_factory=list)


@dataclass
class _Gpu:
    """The thread blocks of one GPU.

    Attributes:
        last: for each piece of the data, the last step that wrote this GPU's copy of the piece.
        place: for each piece of the data, the buffer and offset at which this GPU's copy is stored.
    """

    blocks: dict[tuple[int, int, int], _Block] = field(default_factory=dict)
    last: dict[int, _Step] = field(default_factory=dict)
    place: dict[int, tuple[str, int]] = field(default_factory=dict)
    scratch: int = 0

    def add(self, step: _Step, send: int, receive: int, channel: int) -> _Step:
        """Append a step to the thread block that has the given peers and channel."""
        key = send, receive, channel
        step.block = self.blocks.setdefault(key, _Block(*key, len(self.blocks)))
        step.index = len(step.block.steps)
        if step.after is not None and step.after.block is step.block:
            step.after = None  # steps of a thread block run in order
        if step.after is not None:
            step.after.awaited = True
        step.block.steps.append(step)
        return step


def to_msccl(program: Program) -> str:
    """Convert a program to the text of an XML file. The file supports both in-place and
    out-of-place calls.

    The file contains no routes, because the runtime's transport finds the path between two GPUs.
    The result of the collective is divided into equal chunks, and each piece of the data is a whole
    number of chunks. The runtime uses the file only if the size of the result is a multiple of the
    number of chunks.

    Raises:
        ValueError: If `verify` finds an error in the program, or if the program exceeds a limit of
            the runtime.
    """
    verify(program)
    channels = 1
    while True:
        compiled = _Compiler(program, channels)
        most = max((len(b.steps) for gpu in compiled.gpus for b in gpu.blocks.values()), default=0)
        if most <= MAX_STEPS or 2 * channels * compiled.phases > MAX_CHANNELS:
            break
        channels *= 2
    _check_limits(compiled, most)
    return _text(compiled)


class _Compiler:
    """A compiler that converts a program to the steps of all GPUs."""

    def __init__(self, program: Program, channels: int) -> None:
        self.program, self.channels = program, channels
        self.phases = 2 if program.collective == "all_reduce" else 1
        ranks = len(program.network.ranks)
        # each piece, and each rank's part of the result, needs a whole number of equal chunks
        unit = lcm(ranks, *(share.denominator for share in program.shares))
        parts = [int(share * unit) for share in program.shares]
        common = gcd(unit // ranks, *parts)
        self.counts = [part // common for part in parts]
        self.chunks, self.shard = unit // common, unit // common // ranks
        self.offsets = self._offsets()
        self.gpus = [_Gpu() for _ in range(ranks)]
        for rank, gpu in enumerate(self.gpus):
            for piece, root in enumerate(program.roots):
                if program.collective == "all_gather":
                    if rank == root:
                        gpu.place[piece] = "i", self.offsets[piece] - root * self.shard
                        self._copy_own(gpu, piece)
                else:
                    gpu.place[piece] = "i", self.offsets[piece]
        waves = starts(program)[0]
        for _, index in sorted((wave, index) for index, wave in enumerate(waves)):
            self._add(program.moves[index])

    def _offsets(self) -> list[int]:
        """Return the offset of each piece of the data, in chunks. The pieces that belong to the
        same root are stored consecutively.
        """
        free = {root: root * self.shard for root in self.program.roots}
        if self.program.collective == "all_reduce":
            free = dict.fromkeys(free, 0)
        offsets, together = [], 0
        for root, count in zip(self.program.roots, self.counts, strict=True):
            offsets.append(together if self.phases == 2 else free[root])
            free[root] += count
            together += count
        return offsets

    def _copy_own(self, gpu: _Gpu, piece: int) -> None:
        for source, target, count in self._parts(gpu.place[piece], ("o", self.offsets[piece]),
                                                 piece):
            gpu.add(_Step("cpy", source, target, count), -1, -1, 0)

    def _add(self, move: ShareMove) -> None:
        """Add the steps that send and receive one piece of the data."""
        here, receiver = self.gpus[move.source], self.gpus[move.target]
        channel = move.piece % self.channels
        if self.phases == 2 and not move.sums:
            channel += self.channels
        source = here.place[move.piece]
        kind, after = "r", None
        have = place = "o", self.offsets[move.piece]
        if move.sums:
            kind, after, have = "rrc", receiver.last.get(move.piece), receiver.place[move.piece]
            place = have if have[0] != "i" else self._sum_place(move)
        for start, _, count in self._parts(source, source, move.piece):
            here.add(_Step("s", start, start, count, here.last.get(move.piece)), move.target, -1,
                     channel)
        for start, end, count in self._parts(have, place, move.piece):
            last = receiver.add(_Step(kind, start, end, count, after), -1, move.source, channel)
        receiver.last[move.piece], receiver.place[move.piece] = last, place

    def _sum_place(self, move: ShareMove) -> tuple[str, int]:
        """Return the buffer and offset at which the target stores its sum. The sum is stored in the
        output buffer if the target is the root, and in the scratch buffer otherwise.
        """
        gpu, piece = self.gpus[move.target], move.piece
        if move.target == self.program.roots[piece]:
            first = self.shard * move.target if self.phases == 1 else 0
            return "o", self.offsets[piece] - first
        gpu.scratch += self.counts[piece]
        return "s", gpu.scratch - self.counts[piece]

    def _parts(self, source: tuple[str, int], target: tuple[str, int], piece: int
               ) -> Iterator[tuple[tuple[str, int], tuple[str, int], int]]:
        """Split the transfer of a piece into steps of at most `MAX_COUNT - 1` chunks."""
        for done in range(0, self.counts[piece], MAX_COUNT - 1):
            yield ((source[0], source[1] + done), (target[0], target[1] + done),
                   min(MAX_COUNT - 1, self.counts[piece] - done))


def _check_limits(compiled: _Compiler, most: int) -> None:
    blocks = max(len(gpu.blocks) for gpu in compiled.gpus)
    peers: dict[tuple[int, int, bool], int] = defaultdict(int)
    for rank, gpu in enumerate(compiled.gpus):
        for block in gpu.blocks.values():
            peers[rank, block.channel, block.send >= 0] += block.send >= 0 or block.receive >= 0
    nodes = 1 + len(compiled.gpus) + max(
        sum(1 + len(block.steps) for block in gpu.blocks.values()) for gpu in compiled.gpus)
    for what, number, limit in (("steps in a thread block", most, MAX_STEPS),
                                ("thread blocks on a GPU", blocks, MAX_BLOCKS),
                                ("lines for a GPU", nodes, MAX_NODES),
                                ("peers in a channel", max(peers.values(), default=0), MAX_PEERS)):
        if number > limit:
            raise ValueError(f"MSCCL supports at most {limit} {what}, but this schedule needs "
                             f"{number}. Plan fewer trees (--trees 1) or fewer ranks")


def _text(compiled: _Compiler) -> str:
    program = compiled.program
    inputs = compiled.shard if program.collective == "all_gather" else compiled.chunks
    outputs = compiled.shard if program.collective == "reduce_scatter" else compiled.chunks
    channels = 1 + max((b.channel for gpu in compiled.gpus for b in gpu.blocks.values()), default=0)
    root = ElementTree.Element("algo", _attributes(
        name=f"{program.name}_{NAMES[program.collective]}", proto="Simple", nchannels=channels,
        nchunksperloop=compiled.chunks, ngpus=len(compiled.gpus), coll=NAMES[program.collective],
        inplace=1, outofplace=1, minBytes=0, maxBytes=0))
    for rank, gpu in enumerate(compiled.gpus):
        node = ElementTree.SubElement(root, "gpu", _attributes(
            id=rank, i_chunks=inputs, o_chunks=outputs, s_chunks=gpu.scratch))
        for block in gpu.blocks.values():
            tb = ElementTree.SubElement(node, "tb", _attributes(
                id=block.number, send=block.send, recv=block.receive, chan=block.channel))
            for step in block.steps:
                ElementTree.SubElement(tb, "step", _attributes(
                    s=step.index, type=step.kind, srcbuf=step.source[0], srcoff=step.source[1],
                    dstbuf=step.target[0], dstoff=step.target[1], cnt=step.count,
                    depid=step.after.block.number if step.after and step.after.block else -1,
                    deps=step.after.index if step.after else -1, hasdep=int(step.awaited)))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _attributes(**values: object) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}
