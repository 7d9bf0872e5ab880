"""Evaluation by several processes, which share out the batches and the experts."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.comm import Comm, run_simulated
from moe_plugin.hosts.fairseq.groups import Evaluation, Turns, evaluating
from moe_plugin.hosts.fairseq.layers import moe_layers
from moe_plugin.hosts.fairseq.resume import part_state
from tests.hosts.fairseq.conftest import Corpus, Result, run, run_alone, run_on_its_own_ranks
from tests.hosts.fairseq.small import language_model

EXPERTS = "decoder.layers.1.moe_layer.moe.experts."


@pytest.mark.parametrize("seed", range(3))
def test_ranks_with_other_calls_compute_each_layer_together_and_end_together(seed: int) -> None:
    calls = [[2, 0, 1, 1, 0, 2, 2], [0, 0], []]
    for rank, own in enumerate(calls):
        random.Random(f"{seed} {rank}").shuffle(own)

    def evaluate(comm: Comm) -> list[int]:
        turns, tokens = Turns(comm), []

        def call(layer: int, given: int) -> None:
            layers, total = comm.all_reduce(torch.tensor([layer, given])).tolist()
            assert layers == layer * comm.size  # all ranks are in the same layer
            tokens.append(total)

        for number in range(3):
            assert turns.add_layer(lambda number=number: call(number, 0)) == number
        for layer in calls[comm.rank]:
            turns.wait_for(layer)
            call(layer, 1)
        turns.end()
        return tokens

    everyone = run_simulated(3, evaluate)
    assert everyone[0] == everyone[1] == everyone[2]
    assert sum(everyone[0]) == 9 and 0 not in everyone[0]


def test_experts_are_spread_over_as_many_ranks_as_fit() -> None:
    sizes = [(1, 4), (2, 4), (3, 4), (6, 4), (8, 4), (4, 8)]
    assert [Evaluation(ranks).expert_ranks(experts) for ranks, experts in sizes] == \
        [1, 2, 1, 2, 4, 4]
    assert Evaluation(4, asked=2).expert_ranks(4) == 2
    assert Evaluation(8, asked=8).expert_ranks(4) == 8
    with pytest.raises(ValueError, match=r"=3 is out of bounds. It must divide the 4 evaluating"):
        Evaluation(4, asked=3).expert_ranks(4)


def test_the_network_of_the_ranks_that_trained_is_not_asked_for() -> None:
    settings = {"moe_collectives": "auto", "moe_network": "not_here.yaml"}
    with evaluating():
        model = language_model(**settings)
    assert moe_layers(model)[0].moe_layer.moe.config.comm.network is None
    assert moe_layers(language_model(**settings))[0].moe_layer.moe.config.comm.network is not None


@pytest.mark.parametrize("settings, words", [
    ({"moe_parallel_r": "2"}, "parallel.r=2"),
    ({"moe_spill": "everywhere", "moe_speeds": "1,0.5"}, "parallel.spill='everywhere', "
                                                         "parallel.speeds='1,0.5'"),
    ({"moe_topology": "not_here.yaml"}, "comm.topology='not_here.yaml'")])
def test_settings_of_the_ranks_that_trained_are_left_out(
        settings: dict[str, str], words: str, caplog: pytest.LogCaptureFixture) -> None:
    with evaluating(), caplog.at_level("INFO", logger="moe_plugin"):
        model = language_model(**settings)
    assert f"which describe the ranks of the training: {words}" in caplog.text
    config = moe_layers(model)[0].moe_layer.moe.given
    assert (config.parallel.r, config.parallel.spill, config.parallel.speeds,
            config.comm.topology) == (None, None, None, "detect")
    with evaluating():
        gathering = language_model(moe_parallel_r="0")
    assert moe_layers(gathering)[0].moe_layer.moe.given.parallel.r == 0
    if "moe_parallel_r" in settings:  # as it was in training
        with pytest.raises(ValueError, match="parallel.r=2 is not possible with 4 experts on 1"):
            language_model(**settings)


@pytest.mark.distributed
def test_a_process_loads_its_experts_alone(ep2: tuple[Path, Result]) -> None:
    path = str(ep2[0] / "checkpoint_last-rank-0.pt")
    whole = part_state(path)
    assert whole[EXPERTS + "w_in_LDF"].shape[0] == 4
    for size in (2, 4, 8):
        parts = [part_state(path, rank, size) for rank in range(size)]
        assert [part[EXPERTS.removesuffix("experts.") + "_extra_state"]["ep_rank"]
                for part in parts] == list(range(size))
        for name in ("w_in_LDF", "bias_out_LD"):
            axis = 0 if size <= 4 else {"w_in_LDF": 2}.get(name)
            if axis is not None:
                held = [part[EXPERTS + name] for part in parts]
                assert sum(each.numel() for each in held) == whole[EXPERTS + name].numel()
                found = torch.cat(held) if size <= 4 else torch.cat(
                    [torch.cat(held[at:at + 2], 2) for at in range(0, 8, 2)])
                assert torch.equal(found, whole[EXPERTS + name])


def evaluation(corpus: Corpus, home: Path) -> str:
    return f"{corpus.lm} --user-dir moe_plugin --cpu --path {home / 'checkpoint_last.pt'}"


def scores(result: Result) -> list[list[float]]:
    """Loss and perplexity, which the first process tells."""
    lines = re.findall(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", result.ok().log)
    return [[float(number) for number in line] for line in lines]


@pytest.mark.distributed
def test_scores_of_several_processes_are_those_of_one(corpus: Corpus,
                                                      ep2: tuple[Path, Result]) -> None:
    """15 batches for 2 ranks; one for 4, of which 3 have none."""
    arguments = (f"{evaluation(corpus, ep2[0])} --gen-subset valid --tokens-per-sample 32 "
                 "--num-workers 0")

    def size(result: Result) -> int:
        [number, *others] = set(re.findall(r"num. model params: ([\d,]+)", result.log))
        assert not others
        return int(number.replace(",", ""))

    alone = run("fairseq-eval-lm", f"{arguments} --batch-size 4")
    [wanted] = scores(alone)
    experts = sum(value.numel() for name, value in part_state(
        str(ep2[0] / "checkpoint_last-rank-0.pt")).items() if name.startswith(EXPERTS))
    for ranks, batch in ((2, 4), (4, 64)):
        found = run("fairseq-eval-lm", f"{arguments} --batch-size {batch}", ranks=ranks)
        assert scores(found) == [pytest.approx(wanted, abs=1.1e-2, rel=2e-5)]
        assert size(alone) - size(found) == experts - experts // ranks
    some = [scores(run("fairseq-eval-lm", f"{arguments} --batch-size 4 --max-valid-steps 3",
                       ranks=ranks))[0] for ranks in (1, 2)]
    assert some[1] == pytest.approx(some[0], abs=1.1e-2, rel=2e-5) != wanted


def validated(result: Result) -> list[dict[str, float]]:
    """Numbers of each subset, as each process tells them; the same are next to each other."""
    lines = re.findall(r"\| (\w+) \| (valid on .*)", result.ok().log)
    found = [{name: float(value) for name, value in re.findall(r"(\w+) ([\d.]+)(?: |$)", line)
              if name in ("inner_loss", "loss", "ppl", "moe_gate_loss")} for _, line in lines]
    return sorted(found, key=lambda one: one["loss"])


@pytest.mark.distributed
@pytest.mark.parametrize("overrides", [
    "", "'moe_dispatch':'padded','moe_capacity_factor':'1.0'",
    "'moe_expert_parallel_size':1"])
def test_validation_by_several_processes_is_that_of_one(corpus: Corpus, overrides: str,
                                                        ep2: tuple[Path, Result]) -> None:
    """Also with a capacity, which is that of a process's own batch."""
    arguments = (f"{evaluation(corpus, ep2[0])} --task language_modeling --batch-size 6 "
                 f"--valid-subset valid,test --model-overrides {{{overrides}}}")
    wanted = validated(run("fairseq-validate", arguments))
    assert len(wanted) == 2 and "inner_loss" in wanted[0]
    found = validated(run("fairseq-validate", arguments, ranks=2))
    assert found == [pytest.approx(one, abs=2.1e-3) for one in wanted for _ in range(2)]


