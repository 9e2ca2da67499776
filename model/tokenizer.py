"""The checkpoint's tokenizer: text to ids and back, with control tokens out of the user's reach.

The ``tokenizer.json`` of the checkpoint is the only thing read. The class that ``tokenizer_config.json`` names is
ignored: a library that rebuilds a tokenizer from that name loses the pre-tokenizer.

Two ways to encode:

* `encode_control` parses every added token in the text, as the reference does with everything. For the fixed parts of
  the prompt template, never for text that somebody sent.
* `encode` is for what people send. The grounding markers ``<|ref|> <|/ref|> <|det|> <|/det|> <|grounding|>`` become
  their ids, because that is how grounding is asked for. Everything else that looks like a control token is plain text
  and goes through the BPE character by character: tokens flagged special, and those spelt ``<|…|>`` or ``<｜…｜>``
  (in the published file: turns of other chat formats, tool calls, fill-in-the-middle). So nobody can end a turn,
  speak as the assistant or ask for an image slot by typing its name. Other added tokens are ordinary words and stay
  what the published file makes of them.
"""

# ruff: noqa: RUF001, RUF002 (the bar in DeepSeek's own control tokens is a fullwidth one)

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
IMAGE = "<image>"
USER = "<|User|>"
ASSISTANT = "<|Assistant|>"
GROUNDING_MARKERS = ("<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>")

_CONTROL_SPELLING = re.compile(r"<\|.*\|>|<｜.*｜>", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


class TokenizerError(ValueError):
    """The tokenizer file is missing, unreadable, or lacks a token that the model needs."""


class Tokenizer:
    """Byte-level BPE with the model's control tokens. Immutable after loading; safe to share among threads."""

    def __init__(self, trusted: FastTokenizer) -> None:
        """Takes a loaded tokenizer that parses every added token.

        Raises:
            TokenizerError: a control token or a grounding marker is missing.
        """
        self._trusted = trusted
        self._added: dict[int, AddedToken] = trusted.get_added_tokens_decoder()
        self._special_ids = frozenset(id for id, token in self._added.items() if token.special)
        self.vocab_size: int = trusted.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._control_id(BOS)
        self.eos_token_id = self._control_id(EOS)
        self.pad_token_id = self._control_id(PAD)
        self.image_token_id = self._control_id(IMAGE)
        self.user_token_id = self._control_id(USER)
        self.assistant_token_id = self._control_id(ASSISTANT)
        self.grounding_token_ids = {marker: self._control_id(marker) for marker in GROUNDING_MARKERS}
        self._control_ids = frozenset(
            id for id, token in self._added.items() if token.content in GROUNDING_MARKERS or _is_control(token)
        )
        self._characters = self._without_added_tokens()
        self._plain, self._plain_to_id = self._build_plain()

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Loads ``tokenizer.json`` from a checkpoint folder.

        Raises:
            TokenizerError: there is no such file, it cannot be read, or a token that the model needs is missing.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path} does not exist: a checkpoint folder must have its tokenizer")
        try:
            trusted = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a file that it cannot parse
            raise TokenizerError(f"{path} is not a tokenizer file: {error}") from error
        # Cutting or padding a prompt behind the caller's back is never wanted, whatever the file says.
        trusted.no_truncation()
        trusted.no_padding()
        try:
            return cls(trusted)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of text from outside: only the grounding markers become special ids. Adds no bos, no eos.

        Lone surrogates, which JSON can smuggle into a string and UTF-8 cannot hold, become U+FFFD.
        """
        ids: list[int] = self._plain.encode(_well_formed(text), add_special_tokens=False).ids
        return [self._plain_to_id.get(id, id) for id in ids]

    def encode_control(self, text: str) -> list[int]:
        """Ids of text that this project wrote itself: every control token in it is parsed. Adds no bos, no eos."""
        ids: list[int] = self._trusted.encode(text, add_special_tokens=False).ids
        return ids

    def encode_characters(self, text: str) -> list[int]:
        """Ids of text taken letter by letter: what looks like an added token, grounding markers included, is none."""
        ids: list[int] = self._characters.encode(_well_formed(text), add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of ids. Ids without text (the model's vocabulary is larger than the tokenizer's) add nothing.

        Bytes that are not UTF-8, such as half a character, become U+FFFD. ``skip_special_tokens`` leaves out the
        tokens for which `is_special` is true, the grounding markers included.
        """
        text: str = self._trusted.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for, be they a whole character or not; empty for an id without text.

        Of a run of ordinary tokens, the joined bytes are the UTF-8 of the text. Added tokens give their own text.
        """
        if id in self._added:
            return self._added[id].content.encode()
        token: str | None = self._trusted.id_to_token(id) if id >= 0 else None
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:
            return token.encode()  # an entry outside the byte alphabet: the decoder shows it as it is spelt

    def is_special(self, id: int) -> bool:
        """Whether the tokenizer file flags this token as special."""
        return id in self._special_ids

    def is_control(self, id: int) -> bool:
        """Whether this is a control token or a grounding marker: a token that means more than its letters."""
        return id in self._control_ids

    def _control_id(self, text: str) -> int:
        """The id of a control token, looked up by its text: ids differ among the published checkpoints."""
        id: int | None = self._trusted.token_to_id(text)
        if id is None or id not in self._added:
            raise TokenizerError(f"the tokenizer has no special token {text!r}, which DeepSeek-VL2 needs")
        return id

    def _build_plain(self) -> tuple[FastTokenizer, dict[int, int]]:
        """A tokenizer without control tokens, and the ids to put in place of those it gives its added tokens.

        It shares vocabulary and merges with the trusted one, so it costs neither time nor memory.
        """
        plain = self._without_added_tokens()
        kept = {id: token for id, token in self._added.items() if not _is_control(token)}
        plain.add_tokens(list(kept.values()))
        plain_ids = {id: plain.token_to_id(token.content) for id, token in kept.items()}
        return plain, {plain_id: id for id, plain_id in plain_ids.items() if plain_id is not None}

    def _without_added_tokens(self) -> FastTokenizer:
        bare = FastTokenizer(self._trusted.model)
        if self._trusted.normalizer is not None:
            bare.normalizer = self._trusted.normalizer
        bare.pre_tokenizer = self._trusted.pre_tokenizer
        return bare


def _is_control(token: AddedToken) -> bool:
    """Whether an added token may act on the prompt's structure, and so must not come from a user's text."""
    if token.content in GROUNDING_MARKERS:
        return False
    return token.special or _CONTROL_SPELLING.fullmatch(token.content) is not None


def _well_formed(text: str) -> str:
    """Text that UTF-8 can hold: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes for the 256 bytes, and the byte of each.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
