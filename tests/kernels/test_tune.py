"""The tuning program's candidates; its times need a GPU."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed on this platform")
from kernels.bench.setups import GEOMETRIES
from kernels.tune import DOWN, FORMS, GATE_UP, TOKENS, forms_for, suits


@pytest.mark.parametrize("tokens", [*TOKENS, 100_000])
@pytest.mark.parametrize(("experts", "topk"), [(66, 8), (74, 8), (10, 4)])
def test_every_number_of_tokens_has_candidates(tokens: int, experts: int, topk: int) -> None:
    for candidates in (GATE_UP, DOWN):
        assert any(suits(tiles, tokens * topk / experts) for tiles in candidates)


def test_every_form_of_attention_fits_a_page_and_some_model() -> None:
    """Also 16 heads or fewer at a time are right for 32: then two programs share a sequence."""
    assert all(64 % form.tokens == 0 for form in FORMS)
    assert set(forms_for(GEOMETRIES["base"])) == set(FORMS)
    assert {form.heads for form in forms_for(GEOMETRIES["small"])} == {16}
