"""Modules of the user's own, imported by setting."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.config import from_dict, from_yaml, settings_from_yaml
from moe_plugin.config.flags import config_from_flags
from moe_plugin.utils.registry import import_user_modules

pytestmark = pytest.mark.fast

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
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_entries: None) -> None:
    (tmp_path / "own.py").write_text(OWN.format(name="test_from_file"))
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("")
    (tmp_path / "own_package" / "deep.py").write_text(OWN.format(name="test_from_name"))
    monkeypatch.syspath_prepend(str(tmp_path))
    imports = f"own_package.deep, {tmp_path / 'own.py'}"
    # registered twice it would be refused
    for name in ("test_from_file", "test_from_name", "test_from_file"):
        assert name in layer_with(imports, name)(torch.randn(5, 6)).losses
    monkeypatch.chdir(tmp_path)
    layer_with("own.py", "test_from_file")  # the same file by another path


@pytest.mark.parametrize("text,words", [
    (None, "FileNotFoundError"),
    ("1 / 0", "ZeroDivisionError: division by zero"),
    ("import no_such_module_here", "ModuleNotFoundError"),
])
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


def test_a_file_that_imports_modules_is_refused_unless_it_is_trusted(tmp_path: Path) -> None:
    mark, path = tmp_path / "code has run", tmp_path / "moe.yaml"
    (tmp_path / "own.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    path.write_text(f"model_dim: 6\nimports: {tmp_path / 'own.py'}\n")
    words = "moe.yaml.*imports=.*own.py.*refused.*--moe-trust-imports.*trust_imports=True"
    for read in (from_yaml, settings_from_yaml, lambda p: config_from_flags({"moe_config": p})):
        with pytest.raises(ValueError, match=words):
            read(str(path))
    trusted = {"moe_config": str(path), "moe_trust_imports": "true"}
    wanted = str(tmp_path / "own.py")
    assert settings_from_yaml(str(path), trust_imports=True)["imports"] == wanted
    assert config_from_flags(trusted).imports == wanted and not mark.exists()
    MoELayer(from_yaml(str(path), trust_imports=True))
    assert mark.exists()


def test_flags_and_code_name_modules_without_trust(tmp_path: Path) -> None:
    (tmp_path / "moe.yaml").write_text("imports:\n")
    given = {"moe_config": str(tmp_path / "moe.yaml"), "moe_import": "json"}
    assert config_from_flags(given).imports == "json" == from_dict({"imports": "json"}).imports
    with pytest.raises(ValueError, match="--moe-trust-imports 'maybe' cannot be read"):
        config_from_flags({**given, "moe_trust_imports": "maybe"})
