"""Read the flags of a training command, and convert a plan to flags of a host, a YAML file for
`--moe-config`, and a command line.

A launch script of the user is read, not run. Variables and arrays that the script itself assigns
are replaced by their values. Other variables, such as those of the environment, keep their names.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from moe_plugin.planner.model import ModelPlan, ModelShape
from moe_plugin.utils.messages import short

# frameworks to which the file of a model may belong, and the files of this package
TRANSFORMERS, MEGATRON, FAIRSEQ, YAML = "transformers", "megatron", "fairseq", "yaml"
HOSTS = FAIRSEQ, MEGATRON
BYTES = 257  # number of tokens of the byte tokenizers of both hosts
COLUMNS = 100
CONFIG, LINE = "moe.yaml", "launch.sh"  # the files of a plan
SCRIPT = "pretrain_gpt_moe"  # a script of this package, by its name in the launcher
BALANCE = "0.01"  # weight of the balance loss
STEPS, RATE = "10000", "0.0005"  # number of training steps, and Adam's learning rate
_CALL = r"""\$\((?:[^()"']|"[^"]*"|'[^']*'|\([^()]*\))*\)|`[^`]*`"""  # the output of a command
_ARRAY = re.compile(rf"^[ \t]*(\w+)\+?=\(((?:{_CALL}|[^)])*)\)", re.M)
_QUOTED = rf""""(?:{_CALL}|\\.|[^"\\])*"|'[^']*'"""
_TEXT = re.compile(rf"^[ \t]*(?:export[ \t]+)?(\w+)=({_QUOTED}|[^\s;#]*)", re.M)
_WORD = re.compile(rf"""(?:{_CALL}|{_QUOTED}|\\.|[^\s"'`\\])+""")
_USE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::-([^}]*))?\}|\$(\w+)")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.M)
# words after which the flags of the training program begin, besides Python files
_PROGRAMS = "moe_plugin.hosts.megatron.launch", "fairseq-train", "fairseq-hydra-train"
DEPTH = 10  # number of times that a variable may refer to another variable



class ShellWord(str):
    """A word that the shell expands, with the quotes of its script."""


FAIRSEQ_TRAIN = ShellWord('"$(which fairseq-train)"')
SWITCH = ShellWord("true")  # the value of a flag without a value
# values of flags without leading dashes
Flags = Mapping[str, str | list[str]]


def moe_settings(model: ModelShape, plan: ModelPlan, auto: bool,
                 keeps_send: bool = False) -> dict[str, Any]:
    """Convert a plan to nested plain values that can be used as settings of this package.

    Args:
        auto: whether the tuner may change the layout during training. If True, the tuner starts
            with `dispatch.send=rows`, which sends one row per token and expert.
        keeps_send: whether the tuner must not change `dispatch.send`. See `plan_cost.needs_send`.
    """
    parallel: dict[str, Any] = {
        "mode": "auto" if auto else "fixed", "r": plan.layout.r, "d": plan.layout.d
    }
    if plan.layout.d_backward:
        parallel["d_backward"] = plan.layout.d_backward
    if plan.expert_ranks == 1:
        parallel["r"] = 1
    dispatch: dict[str, Any] = {"name": "ragged"}
    if plan.layout.send != "rows":
        dispatch["send"] = "auto" if auto and not keeps_send else plan.layout.send
    if model.capacity_factor is not None:
        dispatch = {"name": "padded", "capacity_factor": model.capacity_factor}
    router: dict[str, Any] = {"top_k": model.top_k}
    if model.groups > 1:
        router |= {"name": "group_limited", "groups": model.groups,
                   "group_top_k": model.group_top_k}
    return {
        "num_experts": model.experts, "router": router,
        "experts": {
            "kind": "gated_ffn" if model.gated else "ffn", "hidden_dim": model.expert_dim,
            **({"latent_dim": model.latent_dim} if model.latent_dim else {})
        },
        "dispatch": dispatch, "parallel": parallel, "comm": {"all_to_all": plan.layout.algorithm},
    }


