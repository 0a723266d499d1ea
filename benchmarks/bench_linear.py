"""Linear layers beside torch and torch.compile, at the shapes of Llama 1.2B and GPT-2 124M.

Rows are ratios' parts: each cell holds the bare product `torch.mm` ("product") beside the layer, so that an epilogue's
price is a quotient within one run. Shapes are M x K x N, of mlp and gated_linear M x K x F.

    linear             x @ weight^T + bias
    linear_gelu_tanh   with GELU behind it, without and with a gradient ("forward", "forward, kept")
    linear_main_grad   the weight's gradient into a float32 tensor, beside product and addition
    mlp, gated_linear  forward and backward, and the backward alone
    linear_own         each product by our Hopper kernels, beside the library's and the bare product; of a gated layer
                       beside both products bare
    linear_siblings    several weights of one input, M x K x N x N...: forward and input gradient in one launch of ours,
                       beside a product for each as linear layers choose it ("apart") and torch's
    matmul_symmetric   count x M x K: x @ x.mT, and a product of the result with itself and an addend, as Muon has it
    linear_host        the host's time of a call of a small linear, beside F.linear's
"""

import functools
import itertools

import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.testing.rows import OURS, YARDSTICK

from benchmarks.cells import cell_of, host_rows, leaves, timed, torch_contenders

GPU_SHAPES = ((65536, 768, 3072), (8192, 2048, 8192), (16384, 4096, 14336), (8192, 2048, 2048))
CPU_SHAPES = ((512, 256, 1024),)
TINY = (8, 16, 32)
PRODUCT = "product"
SPIN_CYCLES = 20_000_000  # torch eager launches many kernels


def of_shapes(device, options):
    return options.shapes(device, GPU_SHAPES, CPU_SHAPES, TINY)


def ungraded(fn):
    return lambda: torch.no_grad()(fn)()


def forward(op, activation, device, options):
    """The layer without a gradient, and with one: then the pre-activation is written too."""
    rows = []
    for shape in of_shapes(device, options):
        m, k, n = shape
        x, weight, bias = leaves(device, (m, k), (n, k), (n,))

        def plain(x, weight, bias):
            z = F.linear(x, weight, bias)
            return z if activation is None else F.gelu(z, approximate="tanh")

        contenders = torch_contenders(functools.partial(warpsmith.linear, activation=activation), plain, options)
        calls = {name: ungraded(functools.partial(fn, x, weight, bias)) for name, fn in contenders.items()}
        kept = {name: functools.partial(fn, x, weight, bias) for name, fn in contenders.items()}
        product = ungraded(lambda x=x, weight=weight: torch.mm(x, weight.t()))
        for direction, some in (("forward", calls), ("forward, kept", kept)):
            some = {**some, PRODUCT: product}
            rows += timed(cell_of(op, shape, x, direction), some, device, options, not_rivals=(YARDSTICK, PRODUCT))
    return rows


def main_grad(device, options):
    """dy^T @ x into a float32 tensor that holds the sum of earlier micro-batches."""
    rows = []
    backward, backward_main_grad = (
        getattr(torch.ops.warpsmith, f"linear_backward{suffix}") for suffix in ("", "_main_grad")
    )
    for shape in of_shapes(device, options):
        m, k, n = shape
        x, weight, dy = (t.detach() for t in leaves(device, (m, k), (n, k), (m, n)))
        total, none = torch.zeros(n, k, device=device), x.new_empty(0)

        def ours(x=x, weight=weight, dy=dy, total=total, none=none):
            backward_main_grad(dy, x, weight, None, none, total, 0, False, False)

        def apart(x=x, weight=weight, dy=dy, total=total, none=none):
            total.add_(backward(dy, x, weight, None, none, 0, None, False, True, False)[1])

        calls = {OURS: ours, "torch": apart, PRODUCT: lambda x=x, dy=dy: torch.mm(dy.t(), x)}
        place = cell_of("linear_main_grad", shape, x, "backward")
        rows += timed(place, calls, device, options, not_rivals=(YARDSTICK, PRODUCT))
    return rows


OWN_SHAPES = (
    (8192, 2048, 3072), (8192, 2048, 2048), (8192, 2048, 16384), (8192, 8192, 2048), (16384, 4096, 14336),
    (16384, 4096, 4096), (65536, 768, 3072), (65536, 3072, 768), (4096, 2048, 128256), (8192, 8192, 8192),
)  # fmt: skip


