"""Linear layers for inference that compute in int8."""

from typing import cast

from torch import Tensor, nn

from .. import kernels
from ._packed import PackedWeights


class Int8Linear(nn.Linear):
    """A linear layer that computes in int8: weights quantised for each output, inputs for each token as they come.

    Its parameters stay as they are. Where the kernels cannot compute (see is_plain), it computes in their precision.
    """

    packed: PackedWeights[kernels.PackedLinear]

    @classmethod
    def replace(cls, layer: nn.Linear, *, int8: bool) -> None:
        """Change a layer in place into one of this class, or back; its parameters, hooks and names stay.

        Args:
            layer: A linear layer, of exactly that class or of this one.
            int8: Whether it is to compute in int8.
        """
        if isinstance(layer, Int8Linear):
            del layer.packed
        layer.__class__ = cls if int8 else nn.Linear
        if int8:
            cast(Int8Linear, layer).packed = PackedWeights(pack_int8)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, inputs) to (…, outputs)."""
        packed = self.packed.get(self, x)
        return super().forward(x) if packed is None else kernels.linear(x, packed, self.out_features)


def pack_int8(layer: nn.Linear) -> kernels.PackedLinear | None:
    """Pack a linear layer in int8, if there are kernels."""
    return kernels.pack_linear(layer.weight, layer.bias, int8=True) if kernels.available() else None
