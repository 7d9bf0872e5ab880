"""Every folder of the installed `transformers` with experts: our layers compute what it computes,
or `swap_moe_blocks` refuses it by name with a reason. A family that is in no table fails here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.24")

from moe_plugin.checkpoint.formats.huggingface import families  # noqa: E402
from moe_plugin.checkpoint.formats.huggingface.families import moe_block_of  # noqa: E402
from moe_plugin.checkpoint.formats.huggingface.kept_families import KEPT, REFUSED  # noqa: E402
from moe_plugin.cli.main import main  # noqa: E402
from moe_plugin.comm import Comm, LocalComm, TorchComm  # noqa: E402
from moe_plugin.hosts.plain.huggingface import (  # noqa: E402
    restore_moe_blocks,
    swap_moe_blocks,
)
from moe_plugin.hosts.plain.kept_router import kept_experts  # noqa: E402
from moe_plugin.training.gradients.sync import sync_gradients  # noqa: E402
from tests.checkpoint.all_families import folders, tiny_of  # noqa: E402
from tests.checkpoint.hf_models import outputs  # noqa: E402
from tests.distributed import run_gloo  # noqa: E402

BOUND = 1e-6  # of the largest value


def results(model: Any, comm: Comm | None = None) -> tuple[Tensor, Tensor]:
    """Outputs and loss. The parameters get their gradients."""
    own, generator = comm or LocalComm(), torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (4, 9), generator=generator)
    model.zero_grad()
    y = outputs(model, ids.chunk(own.size)[own.rank])
    loss = y.double().softmax(-1)[..., :7].sum(-1).log().mean()
    loss.backward()
    if comm is not None:
        sync_gradients(model, comm)
    return y.detach(), loss.detach()


def gradients(model: Any) -> dict[str, Tensor]:
    """Gradients by the model's own names. The parameters of a swapped model become its gradients,
    and the model's own blocks are restored from them.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            grad = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
        for name, buffer in model.named_buffers():
            if name.endswith("identity_rows"):
                buffer.zero_()
    restore_moe_blocks(model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()
            if parameter.requires_grad}


def padded(model: Any) -> Tensor:
    """Outputs of the tokens that are not padding, where three tokens are padding on the left."""
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        return outputs(model, ids, mask)[mask.bool()]


def close(got: Tensor, want: Tensor, what: str, largest: float = 0.0) -> None:
    off, largest = float((got - want).abs().max()), max(largest, float(want.abs().max()))
    assert off <= BOUND * largest, (what, off, largest)


def close_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Rounding is a larger part of sums whose values cancel each other."""
    assert got.keys() == want.keys()
    largest = max(float(value.abs().max()) for value in want.values())
    for name, value in want.items():
        close(got[name], value, name, max(largest / 20, 12 * float(value.abs().max())))


def kind_of(model: Any) -> str:
    return str(model.config.model_type)


@pytest.mark.parametrize("folder", folders())
def test_every_family_is_swapped_or_refused(folder: str, tmp_path: Path) -> None:
    model = tiny_of(folder)
    kind = kind_of(model)
    if kind in REFUSED:
        with pytest.raises(ValueError, match=f"{kind}.*cannot be replaced.*would need"):
            swap_moe_blocks(model)
        return
    known = moe_block_of(model.config.to_dict()) is not None
    assert known or kind in KEPT, f"unknown family {kind!r}: add it to a table"
    want_padded = padded(model)
    want, loss = results(model)
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
             for name, p in model.named_parameters() if p.requires_grad}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "theirs")
    assert swap_moe_blocks(model) and any(kept_experts(model)) != known
    got, ours = results(model)
    close(got, want, "outputs")
    close(ours, loss, "loss")
    if kind != "deepseek_v4":  # in which the model's own attention reads padding
        close(padded(model), want_padded, "padded", 5 * float(want_padded.abs().max()))
    model.save_pretrained(tmp_path / "ours")
    for file in (tmp_path / "theirs").iterdir():
        assert file.read_bytes() == (tmp_path / "ours" / file.name).read_bytes(), file.name
    model.load_state_dict(before)
    close(results(model)[0], want, "outputs of loaded weights")
    configs = [part.config for part in model.modules() if hasattr(part, "config")]
    found = gradients(model)
    assert all(part.config in configs for part in model.modules() if hasattr(part, "config"))
    assert list(model.state_dict()) == list(before)
    close_gradients(found, grads)


# with experts that return their input, own gates, a norm of outputs, other stacks, skipped experts
SPREAD = ("deepseek_v4", "longcat_flash", "inkling2", "muse_spark", "dbrx", "zaya",
          "openai_privacy_filter", "gemma4")


def _on_a_rank(folder: str, want: Tensor, grads: dict[str, Tensor]) -> int:
    comm, model = TorchComm(), tiny_of(folder)
    swap_moe_blocks(model, comm)
    got, _ = results(model, comm)
    close(got, want.chunk(comm.size)[comm.rank], "outputs", 5 * float(want.abs().max()))
    local = next(kept for _, kept in kept_experts(model)).moe.placement.local
    close_gradients(gradients(model), grads)
    return local


@pytest.mark.distributed
@pytest.mark.parametrize("folder", SPREAD)
def test_kept_routers_over_two_ranks(folder: str) -> None:
    model = tiny_of(folder)
    want, _ = results(model)
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad
             for name, p in model.named_parameters() if p.requires_grad}
    assert run_gloo(2, _on_a_rank, folder, want, grads) == [4, 4]


def test_settings_without_effect_are_refused() -> None:
    for settings, message in (({"losses": {"switch": 0.1}}, "losses=.*no effect"),
                              ({"router.name": "switch"}, "router.name"),
                              ({"experts.precision": "bf16"}, "precision")):
        with pytest.raises(ValueError, match=message):
            swap_moe_blocks(tiny_of("inkling2"), settings=settings)
    model = tiny_of("laguna")
    with pytest.raises(ValueError, match=r"router.top_k=5. Pass settings=\{'router.top_k': 3\}"):
        swap_moe_blocks(model, settings={"router.top_k": 5})
        results(model)
    with pytest.raises(ValueError, match="already called"):
        swap_moe_blocks(model)


@pytest.mark.parametrize("folder,message", [
    ("deepseek_v3", "reproduced by score=sigmoid, choice plus gate.e_score_correction_bias, "
                    "group_scores=2 .*normalize=before_drop, scaling=1.5"),
    ("laguna", "no settings reproduce the router of LagunaSparseMoeBlock; the closest are "
               "score=sigmoid.* of the tokens choose other experts"),
    ("kolibri1", "no settings reproduce .*the weights differ")])
def test_the_router_of_an_unknown_family_is_compared(
        folder: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    tiny_of(folder).save_pretrained(tmp_path)
    monkeypatch.setattr(families, "BY_TYPE", {})
    monkeypatch.delitem(cast(dict[str, Any], KEPT), folder, raising=False)
    assert main(["check-hf", str(tmp_path), "--tokens", "40"]) == 0
    assert re.search(f"model_type='{folder}' is in no table.*{message}", capsys.readouterr().out)
