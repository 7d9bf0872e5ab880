"""The tables of settings that a host refuses in combination: each row applies."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest

from moe_plugin.cli.doctor.packages import refusal_rows
from moe_plugin.config import MoEConfig, RunConfig, flatten, to_dict
from moe_plugin.config.refusals import Refusal, Request, Values
from moe_plugin.hosts.fairseq import refusals as fairseq
from moe_plugin.hosts.megatron import refusals as megatron
from tests.packaging.definitions import Source, graph

pytestmark = pytest.mark.fast
HOSTS: dict[str, ModuleType] = {"fairseq": fairseq, "megatron": megatron}
ROWS = [pytest.param(request, row, id=f"{host}-{name}-{row.title}")
        for host, module in HOSTS.items() for name, request in module.TABLE.items()
        for row in request.rows]
_PAIR = re.compile(r"does not fit|cannot be (used|combined) with")
# functions that refuse what only the built model, its groups or a call shows
BY_MODEL = {
    "megatron.compat.muon": {"_expert_muon.ExpertMuon", "_stacks_whole.call"},  # shards, replicas
    "megatron.file_arguments": {"file_arguments"},  # reads words before they are arguments
    "megatron.native_router": {"NativeRouter.forward"},  # the k of a call
    "megatron.rollouts": {"replay_rollouts"},  # layers of the model
    "megatron.same_tokens": {"ids_of", "shares_tokens", "_check_inside", "_check_whole_groups"},
    "megatron.script_features": {"_errors"},  # no stage has the heads
    "megatron.stages": {"Stages.route"},  # what the router returns
    "megatron.streamed": {"StreamedModel._loss_of", "build", "refuse_token_ids"},  # layers' needs
    "megatron.translate": {"_losses", "_check_native_router_settings"},  # any of our settings
    "fairseq.sharding": {"shard_optimizer"},  # the optimizer's class
}


@pytest.mark.parametrize(("request_", "row"), [
    pytest.param(*param.values, id=param.id) for param in ROWS])
def test_a_row_applies_to_its_example_with_its_message(request_: Request, row: Refusal) -> None:
    values = Values({**request_.example, **row.example})
    with pytest.raises(ValueError) as refused:
        request_.refuse(values)
    message = str(refused.value)
    assert message == request_.text(row, values)
    assert "{" not in message.replace("{3: 4}", "") and "None" not in row.title
    assert values.fill(row.setting) in message and values.fill(row.remedy) in message


@pytest.mark.parametrize("host", HOSTS)
def test_a_request_alone_is_accepted(host: str) -> None:
    for request in HOSTS[host].TABLE.values():
        request.refuse(request.example)


def sources(host: str) -> Iterator[Source]:
    return (source for source in graph().sources.values()
            if source.name.startswith(f"moe_plugin.hosts.{host}."))


@pytest.mark.parametrize("host", HOSTS)
def test_every_request_is_checked_in_its_host(host: str) -> None:
    checked = {node.attr if isinstance(node, ast.Attribute) else node.id
               for source in sources(host) if not source.name.endswith(".refusals")
               for node in ast.walk(source.tree) if isinstance(node, ast.Name | ast.Attribute)}
    assert set(HOSTS[host].TABLE) - checked == set()


@pytest.mark.parametrize("host", HOSTS)
def test_no_pair_is_refused_outside_of_the_table(host: str) -> None:
    for source in sources(host):
        name = source.name.removeprefix("moe_plugin.hosts.")
        if name.endswith(".refusals"):
            continue
        assert "refuse_unfit" not in ast.unparse(source.tree), f"{name}: add rows to the table"
        outside = {where for where, text in raised(source.tree) if _PAIR.search(text)}
        assert outside == BY_MODEL.get(name, set()), f"{name}: add rows to the table"


def raised(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, str]]:
    """The function or class around each raise statement, and the fixed text of the error."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield inside, "".join(part.value for part in ast.walk(node.exc)
                                  if isinstance(part, ast.Constant) and isinstance(part.value, str))
        named = isinstance(node, ast.FunctionDef | ast.ClassDef) and not inside.count(".")
        yield from raised(node, f"{inside}.{node.name}".lstrip(".") if named else inside)


def test_the_doctor_lists_every_request() -> None:
    rows = {(row["host"], row["name"]): row["what"] for row in refusal_rows()}
    assert set(rows) == {(host, request.title) for host, module in HOSTS.items()
                         for request in module.TABLE.values()}
    assert "--store-ema" in rows["fairseq", "--weights-on host"]
    assert "--optimizer" in rows["megatron", "--swarm"]


class Read(Values):
    """Values that note the names that conditions read."""

    def __init__(self, known: Mapping[str, Any], names: set[str]) -> None:
        super().__init__(known)
        self.names = names

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


def names_read(module: ModuleType) -> set[str]:
    """The names of settings that the conditions and the messages of a table read."""
    names = set[str]()
    for request in module.TABLE.values():
        for row in request.rows:
            values = Read({**request.example, **row.example}, names)
            row.excluded(values)
            request.text(row, values)
    return names


def test_the_names_of_this_package_s_settings_exist() -> None:
    """A condition that reads a name that does not exist would never apply."""
    ours = {**flatten(to_dict(MoEConfig())), **flatten(to_dict(RunConfig()))}
    sections = {path.partition(".")[0] for path in ours if "." in path}
    for module in HOSTS.values():
        assert {name for name in names_read(module)
                if name.partition(".")[0] in sections and "." in name} <= set(ours)
