"""Runs with frozen experts and adapters on Megatron's own loop: codes from a checkpoint of weights,
losses of the decoded weights, buffers, resumed and killed runs, and adapters for `peft`.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin.checkpoint.formats.megatron.format import MegatronFormat, NativeFormat, common
from moe_plugin.checkpoint.source import MODEL
from moe_plugin.kernels.frozen import FROZEN_AXIS, PARTS, FrozenWeight, quantized
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import (
    EP2,
    PP2,
    RECOMPUTE,
    TP2,
    Run,
    argv_for,
    losses_of,
    own_loop,
    ran,
    refusal,
    trained,
    when_built,
)

pytestmark = own_loop
WIDE = ["--hidden-size", "64", "--moe-ffn-hidden-size", "128", "--swiglu"]
LORA = ["--moe-expert-lora-rank", "3", "--moe-expert-lora-alpha", "6"]
NF4 = ["--moe-frozen-experts", "nf4", *LORA]
SGD = ["--optimizer", "sgd", "--lr", "0.1"]
SHARDED = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
EP4 = ["--expert-model-parallel-size", "4"]


@pytest.fixture(scope="module")
def base(data: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints of full precision, of our layers and of Megatron's own."""
    made = {name: str(tmp_path_factory.mktemp(name)) for name in ("ours", "native")}
    for name, more in (("ours", []), ("native", ["--native-moe"])):
        on_ranks(1, trained, argv_for(data, 1, *WIDE, *more, "--save", made[name]))
    return made


def argv(data: str, base: str, steps: int, *more: str) -> list[str]:
    return argv_for(data, steps, *WIDE, "--pretrained-checkpoint", base, *more)


