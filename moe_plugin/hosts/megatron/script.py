"""What the launcher adds to Megatron's training script: features, logs, token ids, schedules."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from moe_plugin.comm.host_collectives import collectives_named, refused_together
from moe_plugin.config import PipelineConfig, run_config
from moe_plugin.config.flags import as_given
from moe_plugin.hosts.megatron import ensemble
from moe_plugin.hosts.megatron.compat.fields import refuse_unknown_balance
from moe_plugin.hosts.megatron.compat.finite import guard_all_optimizers
from moe_plugin.hosts.megatron.compat.optimizer import use_fused_adam
from moe_plugin.hosts.megatron.compat.settings import (
    extend_parse_args,
    given_settings,
    replace_training,
    script_arguments,
    script_config,
    training_module,
)
from moe_plugin.hosts.megatron.data import check_prefix
from moe_plugin.hosts.megatron.refusals import FROZEN, VIRTUAL_STAGES, values_of
from moe_plugin.hosts.megatron.translate import NATIVE_ARGUMENTS, settings_from_flags
from moe_plugin.training.resilience.skipped_steps import FiniteSteps
from moe_plugin.training.run import Run
from moe_plugin.utils.folder_lock import FolderLock, hold_folder
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import make_folder
from moe_plugin.utils.run_feature import SkipStep, StepFacts, StepInput

logger = logging.getLogger("moe_plugin.megatron")
# prefixes of settings that have an effect even without our layer
_OF_ANY_LAYER = "comm.timeout_s", "guard.", "offload.weights", "pipeline.", "swarm."
_SEAM = "get_forward_backward_func"  # imported by name into Megatron's training code


def observe_script() -> Script:
    """Connect the features of a run to Megatron's `pretrain` until the process ends.

    Megatron then calls the features before and after each step. This function also connects the
    log, the token ids for the layers, `--moe-fused-adam` and `--pipeline-schedule`. The caller must
    close the returned object at the end of the run.
    """
    script = Script()
    guard_all_optimizers(lambda: script.run)
    for name, around in (
        ("pretrain", script.around_pretrain), ("setup_model_and_optimizer", script.around_setup),
        ("train_step", script.around_step), ("training_log", script.around_log),
        ("evaluate", script.around_evaluation), ("save_checkpoint", script.around_save),
        ("evaluate_and_print_results", script.around_results)):
        replace_training(name, _seam(around))
    for name, what in (("_initialize_distributed", "making of process groups"),
                       ("build_train_valid_test_data_iterators", "reading of data")):
        replace_training(name, _named(what))
    replace_training("get_model", script.around_model)
    replace_training("dummy_train_step", lambda native: script.read_over)
    replace_training("build_pretraining_data_loader", script.around_loader)
    # imported late: these modules import Megatron, which may be located next to the script
    from moe_plugin.hosts.megatron.passes import computed_by, use_stage_layouts
    from moe_plugin.hosts.megatron.pipeline import scheduled
    from moe_plugin.hosts.megatron.script_checkpoint import loads_whole

    extend_parse_args(lambda provider: provider or (lambda parser: parser), script.prepare)
    use_stage_layouts(lambda: script.stages)
    replace_training("load_checkpoint", loads_whole)
    replace_training("load_checkpoint", _seam(script.around_load))
    replace_training(_SEAM, lambda get: computed_by(
        lambda: script.run, script.in_place(scheduled(get, script.pipeline))))
    return script


def check_seam(settings: PipelineConfig) -> None:
    if settings.schedule != "1f1b" and _SEAM not in vars(training_module("training")):
        raise ValueError(
            f"pipeline.schedule={settings.schedule!r} is not supported by this Megatron version, "
            f"because its megatron.training.training does not call {_SEAM}. Use 1f1b.")


class Script:
    """The features (`run`) and the report of a run, which are created together with the model.

    Attributes:
        stepped: True if at least one step has started.
        passes: replacement for the function that runs the passes of a step, or None.
        stages: pipeline stages with different layouts, or None if all stages have the same layout.
        taken: dict that maps each iteration in which this replica received another replica's state
            to the iteration of that state.
    """

    def __init__(self) -> None:
        self.run, self.report = Run([FiniteSteps()]), None  # type: Run, Any
        self.stepped, self.passes = False, None  # type: bool, Callable[..., Any] | None
        self.stages, self._divisor = None, None  # type: Any, int | None
        self.taken = dict[int, int]()
        self._lock: FolderLock | None = None
        self._save: Callable[[Mapping[str, Any]], None] | None = None  # replaces Megatron's save
        self._forward_step: Any = None  # the script's forward step
        self._end: Callable[[], None] | None = None  # tells other processes that this run has ended

    def prepare(self, args: argparse.Namespace) -> None:
        """Create the pipeline stages from the parsed arguments."""
        from moe_plugin.hosts.megatron.passes import prepared

        self._divisor = getattr(args, "make_vocab_size_divisible_by", None)
        self.stages = prepared(args)

    def around_load(self, given: Mapping[str, Any], load: Callable[[], Any]) -> Any:
        self._as_given()
        return load()

    def _as_given(self) -> None:
        # the model is built; checkpoints store, and Megatron compares, the user's own value
        if self.stages is not None:
            script_arguments()["make_vocab_size_divisible_by"] = self._divisor

    def close(self) -> None:
        """Close the files of the run, and release the lock on the run's folder."""
        self.run.close()
        if self._end is not None:
            self._end()
        if self.report is not None:
            self.report.close()
        if self._lock is not None:
            self._lock.release()

    def _hold_folder(self) -> None:
        """Lock the `--save` folder on the first rank. This is a collective operation."""
        args = script_arguments()
        save = args.get("save")
        if not save or "://" in save:
            return
        with refused_together("the folder of the run"):
            make_folder(save)
            if dist.get_rank() == 0 and not args.get("skip_train"):
                self._lock = hold_folder(save, run_config(
                    settings_from_flags(args)).observe.take_over_folder)

    def around_pretrain(self, given: Mapping[str, Any], pretrain: Callable[[], Any]) -> Any:
        self._forward_step = given["forward_step_func"]
        return pretrain()

    def around_setup(self, given: Mapping[str, Any], setup: Callable[[], Any]) -> Any:
        _check_arguments()
        self._hold_folder()
        settings = run_config(settings_from_flags(script_arguments()))
        if settings.swarm.role != "none":
            from moe_plugin.hosts.megatron import swarm

            built = swarm.set_up(given, lambda: self.run, self._forward_step)
            self.passes, self._save = built[0][0].passes, swarm.save
            self._end = built[0][0].close
            self.connect(*built)
            return built
        if settings.offload.weights == "host":
            from moe_plugin.hosts.megatron import script_features

            streamed = script_features.set_up(given, lambda: self.run)
            self.passes, self._save = streamed[0][0].passes, script_features.save
            self.connect(*streamed)
            return streamed
        with collectives_named("a collective of Megatron's set-up"):
            built = setup()
            if self.stages is not None:
                from moe_plugin.hosts.megatron.passes import passes_of

                self.passes = passes_of(self.stages, *built[:2])
        self._as_given()
        self.connect(*built)
        if built[1] is not None:  # evaluation has no optimizer
            use_fused_adam(built[1], script_arguments().get("moe_fused_adam", False))
        return built

    def in_place(self, get: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
        """Return a function that returns `passes` if `passes` is set, and otherwise calls `get`."""
        return lambda *args, **kwargs: self.passes or get(*args, **kwargs)

    def around_model(self, build: Callable[..., Any]) -> Callable[..., Any]:

        @functools.wraps(build)
        def call(provider: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            from moe_plugin.hosts.megatron.script_features import with_heads

            return build(with_heads(provider), *args, **kwargs)

        return call

    def connect(self, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
        # imported late, because the layer spec depends on the parsed arguments
        from moe_plugin.hosts.megatron.same_tokens import give_token_ids
        from moe_plugin.hosts.megatron.script_features import run_of
        from moe_plugin.hosts.megatron.script_report import ScriptReport
        from moe_plugin.routing.pregate import link

        for chunk in chunks:
            link(chunk)
            give_token_ids(chunk)
        check_seam(self.pipeline())
        self.run, recorder = run_of(chunks, optimizer, scheduler, self.taken)
        self.report = ScriptReport(script_arguments(), given_settings(), self.run, recorder)
        self.report.begin()

    def pipeline(self) -> PipelineConfig:
        return run_config(settings_from_flags(script_arguments())).pipeline

    def around_step(self, given: Mapping[str, Any], step: Callable[[], Any]) -> Any:
        from moe_plugin.hosts.megatron import passes

        number = script_arguments().get("curr_iteration", 0) + 1
        self.stepped = True
        self.report.before_step()
        with passes.step_again(given["data_iterator"], self.run) as again:
            while True:
                begins = StepInput(self._reached(number),
                                   lambda: passes.first_batch(given["data_iterator"]),
                                   lambda batch: passes.loss_of(given, batch),
                                   script_arguments().get("train_iters"))
                with self.run.around_step(begins), _named("step"):
                    done = step()
                left_out = self.run.left_out
                self.run.after_step(step_facts(self._reached(number), done, left_out))
                if left_out is None or not left_out.lost:
                    break
                again(self._reached(number) - number)
        self.report.after_step(self._reached(number), done[0], counts=not (
            left_out is not None or self.run.replaced or done[1]))
        return done

    def read_over(self, data_iterator: Any) -> None:
        """Replacement for Megatron's `dummy_train_step`. See `passes.read_over`."""
        from moe_plugin.hosts.megatron import passes
        from moe_plugin.hosts.megatron.compat import core

        passes.read_over(data_iterator, (core.microbatches_a_step() or 0) * (
            passes.ps.get_data_parallel_world_size() if self.run.reduces else 1))

    def around_log(self, given: Mapping[str, Any], log: Callable[[], Any]) -> Any:
        with _named("log"):
            done = log()
        self.report.after_log(self._reached(given["iteration"]), *(
            given[name] for name in ("learning_rate", "loss_scale", "grad_norm")))
        return done

    def _reached(self, iteration: int) -> int:
        """Return the number of the step that an iteration computed. See `taken`."""
        return self.taken.get(iteration - 1, iteration - 1) + 1

    def around_evaluation(self, given: Mapping[str, Any], evaluate: Callable[[], Any]) -> Any:
        with _named("evaluation"):
            done = evaluate()
        self.run.after_evaluation(self.report.done if self.report is not None else 0)
        losses = done[0] if done else None
        if isinstance(losses, Mapping):  # None if the time limit was reached
            self.report.after_evaluation(losses)
        return done

    def around_results(self, given: Mapping[str, Any], evaluate: Callable[[], Any]) -> Any:
        self.report.evaluates = given["prefix"], given["iteration"]
        return evaluate()

    def around_save(self, given: Mapping[str, Any], save: Callable[[], Any]) -> Any:
        from moe_plugin.hosts.megatron.script_checkpoint import refuse_broken

        reached = self._reached(given["iteration"])
        if reached != given["iteration"]:
            logger.warning(
                "no checkpoint of iteration %d is written, because weights of iteration %d were "
                "received from another replica", given["iteration"], reached)
            return None
        if self._save is not None:
            save = functools.partial(self._save, given)
        else:
            refuse_broken(given["model"], given["optimizer"])
        with _named("checkpoint"):
            done = save()
        written = not (given.get("non_persistent_ckpt")
                       or script_arguments().get("async_save"))  # written in the background
        if written and self.report is not None:
            self.report.saved(given["iteration"])
        return done

    def around_loader(self, build: Callable[..., Any]) -> Callable[..., Any]:

        @functools.wraps(build)
        def call(dataset: Any, *args: Any, **kwargs: Any) -> Any:
            from moe_plugin.hosts.megatron.compat.loaders import of_all_ranks, split_of

            external = script_arguments().get("dataloader_type") == "external"
            if not external and split_of(dataset) in ("valid", "test") and not len(dataset):
                return None  # the split has no documents and is not used
            with of_all_ranks(build, dataset) if self.run.reduces else contextlib.nullcontext():
                return build(dataset, *args, **kwargs)

        return call


def _seam(around: Callable[[Mapping[str, Any], Callable[[], Any]], Any]
          ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wrap a Megatron function so that each call becomes `around(arguments_by_name, call)`."""

    def replaced(native: Callable[..., Any]) -> Callable[..., Any]:
        names = inspect.signature(native)

        @functools.wraps(native)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(names.bind(*args, **kwargs).arguments,
                          functools.partial(native, *args, **kwargs))

        return call

    return replaced


def _named(what: str) -> Any:
    """Return a context, or decorator, in which errors of collectives contain `what`."""
    return collectives_named(f"a collective of Megatron's {what}")


def _check_arguments() -> None:
    """Check the arguments before the model is built, because building a model takes minutes."""
    # imported late: these modules import Megatron, which may be located next to the script
    from moe_plugin.hosts.megatron.run import check_replicas, check_resizing, guard_of

    arguments = script_arguments()
    args = argparse.Namespace(**arguments)
    VIRTUAL_STAGES.refuse(values_of(args, settings_from_flags(arguments)))
    guard_of(args, settings_from_flags(arguments))
    _check_native(arguments)
    if arguments.get("skip_train") and not (
            arguments.get("load") or arguments.get("pretrained_checkpoint")):
        raise ValueError("skip_train=True needs a checkpoint to evaluate. Set --load to the folder "
                         "of the checkpoints.")
    ensemble.ensemble_of(args)
    check_replicas(args)
    run = run_config(settings_from_flags(arguments))
    check_resizing(args, run)
    if run.finetune.freezes:
        FROZEN.refuse(values_of(args, settings_from_flags(arguments)))
    given: list[str] = getattr(args, "data_path", None) or []
    # only a single local path is checked: scripts may accept other kinds of paths
    if len(given) == 1 and "://" not in given[0] and not os.path.exists(given[0]):
        check_prefix(given[0])


def _check_native(arguments: Mapping[str, Any]) -> None:
    """With `--native-moe`, check the load balancing and warn about settings without effect."""
    if not (arguments.get("native_moe") and arguments.get("num_experts")):
        return
    refuse_unknown_balance(script_config())
    unread = {path: value for path, value in settings_from_flags(arguments).items()
              if not path.startswith(_OF_ANY_LAYER)}
    if unread:
        said = ", ".join(f"{path}={short(value)}" for path, value in unread.items())
        logger.warning("%s", as_given(
            f"--native-moe: Megatron's own MoE layer ignores {said}. Leave out one of the two.",
            arguments, NATIVE_ARGUMENTS))


def step_facts(number: int, done: tuple[Any, ...], left_out: SkipStep | None) -> StepFacts:
    """Return a `StepFacts` object that describes one step of the script's training loop.

    Args:
        number: 1-based number of the step.
        done: return value of `train_step`. The first element of `done` is a dict of losses by name,
            and the second element is True if the step was skipped.
        left_out: reason why the step did not change any parameters, or None if it did.
    """
    losses, skipped = done[:2]
    lost = left_out is not None and left_out.lost
    no_change = not lost and (left_out is not None or bool(skipped))
    arguments = script_arguments()
    loss = losses.get("lm loss") if isinstance(losses, Mapping) else None
    total = arguments.get("train_iters")
    return StepFacts(
        number, made=not lost,
        skipped=no_change and not arguments.get("fp16"),  # with fp16 the loss scale is reduced
        tokens=arguments.get("global_batch_size", 0) * arguments.get("seq_length", 0),
        left=None if total is None else max(0, total - number),
        loss=None if loss is None else float(loss))
