"""The state of InLine attention: a summary of fixed size of any number of keys and values.

InLine attention needs of its tokens only their number, the means of keys and values, and their covariance:

    out_i = v̄ + s·φ(q_i)·C / N,      C = Σ_j (φ(k_j) − mean φ(k)) (v_j − v̄)ᵀ

States of disjoint sets of tokens merge exactly, in any order (Chan's formula for running covariances), so that the
tokens may be read in chunks, or belong to several processes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ._common import autocast_off, default_scale, hide_padding, promote
from .feature_maps import apply_feature_map, map_keys


@dataclass(frozen=True, eq=False)
class KeyValueState:
    """What InLine attention needs of a set of tokens. An empty set has zeros only.

    Attributes:
        count: Number of tokens (batch, 1, 1, 1), int64.
        k_mean: Mean of φ(k), (batch, heads, 1, head_dim), float32 or float64.
        v_mean: Mean of the values, (batch, heads, 1, value_dim).
        covariance: Sum of the products of centred keys and values, (batch, heads, head_dim, value_dim). It is not
            divided by the number of tokens.
        token_mean: Mean of the tokens of the layer, (batch, channels), from which the kernels of the local residual are
            computed; None if it is not needed.
    """

    count: Tensor
    k_mean: Tensor
    v_mean: Tensor
    covariance: Tensor
    token_mean: Tensor | None = None

    @classmethod
    def from_tokens(
        cls,
        k: Tensor,
        v: Tensor,
        tokens: Tensor | None = None,
        mask: Tensor | None = None,
        feature_map: str = "identity",
        affine: tuple[Tensor, Tensor] | None = None,
    ) -> "KeyValueState":
        """Summarize keys and values. There may be none.

        Args:
            k: Keys (batch, heads, tokens, head_dim).
            v: Values (batch, heads, tokens, value_dim).
            tokens: The tokens of the layer (batch, tokens, channels), for the local residual.
            mask: (batch, tokens), True = real token. Padding is excluded, whatever values it has.
            feature_map: φ, one of FEATURE_MAPS.
            affine: (A, b) of `relu_affine`.

        Returns:
            The state, in float64 for float64 and in float32 for other dtypes.
        """
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"k and v must be (batch, heads, tokens, head_dim) with the same batch, heads and tokens, but are "
                f"{tuple(k.shape)} and {tuple(v.shape)}"
            )
        batch, _, number, _ = k.shape
        if tokens is not None and (tokens.dim() != 3 or tokens.shape[:2] != (batch, number)):
            raise ValueError(f"tokens must be ({batch}, {number}, channels), but are {tuple(tokens.shape)}")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (batch, number)):
            raise ValueError(
                f"mask must be boolean (True = real token) and ({batch}, {number}), but it is {mask.dtype} and "
                f"{tuple(mask.shape)}"
            )
        with autocast_off(k):
            k = map_keys(promote(k), feature_map, affine, mask)
            v = hide_padding(promote(v), mask)
            if mask is None:
                count = torch.full((batch, 1, 1, 1), number, dtype=torch.int64, device=k.device)
            else:
                count = mask.sum(dim=1)[:, None, None, None]
            divisor = count.clamp(min=1).to(k.dtype)
            k_mean = k.sum(dim=-2, keepdim=True) / divisor
            v_mean = v.sum(dim=-2, keepdim=True) / divisor
            # Centred before they are multiplied, so nothing large cancels. Padding must be zero again then.
            covariance = hide_padding(k - k_mean, mask).transpose(-2, -1) @ (v - v_mean)
            token_mean = None
            if tokens is not None:
                tokens = promote(tokens)
                if mask is not None:
                    tokens = tokens.masked_fill(~mask[:, :, None], 0.0)
                token_mean = tokens.sum(dim=1) / divisor[:, :, 0, 0]
            return cls(count, k_mean, v_mean, covariance, token_mean)

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        head_dim: int,
        value_dim: int | None = None,
        channels: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "KeyValueState":
        """Return the state of no tokens, to which others are merged.

        Args:
            batch: Number of images or windows.
            heads: Number of heads.
            head_dim: Channels of a key.
            value_dim: Channels of a value; head_dim by default.
            channels: Channels of the token mean; None if it is not needed.
            device: Of the state.
            dtype: Of the means and the covariance, float32 or float64.
        """
        value_dim = head_dim if value_dim is None else value_dim

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        return cls(
            count=torch.zeros((batch, 1, 1, 1), device=device, dtype=torch.int64),
            k_mean=zeros(batch, heads, 1, head_dim),
            v_mean=zeros(batch, heads, 1, value_dim),
            covariance=zeros(batch, heads, head_dim, value_dim),
            token_mean=None if channels is None else zeros(batch, channels),
        )

    def merge(self, other: "KeyValueState") -> "KeyValueState":
        """Return the state of the tokens of both; merging is associative and commutative."""
        if self.covariance.shape != other.covariance.shape or self.covariance.dtype != other.covariance.dtype:
            raise ValueError(
                f"only states of the same shape and dtype can be merged, but these are "
                f"{tuple(self.covariance.shape)} {self.covariance.dtype} and "
                f"{tuple(other.covariance.shape)} {other.covariance.dtype}"
            )
        if (self.token_mean is None) != (other.token_mean is None):
            raise ValueError("only one of the states has a token mean: make both with or without `tokens`")
        dtype = self.covariance.dtype
        count = self.count + other.count
        # The weight of the other state in the means.
        weight = other.count.to(dtype) / count.clamp(min=1).to(dtype)
        k_step = other.k_mean - self.k_mean
        v_step = other.v_mean - self.v_mean
        with autocast_off(self.covariance):
            between = k_step.transpose(-2, -1) @ (v_step * (weight * self.count.to(dtype)))
        token_mean = self.token_mean
        if token_mean is not None:
            assert other.token_mean is not None
            token_mean = token_mean + (other.token_mean - token_mean) * weight[:, :, 0, 0]
        return KeyValueState(
            count=count,
            k_mean=self.k_mean + k_step * weight,
            v_mean=self.v_mean + v_step * weight,
            covariance=self.covariance + other.covariance + between,
            token_mean=token_mean,
        )

    def attend(
        self,
        q: Tensor,
        scale: float | None = None,
        feature_map: str = "identity",
        affine: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """InLine attention of queries to the tokens of the state: v̄ + s·φ(q)·C / N.

        Args:
            q: Queries (batch, heads, queries, head_dim).
            scale: Factor of φ(q)·φ(k); head_dim^-1/2 by default.
            feature_map: φ, one of FEATURE_MAPS, as of the keys.
            affine: (A, b) of `relu_affine`.

        Returns:
            (batch, heads, queries, value_dim), in q's dtype. Zeros if the state is empty.
        """
        with autocast_off(q):
            queries = apply_feature_map(promote(q), feature_map, affine)
            return (queries @ self.scaled_covariance(default_scale(q, scale)) + self.v_mean).to(q.dtype)

    def scaled_covariance(self, scale: float) -> Tensor:
        """Return s·C / N, by which queries are multiplied, (batch, heads, head_dim, value_dim)."""
        return self.covariance * (scale / self.count.clamp(min=1).to(self.covariance.dtype))
