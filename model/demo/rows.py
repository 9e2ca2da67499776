"""Training rows: one conversation prefix with its pictures, and several question-answer segments that share it.

The prefix (bos, system text, the pictures up to the last one's last token) is run once. Each segment sees the prefix
and itself, so a row teaches about six answers for the price of one picture. A segment may see bos alone: talk without
a picture rides along.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from model.demo import chat, pairs, questions
from model.demo.architecture import CANDIDATES
from model.demo.facts import describe
from model.demo.fonts import Fonts
from model.demo.labels import TileLabels, cut
from model.demo.questions import Dialogue, Turn
from model.demo.scene import Request, Scene, Tiles
from model.demo.scenes import random_scene
from model.image import NEWLINE, TILE_FEATURES, image_layout, tile_grid
from model.tokenizer import ASSISTANT, USER, Tokenizer

WEIGHT, PRINTED_WEIGHT = 10, 15  # of an answer's tokens, in tenths


@dataclass(frozen=True)
class Kind:
    """One sort of row: how many pictures, cut into how many tiles (most), and how many tokens fit."""

    name: str
    pictures: int
    tiles: int
    prefix: int
    segments: int

    @property
    def tiled(self) -> bool:
        return self.pictures <= 2


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("single", pictures=1, tiles=1, prefix=464, segments=272),
        Kind("double", pictures=1, tiles=3, prefix=672, segments=304),
        Kind("quad", pictures=1, tiles=5, prefix=1088, segments=384),
        Kind("pair", pictures=2, tiles=2, prefix=912, segments=304),
        Kind("triple", pictures=3, tiles=3, prefix=1312, segments=224),
        Kind("wide pair", pictures=2, tiles=10, prefix=2176, segments=304),
    )
}


@dataclass
class Answer:
    """Where an answer stands in a row's segments: its tokens and eos are ``[start, end)``."""

    turn: Turn
    start: int
    end: int


@dataclass
class Row:
    """One row, as arrays.

    Attributes:
        tiles: uint8 [384, 384, 3] each; of a picture with one local tile only one, which serves as both views.
        patches: helper labels of each tile (see `TileLabels`).
        prefix_ids: token ids, the pad id where a picture's tokens stand.
        gather: of each prefix position the feature it takes (``tile * 196 + feature``), -1 for text,
            -2 for a newline, -3 for a separator.
        ids, targets, weights, segment, visible, positions: of each segment token its id, the id it must predict
            (-1: none), how much that counts in tenths, its segment, how many prefix positions it sees, its position.
        answers: where the answers are, for evaluation.
    """

    tiles: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    patches: list[TileLabels] = field(default_factory=list)
    prefix_ids: list[int] = field(default_factory=list)
    gather: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    segment: list[int] = field(default_factory=list)
    visible: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    scenes: list[Scene] = field(default_factory=list)


class Wording:
    """The prompt's fixed pieces as ids, and the tokenizer's `encode` with its words remembered.

    Tokenising would otherwise take a third of a row's time.
    """

    _PIECES = re.compile(
        r"""(?P<marker><\|/?(?:ref|det|grounding)\|>)|(?P<quote>"[^"\n]{1,39}")|\n|[ ]?[A-Za-z]+"""
        r"""|[ ]?(?:(?!<\|/?(?:ref|det|grounding)\|>|"[^"\n]{1,39}")[!-/:-@\[-`{-~])+|[0-9]|[ ]"""
    )

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.user = tuple(tokenizer.encode_control(USER))
        self.colon = tuple(tokenizer.encode(": "))
        self.assistant = tuple(tokenizer.encode_control(f"{ASSISTANT}:"))
        self._quote = tokenizer.encode('"')[-1]
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The ids that `Tokenizer.encode` gives; for the demo's own texts."""
        if not text.isascii() or "  " in text or text.endswith(" ") or text.count('"') % 2:
            return self.tokenizer.encode(text)
        ids: list[int] = []
        for piece in self._PIECES.finditer(text):
            word = piece.group()
            for part in word if piece.lastgroup == "quote" else (word,):
                if part not in self._known:
                    self._known[part] = self.tokenizer.encode(part)
                ids += self._known[part]
        return ids

    def weights(self, ids: Sequence[int]) -> list[int]:
        """How much each token of an answer counts in training, in tenths.

        What is printed is the hardest to learn, and one wrong character spoils an answer.
        """
        found = []
        printed = False
        for token in ids:
            found.append(PRINTED_WEIGHT if printed else WEIGHT)
            printed ^= token == self._quote
        return found


