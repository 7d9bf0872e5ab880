#!/usr/bin/env python3
"""Whether two revisions have the same functions, wherever they are: prints those of one alone.

    python scripts/compare_functions.py REV_A REV_B

A function counts by its name and body without docstrings, imports, and names of modules in strings.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

FOLDERS = ("moe_plugin", "kernels", "scripts")
MODULE = re.compile(r"\b(?:moe_plugin|scripts)(?:\.\w+)+\b")


class Bare(ast.NodeTransformer):
    """Without docstrings, imports and names of modules."""

    def visit_Import(self, node: ast.Import) -> None:
        """Gone."""

    visit_ImportFrom = visit_Import

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Gone where it is a docstring."""
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        """A module's name is one word."""
        return ast.Constant(MODULE.sub("MODULE", node.value)) if isinstance(
            node.value, str) else node


def git(*words: str) -> str:
    """What a command of git prints."""
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def functions(revision: str) -> Iterator[tuple[str, str, str]]:
    """(name, body, file) of all functions and methods of a revision."""
    for path in git("ls-tree", "-r", "--name-only", revision, "--", *FOLDERS).splitlines():
        if not path.endswith(".py"):
            continue
        stack: list[tuple[str, ast.AST]] = [("", ast.parse(git("show", f"{revision}:{path}")))]
        while stack:
            above, node = stack.pop()
            for child in ast.iter_child_nodes(node):
                name = f"{above}{getattr(child, 'name', '')}"
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield name, ast.unparse(Bare().visit(child)), path
                elif isinstance(child, ast.ClassDef):
                    stack.append((f"{name}.", child))


def main() -> int:
    """1: they differ."""
    found = [Counter(), Counter()]
    files: dict[tuple[str, str], str] = {}
    for count, revision in zip(found, sys.argv[1:], strict=True):
        for name, body, path in functions(revision):
            count[name, body] += 1
            files[name, body] = path
    for revision, mine in zip(sys.argv[1:], (found[0] - found[1], found[1] - found[0]),
                              strict=True):
        for one, times in sorted(mine.items()):
            print(f"{revision} {files[one]}: {one[0]}" + f" ({times} times)" * (times > 1))
    return int(found[0] != found[1])


if __name__ == "__main__":
    raise SystemExit(main())