def products_of(device, m, k, n):
    """{direction: a product with its epilogue, and the bare product} of a layer and of its gradients."""
    ops, sizes = torch.ops.warpsmith, ((m, k), (n, k), (n,), (m, n), (k, n))
    x, weight, bias, dy, second = (t.detach() for t in leaves(device, *sizes))
    up = weight.flip(0).contiguous()
    total, none = torch.zeros(n, k, device=device), x.new_empty(0)

    def forward(residual=None, bias=None, activation=0, op=ops.linear_inference):
        return lambda: op(x, residual, weight, bias, None, activation)

    def backward(*wanted):
        return lambda: ops.linear_backward(dy, x, weight, None, none, 0, None, *wanted)

    def derivative():  # of a layer before this one, with its bias's gradient
        return ops.mlp_backward(x, x, weight, bias, second, None, dy, dy, 3, False, False, True, False, False)

    def into_main_grad():
        return ops.linear_backward_main_grad(dy, x, weight, None, none, total, 0, False, False)

    def gated(op):  # SwiGLU
        return lambda: op(x, weight, up, None, None, None, None, 4)

    def product(a, b):
        return lambda: torch.mm(a, b)

    def two_products():
        torch.mm(x, weight.t())
        torch.mm(x, up.t())

    of_forward, of_weight = product(x, weight.t()), product(dy.t(), x)
    return {
        "forward": (forward(), of_forward),
        "forward, bias": (forward(None, bias), of_forward),
        "forward, bias, residual": (forward(dy, bias), of_forward),
        "forward, bias, GELU": (forward(None, bias, 3), of_forward),
        "forward, bias, GELU, kept": (forward(None, bias, 3, ops.linear_forward), of_forward),
        "gated forward": (gated(ops.gated_linear_inference), two_products),
        "gated forward, kept": (gated(ops.gated_linear_forward), two_products),
        "input gradient": (backward(True, False, False), product(dy, weight)),
        "input gradient, GELU's, of a bias": (derivative, product(x, second)),
        "weight gradient": (backward(False, True, False), of_weight),
        "weight gradient, main_grad": (into_main_grad, of_weight),
    }


def in_a_row(call, count):
    for _ in range(count):
        call()


def switched(switch, how, call, after):
    """A call under WARPSMITH_OWN_PRODUCT=how."""

    def timed_call():
        switch(how)
        try:
            return call()
        finally:
            switch(after)

    return timed_call


def own(op, products, device, options, counts=(1,)):
    """WARPSMITH_OWN_PRODUCT=1 beside the same calls without it: ``products(device, m, k, n)`` are {direction: a call,
    and the bare product in bfloat16}. ``counts``: of calls behind one another in a sample, as in a step, where the next
    launch begins while the last one ends."""
    switch = getattr(torch.ops.warpsmith, "_own_product", None)
    if device != "cuda" or switch is None:
        return []
    rows = []
    for shape in options.shapes(device, OWN_SHAPES, (), TINY):
        made = products(device, *shape).items()
        for count, (direction, (call, bare)) in itertools.product(counts, made):
            some, bare = (functools.partial(in_a_row, c, count) for c in (call, bare))
            calls = {OURS: switched(switch, "1", some, "0"), "library": some, PRODUCT: bare}
            what = direction if count == 1 else f"{direction}, {count} in a row"
            place = (op, "x".join(map(str, shape)), "bfloat16", what)
            ahead = {"spin_cycles": SPIN_CYCLES} if count > 1 else {}
            rows += timed(place, calls, device, options, not_rivals=(YARDSTICK, PRODUCT), **ahead)
    return rows


SIBLING_SHAPES = (
    (8192, 2048, 2048, 512, 512), (16384, 4096, 4096, 1024, 1024), (2048, 4096, 4096, 1024, 1024),
    (12288, 1536, 1536, 256, 256), (8192, 2048, 8192, 8192), (16384, 4096, 14336, 14336),
)  # fmt: skip


def siblings(device, options):
    ops = torch.ops.warpsmith
    switch = getattr(ops, "_own_product", None)
    if device != "cuda" or switch is None:
        return []
    rows = []
    for shape in options.shapes(device, SIBLING_SHAPES, (), (8, 16, 32, 8)):
        m, k, *widths = shape
        x, *others = (t.detach() for t in leaves(device, (m, k), *((n, k) for n in widths), *((m, n) for n in widths)))
        weights, dys = others[: len(widths)], others[len(widths) :]
        none = x.new_empty(0)

        def forward(x=x, weights=weights):
            return ops.linear_siblings(x, weights, [None] * len(weights))

        def apart(x=x, weights=weights):
            return [ops.linear_inference(x, None, w, None, None, 0) for w in weights]

        def torchs(x=x, weights=weights):
            return [F.linear(x, w) for w in weights]

        def gradient(dys=dys, weights=weights):
            return ops.linear_siblings_input_gradient(dys, weights)

        def added(first, dys=dys, weights=weights):
            dx = first(dys[0], weights[0])
            for dy, w in zip(dys[1:], weights[1:], strict=True):
                dx.addmm_(dy, w)
            return dx

        def first_of_ours(dy, weight, none=none):
            return ops.linear_backward(dy, None, weight, None, none, 0, None, True, False, False)[0]

        of = {
            "forward": (forward, apart, torchs),
            "input gradient": (gradient, functools.partial(added, first_of_ours), functools.partial(added, torch.mm)),
        }
        for direction, (ours, each, theirs) in of.items():
            calls = {OURS: switched(switch, "1", ours, "auto"), "apart": switched(switch, "auto", each, "auto")}
            calls["torch"] = theirs
            rows += timed(cell_of("linear_siblings", shape, x, direction), calls, device, options)
    return rows


