"""A model's parameters as one flat master copy in float32, with AdamW, an average, and gradients summed over devices.

The modules' own parameters are views of a working copy in the training type (routers stay float32, as when serving),
their gradients views of one flat buffer: a step is a handful of operations on long vectors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

WHOLE = re.compile(r"router\.")  # parameters that stay float32


class FlatParameters:
    """Takes over the parameters of some modules."""

    def __init__(self, modules: dict[str, nn.Module], *, dtype: torch.dtype, decay: float) -> None:
        """``decay`` is AdamW's weight decay, of matrices alone."""
        named = [(f"{prefix}.{name}", p) for prefix, module in modules.items() for name, p in module.named_parameters()]
        narrow = [(name, p) for name, p in named if not WHOLE.search(name)]
        wide = [(name, p) for name, p in named if WHOLE.search(name)]
        self.names = [name for name, _ in (*narrow, *wide)]
        parameters = [p for _, p in (*narrow, *wide)]
        device = parameters[0].device
        self._narrow = sum(p.numel() for _, p in narrow)
        total = sum(p.numel() for p in parameters)
        self.master = torch.cat([p.detach().float().flatten() for p in parameters])
        self.average = self.master.clone()
        self.first, self.second = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self._gradient = torch.zeros(total, device=device)
        self._work = self.master[: self._narrow].to(dtype)
        self._work_gradient = self._gradient[: self._narrow] if dtype == torch.float32 else torch.zeros_like(self._work)
        self._decay = torch.zeros(total, device=device)
        offset = 0
        for p in parameters:
            end = offset + p.numel()
            in_work = end <= self._narrow
            values = self._work if in_work else self.master
            gradients = self._work_gradient if in_work else self._gradient
            p.data = values[offset:end].view(p.shape)
            p.requires_grad_(True)
            p.grad = gradients[offset:end].view(p.shape)
            if p.dim() >= 2 and p.shape[0] > 1:  # not the tower's position embedding, [1, 729, width]
                self._decay[offset:end] = decay
            offset = end

    @torch.no_grad()
    def broadcast(self) -> None:
        """Gives every device the first one's values."""
        if dist.is_initialized():
            dist.broadcast(self.master, 0)
            self.average.copy_(self.master)
            self._refresh()

    @torch.no_grad()
    def step(
        self,
        *,
        number: int,
        rate: float,
        betas: tuple[float, float],
        clip: float,
        average: float,
        epsilon: float = 1e-8,
    ) -> Tensor:
        """One AdamW step from the gradients, which it then clears. ``number`` counts from 1.

        Returns the gradient's norm before clipping, a scalar on the device. A step whose gradient is not finite
        changes nothing but the moments' decay.
        """
        if self._work_gradient.dtype != torch.float32:
            self._gradient[: self._narrow].copy_(self._work_gradient)
        if dist.is_initialized():
            dist.all_reduce(self._gradient)
            self._gradient.div_(dist.get_world_size())
        norm: Tensor = self._gradient.norm()
        scale = torch.where(norm.isfinite(), (clip / (norm + 1e-6)).clamp(max=1.0), 0.0)
        gradient = self._gradient.nan_to_num_(0.0, 0.0, 0.0).mul_(scale)
        self.first.lerp_(gradient, 1 - betas[0])
        self.second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        denominator = (self.second / (1 - betas[1] ** number)).sqrt_().add_(epsilon)
        self.master.mul_(1 - rate * self._decay)
        self.master.addcdiv_(self.first, denominator, value=-rate / (1 - betas[0] ** number))
        self.average.lerp_(self.master, 1 - average)
        self._refresh()
        self._gradient.zero_()
        self._work_gradient.zero_()
        return norm

    def state(self) -> dict[str, Tensor | list[str]]:
        """All that `load_state` needs, on the CPU."""
        vectors = {"master": self.master, "average": self.average, "first": self.first, "second": self.second}
        return {"names": self.names, **{name: vector.cpu() for name, vector in vectors.items()}}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor | list[str]]) -> None:
        """Raises ValueError if the state is of other parameters."""
        if state["names"] != self.names:
            raise ValueError("the saved state is of another model")
        for name in ("master", "average", "first", "second"):
            saved = state[name]
            assert isinstance(saved, Tensor)
            getattr(self, name).copy_(saved)
        self._refresh()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the modules hold the average of the weights instead of the last ones."""
        kept = self.master.clone()
        self._set(self.average)
        try:
            yield
        finally:
            self._set(kept)

    @torch.no_grad()
    def _set(self, values: Tensor) -> None:
        self.master.copy_(values)
        self._refresh()

    def _refresh(self) -> None:
        self._work.copy_(self.master[: self._narrow])


def count(parameters: Iterable[nn.Parameter]) -> int:
    """How many values parameters hold."""
    return sum(parameter.numel() for parameter in parameters)
