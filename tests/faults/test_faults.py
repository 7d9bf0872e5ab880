"""Injected faults: a part with every run of the tests, all of them with the slow ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_plugin import MoEConfig, MoELayer
from moe_plugin.cli.main import main
from scripts.emulate import faults
from scripts.emulate.damage import WAYS, damage
from scripts.emulate.faults import KINDS, Fault
from tests.faults.cases import Case, at_random, cases, inject, reference, wrong_products
from tests.faults.damages import damages
from tests.faults.hosts import AT_ONCE, HOSTS
from tests.faults.table import of_host
from tests.preloaded import Server

pytestmark = pytest.mark.distributed


def test_a_part_in_plain_pytorch(tmp_path: Path) -> None:
    """One of each outcome, and damaged files of each kind."""
    host = HOSTS["plain"](tmp_path)
    whole, skipped = reference(host), {}
    for index, case in enumerate(AT_ONCE):
        row = inject(host, Case(*case), whole, tmp_path / "runs" / f"fault-{index}", skipped)
        assert not row.wrong, row
    rows = damages(host, tmp_path / "runs" / "whole", 2 * len(WAYS))
    assert len(rows) == 2 * len(WAYS) and not [row for row in rows if row.wrong], rows


def test_a_wrong_product_is_named_before_it_is_saved(tmp_path: Path) -> None:
    host = HOSTS["checked"](tmp_path)
    row = inject(host, wrong_products()[0], reference(host), tmp_path / "runs" / "fault", {})
    assert not row.wrong, row
    assert row.outcome.startswith("named error"), row


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTS)
def test_all_in_each_host(name: str, tmp_path: Path) -> None:
    pytest.importorskip({"megatron": "megatron.core", "fairseq": "fairseq"}.get(name, "torch"))
    rows = list(of_host(name, tmp_path, 48, 24, "", []))
    assert not [row for row in rows if row.wrong]


def _step_by_step(kind: str, record: str) -> list[bool]:
    """Whether output and gradients of four steps are what they are without the fault."""
    def steps() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = MoELayer(MoEConfig(model_dim=8, num_experts=2))
        optimizer, found = torch.optim.SGD(layer.parameters(), 0.0), []
        for _ in range(4):
            x = torch.randn(6, 8, requires_grad=True)
            output = layer(x).output
            output.square().sum().backward()
            optimizer.zero_grad()  # the weights stay
            optimizer.step()
            found.append(torch.cat([output.detach().flatten(), x.grad.flatten()]))
        return found

    wanted = steps()
    Fault(kind, (0,), step=3, record=record, seconds=0.01).arm(0)
    Fault("kill", (1,), step=1).arm(0)  # another rank's
    return [torch.equal(a, b) for a, b in zip(steps(), wanted, strict=True)]


@pytest.mark.parametrize(("kind", "wanted"), [
    ("nan-data", False), ("nan-gradient", False), ("bit-flip", False), ("slow", True)])
def test_a_fault_changes_its_step_alone(kind: str, wanted: bool, tmp_path: Path) -> None:
    record = tmp_path / "record"
    done = server.run(1, _step_by_step, kind, str(record))
    assert done.code == 0, done.log
    assert done.results[0] == [True, True, wanted, True]
    assert len(record.read_text().splitlines()) == 1


server = Server("tests.faults.preload")


@pytest.mark.fast
def test_one_bit(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.ones(3, 2, dtype=dtype)
        faults.flip_bit(x, 3)
        assert (x != 1).sum() == 1 and x[0, 0] != 1
        faults.flip_bit(x, 3)
        assert (x == 1).all()
        faults.flip_bit(x, 8 * x.element_size() - 1)
        assert x[0, 0] == -1


@pytest.mark.fast
@pytest.mark.parametrize(("values", "says"), [
    ({"kind": "fire"}, "fault 'fire' is unknown. Use one of kill"),
    ({"step": 0}, "step=0 must be >= 1"),
    ({"place": "lunch"}, "at place 'lunch'. The place must be forward"),
    ({"kind": "nan-data", "place": "update"}, "at place 'update'. The place must be forward"),
    ({"bit": 64}, "bit=64 must be 0 to 63"), ({"ranks": (-1,)}, ">= 0")])
def test_values_out_of_bounds(values: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Fault(**{"kind": "kill", **values})


@pytest.mark.parametrize("way", WAYS)
def test_damage_changes_one_file(way: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 2000)
    said = damage(tmp_path / "a", way, 1)
    path = tmp_path / "a"
    assert said.startswith("a") and (tmp_path / "b").read_bytes() == b"b" * 2000
    assert not path.is_file() or path.read_bytes() != b"a" * 2000


@pytest.mark.fast
def test_damage_that_is_not_possible(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(ValueError, match="already empty"):
        damage(tmp_path / "a", "bit")
    with pytest.raises(ValueError, match="'fire' is unknown"):
        damage(tmp_path / "a", "fire")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`moe-plugin fault` in front of a training script, on the rank that is meant."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "moe_plugin.cli.main", "fault", "kill", "--step", "3", "--",
               str(root / "scripts" / "train_plain.py"), str(tmp_path), "--steps", "4",
               "--save-every", "1", "--layers", "1"]
    run = {"cwd": root, "capture_output": True, "text": True, "env": {
        **os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}}
    killed = subprocess.run(command, check=False, **run)
    assert killed.returncode == -9, killed
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2
    assert main(["fault", "kill", "--", "no-such-program"]) == 2
    assert "'no-such-program' is not installed" in capsys.readouterr().err


@pytest.mark.fast
def test_random_cases_are_new_and_the_same_in_every_run() -> None:
    drawn = at_random(40)
    assert drawn == at_random(40)
    names = [(case.what, case.when) for case in [*cases(), *drawn]]
    assert len(set(names)) == len(names)


@pytest.mark.fast
def test_kinds_are_all_injected() -> None:
    seen = {case.fault.kind for case in [*cases(), *wrong_products()]}
    assert seen | {"bit-flip"} == set(KINDS)
