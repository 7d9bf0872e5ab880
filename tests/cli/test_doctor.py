"""The doctor tells the truth: about what works, what is registered, what is missing."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import moe_plugin.cli.doctor as selfcheck
from moe_plugin import MoELayer
from moe_plugin.cli.doctor import first, packages, render, rest
from moe_plugin.cli.main import main
from moe_plugin.dispatch import dispatchers
from moe_plugin.dispatch.ragged import RaggedDispatcher
from moe_plugin.tuning.compute_times import ChoiceFiles
from moe_plugin.tuning.decisions import KeptDecision

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def no_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Spares the hosts' imports (seconds each); `test_hosts` tests these. What this machine has
    measured is left out.
    """
    monkeypatch.setattr(packages, "host_rows", list)
    monkeypatch.setattr(packages, "ChoiceFiles", lambda: ChoiceFiles(tmp_path))


@pytest.fixture
def wrong_dispatcher(own_entries: None) -> None:
    class Wrong(RaggedDispatcher):
        """Loses a tenth of every output."""

        def combine(self, sent, plan):
            return 0.9 * super().combine(sent, plan)

    dispatchers.register("wrong")(Wrong)


def test_json_is_one_object(no_hosts: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["works"] and report["failed_imports"] == []
    checked = {(row["dispatcher"], row["ranks"]) for row in report["self_check"]}
    assert checked >= {(name, ranks) for name in dispatchers.names() for ranks in (1, 2)}


def test_text_names_the_sections_and_the_verdict(no_hosts: None,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("moe_plugin.comm")
    logger.setLevel(logging.NOTSET)
    assert main(["doctor", "--all"]) == 0
    assert logger.level == logging.NOTSET  # quiet for its self check alone
    text = capsys.readouterr().out
    for word in ("Devices", "Packages", "dispatcher", "Self check", "the layer works here",
                 "fairseq --optimizer adam", "--moe-fused-adam", "torch.optim.AdamW",
                 "torch.nn.RMSNorm", "torch._foreach_norm",
                 "vision: each epoch is a pass over all images"):
        assert word in text
    assert [line for line in text.splitlines() if len(line) >= 200] == []


def test_the_verdict_comes_first(monkeypatch: pytest.MonkeyPatch,
                                 capfd: pytest.CaptureFixture[str]) -> None:
    """Lists are behind `--all`."""
    monkeypatch.setattr(packages, "host_rows", list)  # imports of all hosts
    assert main(["doctor"]) == 0
    out, err = capfd.readouterr()
    check_short_answer(out, err)


def test_nothing_else_is_printed_as_a_user_starts_it(tmp_path: Path) -> None:
    """Imports, which a process of the tests has behind it, print nothing either."""
    done = subprocess.run([sys.executable, "-m", "moe_plugin.cli.main", "doctor"], cwd=tmp_path,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0
    check_short_answer(done.stdout, done.stderr)


def check_short_answer(out: str, err: str) -> None:
    lines = out.splitlines()
    assert err == ""
    assert lines[0].startswith("Verdict: the layer works here (")
    assert lines[2] == "Problems: none" and len(lines) < 40
    assert "cannot be selected" not in out and "doctor --all" in lines[-1]


def test_the_verdict_does_not_wait_for_the_hosts(monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    printed = []

    def slow() -> list:
        while not (text := capsys.readouterr().out):
            time.sleep(0.01)
        printed.append(text)
        return []

    monkeypatch.setattr(packages, "host_rows", slow)
    assert main(["doctor"]) == 0
    assert printed[0].startswith("Verdict: the layer works here") and "Problems" not in printed[0]


def test_problems_are_named(monkeypatch: pytest.MonkeyPatch, no_hosts: None,
                            capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = {"name": "fairseq", "version": "0.12.2", "state": "not available",
              "reason": "does not import: no module named x"}
    absent = {**broken, "name": "megatron", "version": None, "reason": "is not installed"}
    monkeypatch.setattr(packages, "host_rows", lambda: [broken, absent])
    monkeypatch.setattr(packages.functions, "why_not", lambda name: "no C compiler is found")
    monkeypatch.setattr(packages, "DRIVER", str(tmp_path))  # is there
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor"]) == 0  # the layer works
    problems = capsys.readouterr().out.split("Problems:\n")[1].split("\n\n")[0].splitlines()
    assert problems[0] == "  fairseq 0.12.2: does not import: no module named x"
    assert problems[1].startswith("  the driver of a GPU is loaded, but ")
    assert "  experts' silu: computed by torch: no C compiler is found, which is slower" in problems


def test_a_wrong_layer_is_found_and_the_exit_status_says_so(
        no_hosts: None, wrong_dispatcher: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("Verdict: the layer does NOT work here (")
    problem = text.split("Problems:\n")[1].splitlines()[0]
    assert problem == ("  self check, cpu float32, dispatch.name=wrong, 2 ranks: differs from "
                       "the dense computation by more than 0.0001")
    assert main(["doctor", "--all"]) == 1
    text = capsys.readouterr().out
    assert any("wrong" in line and "FAILED" in line for line in text.splitlines())


def test_a_crashing_layer_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MoELayer, "forward", lambda *args:
                        (_ for _ in ()).throw(RuntimeError("no rows today")))
    rows = selfcheck.check_rows([CPU])
    assert rows and all(not row["ok"] and "no rows today" in row["reason"] for row in rows)


def test_what_cannot_run_here_is_listed_with_its_reason(own_entries: None) -> None:
    dispatchers.register("elsewhere", why_not=lambda: "needs a quantum computer")(RaggedDispatcher)
    assert {"kind": "dispatcher", "name": "elsewhere", "reason": "needs a quantum computer"
            } in packages.missing_rows()
    assert "elsewhere" not in {row["dispatcher"] for row in selfcheck.check_rows([CPU])}


def test_missing_packages_get_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed_version", lambda package: None)
    rows = {row["name"]: row for row in packages.package_rows(has_gpu=False)}
    assert "megatron-core" in rows["megatron-core"][
        "install"] and "--no-deps fairseq==0.12.2" in rows["fairseq"]["install"]
    assert rows["apex"]["state"] == "not needed here (no GPU)" and rows["apex"]["install"] is None
    assert packages.package_rows(has_gpu=True)[-2]["install"] is not None
    setup = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    for name in ("fairseq", "megatron-core"):  # the versions that set-up installs
        assert all(word in setup for word in rows[name]["install"].split() if "==" in word)


def test_requirements_are_those_of_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.metadata, "requires",
                        lambda name: ['tensorboard>=2.14; extra == "observe"', "torch>=2.6"])
    assert packages.requirement("tensorboard") == "tensorboard>=2.14" and packages.requirement(
        "torch") == "torch>=2.6"
    assert packages.requirement("other") == "other"


def test_fairseq_needs_are_its_extra() -> None:
    stated = {
        packages.re.split(r"[<>=!~\[; ]", line)[0]
        for line in packages.metadata.requires("moe-plugin")
        if 'extra == "fairseq"' in line or "extra == 'fairseq'" in line
    }
    assert set(packages.FAIRSEQ_NEEDS) | {"cython"} == stated


def test_a_host_that_does_not_import_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "ADAPTER", {"broken": ("tqdm", "moe_plugin.no_such_module")})
    (row,) = packages.host_rows()
    assert row["state"] == "not available" and "No module named 'moe_plugin.no_such_module'" in row[
        "reason"]


def test_missing_hosts_are_reported_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed_version", lambda package: None)
    rows = packages.host_rows()
    assert [row["name"] for row in rows] == ["fairseq", "megatron", "transformers"]
    assert all(row["state"] == "not available" and "pip install" in row["install"] for row in rows)


def test_fused_parts_are_stated_with_the_reason(apex: list[str]) -> None:
    rows = {row["name"]: row for row in packages.fused_rows()}
    assert rows["fairseq --optimizer adam"]["state"] == "apex FusedAdam"
    assert rows["RMS norm"]["state"] == "apex FusedRMSNorm"
    assert rows["gradient scaling"]["reason"] == "amp_C.multi_tensor_scale imports"


def test_compiled_for_the_cpu_or_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.functions, "why_not",
                        lambda name: "no C compiler is found" if name == "silu" else None)
    rows = {row["name"]: row for row in packages.compiled()}
    assert rows["experts' silu"]["state"] == "not available"
    assert rows["experts' silu"]["what"] == "computed by torch: no C compiler is found"
    others = [row for name, row in rows.items() if name != "experts' silu"]
    assert len(others) >= 5 and {row["state"] for row in others} == {"active"}


def test_render_lists_what_is_missing(no_hosts: None) -> None:
    report = {
        "moe_plugin": "1", "python": "3", "platform": "p", "works": True, "self_check": [],
        "devices": [], "compiled": [], "hosts": [], "fused": [], "missing": [], "runs": [],
        "expert_compute_choices": [], "refused": [],
        "failed_imports": [{"module": "moe_plugin.x", "reason": "gone"}], "packages": [{
            "name": "triton", "version": None, "use": "kernels", "state": "missing",
            "install": "pip install triton"
        }]
    }
    text = render(report)
    assert "triton (kernels):\n    pip install triton" in text and ("moe_plugin.x does not import: "
                                                                    "gone") in text


def test_kept_decisions_are_listed_with_age_and_spread_and_forgotten_by_a_command(
        no_hosts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = ChoiceFiles()
    assert files.place() == tmp_path / "cache" / "moe-plugin" / "expert-compute"
    files.put(("a CPU: 64 rows an expert, of fused grouped", ()),
              KeptDecision("fused", "measured", 0.07))
    monkeypatch.setattr(packages, "ChoiceFiles", lambda: files)
    text = render({"hosts": [], **first(), **rest()})
    [line] = [line for line in text.splitlines() if "64 rows an expert" in line]
    assert "fused" in line and " ago" in line and line.rstrip().endswith("spread 7 %")
    assert main(["doctor", "--forget-decisions"]) == 0
    assert capsys.readouterr().out == f"1 kept decisions removed from {files.place()}\n"
    assert files.listed() == []


@pytest.mark.parametrize("named", ["", "relative/folder"])
def test_a_cache_folder_that_is_no_absolute_path_is_not_taken(
        named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ChoiceFiles().place().parent == tmp_path / ".cache" / "moe-plugin"
