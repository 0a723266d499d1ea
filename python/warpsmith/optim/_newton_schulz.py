"""The orthogonalisation of Muon: matrices of one shape together, by products that are known to be symmetric."""

import torch
from torch import Tensor

from warpsmith._core.library import call_raw, raw
from warpsmith.ops._linear_symmetric import product

FORMS = ("standard", "gram")
_RESTART = 2  # steps after which the Gram form multiplies the matrices and begins anew


def newton_schulz(x: Tensor, form: str, coefficients: tuple[float, float, float], eps: float, steps: int) -> Tensor:
    """``steps`` of X <- (a + b A + c A^2) X with A = X X^T, from X over its norm, for x of shape (count, m, n); where
    m > n, of the transposes. x is bfloat16 and written over. The Gram form computes in
    float16, on the CPU in float32."""
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), dtype=torch.float32)
    factors = norms.clamp_(min=eps).reciprocal_().clamp_(max=torch.finfo(torch.float32).max)
    flag, count = torch.zeros_like(factors[0]), torch.zeros(1, dtype=torch.int64, device=x.device)  # nobody reads them
    # torch divides bfloat16 by float32 element by element, five times as slowly (0.9 ms for 0.2e9 on an H200).
    for matrix, factor in zip(x.unbind(0), factors.unbind(0), strict=True):
        call_raw(raw.unscale_grads.default, [matrix], factor, flag, count)
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
