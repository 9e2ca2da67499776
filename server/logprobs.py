"""Log probabilities as the API writes them."""

from __future__ import annotations

from collections.abc import Sequence

from model.tokenizer import Tokenizer
from server.answers import TokenLogprob, TopLogprob
from server.streaming import ScoredToken


def token_logprobs(scored: Sequence[ScoredToken], tokenizer: Tokenizer) -> list[TokenLogprob]:
    """Each token that made the text, with its true bytes and the likeliest in its place."""
    content = []
    for item in scored:
        best = [_entry(token, value, tokenizer) for token, value in item.logprobs.top]
        own = _entry(item.token_id, item.logprobs.logprob, tokenizer)
        content.append(TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=best))
    return content


def _entry(token: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    raw = tokenizer.token_bytes(token)
    return TopLogprob(token=raw.decode(errors="replace"), logprob=logprob, bytes=list(raw))