@pytest.mark.distributed
def test_overrides_that_a_checkpoint_does_not_know(corpus: Corpus, tmp_path: Path,
                                                   ep2: tuple[Path, Result]) -> None:
    """Of no setting: refused. Of one that an older release had not: they count."""
    for rank in range(2):
        state = files.read(str(ep2[0] / f"checkpoint_last-rank-{rank}.pt"))
        assert state["cfg"]["model"].pop("moe_dispatch") is not None
        files.write(state, str(tmp_path / f"checkpoint_last-rank-{rank}.pt"))
    arguments = (f"{evaluation(corpus, tmp_path)} --task language_modeling --batch-size 6 "
                 "--model-overrides")
    for wrong in ("{'moe_dispatc':'padded'}", "{'model':{'moe_dispatc':'padded'}}"):
        run("fairseq-validate", f"{arguments} {wrong}").failed_with(
            "--model-overrides: 'moe_dispatc' is not a setting; did you mean moe_dispatch?")
    run("fairseq-validate", f"{arguments} {{'moe_dispatch':'nothing'}}").failed_with("'nothing'")
    found = run("fairseq-validate", f"{arguments} {{'moe_dispatch':'ragged'}}").ok()
    assert "lacks the setting moe_dispatch of a newer release; --model-over" in found.log


