"""Bugs planted in real kernels and launchers, each with the test that must fail. A bug is here because all passed once.

    python tools/sim/kernel_bugs.py            # all, one after the other
    python tools/sim/kernel_bugs.py newton     # those whose name contains this

A bug changes copies of files; the sources that include them are compiled against the copies, in the plain build, and
the named checks of a law run on the simulated kernels until the first failure.
tests/test_planted_bugs.py does it too.
Bugs of a family that have a `switch` share a build, in which a variable of the environment names the one that is there.
Bugs of the machine's own checks are in tests/sim/planted_*.cpp, where a bug costs no compilation.
"""

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import library

import build


@dataclass(frozen=True)
class Bug:
    name: str
    family: str  # empty: of several
    file: str  # below csrc
    changes: tuple[tuple[str, str], ...]  # text that occurs once in the file, and what takes its place
    test: str  # of pytest --sim
    noticed_as: str  # part of what the test prints
    variant: str = library.PLAIN  # ccache knows it, unlike a build that counts
    machine: str = "sm90"  # one of library.MACHINES
    also: tuple[tuple[str, str, str], ...] = ()  # of other files: the file, text, and what takes its place
    switch: int = 0  # its number among the bugs of its family that share a build; 0: it has a build of its own

    def files(self) -> list[Path]:
        return [build.ROOT / "csrc" / name for name in (self.file, *(name for name, _, _ in self.also))]

    def texts(self) -> dict[Path, str]:
        """The changed files."""
        if self.switch:
            return _switched([bug for bug in BUGS if bug.switch and bug.family == self.family])
        found: dict[Path, str] = {}
        for name, old, new in (*((self.file, *change) for change in self.changes), *self.also):
            file = build.ROOT / "csrc" / name
            text = found.get(file) or file.read_text()
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: '{old}' occurs {text.count(old)} times in {file}")
            found[file] = text.replace(old, new)
        return found


SWITCH = "WARPSMITH_PLANTED_BUG"  # a variable of the environment: the number of the bug that is there
DECLARATION = f"""#ifndef {SWITCH}
#define {SWITCH}
#include <cstdlib>
inline bool planted(int bug) {{
  static const char* const number = std::getenv("{SWITCH}");
  static const int on = number != nullptr ? std::atoi(number) : 0;
  return bug == on;
}}
#endif
"""


def _switched(bugs: Iterable[Bug]) -> dict[Path, str]:
    """The files with all of the bugs in them. In a text, `@` ends the part that only says where it is."""
    edits: dict[Path, list[tuple[int, str, str]]] = {}
    for bug in bugs:
        file = build.ROOT / "csrc" / bug.file
        whole = file.read_text()
        for text, new in bug.changes:
            where, _, old = text.rpartition("@")
            if whole.count(where + old) != 1:
                raise ValueError(f"{bug.name}: '{text}' occurs {whole.count(where + old)} times in {file}")
            asked = f"::planted({bug.switch})"
            both = f"if ({asked}) {{ {new} }} else {{ {old} }}" if old.endswith(";") else f"({asked} ? {new} : {old})"
            edits.setdefault(file, []).append((whole.index(where + old) + len(where), old, both))
    found = {}
    for file, of_file in edits.items():
        text = file.read_text()
        first = "#pragma once\n" if "#pragma once\n" in text else '#include "'
        for at, old, both in sorted(of_file, reverse=True):  # the last first, so that the places of others stay
            text = text[:at] + both + text[at + len(old) :]
        declared = f"{first}{DECLARATION}" if first.endswith("\n") else f"{DECLARATION}{first}"
        found[file] = text.replace(first, declared, 1)
    return found


