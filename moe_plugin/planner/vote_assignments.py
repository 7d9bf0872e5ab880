"""Assign parts of a batch to workers such that faulty workers cause limited damage.

Source: ByzShield (Konstantinidis and Ramamoorthy, 2021).

A batch is divided into f parts, which are called files. Each file is processed by r workers, where
r is odd. Each of the K workers processes l files, so K l = f r. For each file, the result returned
by the majority of its workers is used. A file is distorted if at least (r + 1) / 2 of its workers
are faulty. c(q) is the largest number of files that any q faulty workers can distort, and c(q) / f
is the distorted fraction. The assignments in this module differ in how many files two workers have
in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Assignment:
    """An assignment of files to workers.

    Attributes:
        name: name of the assignment.
        files: for each worker, its files in ascending order.
        classes: number of consecutive workers that form a class. Workers of the same class have no
            file in common. The workers of a class are interchangeable: some renaming of the files
            maps any worker to the first worker of its class. In addition, while the workers of one
            class stay fixed, any worker of another class can be mapped to the first worker of its
            class. If `classes` is 1, no symmetry is known.
    """

    name: str
    files: tuple[tuple[int, ...], ...]
    classes: int = 1

    @property
    def workers(self) -> int:
        """Number of workers, called K."""
        return len(self.files)

    @property
    def count(self) -> int:
        """Number of files, called f."""
        return max(map(max, self.files)) + 1

    @property
    def copies(self) -> int:
        """Number of workers that process each file, called r."""
        return sum(map(len, self.files)) // self.count

    @property
    def workers_of(self) -> tuple[tuple[int, ...], ...]:
        """For each file, the workers that process it, in ascending order."""
        return tuple(tuple(w for w, files in enumerate(self.files) if file in files)
                     for file in range(self.count))

    def spoiled(self, wrong: Sequence[int]) -> int:
        """Return the number of files that are distorted if the given workers are faulty."""
        need = self.copies // 2 + 1
        return sum(sum(w in wrong for w in workers) >= need for workers in self.workers_of)

    def worst(self, most: int) -> list[int]:
        """Return the exact values c(0), c(1), ..., c(most)."""
        return _Worst(self, most).best


def _is_prime(value: int) -> bool:
    return value > 1 and all(value % d for d in range(2, int(value**0.5) + 1))


def mols(load: int, copies: int) -> Assignment:
    """Assign f = l^2 files to K = r l workers using mutually orthogonal Latin squares.

    Each file corresponds to a cell (i, j) of an l x l square. There are r Latin squares L_k with k
    from 1 to r. Worker (k, s) processes the cells in which L_k contains the symbol s, that is, the
    cells with k i + j = s mod l. Two workers of different squares have exactly one file in common.

    Args:
        load: number l of files per worker. Must be prime.
        copies: number r of workers per file. The number of workers per file must be odd and at most
            l - 1.

    Raises:
        ValueError: If the value of `load` or `copies` is not allowed.
    """
    _check_odd(copies)
    if not _is_prime(load) or copies > load - 1:
        raise ValueError(f"load={load}, copies={copies} do not define Latin squares. load must be "
                         "a prime number, and copies must be at most load - 1")
    return Assignment("mols", tuple(
        tuple(i * load + (s - k * i) % load for i in range(load))
        for k in range(1, copies + 1) for s in range(load)), load)


def ramanujan(prime: int, columns: int) -> Assignment:
    """Assign files to workers using Ramanujan bigraphs.

    The blocks of the bigraph are the powers P^(a b) of a cycle P of length s, with a < s and b < m.
    In case 1 (the transposed bigraph), m < s, and there are K = m s workers and f = s^2 files, with
    l = s and r = m. In case 2, m is a multiple of s, and there are K = s^2 workers and f = m s
    files, with l = m and r = s.

    Args:
        prime: length s of the cycle, which must be a prime number.
        columns: the number m. The number m must be either an odd number less than s, or a multiple
            of s if s is odd.

    Raises:
        ValueError: If the value of `prime` or `columns` is not allowed.
    """
    if not _is_prime(prime) or (columns >= prime and columns % prime) or columns < 1:
        raise ValueError(f"prime={prime}, columns={columns} do not define a Ramanujan graph. "
                         "prime must be a prime number, and columns must be less than prime or a "
                         "multiple of prime")
    one = columns < prime
    _check_odd(columns if one else prime)
    # row (a, x) of the block matrix has its entry 1 in column (b, x + a b)
    edges = [(a * prime + x, b * prime + (x + a * b) % prime)
             for a in range(prime) for x in range(prime) for b in range(columns)]
    pairs = [(column, row) for row, column in edges] if one else edges
    workers = 1 + max(worker for worker, _ in pairs)
    files: list[list[int]] = [[] for _ in range(workers)]
    for worker, file in pairs:
        files[worker].append(file)
    return Assignment(f"ramanujan {1 if one else 2}", tuple(tuple(sorted(f)) for f in files), prime)


def repetition(groups: int, copies: int) -> Assignment:
    """Assign files by fractional repetition (DETOX, DRACO): all workers of a group process the same
    file.
    """
    _check_odd(copies)
    if groups < 1:
        raise ValueError(f"groups={groups} must be >= 1")
    return Assignment("repetition", tuple((g,) for g in range(groups) for _ in range(copies)))


def cyclic(workers: int, copies: int) -> Assignment:
    """Assign files cyclically: each of the K files is processed by `copies` consecutive workers."""
    _check_odd(copies)
    if copies > workers:
        raise ValueError(f"copies={copies} is larger than the number of workers, {workers}")
    return Assignment("cyclic", tuple(
        tuple(sorted((w - back) % workers for back in range(copies))) for w in range(workers)))


def assign(name: str, workers: int, copies: int) -> Assignment:
    """Return the assignment with the given name. Each file is processed by `copies` workers.

    Args:
        name: name of the assignment: cyclic, mols (with load K / r), ramanujan (case 1 if s = K / r
            > r, case 2 if K = r^2) or repetition.
        workers: number K of workers.
        copies: number r of workers per file. Must be odd.

    Raises:
        ValueError: If there is no assignment with these numbers. The message contains the condition
            that is not met.
    """
    _check_odd(copies)
    load, left = divmod(workers, copies)
    if name == "cyclic":
        return cyclic(workers, copies)
    if left:
        raise ValueError(f"{name}: {workers} workers are not a multiple of copies={copies}. Start "
                         "a different number of ranks, or use cyclic")
    if name == "repetition":
        return repetition(load, copies)
    if name == "mols":
        return mols(load, copies)
    if load < copies:
        raise ValueError(f"{name}: {workers} workers are fewer than copies^2={copies**2}. Start "
                         "more ranks, or use cyclic")
    return ramanujan(load, copies)


def _check_odd(copies: int) -> None:
    if copies < 1 or copies % 2 == 0:
        raise ValueError(f"copies={copies} must be an odd number >= 1, so that votes on a file "
                         "have a majority")


class _Worst:
    """An exhaustive search that computes c(q) for all q up to a maximum. The attribute `best`
    contains c(q) for each q.

    The search extends sets of workers in ascending order. The votes of a set are stored in a single
    integer that has one digit per file. Two rules shorten the search. First, a set is not extended
    if the remaining workers cannot distort more files than the best known set. Second, only the
    first worker of each class is tried as the lowest worker of a set, because the workers of a
    class are interchangeable. Trying only worker 0 would be wrong, because classes are not always
    interchangeable.
    """

    def __init__(self, assignment: Assignment, most: int) -> None:
        self.workers, self.most = assignment.workers, most
        self.need = assignment.copies // 2 + 1
        self.bits = (2 * assignment.copies + 1).bit_length()
        ones = sum(1 << (self.bits * file) for file in range(assignment.count))
        # adding this offset sets the highest bit of each digit that has enough votes
        self.offset = ones * ((1 << (self.bits - 1)) - self.need)
        self.high = ones << (self.bits - 1)
        self.masks = [sum(1 << (self.bits * file) for file in files) for files in assignment.files]
        self.load = max(map(len, assignment.files))
        self.within = self._reachable(assignment)
        self.best, self.run = [0] * (most + 1), assignment.classes
        for first in range(0, self.workers, self.run):
            self._grow(self.masks[first], first, 1, True)

    def _grow(self, votes: int, last: int, size: int, one_class: bool) -> None:
        """Try every set that extends the given set. one_class: whether all workers of the set
        belong to the same class.
        """
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
        """For each last worker and each number v, return the files that are processed by at least v
        later workers.

        Each file is encoded as the highest bit of its digit.
        """
        reachable = []
        for last in range(self.workers):
            later = [sum(w > last for w in workers) for workers in assignment.workers_of]
            reachable.append([sum(1 << (self.bits * file + self.bits - 1)
                                  for file, count in enumerate(later) if count >= v)
                              for v in range(self.need + 1)])
        return reachable

    def _hopeful(self, votes: int, spoiled: int, size: int, within: Sequence[int]) -> bool:
        """Return whether some extension of the set may distort more files than the best known set.

        Adding n workers to the set adds n l votes. A file that needs v more votes to be distorted
        uses v of these votes, provided that at least v later workers process it. Files that need
        the fewest additional votes are counted first.
        """
        lacking = [0] * (self.need + 1)
        ones, below = self.high >> (self.bits - 1), (votes + self.offset) & self.high
        for v in range(1, self.need + 1):
            reach = (votes + self.offset + ones * v) & self.high
            lacking[v] = (reach & ~below & within[v]).bit_count()
            below = reach
        for more in range(1, self.most - size + 1):
            left, gain = more * self.load, 0
            for v in range(1, min(more, self.need) + 1):
                added = min(lacking[v], left // v)
                gain, left = gain + added, left - added * v
            if spoiled + gain > self.best[size + more]:
                return True
        return False


