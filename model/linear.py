"""The linear layer of the decoder and of the projector."""

from torch import Tensor, nn

from kernels.batch_invariant import linear


class Linear(nn.Linear):
    """[..., in_features] to [..., out_features]; see kernels/batch_invariant.py."""

    batch_invariant = False
    """Whether a row must not depend on the batch on CUDA too."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, batch_invariant=self.batch_invariant)
