"""Grammars in the engine, on checkpoints with random weights: whatever they would say, the mask carries it alone."""

import json
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from model.tokenizer import Tokenizer
from server.engine.core import Engine
from server.engine.request import EngineConfig, EngineRequest, Grammar, RequestRejected, SamplingParams, TokenEvent
from server.engine.runner import StepOutput
from server.engine.scheduler import StepPlan
from tests.engine.support import case_request, engine_config, greedy_tokens, run_all, tokens_of
from tests.goldens_data import VARIANTS, checkpoint

VARIANT = "mla-softmax"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "größe": {"type": "integer", "minimum": -5, "maximum": 300},
        "colour": {"enum": ["rot", "grün", "青", None, 7]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 8}, "open": {"type": "boolean"}},
            "required": ["street"],
            "additionalProperties": False,
        },
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    },
    "required": ["name", "größe", "colour", "tags", "home", "id"],
    "additionalProperties": False,
}
POINTS = {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 2, "maxItems": 2}
POINTS["$defs"] = {"point": {"type": "array", "prefixItems": [{"enum": [0.5, -2]}] * 2, "items": False, "minItems": 2}}
DATE = r"[12]\d{3}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"


def make_engine(variant: str = VARIANT, **settings: Any) -> Engine:
    return Engine(engine_config(variant, **settings))


def guided(name: str, form: Any, *, case: str = "text_short", **sampling: Any) -> EngineRequest:
    """A recorded prompt whose answer is held to a schema, or to a regex if it is a string."""
    grammar = Grammar("regex", form) if isinstance(form, str) else Grammar("json_schema", json.dumps(form))
    params = {"max_tokens": 400, "temperature": 1.0, "seed": 1, "ignore_eos": False, "grammar": grammar, **sampling}
    return case_request(VARIANT, case, request_id=name, **params)


def text_of(events: Iterable[TokenEvent], variant: str = VARIANT) -> str:
    """The answer as bytes would have it: nothing is left out, nothing replaced, but for eos."""
    tokenizer = Tokenizer.from_folder(checkpoint(variant))
    tokens = [token for token in tokens_of(list(events)) if token != tokenizer.eos_token_id]
    return b"".join(map(tokenizer.token_bytes, tokens)).decode()


def check(events: list[TokenEvent], form: Any, variant: str = VARIANT) -> None:
    assert events[-1].finish_reason == "stop", events[-1].error
    text = text_of(events, variant)
    if isinstance(form, str):
        assert re.fullmatch(form, text)
    else:
        jsonschema.validate(json.loads(text), form)


def requests_for(variant: str) -> list[EngineRequest]:
    """Schemas and regexes under different sampling, with a picture and without, and plain neighbours."""
    forms = {
        "greedy": guided("greedy", PERSON, temperature=0.0),
        "drawn": guided("drawn", PERSON, seed=3, case="image_rgba"),
        "hot": guided("hot", PERSON, seed=4, temperature=1.9, top_p=0.9, min_p=0.01),
        "penalised": guided("penalised", PERSON, seed=5, repetition_penalty=1.4, frequency_penalty=0.5),
        "narrow": guided("narrow", POINTS, top_k=1),
        "date": guided("date", DATE, seed=6),
    }
    changed = [
        EngineRequest(request_id=r.request_id, token_ids=p.token_ids, images=p.images, sampling=r.sampling)
        for r in forms.values()
        for p in [case_request(variant, "image_rgba" if r.images else "text_short")]
    ]
    return [*changed, case_request(variant, "multi_turn", max_tokens=12)]


