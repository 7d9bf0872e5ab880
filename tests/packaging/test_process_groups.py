"""Every collective of torch runs in a group that its caller chose. Without a group torch uses the
group of all ranks, which is wrong as soon as a model is divided in several ways.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import moe_plugin

pytestmark = pytest.mark.fast
PACKAGE = Path(moe_plugin.__file__).parent
GROUPS = ("group", "process_group")
COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object",
    "irecv", "isend", "monitored_barrier", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send"}
# collectives of all ranks of a job
OF_ALL = {"hosts/megatron/pipeline/base.py": "dist.all_gather_object(every, stage_ranks)",
          "hosts/timm/train.py": "dist.barrier()",
          "hosts/transformers/compat/trainer.py": "dist.all_reduce(totals)"}


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call)]


@pytest.mark.parametrize("folder", sorted(path.name for path in PACKAGE.iterdir()
                                          if path.is_dir() and [*path.rglob("*.py")]))
def test_collectives_name_their_group(folder: str) -> None:
    wrong = []
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        for call in calls(path):
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            none = [name for name in GROUPS if name in given
                    and isinstance(given[name], ast.Constant) and given[name].value is None]
            collective = (isinstance(call.func, ast.Attribute) and call.func.attr in COLLECTIVES
                          and ast.unparse(call.func.value) in ("dist", "torch.distributed"))
            name = path.relative_to(PACKAGE).as_posix()
            if none or (collective and not given.keys() & {*GROUPS, None}
                        and OF_ALL.get(name) != ast.unparse(call)):
                wrong.append(f"{name}:{call.lineno}: {ast.unparse(call)}")
    assert not wrong