def host_flags(model: ModelShape, plan: ModelPlan, host: str) -> list[str]:
    """Return the host's own command-line flags for a plan, as a list of command-line words.

    Raises:
        ValueError: If the host is unknown or cannot run the plan.
    """
    if host == "megatron":
        frequency: Any = model.moe_every
        if first := getattr(model, "dense_first", 0):
            layers = ",".join(str(int(model.has_experts(i))) for i in range(first, model.layers))
            frequency = f"([0]*{first}+[{layers}])"
        flags = [
            "--tensor-model-parallel-size", plan.tp, "--pipeline-model-parallel-size", plan.pp,
            "--expert-model-parallel-size", plan.ep, "--expert-tensor-parallel-size", plan.etp,
            "--num-experts", model.experts, "--moe-router-topk", model.top_k, "--moe-layer-freq",
            frequency, "--num-layers", model.layers, "--hidden-size", model.model_dim,
            "--num-attention-heads", model.heads, "--ffn-hidden-size", model.ffn_dim,
            "--moe-ffn-hidden-size", model.expert_dim, "--seq-length",
            model.sequence, "--micro-batch-size", plan.micro_batch, "--global-batch-size",
            model.global_batch
        ]
        flags += ["--moe-latent-size", model.latent_dim] if model.latent_dim else []
        flags += ["--moe-router-num-groups", model.groups, "--moe-router-group-topk",
                  model.group_top_k] if model.groups > 1 else []
        switches = {"--sequence-parallel": plan.tp > 1, "--swiglu": model.gated,
                    "--use-distributed-optimizer": plan.dp > 1}
        return [str(f) for f in flags] + [name for name, on in switches.items() if on]
    if host != "fairseq":
        raise ValueError(f"unknown host {short(host)}; known: {', '.join(HOSTS)}")
    if plan.tp * plan.pp > 1:
        raise ValueError(
            f"plan {plan.label} uses tensor or pipeline parallelism, which this package "
            "does not support in fairseq. Search for a plan with --host fairseq")
    update = model.global_batch // (plan.dp * plan.micro_batch)
    flags = [
        "--moe-freq", model.moe_every, "--batch-size", plan.micro_batch, "--tokens-per-sample",
        model.sequence, "--update-freq", update, "--moe-expert-parallel-size", plan.expert_ranks,
        "--ddp-backend", "legacy_ddp"
    ]
    return [str(f) for f in flags]


def plan_yaml(model: ModelShape, plan: ModelPlan, host: str, auto: bool, note: str,
              activations: Sequence[str] = (), keeps_send: bool = False) -> str:
    """Return the content of the `--moe-config` file that applies a plan.

    Args:
        host: see `HOSTS`.
        auto: see `moe_settings`.
        note: comment to write at the top of the file.
        activations: the policy for the activations of each layer. See `PlanCost`.
        keeps_send: see `moe_settings`.
    """
    settings = moe_settings(model, plan, auto, keeps_send)
    if activations:
        settings["offload"] = {"activations": ",".join(activations)}
    if host == "megatron":  # Megatron's own flags override these settings
        for key in ("num_experts", "router", "experts"):
            settings.pop(key)
    head = "".join(f"# {line}\n" for line in note.splitlines())
    return head + yaml.safe_dump(settings, sort_keys=False)


# -- the command line


@dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """The settings of the launch command that do not depend on the plan.

    Attributes:
        ranks_per_node: number of processes per node.
        head: address of the first node. Required if the run uses several nodes.
        cpu: whether to train on the CPU.
        threads: number of CPU threads per rank, or 0 for no limit.
        data: path of the training data, which is a folder (fairseq) or a prefix (Megatron).
        config: path of the plan's file for `--moe-config`.
        script: path of Megatron-LM's `pretrain_gpt.py`. Optional. Defaults to `SCRIPT`.
        flags: the flags of a user's own command, which the launch command keeps; see
            `flags_of`.
    """

    nodes: int = 1
    ranks_per_node: int = 1
    head: str = "HEAD"
    cpu: bool = False
    threads: int = 0
    data: str = "DATA"
    config: Path = Path("moe.yaml")
    script: str | None = None
    flags: Flags = field(default_factory=dict)


