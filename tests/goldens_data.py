"""The reference's recorded numbers (`tests/goldens/README.md` says what each one is)."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

GOLDENS = Path(__file__).parent / "goldens"
VARIANTS = ("mha", "mla-softmax", "mla-sigmoid")


def checkpoint(variant: str) -> Path:
    return GOLDENS / variant / "checkpoint"


@lru_cache
def units() -> tuple[dict[str, Any], dict[str, Tensor]]:
    folder = GOLDENS / "units"
    return json.loads((folder / "units.json").read_text()), load_file(folder / "units.safetensors")


@lru_cache
def cases(variant: str) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """(case by name, tensors by `<case>/<what>`)."""
    listed = json.loads((GOLDENS / variant / "cases.json").read_text())["cases"]
    return {case["name"]: case for case in listed}, load_file(GOLDENS / variant / "cases.safetensors")


def case_names(variant: str) -> list[str]:
    return list(cases(variant)[0])
