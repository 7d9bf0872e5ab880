"""Assignments of batch parts to workers that limit the damage of faulty workers.

The source is ByzShield (Konstantinidis and Ramamoorthy, 2021).

A batch is split into f parts, which are called files. Each file is computed by r workers, where r
is odd, and each of the K workers computes l files, so K l = f r. For each file, the answer that the
majority of its workers computed is used. A file is distorted if at least (r + 1) / 2 of its workers
are among the q faulty workers. The largest number of files that any q workers can distort is called
c(q), and c(q) / f is the distorted fraction. The assignments in this module differ in the number of
files that two workers have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Assignment:
    """An assignment of files to workers.

    Attributes:
        name: name of the scheme.
        files: files of each worker, in ascending order.
        classes: number of consecutive workers that form a class. Workers of the same class have no
            file in common, and they are interchangeable because a renaming of files can map any
            worker to the first worker of its class. In addition, any worker of a second class can
            be mapped to the first worker of that class while the first class stays fixed. The value
            1 means that no symmetry is known.
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
        """Number of workers that compute each file, called r."""
        return sum(map(len, self.files)) // self.count

    @property
    def workers_of(self) -> tuple[tuple[int, ...], ...]:
        """Workers that compute each file, in ascending order."""
        return tuple(tuple(w for w, files in enumerate(self.files) if file in files)
                     for file in range(self.count))

    def spoiled(self, wrong: Sequence[int]) -> int:
        """Return the number of files for which a majority of the workers is faulty."""
        need = self.copies // 2 + 1
        return sum(sum(w in wrong for w in workers) >= need for workers in self.workers_of)

    def worst(self, most: int) -> list[int]:
        """Return the exact values c(0), c(1) and so on, up to c(most)."""
        return _Worst(self, most).best


def _is_prime(value: int) -> bool:
    return value > 1 and all(value % d for d in range(2, int(value**0.5) + 1))


def mols(load: int, copies: int) -> Assignment:
    """Return the assignment of f = l^2 files to K = r l workers from mutually orthogonal Latin
    squares.

    Each file is a cell (i, j) of an l x l square. For each square L_k with k from 1 to r, worker
    (k, s) computes the cells in which the square contains the symbol s, which means that k i + j =
    s mod l. Two workers of different squares have exactly one file in common.

    Args:
        load: number l of files per worker, which must be prime.
        copies: number r of workers per file, which must be odd and at most l - 1.

    Raises:
        ValueError: If `load` or `copies` is not allowed.
    """
    _check_odd(copies)
    if not _is_prime(load) or copies > load - 1:
        raise ValueError(f"load={load}, copies={copies} do not define Latin squares. load must be "
                         "a prime number, and copies must be at most load - 1")
    return Assignment("mols", tuple(
        tuple(i * load + (s - k * i) % load for i in range(load))
        for k in range(1, copies + 1) for s in range(load)), load)


def ramanujan(prime: int, columns: int) -> Assignment:
    """Return the assignment from Ramanujan bigraphs.

    The blocks of the bigraph are P^(a b) for powers of the s-cycle P, with a < s and b < m. In case
    1 (transposed), m < s, and there are K = m s workers and f = s^2 files with l = s and r = m. In
    case 2, s divides m, and there are K = s^2 workers and f = m s files with l = m and r = s.

    Args:
        prime: size s of the cycle, which must be a prime number.
        columns: m, either an odd number less than s, or a multiple of s if s is odd.

    Raises:
        ValueError: If `prime` or `columns` is not allowed.
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
    """Return fractional repetition (DETOX, DRACO), in which all workers of a group compute one
    file."""
    _check_odd(copies)
    if groups < 1:
        raise ValueError(f"groups={groups} must be >= 1")
    return Assignment("repetition", tuple((g,) for g in range(groups) for _ in range(copies)))


def cyclic(workers: int, copies: int) -> Assignment:
    """Return the cyclic assignment, in which each of K files is computed by `copies` consecutive
    workers."""
    _check_odd(copies)
    if copies > workers:
        raise ValueError(f"copies={copies} is larger than the number of workers, {workers}")
    return Assignment("cyclic", tuple(
        tuple(sorted((w - back) % workers for back in range(copies))) for w in range(workers)))


def assign(name: str, workers: int, copies: int) -> Assignment:
    """Return the assignment with the given name, in which each file is computed by `copies`
    workers.

    Args:
        name: name of the assignment, which is cyclic, mols (with load K / r), ramanujan (case 1 if
            s = K / r > r, case 2 if K = r^2) or repetition.
        workers: Number of workers, called K.
        copies: r, the number of workers per file, which must be odd.

    Raises:
        ValueError: If the assignment does not exist. The message states the condition that is not
            met.
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
    """Exhaustive search for all c(q) up to a maximum q. The result is `best`, which contains c(q)
    for each q.

    Sets of workers are extended in ascending order. The votes of a set are counted in one integer
    with one digit for each file. Two rules shorten the search. First, a set is not extended if the
    remaining workers cannot raise its result above the best known result. Second, only the first
    worker of a class is tried as the lowest member of a set, because the workers of a class are
    interchangeable. Trying only worker 0 would be wrong, because classes are not always
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
        """Try every set that extends this one. one_class: whether all workers of the set are in one
        class."""
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
        """Return, for each last worker and each v, the files that at least v later workers compute.

        Files are encoded as the highest bits of their digits.
        """
        reachable = []
        for last in range(self.workers):
            later = [sum(w > last for w in workers) for workers in assignment.workers_of]
            reachable.append([sum(1 << (self.bits * file + self.bits - 1)
                                  for file, count in enumerate(later) if count >= v)
                              for v in range(self.need + 1)])
        return reachable

    def _hopeful(self, votes: int, spoiled: int, size: int, within: Sequence[int]) -> bool:
        """Return True if a larger set of this branch may distort more files than the best known
        set.

        If n workers are added, they cast n l additional votes. A file that lacks v votes to be
        distorted uses v of these if at least v later workers compute it. The files that lack the
        fewest votes are counted first.
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


