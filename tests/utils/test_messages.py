"""Messages of commands: short errors, once on a node, with the near name; the progress bar."""

from __future__ import annotations

import io

import pytest

from moe_plugin.cli.main import main
from moe_plugin.config.tree import run_from_dict
from moe_plugin.observe.features import first_step
from moe_plugin.routing.registry import routers
from moe_plugin.utils.messages import REMOVED, Parser, progress, similar_names

pytestmark = pytest.mark.fast


# Errors of command lines: short, once on a node, with the near name.


def _parser(flags: int = 0) -> Parser:
    parser = Parser(prog="tool", allow_abbrev=False)
    parser.add_argument("--expert-model-parallel-size", type=int)
    parser.add_argument("--expert-tensor-parallel-size", type=int)
    parser.add_argument("--router", choices=("switch", "gshard"))
    for number in range(flags):
        parser.add_argument(f"--some-flag-{number:03}", metavar="V" * 40)
    return parser


@pytest.mark.parametrize(("argv", "said"), [
    ("--expert-model-paralel-size 2",
     "unrecognized arguments: --expert-model-paralel-size; did you mean "
     "--expert-model-parallel-size?"),
    ("--expert-model-parallel-sizes=2 --ruter x",
     "unrecognized arguments: --expert-model-parallel-sizes --ruter; did you mean "
     "--expert-model-parallel-size instead of --expert-model-parallel-sizes?; did you mean --router"
     " instead of --ruter?"),
    ("--quite-another x", "unrecognized arguments: --quite-another"),
    ("--router swich", "did you mean switch?"), ("x", "unrecognized arguments: x")])
def test_the_near_name_is_said_in_one_line(argv: str, said: str, capsys, monkeypatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        _parser(flags=40).parse_args(argv.split())
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and shown.startswith("tool: error: ") and shown.count("\n") == 1
    assert f"{said} (all arguments: tool --help)" in shown


def test_commands_below_know_their_own_flags(capsys) -> None:
    parser = Parser(prog="tool")
    below = parser.add_subparsers(dest="command").add_parser("plan")
    below.add_argument("--model")
    for argv, said in ((["plan", "--modl", "x"], "did you mean --model?"),
                       (["plann"], "did you mean plan?")):
        with pytest.raises(SystemExit):
            parser.parse_args(argv)
        assert said in capsys.readouterr().err


def test_other_ranks_wait_to_be_ended_by_the_launcher(capsys, monkeypatch) -> None:
    """It ends all ranks when the first has ended, also the one that is about to say why."""
    waited: list[float] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("time.sleep", waited.append)
    with pytest.raises(SystemExit) as ended:
        _parser().parse_args(["--ruter"])
    assert ended.value.code == 2 and not capsys.readouterr().err and waited[0] >= 5


def test_near_names_of_registries() -> None:
    with pytest.raises(ValueError, match="^unknown router 'swich'; did you mean switch\\? If not, "
                                         "known: .*topk"):
        routers.get("swich")
    assert similar_names("loss_scale", ["loss_scale_window", "loss", "x"]) == ["loss_scale_window"]


def test_what_was_removed_says_so_in_every_place(capsys: pytest.CaptureFixture[str]) -> None:
    for name in REMOVED:
        words = name.split()
        if name.startswith("--"):  # a flag of a host
            parser = Parser(prog="train")
            with pytest.raises(SystemExit):
                parser.parse_args([name, "x"])
        elif len(words) == 1:
            section, _, key = name.rpartition(".")
            with pytest.raises(ValueError, match=f"{name} was removed: "):
                run_from_dict({section: {key: "x"}} if section else {key: "x"})
            continue
        else:
            with pytest.raises(SystemExit):
                main([*words[:-1], *["x", "y"] * (words[0] != "bench"), words[-1], "z"])
        assert f"{words[-1]} was removed: " in capsys.readouterr().err, name


# The progress bar shows itself to a terminal only.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_nothing() -> None:
    stream = io.StringIO()
    with progress(3, "waiting", stream=stream) as bar:
        bar.update(1)
        bar.set_postfix_str("loss 1")
    assert stream.getvalue() == ""


def test_a_terminal_sees_count_and_text() -> None:
    stream = Terminal()
    with progress(3, "waiting", stream=stream) as bar:
        bar.update(2)
        bar.set_postfix_str("loss 1.5")
    assert "waiting" in stream.getvalue() and "2/3" in stream.getvalue(
    ) and "loss 1.5" in stream.getvalue()


@pytest.mark.parametrize(("left", "text"), [
    (199, "; 199 steps left, 4.15 min at this speed"),
    (1, "; 1 step left, 1.25 s at this speed"), (None, "")])
def test_the_first_step_tells_the_rest(left: int | None, text: str) -> None:
    assert first_step(1.25, 8192, left) == "first step: 1.25 s, 6,554 tokens/s" + text
