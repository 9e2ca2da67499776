"""Owner of every tensor on the device: weights, cache pages, image features, the sampler's histories.

A step plan goes in, sampled tokens come out, still on the device; `Sampled.collect` is where the host waits.
CPU and CUDA run the same code. A step changes nothing that running it again would not change in the same
way (cache rows and features are overwritten in place), which is what lets the engine repeat a failed one.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model import batch as model_batch
from model.batch import PAGE_SIZE, Batch, build_batch
from model.checkpoint import load_model, resolve_model
from server.engine.graphs import DecodeGraphs
from server.engine.request import TILE_SHAPE, EngineConfig, EngineInfo, Request, RequestImage, SamplingParams
from server.engine.sampler import Sampled, Sampler
from server.engine.scheduler import Chunk, EncodeTiles, StepPlan

logger = logging.getLogger(__name__)

DEFAULT_CPU_CACHE_TOKENS = 16384


@dataclass(frozen=True)
class StepOutput:
    sampled: Sampled
    logits: Tensor  # float32 [R, V], a row for each of plan.sampled


@dataclass
class ImageFeatures:
    """One image of one request, from its first encoded tile to the step after its last slot was computed."""

    tiles: Tensor  # [num_tiles, 196, hidden], filled as tiles are encoded
    slots: Tensor | None = None  # [slots, hidden] in the prompt's order, once all tiles are there


class Runner:
    def __init__(self, config: EngineConfig) -> None:
        """Load the model and take the memory for the cache. Raises what loading raises, ValueError on sizes."""
        started = time.monotonic()
        self.config = config
        self.device = torch.device(config.device)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.model = load_model(
            resolve_model(config.model_path, weights=config.load_format == "auto"),
            device=self.device,
            dtype=self.dtype,
            load_format=config.load_format,
            seed=config.seed,
            progress=False,
        )
        language = self.model.config.language
        self.row_shape = (PAGE_SIZE, language.kv_row_size)
        self.num_layers = language.num_hidden_layers
        self.sampler = Sampler(config.max_num_seqs, language.vocab_size, language.eos_token_id, self.device)
        self._features: dict[str, dict[int, ImageFeatures]] = {}
        self.kv_cache: list[Tensor] = []
        self.graphs: DecodeGraphs | None = None

        positions = language.max_position_embeddings
        max_model_len = config.max_model_len or positions
        if max_model_len > positions:
            raise ValueError(f"max_model_len {max_model_len} is more than the checkpoint's {positions} positions")
        self.num_pages = self._choose_num_pages(max_model_len)
        if self.num_pages * PAGE_SIZE < max_model_len:
            logger.warning("context cut from %d to the KV cache's %d tokens", max_model_len, self.num_pages * PAGE_SIZE)
        self._take_pages(self.num_pages)
        self.graphs = self._capture_graphs(max_model_len)
        self.info = EngineInfo(
            max_model_len=min(max_model_len, self.num_pages * PAGE_SIZE),
            max_num_seqs=config.max_num_seqs,
            kv_cache_tokens=self.num_pages * PAGE_SIZE,
            vocab_size=language.vocab_size,
            eos_token_id=language.eos_token_id,
            device=config.device if config.device == "cpu" else torch.cuda.get_device_name(self.device),
            dtype=config.dtype,
            num_parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            load_seconds=time.monotonic() - started,
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step; the tokens are chosen when the device gets there."""
        for request in plan.preempted:
            self.forget(request.request_id)
        self._drop_used_features(plan.chunks)
        if plan.encodes:
            self._encode(plan.encodes)
        return self._forward(plan)

    def forget(self, request_id: str) -> None:
        """Drop what the device holds of a request besides its pages."""
        self._features.pop(request_id, None)
        self.sampler.forget(request_id)

    def _encode(self, encodes: list[EncodeTiles]) -> None:
        """Encode all tiles of the step in one batch; images that are whole now are laid out as the prompt's slots."""
        tiles = torch.from_numpy(np.concatenate([_tiles_of(encode) for encode in encodes]))
        features = self.model.encode_tiles(tiles.to(self.device))
        for encode, part in zip(encodes, features.split([e.last - e.first for e in encodes]), strict=True):
            image = encode.image
            record = self._record(encode.request, image, part)
            record.tiles[encode.first : encode.last] = part
            if encode.last == image.num_tiles:
                record.slots = self.model.assemble_image(record.tiles, image.columns, image.rows)

    def _record(self, request: Request, image: RequestImage, like: Tensor) -> ImageFeatures:
        images = self._features.setdefault(request.request_id, {})
        if image.start not in images:
            images[image.start] = ImageFeatures(like.new_empty(image.num_tiles, *like.shape[1:]))
        return images[image.start]

    def _forward(self, plan: StepPlan) -> StepOutput:
        sampling = self.sampler.prepare(plan.sampled)
        if self.graphs is not None and plan.decodes and not plan.prefills:
            logits = self.graphs.run([_model_chunk(chunk) for chunk in plan.decodes])
        elif plan.chunks:
            logits = self.model(self._batch(plan), self.kv_cache)
        else:
            logits = torch.empty(0, self.sampler.vocab_size, device=self.device)
        return StepOutput(self.sampler.sample(logits, sampling), logits)

    def _batch(self, plan: StepPlan) -> Batch:
        image_rows: list[int] = []
        embeds: list[Tensor] = []
        logits_rows: list[int] = []
        row = 0
        for chunk in plan.chunks:
            for image in chunk.request.images:
                first, last = max(image.start, chunk.start), min(image.end, chunk.end)
                if first < last:
                    image_rows.extend(range(row + first - chunk.start, row + last - chunk.start))
                    embeds.append(self._slots(chunk.request, image)[first - image.start : last - image.start])
            row += chunk.end - chunk.start
            if chunk.samples:
                logits_rows.append(row - 1)
        return build_batch(
            [_model_chunk(chunk) for chunk in plan.decodes],
            [_model_chunk(chunk) for chunk in plan.prefills],
            logits_rows=logits_rows,
            device=self.device,
            image_rows=image_rows,
            image_embeds=torch.cat(embeds) if embeds else None,
        )

    def _slots(self, request: Request, image: RequestImage) -> Tensor:
        slots = self._features[request.request_id][image.start].slots
        if slots is None:
            raise RuntimeError("an image's slots were planned before its last tile")
        return slots

    def _drop_used_features(self, chunks: list[Chunk]) -> None:
        """Drop images that earlier steps are through with (not this one: it may have to be repeated)."""
        for chunk in chunks:
            images = self._features.get(chunk.request.request_id)
            if images:
                for image in chunk.request.images:
                    if image.end <= chunk.start:
                        images.pop(image.start, None)

    def _choose_num_pages(self, max_model_len: int) -> int:
        """Pages of the pool: as configured; or what CUDA memory leaves; or on the CPU, whose memory is shared with
        everyone, enough for a few requests."""
        most = self.config.max_num_seqs * _pages_for(max_model_len)
        configured = self.config.kv_cache_tokens
        if self.device.type == "cpu":
            default = min(_pages_for(max(DEFAULT_CPU_CACHE_TOKENS, max_model_len)), most)
            return default if configured is None else _pages_for(configured)
        step_bytes = self._measure_step(max_model_len)
        if configured is not None:
            return _pages_for(configured)
        free, total = torch.cuda.mem_get_info(self.device)
        budget = total * self.config.gpu_memory_utilization - (total - free) - step_bytes
        pages = min(int(budget // (self.num_layers * math.prod(self.row_shape) * self.dtype.itemsize)), most)
        if pages < 1:
            raise ValueError(
                f"no memory left for the KV cache: {free / 2**30:.1f} of {total / 2**30:.1f} GiB free after loading, "
                f"{step_bytes / 2**30:.1f} GiB for a step, gpu_memory_utilization {self.config.gpu_memory_utilization}"
            )
        return pages

    def _measure_step(self, max_model_len: int) -> int:
        """Bytes of CUDA memory that the largest step takes beside weights and cache."""
        self._take_pages(_pages_for(max_model_len))
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self._rehearse(max_model_len)
        torch.cuda.synchronize(self.device)
        step_bytes = torch.cuda.max_memory_allocated(self.device) - before
        self.kv_cache = []
        torch.cuda.empty_cache()
        return step_bytes

    def _capture_graphs(self, max_model_len: int) -> DecodeGraphs | None:
        if self.device.type == "cpu":
            return None
        return DecodeGraphs(
            self.model,
            self.kv_cache,
            max_num_seqs=self.config.max_num_seqs,
            max_pages=_pages_for(max_model_len),
            progress=True,
        )

    def _take_pages(self, count: int) -> None:
        # One more than the pool knows, for the padding rows of graphs.
        # Zeros, not whatever was there: a NaN in a row that attention masks out would still poison the sum.
        self.kv_cache = [
            torch.zeros(count + 1, *self.row_shape, dtype=self.dtype, device=self.device)
            for _ in range(self.num_layers)
        ]

    @torch.inference_mode()
    def _rehearse(self, max_model_len: int) -> None:
        """Run the largest step there can be, and a small one, on a cache whose content no one reads.

        It shows the peak of a step's memory, and compiles the kernels before the first request needs them.
        """
        tokens = min(self.config.prefill_chunk_tokens, max_model_len)
        sampling = SamplingParams(max_tokens=1, top_p=0.9, repetition_penalty=1.1)
        pages = list(range(_pages_for(max_model_len)))
        requests = [
            Request(f"rehearsal {i}", [0] * max_model_len, sampling, seed=i, pages=pages)
            for i in range(self.config.max_num_seqs)
        ]
        tail = [Chunk(request, max_model_len - 1, max_model_len, samples=True) for request in requests]
        prompt = Chunk(requests[0], max_model_len - tokens, max_model_len, samples=True)
        for plan in (StepPlan(decodes=tail[1:], prefills=[prompt]), StepPlan(decodes=tail[:1])):
            self._forward(plan)
        for count in (1, self.config.vision_tile_budget):
            self.model.encode_tiles(torch.zeros(count, *TILE_SHAPE, dtype=torch.uint8, device=self.device))
        for request in requests:
            self.forget(request.request_id)


def _pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def _tiles_of(encode: EncodeTiles) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """uint8 [last - first, 3, 384, 384]"""
    tiles = np.frombuffer(encode.image.tiles, dtype=np.uint8).reshape(encode.image.num_tiles, *TILE_SHAPE)
    return tiles[encode.first : encode.last]


def _model_chunk(chunk: Chunk) -> model_batch.Chunk:
    return model_batch.Chunk(chunk.request.token_ids[chunk.start : chunk.end], chunk.start, chunk.request.pages)
