"""Which worker computes which part of a batch, so that few wrong workers spoil few parts.

Source: ByzShield, Konstantinidis and Ramamoorthy 2021.

A batch is split into f files, each computed by r workers (r odd), l files by each of K workers: K l
= f r. Of a file the answer of most workers counts. q wrong workers spoil a file if (r + 1) / 2 of
its r workers are among them; c(q) is the largest number of files that any q workers spoil, c(q) / f
the fraction. The assignments differ in how much the files of two workers overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Assignment:
    """Files by worker.

    Attributes:
        name: of the scheme.
        files: of each worker, ascending.
        classes: runs of this many workers have no file in common, and files can be renamed so
            that any worker of one class takes the place of its first, and then any worker of a
            second class that of its first while all of the first class stay; 1: nothing is
            known.
    """

    name: str
    files: tuple[tuple[int, ...], ...]
    classes: int = 1

    @property
    def workers(self) -> int:
        """K."""
        return len(self.files)

    @property
    def count(self) -> int:
        """f."""
        return max(map(max, self.files)) + 1

    @property
    def copies(self) -> int:
        """r."""
        return sum(map(len, self.files)) // self.count

    @property
    def workers_of(self) -> tuple[tuple[int, ...], ...]:
        """Workers by file, ascending."""
        return tuple(tuple(w for w, mine in enumerate(self.files) if file in mine)
                     for file in range(self.count))

    def spoiled(self, wrong: Sequence[int]) -> int:
        """Files of which most workers are wrong."""
        need = self.copies // 2 + 1
        return sum(sum(w in wrong for w in workers) >= need for workers in self.workers_of)

    def worst(self, most: int) -> list[int]:
        """c(0), c(1), ... c(most), exact."""
        return _Worst(self, most).best


def _is_prime(value: int) -> bool:
    return value > 1 and all(value % d for d in range(2, int(value**0.5) + 1))


def mols(load: int, copies: int) -> Assignment:
    """From mutually orthogonal Latin squares: K = r l workers, f = l^2 files.

    Files are the cells (i, j) of an l x l square; worker (k, s) has those in which the square L_k,
    k = 1..r, has the symbol s: k i + j = s mod l. Workers of different squares share one file.

    Args:
        load: l, a prime.
        copies: r, odd, at most l - 1.
    Raises: ValueError: others.
    """
    _check_odd(copies)
    if not _is_prime(load) or copies > load - 1:
        raise ValueError(f"load={load}, copies={copies} make no Latin squares: load must be a "
                         "prime, copies at most load - 1")
    return Assignment("mols", tuple(
        tuple(i * load + (s - k * i) % load for i in range(load))
        for k in range(1, copies + 1) for s in range(load)), load)


def ramanujan(prime: int, columns: int) -> Assignment:
    """From Ramanujan bigraphs: blocks P^(a b) of powers of the s-cycle P, a < s, b < m.

    m < s (case 1, transposed): K = m s workers, f = s^2 files, l = s, r = m. s divides m (case 2):
    K = s^2, f = m s, l = m, r = s.

    Args:
        prime: s, a prime.
        columns: m, less than s and odd, or a multiple of s (s odd).
    Raises: ValueError: others.
    """
    if not _is_prime(prime) or (columns >= prime and columns % prime) or columns < 1:
        raise ValueError(f"prime={prime}, columns={columns} make no Ramanujan graph: prime must be "
                         "one, columns less than it or a multiple")
    one = columns < prime
    _check_odd(columns if one else prime)
    # row (a, x) of the block matrix has a one in column (b, x + a b)
    edges = [(a * prime + x, b * prime + (x + a * b) % prime)
             for a in range(prime) for x in range(prime) for b in range(columns)]
    pairs = [(column, row) for row, column in edges] if one else edges
    workers = 1 + max(worker for worker, _ in pairs)
    files: list[list[int]] = [[] for _ in range(workers)]
    for worker, file in pairs:
        files[worker].append(file)
    return Assignment(f"ramanujan {1 if one else 2}", tuple(tuple(sorted(f)) for f in files), prime)


def repetition(groups: int, copies: int) -> Assignment:
    """Fractional repetition (DETOX, DRACO): r workers of each group compute the same file."""
    _check_odd(copies)
    if groups < 1:
        raise ValueError(f"groups={groups} must be >= 1")
    return Assignment("repetition", tuple((g,) for g in range(groups) for _ in range(copies)))


def cyclic(workers: int, copies: int) -> Assignment:
    """For few workers: as many files, each computed by `copies` workers in a row."""
    _check_odd(copies)
    if copies > workers:
        raise ValueError(f"copies={copies} must be <= {workers} workers")
    return Assignment("cyclic", tuple(
        tuple(sorted((w - back) % workers for back in range(copies))) for w in range(workers)))


def assign(name: str, workers: int, copies: int) -> Assignment:
    """The assignment of a name for this many workers, each file computed by `copies` of them.

    name: cyclic, mols (load K / r), ramanujan (case 1 with s = K / r > r, case 2 with K = r^2) or
        repetition.
    Raises: ValueError: it does not exist; it says what must hold.
    """
    _check_odd(copies)
    load, left = divmod(workers, copies)
    if name == "cyclic":
        return cyclic(workers, copies)
    if left:
        raise ValueError(f"{name}: {workers} workers are no multiple of copies={copies}: start "
                         "another number of ranks, or use cyclic")
    if name == "repetition":
        return repetition(load, copies)
    if name == "mols":
        return mols(load, copies)
    if load < copies:
        raise ValueError(f"{name}: {workers} workers are fewer than copies^2={copies**2}: start "
                         "more, or use cyclic")
    return ramanujan(load, copies)


def _check_odd(copies: int) -> None:
    if copies < 1 or copies % 2 == 0:
        raise ValueError(f"copies={copies} of a file cannot be outvoted: must be odd")


class _Worst:
    """Exhaustive search for c(q), all q at once. best: c by q.

    Sets of workers grow in ascending order. Their votes are counted in one integer, a digit for
    each file. Two things shorten it: a set is not continued if the workers that it may still take
    cannot bring it above what is known; and since workers of a class are alike, the lowest member
    of a set is tried only as the first of its class. (Not only as worker 0: workers of other
    classes need not be like it.)
    """

    def __init__(self, assignment: Assignment, most: int) -> None:
        self.workers, self.most = assignment.workers, most
        self.need = assignment.copies // 2 + 1
        self.bits = (2 * assignment.copies + 1).bit_length()
        one = sum(1 << (self.bits * file) for file in range(assignment.count))
        # adding this sets a digit's highest bit where votes suffice
        self.offset = one * ((1 << (self.bits - 1)) - self.need)
        self.high = one << (self.bits - 1)
        self.masks = [sum(1 << (self.bits * file) for file in mine) for mine in assignment.files]
        self.load = max(map(len, assignment.files))
        self.within = self._reachable(assignment)
        self.best, self.run = [0] * (most + 1), assignment.classes
        for first in range(0, self.workers, self.run):
            self._grow(self.masks[first], first, 1, True)

    def _grow(self, votes: int, last: int, size: int, one_class: bool) -> None:
        """Try every set that continues one. one_class: all its members are of one class."""
        spoiled = ((votes + self.offset) & self.high).bit_count()
        if spoiled > self.best[size]:
            self.best[size] = spoiled
        if size == self.most or not self._hopeful(votes, spoiled, size, self.within[last]):
            return
        following = (last // self.run + 1) * self.run  # the first of the next class
        for worker in range(last + 1, following if one_class else self.workers):
            self._grow(votes + self.masks[worker], worker, size + 1, one_class)
        for worker in range(following, self.workers, self.run) if one_class else ():
            self._grow(votes + self.masks[worker], worker, size + 1, False)

    def _reachable(self, assignment: Assignment) -> list[list[int]]:
        """By worker and v: the files, as highest bits of their digits, that v later workers have.
        """
        found = []
        for last in range(self.workers):
            later = [sum(w > last for w in workers) for workers in assignment.workers_of]
            found.append([sum(1 << (self.bits * file + self.bits - 1)
                              for file, count in enumerate(later) if count >= v)
                          for v in range(self.need + 1)])
        return found

    def _hopeful(self, votes: int, spoiled: int, size: int, within: Sequence[int]) -> bool:
        """Whether some larger set of this branch may spoil more files than is known.

        n more workers have n l votes, and a file that lacks v votes takes v of them, if so many of
        the later workers have it: the cheapest files first.
        """
        lacking = [0] * (self.need + 1)
        one, below = self.high >> (self.bits - 1), (votes + self.offset) & self.high
        for v in range(1, self.need + 1):
            reach = (votes + self.offset + one * v) & self.high
            lacking[v] = (reach & ~below & within[v]).bit_count()
            below = reach
        for more in range(1, self.most - size + 1):
            left, gain = more * self.load, 0
            for v in range(1, min(more, self.need) + 1):
                taken = min(lacking[v], left // v)
                gain, left = gain + taken, left - taken * v
            if spoiled + gain > self.best[size + more]:
                return True
        return False


