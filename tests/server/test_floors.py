"""Floors: what they count is the model that is built, and small's are those in docs/performance.md."""

from pathlib import Path

import pytest
import torch

from model.config import load_config
from model.vl2 import DeepseekVL2
from server.bench_engine import BenchError, idle_share
from server.floors import decode_step, prefill, vision

CHECKPOINTS = Path(__file__).parents[2] / "configs" / "checkpoints"
MANY = 10**6
"""Tokens that touch every expert."""


@pytest.mark.parametrize("name", ["deepseek-vl2-tiny", "deepseek-vl2-small", "deepseek-vl2"])
def test_weights_are_those_of_the_model(name: str) -> None:
    config = load_config(CHECKPOINTS / name)
    with torch.device("meta"):
        model = DeepseekVL2(config)
    counted = {
        part: sum(parameter.numel() for parameter in module.parameters() if parameter.dim() > 1)
        for part, module in (("language", model.language), ("vision", model.vision), ("projector", model.projector))
    }
    language = config.language
    routers = sum(parameter.numel() for key, parameter in model.named_parameters() if key.endswith("router.weight"))
    read = counted["language"] - language.vocab_size * language.hidden_size  # the embedding's rows are few
    assert decode_step(config, 2, batch=MANY, context=0).moved == pytest.approx(2 * read + 2 * routers)
    positions = config.vision.patches_per_side**2 * config.vision.width
    seen = counted["vision"] - positions + counted["projector"]
    assert vision(config, 2, tiles=1).moved == 2 * seen


def test_small() -> None:
    config = load_config(CHECKPOINTS / "deepseek-vl2-small")
    for batch, gigabytes in ((1, 4.92), (8, 18.0), (32, 30.1), (256, 34.1)):
        assert decode_step(config, 2, batch=batch, context=384).moved / 1e9 == pytest.approx(gigabytes, rel=0.005)
    prompts = prefill(config, 2, prompts=32, length=2048)
    assert prompts.operations / (32 * 2048) / 1e9 == pytest.approx(4.77, rel=0.005)
    assert vision(config, 2, tiles=7).operations / 7e12 == pytest.approx(0.672, rel=0.005)
    one, eight = (decode_step(config, 2, batch=batch, context=0).operations for batch in (1, 8))
    assert eight == pytest.approx(8 * one)


def test_a_gpu_waits_where_no_kernel_runs() -> None:
    assert idle_share([(10, 20), (25, 30), (12, 15), (18, 22)]) == (pytest.approx(3 / 20), 20)
    assert idle_share([(1, 5)]) == (0.0, 4)
    with pytest.raises(BenchError, match="saw nothing"):
        idle_share([])
