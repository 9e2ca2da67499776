"""Writing the demo checkpoint: a whole folder in the published layout, replaced in one piece."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from model.checkpoint import save_checkpoint
from model.demo.architecture import processor_config_json, write_json
from model.vl2 import DeepseekVL2

SHARD_BYTES = 14_000_000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_OWN_FILES = re.compile(r"(config|processor_config|tokenizer|tokenizer_config|special_tokens_map)\.json|model[-.].*")


class ExportError(ValueError):
    """The folder to write to holds something else."""


def export_checkpoint(model: DeepseekVL2, config: dict[str, Any], tokenizer: Path, folder: Path) -> None:
    """Writes weights (bfloat16), configuration and tokenizer files.

    Raises:
        ExportError: if the folder has files that are no checkpoint's.
    """

    def write(target: Path) -> None:
        save_checkpoint(model, target, dtype=torch.bfloat16, max_shard_bytes=SHARD_BYTES)
        write_json(target / "config.json", config)
        write_json(target / "processor_config.json", processor_config_json())
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer / name, target / name)

    replace_folder(folder, write)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Has ``write`` fill a new folder beside ``folder`` and then puts it in its place.

    Whoever has entered the folder goes on reading the old files, all of them: they stay, in ``folder`` + ".previous",
    until the next call. A copy by ``cd folder && cp * elsewhere`` is therefore always of one piece.
    """
    if folder.exists():
        strangers = sorted(path.name for path in folder.iterdir() if not _OWN_FILES.fullmatch(path.name))
        if strangers:
            raise ExportError(f"{folder} holds {strangers[0]}, which is not a checkpoint's: choose another folder")
    partial, previous = (folder.with_name(folder.name + suffix) for suffix in (".partial", ".previous"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    shutil.rmtree(previous, ignore_errors=True)
    if folder.exists():
        folder.rename(previous)
    partial.rename(folder)
