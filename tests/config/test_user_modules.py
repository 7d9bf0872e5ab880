"""Modules of the user's own, imported by setting."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.config import from_dict
from moe_plugin.config.user_modules import import_user_modules
from moe_plugin.routing import losses

OWN = '''
from moe_plugin.routing import losses


@losses.register("{name}")
def loss(x):
    """Twice the mean score of expert 0."""
    return 2 * x.importance_E()[0] / x.count
'''


def layer_with(imports: str, loss: str) -> MoELayer:
    return MoELayer(from_dict({"model_dim": 6, "imports": imports, "losses": {loss: 1.0}}))


def test_files_and_dotted_names_are_imported_once_and_before_names_are_looked_up(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN.format(name="test_from_file"))
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("")
    (tmp_path / "own_package" / "deep.py").write_text(OWN.format(name="test_from_name"))
    monkeypatch.syspath_prepend(str(tmp_path))
    imports = f"own_package.deep, {tmp_path / 'own.py'}"
    try:
        # registered twice it would be refused
        for name in ("test_from_file", "test_from_name", "test_from_file"):
            assert name in layer_with(imports, name)(torch.randn(5, 6)).losses
        monkeypatch.chdir(tmp_path)
        layer_with("own.py", "test_from_file")  # the same file by another path
    finally:
        for name in ("test_from_file", "test_from_name"):
            losses._entries.pop(name, None)


@pytest.mark.parametrize("text,words", [(None, "FileNotFoundError"),
                                        ("1 / 0", "ZeroDivisionError: division by zero"),
                                        ("import no_such_module_here", "ModuleNotFoundError"),])
def test_what_goes_wrong_is_told_and_can_be_mended(text: str | None, words: str,
                                                   tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    if text is not None:
        path.write_text(text)
    for _ in range(2):  # not half imported: it fails alike again
        with pytest.raises(ValueError,
                           match=f"imports=.*own.py' cannot be imported: {words}.*give a module"):
            layer_with(str(path), "z")
    path.write_text("")
    layer_with(str(path), "z")


def test_a_name_that_python_does_not_find() -> None:
    with pytest.raises(
            ValueError,
            match="imports='no_such_module_here' cannot be imported: ModuleNotFoundError"):
        import_user_modules("no_such_module_here")
    before = set(sys.modules)
    import_user_modules(None), import_user_modules("")
    assert set(sys.modules) == before