SYMMETRIC_SHAPES = ((16, 2048, 2048), (4, 4096, 4096), (1, 8192, 8192), (8, 2048, 8192), (1, 2048, 2048))


def symmetric(device, options):
    rows = []
    for shape in options.shapes(device, SYMMETRIC_SHAPES, ((4, 512, 512),), (2, 16, 32)):
        (x,) = (t.detach() for t in leaves(device, shape))
        x /= shape[-1] ** 0.5
        r = warpsmith.matmul_symmetric(x)
        turned, add = x.mT.contiguous().mT, torch.ops.warpsmith.symmetric_product
        of = {
            "forward": (lambda x=x: warpsmith.matmul_symmetric(x), lambda x=x: torch.bmm(x, x.mT)),
            "forward, columns": (
                lambda x=turned: warpsmith.matmul_symmetric(x),
                lambda x=turned: torch.bmm(x, x.mT),
            ),
            "square, addend": (
                lambda r=r, add=add: add(r, r, r, 2.0315, -4.775),
                lambda r=r: torch.baddbmm(r, r, r, beta=-4.775, alpha=2.0315),
            ),
        }
        for direction, (ours, theirs) in of.items():
            place = cell_of("matmul_symmetric", shape, x, direction)
            rows += timed(place, {OURS: ours, "torch": theirs}, device, options)
    return rows


def steps(op, plain, sizes, products, device, options):
    """Forward and backward of a function of several layers; behind its backward the products in it, bare."""
    rows = []
    for shape in of_shapes(device, options):
        tensors = leaves(device, *sizes(*shape))
        contenders = torch_contenders(getattr(warpsmith, op), plain, options)
        grads = torch.randn_like(plain(*tensors))

        def step_of(fn, tensors=tensors, grads=grads):
            def step():
                for t in tensors:
                    t.grad = None
                fn(*tensors).backward(grads)

            return step

        def backward_of(fn, tensors=tensors, grads=grads):
            out = fn(*tensors)
            return lambda: torch.autograd.grad(out, tensors, grads, retain_graph=True)

        spin = {"spin_cycles": SPIN_CYCLES} if device == "cuda" else {}
        for direction, made in (("forward + backward", step_of), ("backward", backward_of)):
            calls = {name: made(fn) for name, fn in contenders.items()}
            if made is backward_of:
                pairs = products(grads, *(t.detach() for t in tensors))
                calls[PRODUCT] = lambda pairs=pairs: [torch.mm(*pair) for pair in pairs]
            place = cell_of(op, shape, tensors[0], direction)
            rows += timed(place, calls, device, options, not_rivals=(YARDSTICK, PRODUCT), **spin)
    return rows


def products_of_mlp(dy, x, w1, b1, w2, b2):
    h = torch.randn(len(x), len(w1), device=x.device).to(x.dtype)
    return (dy, w2), (dy.t(), h), (h, w1), (h.t(), x)


def products_of_gated(dy, x, gate, up):
    return (dy, gate), (dy, up), (dy.t(), x), (dy.t(), x)


HOST_SHAPE = (16, 64, 64)


def host(name, ours, device, options):
    """A linear layer beside torch's. On a GPU the host's part alone; on the CPU the (tiny) computation is part of it.
    Parameters, whose casts `scaled_linear` keeps."""
    m, k, n = HOST_SHAPE
    tensors = leaves(device, (m, k), (n, k), (n,))
    rows = []
    for grad in (False, True):
        x, weight, bias = (torch.nn.Parameter(t.detach(), requires_grad=grad) for t in tensors)
        forward = {
            OURS: lambda a=(x, weight, bias): ours(*a),
            "torch": lambda a=(x, weight, bias): F.linear(*a),
        }
        dy = torch.randn(m, n, device=device).to(x.dtype)
        place = cell_of(name, HOST_SHAPE, x)
        rows += host_rows(place, forward, (x, weight, bias) if grad else (), dy, options)
    return rows


def plain_mlp(x, w1, b1, w2, b2):
    return F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)


def plain_gated(x, gate_weight, up_weight):
    return F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight)


OPS = {
    "linear": functools.partial(forward, "linear", None),
    "linear_gelu_tanh": functools.partial(forward, "linear_gelu_tanh", "gelu_tanh"),
    "linear_main_grad": main_grad,
    "linear_own": functools.partial(own, "linear_own", products_of),
    "linear_siblings": siblings,
    "matmul_symmetric": symmetric,
    "linear_host": functools.partial(host, "linear", warpsmith.linear),
    "mlp": functools.partial(
        steps, "mlp", plain_mlp, lambda m, k, f: ((m, k), (f, k), (f,), (k, f), (k,)), products_of_mlp
    ),
    "gated_linear": functools.partial(
        steps, "gated_linear", plain_gated, lambda m, k, f: ((m, k), (f, k), (f, k)), products_of_gated
    ),
}
