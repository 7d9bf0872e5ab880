"""The counting device notes what makes a GPU's host wait, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.fake_gpu.device import CountingDevice, inner, register
from tests.fake_gpu.events import EVENTS
from tests.fake_gpu.harness import on_ranks

READ, PAGEABLE = ["read"], ["pageable"]


def cases(x: Any, device: torch.device) -> dict[str, tuple[Callable[[], object], list[str]]]:
    """By name, what to do with x, [3] ones on the device, and what it must note."""
    host, pinned = torch.ones(3), torch.ones(3).pin_memory()
    here, there = torch.tensor([2, 0], device=device), torch.tensor([2, 0])
    one, mask = torch.tensor(1.0), torch.tensor([True, False, True])
    leaf = x.detach().requires_grad_()
    leaf.register_hook(lambda grad: grad * float(grad.sum()))
    with EVENTS.paused():
        indexed = x.detach().requires_grad_()[there]
    return {
        "item": (lambda: x.sum().item(), READ),
        "list": (lambda: x.tolist(), READ),
        "branch": (lambda: bool((x > 0).any()), READ),
        "to the host": (lambda: x.cpu(), READ),
        "indices": (lambda: x.nonzero(), READ),
        "mask": (lambda: x[x > 0], READ),
        "sizes": (lambda: torch.repeat_interleave(x.long()), READ),
        "in backward": (lambda: (leaf * 2).sum().backward(), READ),
        "numbers": (lambda: torch.tensor([1, 2], device=device), PAGEABLE),
        "numbers like it": (lambda: x.new_tensor([1.0]), PAGEABLE),
        "from the host": (lambda: host.to(device), PAGEABLE),
        "into it": (lambda: torch.empty_like(x).copy_(host), PAGEABLE),
        "pinned, and waited for": (lambda: pinned.to(device), PAGEABLE),
        "one number": (lambda: one.to(device), PAGEABLE),
        "index on the host": (lambda: x[there], PAGEABLE),
        "pinned index": (lambda: x[there.pin_memory()], PAGEABLE),
        "mask on the host": (lambda: x[mask], PAGEABLE),
        "index on the host, in backward": (lambda: indexed.sum().backward(), PAGEABLE),
        "write by an index on the host": (
            lambda: x.clone().index_put_((there,), x[:2]), PAGEABLE),
        "add by an index on the host": (
            lambda: x.index_put((there,), x[:2], accumulate=True), PAGEABLE),
        "write one number of the host": (lambda: x.clone().index_put_((here,), one), PAGEABLE),
        "write a Python number": (lambda: x.clone().__setitem__(here, 2.0), PAGEABLE),
        "index": (lambda: x[here], []),
        "write by an index": (lambda: x.clone().__setitem__(here, x[:2]), []),
        "place of the host": (lambda: x[torch.tensor(1)], []),
        "write to a range": (lambda: x.clone().__setitem__(slice(2), 2.0), []),
        "times a number of the host": (lambda: x * one + torch.where(x > 0, x, 0), []),
        "pinned": (lambda: pinned.to(device, non_blocking=True), []),
        "to pinned": (lambda: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True), []),
        "known sizes": (lambda: torch.repeat_interleave(x.long(), output_size=3), []),
        "arithmetic": (lambda: (x * 2 + torch.arange(3, device=device)).sum(), []),
        "choice": (lambda: torch.where(x > 0, x, 0).masked_fill_(x > 0, 1), []),
    }


def notes() -> dict[str, tuple[list[str], list[str]]]:
    """What each case notes, and what it must."""
    device, found = register(), {}
    with CountingDevice():
        for name, (call, wanted) in cases(torch.ones(3, device=device), device).items():
            with EVENTS.noted() as seen:
                call()
            found[name] = [event.kind for event in seen], wanted
    return found


def mixed() -> list[str]:
    """What is said of operands that torch refuses, too."""
    with CountingDevice():
        x, host, index = torch.ones(3, device=register()), torch.ones(3), torch.tensor([2, 0])
        here = torch.tensor([2, 0], device=register())
        return [_error_of(call) for call in (
            lambda: x + host, lambda: x.index_select(0, index), lambda: x.gather(0, index),
            lambda: host[here], lambda: x.index_put_((here,), host[:2]),
            lambda: x.index_add_(0, index, x[:2]), lambda: x.index_copy_(0, here, host[:2]))]


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


def computed() -> list[float]:
    with CountingDevice():
        x = torch.tensor([1.0, 2.0], device=register(), requires_grad=True)
        (x.square() * 3).sum().backward()
        return inner(x.grad).tolist()


def everything() -> tuple[Any, ...]:
    return notes(), mixed(), computed()


def test_device() -> None:
    [(noted, errors, gradient)] = on_ranks(1, everything)
    assert not {name: kinds for name, (kinds, wanted) in noted.items() if kinds != wanted}
    assert not [error for error in errors if "counting and on cpu" not in error]
    assert gradient == [6.0, 12.0]
