"""Print the functions that exist in only one of two git revisions.

    python scripts/compare_functions.py REV_A REV_B

A function may be in different files in the two revisions. Two functions are equal if their names
and bodies are equal, ignoring docstrings, imports, and module names in strings.
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


def left_out(node: ast.stmt) -> bool:
    """Return whether a statement is an import or a docstring."""
    text = node.value if isinstance(node, ast.Expr) else None
    return isinstance(node, ast.Import | ast.ImportFrom) or isinstance(
        getattr(text, "value", None), str)


def bare(function: ast.AST, modules: set[str]) -> str:
    """Return the code of a function without docstrings, imports and module names.

    Args:
        function: the function.
        modules: names that the function's file imports with `from ... import`.
    """
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = MODULE.sub("MODULE", node.value)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
            node.value = ast.Name("MODULE")
        for field in ("body", "orelse"):
            if isinstance(body := getattr(node, field, None), list) and body:
                setattr(node, field, [one for one in body if not left_out(one)] or [ast.Pass()])
    return ast.unparse(function)


def git(*words: str) -> str:
    """Return the output of a git command."""
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def functions(revision: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, body and file of all functions and methods of a revision."""
    for path in git("ls-tree", "-r", "--name-only", revision, "--", *FOLDERS).splitlines():
        if not path.endswith(".py"):
            continue
        tree = ast.parse(git("show", f"{revision}:{path}"))
        modules = {alias.asname or alias.name for node in ast.walk(tree)
                   if isinstance(node, ast.ImportFrom) for alias in node.names}
        stack: list[tuple[str, ast.AST]] = [("", tree)]
        while stack:
            above, node = stack.pop()
            for child in ast.iter_child_nodes(node):
                name = f"{above}{getattr(child, 'name', '')}"
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield name, bare(child, modules), path
                elif isinstance(child, ast.ClassDef):
                    stack.append((f"{name}.", child))


def main() -> int:
    """Print all functions that differ, and return 1 if there are any."""
    found = [Counter(), Counter()]
    files: dict[tuple[str, str], str] = {}
    for count, revision in zip(found, sys.argv[1:], strict=True):
        for name, body, path in functions(revision):
            count[name, body] += 1
            files[name, body] = path
    for revision, mine in zip(sys.argv[1:], (found[0] - found[1], found[1] - found[0])):
        for one, times in sorted(mine.items()):
            print(f"{revision} {files[one]}: {one[0]}" + f" ({times} times)" * (times > 1))
    return int(found[0] != found[1])


if __name__ == "__main__":
    raise SystemExit(main())