def torchrun_words(start: LaunchCommand) -> list[str]:
    """Return the word `torchrun` followed by its options. If there are several nodes, the command
    must be run on each node.
    """
    words = [f"OMP_NUM_THREADS={start.threads}"] if start.cpu and start.threads else []
    if start.nodes == 1:
        return [*words, "torchrun", "--standalone", "--nproc_per_node", str(start.ranks_per_node)]
    return [
        *words, "torchrun", "--nnodes", str(start.nodes), "--nproc_per_node",
        str(start.ranks_per_node), "--rdzv_backend", "c10d", "--rdzv_endpoint",
        f"{start.head}:29500", "--rdzv_id", "moe"
    ]


def launch_words(model: ModelShape, plan: ModelPlan, host: str, start: LaunchCommand) -> list[str]:
    """Return the launch command as a list of command-line words.

    The dtype is bf16 if `model.element_bytes` is 2.

    Args:
        host: see `HOSTS`.
        start: the settings of the launch command that do not depend on the plan.
    Raises:
        ValueError: If the host cannot run the plan, or if `script` is set for fairseq.
    """
    flags = host_flags(model, plan, host)
    if host == "fairseq":
        if start.script is not None:
            raise ValueError(f"--script {start.script} is for Megatron only. Use --host megatron, "
                             "or leave --script out")
        program = [FAIRSEQ_TRAIN, start.data, *_fairseq(model, start), *flags]
    else:
        chosen = [SCRIPT] if start.script is None else [
            start.script, "--spec", "moe_plugin.hosts.megatron.spec", "moe_layer",
            "--tokenizer-type", "NullTokenizer"]
        program = [
            "-m", "moe_plugin.hosts.megatron.launch", *(["--moe-cpu"] if start.cpu else []),
            *chosen, *_megatron(start), *flags, "--max-position-embeddings", str(model.sequence),
            "--vocab-size", str(model.vocab or BYTES)
        ]
    program += ["--bf16"] if model.element_bytes == 2 else []
    words = [*program, "--moe-config", str(start.config)]
    return [*torchrun_words(start), *with_flags(words, flags, start.flags)]


def with_flags(words: list[str], planned: Sequence[str], given: Flags) -> list[str]:
    """Return a launch command that also has the flags of a user's own command.

    The user's values replace the defaults of the launch command. Flags that the plan determines,
    and flags of other parallel sizes, keep the values of the plan or are left out.

    Args:
        words: the launch command without `torchrun` and its options.
        planned: the flags that the plan determines; see `host_flags`.
        given: the flags of the user's command; see `flags_of`.
    """
    kept = {f"--{name}": [] if value is SWITCH else [value] if isinstance(value, str) else value
            for name, value in given.items()
            if f"--{name}" not in planned and "parallel" not in name and "pipeline" not in name}
    replaced = {*kept, *(["--bf16"] if "--fp16" in kept else []),
                *(["--vocab-size"] if "--tokenizer-model" in kept else [])}
    result, stays = [], True
    for word in words:
        if word.startswith("--"):
            stays = word not in replaced
        if stays:
            result.append(word)
    return [*result, *(word for name, values in kept.items() for word in (name, *values))]


def _fairseq(model: ModelShape, start: LaunchCommand) -> list[str]:
    sizes = {
        "layers": model.layers, "embed-dim": model.model_dim, "ffn-embed-dim": model.ffn_dim,
        "attention-heads": model.heads
    }
    words = ["--user-dir", "moe_plugin", "--task", "language_modeling", "--arch", "moe_lm_tiny"]
    for name, size in sizes.items():
        words += [f"--decoder-{name}", str(size)]
    words += [
        "--moe-expert-count", str(model.experts), "--criterion", "moe_cross_entropy",
        "--moe-gate-loss-wt", BALANCE, "--dropout", "0", "--optimizer", "adam", "--lr", RATE,
        "--max-update", STEPS
    ]
    return [*words, *(["--cpu", "--distributed-backend", "gloo"] if start.cpu else [])]


