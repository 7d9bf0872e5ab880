"""Damaged checkpoint files, loaded by each host's own code: the right state of a step that was
saved, or a named error on every rank.
"""

from __future__ import annotations

import importlib.util
import random
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.checkpoint.formats.plain import read_index
from scripts.emulate.damage import WAYS, damage, files_of
from tests.faults.cases import Row
from tests.faults.hosts import RANKS, Host, Plain

Load = Callable[[Path], tuple[int, Mapping[str, Tensor]]]


def damages(host: Host, folder: Path, count: int, seed: int = 0) -> list[Row]:
    """So many faults in the files that a run of this host left in `folder`."""
    world = 1 if isinstance(host, Plain) else RANKS
    done = host.server.run(world, _in_rank, type(host).__name__, host.arguments(folder, 8),
                           str(folder), count, seed, environment=host.environment(),
                           cwd=host.home, timeout_s=500.0)
    assert done.code == 0, done.log[-5000:]
    return [Row(host.name, *row) for row in done.results[0]]


def _in_rank(host: str, argv: list[str], folder: str, count: int, seed: int) -> list[tuple]:
    torch.set_num_threads(1)
    load, steps = _LOADERS[host](argv, Path(folder))
    scratch = Path(folder).with_name(Path(folder).name + " damaged")
    wanted: dict[int, Mapping[str, Tensor]] = {}
    for step in steps:
        found, state = load(_copied(Path(folder), scratch, step))
        assert found == step, (found, step)
        wanted[step] = {name: tensor.clone() for name, tensor in state.items()}
    rows, draw = [], random.Random(seed)
    for index in range(count):
        way, file_seed = WAYS[index % len(WAYS)], draw.randrange(1 << 30)
        rows.append(_one(load, Path(folder), scratch, way, file_seed, wanted))
    if dist.is_initialized():
        dist.barrier()
    shutil.rmtree(scratch, ignore_errors=True)
    return rows


def _one(load: Load, folder: Path, scratch: Path, way: str, seed: int,
         wanted: Mapping[int, Mapping[str, Tensor]]) -> tuple:
    """A row without its host: what, when, outcome, seconds, lost, wrong."""
    what, newest = _together(lambda: _damaged(folder, scratch, way, seed)), max(wanted)
    begin = time.monotonic()
    try:
        step, state = load(scratch)
        outcome, error = f"step {step} loaded", ""
        wrong = "" if step in wanted and _equal(state, wanted[step]) else "a wrong number"
    except ValueError as caught:  # CheckpointError is one
        step, outcome, error, wrong = newest, "named error", str(caught), ""
        if str(scratch) not in error or len(error) > 4000:
            wrong = f"the error names no file: {error[:300]}"
    except Exception as caught:  # noqa: BLE001 - what must not be is reported
        step, outcome, wrong = newest, "", f"{type(caught).__name__}: {str(caught)[:400]}"
    seconds = time.monotonic() - begin
    ends = [(outcome, wrong)] if not dist.is_initialized() else _gathered((outcome, wrong))
    wrong = next((text for _, text in ends if text), "")
    if len({end for end, _ in ends}) > 1:
        wrong = wrong or f"ranks differ: {ends}"
    if not outcome.startswith("named"):
        outcome = (f"{'newest' if step == newest else 'older'} checkpoint loaded, state right")
    return what, "between save and start", outcome, seconds, newest - step, wrong


def _damaged(folder: Path, scratch: Path, way: str, seed: int) -> str:
    draw = random.Random(seed)
    _copy(folder, scratch)
    files = [path for path in files_of(scratch) if path.suffix in _CHECKPOINT_FILES
             or path.name.startswith("latest")]
    while True:
        path = draw.choice(files)
        try:
            return f"{way}: {damage(path, way, draw.randrange(1 << 30)).split(':')[0]}"
        except ValueError:  # this file cannot be damaged so; another one
            files = [other for other in files if other != path]


_CHECKPOINT_FILES = (".pt", ".json", ".distcp", ".metadata")


