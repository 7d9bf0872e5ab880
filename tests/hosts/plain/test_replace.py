"""MoE blocks in place of the feed-forward modules of models that know nothing of them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moe_plugin
from moe_plugin import MoEBlock, MoELayer, auxiliary_loss, optimizer_groups, replace_ffn
from moe_plugin.comm import TorchComm
from moe_plugin.config.named import named_config
from moe_plugin.hosts.plain.blocks import blocks_in
from moe_plugin.hosts.plain.feed_forward import read_feed_forward
from moe_plugin.training.gradients.sync import sync_gradients
from tests.distributed import run_gloo
from tests.hosts.plain.small import plain_ffn, stack


class Gated(nn.Module):
    """Maps in another order than they are used in."""

    def __init__(self, width: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.down = nn.Linear(inner, width, bias=bias)
        self.up = nn.Linear(width, inner, bias=bias)
        self.gate = nn.Linear(width, inner, bias=bias)
        self.late, self.early = nn.Dropout(0.2), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.late(self.down(self.early(F.silu(self.gate(x)) * self.up(x))))


@pytest.mark.parametrize("module, activation, gated", [
    (plain_ffn(nn.GELU()), "gelu", False),
    (plain_ffn(nn.GELU(approximate="tanh")), "gelu_tanh", False),
    (plain_ffn(nn.ReLU(), 16, 16), "relu", False),
    (Gated(16, 40), "silu", True),
    (Gated(16, 40, bias=True), "silu", True),
])
def test_what_a_module_computes_is_found_by_running_it(module: nn.Module, activation: str,
                                                       gated: bool) -> None:
    before = copy.deepcopy(module.state_dict())
    found = read_feed_forward(module)
    assert found is not None and (found.activation, found.gated) == (activation, gated)
    assert (found.width, found.hidden) == (16, found.weights["w_in_DF"].shape[1])
    assert (found.dropout, found.after) == ((0.1, 0.2) if gated else (0.0, 0.0))
    if gated:
        assert torch.equal(found.weights["w_gate_DF"], module.gate.weight.T)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("module", [
    nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)),
    nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)),
    nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), nn.MultiheadAttention(16, 2),
    nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU()),
])
def test_other_modules_are_left_alone(module: nn.Module) -> None:
    assert read_feed_forward(module) is None


@pytest.mark.parametrize("activation, found", [(nn.ReLU(), "relu"), (nn.SiLU(), "silu"),
                                               (nn.Tanh(), None), (nn.ReLU6(), None)])
def test_zeros_hide_no_activation(activation: nn.Module, found: str | None) -> None:
    module = plain_ffn(activation)
    for parameter in module[2].parameters():
        nn.init.zeros_(parameter)
    read = read_feed_forward(module)
    assert (read and read.activation) == found
    assert read is None or not read.weights["w_out_FD"].any()


class Training(nn.Module):
    """A feed-forward module on which `act` acts in training only."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.ffn, self.act, self.drop = plain_ffn(nn.ReLU()), act, nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.ffn(x))
        return self.act(y) if self.training else y


@pytest.mark.parametrize("act, found", [
    (lambda y: F.dropout(y, 0.05), False), (nn.AlphaDropout(0.05), False),
    (nn.Dropout1d(0.05), False), (lambda y: y + torch.rand(()).lt(0.5) * y, False),
    (lambda y: y, True)])
def test_what_acts_in_training_is_no_feed_forward_module(act: Callable[[Tensor], Tensor],
                                                         found: bool) -> None:
    module = Training(act).eval()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    read = read_feed_forward(module)
    assert torch.equal(torch.get_rng_state(), state) and not module.training
    assert (read is not None) == found and module.drop.p == 0.1
    with pytest.raises(ValueError, match="training-only part except nn.Dropout"):
        replace_ffn(nn.Sequential(nn.Sequential(*module.ffn, nn.Dropout1d(0.1))), match="0")


@pytest.mark.parametrize("place, activation, found", [
    (0, nn.ReLU(), None),  # of the input
    (1, nn.ReLU(), (0.25, 0.0)),  # commutes with what follows
    (1, nn.GELU(), None), (2, nn.GELU(), (0.25, 0.0)), (3, nn.GELU(), (0.0, 0.25)),
])
@pytest.mark.parametrize("inner", [16, 40])
def test_a_dropout_is_taken_over_where_it_drops_the_same(
        place: int, activation: nn.Module, found: tuple[float, float] | None, inner: int) -> None:
    parts = [*plain_ffn(activation, inner=inner)]
    parts.insert(place, nn.Dropout(0.25))
    read = read_feed_forward(nn.Sequential(*parts))
    assert (read and (read.dropout, read.after)) == found


