"""`--weights-on host`: the numbers of a run whose weights stay on the device, to the last bit; the
log of layers that recompute or swap their activations is that of layers that keep them.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.language_modeling import LanguageModelingTask

from moe_plugin.hosts.fairseq.streamed import check
from moe_plugin.observe.history import read_run
from moe_plugin.planner.offload.schedule import load_profile
from tests.hosts.fairseq import small
from tests.hosts.fairseq.attacks import poison
from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, MOE, Corpus, Result, run

_RUN = "--update-freq 2 --save-interval-updates 3 --no-epoch-checkpoints --valid-subset test"
_SGD = f"{LANGUAGE_MODEL} {_RUN}"
_ADAM = _SGD.replace("--optimizer sgd --momentum 0.9 --lr 0.1",
                     "--optimizer adam --weight-decay 0.1 --lr 0.01").replace(
                         "--lr-scheduler fixed", "--lr-scheduler polynomial_decay "
                         "--warmup-updates 2 --total-num-update 10")
_TIMES = {"wps", "ups", "wall", "train_wall"}
_FILES = ("checkpoint_1_3.pt", "checkpoint_last.pt")


def train(corpus: Corpus, folder: Path, flags: str, updates: int = 6) -> Result:
    return run("fairseq-train", f"{corpus.lm} {flags} {MOE} {DROPLESS} --save-dir {folder} "
               f"--max-update {updates}").ok()


def numbers(result: Result) -> list[Any]:
    """Of training, without times, and of validation."""
    valid = re.findall(r'"test_loss": "[\d.]+"', result.log)
    assert valid
    return [{name: value for name, value in step.items() if name not in _TIMES}
            for step in result.steps] + valid


def state(path: Path) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's state, flat."""
    file = torch.load(path, weights_only=False)
    model = {name: x for name, x in file["model"].items()
             if not name.endswith("_float_tensor")}  # fairseq leaves its value open
    return flat({"model": model, "state": file["last_optimizer_state"]["state"]})


def flat(values: dict[Any, Any], before: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, x in values.items():
        place = f"{before}/{name}"
        found |= flat(x, place) if isinstance(x, dict) else {place: torch.as_tensor(x)}
    return found


def same_states(one: Path, other: Path) -> None:
    mine, theirs = state(one), state(other)
    assert mine.keys() == theirs.keys()
    assert [name for name, x in mine.items() if not torch.equal(x, theirs[name])] == []


@pytest.mark.parametrize(("flags", "host"), [
    (_SGD, "--weights-memory 1MiB"), (_ADAM, ""), (f"{_ADAM} --moe-fused-adam", "")])
def test_a_run_and_its_files_are_those_of_the_device(corpus: Corpus, tmp_path: Path, flags: str,
                                                     host: str) -> None:
    device = train(corpus, tmp_path / "device", flags)
    streamed = train(corpus, tmp_path / "host", f"{flags} --weights-on host {host}")
    assert "streamed in 4 parts" in streamed.log
    assert ("planned for 1.0 MiB" in streamed.log) == bool(host)
    assert len(streamed.steps) == 6 and numbers(streamed) == numbers(device)
    for name in _FILES:
        same_states(tmp_path / "host" / name, tmp_path / "device" / name)


def test_runs_go_on_from_the_files_of_each_other(corpus: Corpus, tmp_path: Path) -> None:
    """And a streamed run with dropout from its own, to the bits of one that nothing stopped."""
    whole, parts, other = tmp_path / "whole", tmp_path / "parts", tmp_path / "other"
    flags = f"{_ADAM} --weights-on host --dropout 0.1"
    train(corpus, whole, flags)
    train(corpus, parts, flags, 3)
    first = numbers(train(corpus, parts, flags))  # from where it stopped
    assert first[0]["num_updates"] == 4
    same_states(whole / _FILES[1], parts / _FILES[1])
    device = train(corpus, other, f"{_ADAM} --restore-file {whole}/{_FILES[0]}")
    host = train(corpus, tmp_path / "back", f"{_ADAM} --weights-on host "
                 f"--restore-file {whole}/{_FILES[0]}")
    assert len(host.steps) == 3 and numbers(host) == numbers(device)
    same_states(tmp_path / "back" / _FILES[1], other / _FILES[1])


def test_a_step_that_is_not_finite_is_skipped_as_on_the_device(corpus: Corpus,
                                                               tmp_path: Path) -> None:
    """Its weights, its optimizer's state and the number of updates do not change."""
    runs = [run("fairseq-train", f"{corpus.lm} {_ADAM} {MOE} {DROPLESS} --update-freq 1 "
                f"--max-update 3 --save-dir {tmp_path / where} --weights-on {where}",
                attack=partial(poison, 2)).ok()
            for where in ("device", "host")]
    assert numbers(runs[0]) == numbers(runs[1]) and len(runs[1].steps) == 3
    assert "step 2 skipped on all ranks" in runs[1].log
    same_states(tmp_path / "host" / _FILES[1], tmp_path / "device" / _FILES[1])


def test_tied_embeddings_stay_on_the_device_and_its_files_are_evaluated(corpus: Corpus,
                                                                        tmp_path: Path) -> None:
    """To the bit with one batch a step: with more the gradient is summed in another order."""
    flags = f"{_ADAM} --share-decoder-input-output-embed --update-freq 1"
    device = train(corpus, tmp_path / "device", flags, 3)
    host = train(corpus, tmp_path / "host", f"{flags} --weights-on host", 3)
    assert numbers(host) == numbers(device)
    same_states(tmp_path / "host" / _FILES[1], tmp_path / "device" / _FILES[1])
    losses = [re.findall(r"Loss \(base 2\): ([\d.]+)", run(
        "fairseq-eval-lm", f"{corpus.lm} --path {tmp_path / where / _FILES[1]} --user-dir "
        "moe_plugin --cpu --num-workers 0 --batch-size 4 --tokens-per-sample 32").ok().log)
        for where in ("device", "host")]
    assert losses[0] == losses[1] and len(losses[0]) == 1


@pytest.mark.parametrize(("flags", "named"), [
    ("--distributed-world-size 2", "2 processes"), ("--amp", "--amp"),
    ("--memory-efficient-fp16", "--optimizer sgd with --memory-efficient-fp16"),
    ("--memory-efficient-bf16 --optimizer adam --moe-average-every 5 --moe-lighthouse http://a:1",
     "--moe-average-every with --memory-efficient-fp16"),
    ("--optimizer adagrad", "--optimizer adagrad"), ("--store-ema", "--store-ema"),
    ("--optimizer adam --fp16-adam-stats", "--fp16-adam-stats"),
    ("--write-checkpoints-asynchronously", "--write-checkpoints-asynchronously"),
    ("--ddp-backend fully_sharded", "--zero-sharding os and --ddp-backend fully_sharded"),
    ("--checkpoint-activations", "--checkpoint-activations"),
    ("--adaptive-softmax-cutoff 8,16", "--adaptive-softmax-cutoff"),
    ("--moe-pre-gate 1", "--moe-pre-gate"),
    ("--moe-dispatch bounded", "--moe-dispatch bounded"),
    ("--moe-activations recompute", "--moe-activations recompute"),
    ("--moe-lighthouse http://a:1", "--moe-lighthouse without --moe-average-every"),
    ("--moe-average-every 5", "--moe-average-every 5 without --moe-lighthouse"),
    ("--moe-check-twins 5", "--moe-votes and --moe-check-twins"),
])
def test_what_cannot_stream_is_named(flags: str, named: str) -> None:
    base = LANGUAGE_MODEL
    if "--optimizer" in flags:
        base = base.replace("--optimizer sgd --momentum 0.9", "")
    words = f"data {base} {MOE} --weights-on host {flags}".split()
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(
        options.get_training_parser(), words))
    own = {name: value for name, value in cfg.model.items()
           if name.startswith("moe_") or name in ("weights_on", "checkpoint_activations")}
    task = LanguageModelingTask(cfg.task, small.dictionary())
    model = small.language_model(**own)
    with pytest.raises(ValueError, match=f"--weights-on host does not fit {re.escape(named)}"):
        check(cfg, task, model, torch.nn.Identity())


