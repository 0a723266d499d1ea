"""The example's model: GPT-2's sizes, causal, and the modules that are not the obvious ones."""

from pathlib import Path

import gpt_model
import pytest
import torch
import train_gpt
from gpt_runs import TINY, recipe


def test_gpt2_preset_is_gpt2_small() -> None:
    s = train_gpt.recipe_of(train_gpt.parse(["--preset", "gpt2-124m"]), train_gpt.Ranks("cpu"))
    assert (s.batch, s.context, s.dtype, s.clip) == (64, 1024, "bfloat16", 1.0)
    with torch.device("meta"):
        model = train_gpt.GPT(s, train_gpt.modules_of("torch"))
    # Embeddings, 12 blocks of 12 * 768^2 weights and 13 * 768 biases and norms, the last norm; the head is tied.
    assert sum(p.numel() for p in model.parameters()) == (50304 + 1024 + 12 * (12 * 768 + 13) + 2) * 768


@pytest.mark.parametrize("preset", ["nano", "gpt2-124m"])
def test_the_model_does_not_see_the_future_and_knows_positions(preset: str) -> None:
    args = train_gpt.parse(["--preset", preset, *TINY, "--vocab", "256"])
    s = train_gpt.recipe_of(args, train_gpt.Ranks("cpu"))
    torch.manual_seed(0)
    model = train_gpt.GPT(s, train_gpt.modules_of("torch"))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
        tokens = torch.randint(256, (1, 32))
        changed = tokens.clone()
        changed[0, 20] += 1 if changed[0, 20] < 255 else -1
        before, after = model.logits(tokens)[0], model.logits(changed)[0]
        swapped = tokens.clone()
        swapped[0, [3, 4]] = swapped[0, [4, 3]]
        assert tokens[0, 3] != tokens[0, 4]
        moved = model.logits(swapped)[0]
    assert torch.equal(before[:20], after[:20])
    assert (before[20:] != after[20:]).any(dim=-1).all()
    assert (before[10:] - moved[10:]).abs().max() > 1e-3  # without positions: rounding, some 1e-6


def test_the_gradients_of_q_k_and_v_are_written_into_one_tensor() -> None:
    """With learned positions nothing stands between the linear layer and attention: nothing is put together."""

    def nodes(kind: str) -> set[str]:
        s = recipe("--preset", "gpt2-124m", "--dtype", "float32", "--vocab", "300", "--tokens", "random")
        run = train_gpt.Run(s, kind, train_gpt.Ranks("cpu"))
        loss = run.model(train_gpt.Data(s, None, run.ranks).batch(0))
        found, open_ = set(), [loss.grad_fn]
        while open_:
            node = open_.pop()
            if node is not None and node not in found:
                found.add(node)
                open_ += [following for following, _ in node.next_functions]
        return {node.name() for node in found}

    of_torch = {"UnbindBackward0", "ScaledDotProductFlashAttentionForCpuBackward0"}
    assert of_torch <= nodes("torch")
    assert not {*of_torch, "StackBackward0", "CatBackward0"} & nodes("warpsmith")


@pytest.mark.gpu
def test_blocks_have_their_bits_without_deterministic_algorithms() -> None:
    """As a resumed run needs it, with the switch of torch off."""
    s = recipe("--preset", "gpt2-124m", "--width", "256", "--heads", "4", "--context", "256")
    torch.manual_seed(0)
    block = gpt_model.Block(s, gpt_model.modules_of("warpsmith")).cuda()
    x, stream = (torch.randn(4, 256, 256, device="cuda", requires_grad=True) for _ in range(2))
    leaves, first = [x, stream, *block.parameters()], None
    assert not torch.are_deterministic_algorithms_enabled()
    for _ in range(20):
        with torch.autocast("cuda", torch.bfloat16):
            y, summed = block(x, stream, None)
        found = torch.autograd.grad((y, summed), leaves, (torch.ones_like(y), torch.ones_like(summed)))
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))


def test_the_stream_may_be_bfloat16(data: Path) -> None:
    flags = ("--preset", "gpt2-124m", "--vocab", "300", "--tokens", "random")
    losses_of = {}
    for stream in ("float32", "bfloat16"):
        s = recipe(*flags, "--stream", stream)
        run = train_gpt.Run(s, "warpsmith", train_gpt.Ranks("cpu"))
        seen: list[torch.dtype] = []
        run.model.blocks[0].mlp_norm.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out[1].dtype))
        batches = train_gpt.Data(s, None, run.ranks)
        losses_of[stream] = [float(run.step(batches.batch(i))) for i in range(3)]
        assert seen == [getattr(torch, stream)] * 3
    assert losses_of["bfloat16"] != losses_of["float32"]
    assert losses_of["bfloat16"] == pytest.approx(losses_of["float32"], rel=5e-3)
