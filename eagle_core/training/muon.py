"""Muon in the device's own precision: momentum whose update is made orthogonal by Newton–Schulz iterations.

`torch.optim.Muon` runs its iterations in bfloat16, which a CPU without matrix units multiplies at less than half
its float32 speed; with batches of a few hundred tokens the iterations are a third of a training step, so this one
keeps float32 there and uses bfloat16 on accelerators. Otherwise the two are the same method (K. Jordan, 2024) with
the same constants and the same learning-rate adjustment, √max(1, rows / columns).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Muon"]

_A, _B, _C = 3.4445, -4.7750, 2.0315  # the quintic whose slope at zero is largest


def _orthogonal(matrix: Tensor, iterations: int, block: int) -> Tensor:
    """The nearest orthogonal matrix, roughly: singular values between 0.5 and 1.5 are near enough for a step.

    With `block`, slices of the shorter side of that size are made orthogonal one by one: a third of the work at
    576 columns and blocks of 192.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    short, long = wide.shape
    slices = short // block if block and short % block == 0 else 1
    x = wide.to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16).reshape(slices, short // slices, long)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    x = x.reshape(short, long)
    return (x if matrix.shape[0] <= matrix.shape[1] else x.T).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """For weight matrices; give vectors, embeddings and output layers to AdamW.

    Args:
        params: two-dimensional parameters.
        lr: size of a step; the update itself has singular values near 1.
        momentum: of the Nesterov average of gradients.
        weight_decay: decoupled, times `lr`.
        iterations: Newton–Schulz iterations for each step.
        block: size of the slices that are made orthogonal separately, 0 for whole matrices.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        iterations: int = 3,
        block: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "iterations": iterations,
            "block": block,
        }
        super().__init__(params, defaults)
        assert all(p.ndim == 2 for group in self.param_groups for p in group["params"]), "Muon steps matrices only"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        assert closure is None, "Muon takes no closure"
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                average = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = _orthogonal(p.grad.lerp(average, group["momentum"]), group["iterations"], group["block"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)
        return None