BUGS: tuple[Bug, ...] = (
    Bug(
        "proxy_fence_before_a_bulk_load_dropped",
        "cross_entropy",
        "kernels/cross_entropy/forward.cuh",
        (("device::fence_async_shared();", ""),),
        "tests/ops/test_cross_entropy_rows.py -k 'sim- and in_turn'",
        "bulk load: overwrites shared memory that ordinary stores wrote",
    ),
    Bug(
        "cluster_start_barrier_dropped",
        "norm",
        "kernels/norm/forward.cuh",
        (
            ("if constexpr (S == Scope::cluster) device::cluster_arrive();", ""),
            ("if constexpr (S == Scope::cluster) device::cluster_wait();", ""),
        ),
        "tests/ops/test_norm_residual.py -k 'sim- and error_law and 1x16392'",
        "that block has not started",
    ),
    Bug(
        "int_offset_of_an_output",
        "norm",
        "kernels/norm/batches.cuh",
        (
            (
                "int64_t element = first_row * p.columns + lane_column;",
                "int element = static_cast<int>(first_row * p.columns + lane_column);",
            ),
        ),
        "tests/ops/test_norm.py -k 'sim- and far_rows and RmsNorm and 3x1032'",
        "Fatal Python error",
    ),
    Bug(
        "alignment_of_weight_and_bias_not_looked_at",
        "norm",
        "kernels/norm/norm.cu",
        (
            (
                "on_16_bytes(p.residual_out) && on_16_bytes(p.weight) && on_16_bytes(p.bias)",
                "on_16_bytes(p.residual_out)",
            ),
        ),
        "tests/ops/test_norm.py -k 'sim- and layout and RmsNorm and weight_misaligned'",
        "misaligned address",
    ),
    Bug(
        "found_inf_ignored_with_amsgrad",
        "optim",
        "kernels/optim/step.cuh",
        (
            (
                "if (p.found_inf && *p.found_inf != 0.0f) return;",
                "if (kMost != 0b111 && p.found_inf && *p.found_inf) return;",
            ),
        ),
        "tests/optim/test_kernels.py -k 'repeats_of_steps and amsgrad or repeats_of_steps and full'",
        "test_repeats_of_steps_and_of_skipped_ones",
    ),
    Bug(
        "end_of_a_sequence_taken_as_inside",
        "rope",
        "kernels/rope/rotary.cuh",
        (("token < device::load(p.cu_seqlens + entry + 1)", "token <= device::load(p.cu_seqlens + entry + 1)"),),
        "tests/ops/test_rope.py -k 'sim- and become_nan'",
        "test_positions_that_the_host_does_not_know_become_nan",
    ),
    Bug(
        "a_turn_enters_one_batch_entry_at_most",
        "rope",
        "kernels/rope/qk_norm_backward.cuh",
        (("while (asked.index >= p.shape.tokens", "if (asked.index >= p.shape.tokens"),),
        "tests/ops/test_rope.py -k 'sim- and error_law and TestQkNormRope and 250x1'",
        "grad_q: error",
        machine="sm90_alone",
    ),
    Bug(
        "stride_of_tokens_not_looked_at",
        "rope",
        "kernels/rope/rope.h",
        (("on_16_bytes(h.token_stride, dtype) && ", ""),),
        "tests/ops/test_rope.py -k 'sim- and layout and TestRope and grad_k_out_odd_stride_1'",
        "misaligned address",
    ),
    Bug(
        "last_vectors_of_a_turn_end_behind_the_tensor",
        "linear_loss",
        "kernels/linear_loss/finish.cuh",
        (("i + (kFinishUnroll - 1) * step + N <= p.count;", "i + (kFinishUnroll - 1) * step < p.count;"),),
        "tests/ops/test_linear_loss_parts.py -k what_lies_behind",
        "test_what_lies_behind_a_gradient_stays",
    ),
    Bug(
        "alignment_of_rows_by_their_length",
        "linear",
        "kernels/linear/linear.cu",
        (("on_16_bytes(p.x_stride, p.dtype)", "on_16_bytes(p.columns, p.dtype)"),),
        "tests/ops/test_linear.py -k 'sim- and error_law and 150x48 and padded_rows'",
        "misaligned address",
    ),
    Bug(
        "alignment_of_rows_by_the_first",
        "activation",
        "common/alignment.h",
        (("(!base || rows <= 1 ||", "(!base || rows >= 0 ||"),),
        "tests/ops/test_activation_biased.py -k 'sim- and layout and grad_y_padded_rows'",
        "misaligned address",
    ),
    Bug(
        "newton_step_dropped",
        "norm",
        "kernels/norm/row.cuh",
        (("return error == error ? fmaf(0.5f * y, error, y) : y;", "return error == error ? y : y;"),),
        "tests/ops/test_norm.py -k 'sim- and right_to_a_last_place'",
        "test_rstd_is_right_to_a_last_place",
    ),
    Bug(
        "product_not_rounded_by_name",
        "cross_entropy",
        "kernels/cross_entropy/row.cuh",
        (("__fmul_rn(zero, x.s)", "zero * x.s"),),
        "tests/ops/test_cross_entropy_rows.py -k 'sim- and rows_that_are_hard'",
        "test_entropy_of_rows_that_are_hard",
        variant="tsan",
    ),
    Bug(
        "sums_of_threads_over_rows_still_read",
        "group_norm",
        "kernels/group_norm/backward.cuh",
        (("device::copy_async_wait<0>();\n  }\n  __syncthreads();", "device::copy_async_wait<0>();\n  }"),),
        "tests/ops/test_group_norm.py -k 'sim- and error_law and 2x9x40x16'",
        "data race",
        variant="tsan",
    ),
)


