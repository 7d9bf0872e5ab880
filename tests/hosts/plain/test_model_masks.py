"""Blocks in models of others take the masks that those models are called with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_plugin import auxiliary_loss, replace_ffn
from moe_plugin.hosts.plain.blocks import blocks_in
from moe_plugin.hosts.plain.huggingface import swap_moe_blocks
from moe_plugin.observe.model_layers import listen_to
from moe_plugin.routing.model_masks import attended
from tests.checkpoint.hf_models import ALONE, MODELS, tiny
from tests.logs import warned

pytest.importorskip("transformers")
LENGTHS = (4, 11, 7)
RIGHT = torch.arange(11)[None] < torch.tensor(LENGTHS)[:, None]
LEFT = RIGHT.flip(1)
MIXED = torch.stack([RIGHT[0], RIGHT[1], LEFT[2]])
IDS = torch.randint(3, 60, (3, 11), generator=torch.Generator().manual_seed(1))


def inputs_of_blocks(model: nn.Module, names: list[str], run: Callable[[], Any]) -> list[Tensor]:
    """What the named modules get in a run."""
    seen = dict[str, Tensor]()
    hooks = [model.get_submodule(name).register_forward_pre_hook(
        lambda _, args, name=name: seen.__setitem__(name, args[0].detach())) for name in names]
    run()
    for hook in hooks:
        hook.remove()
    return [seen[name] for name in names]


class Layout:
    """As fairseq2's `BatchLayout`: -1 marks padding."""

    def __init__(self, real: Tensor) -> None:
        self.position_indices = torch.where(real, real.cumsum(-1) - 1, -1)
        self.padded = not real.all()


class WithLayout(nn.Module):
    """As a model of fairseq2, whose layers also receive the layout."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        self.inner = WithLayout(0) if depth else None

    def forward(self, seqs: Tensor, seqs_layout: Layout, target_mask: Tensor | None = None,
                ) -> Tensor:
        y: Tensor = self.ffn(seqs)
        return y if self.inner is None else self.inner(y, seqs_layout)


@pytest.mark.parametrize("packed", [False, True])
def test_a_layout_of_fairseq2_marks_padding(packed: bool) -> None:
    model, real = WithLayout(), RIGHT.flatten() if packed else RIGHT
    assert replace_ffn(model, num_experts=4) == ["ffn", "inner.ffn"]
    model(torch.randn(*real.shape, 8), seqs_layout=Layout(real), target_mask=real)
    blocks = [block for _, block in blocks_in(model)]
    assert [int(block.last.stats.tokens) for block in blocks] == [sum(LENGTHS)] * 2
    model(torch.randn(*real.shape, 8), Layout(torch.ones_like(real)))
    assert [int(block.last.stats.tokens) for block in blocks] == [real.numel()] * 2


@pytest.mark.fast
def test_of_a_mask_with_cached_tokens_the_last_columns_are_read() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 0]])
    assert torch.equal(attended(mask, 2), mask[:, -2:].bool())
    assert torch.equal(attended(mask, None), mask.bool()) and attended(mask, 6) is None


@pytest.mark.parametrize("kind", [*MODELS, *ALONE])
def test_padding_of_every_family_has_no_part(kind: str) -> None:
    """Losses, load and outputs are those of the real tokens, which the original model computes."""
    model = tiny(kind)
    run = {"input_ids": IDS, "attention_mask": MIXED.long(), "use_cache": False}
    twin = copy.deepcopy(model)
    names = swap_moe_blocks(model, settings={"losses": {"switch": 1.0, "z": 1.0}})
    with torch.no_grad():
        want = inputs_of_blocks(twin, names, lambda: twin(**run))
        got, logits = model(**run).logits, twin(**run).logits
        torch.testing.assert_close(got[MIXED], logits[MIXED], rtol=1e-4, atol=1e-4)
        for (_, block), x_BSD in zip(blocks_in(model), want, strict=True):
            alone = block.moe(x_BSD[MIXED])
            assert torch.equal(block.last.stats.load_KE, alone.stats.load_KE)
            for name, loss in alone.losses.items():
                torch.testing.assert_close(block.last.losses[name], loss, rtol=1e-4, atol=1e-5)


def one_layer(**more: Any) -> tuple[Any, Any]:
    """(a Mixtral of one layer, the same with our layer)."""
    theirs = tiny("mixtral", num_hidden_layers=1, **more).train()
    ours = copy.deepcopy(theirs)
    swap_moe_blocks(ours, settings={"losses": {"switch": 2.0}})  # a sum over k choices there
    return theirs, ours


def their_loss(model: Any, mask_BS: Tensor) -> tuple[Tensor, Tensor]:
    """(balance loss of transformers, router's gradient), in float64."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    gate, seen = model.model.layers[0].mlp.gate, list[Tensor]()
    hook = gate.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model(IDS, attention_mask=mask_BS.long())
    hook.remove()
    weight_ED = gate.weight.detach().double().requires_grad_()
    logits_TE = seen[0].flatten(0, -2).double() @ weight_ED.t()
    loss = load_balancing_loss_func((logits_TE,), gate.weight.shape[0], 2, mask_BS.long())
    loss.backward()
    return loss.detach().float(), weight_ED.grad.float()


def masks_of(mask_BS: Tensor) -> dict[str, Any]:
    """One mask in all forms that transformers takes."""
    sees = mask_BS[:, None, None] & torch.ones(11, 11, dtype=torch.bool).tril()
    added = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    return {"int": mask_BS.long(), "bool": mask_BS, "float": mask_BS.float(), "4 axes": sees,
            "added": added, "packed": mask_BS * torch.tensor([[1] * 3 + [2] * 8])}


@pytest.mark.parametrize("mask_BS", [RIGHT, LEFT, MIXED], ids=["right", "left", "mixed"])
def test_the_balance_loss_of_transformers(mask_BS: Tensor) -> None:
    theirs, ours = one_layer()
    want, grad = their_loss(theirs, mask_BS)
    for form, mask in masks_of(mask_BS).items():
        ours.zero_grad()
        ours(IDS, attention_mask=mask, use_cache=False)
        loss = auxiliary_loss(ours)
        loss.backward()
        got = ours.model.layers[0].mlp.moe.router.weight_ED.grad
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6,
                                   msg=lambda text, form=form: f"{form}: {text}")
        torch.testing.assert_close(got, grad, rtol=1e-4, atol=1e-6)


