"""`vl2 doctor`: facts about this machine and the model, for a person or a bug report. No secrets."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from model.checkpoint import CheckpointError, check_weights, resolve_model
from model.config import ConfigError, load_config
from model.tokenizer import Tokenizer, TokenizerError
from server.settings import ConfigurationError, Settings, resolve_device

PACKAGES = ("torch", "triton", "flash-attn-4", "flash-attn", "transformers", "tokenizers", "fastapi", "pydantic")


def report(settings: Settings) -> bool:
    """Print the facts, one a line. Whether the model can be read."""
    for name, value in machine_facts(settings):
        print(f"{name:<14} {value}")
    source = settings.model_source
    print(f"{'model':<14} {source}")
    try:
        folder = resolve_model(source, weights=False)
        config = load_config(folder)
        Tokenizer.from_folder(folder)
        if (
            settings.load_format != "dummy" and Path(source).expanduser().is_dir()
        ):  # a hub model's come when it is served
            check_weights(folder)
    except (CheckpointError, ConfigError, TokenizerError) as error:
        print(f"{'':<14} cannot be served: {error}")
        return False
    language = config.language
    attention = "multi-head latent attention" if language.use_mla else "multi-head attention"
    print(f"{'':<14} {language.num_hidden_layers} layers, hidden size {language.hidden_size}, {attention}")
    print(f"{'':<14} vocabulary {language.vocab_size}, context {language.max_position_embeddings}")
    return True


def machine_facts(settings: Settings) -> Iterator[tuple[str, str]]:
    """Python, packages, memory and devices of this machine."""
    memory = psutil.virtual_memory()
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for package in PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"
    yield "cpu", f"{cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    yield "memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            major, minor = torch.cuda.get_device_capability(index)
            name = torch.cuda.get_device_name(index)
            yield f"gpu {index}", f"{name} (sm_{major}{minor}), {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    else:
        yield "gpu", "none that torch can use"
    try:
        yield "device", f"{settings.device} -> {resolve_device(settings.device)}"
    except ConfigurationError as error:
        yield "device", f"cannot be used: {error}"


def cpu_name() -> str:
    """The processor's name as Linux gives it, or its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