# Launchers that ask the device what it is, not what code runs on it: run as code of sm_80 on a device of sm_90, the
# launch is refused. Where the refusal is gone as well, the kernel's waits are compiled out, and its results are wrong.
LAUNCHERS = {
    "norm": ("kernels/norm/norm.cu", "= device.code_capability;", "= 90;",
             "tests/ops/test_norm.py -k 'sim- and error_law and LayerNorm and 1x16392'"),
    "cross_entropy": ("kernels/cross_entropy/cross_entropy.cu", "device.code_capability,", "90,",
                      "tests/ops/test_cross_entropy.py -k 'sim- and error_law and 7x4099'"),
    "activation": ("device/launch.h", "programmatic_dependent = code >= kSm90;", "programmatic_dependent = true;",
                   "tests/ops/test_activation_biased.py -k 'sim- and error_law and 300x24'"),
}  # fmt: skip
REFUSAL = ("device/launch.h", "if (code_capability >= kSm90) return {};", "if (code_capability) return {};")
BUGS += tuple(
    Bug(
        f"launcher_asks_the_device_and_{'is_refused' if refused else 'launches'}",
        family,
        file,
        ((old, new),),
        test,
        "expected code of sm_90 or newer for" if refused else "",
        machine="sm80",
        also=() if refused else (REFUSAL,),
    )
    for family, (file, old, new, test) in LAUNCHERS.items()
    for refused in (True, False)
)