def test_a_replaced_model_computes_what_it_did_before() -> None:
    model = stack()
    x = torch.randn(5, 7, 16)
    before = model(x)
    assert replace_ffn(model, num_experts=4, every=2) == ["1.ffn", "3.ffn"]
    torch.testing.assert_close(model(x), before)
    assert [name for name, _ in blocks_in(model)] == ["1.ffn", "3.ffn"]


@pytest.mark.parametrize("match", [None, "2"])
def test_a_shared_module_stays_shared(match: str | None) -> None:
    ffn, norm = plain_ffn(nn.GELU()), nn.LayerNorm(16)
    model, x = nn.Sequential(ffn, norm, ffn, nn.Sequential(norm, ffn)), torch.randn(5, 16)
    before = model(x)
    assert replace_ffn(model, num_experts=4, match=match) == ["0"]
    assert isinstance(model[0], MoEBlock) and model[0] is model[2] is model[3][1]
    torch.testing.assert_close(model(x), before)
    assert len(model[0].losses()) == 3


@pytest.mark.parametrize("which", ["0", "2", "both"])
def test_modules_that_share_parameters_are_refused(which: str) -> None:
    """Their blocks would have experts of their own; the model stays as it was."""
    one, two = plain_ffn(nn.GELU()), plain_ffn(nn.GELU())
    for index in (0, 2) if which == "both" else (int(which),):
        two[index].weight = one[index].weight
    model = nn.Sequential(one, two)
    with pytest.raises(ValueError, match="modules '0' and '1' share parameters.* Use the same"):
        replace_ffn(model, num_experts=4)
    assert model[0] is one and model[1] is two
    assert replace_ffn(model, num_experts=4, match="1") == ["1"]


@pytest.mark.parametrize("upcycle", [True, False])
def test_copies_of_what_is_frozen_are_frozen(upcycle: bool) -> None:
    model = stack()
    model[0].ffn.requires_grad_(False)
    model[1].ffn[0].bias.requires_grad_(False)
    replace_ffn(model, num_experts=4, upcycle=upcycle)
    first, second, third, _ = (block.moe for _, block in blocks_in(model))
    frozen = [{name for name, p in moe.named_parameters() if not p.requires_grad}
              for moe in (first, second, third)]
    assert frozen == [{f"experts.{name}" for name, _ in first.experts.named_parameters()},
                      {"experts.bias_in_LF"}, set()] if upcycle else frozen == [set()] * 3


def test_replaced_models_train() -> None:
    model = stack()
    replace_ffn(model, num_experts=4, router="topk", top_k=2, losses={"switch": 0.5})
    groups = optimizer_groups(model, 1e-2, weight_decay=0.1, expert_lr=2e-2)
    assert {group["name"]: (group["lr"], group["weight_decay"]) for group in groups} == {
        "dense": (1e-2, 0.1), "dense, no decay": (1e-2, 0.0), "experts": (2e-2, 0.1),
        "experts, no decay": (2e-2, 0.0)}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    optimizer = torch.optim.SGD(groups)
    x, y = torch.randn(64, 16), torch.randint(3, (64,))
    losses = []
    for _ in range(20):
        auxiliary = auxiliary_loss(model)
        loss = F.cross_entropy(model(x), y) + auxiliary_loss(model)
        assert auxiliary is not auxiliary_loss(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    by_hand = sum(0.5 * block.last.losses["switch"] for _, block in blocks_in(model))
    torch.testing.assert_close(auxiliary_loss(model), by_hand)


def test_match_takes_a_pattern_or_a_function() -> None:
    assert replace_ffn(stack(), 4, match=r"[02]\.ffn") == ["0.ffn", "2.ffn"]
    assert replace_ffn(stack(), 4, match=lambda name, module: name == "1.ffn") == ["1.ffn"]
    model = stack()
    with pytest.raises(ValueError, match=r"'0' \(Block\) matches .* Exclude the module"):
        replace_ffn(model, 4, match=r"\d")
    with pytest.raises(ValueError, match="no feed-forward module to replace with match='ffn'"):
        replace_ffn(model, 4, match="ffn")
    with pytest.raises(ValueError, match="every=0 must be >= 1"):
        replace_ffn(model, 4, every=0)
    with pytest.raises(ValueError, match="unknown setting 'topk'=2"):
        replace_ffn(model, 4, topk=2)
    assert not list(blocks_in(model))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_torchs_own_transformer(activation: str) -> None:
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 3, 3, 40, 0.0, activation, batch_first=True)
    source, target = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    def run() -> Tensor:
        # blocks give zeros for padding, so that nothing may read it
        return model(source, target, src_key_padding_mask=padding, memory_key_padding_mask=padding)

    before = run()
    with torch.no_grad():
        evaluated = model.eval()(source, target)
    names = replace_ffn(model.train(), num_experts=4, every=2)
    assert names == ["encoder.layers.1", "decoder.layers.0", "decoder.layers.2"]
    torch.testing.assert_close(run(), before)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(source, target), evaluated)
        assert torch.isfinite(run()).all()  # a mask, no gradient: torch's fused path