def random_row(
    rng: random.Random, fonts: Fonts, wording: Wording, kind: Kind, *, simple: bool = False, held_out: bool = False
) -> Row:
    """A row of a kind, filled with as many segments as fit."""
    row = Row()
    scenes = _scenes(rng, fonts, kind, simple=simple, held_out=held_out)
    row.scenes = scenes
    source = questions.dialogues(rng, scenes[0]) if kind.pictures == 1 else pairs.dialogues(rng, scenes)
    form = rng.random()
    if simple or form > 0.16 or held_out:
        _begin(row, wording, system="")
    elif form > 0.1:
        _begin(row, wording, system=rng.choice(chat.SYSTEMS))
    elif form > 0.03 and kind.name != "wide pair":
        return _question_first(row, wording, kind, scenes, source, talk=lambda: chat.text_only(rng))
    elif kind.pictures == 2:
        return _later_picture(rng, row, wording, kind, scenes, source)
    else:
        _begin(row, wording, system="")
    for index, scene in enumerate(scenes):
        if index:
            _prefix_text(row, wording, "\n")
        _picture(row, scene, kind)
    _fill(rng, row, wording, kind, source, bare=describe(scenes[0]) if kind.pictures == 1 else None)
    return row


def _scenes(rng: random.Random, fonts: Fonts, kind: Kind, *, simple: bool, held_out: bool) -> list[Scene]:
    if kind.pictures == 1:
        tiles: Tiles = "double" if kind.name == "double" else "quad" if kind.name == "quad" else "single"
        small = kind.tiles > 1 and rng.random() < 0.55
        return [random_scene(rng, fonts, Request(tiles, simple=simple, held_out=held_out, small_print=small))]
    if kind.name == "wide pair":
        sizes: list[Tiles] = rng.choice([["quad", "quad"], ["quad", "single"], ["single", "quad"], ["double", "quad"]])
    elif kind.pictures == 3:
        sizes = [rng.choice(("single", "single", "double", "quad")) for _ in range(3)]
    else:
        sizes = ["single"] * 2
    return pairs.random_scenes(rng, fonts, kind.pictures, sizes)


# -- prefix -----------------------------------------------------------------------------------------------------------


def _begin(row: Row, wording: Wording, system: str) -> None:
    """Bos, system text, the user's mark."""
    row.prefix_ids.append(wording.tokenizer.bos_token_id)
    row.gather.append(-1)
    _prefix_text(row, wording, system)
    _prefix_tokens(row, [*wording.user, *wording.colon])


def _prefix_text(row: Row, wording: Wording, text: str) -> None:
    _prefix_tokens(row, wording.encode(text) if text else [])


def _prefix_tokens(row: Row, ids: Sequence[int]) -> None:
    row.prefix_ids += ids
    row.gather += [-1] * len(ids)


def _picture(row: Row, scene: Scene, kind: Kind) -> None:
    """A picture's tiles, labels, and places in the prefix."""
    columns, rows = tile_grid(scene.size, CANDIDATES, tiled=kind.tiled)
    first = len(row.tiles)
    grids = [(1, 1)] if columns == rows == 1 else [(1, 1), (columns, rows)]
    for grid in grids:
        tiles, labels = cut(scene, *grid)
        row.tiles += tiles
        row.patches += labels
    layout = image_layout(columns, rows).astype(np.int64)
    if len(grids) == 1:  # both views are the same tile
        layout = np.where(layout >= 0, layout % TILE_FEATURES, layout)
    places = np.where(layout >= 0, layout + first * TILE_FEATURES, np.where(layout == NEWLINE, -2, -3))
    row.gather += places.tolist()
    row.prefix_ids += [-1] * len(layout)


# -- segments ---------------------------------------------------------------------------------------------------------


