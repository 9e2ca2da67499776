"""The tuning program's candidates; its times need a GPU."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed on this platform")
from kernels.tune import DOWN, GATE_UP, TOKENS, suits


@pytest.mark.parametrize("tokens", [*TOKENS, 100_000])
@pytest.mark.parametrize(("experts", "topk"), [(66, 8), (74, 8), (10, 4)])
def test_every_number_of_tokens_has_candidates(tokens: int, experts: int, topk: int) -> None:
    for candidates in (GATE_UP, DOWN):
        assert any(suits(tiles, tokens * topk / experts) for tiles in candidates)
