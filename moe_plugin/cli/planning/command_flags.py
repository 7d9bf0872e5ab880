"""Read the flags of a training command from a shell script or from a file of arguments.

The script is read, not run. Variables and arrays that the script itself assigns are replaced by
their values. Other variables, such as those of the environment, keep their names.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from moe_plugin.utils.messages import short

_ARRAY = re.compile(r"^[ \t]*(\w+)\+?=\((.*?)\)", re.S | re.M)
_TEXT = re.compile(r"""^[ \t]*(?:export[ \t]+)?(\w+)=(?:"([^"]*)"|'([^']*)'|([^\s;#]*))""", re.M)
_USE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::-([^}]*))?\}|\$(\w+)")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.M)
# frameworks to which the file of a model may belong, and the files of this package
TRANSFORMERS, MEGATRON, FAIRSEQ, YAML = "transformers", "megatron", "fairseq", "yaml"
# words after which the flags of the training program begin, besides Python files
_PROGRAMS = "moe_plugin.hosts.megatron.launch", "fairseq-train", "fairseq-hydra-train"
DEPTH = 10  # number of times that a variable may refer to another variable


Flags = Mapping[str, str | list[str]]


def flags_of(path: Path, needed: str) -> tuple[str | None, Flags]:
    """Return the Python file and the flags of the last command that contains the flag `needed`.

    Returns: the Python file that the command runs, or None, and a mapping from flags without
        leading dashes to their values. A flag without a value has the value `true`. A flag with
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
        variables[match[1]] = " ".join((match[2] or match[3] or match[4] or "").split())
    rest = _TEXT.sub("", _ARRAY.sub("", text))
    lines = [_expanded(line, variables) for line in rest.splitlines()]
    if next((line for line in lines if line.strip()), "").lstrip().startswith("--"):
        lines = [" ".join(lines)]  # a file of arguments, which may have one argument per line
    commands = [line for line in lines if f"--{needed}" in line]
    if not commands:
        raise ValueError(f"--model {short(str(path))} contains no command with --{needed}. Pass a "
                         "Hugging Face folder or config.json, a Megatron or fairseq launch script, "
                         "or a YAML file as in configs/plans/")
    words = shlex.split(commands[-1].replace('"', " ").replace("'", " "))
    starts = [i for i, word in enumerate(words) if word.endswith(".py") or word in _PROGRAMS]
    program = words[starts[-1]] if starts else ""
    return (program if program.endswith(".py") else None,
            _flags(words[starts[-1] + 1:] if starts else words))


def _expanded(line: str, variables: Mapping[str, str]) -> str:
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
            current = flags[name] = [value] if value else []
        elif not (word.startswith("$") and current):  # a variable after a value holds more flags
            current.append(word)
    return {name: "true" if not values else values[0] if len(values) == 1 else values
            for name, values in flags.items()}