def _together(work: Callable[[], str]) -> str:
    """What rank 0 does, and what it says of it, on all ranks."""
    if not dist.is_initialized():
        return work()
    dist.barrier()  # the others have read
    said = [work() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(said)
    return said[0]


def _gathered(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _copy(folder: Path, scratch: Path) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(folder, scratch)


def _copied(folder: Path, scratch: Path, step: int) -> Path:
    """An undamaged copy in which `step` is the newest."""

    def work() -> str:
        _copy(folder, scratch)
        latest = scratch / "latest_checkpointed_iteration.txt"
        if latest.exists():
            latest.write_text(str(step))
        for path in scratch.glob("checkpoint_last-rank-*.pt"):
            other = next(iter(scratch.glob(f"checkpoint_*_{step}-{path.name[16:]}")), None)
            if other is not None:
                shutil.copyfile(other, path)
        newest = scratch / "checkpoint" / "index.json"  # plain PyTorch's
        if newest.exists() and read_index(newest.parent)[0]["extra"]["step"] != step:
            shutil.rmtree(newest.parent)
        return ""

    _together(work)
    return scratch


def _equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted)


def _plain(argv: list[str], folder: Path) -> tuple[Load, list[int]]:
    from moe_plugin.checkpoint import load

    spec = importlib.util.spec_from_file_location("train_plain", Plain(folder).module)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    args = script.parse(argv)
    config = script.config_of(args)

    def loaded(path: Path) -> tuple[int, Mapping[str, Tensor]]:
        model = script.Model(config, args.layers)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        step = load(path / "checkpoint", model, optimizer)["step"]
        state = {**dict(model.named_parameters()), **{
            f"{index} {name}": value for index, values in optimizer.state.items()
            for name, value in values.items()}}
        return step, {str(index): x.detach() for index, x in enumerate(state.values())}

    folders = [folder / name for name in ("checkpoint.old", "checkpoint")]
    return loaded, [read_index(each)[0]["extra"]["step"] for each in folders]


def _fairseq(argv: list[str], folder: Path) -> tuple[Load, list[int]]:
    from moe_plugin.checkpoint.formats.fairseq import files
    from moe_plugin.hosts.fairseq import resume

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    wanted = {"num_experts": 4, "world_size": RANKS, "rank": rank, "expert_parallel_size": RANKS}

    def loaded(path: Path) -> tuple[int, Mapping[str, Tensor]]:
        name = resume.agree(str(path / f"checkpoint_last-rank-{rank}.pt"), wanted, dist.group.WORLD)
        state = files.read(name)
        moments = state["last_optimizer_state"]["state"].values()
        tensors = [*state["model"].values(), *(x for each in moments for x in each.values())]
        return state[files.MANIFEST]["num_updates"], {
            str(index): x for index, x in enumerate(tensors) if torch.is_tensor(x)
            and x.numel() > 1}  # fairseq's `_float_tensor` is uninitialized memory

    steps = {files.read(str(path))[files.MANIFEST]["num_updates"]
             for path in folder.glob("checkpoint*-rank-0.pt")}
    return loaded, sorted(steps)


def _megatron(argv: list[str], folder: Path) -> tuple[Load, list[int]]:
    from moe_plugin.hosts.megatron.compat.settings import script_arguments, training_module
    from tests.hosts.megatron.training import when_built

    run = when_built([word for word in argv if word != "--cpu"], lambda run: run)
    checkpointing = training_module("checkpointing")

    def loaded(path: Path) -> tuple[int, Mapping[str, Tensor]]:
        script_arguments()["load"] = str(path)
        step, _ = checkpointing.load_checkpoint(run.chunks, run.optimizer, run.scheduler)
        tensors = [x for x in run.model.state_dict().values() if torch.is_tensor(x)]
        return step, {str(index): x for index, x in enumerate(tensors)}

    steps = sorted(int(path.name[5:]) for path in folder.glob("iter_???????"))
    return loaded, steps


_LOADERS = {"Plain": _plain, "Fairseq": _fairseq, "Megatron": _megatron}
