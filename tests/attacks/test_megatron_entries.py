"""All places of the installed Megatron that could run code of a file: they call one of the four
functions that the launcher restricts, by name at the moment of the call, or are known here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

core = pytest.importorskip("megatron.core",
                           reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

pytestmark = [pytest.mark.fast, pytest.mark.megatron]
ROOT = Path(core.__file__).parents[1]
# ways past torch.load, pickle.load, pickle.loads and numpy.load
OTHERS = re.compile(
    r"from (?:torch|torch\.serialization|pickle|numpy) import [^\n]*\bloads?\b|Unpickler\b|"
    r"\b(?:joblib|dill|cloudpickle|marshal|shelve|c?Pickle)\b *(?:\.|$)|torch\.jit\.load|"
    r"(?:unsafe|full)_load|(?:Unsafe|Full)Loader|Loader=yaml\.Loader|"
    r"(?<![\w.\"'])(?:exec|eval)\((?!\))|(?:import_module|__import__)\((?!\s*[\"'])", re.MULTILINE)
SPEC = "--spec, which restricted.py compares with the command line"
GIVEN = "a name on the command line or in the program"
YAML = "a file that the user names, with Megatron's list of allowed targets"
KNOWN = {
    "core/safe_globals.py": "Megatron's own restricted unpickler",
    "core/extensions/transformer_engine.py": "the same unpickler",
    "core/tokenizers/megatron_tokenizer.py": "metadata of a tokenizer, see restricted.py",
    "core/transformer/spec_utils.py": SPEC, "training/argument_utils.py": SPEC,
    "elastification/pretrain_hybrid_flex.py": SPEC,
    "training/arguments.py": "eval of --moe-layer-freq, without names that could call anything",
    "core/fp8_utils.py": GIVEN, "core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py": GIVEN,
    "core/resharding/nvshmem_copy_service/compat.py": GIVEN,
    "core/transformer/experimental_attention_variant/dsa_kernels.py": GIVEN,
    "core/transformer/custom_layers/batch_invariant_kernels.py": GIVEN,
    "core/datasets/retro/external_libs.py": GIVEN, "training/models/base.py": GIVEN,
    "training/config/instantiate_utils.py": YAML, "training/config/utils.py": YAML,
    "rl/__init__.py": YAML, "rl/agent/registry.py": YAML,
}


def _code(path: Path) -> str:
    """A module without its comments and docstrings."""
    text = re.sub(r'"""(?:.|\n)*?"""', "", path.read_text(encoding="utf-8"))
    return re.sub(r"#.*", "", text)


def test_no_place_passes_the_restricted_functions_by() -> None:
    found = {str(path.relative_to(ROOT)): match[0] for path in ROOT.rglob("*.py")
             if (match := OTHERS.search(_code(path)))}
    new = {path: call for path, call in found.items() if path not in KNOWN}
    assert not new, f"restrict these, and name them in docs/security.md: {new}"
