"""Checkpoints in the published layout: safetensors shards onto the device, or random weights of the same geometry.

`placements` says, for every tensor name of the layout, which part of which parameter it fills; loading
copies along it (fusing and stacking on the way) and saving reads along it backwards.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from kernels.attention_backend import AttentionBackend, AttentionSetting, choose_backend
from model.config import ModelConfig, load_config
from model.moe import Router
from model.vl2 import DeepseekVL2

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
UNUSED = re.compile(r"vision\.attn_pool\.")
"""The tower's pooling head: part of the published layout, never used by the model."""

LoadFormat = Literal["auto", "dummy"]


class CheckpointError(ValueError):
    """A checkpoint that is absent, incomplete, or does not fit its own configuration."""


@dataclass(frozen=True)
class Placement:
    """Where a tensor of the published layout lives in the model."""

    parameter: str
    shape: tuple[int, ...]
    """Shape in the published layout."""
    part: Callable[[Tensor], Tensor]
    """The view of the parameter that the tensor fills; of the published shape, up to splitting a dimension."""


def resolve_model(name: str, *, weights: bool = True) -> Path:
    """The folder of a checkpoint: `name` itself if it is one, else the hub's repository of that id, downloaded.

    Raises CheckpointError when it is neither; `weights=False` fetches only configuration and tokenizer.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    patterns = ["*.json", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{name!r} is neither a folder nor a hub model that can be fetched: {error}") from error


def load_model(
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: bool = False,
    attention: AttentionSetting = "auto",
) -> DeepseekVL2:
    """The model of a checkpoint folder, on `device` in `dtype` (its routers in float32), ready for inference.

    `progress` shows a bar where standard error is a terminal. `load_format="dummy"` reads the configuration only and
    draws seeded random weights on the device.
    `attention`: the implementation of prefill attention (kernels/attention_backend.py).
    Raises ConfigError or CheckpointError, which name the file and the field or tensor, and BackendError.
    """
    config = load_config(folder)
    language = config.language
    keys = (language.nope_head_dim, language.rope_head_dim) if language.use_mla else (language.qk_head_dim,)
    backend = choose_backend(attention, device=device, dtype=dtype, parts=keys, value_dim=language.value_head_dim)
    model = empty_model(config, device=device, dtype=dtype, backend=backend)
    if load_format == "dummy":
        initialize_randomly(model, seed)
    else:
        _fill(model, folder, progress)
    return model.eval().requires_grad_(False)


def empty_model(
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backend: AttentionBackend = AttentionBackend.TORCH,
) -> DeepseekVL2:
    """The model's modules with uninitialised parameters on `device`."""
    with torch.device("meta"):
        model = DeepseekVL2(config, backend)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            kept = torch.float32 if isinstance(module, Router) else dtype
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=kept, device=device)))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=False)
    return model


