"""What is measured: the published models' widths, and how many sequences, tokens and tiles.

Two sets of sizes. FULL is what decides the speed of a step; SHORT runs every kernel and every form of it once, on as
little as shows a read or write beyond an array: ragged, empty, one more than a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

PAGE_SIZE = 64


@dataclass(frozen=True)
class Geometry:
    """A decoder's widths. `heads` times `nope + rope` is the query's; without MLA `rope` is 0 and `rank` too."""

    hidden: int
    heads: int
    nope: int
    rope: int
    rank: int
    value: int
    dense: int
    """Inner width of the dense MLP."""
    experts: int
    shared: int
    topk: int
    inner: int
    """Inner width of an expert."""
    sigmoid: bool
    """Scores by sigmoid with a correction bias, normalised; else by softmax."""
    vocab: int


SMALL = Geometry(2048, 16, 128, 64, 512, 128, 10944, 64, 2, 6, 1408, False, 102_400)
BASE = Geometry(2560, 32, 128, 64, 512, 128, 12288, 72, 2, 6, 1536, True, 129_280)
TINY = Geometry(1280, 10, 128, 0, 0, 128, 6848, 64, 2, 6, 896, False, 129_280)
GEOMETRIES = {"tiny": TINY, "small": SMALL, "base": BASE}


@dataclass(frozen=True)
class Tower:
    """The vision tower's widths: the same in all models."""

    width: int = 1152
    heads: int = 16
    inner: int = 4304
    side: int = 27
    patch: int = 14
    pixels: int = 384


@dataclass(frozen=True)
class Sizes:
    decode: tuple[tuple[int, ...], ...]
    """Cached tokens of each sequence of a batch."""
    prompts: tuple[tuple[tuple[int, int], ...], ...]
    """(new tokens, cached before them) of each prompt of a step."""
    rows: tuple[int, ...]
    """Tokens of a step, for what a row costs the same."""
    absorbed: tuple[int, ...]
    """Decode rows, for the absorption."""
    routed: tuple[int, ...]
    """Tokens that go through router and experts."""
    tiles: tuple[int, ...]
    sampled: tuple[int, ...]
    whole: bool
    """Whether all rows are compared with the reference; else some."""


def _ragged(sequences: int, longest: int) -> tuple[int, ...]:
    return tuple(1 + (number * 2654435761) % longest for number in range(sequences))


FULL = Sizes(
    decode=(
        (384,),
        (4096,),
        (384,) * 8,
        (384,) * 32,
        (2048,) * 64,
        _ragged(64, 4096),
        (384,) * 128,
        (384,) * 256,
        (2048,) * 256,
    ),
    prompts=(
        ((2048, 0),) * 8,
        ((2048, 0),),
        ((2048, 2048),),
        ((512, 1536),) * 4,
        tuple((430 + 250 * number, 0) for number in range(5)),
    ),
    rows=(1, 256, 8192),
    absorbed=(1, 32, 256),
    routed=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192),
    tiles=(1, 7, 16),
    sampled=(1, 64, 256),
    whole=False,
)
SHORT = Sizes(
    decode=((1,), (0, 65, 0), (200, 1, 64, 0, 63, 130)),
    prompts=(((1, 0),), ((130, 0), (3, 64)), ((64, 129), (1, 1), (65, 0))),
    rows=(1, 33),
    absorbed=(1, 17, 33),
    routed=(1, 5, 33, 129, 513, 1025),
    tiles=(1, 2),
    sampled=(1, 3),
    whole=True,
)


@dataclass(frozen=True)
class Setup:
    geometry: Geometry
    heads: Geometry
    """Of the multi-head kernels, which MLA does not use."""
    tower: Tower
    sizes: Sizes
    dtype: torch.dtype

    def random(self, *shape: int, std: float = 1.0) -> Tensor:
        """Normal numbers on torch's default device."""
        return torch.randn(*shape, dtype=self.dtype) * std

    @property
    def tolerance(self) -> float:
        """Largest relative error of a kernel that rounds its result to `dtype` and sums in float32."""
        return 1e-2 if self.dtype.itemsize == 2 else 1e-4

    def compared(self, rows: int) -> Tensor:
        """Which of so many rows are held against the reference: all, or a few from first to last."""
        if self.sizes.whole or rows <= 4:
            return torch.arange(rows)
        return torch.linspace(0, rows - 1, 4).long()
