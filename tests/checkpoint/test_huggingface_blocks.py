"""Our layer in place of the MoE blocks of `transformers` models computes what they compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.checkpoint import CheckpointError, save
from moe_plugin.checkpoint.formats.huggingface.format import state_source, to_neutral
from moe_plugin.checkpoint.layers import LAYER_NAMES
from moe_plugin.checkpoint.source import MODEL
from moe_plugin.cli.main import main
from moe_plugin.comm import TorchComm
from moe_plugin.hosts.plain.blocks import auxiliary_loss, blocks_in
from moe_plugin.hosts.plain.huggingface import (
    restore_moe_blocks,
    swap_moe_blocks,
    swapped_blocks,
)
from moe_plugin.kernels.scores import SOFTMAX
from moe_plugin.layer import layers_in
from moe_plugin.routing import losses
from moe_plugin.routing.call import RoutingCall
from moe_plugin.training.gradients.sync import sync_gradients
from tests.checkpoint.hf_models import MODELS, logits, tiny, tokens
from tests.distributed import run_gloo
from tests.logs import warned

transformers = pytest.importorskip("transformers", minversion="5.20")


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal within rounding: `transformers` computes norms and scores in float32 in any dtype."""
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", MODELS)
def test_logits_stay_and_weights_come_back(kind: str, dtype: torch.dtype) -> None:
    model = tiny(kind, dtype)
    ids, before = tokens(model), {name: v.clone() for name, v in model.state_dict().items()}
    want = logits(model, ids)
    names = swap_moe_blocks(model)
    layers = layers_in(model)
    first_dense = kind.startswith(("qwen2", "deep", "dots", "glm"))
    assert len(layers) == len(names) == (2 if first_dense else 3)
    close(logits(model, ids), want)
    restore_moe_blocks(model)
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    assert torch.equal(logits(model, ids), want)


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_trained_with_our_layer_goes_back(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    first = logits(model, tokens(model))
    swap_moe_blocks(model, settings={"losses": {"switch": 0.1}})
    train(model, steps=3)
    ids = tokens(model, seed=9)
    want = logits(model, ids)
    model.save_pretrained(tmp_path / "swapped")
    restore_moe_blocks(model)
    model.save_pretrained(tmp_path / "restored")
    for name in ("swapped", "restored"):
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        close(logits(again, ids), want)
    assert _files(tmp_path / "swapped") == _files(tmp_path / "restored")
    assert not torch.allclose(logits(again, tokens(model)), first, rtol=1e-2)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_a_swapped_model_loads_what_it_saved(kind: str, tmp_path: Path) -> None:
    """In the names of the file and in those of the model; nothing is missing or left over."""
    from safetensors.torch import load_file

    model = tiny(kind)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    want = logits(model, tokens(model))
    model.save_pretrained(tmp_path)
    swap_moe_blocks(model)
    for state in (load_file(tmp_path / "model.safetensors"), own):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        model.load_state_dict(state)
        close(logits(model, tokens(model)), want)
    head = {"lm_head.weight": torch.zeros_like(own["lm_head.weight"])}
    missing, unexpected = model.load_state_dict({**head, "foreign": head["lm_head.weight"]}, False)
    assert len(missing) > 5 and unexpected == ["foreign"]
    assert not logits(model, tokens(model)).any()


def test_the_trainer_of_a_swapped_model_saves_and_resumes(tmp_path: Path) -> None:
    """Four steps at once, and two that are resumed: the same weights."""
    ids = tokens(tiny("mixtral"))
    data = [{"input_ids": row, "labels": row} for row in ids.repeat(2, 1)]

    def run(folder: Path, resume: bool) -> Any:
        model = tiny("mixtral")
        swap_moe_blocks(model, settings={"losses": {}})
        arguments = transformers.TrainingArguments(
            str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=2, seed=1,
            optim="sgd", learning_rate=0.5, report_to=[], use_cpu=True, disable_tqdm=True)
        transformers.Trainer(model, arguments, train_dataset=data).train(
            resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
        return model

    first, second = run(tmp_path, False), run(tmp_path, True)
    for name, value in first.state_dict().items():
        if torch.is_tensor(value):
            close(second.state_dict()[name], value)
    assert not torch.allclose(logits(first, ids), logits(tiny("mixtral"), ids), rtol=1e-2)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    close(logits(again, ids), logits(first.eval(), ids))


def test_settings_that_transformers_ignores(tmp_path: Path) -> None:
    """Its sparsemixer chooses two experts, and other families than gpt-oss do not clamp."""
    with pytest.raises(ValueError, match="num_experts_per_tok=3 is not supported .*phimoe, which "
                                         "always uses 2; set this value"):
        swap_moe_blocks(tiny("phimoe", num_experts_per_tok=3))
    model = tiny("mixtral", swiglu_limit=0.3)
    want = logits(model, tokens(model))
    swap_moe_blocks(model)
    torch.testing.assert_close(logits(model, tokens(model)), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_experts_in_float64_with_a_router_in_float32(kind: str, tmp_path: Path) -> None:
    tiny(kind).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    model.set_experts_implementation("eager")
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    assert torch.float32 in dtypes.values() and torch.float64 in dtypes.values()
    want = logits(model, tokens(model))
    [first, *_] = swap_moe_blocks(model)
    assert model.get_submodule(first).moe.experts.dtype == torch.float64
    torch.testing.assert_close(logits(model, tokens(model)), want, rtol=1e-5, atol=1e-6)
    restore_moe_blocks(model)
    assert {name: value.dtype for name, value in model.state_dict().items()} == dtypes
    assert torch.equal(logits(model, tokens(model)), want)


def test_check_hf_says_how_far_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("deepseek_v3").save_pretrained(tmp_path)
    assert main(["check-hf", str(tmp_path), "--tokens", "9"]) == 0
    said = capsys.readouterr().out
    assert "2 MoE blocks, 9 tokens, float32: logits differ by" in said
    assert "issue 48805" in said and "issue 48690" in said
    assert main(["check-hf", str(tmp_path), "--tokens", "9", "--tolerance", "1e-30"]) == 1
    assert main(["check-hf", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe"])
def test_their_coefficient_is_k_of_ours_over_the_layers(kind: str) -> None:
    """`losses.switch` = `router_aux_loss_coef` * k / L: loss and gradients of a model of one MoE
    layer, where this is exact, are those of `transformers`.
    """
    coefficient = 0.3
    model = tiny(kind, torch.float64, num_hidden_layers=1, router_aux_loss_coef=coefficient)
    model.train()
    ids, k = tokens(model, batch=3), model.config.num_experts_per_tok
    want = model(ids, labels=ids, output_router_logits=True).loss
    want.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if ".mlp." not in name}
    assert want - model(ids, labels=ids).loss > coefficient * k / 2
    model.zero_grad(set_to_none=True)
    swap_moe_blocks(model, settings={"losses": {"switch": coefficient * k}})
    got = model(ids, labels=ids).loss + auxiliary_loss(model)
    got.backward()
    close(got, want.double())  # theirs is float32
    ours = dict(model.named_parameters())
    for name, grad in grads.items():
        close(ours[name].grad, grad)


def test_their_loss_is_one_of_all_layers() -> None:
    """Layers with the same loads: exact with k / L. Layers whose surpluses differ: theirs is less.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    tokens_, experts, k = 40, 6, 2

    def ours(layers: tuple[torch.Tensor, ...]) -> torch.Tensor:
        values = []
        for logits_TE in layers:
            ids_TK = logits_TE.topk(k, dim=1).indices
            values.append(losses.get("switch")(RoutingCall(logits_TE, ids_TK, k=k, score=SOFTMAX)))
        return torch.stack(values).sum() * k / len(layers)

    one = torch.randn(tokens_, experts, generator=torch.Generator().manual_seed(1)) * 2
    alike = tuple(x.clone().requires_grad_() for x in (one, one.flip(0), one * 1.7))
    want, got = load_balancing_loss_func(alike, experts, k), ours(alike)
    close(got, want)
    for a, b in zip(torch.autograd.grad(got, alike), torch.autograd.grad(want, alike),
                    strict=True):
        close(a, b)
    pull = torch.tensor([4.0, 0, 0, 0, 0, 0])
    uneven = (one + pull, one + pull.roll(3))
    assert load_balancing_loss_func(uneven, experts, k) < 0.8 * ours(uneven)


def train(model: Any, steps: int, comm: TorchComm | None = None) -> None:
    """SGD on random tokens, of this rank's share where there are ranks."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        ids = tokens(model, seed=step, batch=4)
        if comm is not None:
            ids = ids.chunk(comm.size)[comm.rank]
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        (loss + auxiliary_loss(model) if any(blocks_in(model)) else loss).backward()
        if comm is not None:
            sync_gradients(model, comm)
        optimizer.step()
    model.eval()


@pytest.mark.parametrize("kind", ["qwen2_moe", "deepseek_v3"])
def test_gradients_are_those_of_transformers(kind: str) -> None:
    ours, theirs = tiny(kind, torch.float64), tiny(kind, torch.float64)
    swap_moe_blocks(ours)
    ids = tokens(ours)
    for model in (ours, theirs):
        model(ids, labels=ids).loss.backward()
    grads = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    neutral = to_neutral(state_source(grads, theirs.config.to_dict()))
    for name, block in swapped_blocks(ours):
        prefix = f"layers.{name.split('.')[2]}.moe."
        mine = dict(block.moe.named_parameters())
        checked = [part for (_, part) in neutral.entries if part.startswith(prefix)]
        assert len(checked) == len(mine)
        for part in checked:
            close(mine[LAYER_NAMES[part.removeprefix(prefix)]].grad, neutral.read((MODEL, part)))
    close(ours.model.embed_tokens.weight.grad, theirs.model.embed_tokens.weight.grad)


def _on_a_rank(kind: str, want: torch.Tensor, trained: dict[str, torch.Tensor],
               folder: Path) -> int:
    comm = TorchComm()
    model = tiny(kind)
    swap_moe_blocks(model, comm, {"losses": {}})
    block = next(block for _, block in swapped_blocks(model))
    close(logits(model, tokens(model)).chunk(comm.size)[comm.rank],
          want.chunk(comm.size)[comm.rank])
    train(model, steps=2, comm=comm)
    save(folder, model, torch.optim.SGD(model.parameters(), lr=0.1), comm,
         extra={"hf_config": model.config.to_dict()})
    model.save_pretrained(folder.parent / "saved")
    with pytest.raises(ValueError, match="with experts on 2 ranks.* A Trainer saves on its first"):
        model.save_pretrained(folder.parent / "saved", state_dict=model.state_dict())
    restore_moe_blocks(model)
    for name, value in model.state_dict().items():
        close(value, trained[name])
    return block.moe.placement.local


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["qwen2_moe", "gpt_oss"])
def test_experts_on_two_ranks(kind: str, tmp_path: Path) -> None:
    """Logits and training as on one rank; the ranks' checkpoint becomes a folder of transformers.
    """
    model, folder = tiny(kind), tmp_path / "plain"
    want = logits(model, tokens(model))
    train(model, steps=2)
    assert run_gloo(2, _on_a_rank, kind, want, model.state_dict(), folder) == [3, 3]
    assert main(["reshard", str(folder), str(tmp_path / "hf"), "--to", "hf", "--model-only"]) == 0
    for name in ("hf", "saved"):
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        close(logits(again, tokens(model)), logits(model, tokens(model)))


def test_the_weight_of_one_normalized_choice_is_one() -> None:
    model = tiny("mixtral", num_experts_per_tok=1)
    want = logits(model, tokens(model))
    swap_moe_blocks(model)
    close(logits(model, tokens(model)), want)


def test_what_cannot_be_swapped_is_named() -> None:
    with pytest.raises(ValueError, match="Linear is not a transformers model"):
        swap_moe_blocks(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="model_type='llama' has no experts that can be"):
        swap_moe_blocks(tiny("llama"))
    with pytest.raises(ValueError, match="router_jitter_noise=0.1 is not supported"):
        swap_moe_blocks(tiny("mixtral", router_jitter_noise=0.1))
    with pytest.raises(ValueError, match="output_router_logits=True"):
        swap_moe_blocks(tiny("olmoe", output_router_logits=True))
    with pytest.raises(CheckpointError, match="norm_topk_prob=True has no effect"):
        swap_moe_blocks(tiny("deepseek_v2", norm_topk_prob=True))
    with pytest.raises(ValueError, match="no MoE block to replace"):
        swap_moe_blocks(tiny("qwen3_moe", mlp_only_layers=[0, 1, 2]))


def _warned(act: Callable[[], Any]) -> int:
    """How often it warns that nothing keeps experts balanced."""
    with warned("moe_plugin.routing.registry") as lines:
        act()
    return len(lines)


def test_balance_is_missed_in_training_alone() -> None:
    model = tiny("mixtral")
    assert _warned(lambda: swap_moe_blocks(model)) == 0
    assert _warned(model.train) == 1
    model = tiny("mixtral").train()
    assert _warned(lambda: swap_moe_blocks(model)) == 1


def test_a_model_that_is_cast_between_goes_back_in_its_dtype() -> None:
    model = tiny("mixtral")
    want = {name: value.bfloat16() for name, value in model.state_dict().items()}
    swap_moe_blocks(model)
    model.bfloat16()
    restore_moe_blocks(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, want[name]) and value.dtype == torch.bfloat16, name
    assert logits(model, tokens(model)).isfinite().all()


def test_a_router_in_float32_leaves_the_experts_as_they_are() -> None:
    model = tiny("mixtral").bfloat16()
    before = model.state_dict()
    swap_moe_blocks(model, settings={"router.fp32": True})
    logits(model, tokens(model))
    restore_moe_blocks(model)
    for name, value in model.state_dict().items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, before[name]), name
    assert logits(model, tokens(model)).isfinite().all()


def _trains(model: Any) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("frozen", ["mlp", "mlp.experts", "mlp.gate.", "none"])
def test_what_is_frozen_stays_frozen(kind: str, frozen: str) -> None:
    model = tiny(kind)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    before = _trains(model)
    swap_moe_blocks(model)
    for _, block in swapped_blocks(model):
        for name, trains in _trains(block.moe).items():
            assert trains != {"mlp": True, "mlp.experts": name.startswith("experts."),
                              "mlp.gate.": name.startswith("router."), "none": False}[frozen]
    restore_moe_blocks(model)
    assert _trains(model) == before
    swap_moe_blocks(model)
    model.requires_grad_(False)  # of our layers
    restore_moe_blocks(model)
    assert not any(_trains(model).values())


def test_what_a_swapped_model_cannot_do_is_named(tmp_path: Path) -> None:
    model = tiny("mixtral")
    ids = tokens(model)
    swap_moe_blocks(model)
    with pytest.raises(ValueError, match="already called .* Call restore_moe_blocks"):
        swap_moe_blocks(model)
    with pytest.raises(ValueError, match=r"output_router_logits=True .* restore_moe_blocks"):
        model(ids, labels=ids, output_router_logits=True)
    model(ids, labels=ids, output_router_logits=False)
    restore_moe_blocks(model)
    assert model(ids, labels=ids, output_router_logits=True).aux_loss is not None
    model.save_pretrained(tmp_path)
