"""A request's messages become what the engine runs: pictures decoded, prompt laid out, its length judged.

Decoding and tokenising take milliseconds to seconds, so they run in a small thread pool, never on the event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from model.config import ModelConfig
from model.image import TiledImage
from model.prompt import Message as PromptMessage
from model.prompt import Prompt, PromptError, build_chat_prompt, build_text_prompt, is_tiled
from model.tokenizer import Tokenizer
from server.engine.request import Grammar, ImageInput
from server.engine.structured import GrammarCompiler, GrammarError
from server.errors import APIError
from server.fetch import MediaFetcher, is_fetched
from server.grounding import Grounding, GroundingError, Span, ask_for_boxes, place_spans
from server.media import MediaError, file_in_url
from server.pictures import PictureCache
from server.protocol import (
    AssistantMessage,
    GroundingRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    StructuredOutputs,
    SystemMessage,
    TextPart,
)
from server.settings import Settings
from server.telemetry import current, timed

T = TypeVar("T")

MAX_THREADS = 4
# All pictures of a request are in memory at once: together they may have this many times the pixels of the largest.
MAX_PIXELS_FACTOR = 4
MAX_FETCHES = 8  # of all requests at once


@dataclass(frozen=True)
class PreparedPrompt:
    """What the engine runs, and facts about it.

    Args:
        image_slots: how many positions each picture takes, in order.
        image_sizes: (width, height) of each picture as it was sent, upright.
    """

    token_ids: list[int]
    images: list[ImageInput] = field(default_factory=list)
    image_slots: tuple[int, ...] = ()
    image_sizes: tuple[tuple[int, int], ...] = ()

    @property
    def describes(self) -> str:
        """The length in words, for error messages."""
        text = len(self.token_ids) - sum(self.image_slots)
        if not self.image_slots:
            return f"{len(self.token_ids)} tokens"
        slots = f"{sum(self.image_slots)} image slots"
        if len(self.image_slots) > 1:
            slots += f" ({' + '.join(map(str, self.image_slots))})"
        return f"{len(self.token_ids)} tokens: {text} text tokens and {slots}"


class Preparer:
    """Makes prompts in a bounded thread pool. Raises APIError (400) on anything wrong with a request's content."""

    def __init__(self, settings: Settings, config: ModelConfig, tokenizer: Tokenizer, fetcher: MediaFetcher) -> None:
        self._settings = settings
        self._config = config
        self._tokenizer = tokenizer
        self._fetcher = fetcher
        self._pictures = PictureCache(config.candidate_resolutions, max_pixels=settings.max_image_pixels)
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        language = config.language
        self._compiler = GrammarCompiler(lambda: tokenizer, language.vocab_size, language.eos_token_id)
        self._pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="prepare")

    async def close(self) -> None:
        """End what is under way, and the fetcher with it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._compiler.close()
        await self._fetcher.aclose()

    async def chat(
        self,
        messages: Sequence[Message],
        grounding: GroundingRequest | None = None,
        *,
        field: str = "messages",
        offset: int = 0,
        cache_salt: str = "",
    ) -> PreparedPrompt:
        """The prompt of a conversation; with `grounding`, one whose answer has boxes.

        `field` is the request's name for the messages, and its first is messages[offset]: errors name them so.
        """
        count = sum(not isinstance(part, TextPart) for message in messages for part in message.content)
        if count > self._settings.max_images:
            raise APIError(
                400,
                f"The request has {count} images; this server takes at most {self._settings.max_images} per request.",
                param=field,
                code="too_many_images",
            )
        names = [f"{field}[{place - offset}]" for place in range(len(messages))]
        with current().phase("media"):
            fetched = await self._fetch(_urls(messages, names))

        def build() -> PreparedPrompt:
            conversation = self._translate(messages, names, fetched, tiled=is_tiled(count), cache_salt=cache_salt)
            if grounding is not None:
                conversation = _ask_for_boxes(conversation, grounding)
            return self._layout(conversation, field)

        return await self._in_pool(build)

    async def question(self, picture: bytes, text: str) -> PreparedPrompt:
        """The prompt of one picture with a text after it."""

        def build() -> PreparedPrompt:
            try:
                with current().phase("media"):
                    image = self._pictures.load(picture, tiled=is_tiled(1))
            except MediaError as error:
                raise _invalid_image("image", error) from error
            return self._layout([PromptMessage("user", (image, text))], "prompt")

        return await self._in_pool(build)

    async def completion(self, prompt: str | list[int]) -> PreparedPrompt:
        """The prompt of a plain completion: bos and the text, or token ids as they are."""
        if isinstance(prompt, str):
            return await self._in_pool(lambda: _pack(build_text_prompt(prompt, self._tokenizer)))
        self._check_ids(prompt, "prompt")
        return PreparedPrompt(prompt)

    async def text(self, tokens: list[int], skip_special_tokens: bool) -> str:
        """The text of token ids."""
        self._check_ids(tokens, "tokens")
        return await self._in_pool(lambda: self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    def _check_ids(self, tokens: Sequence[int], param: str) -> None:
        vocabulary = self._config.language.vocab_size
        for token in tokens:
            if token >= vocabulary:
                message = f"{param}: token id {token} is outside the vocabulary of {vocabulary}"
                raise APIError(400, message, param=param, code="invalid_value")

    async def grammar(
        self,
        form: ResponseFormat | None,
        wish: StructuredOutputs | None,
        *,
        schema_field: str = "response_format.json_schema.schema",
    ) -> Grammar | None:
        """What the answer has to look like, compiled once to see that it can be; None for plain text.

        `schema_field` is where the request has the form's schema, for errors.
        """
        found = _form_of_schema(form, schema_field) or (None if wish is None else _form_of_wish(wish))
        if found is None:
            return None
        grammar, param = found
        try:
            await asyncio.wrap_future(self._compiler.compile(grammar))
        except GrammarError as error:
            code = "invalid_schema" if grammar.kind == "json_schema" else "invalid_grammar"
            raise APIError(400, f"{param}: {error}", param=param, code=code) from error
        return grammar

    async def _in_pool(self, build: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, contextvars.copy_context().run, build)

    async def _fetch(self, urls: dict[str, str]) -> dict[str, bytes]:
        """The image files behind URLs that do not hold the image themselves, by the name of their place.

        Raises APIError (400) on the first that fails, or when they have more bytes together than a body may have.
        """
        room = self._settings.max_body_bytes
        files: dict[str, bytes] = {}

        async def fetch(param: str, url: str) -> None:
            nonlocal room
            try:
                async with self._fetches:
                    files[param] = await self._fetcher.fetch(url)
            except MediaError as error:
                raise _invalid_image(param, error) from error
            room -= len(files[param])
            if room < 0:
                limit = self._settings.max_body_bytes
                raise _invalid_image(param, f"the fetched images have more than {limit} bytes together")

        try:
            async with asyncio.TaskGroup() as group:
                for param, url in urls.items():
                    if is_fetched(url):
                        group.create_task(fetch(param, url))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return files

    @timed("media")
    def _translate(
        self,
        messages: Sequence[Message],
        names: Sequence[str],
        fetched: dict[str, bytes],
        *,
        tiled: bool,
        cache_salt: str,
    ) -> list[PromptMessage]:
        """Messages with their pictures in tiles."""
        limit = MAX_PIXELS_FACTOR * self._settings.max_image_pixels
        pixels = 0
        translated = []
        for name, message in zip(names, messages, strict=True):
            parts: list[str | TiledImage] = []
            for index, part in enumerate(message.content):
                if isinstance(part, TextPart):
                    parts.append(part.text)
                    continue
                param = _name_of_image(name, index)
                try:
                    file = fetched.get(param)
                    if file is None:
                        file = file_in_url(part.image_url.url, max_bytes=self._settings.max_body_bytes)
                    image = self._pictures.load(file, tiled=tiled, salt=cache_salt)
                except MediaError as error:
                    raise _invalid_image(param, error) from error
                pixels += image.size[0] * image.size[1]
                if pixels > limit:
                    raise _invalid_image(param, f"the images of this request have more than {limit} pixels together")
                parts.append(image)
            translated.append(PromptMessage(_role(message), tuple(parts)))
        return translated

    @timed("tokenize")
    def _layout(self, messages: Sequence[PromptMessage], field: str) -> PreparedPrompt:
        try:
            prompt = build_chat_prompt(messages, self._tokenizer, self._config)
        except PromptError as error:
            raise APIError(400, str(error), param=field, code="invalid_value") from error
        return _pack(prompt)


def _name_of_image(message: str, part: int) -> str:
    """The name of an image's place in errors."""
    return f"{message}.content[{part}].image_url"


