"""Real `fairseq-train` runs: expert parallelism changes no number, a bad gradient skips the step
everywhere.
"""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, MOE, Corpus, Result, run

NAN_TRAIN = str(Path(__file__).with_name("nan_train.py"))
FLIP_TRAIN = str(Path(__file__).with_name("flip_train.py"))
VOTE_TRAIN = str(Path(__file__).with_name("vote_train.py"))


@pytest.fixture(scope="module")
def one_rank(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """All experts in one process, twice the batches a step: what two ranks must reproduce."""
    home = tmp_path_factory.mktemp("ep1")
    return run(
        "fairseq-train",
        f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --update-freq 2 --max-update 12 --no-save "
        f"--save-dir {home}"
    ).ok()


def same_curve(seen: Result, wanted: Result) -> None:
    assert len(seen.steps) == len(wanted.steps) == 12
    for mine, theirs in zip(seen.steps, wanted.steps, strict=True):
        # the log line has three decimals
        for name in ("loss", "inner_loss", "moe_gate_loss", "gnorm"):
            assert mine[name] == pytest.approx(theirs[name],
                                               abs=2.1e-3), (name, mine["num_updates"])
    assert seen.losses[-1] < seen.losses[0] - 0.5


@pytest.mark.distributed
def test_expert_parallel_ranks_give_the_curve_of_one_rank(one_rank: Result,
                                                          ep2: tuple[Path, Result]) -> None:
    # clipping is active (gnorm > 0.5): a norm that left experts out, or counted them twice, would
    # move the losses
    assert all(step["gnorm"] > 0.5 for step in one_rank.steps)
    same_curve(ep2[1], one_rank)


@pytest.mark.distributed
@pytest.mark.parametrize("flags", [
    "--ddp-backend legacy_ddp",
    "--ddp-backend legacy_ddp --moe-expert-parallel-size 1 --moe-check-twins 4",
    "--ddp-backend c10d --checkpoint-activations",
])
def test_ddp_backends_replicas_and_recomputation_give_the_same_curve(one_rank: Result,
                                                                     corpus: Corpus, tmp_path: Path,
                                                                     flags: str) -> None:
    same_curve(
        run(
            "fairseq-train",
            f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} {flags} --max-update 12 --no-save "
            f"--save-dir {tmp_path}",
            ranks=2).ok(), one_rank)


@pytest.mark.distributed
def test_ranks_that_compute_otherwise_are_named(corpus: Corpus, tmp_path: Path) -> None:
    """From step 4 on one bit is wrong on the last rank; ranks compare in steps 3, 6, ..."""
    flags = (f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --no-save --max-update 8 --save-dir "
             f"{tmp_path} --moe-check-twins")
    ended = run(FLIP_TRAIN, f"4 {flags} 3 --moe-expert-parallel-size 1", ranks=2)
    ended.failed_with("WrongResultError: step 6: rank 0 on ", ", rank 1 on ",
                      "computed a different value for the output of ", "check these machines")
    assert len(ended.steps) == 5
    run("fairseq-train", f"{flags} 3", ranks=2).failed_with(
        "no two of 2 ranks store the same experts", "--moe-expert-parallel-size")


@pytest.mark.distributed
def test_ranks_that_send_wrong_gradients_are_outvoted(corpus: Corpus, tmp_path: Path) -> None:
    """Each step another attack of the last rank: losses are those of a run without it."""
    flags = (f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --no-save --max-update 6 --save-dir "
             f"{tmp_path} --moe-expert-parallel-size 1 --dropout 0.1")
    clean = run("fairseq-train", f"{flags} --ddp-backend legacy_ddp", ranks=3).ok()
    attacked = run(VOTE_TRAIN, f"{flags} --moe-votes 3 --update-freq 1", ranks=3).ok()
    same_numbers(attacked, clean, "[2]")


@pytest.mark.distributed
def test_votes_of_expert_parallel_groups(corpus: Corpus, tmp_path: Path) -> None:
    """Three groups of two ranks, of which the last has a rank that sends something else."""
    flags = (f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --no-save --max-update 4 --save-dir "
             f"{tmp_path} --moe-expert-parallel-size 2 --dropout 0.1")
    clean = run("fairseq-train", f"{flags} --ddp-backend legacy_ddp", ranks=6).ok()
    attacked = run(VOTE_TRAIN, f"{flags} --moe-votes 3", ranks=6).ok()
    same_numbers(attacked, clean, "[4, 5]")


