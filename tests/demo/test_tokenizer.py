"""The demo's tokenizer: special ids, round trips, and print spelt one token a character."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.demo.architecture import VOCABULARY_SIZE
from model.demo.fonts import Fonts
from model.demo.rows import Wording
from model.demo.tokenizer import CONTROL_TOKENS, corpus, save_tokenizer, take_vocabulary
from model.tokenizer import Tokenizer


def test_control_tokens_follow_the_vocabulary(tokenizer: Tokenizer) -> None:
    first = VOCABULARY_SIZE - len(CONTROL_TOKENS)
    assert [tokenizer.encode_control(token) for token in CONTROL_TOKENS] == [
        [first + index] for index in range(len(CONTROL_TOKENS))
    ]
    assert tokenizer.vocab_size == VOCABULARY_SIZE


@pytest.mark.parametrize("word", ["HELLO", "hello", "the text", "A1 b2", "OPEN NOW", "x", "über"])
def test_print_is_spelt_by_character(word: str, tokenizer: Tokenizer) -> None:
    around = tokenizer.encode('The text says "".')
    ids = tokenizer.encode(f'The text says "{word}".')
    pieces = [tokenizer.token_bytes(token) for token in ids]
    start = next(index for index, piece in enumerate(pieces) if piece.endswith(b'"')) + 1
    assert pieces[start : start + len(word.encode())] == [bytes([byte]) for byte in word.encode()]
    assert len(ids) >= len(word) + len(around) - 2


def test_a_checkpoint_s_tokens_are_kept(tmp_path: Path, fonts: Fonts) -> None:
    """Ids are the shipped checkpoint's, print is spelt by character, and remembered words are the tokenizer's."""
    shipped = Path(__file__).parents[2] / "model" / "demo" / "checkpoint"
    save_tokenizer(take_vocabulary(shipped), tmp_path)
    before, kept = Tokenizer.from_folder(shipped), Tokenizer.from_folder(tmp_path)
    assert [kept.token_bytes(i) for i in range(VOCABULARY_SIZE)] == [
        before.token_bytes(i) for i in range(VOCABULARY_SIZE)
    ]
    test_control_tokens_follow_the_vocabulary(kept)
    test_print_is_spelt_by_character("hello", kept)
    test_remembered_words_are_the_tokenizer_s(fonts, kept, Wording(kept))


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.token_bytes(token) for token in tokenizer.encode("[[12, 345, 6, 999]]")]
    assert [piece for piece in pieces if piece.isdigit()] == [bytes([digit]) for digit in b"123456999"]


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_round_trip(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_remembered_words_are_the_tokenizer_s(fonts: Fonts, tokenizer: Tokenizer, wording: Wording) -> None:
    for text in corpus(fonts, 11, 60):
        for framed in (text, f"\n{text}\n\n", f": {text}\n\n"):
            assert wording.encode(framed) == tokenizer.encode(framed)
