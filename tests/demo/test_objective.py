"""The losses see pictures as from many cameras."""

import torch

from model.demo.objective import disturb


def test_disturbed_pictures_stay_near() -> None:
    seed = 3
    tiles = torch.randint(0, 256, (16, 1, 24, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    values = disturb(tiles, torch.Generator().manual_seed(seed))
    assert values.shape == (16, 24, 24, 3) and values.dtype == torch.float32
    assert values.min() >= -1 and values.max() <= 1
    plain = (tiles.float() / 127.5 - 1).flatten(0, 1)
    assert (values - plain).abs().mean(dim=(1, 2, 3)).max() < 0.15
    # Some pictures get noise, some none: those are an exact line of contrast and brightness, but for the limits.
    middle = plain.abs() < 0.8
    noisy = []
    for mine, given, inside in zip(values, plain, middle, strict=True):
        x, y = given[inside], mine[inside]
        slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
        assert 0.9 < slope < 1.1
        noisy.append(float((y - y.mean() - slope * (x - x.mean())).std()) > 1e-4)
    assert 2 <= sum(noisy) <= 14
    again = disturb(tiles, torch.Generator().manual_seed(seed))
    assert torch.equal(values, again)
