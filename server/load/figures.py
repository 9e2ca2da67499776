"""Numbers of many answers: rates, and the distribution of each time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from server.load.answer import Answer


@dataclass(frozen=True)
class Spread:
    """Of some times, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        """None when there are none."""
        if not seconds:
            return None
        values = sorted(1000 * value for value in seconds)
        return cls(
            mean=math.fsum(values) / len(values),
            p50=percentile(values, 50),
            p90=percentile(values, 90),
            p99=percentile(values, 99),
            max=values[-1],
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order, between two of them by linear interpolation: 0 is the least, 100 the largest."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class Figures:
    """What a set of requests came to.

    Args:
        clients: how many asked at once.
        errors: how many requests failed, by kind.
        duration_s: from the first request's start to the last one's end.
        tokens_from: "usage" when the server counted the tokens of every answer, else "chunks": events with text are
            counted instead.
        first_token_ms, token_ms, gap_ms, total_ms: time to first token; time per output token after it, a value for
            each answer; times between events with text, all answers' together; a whole answer.
        prompt_tokens, cached_tokens: the mean over the answers, None when the server did not say.
    """

    clients: int
    requests: int
    answered: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    output_tokens: int
    output_tokens_per_s: float
    tokens_from: str
    first_token_ms: Spread | None
    token_ms: Spread | None
    gap_ms: Spread | None
    total_ms: Spread | None
    prompt_tokens: float | None
    cached_tokens: float | None


def figures(results: Sequence[Answer | str], *, clients: int, duration_s: float) -> Figures:
    """The figures of answers and kinds of failures; the times are those of answers alone."""
    answers = [result for result in results if isinstance(result, Answer)]
    tokens = sum(answer.tokens for answer in answers)
    return Figures(
        clients=clients,
        requests=len(results),
        answered=len(answers),
        errors=dict(Counter(result for result in results if isinstance(result, str)).most_common()),
        duration_s=duration_s,
        requests_per_s=len(answers) / duration_s,
        output_tokens=tokens,
        output_tokens_per_s=tokens / duration_s,
        tokens_from="usage" if all(answer.counted for answer in answers) else "chunks",
        first_token_ms=Spread.of([answer.first_token_s for answer in answers]),
        token_ms=Spread.of([answer.token_s for answer in answers if answer.token_s is not None]),
        gap_ms=Spread.of([gap for answer in answers for gap in answer.gaps_s]),
        total_ms=Spread.of([answer.total_s for answer in answers]),
        prompt_tokens=_mean([answer.prompt_tokens for answer in answers]),
        cached_tokens=_mean([answer.cached_tokens for answer in answers]),
    )


def _mean(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def table(rows: Sequence[tuple[str, Figures]]) -> str:
    """The figures as people read them, a named row each; the errors below."""
    titles = ["", "clients", "ok", "failed", "req/s", "out tok/s", "first token ms", "token ms", "gap ms", "whole ms"]
    cells = [
        [
            name,
            str(row.clients),
            str(row.answered),
            str(row.requests - row.answered),
            f"{row.requests_per_s:.2f}",
            f"{row.output_tokens_per_s:.0f}",
            _cell(row.first_token_ms, 0),
            _cell(row.token_ms, 1),
            _cell(row.gap_ms, 1),
            _cell(row.total_ms, 0),
        ]
        for name, row in rows
    ]
    widths = [max(len(row[column]) for row in [titles, *cells]) for column in range(len(titles))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [titles, *cells]]
    lines.append("times: p50 / p90 / p99")
    for name, row in rows:
        lines += [f"FAILED, {name}: {count} x {kind}" for kind, count in row.errors.items()]
        if row.answered and row.tokens_from == "chunks":
            lines.append(f"{name}: this server does not count tokens; events with text stand for them")
        if row.cached_tokens:
            lines.append(f"{name}: {row.cached_tokens:.0f} of {row.prompt_tokens or 0:.0f} prompt tokens cached")
    return "\n".join(lines)


def _cell(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return "-"
    return " / ".join(f"{value:.{digits}f}" for value in (spread.p50, spread.p90, spread.p99))