def _whole(root: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint's model, with our names."""
    folder = Path(root)
    native = common.format_of(folder) == common.NATIVE
    source = (NativeFormat() if native else MegatronFormat()).open(folder)
    with NativeFormat.views_as[common.OURS](source) if native else source as source:
        return {name: source.read((MODEL, name)) for field, name in source.entries
                if field == MODEL and ".experts." in name}


def _state(run: Run) -> dict[str, Any]:
    """This rank's codes, first expert, bytes of expert parameters, and what buffers contain."""
    codes = {f"{layer.layer_number}.{name}": value.clone() for layer in run.moe_layers()
             for name, value in layer.experts.named_parameters() if name in FROZEN_AXIS}
    experts = [p for layer in run.moe_layers() for p in layer.experts.parameters()]
    buffers = [*run.chunks[0].buffers, *run.chunks[0].expert_parallel_buffers]
    trained = {id(p) for p in run.model.parameters() if p.requires_grad}
    return {"codes": codes, "first": run.moe_layers()[0].moe.placement.first_expert,
            "bytes": sum(p.numel() * p.element_size() for p in experts if not p.requires_grad),
            "buffered": {id(p) for buffer in buffers for p in buffer.params} == trained,
            "grads": [p.dtype for p in experts if p.requires_grad]}


@pytest.mark.parametrize(("kind", "format", "sizes"), [
    ("ours", "nf4", EP2), ("native", "nf4_double", EP2), ("native", "fp8", PP2),
    ("ours", "int8", TP2), ("native", "mxfp4", ["--expert-tensor-parallel-size", "2",
                                                "--moe-expert-shards", "2"])])
def test_codes_are_those_of_the_weights_in_a_checkpoint(
        kind: str, format: str, sizes: list[str], base: dict[str, str], data: str) -> None:
    weights, ranks = _whole(base[kind]), on_ranks(2, when_built, argv(
        data, base[kind], 1, "--moe-frozen-experts", format, *LORA, *SHARDED, *sizes), _state)
    seen = 0
    for state in ranks:
        assert state["buffered"] and set(state["grads"]) == {torch.float32}
        for key, value in state["codes"].items():
            number, name = key.split(".")
            weight = next(weight for weight, parts in PARTS.items() if name in parts)
            for slot, part in enumerate(value):
                w = weights[f"decoder.layers.{int(number) - 1}.mlp.experts.{weight}"]
                want = quantized(w[state["first"] + slot].T, format)[PARTS[weight].index(name)]
                shards = want.numel() // part.numel()
                assert any(torch.equal(part, one) for one in want.chunk(
                    shards, FROZEN_AXIS[name] - 1)), key
                seen += 1
    assert seen
    whole = sum(value.numel() for value in weights.values()) * 4
    codes = sum(state["bytes"] for state in ranks) / (2 if sizes == TP2 else 1)
    assert codes < whole * (0.26 if format in ("fp8", "int8") else 0.145)


def _decode(run: Run) -> None:
    """Replace the weights by those of the format nf4."""
    for layer in run.moe_layers():
        for name, value in layer.experts.named_parameters():
            for expert in value.data if name in PARTS else ():
                parts = tuple(part[None] for part in quantized(expert.T, "nf4"))
                expert.copy_(FrozenWeight("nf4", parts, torch.float32).decoded(
                    0, slice(0, expert.shape[1])).T)


def _losses(argv: list[str], decode: bool = False) -> list[float]:
    run = ran(argv, _decode if decode else lambda run: None)
    return [record["lm_loss"] for record in run.steps_logged]


@pytest.mark.parametrize("optimizer", [SGD, SHARDED], ids=["SGD", "distributed optimizer"])
def test_losses_are_those_of_the_decoded_weights(optimizer: list[str], base: dict[str, str],
                                                 data: str) -> None:
    more = [*optimizer, "--save-interval", "100"]
    [wanted] = on_ranks(1, _losses, argv(data, base["ours"], 4, *LORA, *more), True)
    assert wanted[0] - wanted[-1] > 0.02
    for world, sizes in ((2, EP2), (2, [*EP2, *RECOMPUTE]), (4, [*TP2, *EP2])):
        for found in on_ranks(world, _losses, argv(data, base["ours"], 4, *NF4, *more, *sizes)):
            assert found == pytest.approx(wanted, abs=2e-4), sizes


def _killed(argv: list[str]) -> None:
    ran(argv, stepped=lambda run: os.kill(os.getpid(), signal.SIGKILL) if run.steps == 3 else None)


@pytest.fixture(scope="module")
def saved(base: dict[str, str], data: str,
          tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], dict[int, float]]:
    """A run that was killed after step 3, with a checkpoint of step 2; its arguments; the losses of
    the same run without the end."""
    folder = tmp_path_factory.mktemp("saved")
    words = argv(data, base["ours"], 4, *NF4, *SHARDED)
    on_ranks(2, trained, [*words, *EP2, "--log-file", str(folder / "whole.jsonl")])
    with pytest.raises(AssertionError):
        on_ranks(2, _killed, [*words, *EP2, "--save", str(folder / "run"), "--load",
                              str(folder / "run"), "--save-interval", "2"])
    return folder, words, losses_of(str(folder / "whole.jsonl"))


@pytest.mark.parametrize(("world", "sizes"), [(2, EP2), (1, []), (4, EP4), (2, PP2)],
                         ids=["EP2", "EP1", "EP4", "PP2"])
def test_a_killed_run_resumes(world: int, sizes: list[str], saved: Any, tmp_path: Path) -> None:
    folder, words, losses = saved
    log = tmp_path / "log.jsonl"
    on_ranks(world, trained, [*words, *sizes, "--load", str(folder / "run"), "--log-file",
                              str(log)])
    assert losses_of(str(log)) == pytest.approx({3: losses[3], 4: losses[4]}, abs=2e-4)


