"""A stand-in for the writer of fairseq's `moe` branch: the files that it makes of a model, from one
of our single-process checkpoints.

What it follows, from the branch's source: a decoder layer registers `moe_layer` (first `gate`, then
`experts`) ahead of `final_layer_norm`; parameters of experts go to `-rank-N.pt` under their number
on that rank, all others to `-shared.pt`; optimizer state is by a parameter's number in the rank's
model, and each file has that of its own parameters; everything else is in all files.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

OURS = "moe_layer.moe."


class Expert(nn.Module):
    """The branch's FeedForwardNetwork, as far as it has parameters."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


class Layer(nn.Module):
    """The branch's MOELayer of top-2 choices without a capacity, computed densely."""

    def __init__(self, width: int, inner: int, experts: int, here: int) -> None:
        super().__init__()
        self.gate = nn.Module()
        self.gate.wg = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(here))

    def forward(self, x_TD: Tensor) -> Tensor:
        top_TK, ids_TK = torch.softmax(self.gate.wg(x_TD), -1).topk(2, -1)
        each_TED = torch.stack([expert(x_TD) for expert in self.experts], 1)
        chosen_TKD = each_TED.gather(1, ids_TK[..., None].expand(*ids_TK.shape, x_TD.shape[1]))
        return (chosen_TKD * (top_TK / top_TK.sum(-1, keepdim=True))[..., None]).sum(1)


def rank_model(state: dict[str, Any], here: int) -> nn.Module:
    """A rank's model as the branch registers its modules, with stock fairseq's around the layers.

    here: experts on a rank.
    """
    from fairseq import tasks
    from fairseq.models.transformer_lm import TransformerLanguageModel
    from omegaconf import OmegaConf

    cfg = OmegaConf.create(state["cfg"], flags={"allow_objects": True})
    dense = TransformerLanguageModel.build_model(cfg.model, tasks.setup_task(cfg.task))
    for layer in dense.decoder.layers[cfg.model.moe_freq - 1::cfg.model.moe_freq]:
        width, inner, norm = layer.embed_dim, layer.fc1.out_features, layer.final_layer_norm
        del layer.fc1, layer.fc2, layer.final_layer_norm
        layer.moe_layer = Layer(width, inner, cfg.model.moe_expert_count, here)
        layer.final_layer_norm = norm
    return dense


def branch_value(name: str, ours: dict[str, Tensor], first: int) -> Tensor:
    """What the branch stores as `name`. first: the first expert of the rank."""
    head, _, inner = name.partition("moe_layer.")
    if not inner:
        return ours[name]
    if inner == "gate.wg.weight":
        return ours[head + OURS + "router.weight_ED"]
    _, number, layer, kind = inner.split(".")
    whole = ours[head + OURS + "experts." + {
        "fc1.weight": "w_in_LDF", "fc1.bias": "bias_in_LF", "fc2.weight": "w_out_LFD",
        "fc2.bias": "bias_out_LD"}[f"{layer}.{kind}"]]
    mine = whole[first + int(number)]
    return mine.T.contiguous() if kind == "weight" else mine.clone()


def optimizer_state(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of our checkpoint, by parameter name."""
    names = state["moe_plugin"]["parameters"]
    return {names[index]: values
            for index, values in state["last_optimizer_state"]["state"].items()}


def write(folder: Path, state: dict[str, Any], ranks: int, experts: int = 4) -> None:
    """The branch's files of `ranks` processes from a state of one process of ours."""
    folder.mkdir(parents=True, exist_ok=True)
    here, optimizer = max(1, experts // ranks), optimizer_state(state)
    common = {key: value for key, value in state.items()
              if key not in ("model", "last_optimizer_state", "moe_plugin")}
    position = common["extra_state"]["train_iterator"]
    position = {**position, "iterations_in_epoch": position["iterations_in_epoch"] // ranks}
    common["extra_state"] = {**common["extra_state"], "of": Namespace(rank=None),
                             "train_iterator": position}
    groups = state["last_optimizer_state"]["param_groups"]
    for rank in range(ranks):
        model, first = rank_model(state, here), rank * here % experts
        names = {name: name for name, _ in model.named_parameters()}
        group = {**groups[0], "params": list(range(len(names)))}
        for file, is_mine in ((f"rank-{rank}", True), ("shared", False)):
            if file == "shared" and rank > 0:
                continue
            tensors = {name: branch_value(name, state["model"], first)
                       for name in model.state_dict() if ("expert" in name) == is_mine}
            adam = {}
            for index, name in enumerate(names):
                if ("expert" in name) == is_mine:
                    fields = fields_of(name, optimizer)
                    adam[index] = {
                        field: branch_value(name, by_name, first) if isinstance(
                            next(iter(by_name.values())), Tensor) else next(iter(by_name.values()))
                        for field, by_name in fields.items()}
            torch.save({**common, "model": tensors, "last_optimizer_state": {
                "param_groups": [group], "state": adam}},
                folder / f"checkpoint_last-{file}.pt")


def fields_of(name: str, optimizer: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By field: our names of the parameter's tensor to its values."""
    head, _, inner = name.partition("moe_layer.")
    ours = [other for other in optimizer
            if other == name or (inner and other.startswith(head + OURS))]
    return {field: {other: optimizer[other][field] for other in ours}
            for field in optimizer[ours[0]]}