@pytest.mark.distributed
def test_generation_says_that_rows_do_not_fit(corpus: Corpus, ep2: tuple[Path, Result]) -> None:
    bounded = "{'moe_dispatch':'bounded','moe_parallel':'fixed','moe_max_rows_factor':'0.4'}"
    run("fairseq-generate",
        f"{evaluation(corpus, ep2[0])} --task language_modeling --gen-subset test "
        "--tokens-per-sample 32 --sample-break-mode eos --beam 2 --max-len-b 4 "
        f"--model-overrides {bounded}", ranks=2).failed_with("Raise dispatch.max_rows_factor")


def hypotheses(text: str) -> dict[str, tuple[float, str]]:
    """Score and words of each sentence."""
    return {number: (float(score), words) for number, score, words in re.findall(
        r"^H-(\d+)\t(\S+)\t(.*)$", text, re.MULTILINE)}


def same(found: dict[str, tuple[float, str]], wanted: dict[str, tuple[float, str]]) -> None:
    assert found.keys() == wanted.keys()
    for number, (score, words) in wanted.items():
        assert found[number][1] == words
        assert found[number][0] == pytest.approx(score, abs=1e-4)


@pytest.mark.distributed
def test_hypotheses_of_several_processes_are_those_of_one(corpus: Corpus, tmp_path: Path,
                                                          ep2: tuple[Path, Result]) -> None:
    """Their numbers of batches and decoding steps differ; with one batch, a rank has none."""
    arguments = (f"{evaluation(corpus, ep2[0])} --task language_modeling --gen-subset test "
                 "--tokens-per-sample 32 --sample-break-mode eos --beam 2 --max-len-b 8")
    wanted = hypotheses(run("fairseq-generate", f"{arguments} --batch-size 4").ok().log)
    assert len(wanted) == 20
    found = run("fairseq-generate", f"{arguments} --batch-size 4 --results-path {tmp_path}",
                ranks=2).ok()
    texts = [(tmp_path / f"generate-test-rank-{rank}.txt").read_text() for rank in (0, 1)]
    assert all(hypotheses(text) for text in texts) and not hypotheses(found.log)
    same(hypotheses("".join(texts)), wanted)
    same(hypotheses(run("fairseq-generate", f"{arguments} --batch-size 64", ranks=2).ok().log),
         wanted)


@pytest.mark.distributed
def test_translations_of_several_processes_are_those_of_one(corpus: Corpus,
                                                            mt2: tuple[Path, Result]) -> None:
    """Encoder and decoder have experts: a rank is in the encoder while another decodes."""
    arguments = (f"{corpus.mt} --user-dir moe_plugin --cpu --path {mt2[0] / 'checkpoint_last.pt'} "
                 "--beam 2 --max-len-b 8 --batch-size 3")
    alone = run("fairseq-generate", arguments).ok().log
    wanted = hypotheses(alone)
    for done in (run("fairseq-generate", arguments, ranks=2),
                 run_on_its_own_ranks("fairseq-generate", f"{arguments} --distributed-world-size 2")
                 ):
        log = done.ok().log
        same(hypotheses(log), wanted)
        [score] = re.findall(r"^Generate test.*$", log, re.MULTILINE)
        assert score in alone and "BLEU4" in score
    part = run("fairseq-generate",
               f"{arguments} --distributed-world-size 2 --distributed-rank 1").ok().log
    assert 0 < len(hypotheses(part)) < len(wanted)


