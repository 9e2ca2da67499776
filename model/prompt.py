"""Messages become token ids, in the exact layout that DeepSeek-VL2 was trained on.

::

    <bos>system text<|User|>: question\\n\\n<|Assistant|>:answer<eos><|User|>: …\\n\\n<|Assistant|>:

* One bos at the very start, an eos after each answer, nothing between an answer's eos and the next turn.
* System text stands bare after bos, and only as the first message.
* No space between ``<|Assistant|>:`` and the answer.
* Contents are stripped. Text between pictures is tokenised piece by piece, never across a picture.
* A user turn with nothing in it is ``<|User|>:<|Assistant|>:``.

A conversation that ends with a user turn leaves the assistant's turn open. One that ends with an assistant message
has that message continued: its eos is left out. An empty last assistant message is therefore the same as none.

Turns of one role in a row are kept as they come, each with its own marks, as the reference does: two user turns make
two questions, the first without an answer; two assistant messages make two answers, each with its eos. A conversation
may begin with an assistant message.

A message's parts are joined as they are, with one exception. In the reference's prompts a picture is always followed
by white space, mostly a newline, so whatever follows a picture gets a newline unless it begins with white space: text
or another picture. (The end of a message needs none.)

With up to two pictures in the whole conversation, history included, each may be cut into tiles. With more, none is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from PIL import Image

from model.config import ModelConfig
from model.image import TiledImage, tile_image
from model.tokenizer import ASSISTANT, USER, Tokenizer

MAX_TILED_IMAGES = 2

Part = str | Image.Image | TiledImage


class PromptError(ValueError):
    """The conversation cannot be made into a prompt; the message tells the caller why."""


@dataclass(frozen=True)
class Message:
    """One message: who speaks, and texts and pictures in the order they are to be read.

    Pictures are RGB, or cut into tiles already, as `is_tiled` of their number in the conversation says.
    """

    role: Literal["system", "user", "assistant"]
    content: tuple[Part, ...]


@dataclass(frozen=True)
class ImageSpan:
    """Where a picture stands in the prompt: ``image.num_slots`` positions from ``start``."""

    start: int
    image: TiledImage


@dataclass(frozen=True)
class Prompt:
    """Token ids with the image token at every position of a picture, and the pictures in order."""

    token_ids: list[int]
    images: list[ImageSpan]

    @property
    def num_image_tokens(self) -> int:
        """Positions that pictures take."""
        return sum(span.image.num_slots for span in self.images)

    @property
    def num_text_tokens(self) -> int:
        """Positions that text and control tokens take."""
        return len(self.token_ids) - self.num_image_tokens


def is_tiled(num_images: int) -> bool:
    """Whether the pictures of a conversation, of which there are so many, may be cut into several tiles each."""
    return num_images <= MAX_TILED_IMAGES


def build_chat_prompt(messages: Sequence[Message], tokenizer: Tokenizer, config: ModelConfig) -> Prompt:
    """Lays out a conversation and cuts those of its pictures into tiles that are not yet.

    Raises:
        PromptError: there is no user or assistant message, a system message is not the first, a role is unknown, or a
            picture stands outside a user message.
        ValueError: a picture is not RGB.
    """
    _check(messages)
    num_images = sum(not isinstance(part, str) for message in messages for part in message.content)
    layout = _Layout(tokenizer, config, tiled=is_tiled(num_images))
    for message in messages:
        parts = _strip(_join_texts(message.content))
        if message.role == "user":
            layout.add_user_turn(parts)
        else:
            layout.add_text("".join(part for part in parts if isinstance(part, str)))
            if message.role == "assistant":
                layout.token_ids.append(tokenizer.eos_token_id)
    if messages[-1].role == "assistant":
        layout.token_ids.pop()
    return Prompt(layout.token_ids, layout.images)


def build_text_prompt(text: str, tokenizer: Tokenizer) -> Prompt:
    """Bos and the text as it is, for plain completion: no template, nothing stripped."""
    return Prompt([tokenizer.bos_token_id, *tokenizer.encode(text)], [])


class _Layout:
    """A prompt in the making. Begins with bos."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, *, tiled: bool) -> None:
        self._tokenizer = tokenizer
        self._candidates = config.candidate_resolutions
        self._tiled = tiled
        self.token_ids = [tokenizer.bos_token_id]
        self.images: list[ImageSpan] = []

    def add_text(self, text: str) -> None:
        self.token_ids += self._tokenizer.encode(text)

    def add_image(self, image: Image.Image | TiledImage) -> None:
        if isinstance(image, Image.Image):
            image = tile_image(image, self._candidates, tiled=self._tiled)
        span = ImageSpan(len(self.token_ids), image)
        self.images.append(span)
        self.token_ids += [self._tokenizer.image_token_id] * span.image.num_slots

    def add_user_turn(self, parts: list[Part]) -> None:
        """The question in its marks, and the mark that opens the answer. ``parts`` is stripped."""
        self.token_ids += self._tokenizer.encode_control(USER)
        framed = _join_texts([": ", *_separate_images(parts), "\n\n"]) if parts else [":"]
        for part in framed:
            if isinstance(part, str):
                self.add_text(part)
            else:
                self.add_image(part)
        self.token_ids += self._tokenizer.encode_control(f"{ASSISTANT}:")


def _check(messages: Sequence[Message]) -> None:
    """Refuses what the model has no form for."""
    if not any(message.role in ("user", "assistant") for message in messages):
        raise PromptError("the conversation has no user message to answer")
    for index, message in enumerate(messages):
        if message.role not in ("system", "user", "assistant"):
            raise PromptError(f"message {index} has the unknown role {message.role!r}; known: system, user, assistant")
        if message.role == "system" and index > 0:
            raise PromptError(f"message {index} is a system message; only the first message may be one")
        if message.role != "user" and any(not isinstance(part, str) for part in message.content):
            raise PromptError(f"message {index} has a picture, but its role is {message.role}; only user messages may")


def _join_texts(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring texts become one, empty ones vanish."""
    joined: list[Part] = []
    for is_text, group in groupby(parts, key=lambda part: isinstance(part, str)):
        if is_text:
            text = "".join(part for part in group if isinstance(part, str))
            joined += [text] if text else []
        else:
            joined += group
    return joined


def _strip(parts: list[Part]) -> list[Part]:
    """Takes white space from both ends of a message, as from one string; ``parts`` comes from `_join_texts`."""
    stripped = list(parts)
    if stripped and isinstance(stripped[0], str):
        stripped[0] = stripped[0].lstrip()
    if stripped and isinstance(stripped[-1], str):
        stripped[-1] = stripped[-1].rstrip()
    return [part for part in stripped if part != ""]


def _separate_images(parts: list[Part]) -> list[Part]:
    """Puts a newline after each picture that something other than white space follows within the message."""
    separated: list[Part] = []
    previous: Part | None = None
    for part in parts:
        spaced = isinstance(part, str) and part[0].isspace()
        if previous is not None and not isinstance(previous, str) and not spaced:
            separated.append("\n")
        separated.append(part)
        previous = part
    return separated