def test_translation_models_cannot_stream() -> None:
    with pytest.raises(ValueError, match="host does not fit fairseq's translation models"):
        small.translation_model(weights_on="host")


# a second expert is drawn, as by default
KEEP = (f"{LANGUAGE_MODEL} {MOE} {DROPLESS} --moe-second-expert-policy sampling --dropout 0.1 "
        "--max-update 5 --no-save")


@pytest.mark.distributed
def test_the_log_is_that_of_keeping(corpus: Corpus, tmp_path: Path) -> None:
    def train(flags: str) -> list[dict]:
        done = run("fairseq-train", f"{corpus.lm} {KEEP} {flags} --save-dir {tmp_path}",
                   ranks=2).ok()
        assert ("Pre-gates choose the experts" in done.log) == ("--moe-pre-gate" in flags)
        return [{name: step[name] for name in ("loss", "inner_loss", "moe_gate_loss", "gnorm")}
                for step in done.steps]

    kept, profile = train(""), tmp_path / "profile.json"
    assert len(kept) == 5
    swap = f"--moe-activation-path {tmp_path} --moe-activation-smallest 0"
    stats = f"--moe-stats-jsonl {tmp_path}/stats/stats.jsonl --moe-stats-interval 1"
    assert train(f"--moe-activations recompute,swap {swap} --ddp-backend legacy_ddp {stats}"
                 ) == kept
    copied = read_run(tmp_path / "stats").copies["activations"]
    assert copied and all(record.bytes > 0 for record in copied)
    # its first step swaps, up to five recompute until times agree, the others do as planned
    pre_gates = "--moe-freq 1 --moe-pre-gate 1 --max-update 9"
    assert train(f"{pre_gates} --moe-activations auto --moe-activation-memory 1MiB {swap} "
                 f"--moe-activation-profile {profile}") == train(pre_gates)
    assert [block.name for block in load_profile(profile).blocks] == [
        "decoder.layers.0", "decoder.layers.1"]


def test_activations_that_do_not_fit_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    done = run("fairseq-train", f"{corpus.lm} {KEEP} --moe-activations swap "
               f"--checkpoint-activations --save-dir {tmp_path}")
    assert "offload.activations='swap' does not fit --checkpoint-activations" in done.log
    done = run("fairseq-train", f"{corpus.lm} {KEEP} --moe-activations keep,keep,swap "
               f"--save-dir {tmp_path}")
    assert "has 3 policies, but the model has 2 layers: use one policy for all" in done.log
