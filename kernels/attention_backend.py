"""Which implementation prefill attention takes on this machine: chosen once, at start, and handed down from there."""

import importlib
from enum import Enum
from typing import Any, Literal

import torch

from kernels.lang import has_triton

AttentionSetting = Literal["auto", "flash-attn", "triton", "torch"]


class AttentionBackend(Enum):
    """The value is the name that people see."""

    FLASH_4 = "flash-attn 4"
    """flash_attn.cute: on Hopper and newer."""
    FLASH_2 = "flash-attn 2"
    """flash_attn: on Ampere and newer."""
    TRITON = "triton"
    TORCH = "torch"


class BackendError(ValueError):
    """The attention backend that was asked for cannot serve here; the message says why."""


def choose_backend(
    setting: AttentionSetting, *, device: torch.device, dtype: torch.dtype, parts: tuple[int, ...], value_dim: int
) -> AttentionBackend:
    """What `setting` means for keys of these parts (MLA: nope and rope; else one) and values `value_dim` wide.

    auto: Triton where it serves these, since a captured graph can hold it, else flash-attn where it is installed, both
    on CUDA only, else torch. Raises BackendError for a setting that cannot be met.
    """
    if setting == "torch" or (setting == "auto" and device.type != "cuda"):
        return AttentionBackend.TORCH
    if device.type != "cuda":
        raise BackendError(f"attention backend {setting} needs a GPU, and the model runs on {device.type}")
    reasons = {}
    if setting in ("auto", "triton"):
        reason = _why_not_triton((*parts, value_dim))
        if reason is None:
            return AttentionBackend.TRITON
        reasons["triton"] = reason
    if setting in ("auto", "flash-attn"):
        for backend in (AttentionBackend.FLASH_4, AttentionBackend.FLASH_2):
            reason = _why_not_flash(backend, device, dtype, sum(parts), value_dim)
            if reason is None:
                return backend
            reasons[backend.value] = reason
    if setting == "auto":
        return AttentionBackend.TORCH
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise BackendError(f"attention backend {setting} cannot serve here: {listed}")


def flash_function(backend: AttentionBackend) -> Any:
    """flash_attn_varlen_func of either version. Raises ImportError."""
    module = "flash_attn.cute.interface" if backend is AttentionBackend.FLASH_4 else "flash_attn"
    return importlib.import_module(module).flash_attn_varlen_func


def _why_not_flash(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int
) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16):
        return f"serves 16-bit numbers, not {str(dtype).removeprefix('torch.')}"
    four = backend is AttentionBackend.FLASH_4
    least = (9, 0) if four else (8, 0)
    capability = torch.cuda.get_device_capability(device)
    if capability < least:
        return f"needs compute capability {least[0]}.{least[1]}, this GPU has {capability[0]}.{capability[1]}"
    # The fourth version pads nothing; the second pads to a multiple of 8, and takes values padded to the keys' width.
    if four and (key_dim, value_dim) != (192, 128) and not (key_dim == value_dim and key_dim in (64, 96, 128)):
        return f"does not serve keys of {key_dim} and values of {value_dim}"
    if not four and (key_dim > 256 or value_dim > key_dim):
        return f"does not serve keys of {key_dim} and values of {value_dim}"
    try:
        flash_function(backend)
    except (ImportError, AttributeError) as error:
        return f"cannot be imported ({error})"
    return None


def _why_not_triton(widths: tuple[int, ...]) -> str | None:
    if not has_triton():
        return "is not installed"
    for width in widths:
        if width < 16 or width & (width - 1):
            return f"serves widths that are powers of two from 16 on, not {width}"
    return None
