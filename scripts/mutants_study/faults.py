"""Choose mutants: copies of the code in which one line has a small fault.

Faults that are typical of distributed training are defined here. Faults that are typical of any
program, such as a negated condition, come from cosmic-ray.
"""

from __future__ import annotations

import ast
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CORE = ("layer.py", "routed_experts.py", "output.py", "routing", "dispatch", "experts", "comm",
        "tuning", "training/gradients", "hosts/fairseq/layers.py", "hosts/fairseq/criterion.py",
        "hosts/fairseq/trainer.py", "hosts/fairseq/groups.py", "hosts/megatron/layer.py",
        "hosts/megatron/parameters.py", "hosts/megatron/losses.py", "hosts/megatron/state.py",
        "hosts/megatron/stages.py", "hosts/megatron/pipeline",
        "hosts/megatron/compat/aux_losses.py",
        "hosts/plain/run.py", "hosts/plain/sharding.py", "hosts/transformers/experts.py",
        "checkpoint")
GENERIC = ("AddNot", "NumberReplacer", "ReplaceAndWithOr", "ReplaceOrWithAnd",
           "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ZeroIterationForLoop",
           "ReplaceComparisonOperator_Lt_LtE", "ReplaceComparisonOperator_LtE_Lt",
           "ReplaceComparisonOperator_Gt_GtE", "ReplaceComparisonOperator_GtE_Gt",
           "ReplaceComparisonOperator_Eq_NotEq", "ReplaceComparisonOperator_NotEq_Eq",
           "ReplaceBinaryOperator_Add_Sub", "ReplaceBinaryOperator_Sub_Add",
           "ReplaceBinaryOperator_FloorDiv_Mul", "ReplaceBinaryOperator_Mul_FloorDiv",
           "ReplaceUnaryOperator_USub_UAdd")
# arguments that only add a check (`zip`) or save memory (`torch.load`): no result depends on them
WITHOUT_EFFECT = ("strict=True", "strict=False", "mmap=True", "mmap=False")


@dataclass
class Mutant:
    """One fault: in lines `first` to `last` of `path`, `before` becomes `after`."""

    path: str
    first: int
    last: int
    kind: str
    before: str
    after: str
    result: str = ""
    test: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.path}:{self.first}: {self.kind}: {self.after}"


def replaced(text: str, node: Any, new: str) -> str:
    """Return the source with the text of a node replaced."""
    starts = [0, *itertools.accumulate(len(line.encode()) for line in text.splitlines(True))]
    begin = starts[node.lineno - 1] + node.col_offset
    end = starts[node.end_lineno - 1] + node.end_col_offset
    data = text.encode()
    return (data[:begin] + new.encode() + data[end:]).decode()


def faults_of_a_node(node: ast.AST, text: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield the faults typical of distributed training at a node: kind, node and new text."""
    def source(part: ast.AST) -> str:
        return ast.get_source_segment(text, part) or ""

    match node:
        case ast.Expr(value=ast.Call()):
            yield "dropped call", node, "pass"
        case ast.AugAssign():
            yield "skipped update", node, "pass"
        case ast.BinOp(op=ast.Mult() | ast.Div()):
            yield "missing scale", node, source(node.left)
        case ast.Call(func=ast.Attribute(
                value=value, attr="clone" | "contiguous" | "detach" as name), args=[]):
            yield f"missing {name}", node, source(value)
        case ast.Call(func=ast.Attribute(value=value, attr="float"), args=[]):
            yield "wrong dtype", node, source(value)
        case ast.Attribute(value=ast.Name("torch"), attr="float32"):
            yield "wrong dtype", node, "torch.bfloat16"
        case ast.Attribute(value=ast.Name("torch"), attr="int64"):
            yield "wrong dtype", node, "torch.int16"
        case ast.keyword(arg="group" | "process_group"):
            yield "wrong group", node.value, "None"
        case ast.keyword(arg="dim", value=ast.Constant(value=int(axis))):
            yield "swapped axis", node.value, str(1 if axis == 0 else 0)
        case ast.Call(args=[ast.Name() as one, ast.Name() as other, *_]):
            inner = replaced(text, other, source(one))
            yield "swapped arguments", node, ast.get_source_segment(
                replaced(inner, one, source(other)), node) or source(node)
    if isinstance(node, ast.If) and not node.orelse and not any(
            isinstance(part, ast.Raise | ast.Import | ast.ImportFrom) for part in node.body):
        yield "skipped branch", node.test, "False"


def lines_without_effect(tree: ast.AST) -> set[int]:
    """Return the lines that only declare types, import, or raise errors."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        parts: list[Any] = []
        if isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            parts = [*node.args.args, *node.args.kwonlyargs, node.returns]
        elif isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.Assert):
            parts = [node]
        for part in parts:
            if part is not None and hasattr(part, "lineno"):
                lines |= set(range(part.lineno, part.end_lineno + 1))
    return lines


