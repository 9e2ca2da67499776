"""Grammars: what compiles, what is refused and how soon, and which tokens a guide lets through."""

import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config import load_config
from model.tokenizer import Tokenizer, TokenizerError
from server.engine.request import Grammar
from server.engine.structured import CACHED_GRAMMARS, MAX_BYTES, GrammarCompiler, GrammarError, Guide
from server.settings import DEFAULT_MODEL
from tests.goldens_data import VARIANTS, checkpoint

FOLDERS = {name: checkpoint(name) for name in VARIANTS} | {"demo": DEFAULT_MODEL}
PUBLISHED = Path(os.environ.get("VL2_PUBLISHED_TOKENIZERS", Path(__file__).parents[2] / "configs" / "checkpoints"))
for _name in ("deepseek-vl2", "deepseek-vl2-small"):
    if (PUBLISHED / _name / "tokenizer.json").is_file():
        FOLDERS[_name] = PUBLISHED / _name


class Vocabulary:
    """A compiler, and the tokens its guides choose from."""

    def __init__(self, folder: Path) -> None:
        language = load_config(folder).language
        self.size = language.vocab_size
        self.tokenizer = Tokenizer.from_folder(folder)
        self.eos = self.tokenizer.eos_token_id
        self.compiler = GrammarCompiler(lambda: self.tokenizer, self.size, self.eos)

    def guide(self, grammar: Grammar) -> Guide:
        matcher = self.compiler.compile(grammar)
        matcher.result()
        return Guide(matcher)

    def allowed(self, guide: Guide, avoid: tuple[int, ...] = ()) -> list[int]:
        words = np.full(-(-self.size // 32), -1, dtype=np.int32)
        guide.fill(words, avoid)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        assert not bits[self.size :].any()
        return [int(token) for token in np.flatnonzero(bits)]

    def write(self, grammar: Grammar, seed: int, most: int = 400) -> str | None:
        """An answer of tokens drawn blindly from those allowed; None if it has not come to its end."""
        guide, dice, raw = self.guide(grammar), random.Random(seed), b""
        for _ in range(most):
            token = dice.choice(self.allowed(guide))
            assert guide.advance(token), guide.error
            if token != self.eos:
                raw += self.tokenizer.token_bytes(token)
            if guide.ended:
                return raw.decode()
        return None

    def spells(self, grammar: Grammar, text: str) -> bool:
        """Whether the text, byte by byte, is a whole answer."""
        byte_tokens = {self.tokenizer.token_bytes(id): id for id in reversed(range(self.size))}
        guide = self.guide(grammar)
        for byte in text.encode():
            token = byte_tokens[bytes([byte])]
            if guide.ended or token not in self.allowed(guide):
                return False
            assert guide.advance(token)
        return guide.ended or self.eos in self.allowed(guide)


@pytest.fixture(scope="module")
def demo() -> Iterator[Vocabulary]:
    vocabulary = Vocabulary(DEFAULT_MODEL)
    yield vocabulary
    vocabulary.compiler.close()


def schema(content: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(content))


def refusal(vocabulary: Vocabulary, grammar: Grammar) -> str:
    with pytest.raises(GrammarError) as caught:
        vocabulary.compiler.compile(grammar).result()
    return str(caught.value)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_tokenizer_can_follow_a_grammar(name: str) -> None:
    vocabulary = Vocabulary(FOLDERS[name])
    tokenizer = vocabulary.tokenizer
    # What looks like control tokens is plain text here, spelt with plain tokens.
    constant = "<|ref|>a<image>é日<|User|>\x7f"
    assert json.loads(vocabulary.write(schema({"const": constant}), seed=0) or "") == constant
    for seed in range(3):
        text = vocabulary.write(schema({"type": "array", "items": {"type": "string", "maxLength": 9}}), seed)
        assert text is None or isinstance(json.loads(text), list)
    anything = vocabulary.allowed(vocabulary.guide(Grammar("regex", r"(.|\n)*")))
    assert vocabulary.eos in anything
    assert not [id for id in anything if id != vocabulary.eos and tokenizer.is_control(id)]
    assert all(tokenizer.token_bytes(id) for id in anything)
    assert len(anything) > 0.8 * sum(tokenizer.token_bytes(id).isascii() for id in range(tokenizer.vocab_size))


def test_eos_is_allowed_where_the_text_is_complete(demo: Vocabulary) -> None:
    digit = next(id for id in range(demo.size) if demo.tokenizer.token_bytes(id) == b"7")
    guide = demo.guide(Grammar("regex", "[0-9]{2,3}"))
    seen = []
    for _ in range(3):
        seen.append(demo.eos in demo.allowed(guide))
        assert guide.advance(digit)
    assert seen == [False, False, True]
    assert guide.ended and guide.error is None
    open_end = demo.guide(Grammar("regex", "7+"))
    assert open_end.advance(digit) and not open_end.ended
    assert open_end.advance(demo.eos) and open_end.ended


def test_avoided_tokens_come_back_when_nothing_else_is_left(demo: Vocabulary) -> None:
    a, b = (next(id for id in range(demo.size) if demo.tokenizer.token_bytes(id) == letter) for letter in (b"a", b"b"))
    guide = demo.guide(Grammar("regex", "a|b"))
    assert demo.allowed(guide) == sorted((a, b))
    assert demo.allowed(guide, avoid=(a, demo.eos)) == [b]
    assert demo.allowed(guide, avoid=(a, b)) == sorted((a, b))


def test_a_token_that_does_not_fit_is_an_error_without_the_answer(demo: Vocabulary) -> None:
    guide = demo.guide(Grammar("regex", "secret[0-9]"))
    assert not guide.advance(demo.tokenizer.image_token_id)
    assert not guide.ended
    assert guide.error is not None and "secret" not in guide.error and "\n" not in guide.error
    assert demo.allowed(guide) == []


def test_copies_of_one_grammar_do_not_share_their_place(demo: Vocabulary) -> None:
    first, second = demo.guide(Grammar("regex", "ab")), demo.guide(Grammar("regex", "ab"))
    before = demo.allowed(second)
    assert first.advance(before[0])
    assert demo.allowed(second) == before != demo.allowed(first)


def test_json_has_little_white_space_and_no_lone_surrogates(demo: Vocabulary) -> None:
    anything = schema({"type": "object"})
    good = ['{"a":1}', '{ "a": [1, 2.5e3, {}] }', '{\n  "a": {"b": "é\\n\\u0000"}\n}', "{}"]
    bad = [' {"a":1}', '{"a":1} ', '{"a":  1}', '{"a":1,}', '{"a":\n\n1}', '{"a":"\\ud800"}', '{"a":NaN}', "[]"]
    assert [text for text in good if not demo.spells(anything, text)] == []
    assert [text for text in bad if demo.spells(anything, text)] == []
    # A schema may carry options of the library: none of them gets through.
    loose = {"type": "object", "x-guidance": {"whitespace_pattern": "x", "item_separator": ";", "lenient": True}}
    assert demo.spells(schema(loose), '{"a": 1, "b": 2}')
    assert "if" in refusal(demo, schema(loose | {"if": {}}))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema({"type": "strin"}), "Invalid type: strin"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"$ref": "#/$defs/missing"}), "missing"),
        (schema({"$ref": "https://example.com/schema"}), "example.com"),
        (schema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (schema({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}), "oneOf"),
        (schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "cannot be used"),
        (Grammar("json_schema", "{"), "cannot be used"),
        (Grammar("regex", "a(b"), "unclosed group"),
        (Grammar("lark", ""), "Empty grammar"),
        (Grammar("lark", "start: other"), 'unknown name: "other"'),
        (Grammar("lark", "start: <|nothing|>"), "unknown special token"),
        (Grammar("lark", "start: start"), "cannot be used"),
        (Grammar("lark", "start: " + "(" * 3000 + '"a"' + ")" * 3000), "too deeply nested"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_reason(demo: Vocabulary, grammar: Grammar, reason: str) -> None:
    message = refusal(demo, grammar)
    assert reason in message
    assert len(message) < 600 and "\n" not in message


@pytest.mark.parametrize("kind", MAX_BYTES)
def test_size_is_limited(demo: Vocabulary, kind: Any) -> None:
    text = "é" * (MAX_BYTES[kind] // 2 + 1)
    assert f"has {MAX_BYTES[kind] + 2} bytes, at most {MAX_BYTES[kind]}" in refusal(demo, Grammar(kind, text))


def test_chains_that_would_overflow_an_ordinary_stack_compile(demo: Vocabulary) -> None:
    links = 1500
    defs: dict[str, Any] = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(links)}
    chain = json.dumps({"$defs": defs | {f"a{links}": {}}, "$ref": "#/$defs/a0"}, separators=(",", ":"))
    rules = "start: a0\n" + "".join(f"a{i}:a{i + 1}\n" for i in range(600)) + 'a600: "x"'
    for grammar in (Grammar("json_schema", chain), Grammar("lark", rules), Grammar("lark", rules.upper().lower())):
        assert demo.allowed(demo.guide(grammar))
    assert demo.write(Grammar("lark", rules), seed=0) == "x"


def test_too_large_a_grammar_is_refused_within_seconds(demo: Vocabulary) -> None:
    started = time.monotonic()
    options = schema({"anyOf": [{"minimum": i} for i in range(3000)]})
    doubling = "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(40)) + 'R40: "a"'
    for grammar in (options, Grammar("lark", doubling), schema({"properties": {f"p{i}": {} for i in range(3000)}})):
        assert "cannot be used" in refusal(demo, grammar)
    assert time.monotonic() - started < 60


def test_the_latest_grammars_are_kept(demo: Vocabulary) -> None:
    compiled = demo.compiler._compiled
    compiled.clear()
    for i in range(CACHED_GRAMMARS + 1):
        demo.guide(Grammar("regex", f"x{i}"))
        demo.guide(Grammar("regex", "x0"))
    assert len(compiled) == CACHED_GRAMMARS
    assert Grammar("regex", "x0") in compiled and Grammar("regex", "x1") not in compiled


def test_lark_grammars_may_name_control_tokens(demo: Vocabulary) -> None:
    text = demo.write(Grammar("lark", 'start: <|ref|> "cat" <|/ref|> | "none"'), seed=1)
    assert text in ("<|ref|>cat<|/ref|>", "none")


def test_failures_of_the_tokenizer_reach_the_guide() -> None:
    def missing() -> Tokenizer:
        raise TokenizerError("no tokenizer")

    matcher = GrammarCompiler(missing, 10, 1).compile(Grammar("regex", "a"))
    assert isinstance(matcher.exception(), TokenizerError)
    assert Guide(matcher).error == "no tokenizer"
    assert not Guide(Future()).ready
