"""CUDA graphs of tower and projector, one for each small number of tiles; more tiles go in parts of about equal size.

A tile takes about as long alone as among others, but launching the tower's 200 kernels takes longer than running them
for a tile or two, and keeps Python from the next step. No part is padded: a tile that nobody needs costs more than a
part of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tqdm import tqdm

from model.vl2 import DeepseekVL2
from server.engine.request import TILE_SHAPE

MOST_TILES = 16
"""The largest graph; beyond it larger products are no faster, and a graph's memory grows with its tiles."""


class VisionGraphs:
    """Graphs of `model.encode_tiles` for 1 to `tile_budget` tiles, at most MOST_TILES, on the model's device."""

    def __init__(self, model: DeepseekVL2, *, tile_budget: int, progress: bool) -> None:
        self._model = model
        self._most = min(tile_budget, MOST_TILES)
        device = model.image_newline.device
        self._tiles = torch.zeros(self._most, *TILE_SHAPE, dtype=torch.uint8, device=device)
        # Two, in turn, each with what tells that its last copy is done: the host fills one while the other is read.
        self._staging = [
            (torch.empty(self._tiles.shape, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)
        ]
        self._pool = torch.cuda.graph_pool_handle()
        self._features = self._encode(self._most)  # one buffer for all graphs
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        sizes = range(self._most, 0, -1)
        for size in tqdm(sizes, desc="Capturing vision graphs", disable=None if progress else True):
            self._graphs[size] = self._capture(size)

    @torch.inference_mode()
    def run(self, tiles: Tensor) -> Tensor:
        """uint8 [n, 3, 384, 384] on the host to image tokens [n, 196, hidden_size], ready when the stream gets there.

        Raises torch.OutOfMemoryError when there is no room for the result.
        """
        count = len(tiles)
        features = self._features.new_empty(count, *self._features.shape[1:])
        parts = -(-count // self._most)
        for part, target in zip(tiles.tensor_split(parts), features.tensor_split(parts), strict=True):
            self._load(part)
            self._graphs[len(part)].replay()
            target.copy_(self._features[: len(part)])
        return features

    def _load(self, tiles: Tensor) -> None:
        staged, copied = self._staging[0]
        copied.synchronize()
        staged[: len(tiles)] = tiles
        self._tiles[: len(tiles)].copy_(staged[: len(tiles)], non_blocking=True)
        copied.record()
        self._staging.reverse()

    @torch.inference_mode()
    def _encode(self, size: int) -> Tensor:
        return self._model.encode_tiles(self._tiles[:size])

    @torch.inference_mode()
    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        self._encode(size)  # compiles and plans what is not yet
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._features[:size] = self._encode(size)
        return graph