REFUSED = {
    "another format": (["--moe-frozen-experts", "int8", *LORA], "--moe-frozen-experts and "),
    "another rank": ([*NF4, "--moe-expert-lora-rank", "4"], "lora_a_in_LDR of the shape"),
    "no adapters": (NF4[:2], "but this run has no such tensor"),
    "weights": ([], "codes_in_LFB of the shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_of_other_experts_is_refused(case: str, saved: Any, data: str) -> None:
    more, said = REFUSED[case]
    words = argv_for(data, 4, *WIDE, "--load", str(saved[0] / "run"), *more)
    for message in on_ranks(2, refusal, [*words, *EP2]):
        assert said in message, message


def test_weights_with_their_optimizer_state_are_refused(base: dict[str, str], data: str) -> None:
    words = argv_for(data, 4, *WIDE, *NF4, "--load", base["ours"])
    [message] = on_ranks(1, refusal, words)
    assert "Use --finetune or --pretrained-checkpoint" in message
    assert on_ranks(1, refusal, [*words, "--finetune"]) == [""]


@pytest.mark.parametrize(("flags", "said"), [
    ("--ckpt-format torch", "--ckpt-format torch, because only torch_dist can store codes"),
    ("--moe-expert-precision mxfp8", "experts.precision=mxfp8"),
    ("--moe-experts-on host", "experts.store=host"), ("--native-moe", "--native-moe"),
    ("--moe-expert-compute grouped", "experts.compute=grouped"),
    ("--moe-ffn-hidden-size 48", "finetune.frozen_experts=nf4: format=nf4 cannot store"),
    ("--moe-expert-lora-rank -1", "finetune.lora_rank=-1 is out of bounds"),
    ("--moe-expert-lora-rank 0", "finetune.lora_alpha")])
def test_unfit_settings_are_refused(flags: str, said: str, data: str) -> None:
    [message] = on_ranks(1, refusal, argv_for(data, 1, *WIDE, *NF4, *flags.split()))
    assert said in message, message


def test_a_settings_file_requests_the_same(base: dict[str, str], data: str, tmp_path: Path) -> None:
    (tmp_path / "moe.yaml").write_text("finetune: {frozen_experts: nf4, lora_rank: 3, "
                                       "lora_alpha: 6}\n")
    [by_file] = on_ranks(1, _losses, argv(data, base["ours"], 2, "--moe-config",
                                          str(tmp_path / "moe.yaml")))
    assert [by_file] == on_ranks(1, _losses, argv(data, base["ours"], 2, *NF4))


def test_experts_without_adapters_stay_frozen(base: dict[str, str], data: str) -> None:
    [losses] = on_ranks(1, _losses, argv(data, base["ours"], 4, *NF4[:2], *SHARDED))
    assert losses[0] - losses[-1] > 0.02


def test_peft_loads_the_adapters(saved: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.20")
    peft = pytest.importorskip("peft")
    from moe_plugin.hosts.plain.adapters import load_adapter, save_adapter
    from moe_plugin.hosts.plain.huggingface import swap_moe_blocks

    def model() -> Any:
        torch.manual_seed(1)
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(
            vocab_size=67, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)).eval()

    swapped, tokens = model(), torch.arange(24).view(2, 12)
    swap_moe_blocks(swapped)
    before = swapped(tokens).logits
    names = load_adapter(swapped, saved[0] / "run")
    assert len(names) == 2
    stored = _whole(str(saved[0] / "run"))
    layer = swapped.get_submodule(names[1]).experts
    torch.testing.assert_close(layer.lora_b_gate_LRF.data,
                               stored["decoder.layers.1.mlp.experts.lora_b_gate_LRF"])
    assert layer.lora_b_gate_LRF.any() and layer.adapters.scale("in", 3) == 2
    save_adapter(swapped, tmp_path)
    found = peft.PeftModel.from_pretrained(model(), tmp_path)(tokens).logits
    assert (found - before).abs().max() > 1e-4
    torch.testing.assert_close(found, swapped(tokens).logits, rtol=1e-4, atol=1e-5)
    narrow = model()
    narrow.model.layers = narrow.model.layers[:1]
    swap_moe_blocks(narrow)
    with pytest.raises(ValueError, match="the model has no such layer"):
        load_adapter(narrow, saved[0] / "run")
    shutil.copytree(saved[0] / "run", tmp_path / "copy")
    (tmp_path / "copy" / "iter_0000002" / "moe_plugin.json").unlink()
    with pytest.raises(ValueError, match="no description with finetune.lora_rank"):
        load_adapter(swapped, tmp_path / "copy")
