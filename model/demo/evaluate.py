"""Measures a demo checkpoint on pictures that training never saw.

    python -m model.demo.evaluate --model FOLDER --pictures 600 --fonts FOLDER

Answers are what greedy decoding gives. They are found by fixed-point iteration: the right answer is put in as a draft,
every token is predicted from those before it, and the predictions are the next draft; when nothing changes any more,
the draft is the greedy answer. Most answers are right, so a pass or two do for a whole batch at once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from model.checkpoint import load_model
from model.demo import dense
from model.demo.dataset import Arrays, empty_arrays, pack
from model.demo.fonts import find_fonts
from model.demo.rows import KINDS, Answer, Row, Wording, random_row
from model.demo.scene import Scene, view_scale
from model.tokenizer import Tokenizer
from model.vl2 import DeepseekVL2

SHARES = {"single": 0.4, "double": 0.1, "quad": 0.2, "pair": 0.15, "triple": 0.05, "wide pair": 0.04, "held out": 0.06}
SMALL_PRINT = 11.0  # height in pixels of the global view below which a single tile is not enough
_BOX = re.compile(r"\[(\d+), (\d+), (\d+), (\d+)\]")
_QUOTED = re.compile(r'"([^"]*)"')

Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Example:
    """One question of the evaluation: the kind of its row, its scenes' traits, and where its answer stands."""

    row_kind: str
    answer: Answer
    square: bool
    small_print: bool


@dataclass
class Task:
    """A row to evaluate, already packed."""

    kind: str
    arrays: Arrays
    examples: list[Example]


@dataclass
class Score:
    """Right answers out of all, and boxes' overlaps, of one line of the table."""

    right: int = 0
    total: int = 0
    overlaps: list[float] = field(default_factory=list)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)


def make_task(order: tuple[str, int, int, Path, Path | None]) -> Task:
    """Draws one row: its kind, seed and number, tokenizer folder and fonts folder."""
    name, seed, number, tokenizer_folder, fonts_folder = order
    held_out = name == "held out"
    kind = KINDS["single" if held_out else name]
    wording = _wording(tokenizer_folder)
    fonts = find_fonts(fonts_folder)
    row = random_row(random.Random(f"evaluate {seed} {name} {number}"), fonts, wording, kind, held_out=held_out)
    arrays = empty_arrays(kind, 1)
    pack(row, arrays, 0, kind, wording.tokenizer.pad_token_id)
    return Task(kind.name, arrays, _examples(name, row))


_wordings: dict[Path, Wording] = {}


def _wording(folder: Path) -> Wording:
    if folder not in _wordings:
        _wordings[folder] = Wording(Tokenizer.from_folder(folder))
    return _wordings[folder]


def _examples(name: str, row: Row) -> list[Example]:
    square = all(scene.size[0] == scene.size[1] for scene in row.scenes)
    small = any(is_small_print(scene) for scene in row.scenes)
    return [Example(name, answer, square, small) for answer in row.answers]


def is_small_print(scene: Scene) -> bool:
    """Whether some text is too small for the global view alone."""
    scale = view_scale(scene.size)
    return any((found.box[3] - found.box[1]) * scale < SMALL_PRINT for found in scene.prints)


