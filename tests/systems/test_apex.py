"""The stand-in for apex (`tests/fake_apex`) against apex itself, github.com/NVIDIA/apex.

`SIGNATURES` is what apex declares: names of parameters alone. The stand-in has the same; what this
package calls fits. Where apex's sources are there (a clone or a bare repository, named by the
variable `APEX_SOURCES`), the table is compared with them, and their Python code runs with the
stand-in for compiled modules:

    git clone https://github.com/NVIDIA/apex /tmp/apex
    APEX_SOURCES=/tmp/apex python -m pytest tests/systems/test_apex.py
"""

from __future__ import annotations

import importlib
import inspect
import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_plugin.training.gradients import fused
from moe_plugin.training.gradients.fused import scale_, squared_norm

STAND_IN = Path(__file__).parents[1] / "fake_apex"
_LISTS = "chunk_size noop_flag tensor_lists"
_ADAM = "lr beta1 beta2 epsilon step mode bias_correction weight_decay"
_NORM = "self normalized_shape eps elementwise_affine memory_efficient"
SIGNATURES = {
    "apex.optimizers.FusedAdam.__init__": "self params lr bias_correction betas eps adam_w_mode "
                                          "weight_decay amsgrad set_grad_none capturable "
                                          "master_weights",
    "apex.optimizers.FusedAdam.step": "self closure grads output_params scale grad_norms "
                                      "grad_scaler",
    "apex.normalization.FusedLayerNorm.__init__": _NORM,
    "apex.normalization.FusedLayerNorm.forward": "self input",
    "apex.normalization.FusedRMSNorm.__init__": _NORM,
    "apex.normalization.FusedRMSNorm.forward": "self input",
    "apex.multi_tensor_apply.MultiTensorApply.__init__": "self chunk_size",
    "apex.multi_tensor_apply.MultiTensorApply.__call__":
        "self op noop_flag_buffer tensor_lists *args",
    "amp_C.multi_tensor_l2norm": f"{_LISTS} per_tensor_python",
    "amp_C.multi_tensor_scale": f"{_LISTS} scale",
    "amp_C.multi_tensor_adam": f"{_LISTS} {_ADAM}",
    "amp_C.multi_tensor_adam_capturable": f"{_LISTS} {_ADAM} inv_scale",
    "amp_C.multi_tensor_adam_capturable_master": f"{_LISTS} {_ADAM} inv_scale",
    "fused_adam_cuda.adam": "p p_copy m v g lr beta1 beta2 eps grad_scale step mode "
                            "bias_correction decay",
}
COMPILED = {"amp_C": ("csrc/amp_C_frontend.cpp", "{}_cuda"),
            "fused_adam_cuda": ("apex/contrib/csrc/optimizers/fused_adam_cuda.cpp", "{}")}
_LEAVE_OUT_LAST = {"amp_C.multi_tensor_l2norm"}  # of which C++ says at::optional


def found(path: str) -> Callable[..., Any]:
    """A function or method by its dotted path."""
    module = path
    while True:
        module, _, _ = module.rpartition(".")
        try:
            value: Any = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        for name in path.removeprefix(f"{module}.").split("."):
            value = getattr(value, name)
        return value


def names(function: Callable[..., Any]) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return " ".join(stars.get(p.kind, "") + p.name
                    for p in inspect.signature(function).parameters.values())


