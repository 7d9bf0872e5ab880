"""What registers by name is in every list that follows from its registry: the cells of the
exactness matrix, fuzzers, flags and YAML, documentation, errors. Each test registers one item, as
one source file would, and looks for it.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from moe_plugin import MoELayer
from moe_plugin.checkpoint.formats.base import formats
from moe_plugin.checkpoint.formats.huggingface import families
from moe_plugin.comm import Topology, algorithms, run_simulated
from moe_plugin.comm.exchange import RegisteredExchange
from moe_plugin.comm.simulated import SimulatedComm
from moe_plugin.config import from_dict, from_yaml
from moe_plugin.config.experts import ExpertsConfig
from moe_plugin.config.flags import config_from_flags
from moe_plugin.dispatch import dispatchers
from moe_plugin.experts import strategies
from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.records import TokenInfo
from moe_plugin.routing import ScoreFunction, declares, losses, routers, score_functions
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.registry import has_balance_loss
from moe_plugin.routing.routers.topk import TopKRouter
from moe_plugin.utils.registry import KINDS
from tests import oracle
from tests.attacks.test_damaged_values import CONVERTED, SEALED
from tests.exactness import cells
from tests.exactness.test_matrix import run_cell
from tests.fuzz.samples import TARGETS, format_of

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
NEW = "new_item"


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("generate_docs")


def by_flag_and_yaml(folder: Path, flag: str, path: str, value: Any) -> list[Any]:
    """The settings of a layer in which one setting is given in both ways."""
    tree: Any = value
    for name in reversed(path.split(".")):
        tree = {name: tree}
    (folder / "moe.yaml").write_text(yaml.safe_dump(tree))
    text = ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
    base = {"model_dim": 8, "num_experts": 4}
    return [dataclasses.replace(made, **base) for made in (
        config_from_flags({flag: text}), from_yaml(str(folder / "moe.yaml")))]


def root(x: Tensor) -> Tensor:
    return torch.nn.functional.softplus(x).sqrt()


def test_a_score_function(own_entries: None, tmp_path: Path, generator: ModuleType) -> None:
    """It joins the matrix, with the formula that it declares as its oracle."""
    asked = []

    @score_functions.register(NEW)
    class Root(ScoreFunction):
        """The root of softplus(logit)."""

        elementwise = True

        def scores(self, logits_TE: Tensor) -> Tensor:
            return root(logits_TE)

        def reference(self, logits_TE: Tensor) -> Tensor:
            asked.append(logits_TE.shape)
            return (1 + logits_TE.exp()).log().sqrt()

    assert cells.scores() == ["softmax", *sorted({NEW, *score_functions.names()} - {"softmax"})]
    few = {"activation": ["gelu"], "kind": ["ffn"], "dropout": [0.0], "score": [NEW]}
    joined = cells.cells_of("ragged", [(1, 8, None), (2, 8, None)], **few)
    assert {cell["score"] for cell in joined} == {NEW} and len(joined) > 8
    for world in (1, 2):
        run_cell(next(cell for cell in joined if cell["size"].world == world))
    assert asked
    x_TD = torch.randn(6, 8)
    for config in by_flag_and_yaml(tmp_path, "moe_router_score", "router.score", NEW):
        got = MoELayer(config).router(x_TD)
        assert (got.weights_TK.sum(1) - 1).abs().max() < 1e-6
    invariant = from_dict({"model_dim": 8, "num_experts": 4, "batch_invariant": True,
                           "router": {"score": NEW}})
    MoELayer(invariant)(x_TD)
    Root.elementwise = False
    with pytest.raises(ValueError, match="scores of Root, which does not declare elementwise=True. "
                                         "Set router.score to one of sigmoid, softmax"):
        MoELayer(invariant)
    assert f"`{NEW}`" in generator.fields_page()
    assert f"| `{NEW}` | score function: The root of" in generator.config_page()


def test_oracles_of_score_functions_are_right() -> None:
    """The formulas of the oracle, and those that are declared, are those of the package."""
    logits_TE = 3 * torch.randn(7, 5, dtype=torch.float64)
    for name in score_functions.names():
        score = score_functions.get(name)()
        torch.testing.assert_close(score.scores(logits_TE), oracle.scores_of(name, logits_TE))
        torch.testing.assert_close(score.reference(logits_TE), oracle.scores_of(name, logits_TE))
        # otherwise scores would be compared with themselves
        assert name in oracle.SCORES or "reference" in vars(type(score)), name


@pytest.mark.parametrize("name", score_functions.names())
def test_score_functions_have_their_declared_properties(name: str) -> None:
    score = score_functions.get(name)()
    logits_TE = 3 * torch.randn(7, 5, dtype=torch.float64)
    scores_TE = score.scores(logits_TE)
    assert (scores_TE >= 0).all()
    sums_to_one = bool((scores_TE.sum(1) - 1).abs().max() < 1e-6)
    # slope_TEF[t, e, f] is the slope of expert e's score with respect to expert f's logit
    whole = torch.autograd.functional.jacobian(score.scores, logits_TE)
    slope_TEF = torch.stack([whole[t, :, t] for t in range(7)])
    separate = bool((slope_TEF - slope_TEF.diagonal(dim1=1, dim2=2).diag_embed()).abs().max() == 0)
    assert score.is_softmax == (sums_to_one and not separate)
    assert score.elementwise == separate
    if "torch" in score.kernels:
        wanted_TE = slope_TEF.diagonal(dim1=1, dim2=2) / scores_TE
        found_TE = score.slope_(torch.ones_like(scores_TE), scores_TE)
        # a softmax leaves out the term that is common to all logits
        common_TE = scores_TE if score.is_softmax else 0
        torch.testing.assert_close(found_TE - common_TE, wanted_TE)


def test_an_all_to_all_algorithm(own_entries: None, tmp_path: Path, generator: ModuleType) -> None:
    calls = []

    @algorithms.register(NEW, rounds=5)
    def exchange(comm: Any, x: Tensor, send: Any = None, recv: Any = None) -> Tensor:
        """Send rows as `linear` does."""
        calls.append(comm.rank)
        return algorithms.get("linear")(comm, x, send, recv)

    joined = cells.cells_of("ragged", [(2, 8, None)], activation=["gelu"], all_to_all=[NEW])
    assert joined
    run_cell(next(cell for cell in joined if cell["size"].r != 0))
    assert set(calls) == {0, 1}
    for config in by_flag_and_yaml(tmp_path, "moe_all_to_all", "comm.all_to_all", NEW):
        calls.clear()
        stats = run_simulated(2, lambda comm, config=config: MoELayer(config, comm)(
            torch.randn(6, 8)).stats.as_dict())
        assert set(calls) == {0, 1} and NEW in stats[0]["exchanges"]
    assert NEW in run_simulated(2, lambda comm: algorithms.candidates(comm))[0]


def test_a_balance_loss(own_entries: None, tmp_path: Path, generator: ModuleType) -> None:
    """What it declares reaches the router and the host."""
    @losses.register(NEW)
    @declares(balances=False, needs=frozenset({"sequences"}))
    def spread(call: Any) -> Tensor:
        """The largest load."""
        return call.importance_E().max() / call.count

    for config in by_flag_and_yaml(tmp_path, "moe_losses", "losses", {NEW: 0.5}):
        layer = MoELayer(config)
        assert "sequences" in layer.router.needs and not has_balance_loss(config.losses)
        out = layer(torch.randn(6, 8), info=TokenInfo(sequence_T=torch.zeros(6).long(),
                                                      sequences=1))
        assert 0.25 <= out.losses[NEW].item() <= 1
    assert f"| `{NEW}` | loss: The largest load. |" in generator.config_page()
    assert has_balance_loss({"gshard": 0.1}) and not has_balance_loss({"z": 1, "sam_alignment": 1})


@pytest.mark.parametrize("name", [entry.name for entry in algorithms
                                  if isinstance(entry.value, RegisteredExchange)])
def test_all_to_all_algorithms_have_their_declared_rounds(
        name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group with two nodes of two ranks. `auto` tries algorithms with few rounds first."""
    rounds = 0

    def counted(call: Any) -> Any:
        def run(comm: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal rounds
            rounds += comm.rank == 0
            return call(comm, *args, **kwargs)
        return run

    for method in ("send_receive", "all_to_all"):
        monkeypatch.setattr(SimulatedComm, method, counted(getattr(SimulatedComm, method)))
    exchange = algorithms.get(name)
    run_simulated(4, lambda comm: exchange(comm, torch.randn(8, 3)),
                  topology=Topology.uniform(4, 2))
    assert (rounds > 1) == (exchange.rounds > 1) and rounds <= exchange.rounds


@pytest.mark.parametrize("name", losses.names())
def test_losses_have_their_declared_properties(name: str) -> None:
    """A loss that balances grows when all tokens choose the same experts; another loss may not,
    with logits whose logsumexp is 0. No loss reads information that it does not declare.
    """
    loss: Any = losses.get(name)
    info = TokenInfo(sequence_T=torch.zeros(8).long(), sequences=1)

    def value(pull: float, info: TokenInfo) -> float:
        logits_TE = pull * torch.tensor([[2.0, 1.0, 0.0, 0.0]] * 8)
        logits_TE = (logits_TE + 0.01 * torch.eye(4).repeat(2, 1)).log_softmax(1)
        call = RoutingCall(k=2, info=info, score=score_functions.get("softmax")(), noise=0.1,
                           clean_TE=logits_TE, deviation_TE=torch.ones_like(logits_TE))
        call.logits_TE = logits_TE
        call.ids_TK = logits_TE.topk(2).indices
        call.step_load_E = torch.cat([call.load_E().long(), torch.tensor([8])])
        return float(loss(call))

    assert (value(2.0, info) > value(0.0, info) + 1e-3) == getattr(loss, "balances", True)
    if not getattr(loss, "needs", frozenset()):
        assert value(2.0, TokenInfo(None, None, 0)) == value(2.0, info)


def test_routers_dispatchers_and_strategies(own_entries: None) -> None:
    @routers.register(NEW)
    class New(TopKRouter):
        """The k best experts."""

    dispatchers.register(NEW)(type("NewDispatcher", (dispatchers.get("ragged"),), {}))
    strategies.register(NEW)(strategies.get("loop"))
    assert NEW in cells.own_tokens() and cells.cells_of(NEW, [(2, 8, None)])
    joined = cells.cells_of("ragged", [(1, 8, None)], compute=[NEW], activation=["gelu"])
    run_cell(joined[0])
    for kind in ("router", "dispatcher", "expert_compute"):
        with pytest.raises(ValueError, match=rf"unknown {kind} 'x'; .*\b{NEW}\b"):
            KINDS[kind].get("x")


def test_a_model_family(monkeypatch: pytest.MonkeyPatch, generator: ModuleType) -> None:
    family = dataclasses.replace(families.FAMILIES["mixtral"], model_type=NEW, title="New model")
    monkeypatch.setitem(families.FAMILIES, NEW, family)
    assert f"| New model `{NEW}` |" in generator.families_page()
    assert f"`{NEW}`" in generator.divisors_page()


def test_every_checkpoint_format_is_damaged_by_the_tests() -> None:
    assert {format_of(name) for name in TARGETS} == set(formats.names())
    assert {*map(format_of, SEALED), *CONVERTED} == set(formats.names())


def test_activations_are_known_everywhere() -> None:
    """An activation that one of these places lacks is in no list of the others."""
    [of_settings] = [f.metadata["choices"] for f in dataclasses.fields(ExpertsConfig)
                     if f.name == "activation"]
    assert set(of_settings) == set(ACTIVATIONS) == set(oracle.ACTIVATIONS)


# lists of all names that must not grow, and why
FIXED = {
    "moe_plugin/checkpoint/formats/megatron/neutral.py": "the score functions that Megatron has",
    "scripts/bench/studies/all_to_all_model.py": "columns of a published page",
    "tests/cli/test_all_to_all.py": "columns of a published page",
}


def test_no_list_has_all_names_of_a_kind() -> None:
    """It would not grow: take the names from the registry."""
    kinds = {kind: {entry.name for entry in KINDS[kind]
                    if entry.value.__module__.startswith("moe_plugin.")}
             for kind in ("score function", "router", "loss", "dispatcher", "all_to_all",
                          "expert_compute", "checkpoint format", "statistic")}
    found = []
    for path in (path for folder in ("tests", "moe_plugin", "kernels", "scripts")
                 for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"[\[({]\s*([\"'][\w ]+[\"']\s*,\s*)+([\"'][\w ]+[\"'],?\s*)?"
                                 r"[\])}]", text):
            listed = set(re.findall(r"[\"']([\w ]+)[\"']", match[0]))
            found += [(str(path.relative_to(ROOT)), kind) for kind, names in kinds.items()
                      if len(names) > 1 and names <= listed]
    assert [place for place in found if place[0] not in FIXED] == []
    # a new name may make an entry of FIXED superfluous, which is then removed
    assert {place for place, _ in found} == set(FIXED)
