"""Checkpoints of Megatron with code in them: without `--trust-checkpoint` none of it runs, however
the checkpoint is named, and the run ends with an error that names the class and the flag.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.attacks.payload import Payload
from tests.hosts.megatron.conftest import make_data
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import MODEL, own_loop, refusal, trained

pytestmark = [pytest.mark.megatron, own_loop]
LATEST = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def saved(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint of one step."""
    root = tmp_path_factory.mktemp("saved")
    on_ranks(1, trained, [*MODEL, "--data-path", data, "--train-iters", "1", "--save", str(root)])
    return root / "iter_0000001"


def _with_code(saved: Path, target: Path, marker: Path) -> Path:
    """A copy of a checkpoint whose `.metadata` creates the marker; it has no checksums."""
    shutil.copytree(saved, target)
    metadata = pickle.loads((target / ".metadata").read_bytes())
    metadata.planner_data = Payload(marker)
    (target / ".metadata").write_bytes(pickle.dumps(metadata))
    (target / "moe_plugin.json").unlink()
    return target


def _released(saved: Path, root: Path, marker: Path) -> list[str]:
    _with_code(saved, root / "release", marker)
    (root / LATEST).write_text("release")
    return ["--load", str(root)]


def _pretrained(saved: Path, root: Path, marker: Path) -> list[str]:
    _with_code(saved, root / "iter_0000001", marker)
    (root / LATEST).write_text("1")
    (root.parent / "empty").mkdir()
    return ["--load", str(root.parent / "empty"), "--pretrained-checkpoint", str(root),
            "--finetune"]


def _not_persistent(saved: Path, root: Path, marker: Path) -> list[str]:
    _with_code(saved, root / "non_persistent" / "iter_0000001", marker)
    (root / "non_persistent" / LATEST).write_text("1")
    return ["--load", str(root), "--non-persistent-ckpt-type", "global"]


def _arguments(saved: Path, root: Path, marker: Path) -> list[str]:
    _with_code(saved, root / "iter_0000001", marker)
    (root / LATEST).write_text("1")
    return ["--load", str(root), "--use-checkpoint-args"]


def _legacy(saved: Path, root: Path, marker: Path) -> list[str]:
    path = root / "iter_0000001" / "mp_rank_00"
    path.mkdir(parents=True)
    torch.save({"args": Payload(marker)}, path / "model_optim_rng.pt")
    (root / LATEST).write_text("1")
    return ["--load", str(root), "--ckpt-format", "torch"]


def _dcp(saved: Path, root: Path, marker: Path) -> list[str]:
    """Of the format `torch_dcp`, in which Megatron asks torch to load everything."""
    _with_code(saved, root / "iter_0000001", marker)
    (root / "iter_0000001" / "metadata.json").unlink()
    (root / LATEST).write_text("1")
    return ["--load", str(root), "--ckpt-format", "torch_dcp", "--use-checkpoint-args"]


def _data(saved: Path, root: Path, marker: Path) -> list[str]:
    """The index of a data set, which Megatron keeps in a folder and reads again."""
    argv = ["--data-path", str(root / "corpus"), "--data-cache-path", str(root)]
    make_data(root)
    on_ranks(1, trained, [*MODEL, *argv, "--train-iters", "1"])
    for index in root.glob("*.npy"):
        index.write_bytes(pickle.dumps(Payload(marker)))
    return argv


def _module(saved: Path, root: Path, marker: Path) -> list[str]:
    """Arguments of a checkpoint whose `--spec` names a module next to its files."""
    path = shutil.copytree(saved, root / "iter_0000001")
    (path / "moe_plugin.json").unlink()
    _with_spec(path, ["stranger.code", "layer"])
    (root / "stranger").mkdir()
    (root / "stranger" / "code.py").write_text(f"import os; os.mkdir({str(marker)!r})")
    (root / LATEST).write_text("1")
    return ["--load", str(root), "--use-checkpoint-args"]


def _with_spec(path: Path, spec: list[str]) -> None:
    """Change the spec among the arguments of a checkpoint, which are an object of it; up to 0.18
    they have a file.
    """
    if (path / "common.pt").exists():
        state = torch.load(path / "common.pt", weights_only=False)
        state["args"].spec = spec
        torch.save(state, path / "common.pt")
        return
    metadata = pickle.loads((path / ".metadata").read_bytes())
    [key] = [key for key in metadata.storage_data if key.fqn.startswith("common_state")]
    place = metadata.storage_data[key]
    content = (path / place.relative_path).read_bytes()
    state = torch.load(io.BytesIO(content[place.offset:][:place.length]), weights_only=False)
    state[0]["args"].spec = spec
    torch.save(state, path / place.relative_path)
    place.offset, place.length = 0, (path / place.relative_path).stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


Attack = Callable[[Path, Path, Path], list[str]]


@pytest.mark.parametrize("attack", [
    _released, _pretrained, _not_persistent, _arguments, _legacy, _dcp, _data])