FORMS = {"greedy": PERSON, "drawn": PERSON, "hot": PERSON, "penalised": PERSON, "narrow": POINTS, "date": DATE}


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """The tokens of each request without company."""
    engine = make_engine()
    return {r.request_id: tokens_of(run_all(engine, [r])[r.request_id]) for r in requests_for(VARIANT)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_satisfy_their_schema_in_company(variant: str, alone: dict[str, list[int]]) -> None:
    events = run_all(make_engine(variant, prefill_chunk_tokens=300), requests_for(variant))
    for name, form in FORMS.items():
        check(events[name], form, variant)
    assert tokens_of(events["multi_turn"]) == greedy_tokens(variant, "multi_turn")[:12]
    if variant == VARIANT:
        assert {name: tokens_of(found) for name, found in events.items()} == alone


def test_preemption_changes_nothing() -> None:
    requests = [guided(str(seed), PERSON, seed=seed) for seed in range(8)]
    large, small = make_engine(), make_engine(kv_cache_tokens=704, max_model_len=640)
    expected = run_all(large, requests)
    events = run_all(small, requests)
    assert small.stats().preemptions > 0
    assert {name: tokens_of(found) for name, found in events.items()} == {n: tokens_of(e) for n, e in expected.items()}
    for found in events.values():
        check(found, PERSON)
    assert len({text_of(found) for found in events.values()}) == len(events)


def test_a_repeated_step_does_not_advance_twice(alone: dict[str, list[int]]) -> None:
    engine = make_engine()
    execute = engine.runner.execute
    failures = 0

    def failing(plan: StepPlan) -> StepOutput:
        nonlocal failures
        output = execute(plan)
        if len(plan.requests) > 1 and engine.stats().steps % 3 == 0:
            failures += 1
            raise RuntimeError("broken on purpose")
        return output

    engine.runner.execute = failing  # type: ignore[method-assign]
    events = run_all(engine, requests_for(VARIANT))
    assert failures > 3
    assert {name: tokens_of(found) for name, found in events.items()} == alone


def test_an_answer_that_is_cut_says_so() -> None:
    (events,) = run_all(make_engine(), [guided("cut", PERSON, max_tokens=5)]).values()
    assert events[-1].finish_reason == "length" and len(tokens_of(events)) == 5
    assert text_of(events).startswith("{")
    # Complete with the last token that it may have: that is no cut.
    (events,) = run_all(make_engine(), [guided("whole", "a", max_tokens=1)]).values()
    assert events[-1].finish_reason == "stop" and text_of(events) == "a"


def test_the_grammar_wins_over_what_else_is_asked() -> None:
    tokenizer = Tokenizer.from_folder(checkpoint(VARIANT))
    a, b = (next(id for id in range(1280) if tokenizer.token_bytes(id) == letter) for letter in (b"a", b"b"))
    requests = [
        guided("min_tokens", "a", min_tokens=20),
        guided("ignore_eos", "a", ignore_eos=True),
        guided("goes on", "a{1,9}", ignore_eos=True, logit_bias={tokenizer.eos_token_id: 100.0, a: 100.0}),
        guided("long enough", "a+", min_tokens=6, logit_bias={tokenizer.eos_token_id: 100.0, a: 50.0}),
        guided("stop id", "a{9}", stop_token_ids=[a], logit_bias={a: 100.0}),
        guided("early stop id", "a{3}", stop_token_ids=[a], min_tokens=3, logit_bias={a: 100.0}),
        guided("bias", "[ab]{4}", logit_bias={tokenizer.image_token_id: 100.0, 7: 100.0, a: -100.0, b: 90.0}),
    ]
    events = run_all(make_engine(), requests)
    texts = {name: text_of(found) for name, found in events.items()}
    assert texts.pop("bias") == "bbbb"
    assert texts == {
        "min_tokens": "a",
        "ignore_eos": "a",
        "goes on": "aaaaaaaaa",
        "long enough": "aaaaaa",
        "stop id": "a",
        "early stop id": "a",
    }
    assert {found[-1].finish_reason for found in events.values()} == {"stop"}


def test_logprobs_are_the_models_own() -> None:
    plain = case_request(VARIANT, "text_short", request_id="plain", max_tokens=1, logprobs=3)
    engine = make_engine()
    events = run_all(engine, [plain, guided("guided", PERSON, temperature=0.0, logprobs=3)])
    (expected,), (first, *_) = events["plain"], events["guided"]
    assert expected.logprobs is not None and first.logprobs is not None
    assert first.logprobs[0].top == expected.logprobs[0].top
    assert first.logprobs[0].logprob <= first.logprobs[0].top[0][1]


def test_others_run_while_a_grammar_compiles_and_a_bad_one_fails_alone() -> None:
    engine = make_engine()
    assert engine.compiler is not None
    compiled = engine.compiler.compile(Grammar("regex", "a"))
    slow: Future[LLMatcher] = Future()
    engine.compiler.compile = lambda grammar: slow  # type: ignore[method-assign]
    engine.add_request(guided("slow", "a"))
    assert engine.step() == [] and engine.has_work
    engine.compiler = make_engine().compiler
    engine.add_request(guided("bad", "a(b"))
    answers: dict[str, list[TokenEvent]] = {"bad": [], "slow": []}
    events = run_all_but(engine, case_request(VARIANT, "text_short", max_tokens=6), answers)
    assert tokens_of(events) == greedy_tokens(VARIANT, "text_short")[:6]
    (failed,) = answers["bad"]
    assert failed.finish_reason == "error" and failed.unservable
    assert failed.error is not None and "unclosed group" in failed.error
    slow.set_result(compiled.result())
    (answer,) = engine.step()
    assert (answer.request_id, answer.finish_reason) == ("slow", "stop")
    assert not engine.has_work and engine.check_integrity()


def run_all_but(engine: Engine, request: EngineRequest, others: dict[str, list[TokenEvent]]) -> list[TokenEvent]:
    """Step until one request has ended; its events, and the others' into their lists."""
    engine.add_request(request)
    events: list[TokenEvent] = []
    while request.request_id in engine.scheduler.requests or not others["bad"]:
        for event in engine.step():
            (events if event.request_id == request.request_id else others[event.request_id]).append(event)
    return events


def test_a_grammar_that_grows_too_large_on_the_way_fails_alone() -> None:
    letters = r"(\p{L}{1,200}){1,200}"
    events = run_all(make_engine(), [guided("large", letters, max_tokens=300), guided("date", DATE)])
    check(events["date"], DATE)
    last = events["large"][-1]
    assert last.finish_reason == "error" and last.unservable
    assert last.error is not None and "too many expressions" in last.error


def test_a_checkpoint_without_tokenizer_serves_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(VARIANT), folder, ignore=shutil.ignore_patterns("tokenizer*", "*.safetensors"))
    engine = Engine(EngineConfig(model_path=str(folder), load_format="dummy", kv_cache_tokens=1024))
    with pytest.raises(RequestRejected, match=r"structured output needs tokenizer\.json"):
        engine.add_request(guided("a", "a"))
    plain = EngineRequest(request_id="plain", token_ids=[5], sampling=SamplingParams(max_tokens=2))
    assert len(tokens_of(run_all(engine, [plain])["plain"])) == 2
