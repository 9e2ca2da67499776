"""The demo's own tokenizer: a byte-level BPE of 1,013 entries over the demo's dialogues, and the control tokens.

    python -m model.demo.tokenizer --out FOLDER
    python -m model.demo.tokenizer --vocabulary CHECKPOINT --out FOLDER     # for training that goes on from one

Text between double quotes is spelt one token a character, as digits are everywhere: reading print is then copying
characters, and a box is copying digits.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer

from model.demo import chat, pairs, questions
from model.demo.architecture import VOCABULARY_SIZE, write_json
from model.demo.fonts import Fonts, find_fonts
from model.demo.scene import Request
from model.demo.scenes import random_scene
from model.tokenizer import ASSISTANT, BOS, EOS, GROUNDING_MARKERS, IMAGE, PAD, USER

CONTROL_TOKENS = (BOS, EOS, PAD, IMAGE, *GROUNDING_MARKERS, USER, ASSISTANT)
LONGEST_QUOTE = 40
SCENES = 4000


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """The published pattern of splits, after one that takes quoted text apart.

    The first split makes a piece of each quotation, the second, which acts on each piece by itself, cuts off every
    character that follows a piece's opening quote.
    """
    followers = "|".join(rf'\A"[^\n]{{{count}}}' for count in range(LONGEST_QUOTE))
    splits = [
        rf'"[^"\n]{{1,{LONGEST_QUOTE - 1}}}"',
        rf"(?<={followers})[^\n]",
        "[\r\n]",
        r"\s?[A-Za-zÀ-ÖØ-öø-ƺ]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",  # noqa: RUF001 (the published pattern)
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
    ]
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated", invert=False) for pattern in splits),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def corpus(fonts: Fonts, seed: int, scenes: int) -> Iterator[str]:
    """Questions and answers of the kind the model learns."""
    rng = random.Random(seed)
    for _ in range(scenes):
        scene = random_scene(rng, fonts, Request(tiles=rng.choice(("single", "single", "quad"))))
        several = questions.dialogues(rng, scene)
        conversations = [next(several) for _ in range(6)]
        if rng.random() < 0.1:
            compared = pairs.dialogues(rng, pairs.random_scenes(rng, fonts, 2, ("single", "single")))
            conversations += [next(compared) for _ in range(6)]
        if rng.random() < 0.1:
            conversations.append(chat.text_only(rng))
        for conversation in conversations:
            for turn in conversation:
                yield turn.question
                yield turn.answer


def build_tokenizer(texts: Iterator[str]) -> FastTokenizer:
    """A tokenizer of the published layout whose control tokens follow the vocabulary."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        special_tokens=[],
    )
    # The markers are tokens of their own; nothing may be merged across or from their spelling.
    tokenizer.train_from_iterator((_without_markers(text) for text in texts), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS])
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, bos_id)]
    )
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, {VOCABULARY_SIZE} are wanted")
    return tokenizer


def take_vocabulary(folder: Path) -> FastTokenizer:
    """A checkpoint's tokens under the same ids, with this tokenizer's splits: print is spelt one token a character.

    Raises:
        ValueError: if its control tokens are not those of a demo checkpoint.
    """
    tokenizer = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    first = VOCABULARY_SIZE - len(CONTROL_TOKENS)
    ids = [tokenizer.token_to_id(token) for token in CONTROL_TOKENS]
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE or ids != list(range(first, VOCABULARY_SIZE)):
        raise ValueError(f"{folder} has other control tokens than a demo checkpoint")
    tokenizer.pre_tokenizer = _pre_tokenizer()
    return tokenizer


def _without_markers(text: str) -> str:
    for marker in GROUNDING_MARKERS:
        text = text.replace(marker, "\n")
    return text


def save_tokenizer(tokenizer: FastTokenizer, folder: Path) -> None:
    """Writes ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=True)

    def entry(token: str) -> dict[str, object]:
        return {"content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}

    decoder = {str(tokenizer.token_to_id(token)): entry(token) | {"special": True} for token in CONTROL_TOKENS}
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    write_json(
        folder / "tokenizer_config.json",
        {
            "add_bos_token": True,
            "add_eos_token": False,
            "added_tokens_decoder": decoder,
            "additional_special_tokens": [USER, ASSISTANT],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
            "processor_class": "DeepseekVLV2Processor",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": None,
            **names,
        },
    )
    write_json(
        folder / "special_tokens_map.json",
        {name: entry(token) for name, token in names.items()}
        | {"additional_special_tokens": [entry(USER), entry(ASSISTANT)]},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the tokenizer files to")
    parser.add_argument("--fonts", type=Path, default=None, help="folder with the fonts (default: the system's)")
    parser.add_argument("--vocabulary", type=Path, default=None, help="checkpoint folder whose tokens are kept")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--scenes", type=int, default=SCENES, help="pictures whose dialogues make the corpus")
    arguments = parser.parse_args()
    if arguments.vocabulary is not None:
        tokenizer = take_vocabulary(arguments.vocabulary)
    else:
        tokenizer = build_tokenizer(corpus(find_fonts(arguments.fonts), arguments.seed, arguments.scenes))
    save_tokenizer(tokenizer, arguments.out)
    print(f"{arguments.out / 'tokenizer.json'}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