def _urls(messages: Sequence[Message], names: Sequence[str]) -> dict[str, str]:
    """The URL of every image by the name of its place."""
    return {
        _name_of_image(name, index): part.image_url.url
        for name, message in zip(names, messages, strict=True)
        for index, part in enumerate(message.content)
        if not isinstance(part, TextPart)
    }


def _invalid_image(param: str, reason: object) -> APIError:
    return APIError(400, f"{param}: {reason}", param=param, code="invalid_image")


def _ask_for_boxes(messages: Sequence[PromptMessage], wish: GroundingRequest) -> list[PromptMessage]:
    try:
        return ask_for_boxes(messages, locate=wish.locate, describe=wish.describe, image_index=wish.image_index)
    except GroundingError as error:
        raise APIError(400, f"grounding: {error}", param="grounding", code="invalid_value") from error


def place_boxes(spans: Sequence[Span], prompt: PreparedPrompt, wish: GroundingRequest | None) -> list[Grounding] | None:
    """The boxes of a whole answer in the prompt's pictures, or None when it has none and none were asked for."""
    if not spans and wish is None:
        return None
    return place_spans(spans, prompt.image_sizes, image_index=None if wish is None else wish.image_index)


def _role(message: Message) -> Literal["system", "user", "assistant"]:
    if isinstance(message, SystemMessage):
        return "system"
    return "assistant" if isinstance(message, AssistantMessage) else "user"