# Attention's, all in one build: text, or where@text, and what takes its place. The first twenty are what can go wrong
# in a pipeline of TMA, wgmma and warpgroups with roles.
LAW = "tests/ops/test_attention.py -k 'sim-{}'"
RINGS = LAW.format("error_law and 1x33x6x72")  # several tiles a multiprocessor, several blocks a ring
EDGES = LAW.format("error_law and bfloat16 and (113x1x32 or seqlen_k_192)")
GROWTH = LAW.format("error_law and bfloat16 and growth_300")  # maxima outgrow the base
CONSUMER, PIPELINE = (f"kernels/attention/hopper/forward_sm90_{part}.cuh" for part in ("consumer", "pipeline"))
NOT_ARRIVED = "before the bulk copy into it has arrived"
ATTENTION: tuple[tuple[str, str, tuple[tuple[str, str], ...], str, str], ...] = (
    ("scores_not_waited_for", CONSUMER, (("device::wgmma_wait<1>();", ""),), RINGS, NOT_ARRIVED),
    ("output_wait_too_weak", CONSUMER,
     (("shared.scratch);\n    @device::wgmma_wait<0>();", "device::wgmma_wait<1>();"),), RINGS, NOT_ARRIVED),
    ("no_wgmma_fence", CONSUMER, (("shared.block(stage), 16, 1024);\n    @device::wgmma_fence();", ""),), RINGS,
     "begins with wgmma_fence()"),
    ("not_committed", CONSUMER, (("i * 16 * kPanelRowBytes), true);\n    @device::wgmma_commit();", ""),), RINGS,
     NOT_ARRIVED),
    ("wrong_parity", CONSUMER, (("shared.block_full + stage, @ring.parity", "ring.parity ^ 1"),), RINGS, NOT_ARRIVED),
    ("half_the_bytes", PIPELINE,
     (("mbarrier_arrive_expect(full, @tile.block_bytes()", "tile.block_bytes() / 2"),), RINGS, NOT_ARRIVED),
    ("no_empty_arrival", CONSUMER,
     (("if (lane == 0) device::mbarrier_arrive(shared.block_empty + stage);",
       "if (lane == 0 && warp != 3) device::mbarrier_arrive(shared.block_empty + stage);"),), RINGS, "deadlock"),
    ("released_early", CONSUMER,
     (("multiply_values(values, probabilities);\n    let_next_issue();",
       "release_block(values); multiply_values(values, probabilities); let_next_issue();"),
      ("shared.scratch);\n    device::wgmma_wait<0>();\n    device::hold(o);\n    @release_block(values);", "")), RINGS,
     NOT_ARRIVED),
    ("stage_reused_early", PIPELINE,
     (("device::mbarrier_wait(shared.block_empty + stage, parity ^ 1);", ""),), RINGS, "more arrivals than"),
    ("values_before_keys", PIPELINE,
     (("load_block(k, t, visit);\n      load_block(v, t, visit - 1);",
       "load_block(v, t, visit - 1); load_block(k, t, visit);"),), RINGS, "out: error"),
    ("wrong_swizzle", CONSUMER,
     (("k = device::wgmma_descriptor(@Swizzle::bytes128", "Swizzle::bytes64"),), RINGS, "out: error"),
    ("probabilities_overwritten", CONSUMER,
     (("lazy_step(visit, p0, p1);\n        lazy_step(visit + 1, p1, p0);",
       "lazy_step(visit, p0, p0); lazy_step(visit + 1, p0, p0);"),), RINGS, "out: error"),
    ("no_named_barrier", PIPELINE,
     (("device::named_barrier_wait(store_barrier(queries.stage, group), kStoreThreads);", ""),), RINGS, NOT_ARRIVED),
    ("one_warp_not_at_barrier", CONSUMER,
     (("device::named_barrier_arrive(store_barrier(stage, own_group()), kStoreThreads);",
       "if (warp != 1) device::named_barrier_arrive(store_barrier(stage, own_group()), kStoreThreads);"),), RINGS,
     "more wait at named barrier"),
    ("one_barrier_for_two_stages", PIPELINE, (("return 1 + @stage", "0"),),
     LAW.format("repeats_bitwise and 1x33x12x32"), "FAILED"),
    ("no_proxy_fence", CONSUMER, (("device::fence_async_shared();", ""),), RINGS, "without fence_async_shared()"),
    ("store_not_waited_for", PIPELINE,
     (("device::bulk_commit();\n      @device::bulk_wait_read<0>();", ""),), RINGS, "bulk_wait_read() is missing"),
    ("registers_kept", "kernels/attention/hopper/forward_sm90.cuh",
     (("device::decrease_registers<tile.producer_registers()>();", ""),), RINGS, "deadlock"),
    ("no_mask", CONSUMER, (("mask_scores(s, p.window, own_query(), m.first_key, lane, m.shift, m.keys);", ""),), RINGS,
     "lse: error"),
    ("not_rescaled", CONSUMER, (("finish_step(values);\n    @rescale(factor);", ""),), EDGES, "out: error"),
    ("outgrown_not_rescaled", CONSUMER, (("if (outgrown) rescale(factor);", ""),), GROWTH, "out: error"),
    ("raised_not_rescaled", CONSUMER, (("if (raised) rescale(factor);", ""),), GROWTH, "out: error"),
    ("mask_one_key_late", "kernels/attention/mask.cuh", (("min(keys, diagonal + @w.right", "w.right + 1"),), EDGES,
     "out: error"),
    ("dq_buffer_reused_early", "kernels/attention/hopper/backward_sm90_pipeline.cuh",
     (("device::bulk_commit();\n      @device::bulk_wait_read<0>();", ""),), EDGES, "grad_q: error"),
    ("unseen_keys_as_wide_as_q", "kernels/attention/backward_rows.cuh",
     (("p.dv_strides, @p.head_dim_v", "p.head_dim"),), LAW.format("error_law and dim_v_104"), "grad_v: error"),
    ("last_sequences_of_many_left_out", "kernels/attention/scheduler.cuh",
     (("share = @(sequences + kThreads - 1) / kThreads", "max(sequences / kThreads, 1)"),),
     "tests/ops/test_attention_varlen.py -k 'sim- and empty_sequences'", "change_no_bit"),
)  # fmt: skip
# One tensor of several laid out by itself; gradients of some inputs alone.
BINDINGS = (
    ("sin_taken_to_lie_as_cos", "rope.cpp", "as_they_lie && @in.cos.stride(i) == in.sin.stride(i)", "true",
     "test_rope.py -k 'sim- and layout and TestRope and sin_'", "q_out: error"),
    ("rows_of_dresidual_out_as_those_of_dy", "norm.cpp", "p.dresidual_out_stride = dresidual_out->stride;",
     "p.dresidual_out_stride = dy.stride;", "test_norm_residual.py -k 'sim- and layout and grad_residual_out'",
     "grad_x: error"),
    ("dresidual_alone_gets_nothing", "norm.cpp", "in.want_dx || (one_for_both && @in.want_dresidual", "false",
     "test_norm_residual.py -k 'sim- and random_cases'", "holds"),
    ("dbias_alone_behind_its_memory", "norm.cpp", "base + @(sums - 1)", "1",
     "test_norm.py -k 'sim- and (needs_input_grad or random_cases) and LayerNorm'", "Fatal Python error"),
    ("pixels_that_lie_apart_taken_as_they_are", "support/pixels.h", "else if (@t.stride(i) != next", "false",
     "test_batch_norm.py -k 'sim- and layout and x_odd_stride'", "error"),
    ("strided_gradient_of_lse_read_in_a_row", "attention.cpp", "if (dlse) dlse = as_contiguous(*dlse, op);", ";",
     "test_attention.py -k 'sim- and layout and grad_lse'", "error"),
    ("strided_gradient_of_losses_read_in_a_row", "cross_entropy.cpp", "dloss = @as_contiguous(dloss_any)", "dloss_any",
     "test_cross_entropy.py -k 'sim- and error_law and grad_loss_every_second'", "grad_logits: error"),
    ("strided_running_statistics_not_written", "batch_norm.cpp", "if (@!to.is_contiguous()", "false",
     "test_wrong_tensors.py -k 'lie_apart and batch_norm_forward'", "test_each_tensor"),
    ("saved_logits_read_in_a_row", "linear_loss_log_prob.cpp", "logits = @as_contiguous(logits, kBackward)", "logits",
     "test_wrong_tensors.py -k 'lie_apart and linear_log_prob_backward'", "test_each_tensor"),
    ("memory_for_sums_that_nobody_needs", "batch_norm.cpp", "if (@p.needs_sums()", "true",
     "test_batch_norm.py -k 'sim- and allocated'", "bytes allocated"),
)  # fmt: skip
# Of several families, all in one build.
SEVERAL = (
    ("offset_added_to_a_weight_that_is_not_there", "norm/row.cuh", "w.at[k] = @kOffset && base", "kOffset",
     "ops/test_norm.py -k 'sim- and error_law and weight_False-weight_offset'", "grad_x: error"),
    ("last_of_equal_logits", "cross_entropy/problem.cuh", "place = @element<T>(held, n) == top",
     "place == 0 && element<T>(held, n) == top", "ops/test_cross_entropy.py -k test_stats", "test_stats"),
    ("sums_of_slices_not_added", "tiles/sum_partials.cuh",
     "from_float<W>(@add ? device::to_float(device::load(sums + column)) + total : total", "total",
     "ops/test_linear_loss.py -k 'sim- and error_law and 31200'", "grad_bias: error"),
    ("mask_of_the_first_vector", "batch_norm/normalize.cuh", "p.mask + @row * t.vectors + at.vector", "row * t.vectors",
     "ops/test_batch_norm.py -k 'sim- and error_law and 24-float32-residual_True-activation_relu'", "grad_x: error"),
    ("short_turn_added_as_a_whole_one", "tiles/pixels.cuh", "kWhole || @u < rows", "true",
     "ops/test_batch_norm.py -k many_turns", "test_few_multiprocessors"),
    ("squares_beyond_float_stay_infinite", "batch_norm/statistics.cuh", "beyond = @beyond || !is_finite(square)",
     "false", "ops/test_batch_norm.py -k 'squares and sim'", "test_squares"),
    ("relu_computed_again_without_the_bias", "batch_norm/backward.cuh", "at.column, @p.relu && !p.mask", "false",
     "ops/test_batch_norm.py -k 'sim- and error_law and 24-float32-activation_relu'", "grad_weight: error"),
    ("scales_of_the_terms_before", "linear/hopper/product_sm90_float8.cuh", "read_block_scales(@block + 1", "block",
     "ops/test_linear_scaled.py -k 'sim- and ByOwn and error_law and 20x272'", "error"),
    ("column_scales_of_the_first_stage", "linear/hopper/product_sm90_float8.cuh",
     "shared.block_scales + @ring.stage * tile.columns", "0",
     "ops/test_linear_scaled.py -k 'sim- and ByOwn and error_law and 144x32'", "error"),
    ("a_square_for_all_columns", "linear/hopper/product_sm90_float8.cuh",
     "p.b_scale + int64_t{@now.column / tile.columns", "0",
     "ops/test_linear_scaled.py -k 'sim- and ByOwn and error_law and 20x272'", "error"),
    ("last_of_equal_elements", "max_pool/forward.cuh", "larger = (@x > value[k]", "x >= value[k]",
     "ops/test_max_pool.py -k 'equal_to_torch and sim and dtype0'", "test_equal_to_torch"),
    ("last_number_of_a_nan_lost", "max_pool/forward.cuh", "(x > value[k]) | @(x != x)", "false",
     "ops/test_max_pool.py -k 'equal_to_torch and sim and dtype1'", "test_equal_to_torch"),
    ("number_of_a_pixel_in_the_padding", "max_pool/forward.cuh", "last = largest_of(rows[0], @h < 0 ? K : 0", "0",
     "ops/test_max_pool.py -k 'equal_to_torch and sim and dtype2'", "test_equal_to_torch"),
    ("pixels_of_padding_are_zeros", "max_pool/forward.cuh", "to[c] = @lowest<T, N>()", "Packed<T, N>{}",
     "ops/test_max_pool.py -k 'equal_to_torch and sim and dtype0'", "test_equal_to_torch"),
    ("index_of_the_first_vector", "max_pool/backward.cuh",
     "index_row = Indices<N>::at(p.index, first * vectors + @at.vector", "0",
     "ops/test_max_pool.py -k 'sim- and error_law and 24-bfloat16'", "grad_x: error"),
    ("last_window_of_a_row_left_out", "max_pool/backward.cuh", "within(left + c, @p.out_width", "p.out_width - 1",
     "ops/test_max_pool.py -k 'sim- and error_law and 9x10x20-float32'", "grad_x: error"),
    ("last_block_of_a_set_left_out", "group_norm/place.cuh", "blocks; block < @blocks", "max(1, blocks - 1)",
     "ops/test_group_norm.py -k blocks_of_a_set", "test_error_law_of_blocks"),
    ("sums_of_a_set_read_before_all_are_there", "group_norm/forward.cuh", "device::wait_for_previous_kernel();", ";",
     "ops/test_group_norm.py -k blocks_of_a_set", "before wait_for_previous_kernel()"),
    ("second_group_of_a_vector_taken_for_its_first", "group_norm/forward.cuh", "before = @i == 0", "false",
     "ops/test_group_norm.py -k 'sim- and error_law and 40-bfloat16'", "output: error"),
    ("reciprocal_of_a_product_beyond_float", "group_norm/silu.cuh", "within && @product < 0x1p126f", "true",
     "ops/test_group_norm.py -k 'far_below_zero and sim'", "test_silu_far_below"),
    ("silu_computed_again_without_the_bias", "group_norm/backward.cuh", "(bias, @kSilu ? p.bias : nullptr", "nullptr",
     "ops/test_group_norm.py -k 'sim- and error_law and 24-float32-groups_2-affine_bias'", "grad_bias: error"),
    ("terms_of_several_blocks_mixed", "cross_entropy/totals.cuh", "partials + @i * K + k", "k * count + i",
     "ops/test_cross_entropy.py -k 'several_blocks and sim'", "test_stats_of_rows"),
    ("gradient_staged_over_the_result", "softmax/softmax.cuh", "to_dy = schedule.slots * @slot_step", "0",
     "ops/test_softmax.py -k 'sim- and error_law and 7x257-float32'", "grad_x: error"),
    ("sums_of_a_smaller_maximum_kept", "softmax/softmax.cuh", "sums.rebase(top);", "sums.m = top;",
     "ops/test_softmax.py -k rows_longer", "test_rows_longer"),
    ("second_half_of_a_square_left_out", "quantize/tiles.cuh", "turns() const { return rows_here > @kTurnRows", "kTile",
     "ops/test_quantize.py -k 'sim- and error_law and 144x104-bfloat16-scaling_row-transpose_only'", "error"),
    ("scales_of_columns_taken_for_powers_of_two", "quantize/tiles.cuh", "return @!has_exact_reciprocal(scale)",
     "by_rows && !has_exact_reciprocal(scale)", "ops/test_quantize_values.py -k 'near_ties and sim'", "test_quotients"),
    ("codes_behind_the_end_are_no_zeros", "optim/step_8bit.cuh", "is_signed<F>(s) ? 127 : 0", "0",
     "optim/test_eight_bit.py -k behind_the_last", "test_what_is_behind"),
    ("a_warp_of_several_rows_raises_one", "optim/cast_rows.cuh", "within = @row % (32 * N) == 0", "true",
     "optim/test_fp8_weights.py -k 'bytes_and_scales and None-torch.bfloat16'", "test_bytes_and_scales"),
    ("rows_of_later_turns_by_another_stride", "norm/batches.cuh", "passed_step = units * @p.dresidual_out_stride",
     "p.dy_stride", "ops/test_norm_residual.py -k 'sim- and layout and vectors_apart'", "grad_x: error"),
    ("infinity_in_an_odd_place", "cross_entropy/row.cuh", "isnan(@weighted[0] + weighted[1]", "weighted[0]",
     "ops/test_linear_loss.py -k 'sim- and edge_value and LogProb'", "entropy: error"),
    ("infinite_x_times_no_mean", "batch_norm/backward.cuh", "const float d = @p.means", "p.affine.rstd",
     "ops/test_batch_norm.py -k 'sim- and edge_value and training_False-activation'", "grad_x: error"),
)  # fmt: skip
BUGS += tuple(
    Bug(name, "attention", file, changes, test, noticed_as, library.PLAIN, switch=number)
    for number, (name, file, changes, test, noticed_as) in enumerate(ATTENTION, 1)
)
for number, (name, file, old, new, test, noticed_as) in enumerate(SEVERAL, 1):
    path = file if file.startswith("tiles/") else f"kernels/{file}"
    BUGS += (Bug(name, "", path, ((old, new),), f"tests/{test}", noticed_as, library.PLAIN, switch=number),)
