"""What training minimises: the answers' tokens, and helper losses on the tower's patches that make it learn fast.

Each of a tile's 729 patches also tells what it shows: class, colour, character, and the box of its thing, in pixels of
the tile and, where the tile shows the whole picture, digit by digit as an answer spells it: then spelling a box is
copying, as reading is. The heads that answer are thrown away at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.demo import dense
from model.demo.labels import CHARACTERS, CLASSES, COLOURS, IGNORED
from model.image import TILE_SIZE
from model.vl2 import DeepseekVL2

DIGIT_WEIGHTS = (0.5, 0.5, 0.05)
"""Of a number's hundreds, tens and ones: the last is a third of a pixel."""


class Helpers(nn.Module):
    """Linear heads on the tower's features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sizes = (len(CLASSES), len(COLOURS), CHARACTERS, 4, 4 * 3 * 10)
        self.heads = nn.Linear(width, sum(self.sizes))
        nn.init.normal_(self.heads.weight, std=0.02)
        nn.init.zeros_(self.heads.bias)

    def forward(self, patches: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Of patch features [n, 729, width] and the batch's labels, a scalar."""
        used = batch["tile_used"].flatten().bool()[:, None]
        predicted = self.heads(patches).float()
        classes, colours, characters, boxes, digits = predicted.split(self.sizes, dim=-1)
        labels = batch["classes"].flatten(0, 1).long()
        owned, empty = (labels > 0) & used, (labels == 0) & used
        each = _cross_entropy(classes, labels)
        loss = _mean(each, owned) + 0.3 * _mean(each, empty)
        tints = batch["colours"].flatten(0, 1).long()
        known = (tints != IGNORED) & used
        each = _cross_entropy(colours, torch.where(known, tints, 0))
        loss = loss + 0.5 * _mean(each, known & owned) + 0.2 * _mean(each, known & empty)
        letters = batch["characters"].flatten(0, 1).long()
        loss = loss + 0.5 * _mean(_cross_entropy(characters, letters), (letters > 0) & used)
        target = batch["boxes"].flatten(0, 1).float() / TILE_SIZE
        loss = loss + 4.0 * _mean((boxes - target).abs().mean(-1), owned)
        answers = batch["answer_boxes"].flatten(0, 1).long()
        spelled = torch.stack((answers // 100, answers // 10 % 10, answers % 10), dim=-1)
        known = (answers[..., :1] >= 0) & used[..., None]
        each = _cross_entropy(
            digits.unflatten(-1, (4, 3, 10)).flatten(1, 3), torch.where(known[..., None], spelled, 0).flatten(1)
        )
        each = each.view(spelled.shape).mean(2)  # of the four numbers
        return loss + sum(weight * _mean(each[..., place], known[..., 0]) for place, weight in enumerate(DIGIT_WEIGHTS))


def _cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


def disturb(tiles: Tensor, generator: torch.Generator | None) -> Tensor:
    """uint8 [B, t, 384, 384, 3] to values in [-1, 1], float32 [B * t, 384, 384, 3], as from many cameras.

    Brightness and contrast vary a little by picture, half of the pictures get noise.
    """
    shape = (len(tiles), 1, 1, 1, 1)

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=generator, device=tiles.device) * (high - low) + low

    contrast, brightness = uniform(0.93, 1.05), uniform(-0.05, 0.05)
    noise = torch.randn(tiles.shape, generator=generator, device=tiles.device)
    values = tiles * (contrast / 127.5)
    values += brightness - contrast
    values.addcmul_(noise, uniform(-0.06, 0.06).clamp(min=0.0))
    return values.clamp_(-1.0, 1.0).flatten(0, 1)


@dataclass(frozen=True)
class Losses:
    """Scalars on the device: of answers, of helpers, of expert balance, and the share of answer tokens foretold."""

    answers: Tensor
    helpers: Tensor
    balance: Tensor
    right: Tensor


def losses(
    model: DeepseekVL2,
    helpers: Helpers,
    batch: Mapping[str, Tensor],
    functions: dense.Functions,
    *,
    pad_id: int,
    generator: torch.Generator | None,
) -> Losses:
    """One batch through the model."""
    pixels = disturb(batch["tiles"], generator)
    patches = dense.tower(model, pixels, functions)
    output = dense.decode(model, batch, dense.project(model, patches), functions, pad_id=pad_id)
    scores = dense.logits(model, output.hidden).flatten(0, 1)
    targets = batch["targets"].long().flatten()
    weights = batch["weights"].flatten().float()  # 0 where nothing is to be foretold
    each = F.cross_entropy(scores, targets, ignore_index=-1, reduction="none")
    answers = (each * weights).sum() / weights.sum().clamp(min=1)
    with torch.no_grad():
        counted = targets >= 0
        right = ((scores.argmax(-1) == targets) & counted).sum() / counted.sum().clamp(min=1)
    return Losses(answers, helpers(patches, batch), output.balance, right)