def _form_of_schema(form: ResponseFormat | None, field: str) -> tuple[Grammar, str] | None:
    """The grammar of a response_format, and the name of the place it stands in."""
    if isinstance(form, JsonObjectFormat):
        return Grammar("json_schema", '{"type":"object"}'), field
    if isinstance(form, JsonSchemaFormat):
        return Grammar("json_schema", _compact(form.json_schema.schema_)), field
    return None


def _form_of_wish(wish: StructuredOutputs) -> tuple[Grammar, str]:
    """The same of structured_outputs, which has just one of its fields."""
    if wish.json_ is not None:
        return Grammar("json_schema", _compact(wish.json_)), "structured_outputs.json"
    if wish.regex is not None:
        return Grammar("regex", wish.regex), "structured_outputs.regex"
    if wish.choice is not None:
        # Lark writes strings as JSON does.
        return Grammar("lark", "start: " + " | ".join(map(_compact, wish.choice))), "structured_outputs.choice"
    assert wish.grammar is not None
    return Grammar("lark", wish.grammar), "structured_outputs.grammar"


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _pack(prompt: Prompt) -> PreparedPrompt:
    """A prompt in the form that crosses to the engine process."""
    images = [
        ImageInput(
            start=span.start,
            columns=span.image.columns,
            rows=span.image.rows,
            tiles=span.image.tiles.tobytes(),
            digest=span.image.digest,
        )
        for span in prompt.images
    ]
    return PreparedPrompt(
        prompt.token_ids,
        images,
        image_slots=tuple(span.image.num_slots for span in prompt.images),
        image_sizes=tuple(span.image.size for span in prompt.images),
    )


def answer_room(
    prompt: PreparedPrompt,
    limit: int,
    *,
    wanted: int | None,
    least: int,
    param: str,
    wanted_param: str = "max_tokens",
) -> int:
    """How many tokens the answer may have: what the client wants, by default all that fits into the context.

    `param` and `wanted_param` are the request's names for the prompt and for what is wanted. Raises APIError (400) when
    the prompt leaves no room, or less than the client asked for.
    """
    room = limit - len(prompt.token_ids)
    if room < 1:
        message = f"The prompt has {prompt.describes}; this model's context is {limit} tokens, answer included."
        raise APIError(400, message, param=param, code="context_length_exceeded")
    needed = least if wanted is None else wanted
    if needed > room:
        name = "min_tokens" if wanted is None else wanted_param
        message = (
            f"{name} is {needed}, but the prompt leaves room for {room}: it has {prompt.describes}, "
            f"and this model's context is {limit} tokens, answer included."
        )
        raise APIError(400, message, param=name, code="context_length_exceeded")
    return room if wanted is None else wanted
