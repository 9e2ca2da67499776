"""Graphs whose replay runs the model there and then, on a CPU: what is left out is the recording alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor

from model.batch import PAGE_SIZE
from model.batch import Chunk as ModelChunk
from server.engine.graphs import DecodeGraphs
from server.engine.prompt_graphs import PromptGraphs, Size, prompt_sizes
from server.engine.runner import SHORT_PROMPT_ROWS, Runner
from server.engine.scheduler import Chunk


class ReplayedDecodes(DecodeGraphs):
    def __init__(self, runner: Runner) -> None:
        pages = -(-runner.info.max_model_len // PAGE_SIZE)
        super().__init__(runner.model, runner.kv_cache, max_rows=SHORT_PROMPT_ROWS, max_pages=pages)
        self.rows: list[int] = []
        for size in self.sizes:
            replay = SimpleNamespace(replay=partial(self._replay, size))
            self._captured[size] = cast(Any, SimpleNamespace(graph=replay, logits=self.logits[:size]))

    def run(
        self, chunks: Sequence[Chunk], image_rows: Tensor | None = None, image_embeds: Tensor | None = None
    ) -> Tensor:
        self.rows.append(len(chunks))
        return super().run(chunks, image_rows, image_embeds)

    def _replay(self, size: int) -> None:
        self._model(self._batch(size), self._kv_cache, self.logits[:size], self._hidden_states[:size])


class ReplayedPrompts(PromptGraphs):
    def __init__(self, runner: Runner, decode_graphs: DecodeGraphs) -> None:
        config = runner.config
        sizes = prompt_sizes(decode_graphs.max_rows, config.prefill_chunk_tokens, config.max_num_seqs)
        super().__init__(
            runner.model,
            runner.kv_cache,
            decode_graphs,
            sizes=sizes,
            max_num_seqs=config.max_num_seqs,
            max_pages=-(-runner.info.max_model_len // PAGE_SIZE),
        )
        self.steps: list[tuple[Size, int, int]] = []  # of each step: its size, decodes and chunks
        for size in sizes:
            replay = partial(self._forward, size, self._batch(size))
            self._captured[size] = cast(Any, SimpleNamespace(graph=SimpleNamespace(replay=replay)))

    def run(
        self, size: Size, decodes: Sequence[ModelChunk], prefills: Sequence[ModelChunk], **arguments: Any
    ) -> Tensor:
        self.steps.append((size, len(decodes), len(prefills)))
        return super().run(size, decodes, prefills, **arguments)


def use_graphs(runner: Runner) -> tuple[ReplayedDecodes, ReplayedPrompts]:
    """Have a runner on a CPU take graphs as it would on a GPU; see the fixture `without_cuda`."""
    runner.batch_invariant = False
    runner.graphs = decodes = ReplayedDecodes(runner)
    runner.prompt_graphs = prompts = ReplayedPrompts(runner, decodes)
    runner.last_tokens = decodes.last_tokens
    return decodes, prompts
