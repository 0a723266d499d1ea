"""Bugs planted in the Python between a user's line and a kernel, and in the build, one of each class that once passed
all tests: the test of its class fails."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import warpsmith

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "sim"))
import forked  # noqa: E402

PACKAGE = Path(warpsmith.__file__).parent


class Bug(NamedTuple):
    """file: below python/warpsmith, or of the build. old: occurs in it once. test: of pytest, below tests."""

    name: str
    file: str
    old: str
    new: str
    test: str


BUGS = (
    Bug("an inner no_sync ends the outer one", "distributed/sharded/optimizer.py",
        "self._shards.synchronizing = before", "self._shards.synchronizing = True",
        "distributed/test_sharded_optimizer.py -k no_sync_within"),
    Bug("zeros of an unused y have the residual's dtype", "ops/_norm.py",
        "torch.zeros_like(saved.residual_out, dtype=saved.x_dtype)", "torch.zeros_like(saved.residual_out)",
        "ops/test_norm_residual.py -k one_output_alone"),
    Bug("an upstream gradient's second derivative is lost", "_core/library.py",
        "(*ctx.saved_tensors, *grads)", "ctx.saved_tensors",
        "ops/test_cross_entropy.py -k cpu-second_derivative"),
    Bug("a skipped step keeps the cast of before an edit", "ops/_scaled_linear.py",
        "_current(weight, BY_ROWS, True, False, stream)", "kept", "optim/test_fp8_weights.py -k skipped_step_an_edit"),
    Bug("an average stays in a step without gradients", "optim/_multi_tensor.py",
        "self._finish(None, False)", "pass", "optim/test_fuse.py -k 'fused_is and cpu'"),
    Bug("a refused load changes extra", "train/checkpointer.py",
        "        if optimizer is not None:\n            check_optimizer(",
        "        self.extra = parts['extra']\n        if optimizer is not None:\n            check_optimizer(",
        "train/test_checkpoint_parts.py"),
    Bug("interleaved is dropped beside qk_norm", "nn/_attention.py",
        "eps=self.eps, interleaved=self.interleaved", "eps=self.eps", "nn/test_attention.py -k interleaved"),
    Bug("a loaded state meets the gradients of a step before it", "amp/fp8.py",
        "for largest in (mine.x_amax, mine.dy_amax)", "for largest in (mine.x_amax,)",
        "train/test_load_into_used.py -k load_fp8_state"),
    Bug("a second derivative is that of another function", "ops/_linear.py",
        "_layer(x, saved.weight, saved.bias), saved.activation, saved.z)",
        "_layer(x, saved.weight, None), saved.activation, saved.z)", "ops/test_linear.py -k gradcheck"),
    Bug("a schedule keeps what a refused load gave it", "train/checkpoint_parts.py",
        '("sampler", "scaler", "scheduler") and', '("sampler", "scaler") and', "train/test_checkpoint_parts.py"),
    Bug("forward mode has statistics of its own", "ops/_batch_norm.py",
        "squares / (rows - 1))", "squares / rows)", "ops/test_forward_mode.py -k every_mode_alike"),
    Bug("a schedule of parts hands an argument to none", "amp/schedules.py",
        "linear(decay_steps, 0, final)", "linear(decay_steps)", "amp/test_device_lr.py -k goes_down"),
    Bug("one of two old arguments is asked for", "nn/functional.py",
        "if size_average is not None or reduce is not None", "if size_average is not None",
        "nn/test_functional.py -k old_arguments"),
    Bug("ranks are clipped by the norm that is usual", "amp/_gradients.py",
        "of_scaled(p, scale)", "of_scaled(2.0, scale)", "amp/test_ranks.py -k every_way"),
    Bug("eps of Nesterov's momentum is that of the buffer", "optim/muon.py",
        "            eps /= momentum\n", "            pass\n", "optim/test_muon.py -k beside_torchs"),
    Bug("a used scaler keeps its tracker of overflows", "amp/grad_scaler.py",
        "self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)", "pass", "train/test_load_into_used.py"),
    Bug("a fake gradient lies as another weight does", "ops/_linear.py",
        "_new_weight_gradient(a.up_weight, a.x", "_new_weight_gradient(a.gate_weight, a.x",
        "ops/test_linear.py -k 'Gated and cpu-fake_and_meta'"),
    Bug("a schedule of another one forgets the scaler", "amp/device_lr.py",
        "list(scheduler.lr_lambdas), total_steps, scaler)", "list(scheduler.lr_lambdas), total_steps)",
        "test_frame.py -k another_way"),
    Bug("an error that is caught blinds the audit", "train/syncs.py",
        "        finally:\n            self.depth = 0",
        "        except KeyError:\n            raise\n        self.depth = 0",
        "train/test_used_twice.py -k caught_inside"),
    Bug("slopes of each sequence are cut by the heads", "distributed/context/modes.py",
        "alibi[..., own]", "alibi[own]", "distributed/test_context_parallel.py -k every_mode_on_two_ranks"),
    Bug("a patched layer forgets main_grad", "nn/_linear.py",
        "layer.activation is None and not layer.fuse_main_grad", "layer.activation is None",
        "integrations/test_patch_layers.py -k 'options_say and llama'"),
    Bug("0 is taken for the default", "nn/functional.py",
        "-100 if ignore_index is None else ignore_index", "ignore_index or -100",
        "nn/test_functional.py -k zero_is_a_value"),
    Bug("another mode of torch takes the capture that is there", "train/step_inputs.py",
        'torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")', 'torch.is_autocast_enabled("cuda"),',
        "train/test_captured_step.py -k each_mode"),
    Bug("the third save of a step takes the name of the second", "train/checkpoint_folder.py",
        "max(again) + 1", "len(again)", "train/test_checkpointer.py -k again_and_again"),
    Bug("what a state says is not counted from", "distributed/sampler.py",
        "self._drawn = self._begun = state", "self._drawn = state",
        "distributed/test_resumable_sampler.py -k drawn_ahead"),
    Bug("a module overrules the call", "integrations/transformers.py",
        'bool(getattr(module, "is_causal", True)) if is_causal is None else bool(is_causal)',
        'bool(is_causal or getattr(module, "is_causal", True))',
        "integrations/test_transformers.py -k what_a_call_says"),
    Bug("16-bit parameters are copied to be averaged", "optim/ema.py",
        "if i in self._gaps else value", "if i in self._gaps or value.dtype != average.dtype else value",
        "optim/test_ema.py -k copies_no"),
    Bug("heads are copied before they are rotated", "nn/_attention.py",
        "q, k, v = heads.split((self.num_heads, kv_heads, kv_heads), dim=-2)",
        "q, k, v = (t.contiguous() for t in heads.split((self.num_heads, kv_heads, kv_heads), dim=-2))",
        "nn/test_no_copies.py"),
    Bug("a number of float64 is cast under autocast", "ops/_linear.py",
        "t.is_floating_point() and t.dtype != torch.float64 else t", "t.is_floating_point() else t",
        "ops/test_linear.py -k cpu-autocast"),
    Bug("a module keeps an option to itself", "nn/_linear_loss.py",
        "            dw_dtype=self.dw_dtype,\n", "", "nn/test_options.py"),
    Bug("an option that says no is none", "cli/plan.py",
        'k.startswith(part + ".") and v is not None', 'k.startswith(part + ".") and v',
        "distributed/test_plan.py -k an_option"),
    Bug("keys are normed as queries say", "integrations/_attention.py",
        "if fused and eps_of(both[0]) == eps_of(both[1]) else", "if fused else",
        "integrations/test_patch_rows.py -k 'number_of_one and gemma3'"),
    Bug("the host waits for a number that it needs for an error alone", "optim/clip.py",
        "if error_if_nonfinite and not torch.isfinite(norm)", "if not torch.isfinite(norm) and error_if_nonfinite",
        "optim/test_no_waits.py"),
    Bug("an input is kept for a frozen weight", "ops/_linear.py",
        "inputs.x if inputs.weight.requires_grad or inputs.activation != NONE else None", "inputs.x",
        "ops/test_linear_parts.py -k frozen_weight"),
    Bug("a fused step leaves the bytes of its weights", "ops/_scaled_linear.py",
        "stream, steps, training, how", "stream, training, how",
        "ops/test_linear_scaled_values.py -k changed_weight"),
    Bug("a weight that lies elsewhere keeps its bytes", "ops/_scaled_linear.py",
        "kept.pointer != pointer or _is_freed(kept.storage.cdata)", "False",
        "ops/test_linear_scaled_values.py -k 'changed_weight or other_views'"),
    Bug("bytes are kept that the backward can make again", "ops/_scaled_linear.py",
        "made_of = source.tensors()", "pass", "integrations/test_fp8.py -k layer_keeps"),
    Bug("what is made again only where all is, is made again in any case", "ops/_scaled_linear.py",
        " and not source.in_all", "", "integrations/test_fp8.py -k layer_keeps"),
    Bug("a gradient of x goes to what x was before it changed", "ops/_scaled_linear.py",
        "held[0]() is x and held[2] == version", "held[0]() is x",
        "ops/test_linear_scaled_sums.py -k changed_between"),
    Bug("an unused forward keeps its graph", "ops/_scaled_linear.py",
        "weakref.ref(y, let_go)", "weakref.ref(y)",
        "ops/test_linear_scaled_sums.py -k frees_its_graph"),
    Bug("a sum that passes a layer frees what its own backward needs", "ops/_scaled_linear.py",
        "if total is not None and not _keeps_graph():", "if False:",
        "ops/test_linear_scaled_sums.py -k one_by_one"),
    Bug("a layer in FP8 reads the parameters of its conversion", "amp/fp8.py",
        'parameters["weight"] if "weight" in parameters else self.weight',
        'self.__dict__.setdefault("_first", self.weight)', "amp/test_fp8.py -k parameters_that_they_have"),
    Bug("an average that is copied in between two evaluations is not seen", "ops/_scaled_linear.py",
        "if not training and weight.requires_grad:", "if False:",
        "ops/test_linear_scaled_values.py -k swapped_in_by_data"),
    Bug("a frozen teacher keeps its first cast", "ops/_scaled_linear.py",
        "0 if passed and not weight.requires_grad else", "0 if not weight.requires_grad else",
        "ops/test_linear_scaled_values.py -k teacher"),
    Bug("a skipped step enters the history", "amp/fp8.py",
        "torch.where(found_inf.to(amax.device) > 0, history, moved)", "moved",
        "amp/test_fp8.py -k advances_no_history"),
    Bug("a gathered weight is kept in 8 bits", "_core/main_grad.py",
        "return isinstance(_wrapper_of(parameter), FSDPModule)", "return False",
        "amp/test_fp8.py -k 'ranks_train and fsdp'"),
    Bug("what another op gave beside a main_grad stays this rank's", "distributed/gradients/hook.py",
        "            main_grad.add_(gradient)\n", "",
        "distributed/test_main_grad_reduction.py -k rank_order"),
    Bug("a backward behind DDP's reduction stays this rank's", "_core/main_grad.py",
        "and _is_reduced.get(wrapper, False):", "and False:",
        "distributed/test_main_grad_reduction.py -k several_backwards"),
    Bug("a main_grad that was reduced once is taken to be", "_core/main_grad.py",
        'getattr(weight, "main_grad", None) is main_grad', "True",
        "distributed/test_main_grad.py -k outlive"),
    Bug("a module around one that was found is not asked", "_core/main_grad.py",
        "(active is None or active is by) and _wrappers.get(weight) is reducer", "True",
        "distributed/test_main_grad.py -k outlive"),
    Bug("a rank without FP8 layers is not noticed", "distributed/sharded/gradient_shards.py",
        'in_fp8.get(p, "no FP8")', '"no FP8"',
        "amp/test_fp8_ranks.py -k sharded"),
    Bug("a folder keeps the headers that it was configured with", "csrc/cmake/cublas_lt.cmake",
        '"a folder with cublasLt.h" FORCE)', '"a folder with cublasLt.h")',
        "build/test_backend.py -k 'environment_wins'"),
    Bug("class weights are forgotten beside another option", "nn/_cross_entropy.py",
        "class_weight=weight, **options, **ours", "**options, **ours",
        "nn/test_options.py -k 'every_tensor and CrossEntropyLoss'"),
    Bug("a bias starts as what was in memory", "nn/_activation.py",
        "        self.reset_parameters()\n", "", "nn/test_options.py -k 'new_module and BiasGELU'"),
    Bug("torch's dropout is nobody's", "nn/functional.py",
        "        dropout_p=dropout_p,\n    )", "    )", "nn/test_functional.py -k 'sample_inputs and scaled'"),
    Bug("a model's own dropout is left out", "integrations/_parts.py",
        "x = getattr(block, dropout)(x) if hasattr(block, dropout) else x", "pass",
        "integrations/test_patch_rows.py -k 'dropout_is and phi3'"),
    Bug("a note has torch's default dtype", "amp/_record.py",
        "torch.zeros(2, dtype=torch.float32, device=device)", "torch.zeros(2, device=device)",
        "optim/test_no_waits.py -k 'made_is and GradScaler'"),
    Bug("a default is another one", "optim/lion.py",
        "lr: float | Tensor = 1e-4", "lr: float | Tensor = 1e-3", "test_frame.py -k a_default"),
    Bug("a parameter without a state stops a load", "optim/_eight_bit.py",
        "SCALES in state or not names", "SCALES in state", "train/test_load_into_used.py -k SGD"),
    Bug("an op looks at a number of the device", "ops/rope.py",
        'checks.flags("rope", interleaved', 'cos[0, 0].item()\n    checks.flags("rope", interleaved',
        "ops/test_arguments_in_pairs.py -k '[rope]'"),
    Bug("a graph of a gradient lacks a bias without a weight", "ops/_group_norm.py",
        "0.0 if saved.bias is None else", "0.0 if saved.bias is None or saved.weight is None else",
        "ops/test_arguments_in_pairs.py -k 'left_out and group_norm'"),
    Bug("the negative bit is overwritten", "ops/_activation.py",
        "t.is_contiguous() and not t.is_neg()", "t.is_contiguous()", "ops/test_arguments_in_pairs.py -k negative_bit"),
    Bug("what was asked before a load is answered after it", "distributed/sharded/optimizer.py",
        "self._inner.state\n        self._consolidated = None\n\n    def check", "self._inner.state\n\n    def check",
        "train/test_load_into_used.py -k ShardedOptimizer"),
    Bug("a report names the parameters of an earlier step", "amp/grad_scaler.py",
        "if [part.indices for part in known] != [part.indices for part in parts]", "if len(known) != len(parts)",
        "amp/test_overflows.py -k named"),
    Bug("flags are compared on the host", "amp/_gradients.py",
        "here[0] if len(here) == 1 else torch.stack(here).amax()", "max(here)",
        "optim/test_no_waits.py -k 'wait and GradScaler'"),
    Bug("a group of both kinds keeps a value to one", "optim/muon.py",
        'alike = ("weight_decay", ', "alike = (", "optim/test_muon.py -k both_kinds"),
    Bug("a gradient is copied on its way to a kernel", "ops/_norm.py",
        "call_raw(raw_backward, dy, *passed", "call_raw(raw_backward, dy.clone(), *passed",
        "ops/test_arguments_in_pairs.py -k 'on_the_way and add_rms_norm-dense'"),
    Bug("a gradient is made that nobody wants", "ops/_rope.py",
        "wants.q_weight and of_q", "of_q", "ops/test_arguments_in_pairs.py -k 'nobody_wants and qk_norm_rope'"),
    Bug("a scaler launches a copy of its scale", "amp/_kept_table.py",
        "check_table(self._table, p, scale,", "check_table(self._table, p, scale.clone(),",
        "optim/test_no_waits.py -k 'launches and GradScaler'"),
    Bug("equal shapes take the options of another group", "optim/muon.py",
        "alike.setdefault((matrix.group, ", "alike.setdefault((",
        "optim/test_second_turns.py -k 'each_option and Muon'"),
    Bug("a weight of 16 bits is rounded to the other 16", "nn/functional.py",
        "weight.to(torch.float32 if input.dtype in HALVES else input.dtype)", "weight.to(input.dtype)",
        "nn/test_functional.py -k another_dtype"),
    Bug("the time of a second pass is that of the first", "train/prefetcher.py",
        "self._ended = PrefetchStats(), time.perf_counter(), None",
        "_ = PrefetchStats(), time.perf_counter(), None", "train/test_prefetcher.py -k stats"),
    Bug("a gradient of the backward lies in logits that nobody counts as written", "ops/_cross_entropy.py",
        "torch.autograd.graph.increment_version(grad)", "pass",
        "ops/test_cross_entropy_inplace.py -k others_saved"),
    Bug("CUDA's autocast is forgotten in a layer", "integrations/_torch_parts.py",
        " and not functional.is_autocast(x)", "",
        "integrations/test_patch_torch.py -k 'autocast and Encoder and cuda'"),
)  # fmt: skip


def source(bug: Bug) -> Path:
    file = ROOT / "python" / "warpsmith" / bug.file
    return file if file.exists() else ROOT / bug.file


def test_every_bug_finds_its_text() -> None:
    for bug in BUGS:
        assert source(bug).read_text().count(bug.old) == 1, bug.name


def in_turn(bug: Bug) -> pytest.MarkDecorator:
    return pytest.mark.in_turn(source(bug), ROOT / "tests" / shlex.split(bug.test)[0], of=3)


@pytest.mark.parametrize("bug", [pytest.param(b, id=b.name.replace(" ", "_"), marks=in_turn(b)) for b in BUGS])
def test_a_bug_in_glue_is_noticed(bug: Bug, tmp_path: Path) -> None:
    root, file = ROOT, tmp_path / "warpsmith" / bug.file
    if (PACKAGE / bug.file).exists():
        shutil.copytree(PACKAGE, tmp_path / "warpsmith", copy_function=os.symlink)
    else:  # tests of the build look for the sources beside themselves
        root, file = tmp_path, tmp_path / bug.file
        for path in ROOT.glob("[!.]*"):
            if path.name == "tests":
                shutil.copytree(path, root / "tests")
            elif path.name == "csrc":
                shutil.copytree(path, root / "csrc", copy_function=os.symlink)
            else:
                (root / path.name).symlink_to(path)
    text = file.read_text()
    file.unlink()
    file.write_text(text.replace(bug.old, bug.new))
    module, *options = shlex.split(bug.test)
    command = ["-q", "-x", "-p", "no:cacheprovider", f"tests/{module}", *options]
    done = forked.pytest(command, 300, root, {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])})
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-2000:] + done.stderr[-1000:]


def test_the_rooms_are_printed(figure) -> None:
    rooms = Counter(bug.file.split("/")[0] for bug in BUGS)
    figure(
        "bugs planted in Python and the build: "
        + ", ".join(f"{count} in {room}" for room, count in rooms.most_common())
    )
    assert len(rooms) >= 6
