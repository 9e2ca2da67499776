"""What penalised requests have seen, on the device: a row each of in-prompt flags and counts of generated tokens."""

from __future__ import annotations

import torch

from server.engine.request import Request


class TokenHistory:
    """Rows of `in_prompt` bool [max_num_seqs, V] and `counts` int32 [max_num_seqs, V], lent to requests.

    Sampling counts a chosen token where it is, on the device, so that the next step need not wait for the host; the
    books of how many tokens a row stands for are kept here.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.in_prompt = torch.zeros(max_num_seqs, vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(max_num_seqs, vocab_size, dtype=torch.int32, device=device)
        self._row_of: dict[str, int] = {}
        self._length_of: dict[str, int] = {}  # tokens its row stands for
        self._free = list(range(max_num_seqs))

    def rows(self, requests: list[Request]) -> list[int]:
        """Each request's row, brought in line with its tokens if it is new or a step is repeated."""
        for request in requests:
            name = request.request_id
            if name not in self._row_of:
                self._row_of[name] = self._free.pop()
            if self._length_of.get(name) != request.num_tokens:
                self._fill(self._row_of[name], request)
                self._length_of[name] = request.num_tokens
        return [self._row_of[request.request_id] for request in requests]

    def expect(self, requests: list[Request]) -> None:
        """Note that the device has been told to count a token for each."""
        for request in requests:
            self._length_of[request.request_id] += 1

    def forget(self, request_id: str) -> None:
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._free.append(row)
            del self._length_of[request_id]

    def _fill(self, row: int, request: Request) -> None:
        tokens = torch.tensor(request.token_ids)
        if self.counts.is_cuda:
            tokens = tokens.pin_memory().to(self.counts.device, non_blocking=True)
        prompt, generated = tokens[: request.num_prompt], tokens[request.num_prompt :]
        self.in_prompt[row].zero_().index_fill_(0, prompt, True)
        ones = torch.ones_like(generated, dtype=torch.int32)
        self.counts[row].zero_().index_add_(0, generated, ones)
