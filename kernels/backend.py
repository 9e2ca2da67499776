"""Where Triton kernels run: on CUDA tensors, and on the CPU in Triton's interpreter (TRITON_INTERPRET=1), for tests."""

import os

from torch import Tensor


def use_triton(tensor: Tensor) -> bool:
    """Whether an operation on this tensor takes its Triton kernel rather than the torch reference."""
    return tensor.is_cuda
