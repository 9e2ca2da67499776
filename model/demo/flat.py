"""A model's parameters as one flat master copy in float32, with an optimizer, an average, gradients over devices.

The modules' own parameters are views of a working copy in the training type (routers stay float32, as when serving),
their gradients views of one flat buffer: a step is a handful of operations on long vectors. The matrices inside the
layers follow Muon unless told otherwise (Jordan 2024: momentum made orthogonal by Newton-Schulz iterations, which moves
every direction of a matrix alike), scaled by the size of their entries (Liu et al. 2025, arXiv 2502.16982, equation 4),
so that one rate serves all; everything else follows AdamW. Matrices of one shape lie side by side and are iterated
together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

WHOLE = re.compile(r"router\.")  # parameters that stay float32
INNER = re.compile(r"\.(blocks|layers)\.\d+\.")  # matrices in here, but those that stay float32, follow Muon
MOMENTUM = 0.95  # of Muon
MUON_SIZE = 0.4  # root mean square of the entries of a Muon step, as a part of the rate; AdamW takes about 0.2
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5 in an iteration: brings every singular value from near 0 to about 1 in five, not to 1 exactly."""


@dataclass(frozen=True)
class Matrices:
    """Matrices of one shape: ``[start, end)`` of the flat vectors, as [n, rows, columns]."""

    start: int
    end: int
    shape: tuple[int, int]


def orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, rows, columns] to float32 ones with the same singular vectors and singular values near 1 (0.7 to 1.2)."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = (x.mT if tall else x).to(dtype)
    for _ in range(5):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=QUINTIC[1], alpha=QUINTIC[2])
        x = torch.baddbmm(x, polynomial, x, beta=QUINTIC[0])
    found: Tensor = x.mT if tall else x
    return found.float()


class FlatParameters:
    """Takes over the parameters of some modules."""

    def __init__(self, modules: dict[str, nn.Module], *, dtype: torch.dtype, decay: float, muon: bool = True) -> None:
        """``decay`` is the weight decay, of matrices alone. Without ``muon`` all parameters follow AdamW."""
        named = [(f"{prefix}.{name}", p) for prefix, module in modules.items() for name, p in module.named_parameters()]
        inner = sorted((item for item in named if muon and _is_inner(*item)), key=lambda item: item[1].shape[-2:])
        names = {name for name, _ in inner}
        narrow = inner + [(name, p) for name, p in named if not WHOLE.search(name) and name not in names]
        wide = [(name, p) for name, p in named if WHOLE.search(name)]
        self.names = [name for name, _ in (*narrow, *wide)]
        parameters = [p for _, p in (*narrow, *wide)]
        device = parameters[0].device
        self._narrow = sum(p.numel() for _, p in narrow)
        total = sum(p.numel() for p in parameters)
        self.master = torch.cat([p.detach().float().flatten() for p in parameters])
        self.average = self.master.clone()
        self.first = torch.zeros_like(self.master)
        self._gradient = torch.zeros(total, device=device)
        self._work = self.master[: self._narrow].to(dtype)
        self._work_gradient = self._gradient[: self._narrow] if dtype == torch.float32 else torch.zeros_like(self._work)
        self._decay = torch.zeros(total, device=device)
        self._matrices: list[Matrices] = []
        offset = 0
        for shape, group in groupby(inner, key=lambda item: item[1].shape[-2:]):
            start, offset = offset, offset + sum(p.numel() for _, p in group)
            self._matrices.append(Matrices(start, offset, (shape[0], shape[1])))
        self._inner = offset
        self.second = torch.zeros_like(self.master[offset:])  # AdamW's alone
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
        """One step from the gradients, which it then clears. ``number`` counts from 1; ``betas`` are AdamW's.

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
        self.master.mul_(1 - rate * self._decay)
        inner, rest = slice(self._inner), slice(self._inner, None)
        self.first[inner].lerp_(gradient[inner], 1 - MOMENTUM)
        ahead = torch.lerp(gradient[inner], self.first[inner], MOMENTUM)  # Nesterov's
        for group in self._matrices:
            span = slice(group.start, group.end)
            update = orthogonal(ahead[span].view(-1, *group.shape), self._work.dtype)
            self.master[span].add_(update.flatten(), alpha=-rate * MUON_SIZE * max(group.shape) ** 0.5)
        self.first[rest].lerp_(gradient[rest], 1 - betas[0])
        self.second.mul_(betas[1]).addcmul_(gradient[rest], gradient[rest], value=1 - betas[1])
        denominator = (self.second / (1 - betas[1] ** number)).sqrt_().add_(epsilon)
        self.master[rest].addcdiv_(self.first[rest], denominator, value=-rate / (1 - betas[0] ** number))
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


def _is_inner(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() >= 2 and INNER.search(name) is not None and WHOLE.search(name) is None


def count(parameters: Iterable[nn.Parameter]) -> int:
    """How many values parameters hold."""
    return sum(parameter.numel() for parameter in parameters)
