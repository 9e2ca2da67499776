"""The tokenizer against the reference's ids, and control tokens out of the user's reach."""

# ruff: noqa: RUF001 (the bar in DeepSeek's own control tokens is a fullwidth one)

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from model.tokenizer import GROUNDING_MARKERS, Tokenizer, TokenizerError

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"
VARIANTS = ("mha", "mla-softmax", "mla-sigmoid")
SPECIAL_IDS = json.loads((GOLDENS / "units" / "units.json").read_text(encoding="utf-8"))["special_ids"]
PUBLISHED = json.loads((GOLDENS / "units" / "real_tokenizers.json").read_text(encoding="utf-8"))
PUBLISHED_FOLDER = Path(os.environ.get("VL2_PUBLISHED_TOKENIZERS", ROOT / "configs" / "checkpoints"))
TOKENIZERS = {variant: Tokenizer.from_folder(GOLDENS / variant / "checkpoint") for variant in VARIANTS}

CONTROL_TEXTS = (
    "<image>",
    "<|User|>",
    "<|Assistant|>",
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<|EOT|>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜fim▁hole｜>",
)
variants = pytest.mark.parametrize("variant", VARIANTS)


def file_of(variant: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDENS / variant / "checkpoint/tokenizer.json").read_text(encoding="utf-8"))
    return content


@variants
def test_control_ids_come_from_the_file(variant: str) -> None:
    tokenizer, ids = TOKENIZERS[variant], SPECIAL_IDS[variant]
    assert tokenizer.bos_token_id == ids["<｜begin▁of▁sentence｜>"]
    assert tokenizer.eos_token_id == ids["<｜end▁of▁sentence｜>"]
    assert tokenizer.pad_token_id == ids["<｜▁pad▁｜>"]
    assert tokenizer.image_token_id == ids["<image>"]
    assert tokenizer.user_token_id == ids["<|User|>"]
    assert tokenizer.assistant_token_id == ids["<|Assistant|>"]
    assert tokenizer.grounding_token_ids == {marker: ids[marker] for marker in GROUNDING_MARKERS}
    assert all(tokenizer.is_special(id) for id in ids.values())
    assert not tokenizer.is_special(tokenizer.encode("a")[0])


@variants
@pytest.mark.parametrize("text", CONTROL_TEXTS)
def test_typed_control_tokens_are_plain_text(variant: str, text: str) -> None:
    tokenizer = TOKENIZERS[variant]
    added = {token["id"] for token in file_of(variant)["added_tokens"]}
    for sentence in (text, f"a{text}b", f" {text}\n{text} ", f"<|ref|>{text}"):
        ids = tokenizer.encode(sentence)
        assert added.isdisjoint(set(ids) - {tokenizer.grounding_token_ids["<|ref|>"]})
        assert tokenizer.decode(ids, skip_special_tokens=False) == sentence


