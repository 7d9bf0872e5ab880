"""Statistics files: each training pass counts once, evaluation not at all, ranks are summed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import options
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from moe_plugin.comm import LocalComm
from moe_plugin.hosts.fairseq.changed_settings import changed
from moe_plugin.hosts.fairseq.layers import run_settings
from moe_plugin.hosts.fairseq.run import batches_of, config_of, seams_of, total_updates
from moe_plugin.observe.features import LayerRecords
from moe_plugin.observe.history import read_run
from moe_plugin.training.run_features import make_run
from moe_plugin.utils.run_feature import StepFacts
from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, MOE, Corpus, run, train
from tests.hosts.fairseq.small import language_model, tokens


@pytest.mark.parametrize("recomputed", [False, True])
def test_each_training_pass_counts_once(tmp_path: Path, recomputed: bool) -> None:
    path = tmp_path / "stats.jsonl"
    model = language_model(checkpoint_activations=recomputed, moe_stats_jsonl=str(path),
                           moe_stats_interval="2")
    watcher = make_run(run_settings(model), seams_of(model, LocalComm()))
    for update in (1, 2):
        model.train()(tokens())[0].sum().backward()
        with torch.no_grad():
            model.eval()(tokens())
        watcher.after_step(StepFacts(update))
    (record,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (record["step"], record["layer"], record["calls"],
            record["tokens"]) == (2, "decoder.layers.1", 2, 2 * tokens().numel())


def test_without_a_file_nothing_is_collected() -> None:
    model = language_model()
    run = make_run(run_settings(model), seams_of(model, LocalComm()))
    assert run.find(LayerRecords) is None
    assert config_of(language_model(moe_freq=0)) is None


@pytest.mark.distributed
def test_training_on_two_ranks_writes_the_sum_over_ranks(corpus: Corpus, tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    result = train(corpus, tmp_path, f"--moe-stats-jsonl {path} --moe-stats-interval 2 "
                   "--moe-stats-timeline 3 --max-update 4 --disable-validation", 2).ok()
    assert result.log.count('"max-update": ["4", "0"]') == 1  # one rank names what differs
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    records, (timeline,) = [r for r in rows if "layer" in r], [r for r in rows if "timeline" in r]
    assert timeline["step"] == 3 and {"layers", "exchange"
                                      } <= {track for track, *_ in timeline["timeline"]}
    assert [r["step"] for r in records] == [2, 4] and all(r["calls"] == 4 for r in records)
    assert sum(r["tokens"] for r in records) == sum(step["wpb"] for step in result.steps)
    assert all(
        sum(r["load"]) == 2 * r["tokens"] and r["dropped"] == 0 and r["bytes_sent"] > 0
        for r in records)


@pytest.mark.parametrize("arch", ["moe_lm_small", "transformer_lm"])
def test_settings_that_differ_from_the_defaults_are_named(corpus: Corpus, arch: str) -> None:
    parser = options.get_training_parser()
    given = ["--max-update", "24", "--lr", "0.5", "--seed", "1", "--task", "language_modeling",
             "--criterion", "cross_entropy", "--optimizer", "adam", "--decoder-layers", "3"]
    args = options.parse_args_and_arch(parser, [str(corpus.lm), "--arch", arch, *given])
    found = changed(convert_namespace_to_omegaconf(args))
    assert found["max-update"] == ("24", "0") and found["lr"] == ("[0.5]", "[0.25]")
    assert found["decoder-layers"] == ("3", "6")
    assert not {"seed", "clip-norm", "adam-eps", "moe-capacity-factor", "device-id"} & set(found)
    assert ("moe-expert-count" in found) == (arch == "moe_lm_small")
    assert len(found) < 30
    assert not {"block-lr", "lenpen", "adam-betas", "stop-time-hours", "max-len-a"} & set(found)


@pytest.mark.parametrize("arch", ["transformer", "transformer_iwslt_de_en", "moe_transformer_tiny"])
def test_settings_of_translation_models_are_named(corpus: Corpus, arch: str) -> None:
    given = ["--task", "translation", "--criterion", "moe_label_smoothed_cross_entropy",
             "--optimizer", "adam", "--encoder-layers", "3", "--decoder-layers", "6", "--moe-freq",
             "2", "--moe-expert-count", "4", "--moe-capacity-factor", "2.0", "--lr", "0.5"]
    args = options.parse_args_and_arch(options.get_training_parser(),
                                       [str(corpus.mt), "--arch", arch, *given])
    found = changed(convert_namespace_to_omegaconf(args))
    wanted = {"moe-freq": ("2", "0"), "moe-expert-count": ("4", "0"), "lr": ("[0.5]", "[0.25]"),
              "moe-capacity-factor": ("2.0", "None"), "encoder-layers": ("3", "6")}
    assert {name: found[name] for name in wanted} == wanted
    # of what is not given only what the architecture sets
    sizes = {name for name in found if name.startswith(("encoder-", "decoder-"))}
    others = {"data", "user-dir", "label-smoothing"}
    assert set(found) - sizes - others == set(wanted) - {"encoder-layers"}
    assert "decoder-layers" not in found
    assert (sizes == {"encoder-layers"}) == (arch == "transformer")


def test_the_log_file_of_fairseq_has_a_report(corpus: Corpus, tmp_path: Path) -> None:
    flags = (f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --max-update 4 --no-save "
             f"--log-format json --log-interval 1 --log-file {tmp_path / 'logs' / 'run.log'}")
    run("fairseq-train", flags).ok()
    found = read_run(tmp_path)
    assert found.host == "fairseq" and found.finished and found.total_steps == 4
    assert [r.step for r in found.steps] == [1, 2, 3, 4] and all(r.loss for r in found.steps)
    assert found.steps[-1].valid_loss and (found.changed or {})["moe-freq"][1] == "0"
    # as the command has them: none that the architecture or torchrun sets
    changed, given = found.changed or {}, [word[2:] for word in flags.split() if word[:2] == "--"]
    assert set(changed) <= set(given) and changed["no-save"] == ("on", "off")
    assert changed["max-update"] == ("4", "0")
    assert changed["log-file"][0] == f"{tmp_path}/logs/run.log"


@pytest.mark.parametrize(("max_update", "max_epoch", "batches", "update_freq", "total"), [
    (100, 0, 0, [1], 100), (0, 0, 40, [1], None), (0, 3, 41, [1], 123), (0, 3, 41, [1, 4], 63),
    (50, 3, 41, [1], 50), (200, 1, 41, [2, 9], 21), (0, 3, 0, [1], None)])
def test_a_run_ends_by_updates_or_epochs(max_update: int, max_epoch: int, batches: int,
                                         update_freq: list[int], total: int | None) -> None:
    cfg = SimpleNamespace(optimization=SimpleNamespace(
        max_update=max_update, max_epoch=max_epoch, update_freq=update_freq))
    data = torch.utils.data.TensorDataset(torch.zeros(batches))
    epoch = EpochBatchIterator(data, None, [[i] for i in range(batches)])
    assert total_updates(cfg, batches_of(epoch)) == total
    assert batches_of(iter([])) == 0
