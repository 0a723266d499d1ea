"""The orthogonalisation of Muon: matrices of one shape together, by products that are known to be symmetric."""

from __future__ import annotations

import torch
from torch import Tensor

from warpsmith.ops._linear_symmetric import product

FORMS = ("standard", "gram")
_RESTART = 2  # steps after which the Gram form multiplies the matrices and begins anew


def newton_schulz(x: Tensor, form: str, coefficients: tuple[float, float, float], eps: float, steps: int) -> Tensor:
    """``steps`` of X <- (a + b A + c A^2) X with A = X X^T, from X over its norm, for x of shape (count, m, n); where
    m > n, of the transposes. x is bfloat16 and written over. The Gram form computes in float16."""
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = x.div_(norms.clamp_(min=eps))
    if form == "gram":
        x = x.half()
    tall = x.shape[-2] > x.shape[-1]

    def gram() -> Tensor:
        return product(x.mT, x.mT) if tall else product(x, x)

    def times(p: Tensor, weight: float) -> Tensor:
        """p X + weight X."""
        if weight == 0:
            return x @ p if tall else p @ x
        return torch.baddbmm(x, x, p, beta=weight) if tall else torch.baddbmm(x, p, x, beta=weight)

    a, b, c = coefficients
    if form == "standard":
        for _ in range(steps):
            r = gram()
            x = times(product(r, r, r, c, b), a)
        return x
    q = r = x  # set in the first step
    for step in range(steps):
        first = step in (0, _RESTART)
        last = step + 1 in (_RESTART, steps)
        if first:
            r = gram()
        z = product(r, r, r, c, b)  # the step is z + a
        if first and last:
            x = times(z, a)
            continue
        if first:
            q = z.clone()
            q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            q = product(q, z, q, 1.0, a)
        if last:
            x = times(q, 0)
        else:
            half = product(r, z, r, 1.0, a)
            r = product(half, z, half, 1.0, a)
    return x