def test_every_way_to_call_a_model() -> None:
    """Wrapped, by the module inside, by embeddings: the same loss."""
    peft = pytest.importorskip("peft")
    theirs, ours = one_layer()
    want, _ = their_loss(theirs, MIXED)

    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.inner = model

        def forward(self, batch: dict[str, Tensor]) -> Any:
            return self.inner(**batch)

    mask = MIXED.long()
    batch = {"input_ids": IDS, "attention_mask": mask, "labels": IDS}
    embeds = ours.get_input_embeddings()(IDS)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    ways: dict[str, Callable[[], Any]] = {
        "itself": lambda: ours(**batch), "positions": lambda: ours(IDS, mask),
        "wrapped": lambda: Wrapper(ours)(batch), "embeds": lambda: ours(
            inputs_embeds=embeds, attention_mask=mask),
        "decoder": lambda: ours.model(IDS, mask),
        "peft": lambda: peft.get_peft_model(ours, lora)(**batch)}
    for way, run in ways.items():
        run()
        torch.testing.assert_close(auxiliary_loss(ours).detach(), want, rtol=1e-5, atol=1e-6,
                                   msg=lambda text, way=way: f"{way}: {text}")
    twin = copy.deepcopy(ours)
    twin(**batch)
    ours(IDS)  # not the masks of the copy
    torch.testing.assert_close(auxiliary_loss(twin).detach(), want, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(auxiliary_loss(ours).detach(), want, rtol=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_has_the_mask_of_its_pass(reentrant: bool) -> None:
    """Two passes before their backward passes, with other masks, and one without gradients."""
    _, ours = one_layer()
    ours.set_attn_implementation("eager")

    def grads() -> list[Tensor]:
        ours.zero_grad()
        losses = []
        for mask_BS in (RIGHT, LEFT):
            y = ours(IDS, attention_mask=mask_BS.long(), use_cache=False).logits[mask_BS]
            losses.append(y.square().mean())
        with torch.no_grad():
            ours(IDS, attention_mask=MIXED.long(), use_cache=False)
        (losses[0] + losses[1]).backward()
        return [p.grad.clone() for p in ours.parameters()]

    want = grads()
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for got, right in zip(grads(), want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)


def test_a_block_that_is_recomputed_alone() -> None:
    """It has the mask of the only pass; of several that differ it is an error."""
    (_, plain), (_, ours) = one_layer(), one_layer()

    def grad(model: Any, *masks: Tensor) -> Tensor:
        model.zero_grad()
        sum(model(IDS, attention_mask=m.long(), use_cache=False).logits[m].square().mean()
            for m in masks).backward()
        return model.model.layers[0].mlp.moe.router.weight_ED.grad

    block = next(blocks_in(ours))[1]
    run = block.forward
    block.forward = lambda x: checkpoint(run, x, use_reentrant=False)
    for masks in ((RIGHT,), (LEFT, LEFT.clone())):
        torch.testing.assert_close(grad(ours, *masks), grad(plain, *masks), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="Call backward after each forward pass"):
        grad(ours, RIGHT, LEFT)


def test_records_of_experts_of_transformers_leave_padding_out() -> None:
    theirs, ours = one_layer()
    seen = dict[str, Any]()
    listen_to(theirs, seen.__setitem__)
    for checkpointed in (False, True):
        if checkpointed:
            theirs.gradient_checkpointing_enable({"use_reentrant": False})
        for mask_BS in (LEFT, MIXED):
            ours(IDS, attention_mask=mask_BS.long(), use_cache=False)
            theirs(IDS, attention_mask=mask_BS.long(), use_cache=False).logits.sum().backward()
            (stats,), block = seen.values(), next(blocks_in(ours))[1]
            assert int(stats.tokens) == sum(LENGTHS)
            assert stats.load_KE.sum(0).tolist() == block.last.stats.load_KE.sum(0).tolist()
    theirs(IDS)
    assert int(next(iter(seen.values())).tokens) == 33


def test_generation_with_a_cache() -> None:
    """Left padding has no part in a prompt's load; later tokens are all real."""
    theirs, ours = one_layer()
    theirs.eval(), ours.eval()
    loads, block = list[int](), next(blocks_in(ours))[1]
    block.register_forward_hook(lambda *_: loads.append(int(block.last.stats.load_KE.sum())))
    for more in ({}, {"cache_implementation": "static", "disable_compile": True}):
        loads.clear()
        run = {"attention_mask": LEFT.long(), "max_new_tokens": 3, "do_sample": False,
               "pad_token_id": 0, **more}
        assert torch.equal(ours.generate(IDS, **run), theirs.generate(IDS, **run))
        assert loads == [2 * sum(LENGTHS), 6, 6]


def test_bias_and_capacity_count_real_tokens() -> None:
    """Real tokens behind padding get the places that they have without padding."""
    model = tiny("deepseek_v3").train()
    swap_moe_blocks(model, settings={"dispatch.capacity_factor": 1.0})
    names = [name for name, _ in blocks_in(model)]
    found = inputs_of_blocks(model, names, lambda: model(IDS, attention_mask=LEFT.long()))
    for (_, block), x_BSD in zip(blocks_in(model), found, strict=True):
        last = block.last.stats
        assert torch.equal(block.moe.router.load_E, last.load_KE.sum(0))
        alone = block.moe(x_BSD[LEFT]).stats
        assert int(last.tokens) == sum(LENGTHS) and int(alone.kept_KE.sum()) < 3 * sum(LENGTHS)
        assert torch.equal(last.kept_KE, alone.kept_KE)


def a_transformer(batch_first: bool, decodes: bool) -> nn.Module:
    torch.manual_seed(0)
    made = (nn.TransformerDecoderLayer if decodes else nn.TransformerEncoderLayer)(
        16, 2, 24, dropout=0.0, batch_first=batch_first)
    return (nn.TransformerDecoder if decodes else nn.TransformerEncoder)(made, 2)


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_transformers_of_torch(batch_first: bool, decodes: bool, trains: bool) -> None:
    """`src_key_padding_mask` and `tgt_key_padding_mask`, called as a whole and by the layer."""
    dense = a_transformer(batch_first, decodes).train(trains)
    model = copy.deepcopy(dense)
    replace_ffn(model, num_experts=4, top_k=2, losses={"z": 1.0})
    names = [name for name, _ in blocks_in(model)]
    x = torch.randn(3, 11, 16) if batch_first else torch.randn(11, 3, 16)
    real = RIGHT if batch_first else RIGHT.t()
    name = "tgt_key_padding_mask" if decodes else "src_key_padding_mask"
    causal = nn.Transformer.generate_square_subsequent_mask(11)
    added = torch.zeros(3, 11).masked_fill(~RIGHT, float("-inf"))
    masks = [{name: ~RIGHT}, {name: added}] if decodes else [
        {name: ~RIGHT}, {name: added}, {name: ~RIGHT, "mask": causal, "is_causal": True}]
    ways = [(given, (x, x) if decodes else (x,)) for given in masks]
    with torch.set_grad_enabled(trains):
        for given, args in ways:
            got, want = model(*args, **given), dense(*args, **given)
            torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-5)
            found = inputs_of_blocks(model, names, lambda a=args, g=given: model(*a, **g))
            for (_, block), inputs in zip(blocks_in(model), found, strict=True):
                alone = block.moe(inputs[real])
                torch.testing.assert_close(block.last.losses["z"], alone.losses["z"])
                assert int(block.last.stats.tokens) == sum(LENGTHS)
            layer, block = model.layers[0], next(blocks_in(model))[1]
            layer(*args, **{name: given[name]})
            assert int(block.last.stats.tokens) == sum(LENGTHS)
        model(*args)
        assert int(block.last.stats.tokens) == 33
        if not decodes:  # a checkpoint around the layer
            y = checkpoint(layer, x, None, ~RIGHT, use_reentrant=False)
            assert int(block.last.stats.tokens) == sum(LENGTHS)
            if trains:
                y.sum().backward()


def test_an_encoder_and_a_decoder_have_their_own_masks() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2,
             "vocab_size": 67, "decoder_start_token_id": 0}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**small)).eval()
    replace_ffn(model, num_experts=4)
    encoder, decoder = (block for _, block in blocks_in(model))
    model(input_ids=IDS, attention_mask=RIGHT.long(), decoder_input_ids=IDS,
          decoder_attention_mask=MIXED.long())
    assert [int(b.last.stats.tokens) for b in (encoder, decoder)] == [22, 22]
    model(input_ids=IDS, attention_mask=RIGHT.long(), decoder_input_ids=IDS)
    assert [int(b.last.stats.tokens) for b in (encoder, decoder)] == [22, 33]


