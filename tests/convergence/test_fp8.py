"""Two layers of 64 trained in 8-bit floats on the CPU, beside bfloat16: the loss of each recipe, and its bits."""

import hashlib
import statistics
import subprocess
import sys

import pytest
import torch
import warpsmith
from torch import nn
from torch.nn import functional
from warpsmith.amp import Fp8Recipe
from warpsmith.testing.checks.cuda import no_waits

STEPS, LAST, CLASSES, CONTEXT = 40, 8, 32, 24
RECIPES = {
    "row": Fp8Recipe(),
    "row, wgrad": Fp8Recipe(wgrad="high"),
    "tensor": Fp8Recipe("tensor"),
    "tensor, e5m2": Fp8Recipe("tensor", grad_dtype="e5m2"),
    "delayed": Fp8Recipe("tensor", amax="delayed", history=4),
    "block": Fp8Recipe("block"),
}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mlp_norm = warpsmith.nn.RMSNorm(width), warpsmith.nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = warpsmith.nn.GatedMLP(width, 2 * width)

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1))
        attended = warpsmith.attention(*qkv.unbind(2), causal=True).flatten(-2)
        x = x + self.out(attended)
        return self.mlp(self.mlp_norm(x), x)


class Model(nn.Module):
    def __init__(self, width=64, layers=2):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(CLASSES, width), nn.Linear(width, CLASSES, bias=False)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))

    def forward(self, tokens):
        return self.lm_head(self.blocks(self.embed(tokens)))


def text(step, rows=16):
    """Sequences whose next token is a fixed function of the last one, but for a tenth."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(CLASSES, (rows, CONTEXT + 1), generator=generator)
    for i in range(1, CONTEXT + 1):
        known = (3 * tokens[:, i - 1] + 5) % CLASSES
        tokens[:, i] = torch.where(torch.rand(rows, generator=generator) < 0.9, known, tokens[:, i])
    return tokens


def losses_of(recipe, steps=STEPS, seed=0):
    """Losses, and the hash of all weights at the end."""
    torch.manual_seed(seed)
    model = Model()
    optimizer, done = warpsmith.optim.AdamW(model.parameters(), lr=5e-3), None
    if recipe is not None:
        done = warpsmith.amp.fp8(model, recipe)
        assert len(done.replaced) == 10 and list(done.kept) == ["lm_head"]
    losses = []
    for step in range(steps):
        tokens = text(step)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if done is not None:
            done.update()
        losses.append(loss.item())
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    return losses, digest.hexdigest()


def end(losses):
    return statistics.fmean(losses[-LAST:])


@pytest.fixture(scope="module")
def in_bfloat16():
    return losses_of(None)[0]


@pytest.mark.parametrize("name", RECIPES)
def test_losses_stay_beside_those_of_bfloat16(name, in_bfloat16):
    found, _ = losses_of(RECIPES[name])
    beside = in_bfloat16
    assert end(beside) < 0.5 * beside[0], "nothing was learned in bfloat16"
    assert found != beside, "nothing was cast"
    assert found[0] == pytest.approx(beside[0], rel=2e-2)
    assert abs(end(found) - end(beside)) < 0.01 * end(beside)


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from test_fp8 import RECIPES, losses_of
print(losses_of(RECIPES["delayed"], 50)[1])
"""


def test_three_processes_have_the_same_weights():
    command = [sys.executable, "-c", PROGRAM, str(__file__).rsplit("/", 1)[0]]
    found = {subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout for _ in range(3)}
    assert len(found) == 1 and len(found.pop().strip()) == 64


# ---- on a card


def step_on_a_card(recipe):
    """A whole step, and its state."""
    torch.manual_seed(0)
    model = Model().cuda()
    optimizer, done = warpsmith.optim.AdamW(model.parameters(), lr=3e-3), warpsmith.amp.fp8(model, recipe)

    def step(tokens):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done.update()
        return loss.detach()

    return step, [model, optimizer, done]


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_a_captured_step_is_the_eager_one(name):
    """Casts of weights and delayed scales are in the graph; an evaluation between two replays sees the new weights."""
    if torch.cuda.get_device_capability() != (9, 0) and RECIPES[name].scaling != "tensor":
        pytest.skip("row and block scales run on sm_90 alone")
    found = []
    for captured in (False, True):
        step, state = step_on_a_card(RECIPES[name])
        run = warpsmith.train.CapturedStep(step, state=state, fallback=False) if captured else step
        logits = []
        for i in range(12):
            run(text(i).cuda())
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                logits.append(state[0](text(100).cuda()[:, :-1]))
        found.append([*logits, *(p.detach().clone() for p in state[0].parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
def test_a_step_never_makes_the_host_wait():
    step, _ = step_on_a_card(RECIPES["delayed"])
    tokens = text(0).cuda()
    for _ in range(3):
        step(tokens)
    with no_waits():
        step(tokens)
