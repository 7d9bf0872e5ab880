"""A stage of a pipeline on one peer, with its weights, optimizer and gradients."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint import trust
from moe_plugin.training.resilience.swarm.messages import Message
from moe_plugin.utils import checksums
from moe_plugin.utils.determinism import seed_of, seeded
from moe_plugin.utils.messages import cut
from moe_plugin.utils.regular_files import make_folder, write_regular

_INDEX = "swarm.json"


def save_swarm(folder: str | os.PathLike[str], step: int, states: list[Message]) -> Path:
    """Write the state of all stages. Old files stay valid until all new files are written."""
    path = make_folder(folder)
    names = [f"step_{step}_stage_{number}.pt" for number in range(len(states))]
    for name, state in zip(names, states, strict=True):
        made = io.BytesIO()
        torch.save(state, made)
        content = made.getvalue()
        write_regular(path / name, content + checksums.trailer(checksums.crc32(content)))
    write_regular(path / _INDEX, checksums.seal_json({"step": step, "stages": names}))
    for old in path.glob("step_*_stage_*.pt"):
        if old.name not in names:
            old.unlink()
    return path


def load_swarm(folder: str | os.PathLike[str], stages: int) -> tuple[int, list[Message | None]]:
    """Read a folder that `save_swarm` has written, and return the step and the state of each stage.

    Raises:
        ValueError: If the folder does not exist, contains a different number of stages, or contains
            a damaged file.
    """
    path = Path(folder) / _INDEX
    if not path.is_file():
        raise ValueError(f"{path} is missing; use a folder written by `Swarm.save`")
    try:
        index, _ = checksums.open_json(path.read_text(encoding="utf-8"))
        step, names = int(index["step"]), list(index["stages"])
        if len(names) == stages:
            states: list[Message | None] = []
            for name in names:
                path = Path(folder) / name
                checksums.verify(path)
                states.append(trust.load(path, (), name))
            return step, states
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError,
            pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read ({cut(str(error), 200)}); use a different folder "
                         "written by `Swarm.save`") from error
    raise ValueError(f"{path} has {len(names)} stages, but the swarm has {stages}; use the "
                     "same number of stages")


MakeStage = Callable[[], nn.Module]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
Loss = Callable[[Tensor, Any], Any]  # returns a loss, or (loss, additional values for the trainer)


def make_stage(stages: Sequence[MakeStage], number: int, seed: int,
               device: torch.device = torch.device("cpu")) -> nn.Module:  # noqa: B008
    """Create the module of a stage. The same seed gives the same initial weights."""
    with seeded(device, seed + number):
        return stages[number]().to(device).train()


class ServedStage:
    """A stage on one peer; see the docstring of this module.

    Args:
        module: module that computes the output of the stage.
        optimizer: function that creates an optimizer for a list of parameters.
        loss: loss function of the last stage, or None for all other stages.
        seed: random seed of the whole run.
        step: number of completed steps.
        takes_target: whether the module receives the target of a micro-batch as its second
            argument.
    """

    def __init__(self, module: nn.Module, optimizer: MakeOptimizer, loss: Loss | None, seed: int,
                 step: int, takes_target: bool = False) -> None:
        self.module, self.loss, self.seed, self.step = module, loss, seed, step
        self.takes_target = takes_target
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError("a stage has no trainable parameters; merge it with another stage")
        self.device = self.parameters[0].device
        self.optimizer = optimizer(self.parameters)
        self.weights = sum(p.numel() for p in self.parameters)
        # number of elements sent: gradients, and for each parameter the number of passes that
        # produced a gradient
        self.size = self.weights + len(self.parameters)
        self._checked = False
        self._lock = threading.Lock()
        self.forget()

    def forward(self, micro_batch: int, x: Tensor, target: Any = None, train: bool = True
                ) -> Tensor:
        """Return the output of the stage, without an autograd graph."""
        self.module.train(train)
        try:
            with torch.no_grad(), self._pass(micro_batch):
                return self._output(x.to(self.device), target)[0]
        finally:
            self.module.train()

    def evaluate(self, micro_batch: int, x: Tensor, target: Any) -> tuple[float, Message]:
        """Return the last stage's evaluation loss, and the loss function's additional values."""
        with torch.no_grad():
            loss, logged = self._loss_of(self.forward(micro_batch, x, target, False), target)
        return float(loss), logged

    def _output(self, x: Tensor, target: Any) -> tuple[Tensor, Tensor | None]:
        output = self.module(x, target) if self.takes_target else self.module(x)
        return output if isinstance(output, tuple) else (output, None)

    def _loss_of(self, out: Tensor, target: Any) -> tuple[Tensor, Message]:
        assert self.loss is not None  # the last stage has one
        result = self.loss(out, target.to(self.device) if isinstance(target, Tensor) else target)
        return result if isinstance(result, tuple) else (result, {})

    def backward(self, micro_batch: int, x: Tensor, grad: Tensor | None, target: Any
                 ) -> tuple[Tensor | None, float, Message]:
        """Recompute the stage from `x`, and run its backward pass. The weight gradients are not
        accumulated until `count` is called.

        Args:
            micro_batch: index of the micro-batch.
            x: input of the stage.
            grad: gradient of the stage's output, or None in the last stage, which uses `target`
                instead.
            target: target of the micro-batch.
        Returns: The gradient of `x` (None for integer inputs), the sum of the losses of this stage,
            and the additional values of the loss function.
        """
        x = x.to(self.device)
        if x.is_floating_point():
            x.requires_grad_()
        with torch.enable_grad(), self._pass(micro_batch), self._no_state():
            out, balance = self._output(x, target)
            logged: Message = {}
            if grad is None:
                out, logged = self._loss_of(out, target)
            roots = [(out, None if grad is None else grad.to(out))]
            losses = [roots[0][0]] if grad is None else []
            if balance is not None:
                roots.append((balance, None))
                losses.append(balance)
            torch.autograd.backward([root for root, _ in roots], [start for _, start in roots])
        grads = [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().float().cpu()
                 for p in self.parameters]
        given = torch.tensor([float(p.grad is not None) for p in self.parameters])
        self.module.zero_grad(set_to_none=True)
        with self._lock:
            self._pending[micro_batch] = torch.cat([*grads, given])
        return x.grad, float(sum(loss.detach() for loss in losses)), logged

    def count(self, micro_batch: int) -> None:
        """Accumulate the gradients of a backward pass. Called after the trainer has used the answer
        of this backward pass.
        """
        with self._lock:
            if micro_batch in self._pending:
                self._sum += self._pending.pop(micro_batch)
                self.counted.add(micro_batch)

    def forget(self) -> None:
        """Discard all gradients. Called before a step starts or is repeated."""
        with self._lock:
            self.counted: set[int] = set()
            self._pending: dict[int, Tensor] = {}
            self._sum = torch.zeros(self.size)

    @property
    def gradients(self) -> Tensor:
        """The sum of all counted gradients, as a float32 vector of length `size`."""
        return self._sum

    def norm(self, sum_S: Tensor) -> float:
        """Return the L2 norm of the gradients, given their sum over all peers of the stage."""
        return float(sum_S[:self.weights].double().norm())

    def apply(self, sum_S: Tensor, scale: float | None, groups: Sequence[Message] = ()) -> None:
        """Perform an optimizer step with the gradients summed over all peers of the stage, and
        start the next step.

        If no peer has a gradient for a parameter, the optimizer step omits the parameter, as in a
        run with a single process. The optimizer then changes neither the parameter nor its
        momentum, and applies no weight decay.

        Args:
            sum_S: gradients summed over all peers, a vector of length `size`.
            scale: factor by which the gradients are multiplied. If `scale` is None, the weights are
                not changed.
            groups: see `Swarm.update`.
        """
        for new in groups:
            for group in self.optimizer.param_groups:
                if new.get("wd_mult") in (None, group.get("wd_mult")):
                    group.update(new)
        if scale is not None:
            sizes = [p.numel() for p in self.parameters]
            *grads, passes_P = sum_S.split([*sizes, len(sizes)])
            for p, grad, passes in zip(self.parameters, grads, passes_P.tolist(), strict=True):
                p.grad = (grad * scale).view_as(p).to(p) if passes else None
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.forget()

    def state(self) -> Message:
        """Return the state that another peer needs in order to compute this stage."""
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Message) -> None:
        """Load a state that another peer has returned."""
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _pass(self, micro_batch: int) -> contextlib.AbstractContextManager[None]:
        # depends only on step and micro-batch, so that both passes draw the same numbers anywhere
        return seeded(self.device, seed_of(self.seed, self.step, micro_batch))

    @contextlib.contextmanager
    def _no_state(self) -> Iterator[None]:
        """During the first pass, check that the pass does not change any buffer. Raise an error if
        a buffer changes, because the change would exist only on this peer.
        """
        if self._checked:
            yield
            return
        before = {name: x.clone() for name, x in self.module.named_buffers()}
        yield
        for name, x in self.module.named_buffers():
            if not torch.equal(before[name], x):
                raise ValueError(
                    f"buffer {name!r} changes in a training pass, but peers of a swarm share only "
                    "weights; use layers without running statistics, and a balance loss instead of "
                    "a router with count-based biases")
        self._checked = True