@torch.inference_mode()
def greedy(
    model: DeepseekVL2,
    batch: dict[str, Tensor],
    spans: Sequence[Sequence[Answer]],
    pad_id: int,
    eos_id: int,
    most: int = 48,
) -> list[list[list[int]]]:
    """The greedy answers, token ids up to eos at most the right answer's length, of each row's answer spans."""
    functions = dense.eager()
    dtype = model.image_newline.dtype
    pixels = dense.normalise(batch["tiles"].flatten(0, 1), dtype)
    tokens = dense.project(model, dense.tower(model, pixels, functions))
    batch = dict(batch) | {"ids": batch["ids"].clone()}
    inside = torch.zeros(batch["ids"].shape, dtype=torch.bool)
    for row, answers in enumerate(spans):
        for answer in answers:
            inside[row, answer.start : answer.end] = True
    inside = inside.to(tokens.device)
    before: list[list[list[int]]] | None = None
    for _ in range(most):
        hidden = dense.decode(model, batch, tokens, functions, pad_id=pad_id).hidden
        predicted = dense.logits(model, hidden).argmax(-1).to(batch["ids"].dtype).roll(1, dims=1)
        batch["ids"] = torch.where(inside, predicted, batch["ids"])
        ids = batch["ids"].tolist()
        found = [[_until(ids[row][a.start : a.end], eos_id) for a in answers] for row, answers in enumerate(spans)]
        if found == before:
            return found
        before = found
    return found


def _until(ids: list[int], eos_id: int) -> list[int]:
    return ids[: ids.index(eos_id) + 1] if eos_id in ids else ids


