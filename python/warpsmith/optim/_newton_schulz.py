"""The orthogonalisation of Muon: matrices of one shape together, by products that are known to be symmetric."""

import torch
from torch import Tensor

from warpsmith.ops._linear_symmetric import product

FORMS = ("standard", "gram")
_RESTART = 2  # steps after which the Gram form multiplies the matrices and begins anew


def newton_schulz(x: Tensor, form: str, coefficients: tuple[float, float, float], eps: float, steps: int) -> Tensor:
    """``steps`` of X <- (a + b A + c A^2) X with A = X X^T, from X over its norm, for x of shape (count, m, n); where
    m > n, of the transposes. x is bfloat16 and written over. The Gram form computes in
    float16, on the CPU in float32."""
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = x.div_(norms.clamp_(min=eps))
    if form == "gram":
        x = x.half() if x.is_cuda else x.float()  # CPUs multiply float16 a thirtieth as fast as torch's bfloat16
    tall = x.shape[-2] > x.shape[-1]

    def gram() -> Tensor:
        return product(x.mT, x.mT) if tall else product(x, x)

    a, b, c = coefficients
    if form == "standard":
        for _ in range(steps):
            r = gram()
            p = product(r, r, r, c, b)
            x = torch.baddbmm(x, x, p, beta=a) if tall else torch.baddbmm(x, p, x, beta=a)
        return x
    q = r = x  # set in the first step
    for step in range(steps):
        first = step in (0, _RESTART)
        last = step + 1 in (_RESTART, steps)
        if first:
            r = gram()
        z = product(r, r, r, c, b)  # the step is a + z
        if not last:
            half = product(r, z, r, 1.0, a)
            r = product(half, z, half, 1.0, a)
        if first:  # as large as z: in bfloat16 it would cost bits of z that count
            z.diagonal(dim1=-2, dim2=-1).add_(a)
        q = z if first else product(q, z, q, 1.0, a)
        if last:
            x = x @ q if tall else q @ x
    return x
