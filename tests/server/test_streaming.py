"""Text from token events: UTF-8, stop strings, special tokens, log probabilities."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.tokenizer import GROUNDING_MARKERS, Tokenizer
from server.engine.request import TokenEvent, TokenLogprobs
from server.grounding import Span
from server.streaming import AnswerDecoder, Delta, StopMatcher

TEXTS = st.text(alphabet="abé🙂", max_size=24)
STOPS = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=4), max_size=4)


class Bytes:
    """A tokenizer of one token a byte, the grounding markers, a control token and the end of a sentence."""

    CONTROL, eos_token_id = 256, 257
    grounding_token_ids = MARKERS = {marker: 258 + place for place, marker in enumerate(GROUNDING_MARKERS)}  # noqa: RUF012
    TEXTS = {CONTROL: "<control>", eos_token_id: "<eos>", **{token: marker for marker, token in MARKERS.items()}}  # noqa: RUF012

    def is_special(self, token: int) -> bool:
        return token in self.TEXTS

    def token_bytes(self, token: int) -> bytes:
        return self.TEXTS[token].encode() if token in self.TEXTS else bytes([token])


class Words(Bytes):
    """Token 300 is a whole word."""

    def token_bytes(self, token: int) -> bytes:
        return b"word" if token == 300 else super().token_bytes(token)


def test_the_log_probability_of_a_token_that_a_stop_string_cuts_is_the_whole_tokens() -> None:
    """The joined bytes then go beyond the text, by the rest of that one token."""
    reader = AnswerDecoder(cast(Tokenizer, Words()), stop=["rd"])
    tokens = [97, 300, 98]
    scores = [TokenLogprobs(-float(place), []) for place in range(3)]
    delta = reader.feed(TokenEvent(request_id="r", token_ids=tokens, logprobs=scores))
    assert (delta.text, delta.finish_reason) == ("awo", "stop")
    assert [scored.token_id for scored in delta.scored] == [97, 300]


def decoder(**options: Any) -> AnswerDecoder:
    return AnswerDecoder(cast(Tokenizer, Bytes()), **options)


def tokens_of(text: str) -> list[int]:
    """Special tokens where they are spelt, else bytes."""
    ids = {spelt: token for token, spelt in Bytes.TEXTS.items()}
    pieces = re.split("(" + "|".join(map(re.escape, ids)) + ")", text)
    return [token for piece in pieces for token in ([ids[piece]] if piece in ids else piece.encode())]


def feed(answer: AnswerDecoder, tokens: list[int], cuts: list[int], reason: str = "length") -> list[Delta]:
    """Feed tokens in events that end at the cuts, as an engine would; stop where the decoder does."""
    bounds = sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)})
    deltas, start = [], 0
    for bound in bounds:
        last = bound == len(tokens)
        part = tokens[start:bound]
        event = TokenEvent(
            request_id="r",
            token_ids=part,
            logprobs=[TokenLogprobs(-float(token), []) for token in part],
            finish_reason=cast(Any, reason) if last else None,
        )
        deltas.append(answer.feed(event))
        start = bound
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def joined(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def cut_by_the_book(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first moment at which a stop string is complete, and where it began."""
    for end in range(1, len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            return text[: end - max(map(len, ends))], True
    return text, False


@given(TEXTS, STOPS, st.lists(st.integers(0, 24), max_size=6))
def test_stop_strings_cut_the_same_however_the_text_is_pieced(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    expected, matched = cut_by_the_book(text, stops)
    out, start = "", 0
    for bound in sorted({min(cut, len(text)) for cut in cuts} | {len(text)}):
        out += matcher.push(text[start:bound])
        assert expected.startswith(out)  # nothing leaks that a match would have to take back
        start = bound
    out += matcher.flush()
    assert (out, matcher.matched) == (expected, matched)


def test_text_that_begins_no_stop_string_is_not_held_back() -> None:
    matcher = StopMatcher(["END", "\n\n"])
    assert matcher.push("Hello E") == "Hello "
    assert matcher.push("gg\n") == "Egg"
    assert matcher.push("x") == "\nx"


@given(st.lists(st.integers(0, 255), max_size=24), st.lists(st.integers(0, 24), max_size=6), STOPS)
def test_streamed_text_is_the_whole_text(tokens: list[int], cuts: list[int], stops: list[str]) -> None:
    whole = bytes(tokens).decode(errors="replace")
    expected, matched = cut_by_the_book(whole, stops)
    deltas = feed(decoder(stop=stops), tokens, cuts)
    assert joined(deltas) == expected
    assert deltas[-1].finish_reason == ("stop" if matched else "length")
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    reported = [token for delta in deltas for token in delta.token_ids]
    assert reported == tokens[: len(reported)]
    if not matched:
        assert reported == tokens


@given(TEXTS, STOPS)
def test_bytes_of_scored_tokens_are_the_text(text: str, stops: list[str]) -> None:
    tokens = list(text.encode())
    deltas = feed(decoder(stop=stops), tokens, list(range(len(tokens))))
    scored = [item for delta in deltas for item in delta.scored]
    assert bytes(item.token_id for item in scored).decode() == joined(deltas)
    assert [item.logprobs.logprob for item in scored] == [-float(item.token_id) for item in scored]


def test_a_character_comes_out_only_when_it_is_whole() -> None:
    deltas = feed(decoder(), list("a🙂b".encode()), [1, 2, 3, 4, 5])
    assert [delta.text for delta in deltas] == ["a", "", "", "", "🙂", "b"]
    assert [len(delta.scored) for delta in deltas] == [1, 0, 0, 0, 4, 1]


def test_half_a_character_at_the_end_becomes_a_replacement() -> None:
    deltas = feed(decoder(), list("a🙂".encode())[:-1], [1, 2, 3])
    assert [delta.text for delta in deltas] == ["a", "", "", "�"]


def test_hidden_tokens_have_no_text_and_no_logprobs_but_count() -> None:
    [delta] = feed(decoder(), [*b"ab", Bytes.CONTROL], [], reason="stop")
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("ab", [97, 98, Bytes.CONTROL], "stop")
    assert [item.token_id for item in delta.scored] == [97, 98]


def test_the_stop_token_is_no_part_of_the_answer_but_an_equal_one_before_is() -> None:
    answer = decoder(stop_token_ids=[ord("b")])
    assert joined(feed(answer, [*b"ab"], [], reason="stop")) == "a"
    answer = decoder(stop_token_ids=[ord("b")])
    assert joined(feed(answer, [*b"ab"], [], reason="length")) == "ab"


def test_no_stop_string_before_min_tokens() -> None:
    assert joined(feed(decoder(stop=["a"], min_tokens=3), [*b"aaaab"], [1, 2, 3, 4])) == "aa"
    assert joined(feed(decoder(stop=["a"], min_tokens=1), [*b"aaaab"], [1, 2, 3, 4])) == ""


def test_a_stop_string_within_one_event_ends_there() -> None:
    [delta] = feed(decoder(stop=["c"]), [*b"abcde"], [], reason="length")
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("ab", [*b"abc"], "stop")


@pytest.mark.parametrize(
    ("skip", "reads", "shown"),
    [
        (True, False, "ab"),
        (False, False, "a<control><|det|>b"),
        (True, True, "ab"),
        (False, True, "a<control><|det|>b"),
    ],
)
def test_which_special_tokens_show(skip: bool, reads: bool, shown: str) -> None:
    tokens = tokens_of("a<control><|det|>b<eos>")
    assert joined(feed(decoder(skip_special_tokens=skip, grounding=reads), tokens, [1, 2, 3, 4], "stop")) == shown


MARKED = "A <|ref|>red 🙂<|/ref|><|det|>[[1, 2, 3, 4]]<|/det|> and <b>"
READABLE = "A red 🙂 and <b>"


@pytest.mark.parametrize(("skip", "shown"), [(True, READABLE), (False, MARKED)])
@given(cuts=st.lists(st.integers(0, 64), max_size=8))
def test_boxes_are_data_and_text_is_as_people_read_it(skip: bool, shown: str, cuts: list[int]) -> None:
    deltas = feed(decoder(skip_special_tokens=skip, grounding=True), tokens_of(MARKED), cuts)
    assert joined(deltas) == shown
    assert deltas[-1].spans == [Span("red 🙂", ((1, 2, 3, 4),))]
    assert not any(delta.spans for delta in deltas[:-1])
    # Whoever wants to know how sure the model is of a box finds its tokens.
    scored = [item.token_id for delta in deltas for item in delta.scored]
    assert scored == tokens_of(MARKED)


@pytest.mark.parametrize(("skip", "shown"), [(True, "A r"), (False, "A <|ref|>r")])
def test_stop_strings_see_the_text_that_is_shown(skip: bool, shown: str) -> None:
    [delta] = feed(decoder(skip_special_tokens=skip, grounding=True, stop=["ed"]), tokens_of(MARKED), [])
    assert (delta.text, delta.finish_reason) == (shown, "stop")
    # Between "🙂" and " and" people read nothing, so a stop string may go across the boxes.
    [delta] = feed(decoder(grounding=True, stop=["🙂 and"]), tokens_of(MARKED), [])
    assert (delta.text, delta.finish_reason) == ("A red ", "stop")


def test_cut_off_markup_stays_text() -> None:
    text = "a<|ref|>b<|/ref|><|det|>[[1, 2"
    [delta] = feed(decoder(grounding=True), tokens_of(text), [])
    assert (delta.text, delta.spans) == ("ab[[1, 2", [])
