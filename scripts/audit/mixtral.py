"""A dense Mixtral model with one block in float64, the reference for audit targets that are whole
models.

The model uses the parameter names and weight layouts of `transformers`, but shares no code with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.audit.reference import SEED, routed_experts

_BLOCK = "model.layers.0."
EXPERTS = f"{_BLOCK}mlp"
GATE_UP, DOWN = f"{EXPERTS}.experts.gate_up_proj", f"{EXPERTS}.experts.down_proj"
ROUTER = f"{EXPERTS}.gate.weight"
_NORMS = (f"{_BLOCK}input_layernorm.weight", f"{_BLOCK}post_attention_layernorm.weight",
          "model.norm.weight")


@dataclass(frozen=True)
class DenseMixtral:
    """A model with an embedding, causal attention, experts and cross-entropy losses.

    The attention uses rotary position embeddings and grouped-query attention. A sample is a
    sequence of `length` tokens. The target of each token is the next token.
    """

    vocabulary: int = 13
    width: int = 8
    heads: int = 4
    key_heads: int = 4
    hidden: int = 12
    num_experts: int = 4
    top_k: int = 2
    length: int = 5
    epsilon: float = 1e-5
    theta: float = 1e4
    rows: int = 2
    experts: frozenset[str] = frozenset({GATE_UP, DOWN})

    def weights(self, skewed: bool) -> dict[str, Tensor]:
        """Return random weights.

        Feature 0 of every token is large, so a large router weight for this feature skews the load.
        """
        d, head, e = self.width, self.width // self.heads, self.num_experts
        shapes = {"model.embed_tokens.weight": (self.vocabulary, d),
                  f"{_BLOCK}self_attn.q_proj.weight": (d, d),
                  f"{_BLOCK}self_attn.k_proj.weight": (self.key_heads * head, d),
                  f"{_BLOCK}self_attn.v_proj.weight": (self.key_heads * head, d),
                  f"{_BLOCK}self_attn.o_proj.weight": (d, d), ROUTER: (e, d),
                  GATE_UP: (e, 2 * self.hidden, d), DOWN: (e, d, self.hidden),
                  **dict.fromkeys(_NORMS, (d,)), "lm_head.weight": (self.vocabulary, d)}
        generator = torch.Generator().manual_seed(SEED)
        w = {name: 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
             for name, shape in shapes.items()}
        for name in _NORMS:
            w[name] = 1 + 0.2 * w[name]
        w["model.embed_tokens.weight"][:, 0] = 2.0
        w[ROUTER] *= 2
        w[ROUTER][:, 0] = 0
        if skewed:
            w[ROUTER][: self.top_k, 0] = 6.0
        return w

    def draw(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return token ids and the target ids (the next tokens), both int64 [rows, length]."""
        ids = torch.randint(0, self.vocabulary, (rows, self.length + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]

    def losses(self, weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy loss of each token, [rows * length]."""
        rows = [self._sequence(weights, ids_T) for ids_T in x]
        if not rows:
            return weights["lm_head.weight"].new_zeros(0)
        return F.cross_entropy(torch.cat(rows), y.flatten(), reduction="none")

    def _sequence(self, w: Mapping[str, Tensor], ids_T: Tensor) -> Tensor:
        h_TD = w["model.embed_tokens.weight"][ids_T]
        h_TD = h_TD + self._attention(w, self._norm(h_TD, w[_NORMS[0]]))
        gate_EFD, up_EFD = w[GATE_UP].chunk(2, dim=1)
        h_TD = h_TD + routed_experts(
            self._norm(h_TD, w[_NORMS[1]]),
            {"router": w[ROUTER], "gate": gate_EFD, "up": up_EFD, "down": w[DOWN]}, self.top_k)
        return self._norm(h_TD, w[_NORMS[2]]) @ w["lm_head.weight"].T

    def _norm(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        return weight_D * x_TD / (x_TD.square().mean(1, keepdim=True) + self.epsilon).sqrt()

    def _attention(self, w: Mapping[str, Tensor], x_TD: Tensor) -> Tensor:
        size = self.width // self.heads
        q, k, v = (x_TD @ w[f"{_BLOCK}self_attn.{name}_proj.weight"].T for name in "qkv")
        outputs = []
        for head in range(self.heads):
            shared = head * self.key_heads // self.heads
            q_TC = self._rotated(q[:, head * size:(head + 1) * size])
            k_TC = self._rotated(k[:, shared * size:(shared + 1) * size])
            v_TC = v[:, shared * size:(shared + 1) * size]
            rows = []
            for t in range(len(x_TD)):  # token t attends to the tokens up to itself
                weight_S = (k_TC[: t + 1] @ q_TC[t] / size**0.5).softmax(0)
                rows.append(weight_S @ v_TC[: t + 1])
            outputs.append(torch.stack(rows))
        return torch.cat(outputs, 1) @ w[f"{_BLOCK}self_attn.o_proj.weight"].T

    def _rotated(self, x_TC: Tensor) -> Tensor:
        """Rotate the pairs (c, c + C/2) by the angle t * theta ** (-2c / C)."""
        half = x_TC.shape[1] // 2
        speed = self.theta ** (-torch.arange(half, dtype=x_TC.dtype) / half)
        angle = torch.arange(len(x_TC), dtype=x_TC.dtype)[:, None] * speed
        first, second = x_TC[:, :half], x_TC[:, half:]
        return torch.cat([first * angle.cos() - second * angle.sin(),
                          second * angle.cos() + first * angle.sin()], 1)


MIXTRAL = DenseMixtral()
