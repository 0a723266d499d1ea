"""The model that train_gpt.py trains: a decoder-only transformer, of Warpsmith's modules or of torch's.

Both kinds of modules have the same meaning and the same parameter names, so a checkpoint of one fits the other.
"""

import functools
import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Angles = tuple[Tensor, Tensor] | None  # cos and sin of the rotary positions, if the model has them


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021). x: [batch, time, heads, head_dim]; cos, sin: [time, head_dim / 2]."""
    (a, b), cos, sin = x.chunk(2, dim=-1), cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attention_of_torch(qkv: Tensor, angles: Angles) -> Tensor:
    """[batch, time, 3, heads, head_dim] to [batch, time, heads, head_dim]; a token sees those before it and itself."""
    q, k, v = qkv.unbind(2)
    if angles is not None:
        q, k = (rotate(t, *angles) for t in (q, k))
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)


class AddLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + x
        return super().forward(residual), residual


class AddRMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + x
        return super().forward(residual), residual


def modules_of(kind: str) -> SimpleNamespace:
    """The building blocks that differ between `--modules warpsmith` and `--modules torch`, of equal meaning and equal
    parameter names."""
    if kind == "torch":
        return SimpleNamespace(
            Linear=nn.Linear,
            norms={"layer": (nn.LayerNorm, AddLayerNorm), "rms": (nn.RMSNorm, AddRMSNorm)},
            attention=attention_of_torch,
            mlp=lambda x, first, second: second(F.gelu(first(x), approximate="tanh")),
            linear_cross_entropy=lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),
            AdamW=functools.partial(torch.optim.AdamW, fused=True),
        )
    import warpsmith
    from warpsmith import nn as ours

    def attention(qkv: Tensor, angles: Angles) -> Tensor:
        if angles is None:  # the gradients of q, k and v are written into one tensor: the linear layer's own
            return warpsmith.attention(qkv, causal=True)
        q, k, v = qkv.unbind(2)
        return warpsmith.attention(*warpsmith.rope(q, k, *angles), v, causal=True)

    def mlp(x: Tensor, first: nn.Linear, second: nn.Linear) -> Tensor:
        return warpsmith.mlp(x, first.weight, first.bias, second.weight, second.bias, "gelu_tanh")

    def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        # On a GPU a sixteenth of its memory for logits: fewer chunks than by default, and larger products.
        most = torch.cuda.get_device_properties(x.device).total_memory // 16 if x.is_cuda else None
        return warpsmith.linear_cross_entropy(x, weight, target, max_chunk_bytes=most)

    return SimpleNamespace(
        Linear=ours.Linear,
        norms={"layer": (ours.LayerNorm, ours.AddLayerNorm), "rms": (ours.RMSNorm, ours.AddRMSNorm)},
        attention=attention,
        mlp=mlp,
        linear_cross_entropy=linear_cross_entropy,
        AdamW=warpsmith.optim.AdamW,
    )


class Block(nn.Module):
    """Attention, then an MLP, each added to the residual stream. What a block is given and gives is normed already:
    adding to the stream and norming the sum are one step."""

    def __init__(self, s: SimpleNamespace, modules: SimpleNamespace) -> None:
        super().__init__()
        self.heads, self.modules_ = s.heads, modules
        self.qkv = modules.Linear(s.width, 3 * s.width, bias=s.bias)
        self.attention_out = modules.Linear(s.width, s.width, bias=s.bias)
        self.attention_norm = make_norm(s, modules.norms[s.norm][1])
        self.mlp_in = nn.Linear(s.width, 4 * s.width, bias=s.bias)
        self.mlp_out = nn.Linear(4 * s.width, s.width, bias=s.bias)
        self.mlp_norm = make_norm(s, modules.norms[s.norm][1])

    def forward(self, x: Tensor, stream: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [batch, time, 3, heads, head_dim]
        attended = self.modules_.attention(qkv, angles).flatten(2)
        x, stream = self.attention_norm(self.attention_out(attended), stream)
        return self.mlp_norm(self.modules_.mlp(x, self.mlp_in, self.mlp_out), stream)


def make_norm(s: SimpleNamespace, norm: type[nn.Module]) -> nn.Module:
    return norm(s.width) if s.norm == "rms" else norm(s.width, bias=s.bias)


class GPT(nn.Module):
    """A decoder-only transformer whose head shares the embedding's weight."""

    def __init__(self, s: SimpleNamespace, modules: SimpleNamespace) -> None:
        super().__init__()
        self.modules_, self.stream_dtype = modules, getattr(torch, s.stream)
        self.embedding = nn.Embedding(s.vocab, s.width)
        self.positions = nn.Embedding(s.context, s.width) if s.positions == "learned" else None
        self.norm = make_norm(s, modules.norms[s.norm][0])
        self.blocks = nn.ModuleList(Block(s, modules) for _ in range(s.layers))
        self.head = nn.Linear(s.width, s.vocab, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # GPT-2's initialisation: what feeds the residual stream is scaled by its 2 additions a layer.
                depth = 2 * s.layers if name.endswith("_out.weight") else 1
                nn.init.normal_(p, std=s.init_std / math.sqrt(depth))
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        self.head.weight = self.embedding.weight
        half = s.width // s.heads // 2
        angles = torch.outer(torch.arange(s.context), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the head reads. [batch, time] to [batch, time, width]."""
        time_ = tokens.shape[1]
        stream = self.embedding(tokens)
        angles = None
        if self.positions is None:
            angles = (self.cos[:time_], self.sin[:time_])
        else:
            stream = stream + self.positions.weight[:time_]
        stream = stream.to(self.stream_dtype)
        x = self.norm(stream)
        for block in self.blocks:
            x, stream = block(x, stream, angles)
        return x

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean loss in nats of predicting tokens[:, 1:] from what stands before each. tokens: [batch, context + 1]."""
        x, target = self.hidden(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        return self.modules_.linear_cross_entropy(x, self.head.weight, target)
