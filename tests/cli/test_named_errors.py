"""Whatever is wrong with the arguments, the files or the disk: one line, status 1 or 2."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from moe_plugin.checkpoint.formats import all as checkpoint_formats  # noqa: F401 - registers
from moe_plugin.checkpoint.formats.base import formats
from moe_plugin.cli.main import COMMANDS, Command, main
from scripts.bench.studies import STUDIES

ROOT = Path(__file__).parents[2]
CONFIGS = shlex.quote(f"{ROOT}/configs")
CLUSTER = f"--cluster {CONFIGS}/clusters/a100_ib.yaml"
PLAN = (f"plan {CLUSTER} --model {CONFIGS}/plans/gpt_64_experts.yaml --device "
        f"{CONFIGS}/devices/a100_80g.yaml")
SMALL_PLAN = (f"plan {CLUSTER} --model {CONFIGS}/plans/small.yaml --device "
              f"{CONFIGS}/devices/a100_80g.yaml --nodes 1 --ranks-per-node 2")
EXPERTS = (f"--model {CONFIGS}/plans/small.yaml --device {CONFIGS}/devices/cpu_core.yaml")
HUGE = "9" * 5000
_OWN_CASES = {"layer", "kernels", "host", "all-to-all", "train", "forest", "overlap", "ensembles",
              "spill", "plan", "quality"}  # the other studies have options of one kind
WRONG = {
    "doctor": ["doctor extra", f"doctor --{HUGE}"],
    "audit": ["audit", "audit NONE", "audit FILE", "audit DIR", "audit PIPE",
              "audit plain --ranks 0", "audit plain --ranks x", "audit plain --ranks 99999999",
              "audit plain --timeout 0", "audit plain --tolerance -1",
              f"audit plain --ranks {HUGE}"],
    "corpus": ["corpus", "corpus --out FILE", "corpus --out FILE/x", "corpus --out DIR --size 0",
               f"corpus --out DIR --size {HUGE}", "corpus --out DIR --source NONE",
               "corpus --out DIR --size -1", "corpus --out PIPE"],
    "report": ["report", "report NONE", "report FILE", "report EMPTY", "report PIPE",
               "report RUN --output DIR", "report RUN --output PIPE", "report RUN --output LINK",
               "report RUN --output /dev/null", "report RUN --output NONE/report.html",
               "report RUN --output ''", "report BAD", f"report RUN --output {'x' * 300}"],
    "watch": ["watch NONE", "watch FILE", "watch EMPTY --once", "watch RUN --interval 0",
              "watch RUN --interval nan", "watch BAD --once", "watch NONE --json",
              "watch BAD --json"],
    "bench layer": ["bench layer --tokens 0", "bench layer --tokens 1000000000000",
                    "bench layer --experts 1000000000000", "bench layer --threads 0",
                    f"bench layer --model-dim {HUGE}", "bench layer --hidden-dim 1000000000000",
                    "bench layer --rounds 0", "bench layer --peers nobody --tokens 8",
                    "bench layer --top-k 99",
                    "bench layer --device cuda --tokens 8", "bench layer --threads 99999999"],
    "bench kernels": ["bench kernels --tokens 0", "bench kernels --experts 1000000000000",
                      "bench kernels --rounds -1", "bench kernels --dtype float8"],
    "bench host": ["bench host --ranks 0", "bench host --ranks 1,", "bench host --ranks x",
                   "bench host --ranks 3", "bench host --tokens 0", f"bench host --ranks {HUGE}",
                   "bench host --device cuda", "bench host --rounds 0", "bench host --out FILE",
                   "bench host --out PIPE", "bench host --redraw"],
    "bench all-to-all": ["bench all-to-all --emulate 2x", "bench all-to-all --emulate 0x2",
                         "bench all-to-all --emulate 99999999x2", "bench all-to-all --emulate 2x2 "
                         "--sizes 999999999999999GiB", "bench all-to-all --emulate 2x2 --sizes ,",
                         "bench all-to-all --emulate 2x2 --rate 0mbit", "bench all-to-all "
                         "--delay 2ms", "bench all-to-all "
                         "--emulate 2x100000", "bench all-to-all --plot DIR --emulate 2x2",
                         "bench all-to-all --emulate 2x2 --topology PIPE --sizes 0",
                         f"bench all-to-all --emulate {HUGE}x2"],
    "bench train": ["bench train", "bench train --host other", *(
        f"bench train --host {host} {rest}" for host in ("megatron", "fairseq") for rest in (
            "--shapes nothing", "--shapes 8x8x2x3x16", "--shapes 0x8x2x1x16", "--shapes ,",
            f"--shapes {HUGE}x8x2x1x16", "--ranks 0", "--ranks 99999999", "--steps 0",
            "--warm-up -1", "--emulate 2x", "--emulate 0x2", "--emulate 2x100000",
            "--emulate 2x2 --rate 0mbit", "--emulate 2x2 --ranks 2", "--out PIPE", "--out FILE",
            "--redraw"))],
    "bench peers": ["bench nothing", "bench peers --every many"],
    "bench overlap": ["bench overlap --kinds none"], "bench spill": ["bench spill --parts none"],
    "bench ensembles": ["bench ensembles --rows 1"], "bench plan": ["bench plan --out FILE"],
    "bench quality": ["bench quality --seeds 0", "bench quality --jobs 0", "bench quality --out "
                      "FILE", "bench quality --parts none", "bench quality --hosts none"],
    **{f"bench {name}": [f"bench {name} --out FILE", f"bench {name} --unknown"]
       for name in STUDIES if name not in _OWN_CASES},
    "calibrate": ["calibrate --out DIR", "calibrate --out PIPE", "calibrate --out NONE/x.yaml",
                  "calibrate --emulate 2x2 --out x.yaml --repeats 0", "calibrate --out LINK",
                  "calibrate --emulate 1000000x1 --out x.yaml", "calibrate --emulate x --out x"],
    "configs": ["configs NONE", "configs configs/moe/nothing.yaml", "configs ../README.md",
                "configs moe switch", f"configs {HUGE}", "configs PIPE"],
    "simulate all-to-all": ["simulate all-to-all", "simulate all-to-all --cluster NONE",
                            "simulate all-to-all --cluster DIR", "simulate all-to-all --cluster "
                            "PIPE", "simulate all-to-all --cluster BAD/steps.jsonl",
                            f"simulate all-to-all {CLUSTER} --ranks 0",
                            f"simulate all-to-all {CLUSTER} --ranks {HUGE}",
                            f"simulate all-to-all {CLUSTER} --ranks 999999999",
                            f"simulate all-to-all {CLUSTER} --ranks ''",
                            f"simulate all-to-all {CLUSTER} --sizes 1e400",
                            f"simulate all-to-all {CLUSTER} --plot PIPE",
                            f"simulate all-to-all {CLUSTER} --plot x.pdf"],
    "simulate routing": ["simulate routing", *(
        f"simulate routing {folder} {PLAN[5:]}" for folder in ("NONE", "FILE", "DIR", "BAD")), *(
        f"simulate routing DIR {PLAN[5:]} {rest}" for rest in (
            "--tokens 0", "--guests -1", "--replan 0", f"--nodes {HUGE}", "--ranks-per-node 0",
            "--steps 3", "--emulate 2x2 --steps 0", "--emulate 2x", f"--emulate {HUGE}x2",
            "--emulate 2x2 --nodes 2", "--emulate 2x2 --rate 0mbit", "--emulate 2x2",
            "--rate 1gbit"))],
    "plan": ["plan", f"{PLAN} --nodes 0", f"{PLAN} --nodes -1", f"{PLAN} --nodes 1000000000000",
             f"{PLAN} --ranks-per-node 0", f"{SMALL_PLAN} --top 0", f"{PLAN} --scale 0",
             f"{PLAN} --scale many", f"{PLAN} --scale 1 --experts-per-rank nan",
             f"{PLAN} --scale 1 --experts-per-rank inf", f"{SMALL_PLAN} --plot DIR",
             f"{SMALL_PLAN} --write FILE", f"{SMALL_PLAN} --write PIPE", f"{PLAN} --model NONE",
             f"{PLAN} --model DIR", f"{PLAN} --device BAD/steps.jsonl", f"{PLAN} --cluster BOMB",
             f"{PLAN} --scale 1000000000", f"{PLAN} --model HUGE", f"{PLAN} --memory 1GiB",
             "plan --memory 1GiB", "plan --profile FILE", "plan --memory lots --profile FILE",
             *(f"plan --memory 1GiB --profile {rest}" for rest in (
                 "NONE", "DIR", "FILE", "PIPE", "BOMB", "FILE --accumulate 1", "FILE --plot x.pdf",
                 "FILE --trace DIR", "FILE --weights-on disk", f"FILE {PLAN[5:]}",
                 "FILE --tokens 2")),
             *(f"plan --prefill {rest}" for rest in (
                 "64", f"64 --kernels FILE {EXPERTS}", f"x --kernels FILE {EXPERTS[:-9]}",
                 f"64 --kernels NONE {PLAN[5:]}", f"64 --kernels FILE {PLAN[5:]}")),
             *(f"plan --memory {rest}" for rest in (
                 f"1B {EXPERTS}", f"1GB --tokens 0 {EXPERTS}", f"1GB --link fast {EXPERTS}"))],
    "recommend": ["recommend", *(f"recommend --model {what}" for what in (
        "NONE", "FILE", "DIR", "EMPTY", "PIPE", "BOMB")), *(
        f"recommend --device cpu --model {CONFIGS}/plans/small.yaml {rest}" for rest in (
            "--out FILE", "--out PIPE", "--out out --nodes 0", "--out out --ranks-per-node -1",
            "--out out --nodes 1000000000000", f"--out out --nodes {HUGE}", "--out out --nics 0",
            "--out out --repeats 0", "--out out --top 0", "--out out --memory lots",
            "--out out --memory ''", "--out out --memory 1KiB", "--out out --host nobody",
            "--out out --host fairseq --script x.py"))],
    "schedule": ["schedule", *(f"schedule --topology {what}" for what in (
        "NONE", "FILE", "DIR", "EMPTY", "PIPE", "BAD/steps.jsonl", "BOMB", "nobody:2", "ring:0",
        f"ring:{HUGE}", "ring:4@0", "ring:4@-1", "dgx-a100:99999999", "torus:4x")), *(
        f"schedule --topology ring:4 {rest}" for rest in (
            "--trees 0", f"--trees {HUGE}", "--size 0", "--size lots", "--chunks 0", "--nodes 2",
            "--collective broadcast", "--overlap", "--json DIR", "--json --chunks 0",
            "--json PIPE", "--msccl LINK", "--svg DIR", "--html NONE/page.html"))],
    "profile-device": ["profile-device --device nowhere", "profile-device --device meta",
                       "profile-device --device cuda:77", "profile-device --model-dim 0",
                       "profile-device --model-dim 1000000000000", "profile-device --out DIR",
                       "profile-device --out NONE/device.yaml", "profile-device --kernels DIR",
                       "profile-device --model-dim 8 --hidden-dim 8 --kernels k --experts 0"],
    "emulate": ["emulate", "emulate 2 -- true", "emulate 0x1 -- true", "emulate 2x2 -- NONE",
                "emulate 1x999999 -- true", "emulate 2x1 --max-restarts -1 -- true",
                "emulate 2x1 --delay fast -- true"],
    "inspect": ["inspect", "inspect NONE", "inspect FILE", "inspect EMPTY", "inspect PIPE",
                "inspect BAD", "inspect FILE --from nobody", *(
                    f"inspect {what} --from {name}" for what in ("FILE", "DIR", "PIPE", "NONE")
                    for name in formats.names())],
    "reshard": ["reshard", "reshard FILE", "reshard NONE OUT", "reshard FILE OUT",
                "reshard DIR OUT --from plain", "reshard EMPTY OUT --ep 0",
                f"reshard FILE OUT --from plain --ep {HUGE}", "reshard DIR DIR --from hf",
                "reshard EMPTY OUT --to nobody", "reshard EMPTY OUT --dtype int8"],
    "upcycle": ["upcycle", "upcycle NONE OUT --experts 8 --top-k 2", "upcycle FILE OUT",
                "upcycle DIR OUT --experts 0 --top-k 2 --from hf",
                f"upcycle DIR OUT --experts 8 --top-k {HUGE} --from hf",
                "upcycle PIPE OUT --experts 8 --top-k 2", "upcycle DIR DIR --experts 8 --top-k 2",
                "upcycle DIR OUT --experts 8 --top-k 2 --shared 1"],
    "check-hf": ["check-hf", "check-hf NONE", "check-hf FILE", "check-hf EMPTY", "check-hf PIPE",
                 "check-hf DIR --tokens 0", "check-hf DIR --dtype int8"],
    "fault": ["fault", "fault kill", "fault nothing -- NONE", "fault kill --step 0 -- NONE",
              "fault kill --ranks x -- NONE", "fault slow --seconds -1 -- NONE",
              "fault kill --place nowhere -- NONE", f"fault kill --step {HUGE} -- NONE",
              "fault disk-full --bytes -1 -- NONE", "fault kill -- NONE"],
}


def _leaves(commands: Mapping[str, Command], above: str = "") -> Iterator[str]:
    for name, command in commands.items():
        if command.parts is not None:
            yield from _leaves(command.parts(), f"{above}{name} ")
        else:
            yield above + name


def test_every_command_is_here() -> None:
    assert set(WRONG) == set(_leaves(COMMANDS))


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Names in the arguments above, and what is there."""
    found = {name: tmp_path / name.lower() for name in (
        "FILE", "DIR", "PIPE", "LINK", "RUN", "EMPTY", "BAD", "BOMB", "HUGE")}
    for name in ("DIR", "RUN", "EMPTY", "BAD"):
        found[name].mkdir()
    found["FILE"].write_text("nothing")
    os.mkfifo(found["PIPE"])
    found["LINK"].symlink_to(found["FILE"])
    (found["RUN"] / "steps.jsonl").write_text('{"iteration": 1, "lm_loss": 2.0}\n')
    (found["BAD"] / "steps.jsonl").write_text('{"iteration": 1e400, "lm_loss": [[[\n')
    found["BOMB"].write_text("a: &a [1, 1]\n" + "".join(
        f"{name}: &{name} [{', '.join(f'*{before}' for _ in range(9))}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)))
    found["HUGE"].write_text(f"layers: {'9' * 400}\nmodel_dim: 8\nffn_dim: 8\n")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return {**found, "NONE": tmp_path / "none"}


@pytest.mark.parametrize("command", WRONG)
def test_wrong_arguments_end_with_one_line(command: str, places: dict[str, Path],
                                           capsys: pytest.CaptureFixture[str]) -> None:
    for line in WRONG[command]:
        argv = shlex.split(line)
        for name, path in places.items():
            argv = [word.replace(name, str(path)) if word.startswith(name) else word
                    for word in argv]
        status = _status(argv)
        said = capsys.readouterr().err
        assert status in (1, 2), line
        last = said.strip().splitlines()[-1] if said.strip() else ""
        assert last and "Traceback" not in said and len(last) < 1200, (line, said[-2000:])
        if "usage:" not in said:
            assert len(said.strip().splitlines()) == 1, (line, said[-2000:])
    assert places["FILE"].read_text() == "nothing" and places["LINK"].is_symlink()


def _status(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("line", [
    "report RUN", "corpus --out DIR --size 200000", f"{SMALL_PLAN} --write DIR",
    f"{SMALL_PLAN} --plot plan.svg", f"simulate all-to-all {CLUSTER} --plot all.png"])
def test_disks_that_are_full_or_read_only(line: str, code: int, places: dict[str, Path],
                                          monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    before = {str(p) for p in Path().rglob("*")}
    assert main([str(places.get(word, word)) for word in shlex.split(line)]) == 2
    said = capsys.readouterr().err
    assert "cannot be written" in said and ("disk is full" if code == errno.ENOSPC
                                            else "read-only") in said
    assert {str(p) for p in Path().rglob("*")} == before  # nothing half written stays


def test_a_defect_ends_with_one_line_and_its_kind(monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_: object) -> int:
        raise LookupError("x" * 5000)

    monkeypatch.setattr("moe_plugin.cli.runs.report", fails)
    assert main(["report", "somewhere"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("moe-plugin report: LookupError: ") and len(said) < 400
    with pytest.raises(LookupError):
        main(["--verbose", "report", "somewhere"])