def test_no_code_runs_whichever_argument_names_the_checkpoint(
        attack: Attack, data: str, saved: Path, tmp_path: Path) -> None:
    root, marker = tmp_path / "from a stranger", tmp_path / "code has run"
    root.mkdir()
    argv = [*MODEL, "--data-path", data, "--train-iters", "2", *attack(saved, root, marker)]
    [message] = on_ranks(1, refusal, argv)
    assert not marker.exists()
    named = "Python objects" if attack is _data else "makedirs"
    assert named in message and "refused" in message and "--trust-checkpoint" in message, message


def test_a_checkpoint_cannot_name_a_module_to_import(
        data: str, saved: Path, tmp_path: Path) -> None:
    """The folder is importable: Python looks for modules in the folder where it starts."""
    root, marker = tmp_path / "from", tmp_path / "code has run"
    root.mkdir()
    argv = [*MODEL, "--data-path", data, "--train-iters", "2", *_module(saved, root, marker)]
    [message] = on_ranks(1, _refusal_in, str(root), argv)
    assert not marker.exists()
    assert "--spec ['stranger.code', 'layer']" in message and "--trust-checkpoint" in message


@pytest.mark.parametrize("release", [False, True])
def test_another_name_of_a_file_is_an_error_that_names_it(
        release: bool, data: str, saved: Path, tmp_path: Path) -> None:
    path = shutil.copytree(saved, tmp_path / ("release" if release else "iter_0000001"))
    (path / "moe_plugin.json").unlink()
    next(path.glob("*.distcp")).rename(path / "other.distcp")
    (tmp_path / LATEST).write_text("release" if release else "1")
    [message] = on_ranks(1, refusal, [
        *MODEL, "--data-path", data, "--train-iters", "2", "--load", str(tmp_path)])
    assert "__0_0.distcp" in message and "[Errno" not in message


def test_a_trusted_checkpoint_loads_as_ever(data: str, saved: Path, tmp_path: Path) -> None:
    root, marker = tmp_path / "from a friend", tmp_path / "code has run"
    root.mkdir()
    argv = _released(saved, root, marker)
    assert on_ranks(1, refusal, [
        *MODEL, "--data-path", data, "--train-iters", "2", *argv, "--trust-checkpoint"]) == [""]
    assert marker.exists()


def _refusal_in(folder: str, argv: list[str]) -> str:
    sys.path.insert(0, folder)
    return refusal(argv)


def _read_as(name: str, function: str, content: bytes) -> tuple[object, str]:
    """What `function(content)` gives where a module of this name calls it, and its refusal."""
    from moe_plugin.checkpoint.trust import UntrustedFile
    from moe_plugin.hosts.megatron import restricted

    restricted.restrict_loads()
    module = {"__name__": name, "content": content}
    try:
        exec(f"import io, pickle, torch\nread = {function}", module)
    except UntrustedFile as error:
        return None, str(error)
    return module["read"], ""


# modules that are not installed here, as they read extra states of fp8 layers, local checkpoints
# and the objects in zarr arrays
READERS = {
    "transformer_engine.pytorch.module.base": "pickle.loads(content)",
    "megatron.core.extensions.kitchen": "pickle.loads(content)",
    "nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager":
        "torch.load(io.BytesIO(content), weights_only=False)",
    "numcodecs.pickles": "pickle.loads(content)",
}


@pytest.mark.parametrize("name", READERS)
def test_readers_of_other_packages_run_no_code(name: str, tmp_path: Path) -> None:
    marker, values = tmp_path / "code has run", {"scale": [1.0, 2.0], "size": 3}

    def content(value: object) -> bytes:
        stream = io.BytesIO()
        (torch.save if "torch" in READERS[name] else pickle.dump)(value, stream)
        return stream.getvalue()

    assert on_ranks(1, _read_as, name, READERS[name], content(values)) == [(values, "")]
    [(_, said)] = on_ranks(1, _read_as, name, READERS[name], content({"x": Payload(marker)}))
    assert not marker.exists()
    assert "makedirs" in said and "--trust-checkpoint" in said


def _tokenizer(path: str, metadata: str | None) -> str:
    from megatron.core.tokenizers.megatron_tokenizer import MegatronTokenizer

    from moe_plugin.hosts.megatron import restricted

    restricted.restrict_loads()
    sys.path.insert(0, path)
    try:
        MegatronTokenizer.from_pretrained(path, metadata)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("given", [True, False])
def test_a_tokenizer_cannot_name_a_module_to_import(given: bool, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.tokenizers.megatron_tokenizer")
    marker, metadata = tmp_path / "code has run", tmp_path / "tokenizer_metadata.json"
    (tmp_path / "stranger.py").write_text(f"import os; os.mkdir({str(marker)!r})")
    metadata.write_text(json.dumps({"library": "huggingface", "class_name": "Tokenizer",
                                    "class_path": "stranger"}))
    [said] = on_ranks(1, _tokenizer, str(tmp_path), str(metadata) if given else None)
    assert not marker.exists()
    assert "tokenizer metadata" in said and "stranger" in said and "--trust-checkpoint" in said