def test_forms_of_attention_masks() -> None:
    sees = MIXED[:, None, None] & torch.ones(11, 11, dtype=torch.bool).tril()
    cached = torch.cat([torch.ones(3, 1, 11, 5, dtype=torch.bool), sees], 3)
    unused = torch.cat([sees, torch.zeros(3, 1, 11, 5, dtype=torch.bool)], 3)
    for value, length in ((MIXED, 11), (torch.cat([MIXED, MIXED], 1), 11), (sees, 11),
                          (cached, 11), (MIXED[:, None, None], 11), (sees[:, 0], None),
                          ({"full_attention": None, "sliding_attention": sees}, 11)):
        assert torch.equal(attended(value, length), MIXED)
    assert torch.equal(attended(unused[2:], 11, True), MIXED[2:])
    for value in (None, MIXED[:, :5], sees[:, :, :5], torch.ones(3), object(), {}):
        assert attended(value, 11) is None


class Own(nn.Module):
    """A model with masks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))


class Known(Own):
    def forward(self, x: Tensor, padding_mask: Tensor | None = None, length: int = 11) -> Tensor:
        y: Tensor = self.ffn(x[:, :length])
        return y


class Unknown(Own):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.ffn(x)
        return y


def test_masks_that_have_no_effect_are_named_once() -> None:
    x, models = torch.randn(3, 11, 8), (Known(), Unknown())
    for model in models:
        replace_ffn(model, num_experts=4)
    known, block = models[0], next(blocks_in(models[0]))[1]
    with warned("moe_plugin.routing.model_masks") as lines:
        known(x), known(x, None), known(x, ~MIXED), models[1](x), models[1](x, None)
        assert int(block.last.stats.tokens) == sum(LENGTHS)
        models[1](x, torch.ones(11, 11, dtype=torch.bool))  # of pairs
        assert lines == []
        for _ in range(2):
            known(x, ~MIXED, length=5)
            known(x, ~MIXED, length=6)
            models[1](x, MIXED)
    assert int(block.last.stats.tokens) == 18
    assert ["A token mask of shape (3, 11) does not match the input of shape (3, 5, 8)" in lines[0],
            "Unknown received the unknown mask mask" in lines[1], len(lines)] == [
                True, True, 2]
    assert all("MoEBlock.forward(x, token_mask)" in line for line in lines)
    y = block(x, MIXED)
    assert int(block.last.stats.tokens) == sum(LENGTHS) and not y[~MIXED].any()


def test_a_compiled_model_takes_the_mask_of_each_call() -> None:
    model, x = Known(), torch.randn(3, 11, 8)
    replace_ffn(model, num_experts=4)
    block, compiled = next(blocks_in(model))[1], torch.compile(model, backend="eager")
    with torch.no_grad():
        for mask, count in ((~MIXED, 22), (None, 33), (~RIGHT, 22), (torch.zeros_like(RIGHT), 33)):
            y = compiled(x, mask)
            assert int(block.last.stats.tokens) == count
            torch.testing.assert_close(y, model(x, mask))


def test_a_pass_that_fails_leaves_no_mask() -> None:
    model, x = Known(), torch.randn(3, 11, 8)
    replace_ffn(model, num_experts=4)
    with pytest.raises(ValueError, match="the layer expects"):
        model(x[..., :4], ~MIXED)
    block = next(blocks_in(model))[1]
    block(x)
    assert int(block.last.stats.tokens) == 33
