"""The shell scripts: they parse, explain themselves, refuse what they do not know, and start what
they say.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.text import documents

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SHELL = sorted(SCRIPTS.glob("*.sh"))
OURS = ("quickstart.sh", "setup.sh", "test.sh")


def bash(*args: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", *args], capture_output=True, text=True, check=False, **kwargs)


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_parses(path: Path) -> None:
    assert bash("-n", str(path)).returncode == 0


@pytest.mark.parametrize("name", OURS)
def test_help_explains_and_does_nothing(name: str) -> None:
    done = bash(str(SCRIPTS / name), "--help")
    assert done.returncode == 0 and f"bash scripts/{name}" in done.stdout
    assert "--venv DIR" in done.stdout


def test_setup_refuses_an_unknown_option() -> None:
    done = bash(str(SCRIPTS / "setup.sh"), "--vnev", "x")
    assert done.returncode == 1 and "unknown option --vnev" in done.stderr


def test_setup_refuses_a_python_that_is_none(tmp_path: Path) -> None:
    done = bash(str(SCRIPTS / "setup.sh"), "--venv", str(tmp_path / "v"), "--python", "/bin/false")
    assert done.returncode == 1 and "--python /bin/false is not Python 3.10 or newer" in done.stderr
    assert not (tmp_path / "v").exists()


def test_uv_finds_packages_where_pip_does(tmp_path: Path) -> None:
    """Sources of pip's settings, each once; values may be separated by new lines."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/usr/bin/env bash\ncat <<'END'\n:env:.cert='/x'\n"
                      ":env:.find-links='/opt/wheels'\nglobal.find-links='/opt/wheels'\n"
                      "global.extra-index-url='\\nfile:///a\\nfile:///b c'\nEND\n")
    python.chmod(0o755)
    text = (SCRIPTS / "setup.sh").read_text()
    begin = text.index("sources_of_pip() {")
    function = text[begin:text.index("\n}\n", begin) + 3]
    done = bash("-c", f'VENV="{tmp_path}"\n{function}sources_of_pip')
    assert done.stdout.splitlines() == ["UV_EXTRA_INDEX_URL=file:///a file:///b c",
                                        "UV_FIND_LINKS=/opt/wheels"], done


def test_a_failing_step_shows_the_end_of_its_log(tmp_path: Path) -> None:
    code = (f'. "{SCRIPTS}/lib.sh"; step "the step" "{tmp_path}/log" bash -c "echo no space left; '
            'exit 7" || echo "status $?"')
    done = bash("-c", code)
    assert "the step" in done.stdout and "failed" in done.stdout and "status 7" in done.stdout
    assert "no space left" in done.stderr and str(tmp_path / "log") in done.stderr


def test_a_good_step_is_one_line(tmp_path: Path) -> None:
    done = bash("-c", f'. "{SCRIPTS}/lib.sh"; step "the step" "{tmp_path}/log" echo hidden')
    assert len(done.stdout.splitlines()) == 1 and "hidden" not in done.stdout and "hidden" in (
        tmp_path / "log").read_text()


def fake_slurm(folder: Path, nodes: int) -> dict[str, str]:
    """`scontrol` and `srun` for one machine: srun starts the command once a node, at the same time.
    """
    folder.mkdir()
    scripts = {
        "scontrol": "echo 127.0.0.1",
        "srun": 'pids=(); for n in $(seq "$SLURM_NNODES"); do "$@" & pids+=($!); done; rc=0; for p '
                'in "${pids[@]}"; do wait $p || rc=$?; done; exit $rc'
    }
    for name, body in scripts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": str(nodes), "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1",
        "VENV": sys.prefix, "OMP_NUM_THREADS": "1"
    }


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.distributed
def test_slurm_megatron_trains_on_two_nodes(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(documents(10))
    subprocess.run([
        sys.executable, "-m", "moe_plugin.hosts.megatron.data", "--input",
        str(text), "--output-prefix",
        str(tmp_path / "data")
    ], check=True, capture_output=True)
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --num-experts 2 "
        "--max-position-embeddings 32 --vocab-size 257 --eval-iters 0 --num-workers 0 "
        "--expert-model-parallel-size 2 --split 100,0,0 --log-interval 1 "
        "--micro-batch-size 1 --train-iters 2 --lr 0.001 --disable-bias-linear")
    done = bash(str(SCRIPTS / "slurm_megatron.sh"), str(tmp_path / "data"), *flags.split(),
                "--log-file", str(tmp_path / "log"), env=fake_slurm(tmp_path / "bin",
                                                                    2), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"iteration": 2' in (tmp_path / "log").read_text()


@pytest.mark.parametrize("name", ["slurm_fairseq.sh", "slurm_megatron.sh"])
def test_slurm_scripts_start_one_torchrun_a_node(name: str, tmp_path: Path) -> None:
    env = fake_slurm(tmp_path / "bin", 2)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").write_text(
        '#!/usr/bin/env bash\necho "$SRUN_CPUS_PER_TASK $SLURM_KILL_BAD_EXIT '
        '$TORCH_DISABLE_SHARE_RDZV_TCP_STORE $@"\n')
    (tmp_path / "venv" / "bin" / "python").chmod(0o755)
    env = {**env, "VENV": str(tmp_path / "venv")}
    done = bash(str(SCRIPTS / name), "the data", "--lr", "0.1",
                env={**env, "SLURM_CPUS_PER_TASK": "32"})
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second and first.startswith("32 1 1 ") and first.endswith("--lr 0.1")
    for words in ("--nnodes 2 --nproc_per_node 1 --max-restarts 3",
                  "--rdzv_endpoint 127.0.0.1:29507"):  # of job 7
        assert words in first
    other = bash(str(SCRIPTS / name), "x", env={**env, "RESTARTS": "0", "PORT": "4000"}).stdout
    assert "--max-restarts 0" in other and "127.0.0.1:4000" in other
    saves = "--save-dir" if "fairseq" in name else "--save"
    for given in ([saves, "a run"], [f"{saves}=a run"]):
        words = bash(str(SCRIPTS / name), "x", *given, env=env, cwd=tmp_path).stdout
        assert "--moe-stats-jsonl a run/stats.jsonl" in words
        assert ("--log-file a run/train.log" in words) == (tmp_path / "a run").is_dir() == (
            "fairseq" in name)  # Megatron's log is in --save by itself
    assert "--moe-stats-jsonl" not in other


@pytest.mark.parametrize("name", ["slurm_fairseq.sh", "slurm_megatron.sh"])
def test_slurm_scripts_say_what_is_missing(name: str, tmp_path: Path) -> None:
    env = fake_slurm(tmp_path / "bin", 2)
    for words, given, message in (
            ([], env, f"usage: sbatch scripts/{name}"),
            (["x"], {**env, "SLURM_JOB_NODELIST": ""}, f"Submit it with sbatch scripts/{name} x"),
            (["x"], {**env, "VENV": str(tmp_path)}, "has no bin/python. Submit from")):
        done = bash(str(SCRIPTS / name), *words, env=given)
        assert done.returncode == 2 and message in done.stderr, done.stderr


def test_lib_finds_the_repository_from_a_path_with_blanks(tmp_path: Path) -> None:
    folder = tmp_path / "a folder" / "scripts"
    folder.mkdir(parents=True)
    shutil.copy(SCRIPTS / "lib.sh", folder)
    done = bash("-c", f'. "{folder}/lib.sh"; echo "$ROOT"', cwd="/")
    assert done.stdout.strip() == str(tmp_path / "a folder")
