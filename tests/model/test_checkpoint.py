"""Every published tensor goes to one place; damaged checkpoints are named; saving is loading backwards."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.checkpoint import (
    INDEX_NAME,
    UNUSED,
    CheckpointError,
    check_weights,
    load_model,
    placements,
    resolve_model,
    save_checkpoint,
)
from model.config import load_config
from tests import goldens_data

CPU = torch.device("cpu")
CHECKPOINTS = Path(__file__).parents[2] / "configs" / "checkpoints"


@pytest.mark.parametrize("name", ["deepseek-vl2-tiny", "deepseek-vl2-small", "deepseek-vl2"])
def test_every_published_tensor_has_its_place(name: str) -> None:
    published = json.loads((CHECKPOINTS / name / "tensors.json").read_text())
    used = {tensor: tuple(shape) for tensor, shape in published.items() if not UNUSED.match(tensor)}
    places = placements(load_config(CHECKPOINTS / name))
    assert {tensor: place.shape for tensor, place in places.items()} == used
    assert len(published) - len(used) == 13  # the pooling head


@pytest.mark.parametrize("variant", goldens_data.VARIANTS)
def test_places_cover_every_parameter_once(variant: str) -> None:
    model = load_model(goldens_data.checkpoint(variant), device=CPU, dtype=torch.float32, load_format="dummy")
    for parameter in model.parameters():
        parameter.zero_()
    named = dict(model.named_parameters())
    for place in placements(model.config).values():
        place.part(named[place.parameter]).add_(1)
    assert all((parameter == 1).all() for parameter in model.parameters())


@pytest.mark.parametrize("variant", goldens_data.VARIANTS)
def test_saving_and_loading_again_gives_the_same_tensors(tmp_path: Path, variant: str) -> None:
    source = goldens_data.checkpoint(variant)
    model = load_model(source, device=CPU, dtype=torch.float32)
    save_checkpoint(model, tmp_path, dtype=torch.bfloat16, max_shard_bytes=300_000)
    original, saved = read_all(source), read_all(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert saved.keys() == {name for name in original if not UNUSED.match(name)}
    for name, tensor in saved.items():
        assert torch.equal(tensor, original[name].to(torch.bfloat16)), name


def read_all(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_weights_take_the_wanted_dtype_and_routers_stay_float32() -> None:
    model = load_model(goldens_data.checkpoint("mla-sigmoid"), device=CPU, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".router." in name else torch.bfloat16), name
        assert not parameter.requires_grad


def test_dummy_weights_are_seeded_and_have_the_stated_spread() -> None:
    def draw(seed: int) -> dict[str, Tensor]:
        folder = goldens_data.checkpoint("mla-sigmoid")
        return load_model(folder, device=CPU, dtype=torch.float32, load_format="dummy", seed=seed).state_dict()

    first, again, other = draw(3), draw(3), draw(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["language.lm_head.weight"], other["language.lm_head.weight"])
    for name, tensor in first.items():
        if name.endswith("bias"):
            assert (tensor == 0).all(), name
        elif "norm" in name:
            assert (tensor == 1).all(), name
        elif tensor.numel() > 1000:
            assert tensor.std().item() == pytest.approx(0.02, rel=0.1), name


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(goldens_data.checkpoint("mla-softmax"), tmp_path / "copy"))


SHARD = "model-00002-of-00003.safetensors"


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> str:
    """Change the tensors of the second shard; the name of its first one."""
    tensors = load_file(folder / SHARD)
    name = next(iter(tensors))
    change(tensors)
    save_file(tensors, folder / SHARD)
    return name


def refuses(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, device=CPU, dtype=torch.float32)
    for word in words:
        assert word in str(caught.value)


def test_weights_are_checked_without_reading_them(copy: Path) -> None:
    check_weights(copy)
    whole = (copy / SHARD).read_bytes()
    (copy / SHARD).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match=SHARD):
        check_weights(copy)
    (copy / SHARD).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=SHARD):
        check_weights(copy)
    (copy / SHARD).unlink()
    with pytest.raises(CheckpointError, match=SHARD):
        check_weights(copy)


def test_a_missing_tensor_is_named(copy: Path) -> None:
    name = edit(copy, lambda tensors: tensors.pop(next(iter(tensors))))
    refuses(copy, name, "missing", SHARD)


def test_an_unexpected_tensor_is_named(copy: Path) -> None:
    edit(copy, lambda tensors: tensors.update({"language.model.layers.9.oops": torch.zeros(1)}))
    refuses(copy, "language.model.layers.9.oops", "unexpected", SHARD)


def test_a_misshaped_tensor_is_named(copy: Path) -> None:
    name = edit(copy, lambda tensors: tensors.update({next(iter(tensors)): torch.zeros(3, 5)}))
    refuses(copy, name, "[3, 5]", SHARD)


def test_an_integer_tensor_is_refused(copy: Path) -> None:
    name = edit(copy, lambda tensors: tensors.update({n: t.to(torch.int8) for n, t in list(tensors.items())[:1]}))
    refuses(copy, name, "int8", SHARD)


def test_a_tensor_in_two_files_is_named(copy: Path) -> None:
    other = load_file(copy / "model-00001-of-00003.safetensors")
    name = next(iter(other))
    edit(copy, lambda tensors: tensors.update({name: other[name]}))
    refuses(copy, name, SHARD, "model-00001-of-00003.safetensors")


def test_a_shard_that_is_absent_or_cut_is_named(copy: Path) -> None:
    whole = (copy / SHARD).read_bytes()
    (copy / SHARD).write_bytes(whole[: len(whole) // 2])
    refuses(copy, SHARD)
    (copy / SHARD).unlink()
    refuses(copy, SHARD, INDEX_NAME)


def test_an_index_that_leaves_the_folder_or_is_no_index_is_refused(copy: Path) -> None:
    for text in ("{", "[]", "{}", '{"weight_map": {"a": "../../etc/passwd"}}'):
        (copy / INDEX_NAME).write_text(text)
        refuses(copy, INDEX_NAME)


def test_a_single_file_needs_no_index(copy: Path) -> None:
    tensors = read_all(copy)
    for file in copy.glob("model*"):
        file.unlink()
    refuses(copy, INDEX_NAME, "model.safetensors")
    save_file(tensors, copy / "model.safetensors")
    assert load_model(copy, device=CPU, dtype=torch.float32).config.language.hidden_size == 128


def test_a_name_that_is_no_folder_and_no_hub_id_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("/no/such/folder", "a/b/c/d"):
        with pytest.raises(CheckpointError, match="neither a folder nor a hub model"):
            resolve_model(name)