def same_numbers(attacked: Result, clean: Result, outvoted: str) -> None:
    assert clean.steps[-1]["loss"] < clean.steps[0]["loss"]
    for step, (mine, theirs) in enumerate(zip(attacked.steps, clean.steps, strict=True), 1):
        for name in ("loss", "inner_loss", "gnorm", "wpb"):
            assert mine[name] == pytest.approx(theirs[name], abs=2.1e-3), (name, step)
        assert (f"step {step}: outvoted ranks: {outvoted}; files without a majority: []"
                in attacked.log)


@pytest.mark.distributed
def test_votes_that_cannot_be_held_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    flags = (f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --no-save --max-update 1 --save-dir "
             f"{tmp_path} --moe-votes 3")
    for more, said in (("", "larger than the number of workers, 1"),
                       ("--moe-expert-parallel-size 1", "larger than the number of workers, 2"),
                       ("--moe-expert-parallel-size 1 --moe-router sigmoid_bias "
                        "--moe-second-expert-policy all", "without a vote"),
                       ("--zero-sharding os", "updates made by one rank for all ranks"),
                       ("--moe-losses global_batch=0.01", "no two ranks get the same result")):
        run("fairseq-train", f"{flags} {more}", ranks=2).failed_with(said)


@pytest.mark.distributed
def test_rows_that_do_not_fit_repeat_the_step(one_rank: Result, corpus: Corpus,
                                              tmp_path: Path) -> None:
    flags = (f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --moe-dispatch bounded "
             f"--moe-parallel fixed --moe-max-rows-factor 0.4 --no-save --save-dir {tmp_path}")
    records = tmp_path / "records.jsonl"
    repeated = run("fairseq-train", f"{flags} --moe-on-overflow repeat --max-update 12 "
                   f"--moe-stats-jsonl {records} --moe-stats-interval 1", ranks=2).ok()
    assert "the row limit was raised, and the step is repeated" in repeated.log
    same_curve(repeated, one_rank)
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert {row["calls"] for row in rows if "layer" in row} == {2}, "one on each rank"
    ended = run("fairseq-train", f"{flags} --max-update 2", ranks=2)
    ended.failed_with("Raise dispatch.max_rows_factor")
    assert not ended.steps


@pytest.mark.distributed
def test_validation_asks_whether_rows_fit(corpus: Corpus, tmp_path: Path) -> None:
    """Batches of more tokens than the first in training."""
    flags = (f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --moe-parallel fixed --batch-size 1 "
             f"--batch-size-valid 8 --max-update 2 --no-save --save-dir {tmp_path}")

    def loss(more: str) -> float:
        log = run("fairseq-train", f"{flags} {more}", ranks=2).ok().log
        return float(re.findall(r'"valid_inner_loss": "([\d.]+|nan)"', log)[-1])

    repeated = loss("--moe-dispatch bounded --moe-on-overflow repeat")
    assert repeated == pytest.approx(loss(""), abs=2.1e-3)
    run("fairseq-train", f"{flags} --moe-dispatch bounded", ranks=2).failed_with(
        "Raise dispatch.max_rows_factor")


@pytest.mark.distributed
def test_two_copies_of_experts_over_two_ranks_each(corpus: Corpus, tmp_path: Path) -> None:
    """4 ranks, expert-parallel groups of 2: gradients are summed over both copies, and each expert
    counts once in the norm.
    """
    flags = (f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --max-update 12 --no-save --save-dir "
             f"{tmp_path}")
    alone = run("fairseq-train", f"{flags} --update-freq 4").ok()
    same_curve(run("fairseq-train", f"{flags} --moe-expert-parallel-size 2", ranks=4).ok(), alone)


@pytest.mark.distributed
def test_fewer_experts_than_ranks(corpus: Corpus, tmp_path: Path) -> None:
    flags = (f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --moe-expert-count 1 "
             "--moe-top1-expert --max-update 6 --no-save").replace(
        "--moe-second-expert-policy all", "")
    alone = run("fairseq-train", f"{flags} --update-freq 2 --save-dir {tmp_path}").ok()
    cut = run("fairseq-train", f"{flags} --save-dir {tmp_path}", ranks=2).ok()
    assert len(cut.steps) == 6
    for mine, theirs in zip(cut.steps, alone.steps, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=2.1e-3)
        assert mine["gnorm"] == pytest.approx(theirs["gnorm"], abs=2.1e-3)