@pytest.mark.parametrize("flags", [
    "", "--decoder-moe-freq 2 --moe-expert-count 4 --moe-capacity-factor none "
    "--criterion moe_label_smoothed_cross_entropy --moe-gate-loss-wt 0.01"],
    ids=["dense", "experts in the decoder"])
def test_an_encoder_without_experts_reads_batches_with_padding(corpus: Corpus, tmp_path: Path,
                                                               flags: str) -> None:
    """The same translations and the same loss as sentence by sentence."""
    criterion = "" if "--criterion" in flags else "--criterion label_smoothed_cross_entropy "
    train = (f"{corpus.mt} --task translation -s src -t tgt --arch transformer_tiny --dropout 0 "
             f"--optimizer adam --lr 0.005 --lr-scheduler fixed --batch-size 16 --max-update 2 "
             f"--user-dir moe_plugin --cpu --num-workers 0 --disable-validation {criterion}{flags} "
             f"--save-dir {tmp_path}")
    run("fairseq-train", train).ok()
    base = f"{corpus.mt} --user-dir moe_plugin --cpu --path {tmp_path / 'checkpoint_last.pt'}"
    found = [hypotheses(run("fairseq-generate", f"{base} --beam 2 --max-len-b 8 --batch-size "
                            f"{size}").ok().log) for size in (1, 7)]
    same(found[1], found[0])
    losses = [re.findall(r"valid on 'valid' subset.*?\| loss ([\d.]+)", run(
        "fairseq-validate", f"{base} --task translation --batch-size {size}").ok().log)
        for size in (1, 7)]
    assert losses[0] and losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.distributed
def test_generation_by_processes_that_it_spawns(corpus: Corpus, mt2: tuple[Path, Result]) -> None:
    """As a user starts it: what it hands to a new interpreter pickles."""
    arguments = (f"{corpus.mt} --user-dir moe_plugin --cpu --path {mt2[0] / 'checkpoint_last.pt'} "
                 "--beam 2 --max-len-b 8 --batch-size 3")
    wanted = hypotheses(run("fairseq-generate", arguments).ok().log)
    found = run_alone("fairseq-generate", f"{arguments} --distributed-world-size 2").ok().log
    same(hypotheses(found), wanted)


@pytest.mark.distributed
def test_experts_outside_the_device_give_the_same_tokens_and_losses(
        corpus: Corpus, tmp_path: Path, ep2: tuple[Path, Result]) -> None:
    """The files are of two ranks; one process, or two, have all experts in a store."""
    base, folder = evaluation(corpus, ep2[0]), tmp_path / "experts"
    stores = {"host": "--moe-experts-on host --moe-experts-cache 64KiB --moe-predict-experts true",
              "disk": f"--moe-experts-on disk --moe-experts-store-path {folder}"}
    generate = (f"{base} --task language_modeling --gen-subset test --tokens-per-sample 32 "
                "--sample-break-mode eos --beam 2 --max-len-b 4 --batch-size 20")
    wanted = hypotheses(run("fairseq-generate", generate).ok().log)
    score = f"{base} --gen-subset valid --tokens-per-sample 32 --num-workers 0 --batch-size 16"
    validate = f"{base} --task language_modeling --batch-size 16 --valid-subset valid"
    losses = scores(run("fairseq-eval-lm", score)), validated(run("fairseq-validate", validate))
    host, disk = stores["host"], stores["disk"]
    assert hypotheses(run("fairseq-generate", f"{generate} {host}").ok().log) == wanted
    assert (scores(run("fairseq-eval-lm", f"{score} {host}")),
            validated(run("fairseq-validate", f"{validate} {disk}"))) == losses
    [two] = scores(run("fairseq-eval-lm", f"{score} {disk}", ranks=2))
    assert two == pytest.approx(losses[0][0], abs=1.1e-2, rel=2e-5)
    assert folder.is_dir() and not list(folder.iterdir())
    # no slot for the second expert of a call: each of them waits
    waits = run("fairseq-eval-lm", f"{score} --batch-size 1 --moe-experts-on host "
                "--moe-experts-cache 24KiB").ok().log
    assert waits.count("[waits_for_experts]") == 1
    assert "the calls of decoder's MoE layer 0 wait for experts" in waits
    run("fairseq-eval-lm", f"{score} --moe-experts-on host --moe-experts-cache 1KiB").failed_with(
        "experts.cache=1 KiB is too small for one expert")