@variants
def test_grounding_markers_become_their_ids(variant: str) -> None:
    tokenizer = TOKENIZERS[variant]
    text = "<|grounding|>find <|ref|>x<|/ref|> at <|det|>[[1, 2, 3, 4]]<|/det|>"
    ids = tokenizer.encode(text)
    assert ids == tokenizer.encode_control(text)
    assert set(tokenizer.grounding_token_ids.values()) <= set(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "find x at [[1, 2, 3, 4]]"


@variants
@given(text=st.text())
@example(text="don't\r\n\t  12345 naïve 图片 🙂👍🏽 <tag> |> <| ｜")
def test_other_text_is_the_same_either_way_and_round_trips(variant: str, text: str) -> None:
    assume(not any(control in text for control in CONTROL_TEXTS))  # Hypothesis tries strings that it sees in this file
    tokenizer = TOKENIZERS[variant]
    ids = tokenizer.encode(text)
    assert ids == tokenizer.encode_control(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@variants
@given(pieces=st.lists(st.sampled_from([*CONTROL_TEXTS, *GROUNDING_MARKERS, "<", "|>", " ", "x", "\n"])))
def test_no_mixture_yields_a_control_token(variant: str, pieces: list[str]) -> None:
    tokenizer = TOKENIZERS[variant]
    text = "".join(pieces)
    ids = tokenizer.encode(text)
    special = {id for id in ids if tokenizer.is_special(id)}
    assert special <= set(tokenizer.grounding_token_ids.values())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_lone_surrogates_become_replacement_characters() -> None:
    tokenizer = TOKENIZERS["mha"]
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
    assert tokenizer.encode("\ud83d\ude42") == tokenizer.encode("🙂")


@variants
def test_greedy_texts_are_the_references(variant: str) -> None:
    tokenizer = TOKENIZERS[variant]
    for case in json.loads((GOLDENS / variant / "cases.json").read_text(encoding="utf-8"))["cases"]:
        tokens = case["greedy_tokens"]
        assert tokenizer.decode(tokens, skip_special_tokens=False) == case["greedy_text"]
        assert tokenizer.decode(tokens, skip_special_tokens=True) == case["greedy_text_skip_special"]


@variants
def test_ids_without_text_add_nothing(variant: str) -> None:
    tokenizer = TOKENIZERS[variant]
    a = tokenizer.encode("a")
    for id in (tokenizer.vocab_size, tokenizer.vocab_size + 50, 10**6):
        assert tokenizer.decode([id], skip_special_tokens=False) == ""
        assert tokenizer.decode([*a, id, *a], skip_special_tokens=True) == "aa"
        assert tokenizer.token_bytes(id) == b""
        assert not tokenizer.is_special(id)
    assert tokenizer.token_bytes(-1) == b""


@variants
def test_token_bytes_of_every_token_are_what_decoding_shows(variant: str) -> None:
    tokenizer = TOKENIZERS[variant]
    for id in range(tokenizer.vocab_size):
        shown = tokenizer.token_bytes(id).decode("utf-8", "replace")
        assert shown == tokenizer.decode([id], skip_special_tokens=False)


def test_token_bytes_are_true_bytes_within_a_character() -> None:
    tokenizer = TOKENIZERS["mha"]
    ids = tokenizer.encode("🦒")
    assert len(ids) > 1
    assert tokenizer.decode(ids[:1], skip_special_tokens=False) == "\ufffd"
    assert b"".join(map(tokenizer.token_bytes, ids)) == "🦒".encode()
    assert tokenizer.token_bytes(tokenizer.eos_token_id) == "<｜end▁of▁sentence｜>".encode()


def test_ordinary_added_words_stay_what_the_file_makes_of_them(tmp_path: Path) -> None:
    content = file_of("mha")
    word = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    content["added_tokens"].append({"id": 1212, "content": "giraffe", **word})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert 1212 in tokenizer.encode("one giraffe")
    assert tokenizer.encode("one giraffe") == tokenizer.encode_control("one giraffe")


@pytest.mark.parametrize("missing", ["<image>", "<|User|>", "<|grounding|>", "<｜▁pad▁｜>"])
def test_a_missing_control_token_is_named(tmp_path: Path, missing: str) -> None:
    content = file_of("mha")
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != missing]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert missing in str(caught.value)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match="not a tokenizer file"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_tokenizers(name: str) -> None:
    if not (PUBLISHED_FOLDER / name / "tokenizer.json").is_file():
        pytest.skip(
            f"no {name}/tokenizer.json in {PUBLISHED_FOLDER}: the published tokenizers are not distributed with this "
            "project, for their licence is the model's; set VL2_PUBLISHED_TOKENIZERS to a folder that has them"
        )
    tokenizer = Tokenizer.from_folder(PUBLISHED_FOLDER / name)
    golden = PUBLISHED[name]
    assert tokenizer.vocab_size == golden["size"]
    for text, id in golden["special_ids"].items():
        assert tokenizer.encode_control(text) == [id]
        assert tokenizer.is_special(id)
        assert tokenizer.encode(text) == [id] if text in GROUNDING_MARKERS else id not in tokenizer.encode(text)
    for entry in golden["encode"]:
        text, ids = entry["text"], entry["ids"]
        assert tokenizer.encode_control(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == entry["decoded"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == entry["decoded_skip_special"]
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        markers = set(tokenizer.grounding_token_ids.values())
        if not any(tokenizer.is_special(id) and id not in markers for id in ids):
            assert tokenizer.encode(text) == ids


@variants
def test_plain_text_gives_the_ids_of_the_library_that_the_reference_uses(variant: str) -> None:
    """transformers reads the same file; its special tokens in text are special there, so plain text is compared."""
    library = PreTrainedTokenizerFast(tokenizer_file=str(GOLDENS / variant / "checkpoint" / "tokenizer.json"))
    for text in ("Hi", "  two  spaces\n\nand lines\t", "1,234.5 €", "naïve 中文 🙂", "for i in range(10): x[i] += 'a'"):
        assert TOKENIZERS[variant].encode(text) == library.encode(text, add_special_tokens=False)
