"""What a forked rank does."""

import importlib.metadata
import pickle
import runpy
import sys
from collections.abc import Callable
from typing import Any


def run_command(tool: str, arguments: list[str], attack: Callable[[], None] | None = None) -> None:
    """`tool arguments...` as the shell runs it: a console script by its name, or a Python file by
    its path. attack: called first.
    """
    if attack is not None:
        attack()
    sys.argv = [tool, *arguments]
    if tool.endswith(".py"):
        runpy.run_path(tool, run_name="__main__")
    else:
        [script] = importlib.metadata.entry_points(group="console_scripts", name=tool)
        script.load()()


def run_spawning(tool: str, arguments: list[str]) -> None:
    """The same; the processes that it spawns are forked, from what it gives them pickled (a spawned
    one imports fairseq again).
    """
    import torch.multiprocessing

    def spawn(function: Any, args: tuple[Any, ...], nprocs: int, join: bool) -> None:
        function, args = pickle.loads(pickle.dumps((function, args)))
        torch.multiprocessing.start_processes(function, args, nprocs, join, start_method="fork")

    torch.multiprocessing.spawn = spawn
    run_command(tool, arguments)


def parse(parser: str, arguments: list[str]) -> None:
    """Only parse them, by this function of `fairseq.options`; status 2 if one is unknown."""
    from fairseq import options

    options.parse_args_and_arch({
        "get_training_parser": options.get_training_parser,
        "get_eval_lm_parser": options.get_eval_lm_parser,
        "get_preprocessing_parser": options.get_preprocessing_parser,
    }[parser](), input_args=arguments)
