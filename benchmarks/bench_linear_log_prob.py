"""linear_log_prob: forward and backward of the log-probability together, beside torch and torch.compile, with and
without saved logits; and the memory each takes.

Floor: 8 MVH FLOP, 6 with saved logits. Rows named "peak memory" have megabytes above the inputs in place of a time.
"""

import functools

import torch
import torch.nn.functional as F
import warpsmith

from benchmarks.bench_linear_cross_entropy import CPU_SHAPES, GPU_SHAPES, rows_of
from benchmarks.cells import CPU_THREADS, compiled, torch_contenders


def mean_of_first(fn):
    return lambda hidden, weight, target: fn(hidden, weight, target)[0].mean()


def plain(hidden, weight, target):
    return F.linear(hidden, weight).float().log_softmax(-1).gather(-1, target.unsqueeze(-1)).mean()


def run(device, options):
    shapes = options.shapes(device, GPU_SHAPES, CPU_SHAPES, (32, 16, 64))
    threads = torch.get_num_threads()
    torch.set_num_threads(CPU_THREADS)
    rows = []
    try:
        for shape in shapes:
            contenders = torch_contenders(mean_of_first(warpsmith.linear_log_prob), plain, options)
            if "torch.compile" in contenders:
                contenders["torch.compile"] = compiled(plain)
            saving = functools.partial(warpsmith.linear_log_prob, save_logits=True)
            contenders["warpsmith, saved logits"] = mean_of_first(saving)
            rows += rows_of("linear_log_prob", shape, contenders, device, options)
    finally:
        torch.set_num_threads(threads)
    return rows