BUGS += tuple(
    Bug(name, "bindings", f"bindings/{file}", ((old, new),), f"tests/ops/{test}", noticed_as, library.PLAIN, switch=n)
    for n, (name, file, old, new, test, noticed_as) in enumerate(BINDINGS, 1)
)


@cache
def _switched_library(family: str) -> Path:
    """With all the bugs of a family that have switches."""
    bug = next(bug for bug in BUGS if bug.switch and bug.family == family)
    folder = build.BUILD / f"bugs-{family}"
    with build.locked(folder):
        objects = build.changed_objects(parts(bug), bug.texts(), folder, family)
        return library.link(objects, bug.variant, folder / "libwarpsmith_sim.so")


def parts(bug: Bug) -> Iterable[build.Part]:
    """Of the library in which the bug is looked for."""
    return library.parts(bug.variant, bug.family)


def noticed(bug: Bug) -> tuple[bool, subprocess.CompletedProcess[str]]:
    command = ["-x", *shlex.split(bug.test)]
    if bug.switch:
        result = library.law(_switched_library(bug.family), command, 300, **{SWITCH: str(bug.switch)})
    else:
        folder = build.BUILD / f"bug-{bug.name}"  # always the same, so that ccache knows the objects again
        with build.locked(folder):
            try:
                objects = build.changed_objects(parts(bug), bug.texts(), folder, bug.family)
                made = library.link(objects, bug.variant, folder / "libwarpsmith_sim.so")
                result = library.law(made, command, 300, folder, bug.machine, bug.variant)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    printed = result.stdout + result.stderr
    return result.returncode not in library.HOLDS and bug.noticed_as in printed, result


def main() -> int:
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    survivors = 0
    for bug in BUGS:
        if part not in bug.name:
            continue
        started = time.perf_counter()
        good, result = noticed(bug)
        survivors += not good
        spent = time.perf_counter() - started
        print(
            f"{'noticed ' if good else 'SURVIVED'} {bug.name} [{bug.family} {bug.variant}] {spent:.1f} s",
            flush=True,
        )
        if not good:
            print((result.stdout + result.stderr)[:2000])
    return survivors != 0


if __name__ == "__main__":
    sys.exit(main())
