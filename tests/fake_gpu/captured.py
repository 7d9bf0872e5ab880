"""Layers in a faked capture, and what no capture may hold."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import triton  # noqa: F401  (ranks are forked from a process that has imported it)

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm import Comm, LocalComm, Topology
from moe_plugin.config import from_dict
from moe_plugin.utils.machine import pinned_buffer, to_device
from tests.fake_gpu import stand_ins
from tests.fake_gpu.capture_lint import CaptureLint
from tests.fake_gpu.device import CountingDevice
from tests.fake_gpu.fake import install
from tests.fake_gpu.gpu import CUDA, Event, Stream
from tests.fake_gpu.ranks import CountingComm

WIDTH, TOKENS = 8, 6
PADDED = {"name": "padded", "capacity_factor": 1.0, "equal_tokens": True}
BOUNDED: dict[str, Any] = {"name": "bounded", "max_tokens": TOKENS}
PAGES = BOUNDED | {"stash_mib": 1.0, "stash_host_mib": 1.0}
# dispatch, parallel, compute, whether a capture is promised; on one rank and on two
ALONE = [
    ({"name": "ragged"}, {}, "kernels", True), (BOUNDED, {}, "auto", True),
    (PADDED, {}, "kernels", True), (PADDED | {"equal_tokens": False}, {}, "auto", True),
    (BOUNDED, {}, "loop", False), ({"name": "ragged"}, {}, "loop", False),
]
TOGETHER = [
    (BOUNDED, {}, "kernels", True), (BOUNDED, {"d": 2, "d_backward": 3}, "auto", True),
    (PAGES, {"d_backward": 2}, "kernels", True), (PAGES, {"d": 3}, "auto", True),
    (PADDED, {}, "auto", True), (PADDED, {"d": 2}, "kernels", True),
    (PADDED, {"d": 2, "d_backward": 1}, "batched", True),
    (PADDED | {"equal_tokens": False}, {}, "kernels", False),
    (PADDED | {"capacity_factor": 0.0}, {}, "kernels", False),
    ({"name": "ragged"}, {"d": 2}, "kernels", False), (BOUNDED, {"d": 2}, "loop", False),
    (BOUNDED, {}, "grouped", False),  # of float32 it passes rows to `loop`
]


def captured(world: int, folder: str) -> list[tuple[int, list[str]]]:
    """For each layer the number of launches in its capture, and what was wrong."""
    lint = _prepared()
    comm: Comm = LocalComm()
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", world_size=world,
                                rank=int(os.environ["RANK"]), timeout=timedelta(seconds=60))
        group = TorchComm(timeout_s=60)
        group.prepare(Topology.uniform(world, 2))
        comm = CountingComm(group)
    with CountingDevice():
        return [_layer(lint, comm, *cell) for cell in (ALONE if world == 1 else TOGETHER)]


def _prepared() -> CaptureLint:
    torch.set_num_threads(1)
    lint = CaptureLint()
    install(lint, lint)
    stand_ins.install()
    return lint


def _layer(lint: CaptureLint, comm: Comm, dispatch: dict[str, Any], parallel: dict[str, Any],
           compute: str, promised: bool) -> tuple[int, list[str]]:
    layer = MoELayer(from_dict({
        "model_dim": WIDTH, "num_experts": 4, "router": {"top_k": 2}, "dispatch": dispatch,
        "experts": {"kind": "gated_ffn", "hidden_dim": 8, "compute": compute},
        "parallel": {"mode": "fixed", "r": 1, **parallel}}), comm, dtype=torch.float32, device=CUDA)
    x_TD = torch.randn(TOKENS, WIDTH).to(CUDA).requires_grad_()

    def step() -> None:
        out = layer(x_TD)
        loss = out.output.square().sum() + sum(out.losses.values())
        torch.autograd.grad(loss, [x_TD, *layer.parameters()])

    for _ in range(2):  # as before each capture: kernels are compiled, ranks agree
        step()
    with lint.capture():
        try:
            step()
        except RuntimeError as error:
            lint.wrong.append(str(error))
    return lint.launches, lint.wrong


def statements() -> dict[str, list[str]]:
    """What is found of statements that no capture may hold, by name; and of some that it may."""
    lint = _prepared()
    found = {}
    with CountingDevice():
        x_N, pinned_N = torch.ones(4).to(CUDA), torch.ones(4).pin_memory()
        old, side = Event(), Stream()
        old.record()

        def on_side(join: bool) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x_N.add(1)
            if join:
                torch.cuda.current_stream().wait_stream(side)

        def unannounced() -> None:
            with torch.cuda.stream(side):
                x_N.add(1)

        programs: dict[str, Callable[[], object]] = {
            "a read": lambda: x_N.sum().item(), "a branch": lambda: bool((x_N > 0).any()),
            "a mask": lambda: x_N[x_N > 0], "numbers of the host": lambda: x_N.new_tensor([1.0]),
            "to_device": lambda: to_device([1, 2], CUDA),
            "to_device, if it did not refuse": lambda: _careless(to_device, [1, 2], CUDA),
            "pinned memory": lambda: torch.empty(2, pin_memory=True),
            "registered memory": lambda: pinned_buffer((2,), torch.float32, CUDA),
            "a copy from pinned memory": lambda: x_N.copy_(pinned_N, non_blocking=True),
            "the host writes pinned memory": lambda: pinned_N.add_(1),
            "an event is asked": old.query, "an event is waited for": old.synchronize,
            "the device is waited for": torch.cuda.synchronize,
            "an old event": lambda: torch.cuda.current_stream().wait_event(old),
            "a stream that does not come back": lambda: on_side(False),
            "a stream of its own": unannounced,
            "(a stream that comes back)": lambda: on_side(True),
            "(arithmetic)": lambda: (x_N * 2).sum(), "(new memory)": lambda: torch.zeros_like(x_N),
        }
        for name, program in programs.items():
            with lint.capture():
                try:
                    program()
                except RuntimeError as error:
                    lint.wrong.append(str(error))
            found[name] = lint.wrong
    return found


def _careless(function: Callable[..., object], *args: object) -> None:
    with patch("moe_plugin.utils.machine.capturing", lambda device: False):
        function(*args)
