"""Adapters on experts and `peft`: the same gradients, the same files; and in a `Trainer`."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.20")
peft = pytest.importorskip("peft")

from moe_plugin.checkpoint.formats.huggingface.families import FAMILIES  # noqa: E402
from moe_plugin.checkpoint.formats.huggingface.family import Block  # noqa: E402
from moe_plugin.comm import TorchComm  # noqa: E402
from moe_plugin.hosts.plain.adapters import (  # noqa: E402
    add_lora,
    freeze_experts,
    load_adapter,
    merge_lora,
    save_adapter,
)
from moe_plugin.hosts.plain.adapters.load import restore_adapter  # noqa: E402
from moe_plugin.hosts.plain.huggingface import (  # noqa: E402
    restore_moe_blocks,
    swap_moe_blocks,
)
from tests.checkpoint.hf_models import logits, tiny, tokens  # noqa: E402
from tests.distributed import run_gloo  # noqa: E402
from tests.hosts.trainers import Killed, killed_at  # noqa: E402

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def swapped(kind: str = "mixtral") -> Any:
    model = tiny(kind)
    swap_moe_blocks(model)
    return model


def shaken(model: Any) -> Any:
    torch.manual_seed(4)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.normal_(0, 0.2)
    return model


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", [False, True])
def test_peft_loads_what_we_save(attention: bool, tmp_path: Path) -> None:
    """Also one rank for one expert, and together with peft's own adapters."""
    model = swapped()
    if attention:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=3,
                                                           target_modules=["o_proj"]))
    add_lora(model, 4, 8.0, freeze=not attention,
             rank_pattern={r".*\.1\.down": 2, r".*layers\.2.*gate_up": 0})
    ids, want = tokens(model), shaken(model)(tokens(model)).logits
    if attention:
        model.save_pretrained(str(tmp_path))  # as a `Trainer` calls it
    else:
        save_adapter(model, tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny("mixtral"), tmp_path)
    assert (tiny("mixtral")(ids).logits - want).abs().max() > 0.1
    close(loaded(ids).logits, want)
    close(loaded.merge_and_unload()(ids).logits, want)


@pytest.mark.parametrize("stacks", [STACKS, STACKS[1:]])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_we_load_what_peft_saves_and_have_its_gradients(kind: str, stacks: list[str],
                                                        tmp_path: Path) -> None:
    theirs = shaken(peft.get_peft_model(tiny(kind), peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=[], target_parameters=stacks,
        rank_pattern={"down_proj": 3}, alpha_pattern={"down_proj": 6})))
    theirs.save_pretrained(tmp_path)
    model = swapped(kind)
    load_adapter(model, tmp_path)
    ids, losses = tokens(model), []
    for each in (theirs, model):
        each.train()
        losses.append(each(ids, labels=ids).loss)
        losses[-1].backward()
    close(losses[1], losses[0])
    ours = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert ours and all("lora_" in name for name in ours)
    for name, parameter in theirs.named_parameters():
        if not parameter.requires_grad:
            continue
        inner = ".base_layer.lora" in name
        experts = f"model.layers.{name.split('layers.')[1][0]}.mlp.moe.experts."
        if "lora_A" in name:
            a = ours[experts + ("lora_a_in_LDR" if inner else "lora_a_out_LFR")]
            close(a.mT.flatten(0, 1), parameter.grad)
        elif inner:
            b = torch.cat([ours[f"{experts}lora_b_{which}_LRF"] for which in ("gate", "in")], -1)
            close(b.permute(2, 1, 0).flatten(1), parameter.grad)
        else:
            b = ours[experts + "lora_b_out_LRD"].permute(2, 1, 0).flatten(1)
            close(b, parameter.grad)


KEEP_ROUTERS = ["gemma4_text", "inkling2_text", "muse_spark_text", "openai_privacy_filter"]


@pytest.mark.parametrize("kind", [
    *(name for name, family in FAMILIES.items() if family.block), *KEEP_ROUTERS])
