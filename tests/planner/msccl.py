"""Carries out MSCCL XML as the runtime does: thread blocks, first-in-first-out connections that
hold one message, dependencies. What the runtime's parser refuses, this refuses.
"""

from __future__ import annotations

from collections import defaultdict
from xml.etree import ElementTree

KINDS = {"s": (False, True), "r": (True, False), "rrc": (True, False), "cpy": (False, False),
         "rcs": (True, True), "rrs": (True, True), "rrcs": (True, True)}
Value = int  # of a chunk: of an all-gather its number + 1, otherwise a digit (of 16) for each rank


class Gpu:
    """Buffers of a GPU and its thread blocks, checked as they are read."""

    def __init__(self, node: ElementTree.Element, coll: str, ranks: int, chunks: int,
                 in_place: bool) -> None:
        self.rank = int(node.get("id"))
        sizes = {name: int(node.get(f"{name}_chunks")) for name in "ios"}
        part = chunks // ranks
        assert sizes["i"] == (part if coll == "allgather" else chunks)
        assert sizes["o"] == (part if coll == "reducescatter" else chunks)
        first = self.rank * part
        # buffer and offset of what each buffer's first chunk is
        self.start = {"i": ("i", 0), "o": ("o", 0), "s": ("s", 0)}
        if in_place:
            self.start |= {"allgather": {"i": ("o", first)}, "reducescatter": {"o": ("i", first)},
                           "allreduce": {"o": ("i", 0)}}[coll]
        self.memory: dict[tuple[str, int], Value] = {}
        for at in range(sizes["i"]):
            self.memory[self.cell("i", at)] = (first + at + 1 if coll == "allgather"
                                               else 16 ** self.rank)
        self.sizes, self.blocks, seen = sizes, [], set()
        for number, block in enumerate(node):
            send, receive, channel = (int(block.get(name)) for name in ("send", "recv", "chan"))
            assert int(block.get("id")) == number < 216 and self.rank not in (send, receive)
            for end in (("s", send, channel), ("r", receive, channel)):
                assert end[1] < 0 or end not in seen, "two thread blocks at one connection"
                seen.add(end)
            steps = [dict(step.attrib) for step in block]
            assert [int(step["s"]) for step in steps] == list(range(len(steps)))
            assert len(steps) <= 256
            for step in steps:
                receives, sends = KINDS[step["type"]]
                assert 0 < int(step["cnt"]) < 72
                assert (receive >= 0 or not receives) and (send >= 0 or not sends)
            self.blocks.append((send, receive, channel, steps))
        for *_, steps in self.blocks:
            for step in steps:
                if int(step["depid"]) >= 0:
                    other = self.blocks[int(step["depid"])][3][int(step["deps"])]
                    assert other["hasdep"] == "1", "nobody would say that it is done"

    def cell(self, buffer: str, at: int) -> tuple[str, int]:
        name, first = self.start[buffer]
        return name, first + at

    def cells(self, step: dict[str, str], end: str) -> list[tuple[str, int]]:
        buffer, at = step[f"{end}buf"], int(step[f"{end}off"])
        assert 0 <= at and at + int(step["cnt"]) <= self.sizes[buffer]
        return [self.cell(buffer, at + i) for i in range(int(step["cnt"]))]


def carry_out(text: str, in_place: bool, backwards: bool = False) -> list[list[Value | None]]:
    """Result of each rank, chunk by chunk. backwards: of several steps that can run, the last one
    does. AssertionError: a file that the runtime refuses, or that hangs.
    """
    root = ElementTree.fromstring(text)
    coll, ranks, chunks = root.get("coll"), int(root.get("ngpus")), int(root.get("nchunksperloop"))
    assert root.get("proto") == "Simple" and root.get("inplace") == root.get("outofplace") == "1"
    gpus = [Gpu(node, coll, ranks, chunks, in_place) for node in root]
    assert [gpu.rank for gpu in gpus] == list(range(ranks)) and chunks % ranks == 0
    done: dict[tuple[int, int], int] = defaultdict(int)
    wires: dict[tuple[int, int, int], list[Value | None]] = {}
    left = [(gpu, number) for gpu in gpus for number in range(len(gpu.blocks))]
    while left:
        order = left[::-1] if backwards else left
        moved = [pair for pair in order if _one_step(*pair, done, wires)]
        left = [(gpu, n) for gpu, n in left if done[gpu.rank, n] < len(gpu.blocks[n][3])]
        assert moved or not left, "all thread blocks wait"
    assert not wires, "a message that nobody receives"
    size = chunks // ranks if coll == "reducescatter" else chunks
    return [[gpu.memory.get(gpu.cell("o", at)) for at in range(size)] for gpu in gpus]


def _one_step(gpu: Gpu, number: int, done: dict, wires: dict) -> bool:
    send, receive, channel, steps = gpu.blocks[number]
    at = done[gpu.rank, number]
    if at == len(steps):
        return False
    step = steps[at]
    receives, sends = KINDS[step["type"]]
    waits = int(step["depid"]) >= 0 and done[gpu.rank, int(step["depid"])] <= int(step["deps"])
    inbox, outbox = (receive, gpu.rank, channel), (gpu.rank, send, channel)
    if waits or (receives and inbox not in wires) or (sends and outbox in wires):
        return False
    values = wires.pop(inbox) if receives else None
    if step["type"] != "r":
        own = [gpu.memory.get(cell) for cell in gpu.cells(step, "src")]
        assert None not in own, "reads what was never written"
        if step["type"] in ("rrc", "rrs", "rrcs"):
            values = [a + b for a, b in zip(own, values, strict=True)]
        elif step["type"] in ("s", "cpy"):
            values = own
    if sends:
        wires[outbox] = values
    if step["type"] in ("r", "rrc", "cpy", "rcs", "rrcs"):
        gpu.memory.update(zip(gpu.cells(step, "dst"), values, strict=True))
    done[gpu.rank, number] += 1
    return True


def check_result(text: str) -> None:
    """Whether the collective comes out right on every rank, in place and out of place, in two
    orders.
    """
    root = ElementTree.fromstring(text)
    ranks, chunks = int(root.get("ngpus")), int(root.get("nchunksperloop"))
    whole = sum(16**rank for rank in range(ranks))
    wanted = {"allgather": list(range(1, chunks + 1)), "allreduce": [whole] * chunks,
              "reducescatter": [whole] * (chunks // ranks)}[root.get("coll")]
    for in_place in (False, True):
        for backwards in (False, True):
            assert carry_out(text, in_place, backwards) == [wanted] * ranks
