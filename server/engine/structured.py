"""Structured output: which tokens may come next, so that an answer keeps to a JSON schema, a regex or a grammar.

llguidance does the work: a parser over bytes that knows, for the text so far, which tokens of the vocabulary lead on.
`GrammarCompiler` makes its matchers, in a thread of its own: the HTTP process compiles to refuse what cannot be done
(a 400 before anything runs), the engine process to follow the grammar. `Guide` is one request's place in its grammar.

- A guide advances when a token is committed, never when it is sampled, so a step that is run again finds it where it
  was; and as it follows from the generated tokens alone, it lives through preemption untouched.
- The mask is filled on the host while the device computes the logits, and applied there (`Sampler`), after penalties
  and bias: no bias revives a token that the grammar forbids. A step that samples a request with a guide needs the
  request's tokens before it: while one is in flight, the engine does not run ahead.
- Eos is allowed exactly where the text is complete. Where nothing else may follow the answer ends without it. Control
  tokens and ids without text are never allowed, but for those that a Lark grammar names (`<|ref|>`).
- Between the tokens of a JSON text there may be one blank, or a line break and an indent: a model that falls into an
  endless run of white space would otherwise never end.
- What a grammar may cost is bounded by the length of its text and by the library's own limits, set below so that the
  worst text found compiles in a second or two; its first mask is part of the compilation, since that is where most
  that are too large show it. The library recurses, a level for each reference or rule: hence the large stack.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from model.tokenizer import Tokenizer
from server.engine.request import Grammar

MAX_BYTES = {"json_schema": 64 << 10, "regex": 8 << 10, "lark": 8 << 10}
MAX_MESSAGE_CHARS = 400
CACHED_GRAMMARS = 64
STACK_BYTES = 256 << 20  # of address space; four times what the deepest text within MAX_BYTES took

_NAMES = {"json_schema": "the JSON schema", "regex": "the regular expression", "lark": "the grammar"}
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_items_in_row=1_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,  # they would quote the answer
)


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says what is wrong with it, or which limit it breaks."""


class GrammarCompiler:
    """Matchers from grammars, one compilation at a time, the latest ones kept. The tokenizer is read at first use."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_id: int) -> None:
        """`vocab_size` is the model's, which may be larger than the tokenizer's."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()  # the thread's own, as the tokenizer
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def compile(self, grammar: Grammar) -> Future[LLMatcher]:
        """A matcher of its own for the caller. The future raises GrammarError, TokenizerError if there is no tokenizer.

        May be called from any thread; does not wait.
        """
        with _large_stacks():  # the pool starts its thread with the first task
            return self._pool.submit(self._find, grammar)

    def close(self) -> None:
        """Compile nothing more; what has not begun is cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _find(self, grammar: Grammar) -> LLMatcher:
        matcher = self._compiled.pop(grammar, None) or self._compile(grammar)
        self._compiled[grammar] = matcher
        if len(self._compiled) > CACHED_GRAMMARS:
            self._compiled.popitem(last=False)
        return matcher.deep_copy()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        name, size, limit = _NAMES[grammar.kind], len(grammar.text.encode()), MAX_BYTES[grammar.kind]
        if size > limit:
            raise GrammarError(f"{name} has {size} bytes, at most {limit} are allowed")
        if self._tokenizer is None:
            self._tokenizer = _wrap(self._load_tokenizer(), self._vocab_size, self._eos_token_id)
        try:
            matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
        except ValueError as error:
            raise GrammarError(f"{name} cannot be used: {_shorten(str(error))}") from error
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(f"{name} cannot be used: {_shorten(matcher.get_error())}")
        return matcher


class Guide:
    """One request's place in its grammar. `ready` once the grammar is compiled; nothing else may be asked before."""

    def __init__(self, matcher: Future[LLMatcher]) -> None:
        self.matcher = matcher

    @property
    def ready(self) -> bool:
        return self.matcher.done()

    @property
    def error(self) -> str | None:
        """Why the answer cannot go on, if that is so: no matcher, or a limit of the library reached on the way."""
        failure = self.matcher.exception()
        if failure is not None:
            return str(failure)
        matcher = self.matcher.result()
        return f"the grammar cannot be followed: {_shorten(matcher.get_error())}" if matcher.is_error() else None

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        matcher = self.matcher.result()
        return matcher.is_stopped() and not matcher.is_error()

    def fill(self, words: npt.NDArray[np.int32], avoid: Iterable[int]) -> None:
        """Set the bits of the tokens that may come next: bit i % 32 of word i // 32 is token i's.

        `avoid` are left out, unless nothing else is possible. No bit is set when there is an `error`.
        """
        matcher = self.matcher.result()
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            words.fill(0)
            return
        bits = words.view(np.uint32)
        allowed = bits.copy()
        for token in avoid:
            bits[token // 32] &= ~np.uint32(1 << token % 32)
        if not bits.any():
            bits[:] = allowed

    def advance(self, token: int) -> bool:
        """Step over a token of the answer; False, with `error` set, if it does not fit."""
        return self.matcher.result().consume_token(token)


class _Vocabulary:
    """The tokenizer as llguidance asks for it. Ids without text count as special: they never fit."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        self.special_token_ids = [
            id for id, text in enumerate(self.tokens) if not text or id == eos_token_id or tokenizer.is_control(id)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """How the model would spell text that the grammar leaves no choice about."""
        if not isinstance(text, str):
            raise TypeError("text must be a string")  # the library tries bytes first, and goes by this
        return self._tokenizer.encode_characters(text)


def _wrap(tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> LLTokenizer:
    vocabulary = _Vocabulary(tokenizer, vocab_size, eos_token_id)
    return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=eos_token_id)


def _source(grammar: Grammar) -> str:
    """The grammar in the library's own form. Raises ValueError on text that is not JSON where it should be."""
    match grammar.kind:
        case "json_schema":
            # All options that could make the answer another text than JSON that satisfies the schema: a schema may
            # carry options of its own, and these overrule them.
            return LLMatcher.grammar_from_json_schema(
                grammar.text,
                overrides={
                    "item_separator": ",",
                    "key_separator": ":",
                    "whitespace_pattern": r"[ \t]|\n[ \t]{0,40}",
                    "coerce_one_of": False,
                    "lenient": False,
                    "json_allow_general_unicode_escapes": False,
                },
            )
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def _shorten(message: str) -> str:
    """A message of the library in one line, without the state that it may append in angle brackets."""
    line = " ".join(message.partition("\n<")[0].split())
    return line if len(line) <= MAX_MESSAGE_CHARS else line[:MAX_MESSAGE_CHARS] + "…"


@contextmanager
def _large_stacks() -> Iterator[None]:
    """Threads started meanwhile get STACK_BYTES of stack."""
    before = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)