def signature(path: str) -> inspect.Signature:
    """Of the table; the first parameters have no default."""
    parameters = []
    for name in SIGNATURES[path].split():
        kind = (inspect.Parameter.VAR_POSITIONAL if name.startswith("*")
                else inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = "__init__" not in path or name in ("self", "params", "normalized_shape")
        last = path in _LEAVE_OUT_LAST and name == "per_tensor_python"
        default = (inspect.Parameter.empty if (needed and not last) or name.startswith("*")
                   else None)
        parameters.append(inspect.Parameter(name.lstrip("*"), kind, default=default))
    return inspect.Signature(parameters)


@pytest.mark.parametrize("path", SIGNATURES)
def test_the_stand_in_has_what_apex_declares(path: str, apex: list[str]) -> None:
    assert names(found(path)) == SIGNATURES[path]


def our_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """What this package calls of apex, as it calls it: norms of Megatron's layers, gradient norms
    and their scaling.
    """
    made = list[tuple[str, tuple[Any, ...], dict[str, Any]]]()
    imported = fused.imported

    def noted(module: str, name: str, extension: str) -> fused.FusedPart:
        part = imported(module, name, extension)
        if part.value is None:
            return part
        path = {"multi_tensor_applier": "MultiTensorApply.__call__"}.get(
            name, f"{name}.__init__" if isinstance(part.value, type) else name)
        own = (None,) if "__" in path else ()

        def call(*args: Any, **kwargs: Any) -> Any:
            made.append((f"{module}.{path}", (*own, *args), kwargs))
            return part.value(*args, **kwargs)

        return fused.FusedPart(call, part.reason)

    noted.cache_clear = imported.cache_clear  # type: ignore[attr-defined]  # of the fixture
    monkeypatch.setattr(fused, "imported", noted)
    pytest.importorskip("megatron.core", reason="norms are those of Megatron's layers")
    from moe_plugin.hosts.megatron.compat.sequence_parts import LocalNorm

    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    for kind, theirs in (("LayerNorm", torch.nn.LayerNorm(8)), ("RMSNorm", torch.nn.RMSNorm(8))):
        theirs.eps = 1e-3
        for efficient in (False, True):
            norm = LocalNorm(SimpleNamespace(
                normalization=kind, memory_efficient_layer_norm=efficient,
                sequence_parallel=True, layernorm_zero_centered_gamma=False,
                persist_layer_norm=False), 8, 1e-3)
            assert norm.memory_efficient is efficient
            torch.testing.assert_close(norm(x), theirs(x))
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (3, 7)]
    expected = torch.cat(tensors).square().sum()
    total = squared_norm(tensors)
    torch.testing.assert_close(total.float(), expected)
    before = [tensor.clone() for tensor in tensors]
    scale_(tensors, 0.5)
    torch.testing.assert_close(tensors, [tensor * 0.5 for tensor in before])
    return made


EXPECTED = {"apex.normalization.FusedLayerNorm.__init__",
            "apex.normalization.FusedRMSNorm.__init__", "amp_C.multi_tensor_l2norm",
            "amp_C.multi_tensor_scale", "apex.multi_tensor_apply.MultiTensorApply.__call__"}


def test_what_we_call_fits_the_table(apex: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = our_calls(monkeypatch)
    assert {path for path, _, _ in made} == EXPECTED
    for path, args, kwargs in made:
        signature(path).bind(*args, **kwargs)
    with pytest.raises(TypeError):
        signature("amp_C.multi_tensor_scale").bind(1, 2, 3)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """apex's sources in a folder of this test."""
    place = os.environ.get("APEX_SOURCES")
    if not place:
        pytest.skip("apex's sources are not here: set APEX_SOURCES to a clone of "
                    "github.com/NVIDIA/apex")
    packed = subprocess.run(["git", "-C", place, "archive", "HEAD", "apex", "csrc"],
                            capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.fixture
def real(apex: list[str], sources: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """apex's own Python code is imported, with the stand-in for compiled modules."""
    for name in ("amp_C", "fused_adam_cuda", "fused_layer_norm_cuda"):
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(sources))
    fused.imported.cache_clear()
    assert Path(str(importlib.import_module("apex").__file__)).is_relative_to(sources)
    yield sources
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


def declared(sources: Path, path: str) -> str:
    """Names of the parameters of a compiled function, by its declaration in C++."""
    module, name = path.split(".")
    file, form = COMPILED[module]
    text = (sources / file).read_text()
    [parameters] = set(re.findall(rf"\b{form.format(name)}\(([^()]*)\)\s*[;{{]", text))
    return " ".join(part.split()[-1].strip("&*") for part in parameters.split(","))


def test_the_table_is_apexs_own(real: Path) -> None:
    for path, expected in SIGNATURES.items():
        told = declared(real, path) if path.split(".")[0] in COMPILED else names(found(path))
        assert told == expected, path


def test_what_we_call_fits_apex_itself(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are torch's, by apex's own Python code."""
    made = our_calls(monkeypatch)
    assert {path for path, _, _ in made} == EXPECTED
    for path, args, kwargs in made:
        if path.split(".")[0] not in COMPILED:
            inspect.signature(found(path)).bind(*args, **kwargs)