@torch.no_grad()
def initialize_randomly(model: DeepseekVL2, seed: int) -> None:
    """Norm weights 1, biases 0, all else normal with deviation 0.02, drawn on the parameters' own device."""
    generator = torch.Generator(model.image_newline.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif re.search(r"norm\d?\.weight$", name):
            parameter.fill_(1)
        else:
            parameter.normal_(0, 0.02, generator=generator)


def save_checkpoint(model: DeepseekVL2, folder: Path, *, dtype: torch.dtype, max_shard_bytes: int) -> None:
    """Write shards and index in the published layout; configuration and tokenizer files are the caller's."""
    parameters = dict(model.named_parameters())
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, placement in placements(model.config).items():
        tensor = placement.part(parameters[placement.parameter].detach()).reshape(placement.shape)
        tensor = tensor.to(dtype=dtype, device="cpu", copy=True).contiguous()
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")


def placements(config: ModelConfig) -> dict[str, Placement]:
    """Every tensor of the published layout that the model uses, by name."""
    with torch.device("meta"):
        parameters = dict(DeepseekVL2(config).named_parameters())
    found: dict[str, Placement] = {}
    for parameter, value in parameters.items():
        for name, part in _sources(parameter, value, config):
            found[name] = Placement(parameter, _published_shape(part(value), name), part)
    return found


def _sources(parameter: str, value: Tensor, config: ModelConfig) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """(published name, part) of each tensor that goes into one parameter."""
    language = config.language
    name = _published_name(parameter)
    if name.endswith("q_kv_a_proj.weight"):
        base, rows = name.removesuffix("q_kv_a_proj.weight"), len(value) - language.latent_rank - language.rope_head_dim
        yield base + ("q_a_proj.weight" if language.query_rank else "q_proj.weight"), _rows(0, rows)
        yield base + "kv_a_proj_with_mqa.weight", _rows(rows, len(value))
    elif name.endswith("qkv_proj.weight"):
        third = len(value) // 3
        for index, letter in enumerate("qkv"):
            yield name.replace("qkv_proj", f"{letter}_proj"), _rows(index * third, (index + 1) * third)
    elif name.endswith("gate_up_proj.weight"):
        half = len(value) // 2
        yield name.replace("gate_up_proj", "gate_proj"), _rows(0, half)
        yield name.replace("gate_up_proj", "up_proj"), _rows(half, 2 * half)
    elif name.endswith(("experts.gate_up_weight", "experts.down_weight")):
        yield from _expert_sources(name, language.num_routed_experts, language.moe_intermediate_size)
    else:
        yield name, _whole


def _expert_sources(name: str, routed: int, width: int) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Routed experts are entries of the stack; the shared ones are published as one MLP of their joint width."""
    base = name.rsplit("experts.", 1)[0]
    if name.endswith("gate_up_weight"):
        for projection, start in (("gate_proj", 0), ("up_proj", width)):
            for expert in range(routed):
                yield f"{base}experts.{expert}.{projection}.weight", _expert_rows(expert, start, start + width)
            yield f"{base}shared_experts.{projection}.weight", _shared_rows(routed, start, start + width)
    else:
        for expert in range(routed):
            yield f"{base}experts.{expert}.down_proj.weight", _expert(expert)
        yield f"{base}shared_experts.down_proj.weight", _shared_columns(routed)


def _published_name(parameter: str) -> str:
    """The published name of a parameter that is not fused; of fused ones, the place where their parts are named."""
    name = parameter.replace("view_separator", "view_seperator")  # spelt so in the published files
    name = name.replace("vision.patch_embed.", "vision.patch_embed.proj.")
    name = re.sub(r"^language\.(embed_tokens|layers|norm)\b", r"language.model.\1", name)
    return name.replace(".attention.", ".self_attn.").replace(".mlp.router.", ".mlp.gate.")


def _published_shape(part: Tensor, name: str) -> tuple[int, ...]:
    shape = tuple(part.shape)
    if ".shared_experts." not in name:
        return shape
    return (shape[0], shape[1] * shape[2]) if "down_proj" in name else (shape[0] * shape[1], shape[2])


def _whole(parameter: Tensor) -> Tensor:
    return parameter


def _rows(start: int, end: int) -> Callable[[Tensor], Tensor]:
    return lambda parameter: parameter[start:end]


def _expert(index: int) -> Callable[[Tensor], Tensor]:
    return lambda parameter: parameter[index]


def _expert_rows(index: int, start: int, end: int) -> Callable[[Tensor], Tensor]:
    return lambda parameter: parameter[index, start:end]


def _shared_rows(routed: int, start: int, end: int) -> Callable[[Tensor], Tensor]:
    return lambda parameter: parameter[routed:, start:end]


def _shared_columns(routed: int) -> Callable[[Tensor], Tensor]:
    return lambda parameter: parameter[routed:].transpose(0, 1)


@torch.no_grad()
def _fill(model: DeepseekVL2, folder: Path, progress: bool) -> None:
    """Copy every tensor of the folder's shards to its place, one shard open at a time."""
    expected = placements(model.config)
    parameters = dict(model.named_parameters())
    loaded: dict[str, str] = {}
    files = _shard_files(folder)
    total = sum((folder / file).stat().st_size for file in files)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="Loading weights", disable=None if progress else True
    ) as bar:
        for file in files:
            for name, tensor in _read_shard(folder / file):
                if name in loaded:
                    raise CheckpointError(f"{folder / file}: {name} is also in {loaded[name]}")
                loaded[name] = file
                bar.update(tensor.nbytes)
                if UNUSED.match(name):
                    continue
                placement = expected.get(name)
                if placement is None:
                    raise CheckpointError(f"{folder / file}: unexpected tensor {name}")
                if tuple(tensor.shape) != placement.shape:
                    raise CheckpointError(
                        f"{folder / file}: {name} has shape {list(tensor.shape)}, expected {list(placement.shape)}"
                    )
                if not tensor.is_floating_point():
                    raise CheckpointError(f"{folder / file}: {name} has dtype {tensor.dtype}, which is not supported")
                part = placement.part(parameters[placement.parameter])
                part.copy_(tensor.to(part.device).reshape(part.shape))
    missing = [name for name in expected if name not in loaded]
    if missing:
        listed = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{folder}: tensor {missing[0]} is missing from {', '.join(files)}{listed}")


def check_weights(folder: Path) -> None:
    """Open every shard and read none. Raises CheckpointError when one is missing or no safetensors file."""
    for file in _shard_files(folder):
        with _open_shard(folder / file):
            pass


def _shard_files(folder: Path) -> list[str]:
    """The shards that the index names, in order, or the single file where there is no index."""
    index = folder / INDEX_NAME
    if not index.exists():
        if (folder / SINGLE_NAME).exists():
            return [SINGLE_NAME]
        raise CheckpointError(f"{folder} holds neither {INDEX_NAME} nor {SINGLE_NAME}")
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors: {error!r}") from error
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():
            raise CheckpointError(f"{index} names {file}, which is not in the folder")
    return files


def _read_shard(path: Path) -> Iterator[tuple[str, Tensor]]:
    with _open_shard(path) as shard:
        for name in shard.keys():  # noqa: SIM118 (no mapping: it has no iterator)
            yield name, shard.get_tensor(name)


@contextmanager
def _open_shard(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
