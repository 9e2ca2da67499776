"""The recorded conversations as engine requests, and running them."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from PIL import Image

from model.config import load_config
from model.image import image_layout, tile_image
from server.engine.core import Engine
from server.engine.request import EngineConfig, EngineRequest, ImageInput, SamplingParams, TokenEvent
from tests.goldens_data import GOLDENS, cases, checkpoint


def engine_config(variant: str, **settings: Any) -> EngineConfig:
    return EngineConfig(model_path=str(checkpoint(variant)), **{"kv_cache_tokens": 8192, **settings})


def case_request(
    variant: str, name: str, *, request_id: str | None = None, cache_salt: str = "", **sampling: Any
) -> EngineRequest:
    """One of the recorded prompts; greedy and past eos, as it was recorded, unless `sampling` says otherwise."""
    case = cases(variant)[0][name]
    params = {"max_tokens": len(case["greedy_tokens"]), "temperature": 0.0, "ignore_eos": True, **sampling}
    return EngineRequest(
        request_id=request_id or name,
        token_ids=case["input_ids"],
        images=list(_images(variant, name)),
        sampling=SamplingParams(**params),
        cache_salt=cache_salt,
    )


@lru_cache
def _images(variant: str, name: str) -> tuple[ImageInput, ...]:
    case = cases(variant)[0][name]
    files = [file for turn in case["conversation"] for file in turn.get("images", [])]
    candidates = load_config(checkpoint(variant)).candidate_resolutions
    runs = [list(run) for run in case["images_seq_mask_runs"]]  # images side by side share a run
    images = []
    for file in files:
        picture = Image.open(GOLDENS / "images" / file).convert("RGB")
        tiled = tile_image(picture, candidates, tiled=len(files) <= 2)
        start, end = runs[0]
        images.append(
            ImageInput(
                start=start,
                columns=tiled.columns,
                rows=tiled.rows,
                tiles=tiled.tiles.tobytes(),
                digest=tiled.digest,
            )
        )
        runs[0][0] += len(image_layout(tiled.columns, tiled.rows))
        if runs[0][0] == end:
            runs.pop(0)
    return tuple(images)


def greedy_tokens(variant: str, name: str) -> list[int]:
    tokens: list[int] = cases(variant)[0][name]["greedy_tokens"]
    return tokens


def run_all(
    engine: Engine, requests: Iterable[EngineRequest], before_step: Callable[[int], None] = lambda step: None
) -> dict[str, list[TokenEvent]]:
    """Submit all at once and step until the engine is idle; each request's events."""
    events: dict[str, list[TokenEvent]] = {}
    for request in requests:
        engine.add_request(request)
        events[request.request_id] = []
    step = 0
    while engine.has_work:
        before_step(step)
        for event in engine.step():
            events[event.request_id].append(event)
        step += 1
    assert engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_pages
    return events


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]