def overlap(first: Box, second: Box) -> float:
    """Intersection over union."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    common = max(0, width) * max(0, height)
    area = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)) - common
    return common / area if area else 0.0


def boxes_of(text: str) -> list[Box]:
    return [tuple(int(part) for part in match.groups()) for match in _BOX.finditer(text)]  # type: ignore[misc]


def mean_overlap(expected: str, got: str) -> float:
    """Mean over the expected boxes of the overlap with the box given in the same place; 0 for one that is missing."""
    wanted, given = boxes_of(expected), boxes_of(got)
    pairs = zip(wanted, given, strict=False)
    return sum(overlap(a, b) for a, b in pairs) / len(wanted)


def lines_of(example: Example) -> Iterator[str]:
    """The lines of the table that a question counts for."""
    kind = example.answer.turn.kind
    tiled = example.row_kind in ("double", "quad")
    if example.row_kind == "held out":
        yield f"unseen colour-shape pairs: {kind}"
        return
    if example.row_kind in ("pair", "triple", "wide pair"):
        yield f"{'three' if example.row_kind == 'triple' else 'two'} pictures: all questions"
        yield f"{example.row_kind}: {kind}"
        return
    yield f"{kind}{' (tiled picture)' if tiled else ''}"
    if kind == "read" and tiled and example.small_print and '"' in example.answer.turn.answer:
        yield "small print read (needs tiles)"
    if kind in ("read", "caption") and '"' in example.answer.turn.answer and not tiled:
        yield "printed text in any answer (one tile)"
    if kind == "box":
        yield f"box, {'square' if example.square else 'padded'} picture{' (tiled)' if tiled else ''}"


def evaluate(
    model: DeepseekVL2, tokenizer: Tokenizer, tasks: Iterator[Task], device: torch.device, tiles: int
) -> dict[str, Score]:
    """Scores by line of the table; answers count as right when they are so to the letter."""
    scores: dict[str, Score] = {}
    waiting: dict[str, list[Task]] = defaultdict(list)

    def run(kind: str) -> None:
        group = waiting.pop(kind)
        arrays = {name: np.concatenate([task.arrays[name] for task in group]) for name in group[0].arrays}
        batch = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        spans = [[example.answer for example in task.examples] for task in group]
        answers = greedy(model, batch, spans, tokenizer.pad_token_id, tokenizer.eos_token_id)
        for task, given in zip(group, answers, strict=True):
            for example, ids in zip(task.examples, given, strict=True):
                text = tokenizer.decode([i for i in ids if i != tokenizer.eos_token_id], skip_special_tokens=False)
                ended = ids[-1] == tokenizer.eos_token_id
                count_answer(scores, example, text if ended else text + " …")

    for task in tasks:
        waiting[task.kind].append(task)
        if len(waiting[task.kind]) * KINDS[task.kind].tiles >= tiles:
            run(task.kind)
    for kind in list(waiting):
        run(kind)
    return scores


def count_answer(scores: dict[str, Score], example: Example, got: str) -> None:
    """Enters one answer into all lines that it counts for. Of print alone the quoted texts must be right."""
    turn = example.answer.turn
    for line in lines_of(example):
        score = scores.setdefault(line, Score())
        right = turn.answer == got
        if line.startswith(("small print", "printed text")):
            right = _QUOTED.findall(turn.answer) == _QUOTED.findall(got)
        score.total += 1
        score.right += right
        if turn.kind == "box":
            score.overlaps.append(mean_overlap(turn.answer, got))
        if not right and len(score.wrong) < 6:
            score.wrong.append((turn.question, turn.answer, got))


def table(scores: dict[str, Score]) -> str:
    """Markdown."""
    rows = ["| question | right to the letter | of | mean IoU |", "| --- | --- | --- | --- |"]
    for line in sorted(scores):
        score = scores[line]
        iou = f"{sum(score.overlaps) / len(score.overlaps):.3f}" if score.overlaps else ""
        rows.append(f"| {line} | {100 * score.right / score.total:.1f} % | {score.total} | {iou} |")
    return "\n".join(rows)


# What the model shall reach: a name, the lines of the table it sums up (by their beginning), the least share or IoU.
TARGETS: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("captions", ("caption",), 0.97),
    ("printed words", ("printed text in any answer",), 0.96),
    ("mean IoU of boxes", ("box, ",), 0.97),
    ("counting", ("count",), 0.99),
    ("colours", ("colour",), 0.99),
    ("yes/no", ("yes/no",), 0.99),
    ("small print", ("small print",), 0.90),
    ("two pictures", ("two pictures",), 0.90),
)


def targets(scores: dict[str, Score]) -> str:
    """Markdown: what the model shall reach, and whether it does."""
    rows = ["| | at least | measured | reached |", "| --- | --- | --- | --- |"]
    for name, beginnings, least in TARGETS:
        found = [
            score for line, score in scores.items() if line.startswith(beginnings) and not line.startswith("count in")
        ]
        overlaps = [value for score in found for value in score.overlaps]
        total = sum(score.total for score in found)
        if "IoU" in name:
            value = sum(overlaps) / len(overlaps) if overlaps else None
            wanted, shown = f"{least}", f"{value:.3f}" if value is not None else ""
        else:
            value = sum(score.right for score in found) / total if total else None
            wanted, shown = f"{100 * least:.0f} %", f"{100 * value:.1f} %" if value is not None else ""
        reached = "yes" if value is not None and value >= least else "no"
        rows.append(f"| {name} | {wanted} | {shown or 'not measured'} | {reached} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a demo checkpoint.")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--fonts", type=Path, default=None, help="folder with the fonts (default: the system's)")
    parser.add_argument("--pictures", type=int, default=600, help="rows to draw, over all kinds")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=4, help="processes that draw")
    parser.add_argument("--tiles", type=int, default=120, help="tiles a batch")
    parser.add_argument("--json", type=Path, default=None, help="file for the figures and the first wrong answers")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = torch.float32 if arguments.dtype == "float32" else torch.bfloat16
    model = load_model(arguments.model, device=device, dtype=dtype)
    tokenizer = Tokenizer.from_folder(arguments.model)
    orders = [
        (name, arguments.seed, number, arguments.model, arguments.fonts)
        for name, share in SHARES.items()
        for number in range(max(1, round(share * arguments.pictures)))
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        scores = evaluate(model, tokenizer, pool.imap(make_task, orders, chunksize=2), device, arguments.tiles)
    print(f"{targets(scores)}\n\n{table(scores)}", flush=True)
    if arguments.json is not None:
        figures = {
            line: {
                "right": score.right,
                "total": score.total,
                "iou": sum(score.overlaps) / len(score.overlaps) if score.overlaps else None,
                "wrong": score.wrong,
            }
            for line, score in sorted(scores.items())
        }
        arguments.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
