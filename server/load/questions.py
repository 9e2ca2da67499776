"""What is asked: chat completions about pictures that nobody has seen, or about a few that many ask about.

Everything depends on the seed alone.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

PictureFormat = Literal["jpeg", "png"]
JPEG_QUALITY = 90
# Every word is a token or so.
_TALK = (
    "what is in the picture and where are all of its parts how many do you see which one is large or small red blue "
    "green left right above below near far old new first last name each then say why it looks as it does to you now"
)
_WORDS = _TALK.split()


def draw_picture(seed: Sequence[int], size: tuple[int, int], form: PictureFormat) -> bytes:
    """A picture file of this (width, height): soft colours, shapes with sharp edges, and a camera's noise.

    It takes about as many bytes as a photo: noise alone would take ten times, one colour nothing.
    """
    chance = np.random.default_rng(seed)
    width, height = size
    soft = Image.fromarray(chance.integers(40, 216, (6, 8, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(soft)
    for _ in range(24):
        left, top = chance.integers(0, width), chance.integers(0, height)
        box = (left, top, left + chance.integers(1, 1 + width // 4), top + chance.integers(1, 1 + height // 4))
        shape = draw.ellipse if chance.random() < 0.5 else draw.rectangle
        shape([int(edge) for edge in box], fill=tuple(int(value) for value in chance.integers(0, 256, 3)))
    noise = chance.integers(-6, 7, (height, width, 1), np.int16)
    pixels = (np.asarray(soft, dtype=np.int16) + noise).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    if form == "jpeg":
        Image.fromarray(pixels).save(file, "JPEG", quality=JPEG_QUALITY)
    else:
        Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def draw_pictures(seed: int, first: int, count: int, size: tuple[int, int], form: PictureFormat) -> list[bytes]:
    """Data URLs of the pictures numbered from `first`, all different."""

    def data_url(number: int) -> bytes:
        return f"data:image/{form};base64,".encode() + base64.b64encode(draw_picture([seed, number], size, form))

    with ThreadPoolExecutor() as pool:
        return list(pool.map(data_url, range(first, first + count)))


@dataclass(frozen=True)
class Form:
    """What all requests of a run have in common.

    Args:
        model: the name that the server has for it.
        max_tokens: to generate.
        prompt_tokens: about how many the text of a question has.
        ignore_eos: whether to ask for all of max_tokens, whatever is in the answer: an extension of the API.
    """

    model: str
    max_tokens: int
    prompt_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool

    def body(self, number: int, picture: bytes | None, *, max_tokens: int | None = None) -> list[bytes]:
        """The body of the request with this number, in parts, so that many share one picture's bytes."""
        parts: list[dict[str, object]] = [{"type": "text", "text": self._question(number)}]
        if picture is not None:
            parts.insert(0, {"type": "image_url", "image_url": {"url": "PICTURE"}})
        request: dict[str, object] = {
            "model": self.model,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": self.max_tokens if max_tokens is None else max_tokens,
            "temperature": self.temperature,
            "seed": self.seed + number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            request["ignore_eos"] = True
        text = json.dumps(request).encode()
        if picture is None:
            return [text]
        before, _, after = text.partition(b'"PICTURE"')
        return [before + b'"', picture, b'"' + after]

    def _question(self, number: int) -> str:
        """Words in an order of this number's own, which stands first: no two questions begin alike."""
        chance = random.Random(f"{self.seed} {number}")
        return " ".join([str(number), *chance.choices(_WORDS, k=max(0, self.prompt_tokens - 1))])