def _megatron(start: LaunchCommand) -> list[str]:
    return [
        "--data-path", start.data, "--train-iters", STEPS, "--lr", RATE, "--moe-aux-loss-coeff",
        BALANCE, "--hidden-dropout", "0", "--attention-dropout", "0", "--disable-bias-linear"
    ]


def launch_text(words: list[str]) -> str:
    """Return the launch command for a shell, wrapped to lines of at most `COLUMNS` columns.

    A flag and its values always stay on the same line.
    """
    parts: list[str] = []
    for word in words:
        shown = word if isinstance(word, ShellWord) else shlex.quote(word)
        if word.startswith("--") or not parts:
            parts.append(shown)
        else:
            parts[-1] += f" {shown}"
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 3 > COLUMNS:
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}"
    return " \\\n".join(lines)


def launch_script(text: str, note: str) -> str:
    """Return a shell script that runs the launch command and appends the arguments passed to the
    script.
    """
    return f'#!/usr/bin/env bash\n# {note}\n{text} "$@"\n'


def flags_of(path: Path, needed: str) -> tuple[str | None, Flags]:
    """Return the Python file and the flags of the last command that contains the flag `needed`.

    Returns: the Python file that the command runs, or None, and a mapping from flags without
        leading dashes to their values. A flag without a value has the value `SWITCH`. A flag with
        several values has a list. The flags of `torchrun` are left out.
    Raises:
        ValueError: If the file cannot be read, or contains no such command.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--model {short(str(path))} cannot be read: {short(error)}. Pass a "
                         "readable text file") from error
    text = _COMMENT.sub("", text).replace("\\\n", " ")
    variables: dict[str, str] = {}
    for match in _ARRAY.finditer(text):
        variables[match[1]] = f"{variables.get(match[1], '')} {' '.join(match[2].split())}"
    for match in _TEXT.finditer(_ARRAY.sub("", text)):
        quotes = match[2][:1] if match[2][:1] in ("'", '"') else ""
        variables[match[1]] = " ".join(match[2].removeprefix(quotes).removesuffix(quotes).split())
    rest = _TEXT.sub("", _ARRAY.sub("", text))
    lines = [_expanded(line, variables) for line in rest.splitlines()]
    if next((line for line in lines if line.strip()), "").lstrip().startswith("--"):
        lines = [" ".join(lines)]  # a file of arguments, which may have one argument per line
    commands = [line for line in lines if f"--{needed}" in line]
    if not commands:
        raise ValueError(f"--model {short(str(path))} contains no command with --{needed}. Pass a "
                         "Hugging Face folder or config.json, a Megatron or fairseq launch script, "
                         "or a YAML file as in configs/plans/")
    words = _words(commands[-1])
    names = [word.strip("\"'") for word in words]
    starts = [i for i, name in enumerate(names) if name.endswith(".py") or name in _PROGRAMS]
    program = words[starts[-1]] if starts else ""
    return (program if starts and names[starts[-1]].endswith(".py") else None,
            _flags(words[starts[-1] + 1:] if starts else words))


def _words(line: str) -> list[str]:
    """Split a command into words. A quoted word that contains flags is split as well."""
    words: list[str] = []
    for word in _WORD.findall(line):
        if word[:1] == word[-1:] == '"' and word[1:].lstrip().startswith("--"):
            words += _words(word[1:-1])
        else:
            expanded = "$" in word or "`" in word
            words.append(ShellWord(word) if expanded else "".join(shlex.split(word)))
    return words


def _expanded(line: str, variables: Mapping[str, str]) -> str:
    line = re.sub(r'"(\$\{\w+\[@\]\})"', r"\1", line)  # the shell keeps the words of an array
    for _ in range(DEPTH):
        after = _USE.sub(lambda m: variables.get(m[1] or m[3], m[2] or m[0]), line)
        if after == line:
            break
        line = after
    return line


def _flags(words: list[str]) -> Flags:
    flags: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            current = flags[name] = [type(word)(value)] if value else []
        # a variable after a value holds more flags
        elif not (word.lstrip('"').startswith("$") and current):
            current.append(word)
    return {name: SWITCH if not values else values[0] if len(values) == 1 else values
            for name, values in flags.items()}