def _segment(row: Row, wording: Wording, dialogue: Dialogue, opening: list[int], visible: int, room: int) -> bool:
    """Adds a conversation whose first question is ``opening`` (ids up to the assistant's mark); False if too long."""
    encode = wording.encode
    ids: list[int] = []
    spans: list[Answer] = []
    for index, turn in enumerate(dialogue):
        if index == 0:
            ids += opening
        else:
            ids += [*wording.user, *encode(f": {turn.question}\n\n"), *wording.assistant]
        start = len(ids)
        ids += [*encode(turn.answer), wording.tokenizer.eos_token_id]
        spans.append(Answer(turn, start, len(ids)))
    if len(ids) > room:
        return False
    targets, weights = [-1] * len(ids), [0] * len(ids)
    for span in spans:
        answer = ids[span.start : span.end]
        targets[span.start - 1 : span.end - 1] = answer
        weights[span.start - 1 : span.end - 1] = wording.weights(answer)
    base, number = len(row.ids), (row.segment[-1] + 1 if row.segment else 0)
    row.ids += ids
    row.targets += targets
    row.weights += weights
    row.segment += [number] * len(ids)
    row.visible += [visible] * len(ids)
    row.positions += range(visible, visible + len(ids))
    row.answers += [Answer(span.turn, base + span.start, base + span.end) for span in spans]
    return True


def _fill(
    rng: random.Random, row: Row, wording: Wording, kind: Kind, source: Iterator[Dialogue], bare: str | None
) -> None:
    """Fills a row with segments after its pictures; ``bare`` answers a picture that comes without any question."""
    length = len(row.prefix_ids)
    if length > kind.prefix:
        raise ValueError(f"a prefix of {length} tokens does not fit {kind}")
    misses = 0
    while misses < 4:
        room = kind.segments - len(row.ids)
        chance = rng.random()
        if chance < 0.02:
            dialogue, visible = chat.text_only(rng), 1
            lead = [*wording.user, *wording.encode(f": {dialogue[0].question}\n\n")]
        elif chance < 0.03 and bare is not None:
            dialogue, visible = (Turn("", bare, "caption"),), length
            lead = wording.encode("\n\n")
        else:
            dialogue = (chat.personal(rng),) if chance < 0.04 else next(source)
            visible = length
            lead = wording.encode(f"\n{dialogue[0].question}\n\n")
        fits = _segment(row, wording, dialogue, [*lead, *wording.assistant], visible, room)
        misses += not fits


def _question_first(
    row: Row,
    wording: Wording,
    kind: Kind,
    scenes: list[Scene],
    source: Iterator[Dialogue],
    talk: Callable[[], Dialogue],
) -> Row:
    """The question before the pictures, as many clients send it; talk without a picture fills the rest."""
    after = Row()
    for index, scene in enumerate(scenes):
        if index:
            _prefix_text(after, wording, "\n")
        _picture(after, scene, kind)
    _begin(row, wording, system="")
    room = kind.prefix - len(row.prefix_ids) - len(after.prefix_ids)
    dialogue = next(source)
    while len(wording.encode(dialogue[0].question)) > room:
        dialogue = next(source)
    _prefix_text(row, wording, dialogue[0].question)
    row.prefix_ids += after.prefix_ids
    row.gather += after.gather
    row.tiles, row.patches = after.tiles, after.patches
    lead = [*wording.encode("\n\n"), *wording.assistant]
    if not _segment(row, wording, dialogue, lead, len(row.prefix_ids), kind.segments):
        _segment(row, wording, dialogue[:1], lead, len(row.prefix_ids), kind.segments)
    for _ in range(2):
        chatter = talk()
        lead = [*wording.user, *wording.encode(f": {chatter[0].question}\n\n"), *wording.assistant]
        _segment(row, wording, chatter, lead, 1, kind.segments - len(row.ids))
    return row


def _later_picture(
    rng: random.Random, row: Row, wording: Wording, kind: Kind, scenes: list[Scene], source: Iterator[Dialogue]
) -> Row:
    """The second picture in a later turn, after a question about the first."""
    _begin(row, wording, system="")
    _picture(row, scenes[0], kind)
    caption = questions.ask(rng, scenes[0], "caption")
    assert caption is not None
    tokenizer = wording.tokenizer
    turn = [*wording.encode(f"\n{caption.question}\n\n"), *wording.assistant, *wording.encode(caption.answer)]
    turn += [tokenizer.eos_token_id, *wording.user, *wording.colon]
    longest = len(image_layout(*tile_grid(scenes[1].size, CANDIDATES, tiled=True)))
    if len(row.prefix_ids) + len(turn) + longest > kind.prefix:
        turn = [*wording.encode("\n\n"), *wording.assistant, *wording.encode("Hello!")]
        turn += [tokenizer.eos_token_id, *wording.user, *wording.colon]
    _prefix_tokens(row, turn)
    _picture(row, scenes[1], kind)
    _fill(rng, row, wording, kind, source, bare=None)
    return row