def test_every_family_exchanges_adapters_in_both_directions(kind: str, tmp_path: Path) -> None:
    """Stacks interleaved or transposed, and plain experts; also merged into the model's own."""
    block = Block(module="") if kind in KEEP_ROUTERS else FAMILIES[kind].block
    assert block is not None
    stacks = [f"{block.module}.{name}".lstrip(".") for name in (block.gate_up, block.down)]
    theirs = shaken(peft.get_peft_model(tiny(kind), peft.LoraConfig(
        r=4, lora_alpha=8, use_rslora=True, target_modules=[], target_parameters=stacks,
        rank_pattern={"down_proj": 3}, alpha_pattern={"down_proj": 6})))
    theirs.save_pretrained(tmp_path / "theirs")
    model = swapped(kind)
    ids, plain = tokens(model), logits(tiny(kind), tokens(model))
    load_adapter(model, tmp_path / "theirs")
    want = logits(theirs, ids)
    assert (plain - want).abs().max() > 0.1
    close(logits(model, ids), want)
    save_adapter(model, tmp_path / "ours")
    if kind != "mistral_large4_text":  # peft renames its experts, and finds none in a file
        close(logits(peft.PeftModel.from_pretrained(tiny(kind), tmp_path / "ours"), ids), want)
    merge_lora(model)
    restore_moe_blocks(model)
    close(logits(model, ids), want)


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4_text", "nemotron_h"])
def test_merged_dora_goes_into_stacks_of_every_layout(kind: str) -> None:
    model = swapped(kind)
    add_lora(model, 4, use_dora=True, rank_pattern={r".*\.1\.down": 2})
    want = shaken(model)(tokens(model)).logits
    assert (tiny(kind)(tokens(model)).logits - want).abs().max() > 0.1
    merge_lora(model)
    restore_moe_blocks(model)
    close(model(tokens(model)).logits, want)


def test_plain_experts_as_wide_as_the_model_keep_their_stacks_apart(tmp_path: Path) -> None:
    """Adapters of both stacks have the same shapes there."""
    def made() -> Any:
        return tiny("nemotron_h", moe_latent_size=24)

    for stacks in (["mixer.experts.up_proj", "mixer.experts.down_proj"],
                   ["mixer.experts.up_proj"], ["mixer.experts.down_proj"]):
        theirs = shaken(peft.get_peft_model(made(), peft.LoraConfig(
            r=2, target_modules=[], target_parameters=stacks)))
        theirs.save_pretrained(tmp_path)
        model = made()
        swap_moe_blocks(model)
        load_adapter(model, tmp_path)
        close(model(tokens(model)).logits, theirs(tokens(model)).logits)