def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "intermediate_size": 40}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small))
    ids = torch.randint(50, (2, 9))
    for model, name in ((gpt2, "transformer.h.1.mlp"), (llama, "model.layers.1.mlp")):
        before = model.eval()(ids).logits
        assert replace_ffn(model, num_experts=4, every=2) == [name]
        torch.testing.assert_close(model(ids).logits, before, atol=2e-5, rtol=1e-4)


def test_transformers_write_and_read_replaced_models(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    settings = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=40)

    def replaced() -> nn.Module:
        model = transformers.LlamaForCausalLM(settings).eval()
        replace_ffn(model, num_experts=4)
        return model

    model, again = replaced(), replaced()
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    left_out = again.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not left_out.unexpected_keys
    assert all(name.endswith("_extra_state") for name in left_out.missing_keys)
    ids = torch.randint(50, (2, 9))
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize(("model", "every", "words"), [
    (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), 1, "a model that contains it"),
    (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), 1,
     "wrap them in their own nn.Sequential"),
    (nn.TransformerEncoderLayer(8, 2, 16, device="meta"), 1, "this model is on the meta device"),
    (stack(), 9, "it has fewer than 9"),
])
def test_why_nothing_is_replaced(model: nn.Module, every: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace_ffn(model, every=every)


@pytest.mark.parametrize(("wrong", "meant"), [
    ("num_expert", "num_experts"), ("hidden_dim", "expert_hidden_dim"),
    ("capacity", "capacity_factor"), ("topk", "top_k")])
def test_a_setting_that_is_unknown_may_be_meant_otherwise(wrong: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"unknown setting '{wrong}'=3; did you mean .*{meant}"):
        MoEBlock(16, **{wrong: 3})
    with pytest.raises(ValueError, match="unknown setting 'zzz'=3; use a flag name"):
        MoEBlock(16, zzz=3)


def test_a_layer_takes_names_and_dicts() -> None:
    config = MoELayer(16, num_experts=4, router="switch", experts={"hidden_dim": 24},
                      all_to_all="linear", losses={"switch": 0.1}).config
    assert (config.model_dim, config.num_experts, config.router.name, config.experts.hidden_dim,
            config.comm.all_to_all, config.losses) == (
        16, 4, "switch", 24, "linear", {"switch": 0.1})
    assert MoELayer(16, router={"name": "cosine", "top_k": 1}).config.router.top_k == 1
    with pytest.raises(ValueError, match=r"router.top_k is given twice"):
        MoELayer(16, router={"top_k": 1}, top_k=2)
    with pytest.raises(ValueError, match="router='switch' is given together with a whole MoE"):
        MoELayer(named_config(16), router="switch")
    with pytest.raises(ValueError, match="router.top_k=9 .* <= num_experts=8"):
        MoELayer(16, top_k=9)


def test_a_file_without_a_width(tmp_path) -> None:
    (tmp_path / "moe.yaml").write_text("num_experts: 4\nrouter: {top_k: 1}\n")
    config = moe_plugin.from_yaml(str(tmp_path / "moe.yaml"), model_dim=24)
    assert (config.model_dim, config.num_experts) == (24, 4)


def _tokens() -> Tensor:
    return torch.arange(8 * 16, dtype=torch.float32).reshape(8, 16).sin()


def _on_two_ranks() -> tuple[Tensor, Tensor, Tensor]:
    model, comm = stack(), TorchComm()
    replace_ffn(model, num_experts=4, every=2, comm=comm)
    y = model(_tokens().chunk(2)[comm.rank])
    y.square().sum().backward()
    sync_gradients(model, comm)
    return y.detach(), model[0].ffn[0].weight.grad, model[1].ffn.moe.experts.w_in_LDF.grad


@pytest.mark.distributed
def test_ranks_share_the_experts() -> None:
    results = run_gloo(2, _on_two_ranks)
    model = stack()
    replace_ffn(model, num_experts=4, every=2)
    y = model(_tokens())
    (y.square().sum() / 2).backward()  # each rank's part is averaged
    torch.testing.assert_close(torch.cat([y for y, _, _ in results]), y)
    torch.testing.assert_close(results[1][1], model[0].ffn[0].weight.grad)
    torch.testing.assert_close(torch.cat([grad for _, _, grad in results]),
                               model[1].ffn.moe.experts.w_in_LDF.grad)
