"""A stand-in for a checkout of fairseq's `moe` branch: stock fairseq's files, changed where the
branch matters here.

Its version is another one, a user dir's package is imported and its `models` are not, and its
transformer layers take `MOELayer` from `fairseq.modules.moe`.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

MOE = """import torch


class MOELayer(torch.nn.Module):
    def __init__(self, gate, experts, args, group=None, all2all_group=None):
        raise AssertionError("the branch's own layer was built")
"""
FLAG = """
    moe_expert_count: int = field(default=0, metadata={"help": "experts"})
    moe_top1_expert: bool = field(default=False, metadata={"help": "one expert"})
"""


def build(home: Path, by_name: bool = False) -> Path:
    """The tree `home/fairseq`; returns home, for PYTHONPATH.

    by_name: a later version of the branch, which has a `CMRLayer` and returns losses by name.
    """
    stock = Path(importlib.util.find_spec("fairseq").origin).parent
    tree = home / "fairseq"
    for folder in (tree, tree / "models", tree / "modules"):
        folder.mkdir(parents=True)
        for path in (stock / folder.relative_to(tree)).iterdir():
            if path.name not in ("__pycache__", "models", "modules"):
                (folder / path.name).symlink_to(path)
    _replace(tree / "version.py", '__version__ = "1.0.0a0+moe"\n')
    utils = (stock / "utils.py").read_text()
    changed, times = re.subn(
        r"\n {16}tasks_path = .*?(?=\n {12}else:\n {16}raise ImportError)", "", utils,
        flags=re.DOTALL)
    assert times == 1
    _replace(tree / "utils.py", changed)
    _insert(stock, tree, "models/transformer_lm.py",
            "class TransformerLanguageModelConfig(FairseqDataclass):", FLAG)
    _insert(stock, tree, "modules/transformer_layer.py", "from fairseq.modules import LayerNorm, "
            "MultiheadAttention", "\nfrom fairseq.modules.moe import MOELayer")
    (tree / "modules" / "moe").mkdir()
    more = "\n\nclass CMRLayer:\n    pass\n" if by_name else ""
    (tree / "modules" / "moe" / "__init__.py").write_text("from .moe_layer import MOELayer" + more)
    (tree / "modules" / "moe" / "moe_layer.py").write_text(MOE)
    return home


def _replace(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


def _insert(stock: Path, tree: Path, name: str, after: str, text: str) -> None:
    before = (stock / name).read_text()
    assert before.count(after) == 1, name
    _replace(tree / name, before.replace(after, after + text))
