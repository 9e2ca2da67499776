"""Owner of every tensor on the device: weights, cache pages, pictures' features, the sampler's histories.

A step plan goes in, sampled tokens come out, still on the device; `Sampled.collect` is where the host waits. Until
then nothing does, so that the next step may be launched first: what goes up is copied from pinned memory, and a decode
row whose token is pending takes it from `last_tokens`, where the step before left it.
CPU and CUDA run the same code. A step changes nothing that running it again would not change in the same
way (cache rows and features are overwritten in place), which is what lets the engine repeat a failed one.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.attention_backend import AttentionBackend
from kernels.lang import has_triton
from model import batch as model_batch
from model.batch import PAGE_SIZE, Batch, build_batch, upload
from model.checkpoint import load_model, resolve_model
from server.engine.graphs import DecodeGraphs
from server.engine.prompt_graphs import PromptGraphs, Size, prompt_sizes
from server.engine.request import (
    TILE_SHAPE,
    EngineConfig,
    EngineConfigError,
    EngineInfo,
    Picture,
    Request,
    SamplingParams,
)
from server.engine.sampler import Sampled, Sampler
from server.engine.scheduler import Chunk, EncodeTiles, StepPlan
from server.engine.vision_graphs import VisionGraphs

logger = logging.getLogger(__name__)

DEFAULT_CPU_CACHE_TOKENS = 16384
SHORT_PROMPT_ROWS = 128
"""Rows of the largest decode graph at least: what a page-wise hit leaves of a question on a known picture, and more."""


@dataclass(frozen=True)
class StepOutput:
    sampled: Sampled
    logits: Tensor  # float32 [R, V], a row for each of plan.sampled


@dataclass
class PictureFeatures:
    """One picture, from its first encoded tile until the vision cache drops it."""

    tiles: Tensor | None  # [num_tiles, 196, hidden], filled as tiles are encoded; None once all are there
    slots: Tensor | None = None  # [slots, hidden] in the prompt's order, from then on


class Runner:
    def __init__(self, config: EngineConfig) -> None:
        """Load the model and take the memory for the cache. Raises what loading raises, ValueError on sizes."""
        started = time.monotonic()
        self.config = config
        self.device = torch.device(config.device)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.folder = resolve_model(config.model_path, weights=config.load_format == "auto")
        self.model = load_model(
            self.folder,
            device=self.device,
            dtype=self.dtype,
            load_format=config.load_format,
            seed=config.seed,
            progress=True,
            attention=config.attention_backend,
        )
        language = self.model.config.language
        decode = "triton" if has_triton() and self.device.type == "cuda" else "torch"
        logger.info("attention: %s for prefill, %s for decode", self.model.attention_backend.value, decode)
        self.row_shape = (PAGE_SIZE, language.kv_row_size)
        self.slot_bytes: int = language.hidden_size * self.dtype.itemsize
        self.num_layers = language.num_hidden_layers
        self.sampler = Sampler(config.max_num_seqs, language.vocab_size, language.eos_token_id, self.device)
        self._features: dict[bytes, PictureFeatures] = {}  # by the picture's key
        self.kv_cache: list[Tensor] = []
        self.last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
        self.batch_invariant = config.deterministic or self.device.type == "cpu"  # there it costs next to nothing
        if self.batch_invariant:
            self.model.make_batch_invariant()
        self.runs_ahead = self.device.type == "cuda"  # the CPU would gain nothing, and waste a row at every eos
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self.vision_graphs: VisionGraphs | None = None

        positions = language.max_position_embeddings
        max_model_len = config.max_model_len or positions
        if max_model_len > positions:
            raise EngineConfigError(
                f"max_model_len {max_model_len} is more than the checkpoint's {positions} positions"
            )
        if self.device.type == "cuda":  # first, so that its memory counts as taken when the cache's size is chosen
            together = 1 if self.batch_invariant else config.vision_tile_budget
            self.vision_graphs = VisionGraphs(self.model, tile_budget=together, progress=True)
        self.num_pages = self._choose_num_pages(max_model_len)
        if self.num_pages * PAGE_SIZE < max_model_len:
            logger.warning("context cut from %d to the KV cache's %d tokens", max_model_len, self.num_pages * PAGE_SIZE)
        self._take_pages(self.num_pages)
        if self.device.type == "cuda":
            self._capture_graphs(max_model_len)
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
        for key in plan.dropped_pictures:
            self._features.pop(key, None)
        # A step that is run again may find a picture whole already.
        encodes = [encode for encode in plan.encodes if not self._is_whole(encode.picture)]
        if encodes:
            self._encode(encodes)
        return self._forward(plan)

    def forget(self, request_id: str) -> None:
        """Drop what the device holds of a request besides its pages and pictures."""
        self.sampler.forget(request_id)

    def _encode(self, encodes: list[EncodeTiles]) -> None:
        """Encode all tiles of the step in one batch; pictures that are whole now are laid out as the prompt's slots."""
        tiles = torch.from_numpy(np.concatenate([_tiles_of(encode) for encode in encodes]))
        features = self._encode_tiles(tiles)
        for encode, part in zip(encodes, features.split([e.last - e.first for e in encodes]), strict=True):
            picture = encode.picture
            record = self._features.get(picture.key)
            if record is None:
                record = PictureFeatures(part.new_empty(picture.num_tiles, *part.shape[1:]))
                self._features[picture.key] = record
            assert record.tiles is not None  # whole ones were left out
            record.tiles[encode.first : encode.last] = part
            if encode.last == picture.num_tiles:
                record.slots = self.model.assemble_image(record.tiles, picture.columns, picture.rows)
                record.tiles = None

    def _encode_tiles(self, tiles: Tensor) -> Tensor:
        """uint8 [n, 3, 384, 384] on the host -> [n, 196, hidden]; in smaller batches where memory is short.

        Raises torch.OutOfMemoryError when a single tile is too much.
        """
        if self.batch_invariant and len(tiles) > 1:
            return torch.cat([self._encode_tiles(tile) for tile in tiles.split(1)])
        try:
            if self.vision_graphs is not None:
                return self.vision_graphs.run(tiles)
            features: Tensor = self.model.encode_tiles(tiles.to(self.device))
            return features
        except torch.OutOfMemoryError:
            if len(tiles) == 1:
                raise
            logger.warning("no memory to encode %d tiles at once, trying half of them", len(tiles))
        # Out here, where the exception no longer keeps the failed attempt's tensors.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return torch.cat([self._encode_tiles(half) for half in tiles.split(-(-len(tiles) // 2))])

    def _is_whole(self, picture: Picture) -> bool:
        record = self._features.get(picture.key)
        return record is not None and record.slots is not None

    def _forward(self, plan: StepPlan) -> StepOutput:
        sampling = self.sampler.prepare(plan.sampled)
        logits = self._logits(plan)
        sampled = self.sampler.sample(logits, sampling)
        self.last_tokens[: len(sampled.token_ids)].copy_(sampled.token_ids)
        return StepOutput(sampled, logits)

    def _logits(self, plan: StepPlan) -> Tensor:
        """float32 [R, V], a row for each of plan.sampled: through a graph, if one has room for the step.

        Launched kernel by kernel, a step of less than some thousand tokens takes the host longer than the device.
        """
        rows = sum(chunk.end - chunk.start for chunk in plan.chunks)
        if not rows:
            return torch.empty(0, self.sampler.vocab_size, device=self.device)
        if self.graphs is not None and rows <= self.graphs.max_rows:
            return self._run_decode_graph(self.graphs, plan)
        if self.prompt_graphs is not None:
            size = self.prompt_graphs.size_for(rows, keys=sum(chunk.end for chunk in plan.prefills))
            if size is not None:
                return self._run_prompt_graph(self.prompt_graphs, plan, size)
        logits: Tensor = self.model(self._batch(plan), self.kv_cache)
        return logits

    def _run_decode_graph(self, graphs: DecodeGraphs, plan: StepPlan) -> Tensor:
        """Every token of the step is a row of its own."""
        rows = _one_by_one(plan)
        if not plan.prefills:
            return graphs.run(rows)
        image_rows, embeds = self._pictured_rows(plan)
        wanted = [row for row, chunk in enumerate(rows) if chunk.samples]
        pictured, sampled = upload([np.array(image_rows, np.int64), np.array(wanted, np.int64)], self.device)
        return graphs.run(rows, pictured, embeds)[sampled]

    def _run_prompt_graph(self, graphs: PromptGraphs, plan: StepPlan, size: Size) -> Tensor:
        image_rows, embeds = self._pictured_rows(plan)
        return graphs.run(
            size,
            [_model_chunk(chunk) for chunk in plan.decodes],
            [_model_chunk(chunk) for chunk in plan.prefills],
            logits_rows=_sampling_rows(plan.chunks),
            pending=_pending_rows(plan),
            image_rows=image_rows,
            image_embeds=embeds,
        )

    def _pictured_rows(self, plan: StepPlan) -> tuple[list[int], Tensor | None]:
        """The rows of a step that show a picture, and the features that stand there, if there are any."""
        image_rows: list[int] = []
        embeds: list[Tensor] = []
        row = len(plan.decodes)
        for chunk in plan.prefills:
            for image in chunk.request.images:
                first, last = max(image.start, chunk.start), min(image.end, chunk.end)
                if first < last:
                    image_rows.extend(range(row + first - chunk.start, row + last - chunk.start))
                    embeds.append(self._slots(image.key)[first - image.start : last - image.start])
            row += chunk.end - chunk.start
        return image_rows, torch.cat(embeds) if embeds else None

    def _batch(self, plan: StepPlan) -> Batch:
        image_rows, embeds = self._pictured_rows(plan)
        decodes, prefills = plan.decodes, plan.prefills
        if self.batch_invariant:  # a prompt's tokens go the way that an answer's go
            decodes, prefills = _one_by_one(plan), []
        batch = build_batch(
            [_model_chunk(chunk) for chunk in decodes],
            [_model_chunk(chunk) for chunk in prefills],
            logits_rows=_sampling_rows(decodes + prefills),
            device=self.device,
            image_rows=image_rows,
            image_embeds=embeds,
        )
        if pending := _pending_rows(plan):
            rows, sources = upload(list(np.array(pending).T.copy()), self.device)
            batch.token_ids.index_copy_(0, rows, self.last_tokens[sources])
        return batch

    def _slots(self, key: bytes) -> Tensor:
        record = self._features.get(key)
        if record is None or record.slots is None:
            raise RuntimeError("a picture's slots were planned before its last tile")
        return record.slots

    def vision_cache_slots(self, max_model_len: int) -> int:
        """Slots of the vision cache: what its bytes hold, and at least any one request's pictures."""
        return max(self.config.vision_cache_bytes // self.slot_bytes, max_model_len)

    def _choose_num_pages(self, max_model_len: int) -> int:
        """Pages of the pool: as configured; or what CUDA memory leaves; or on the CPU, whose memory is shared with
        everyone, enough for a few requests."""
        most = self.config.max_num_seqs * _pages_for(max_model_len)
        configured = self.config.kv_cache_tokens
        if self.device.type == "cpu":
            default = min(_pages_for(max(DEFAULT_CPU_CACHE_TOKENS, max_model_len)), most)
            return default if configured is None else _pages_for(configured)
        step_bytes, graph_bytes = self._measure(max_model_len, with_graphs=configured is None)
        if configured is not None:
            return _pages_for(configured)
        free, total = torch.cuda.mem_get_info(self.device)
        gib = (step_bytes / 2**30, graph_bytes / 2**30)
        logger.info("measured: %.2f GiB for the largest step, %.2f GiB for graphs", *gib)
        used = total - free + step_bytes + graph_bytes + self.vision_cache_slots(max_model_len) * self.slot_bytes
        budget = total * self.config.gpu_memory_utilization - used
        pages = min(int(budget // (self.num_layers * math.prod(self.row_shape) * self.dtype.itemsize)), most)
        if pages < 1:
            raise EngineConfigError(
                f"no memory left for the KV cache: {free / 2**30:.1f} of {total / 2**30:.1f} GiB free after loading, "
                f"{step_bytes / 2**30:.1f} GiB for a step, {graph_bytes / 2**30:.1f} GiB for graphs, "
                f"vision_cache_bytes {self.config.vision_cache_bytes}, "
                f"gpu_memory_utilization {self.config.gpu_memory_utilization}"
            )
        return pages

    def _measure(self, max_model_len: int, *, with_graphs: bool) -> tuple[int, int]:
        """Bytes of CUDA memory that the largest step takes beside weights and cache, and bytes that the graphs take.

        Both are measured on a cache just large enough for one sequence, before the pool's size is chosen, so that
        gpu_memory_utilization bounds the sum of all there is. It also compiles the kernels.
        """
        self._take_pages(_pages_for(max_model_len))
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self._rehearse(max_model_len)
        torch.cuda.synchronize(self.device)
        step_bytes = torch.cuda.max_memory_allocated(self.device) - before
        graph_bytes = self._measure_graphs(max_model_len) if with_graphs else 0
        self.kv_cache = []
        torch.cuda.empty_cache()
        return step_bytes, graph_bytes

    def _measure_graphs(self, max_model_len: int) -> int:
        """Bytes of device memory that all graphs take.

        Of each kind two are captured: the largest, whose pool holds all of them, and the next, which shows what each
        further one takes beside it (its nodes, in the driver's memory).
        """
        free = [self._free_memory()]
        kinds = self._make_graphs(max_model_len)
        free.append(self._free_memory())
        taken = free[0] - free[1]
        for graphs in kinds:
            for first, count in ((0, 1), (1, len(graphs.sizes) - 1)):
                graphs.capture(first, first + 1)
                free.append(self._free_memory())
                taken += count * max(0, free[-2] - free[-1])
        return taken

    def _free_memory(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def _make_graphs(self, max_model_len: int) -> tuple[DecodeGraphs] | tuple[PromptGraphs, DecodeGraphs]:
        """Those of the largest steps first, so that the others find their memory; nothing is captured yet."""
        seqs, max_pages = self.config.max_num_seqs, _pages_for(max_model_len)
        most = max(seqs, SHORT_PROMPT_ROWS)
        decode_graphs = DecodeGraphs(self.model, self.kv_cache, max_rows=most, max_pages=max_pages)
        sizes = prompt_sizes(most, self.config.prefill_chunk_tokens, seqs)
        if self.batch_invariant or self.model.attention_backend is not AttentionBackend.TRITON or not sizes:
            return (decode_graphs,)
        prompt_graphs = PromptGraphs(
            self.model, self.kv_cache, decode_graphs, sizes=sizes, max_num_seqs=seqs, max_pages=max_pages
        )
        return prompt_graphs, decode_graphs

    def _capture_graphs(self, max_model_len: int) -> None:
        before = self._free_memory()
        *prompt_graphs, self.graphs = kinds = self._make_graphs(max_model_len)
        self.prompt_graphs = prompt_graphs[0] if prompt_graphs else None
        for graphs in kinds:
            graphs.capture(progress=True)
        self.last_tokens = self.graphs.last_tokens
        taken = before - self._free_memory()
        counts = " and ".join(str(len(graphs.sizes)) for graphs in kinds)
        logger.info("graphs of %s sizes take %.2f GiB", counts, taken / 2**30)

    def _take_pages(self, count: int) -> None:
        # One page more than the pool knows, for the padding rows of graphs.
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
            self._encode_tiles(torch.zeros(count, *TILE_SHAPE, dtype=torch.uint8))
        for request in requests:
            self.forget(request.request_id)


def _pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def _one_by_one(plan: StepPlan) -> list[Chunk]:
    """A step's tokens as chunks of one each, in the order of its rows."""
    return plan.decodes + [
        Chunk(chunk.request, place, place + 1, samples=chunk.samples and place + 1 == chunk.end)
        for chunk in plan.prefills
        for place in range(chunk.start, chunk.end)
    ]


def _sampling_rows(chunks: list[Chunk]) -> list[int]:
    """The last rows of the chunks that sample, of chunks laid end to end."""
    ends = accumulate(chunk.end - chunk.start for chunk in chunks)
    return [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]


def _pending_rows(plan: StepPlan) -> list[tuple[int, int]]:
    """(row, row in the step before) of tokens that the step before chooses."""
    return [(row, chunk.request.row) for row, chunk in enumerate(plan.decodes) if chunk.request.num_pending]


def _tiles_of(encode: EncodeTiles) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """uint8 [last - first, 3, 384, 384]"""
    tiles = np.frombuffer(encode.picture.tiles, dtype=np.uint8).reshape(encode.picture.num_tiles, *TILE_SHAPE)
    return tiles[encode.first : encode.last]


def _model_chunk(chunk: Chunk) -> model_batch.Chunk:
    return model_batch.Chunk(chunk.request.token_ids[chunk.start : chunk.end], chunk.start, chunk.request.pages)
