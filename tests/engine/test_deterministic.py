"""To the bit the same: a request's log-probabilities alone, in company, in chunks, preempted, and from cached pages."""

from typing import Any

import pytest

from server.engine.core import Engine
from server.engine.request import TokenEvent
from tests.engine.support import case_request, engine_config, greedy_tokens, run_all, tokens_of
from tests.goldens_data import VARIANTS

NAMES = ("image_rgba", "text_short", "multi_turn")


def run(engine: Engine, variant: str, *names: str, **sampling: Any) -> dict[str, list[TokenEvent]]:
    return run_all(engine, [case_request(variant, name, max_tokens=8, logprobs=20, **sampling) for name in names])


def outcome(events: list[TokenEvent]) -> list[tuple[list[int], Any]]:
    return [(event.token_ids, event.logprobs) for event in events]


@pytest.mark.parametrize("variant", VARIANTS)
def test_company_and_chunks_change_no_bit(variant: str) -> None:
    alone = {}
    for name in NAMES:
        engine = Engine(engine_config(variant, prefix_caching=False))
        alone[name] = outcome(run(engine, variant, name)[name])
    for chunk in (2048, 67):
        together = run(Engine(engine_config(variant, prefill_chunk_tokens=chunk)), variant, *NAMES)
        assert {name: outcome(events) for name, events in together.items()} == alone


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_pages_change_no_bit(variant: str) -> None:
    engine = Engine(engine_config(variant))
    first, again = (run(engine, variant, "image_rgba")["image_rgba"] for _ in range(2))
    assert again[0].cached_tokens and outcome(again) == outcome(first)


@pytest.mark.parametrize("variant", VARIANTS)
def test_preemption_changes_no_bit(variant: str) -> None:
    """What a request has said is computed again as a prompt; four pages do not hold three such answers."""
    sampling: dict[str, Any] = dict(max_tokens=120, logprobs=20, temperature=0.9, repetition_penalty=1.2)
    requests = [case_request(variant, "text_short", request_id=str(i), seed=i, **sampling) for i in range(3)]
    small = Engine(engine_config(variant, kv_cache_tokens=4 * 64, max_model_len=4 * 64, prefix_caching=False))
    together = run_all(small, requests)
    assert small.stats().preemptions > 0
    large = Engine(engine_config(variant, prefix_caching=False))
    for request in requests:
        assert outcome(together[request.request_id]) == outcome(run_all(large, [request])[request.request_id])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [2048, 100])
def test_the_other_way_of_a_prompt_gives_the_same_text(variant: str, chunk: int) -> None:
    """What runs on a GPU unless told otherwise: prompts in chunks of many rows, keys and values expanded."""
    engine = Engine(engine_config(variant, prefill_chunk_tokens=chunk))
    engine.runner.batch_invariant = False
    events = run(engine, variant, *NAMES)
    assert {name: tokens_of(found) for name, found in events.items()} == {
        name: greedy_tokens(variant, name)[:8] for name in NAMES
    }