class Source:
    """A file and the places in it where faults can be planted."""

    def __init__(self, path: Path) -> None:
        self.name = path.relative_to(ROOT).as_posix()
        self.text = path.read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        tree = ast.parse(self.text)
        self.skipped = lines_without_effect(tree)
        self.inside = {line for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
                       for part in node.body
                       for line in range(part.lineno, (part.end_lineno or part.lineno) + 1)}
        self.faults = [fault for node in ast.walk(tree)
                       for fault in faults_of_a_node(node, self.text)]

    def candidates(self) -> Iterator[tuple[str, int]]:
        """Yield kinds of faults, and the number of the fault among those of its kind."""
        from cosmic_ray.ast import ast_nodes, get_ast
        from cosmic_ray.plugins import get_operator

        for number, (kind, _, _) in enumerate(self.faults):
            yield kind, number
        nodes = list(ast_nodes(get_ast(self.text)))
        for kind in GENERIC:
            operator = get_operator(f"core/{kind}")()
            count = sum(len(list(operator.mutation_positions(node))) for node in nodes)
            yield from ((kind, number) for number in range(count))

    def mutant(self, kind: str, number: int) -> Mutant | None:
        """Return a mutant, or None if the fault would not change what a function computes."""
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        if kind in GENERIC:
            new = mutate_code(self.text, get_operator(f"core/{kind}")(), number)
        else:
            _, place, text = self.faults[number]
            new = replaced(self.text, place, text)
        lines = (new or self.text).splitlines()
        first = next((n for n, pair in enumerate(zip(self.lines, lines, strict=False))
                      if pair[0] != pair[1]), None)
        if first is None:
            return None
        tail = 0
        while (self.lines[-1 - tail] == lines[-1 - tail]
               and tail < min(len(self.lines), len(lines)) - first - 1):
            tail += 1
        last = len(self.lines) - tail
        if first + 1 not in self.inside or self.skipped & set(range(first + 1, last + 1)):
            return None
        try:
            ast.parse(new)
        except SyntaxError:
            return None
        before, after = ("\n".join(part) for part in (self.lines[first:last],
                                                      lines[first:len(lines) - tail]))
        if any(before.count(text) != after.count(text) for text in WITHOUT_EFFECT):
            return None
        return Mutant(self.name, first + 1, last, kind, before, after)


def generate(number: int, seed: int) -> list[Mutant]:
    """Choose mutants at random: each kind of fault with the same probability, and at most one
    mutant per line.
    """
    paths = [path for part in CORE for place in [ROOT / "moe_plugin" / part]
             for path in ([place] if place.suffix else sorted(place.rglob("*.py")))]
    by_kind: dict[str, list[tuple[Source, int]]] = defaultdict(list)
    for path in paths:
        source = Source(path)
        for kind, occurrence in source.candidates():
            by_kind[kind].append((source, occurrence))
    dice = random.Random(seed)
    chosen: dict[tuple[str, int], Mutant] = {}
    for candidates in by_kind.values():
        dice.shuffle(candidates)
    while len(chosen) < number and any(by_kind.values()):
        for kind in sorted(by_kind):
            while by_kind[kind]:
                source, occurrence = by_kind[kind].pop()
                mutant = source.mutant(kind, occurrence)
                if mutant and (mutant.path, mutant.first) not in chosen:
                    if len(chosen) < number:
                        chosen[mutant.path, mutant.first] = mutant
                    break
    return list(chosen.values())