def test_a_full_disk_leaves_the_adapters_that_were_there(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    model = swapped()
    add_lora(model, 2, 4.0)
    save_adapter(model, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def full(tensors: Any, file: Path, metadata: Any) -> None:
        Path(file).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(ValueError, match="cannot be written .*No space left.*the disk is full"):
        save_adapter(model, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_one_flipped_bit_of_saved_adapters_is_refused(tmp_path: Path) -> None:
    model = swapped()
    add_lora(model, 2, 4.0)
    save_adapter(model, tmp_path)
    [path] = tmp_path.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-len(content) // 4] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path.name}.*(damaged|checksum)"):
        load_adapter(swapped(), tmp_path)


def test_patterns_of_the_models_own_adapters_do_not_reach_experts(tmp_path: Path) -> None:
    model = peft.get_peft_model(swapped(), peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=["o_proj"], rank_pattern={"o_proj|.*": 3},
        alpha_pattern={".*": 5}))
    add_lora(model, 4, 8.0, freeze=False)
    want = shaken(model)(tokens(model)).logits
    save_adapter(model, tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny("mixtral"), tmp_path)
    close(loaded(tokens(model)).logits, want)


def _rank(folder: Path, ids: Tensor) -> Tensor:
    model = swapped()
    load_adapter(model, folder / "peft")
    with torch.no_grad():
        logits = model(ids).logits
    save_adapter(model, folder / f"again-{TorchComm().size}")
    merge_lora(model)
    restore_moe_blocks(model)
    close(model(ids).logits, logits)
    return logits


@pytest.mark.distributed
def test_two_ranks_load_save_and_merge(tmp_path: Path) -> None:
    theirs = shaken(peft.get_peft_model(tiny("mixtral"), peft.LoraConfig(
        r=4, target_modules=[], target_parameters=STACKS)))
    theirs.save_pretrained(tmp_path / "peft")
    ids = tokens(theirs)
    with torch.no_grad():
        want = theirs(ids).logits
        for logits in run_gloo(2, _rank, tmp_path, ids):
            close(logits, want)
        again = peft.PeftModel.from_pretrained(tiny("mixtral"), tmp_path / "again-2")
        close(again(ids).logits, want)


class Counting(torch.utils.data.Dataset[dict[str, Tensor]]):

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (7 * index + (1 + index % 5) * torch.arange(9)) % 60
        return {"input_ids": ids, "labels": ids}


def fine_tuned(folder: Path, parts: str, steps: int, resume: bool = False, **more: Any) -> Any:
    """A `Trainer` after its run. parts: "peft" for attention, and the format of frozen experts."""
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(tiny(
        "mixtral", hidden_size=64, intermediate_size=64).config)
    swap_moe_blocks(model)
    if "nf4" in parts:
        freeze_experts(model, "nf4")
    if "peft" in parts:
        model = peft.get_peft_model(model, peft.LoraConfig(
            r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    torch.manual_seed(3)
    add_lora(model, 4, freeze="peft" not in parts, rank_pattern={r".*\.1\.down": 2})
    run = transformers.Trainer(
        model, transformers.TrainingArguments(
            str(folder), max_steps=steps, per_device_train_batch_size=4, save_steps=2,
            learning_rate=1e-2, lr_scheduler_type="constant", report_to="none", use_cpu=True,
            disable_tqdm=True, **more),
        train_dataset=Counting(), eval_dataset=Counting())
    run.train(resume_from_checkpoint=resume)
    return run


@pytest.mark.parametrize("parts", ["", "peft", "nf4", "nf4, peft"])
def test_a_trainer_saves_adapters_and_goes_on(parts: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    once = dict(fine_tuned(tmp_path / "once", parts, 4).model.named_parameters())
    with killed_at(4), pytest.raises(Killed):
        fine_tuned(tmp_path / "twice", parts, 4)
    assert sorted(os.listdir(tmp_path / "twice")) == ["checkpoint-2", "unfinished"]
    assert (tmp_path / "twice/checkpoint-2/model.safetensors").exists() == (not parts)
    twice = dict(fine_tuned(tmp_path / "twice", parts, 4, resume=True).model.named_parameters())
    for name, value in once.items():
        torch.testing.assert_close(twice[name], value, rtol=1e-5, atol=1e-6)
    trained = {name for name, value in once.items() if value.requires_grad}
    assert any("lora_b" in name and once[name].abs().max() > 0 for name in trained)
    assert ("peft" in parts) == any("lm_head" in name for name in trained)


def test_a_trainer_loads_the_best_adapters(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    run = fine_tuned(
        tmp_path, "nf4", 6, eval_strategy="steps", eval_steps=2, greater_is_better=True,
        metric_for_best_model="eval_loss", load_best_model_at_end=True)
    best = Path(run.state.best_model_checkpoint).name
    assert best == "checkpoint-2"  # the highest loss
    model = fine_tuned(tmp_path / "other", "nf4", 2).model
    for name, value in run.model.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), value, rtol=1e-5, atol=1e-6)


def test_what_a_trainer_would_lose_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    fine_tuned(tmp_path, "nf4", 2)
    model = swapped()
    freeze_experts(model, "int8")
    add_lora(model, 4, freeze=False)
    with pytest.raises(ValueError, match="'model.embed_tokens.weight' is trained, but "
                                         "save_pretrained writes only adapters.*modules_to_save"):
        model.save_pretrained(tmp_path)
    other = tiny("mixtral", hidden_size=64, intermediate_size=64)
    swap_moe_blocks(other)
    add_lora(other, 3)
    with pytest.raises(ValueError, match=r"differ from those of the model: gate_up of layer "
                                         r"'model.layers.0.mlp.moe' has .* = \(4, 16.0, False\) in "
                                         r"the file and \(3, 16.0, False\).*Call add_lora with"):
        restore_adapter(other, tmp_path / "checkpoint-2")


def test_what_files_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = swapped()
    add_lora(model, 4, use_dora=True)
    with pytest.raises(ValueError, match="not support DoRA on stacks.*merge_lora"):
        save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match="has adapters.*merge_lora"):
        restore_moe_blocks(model)
    shared = peft.get_peft_model(swapped("qwen2_moe"), peft.LoraConfig(
        r=2, target_modules="all-linear"))
    add_lora(shared, 2, freeze=False)
    with pytest.raises(ValueError, match="adapts a module of this package's layer"
                                         ".*exclude_modules"):
        save_adapter(shared, tmp_path)
    peft.get_peft_model(tiny("mixtral"), peft.LoraConfig(
        r=2, target_modules=["o_proj"], target_parameters=STACKS)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="o_proj.* belongs to no expert.*get_peft_model"):
        load_adapter(swapped(), tmp_path)
    peft.get_peft_model(tiny("mixtral"), peft.LoraConfig(
        r=2, target_modules=["o_proj"], target_parameters=[*STACKS, "mlp.gate.weight"]
    )).save_pretrained(tmp_path / "router")
    with_attention = peft.get_peft_model(swapped(), peft.LoraConfig(target_modules=["o_proj"], r=2))
    with pytest.raises(ValueError, match="mlp.gate.*belongs to no expert.*routers and shared"):
        load_adapter(with_attention, tmp_path / "router")
    with pytest.raises(ValueError, match="no adapters for the experts of Llama.*swap_moe_blocks"):
        load_adapter(tiny("llama"), tmp_path)
    with pytest.raises(ValueError, match=r"must be \[r \* 8, in\]"):
        load_adapter(swapped("qwen3_moe"), tmp_path)
