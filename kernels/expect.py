"""What a kernel takes for granted of an array, said before it is launched: a kernel itself would read beyond it."""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


def expect(name: str, tensor: Tensor, shape: Sequence[int], *dtypes: torch.dtype) -> None:
    """Raises ValueError unless `tensor` is contiguous, of this shape and one of these types."""
    if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        _refuse(name, tensor, shape, dtypes, "contiguous ")


def expect_rows(name: str, tensor: Tensor, shape: Sequence[int], *dtypes: torch.dtype) -> None:
    """Raises ValueError unless `tensor` is of this shape and one of these types, its last dimension contiguous."""
    if tensor.shape != shape or tensor.dtype not in dtypes or (tensor.stride(-1) != 1 and tensor.shape[-1] != 1):
        _refuse(name, tensor, shape, dtypes, "rows of ")


def _refuse(name: str, tensor: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype], kind: str) -> None:
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} with strides {list(tensor.stride())}"
    raise ValueError(f"{name} must be {kind}{wanted} {list(shape)}, got {got}")