@pytest.mark.distributed
@pytest.mark.parametrize(("precision", "words"), [("", "step 3 skipped on all ranks (1 in a row"),
                                                  ("--fp16", "setting loss scale to: 64.0")])
def test_nan_in_one_expert_on_one_rank_skips_the_step_on_all(corpus: Corpus, tmp_path: Path,
                                                             precision: str, words: str) -> None:
    result = run(
        NAN_TRAIN,
        f"3 {corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} {precision} --max-update 6 --no-save "
        f"--save-dir {tmp_path}",
        ranks=2).ok()
    assert "gradient overflow detected, ignoring gradient" in result.log
    assert words in result.log
    assert [step["num_updates"] for step in result.steps] == [1, 2, 3, 4, 5, 6]
    assert result.losses[-1] < result.losses[0] - 0.3


@pytest.mark.distributed
def test_bf16_trains(corpus: Corpus, tmp_path: Path) -> None:
    result = run(
        "fairseq-train",
        f"{corpus.lm} {LANGUAGE_MODEL} {MOE} --bf16 --record-a2a-perf-stats --max-update 8 "
        f"--moe-parallel fixed --moe-router-fp32 --ddp-backend legacy_ddp --save-dir {tmp_path} "
        f"--moe-stats-jsonl {tmp_path / 'stats.jsonl'} --moe-stats-interval 4", ranks=2).ok()
    assert result.losses[-1] < result.losses[0] - 0.3
    assert all(step["all_to_all_cpu_time_ms"] > 0 for step in result.steps)
    # the branch's capacity drops tokens
    assert any(step["overflow_expert2"] > 0 for step in result.steps)
    records = [json.loads(line) for line in (tmp_path / "stats.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [4, 8]
    # 4 steps of 2 ranks
    assert all(record["layer"] == "decoder.layers.1" and record["calls"] == 8 for record in records)
    for rank in (0, 1):
        only_the_router_is_in_float32(tmp_path / f"checkpoint_last-rank-{rank}.pt", torch.bfloat16)


def only_the_router_is_in_float32(path: Path, others: torch.dtype) -> None:
    """fairseq writes float32 in any case: of what was lowered, values of fewer bits."""
    model = torch.load(path, weights_only=False)["model"]
    finer = {name for name, value in model.items() if isinstance(value, torch.Tensor)
             and value.is_floating_point() and not torch.equal(value, value.to(others).float())}
    [router] = [name for name in model if name.endswith("router.weight_ED")]
    assert finer == {router}


def test_router_weights_in_float32_under_memory_efficient_fp16(corpus: Corpus,
                                                               tmp_path: Path) -> None:
    """Saved, resumed; the curve of a run without a break."""
    flags = (f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --fp16 --memory-efficient-fp16 "
             "--moe-router-fp32 --disable-validation").replace("sgd --momentum 0.9 --lr 0.1",
                                                               "adam --lr 0.002")
    whole = run("fairseq-train", f"{flags} --max-update 6 --no-save --save-dir {tmp_path}").ok()
    run("fairseq-train", f"{flags} --max-update 3 --save-dir {tmp_path}").ok()
    only_the_router_is_in_float32(tmp_path / "checkpoint_last.pt", torch.float16)
    again = run("fairseq-train", f"{flags} --max-update 6 --save-dir {tmp_path}").ok()
    only_the_router_is_in_float32(tmp_path / "checkpoint_last.pt", torch.float16)
    assert again.losses == whole.losses[3:]


def test_hydra_yaml_trains(corpus: Corpus, tmp_path: Path) -> None:
    # a relative path: the repository's own may hold blanks
    result = run(
        "fairseq-hydra-train",
        f"--config-dir configs/fairseq --config-name moe_lm_tiny task.data={corpus.lm} "
        f"checkpoint.save_dir={tmp_path} "
        f"hydra.run.dir={tmp_path / 'hydra'} common.cpu=true common.log_interval=1 "
        "task.tokens_per_sample=32 "
        "dataset.batch_size=4 optimization.max_update=6 lr_scheduler.warmup_updates=1 "
        "moe.num_experts=4 +moe.router.top_k=1 moe.router.second_expert_policy=all",
        cwd=Path(__file__).parents[3]).ok()
    assert len(result.losses) == 6
    assert result.losses[-1] < result.losses[0]
    saved = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)
    # the group `moe` of the file and of the command line
    assert saved["moe_plugin"]["num_experts"] == 4
    model = saved["cfg"]["model"]
    assert (model["moe_top_k"], model["moe_capacity_factor"]) == ("1", "none")


def test_the_typed_hydra_group_becomes_flags() -> None:
    from hydra import compose, initialize
    from omegaconf import OmegaConf

    from moe_plugin.config import MoEConfig
    from moe_plugin.config.flags import config_from_flags, flag_specs
    from moe_plugin.hosts.fairseq.compat.userdir import take_moe_group
    from moe_plugin.hosts.fairseq.options import MoELanguageModelConfig

    def composed(*overrides: str) -> Any:
        with initialize(None, version_base=None):
            tree = compose(overrides=["+moe=base", *overrides])
        return OmegaConf.create({"model": OmegaConf.structured(MoELanguageModelConfig),
                                 "moe": tree.moe})

    cfg = composed("moe.router.top_k=1", "moe.experts.bias=false")
    take_moe_group(cfg)
    assert cfg.moe is None
    got = config_from_flags({spec.dest: cfg.model[spec.dest] for spec in flag_specs()})
    wanted = MoEConfig()
    wanted.router.top_k, wanted.experts.bias = 1, False
    assert got == wanted
    with pytest.raises(Exception, match="many"):
        composed("moe.router.top_k=many")


@pytest.mark.distributed
def test_a_launch_script_of_the_branch(corpus: Corpus, tmp_path: Path) -> None:
    """The flags of the branch's own example command, with its dimensions cut down."""
    script = (
        "--ddp-backend fully_sharded --checkpoint-activations --task language_modeling "
        "--tokens-per-sample 32 --arch transformer_lm_gpt "
        "--share-decoder-input-output-embed --decoder-layers 2 --decoder-embed-dim 32 "
        "--decoder-ffn-embed-dim 64 --decoder-attention-heads 2 "
        "--moe-expert-count 8 --moe-freq 2 --moe-gating-use-fp32 --moe-second-expert-policy all "
        "--moe-normalize-expert-grad sqrt_world_size "
        "--moe-eval-capacity-token-fraction -1.0 --max-sentences-valid 1 --criterion "
        "moe_cross_entropy --moe-gate-loss-wt 0.01 "
        "--moe-gate-loss-combine-method sum --optimizer adam --clip-norm 0.0 --lr 0.0005 --dropout "
        "0.1 --attention-dropout 0.1 --batch-size 4 "
        "--update-freq 1 --max-update 3 --disable-validation --log-format json --log-interval 1 "
        "--num-workers 0 "
        "--num-workers-valid 0 --adam-betas (0.9,0.98) --record-a2a-perf-stats --use-moe-pad-mask")
    result = run(
        "fairseq-train",
        f"{corpus.lm} {script} --user-dir moe_plugin --cpu --no-save --save-dir {tmp_path}",
        ranks=2).ok()
    # the branch's capacity drops a third of the choices at first: said once, with what to change
    [warning] = re.findall(r".*found no slot at their expert.*", result.log)
    assert float(re.findall(r"(\d+) % of the choices", warning)[0]) > 10
    assert "--moe-capacity-factor none" in warning
    assert len(result.losses) == 3 and "--num-workers-valid has no effect" in result.log


@pytest.mark.distributed
def test_drops_in_validation_are_said_as_those_in_training_are(corpus: Corpus,
                                                               tmp_path: Path) -> None:
    few = f"{LANGUAGE_MODEL} {MOE} --moe-expert-count 8"
    result = run("fairseq-train", f"{corpus.lm} {few} --max-update 4 --save-dir {tmp_path} "
                 "--validate-interval-updates 2 --no-epoch-checkpoints", ranks=2).ok()
    warned = re.findall(r"\| ([a-z 0-9:]*) % of the choices found no slot.*use (.*)", result.log)
    validation = [(said, remedy) for said, remedy in warned if said.startswith("validation")]
    valid = re.findall(r'"valid_overflow_expert(\d)": "([\d.]+)"', result.log)
    (said, remedy), first = validation[0], dict(valid[:2])
    assert len(validation) == 1 and "--moe-eval-token-fraction" in remedy
    # as fairseq logs it: the mean of the first and of the second choices
    mean = (float(first["1"]) + float(first["2"])) / 2
    assert said == f"validation at step 2: {mean:.0f}" and mean > 10
    checked = run("fairseq-validate", f"{corpus.lm} --user-dir moe_plugin --cpu --task "
                  f"language_modeling --batch-size 4 --path {tmp_path}/checkpoint_last.pt").ok()
    assert re.findall(r"evaluation: \d\d % of the choices found no slot", checked.log)
    whole = run("fairseq-validate", f"{corpus.lm} --user-dir moe_plugin --cpu --task "
                f"language_modeling --batch-size 4 --path {tmp_path}/checkpoint_last.pt "
                "--model-overrides {'moe_capacity_factor':'none'}").ok()
    assert "found no slot" not in whole.log


def test_a_criterion_that_leaves_the_gate_loss_out_is_told(corpus: Corpus, tmp_path: Path) -> None:
    flags = (f"{corpus.lm} {LANGUAGE_MODEL} {MOE} --max-update 1 --no-save --disable-validation "
             f"--save-dir {tmp_path}")
    result = run("fairseq-train",
                 flags.replace("moe_cross_entropy --moe-gate-loss-wt 0.01", "cross_entropy")).ok()
    assert "criterion CrossEntropyCriterion does not add the routers' losses" in result.log


@pytest.mark.parametrize(("arguments", "words"), [
    (f"/no/such/data {LANGUAGE_MODEL} {MOE} --max-update 1", ("/no/such/data",)),
    (f"{{data}} {LANGUAGE_MODEL} {MOE} --moe-top-k 9 --max-update 1",
     ("router.top_k", "num_experts=4")),
    (f"{{data}} {LANGUAGE_MODEL} {MOE} --model-parallel-size 2", (
        "fairseq-train: error: --model-parallel-size 2 needs fairseq's submodule megatron",
        "or train with Megatron-core and --tensor-model-parallel-size 2")),
    (f"{{data}} {LANGUAGE_MODEL} {MOE} --log-file /dev/null/x/log", (
        "fairseq-train: error: the folder of --log-file '/dev/null/x/log' cannot be created",)),
])
def test_bad_input_is_named(corpus: Corpus, tmp_path: Path, arguments: str,
                            words: tuple[str, ...]) -> None:
    run("fairseq-train",
        f"{arguments.format(data=corpus.lm)} --save-dir {tmp_path}").failed_with(*words)
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_setting_that_does_not_fit_ends_with_the_message_alone(corpus: Corpus, tmp_path: Path,
                                                                 ranks: int) -> None:
    result = run("fairseq-train", f"{corpus.lm} {LANGUAGE_MODEL} {MOE} --moe-router swich "
                 f"--max-update 1 --save-dir {tmp_path}", ranks=ranks)
    result.failed_with("fairseq-train: error: ", "unknown router 'swich'; did you mean switch?")
    assert result.code == 2 and "Traceback" not in result.log
    assert result.log.count("fairseq-train: error: ") == ranks


def test_other_errors_keep_their_traceback(corpus: Corpus, tmp_path: Path) -> None:
    result = run("fairseq-train", f"/no/such/data {LANGUAGE_MODEL} {MOE} --max-update 1")
    result.failed_with("Traceback", "/no/such/data")


def test_the_entry_of_a_spawned_process_pickles() -> None:
    from fairseq.distributed import utils

    assert pickle.loads(pickle.dumps(utils.distributed_main)) is utils.distributed_main


class Begun(Exception):
    """A step has begun."""


@pytest.mark.fast
def test_features_are_told_the_number_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of a run is step 1."""
    from moe_plugin.hosts.fairseq import trainer

    numbers: list[int] = []

    def around_step(step: Any) -> None:
        numbers.append(step.number)
        raise Begun

    monkeypatch.setattr(trainer.of_run, "total_updates", lambda *_: None)
    fake = SimpleNamespace(get_num_updates=lambda: 4, cfg=None, _epoch_batches=None,
                           run=SimpleNamespace(around_step=around_step))
    with pytest.raises(Begun):
        trainer.MoETrainer.train_step(fake, [])
    assert numbers == [5]


@pytest.mark.fast
def test_a_validation_asks_whether_rows_fit_before_it_is_logged(
        monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_plugin.hosts.fairseq import trainer

    done: list[str] = []
    monkeypatch.setattr(trainer.Trainer, "valid_step",
                        lambda self, *_: self._reduce_and_log_stats([], 1))
    monkeypatch.setattr(trainer.Trainer, "_reduce_and_log_stats",
                        lambda *_: done.append("logged"))
    ours = object.__new__(trainer.MoETrainer)
    ours._validating = False
    ours.run = SimpleNamespace(compute=lambda step: step(),
                               after_passes=lambda: done.append("asked"))
    ours._reduce_and_log_stats([], 1)
    ours.valid_step({})
    assert done == ["logged", "asked", "logged"] and not ours._validating
