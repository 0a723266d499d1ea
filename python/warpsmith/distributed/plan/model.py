"""What a transformer costs: its parameters and matrix products."""

from __future__ import annotations

import dataclasses
from typing import Any

from warpsmith._core import checks

DTYPES = ("bfloat16", "float16", "float8")


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder of equal layers: attention and a two- or three-matrix MLP.

    Args:
        layers, hidden, heads, vocabulary: sizes.
        sequence: tokens of a sequence.
        intermediate: of the MLP; default: 4 hidden.
        kv_heads, head_dim: of attention; defaults: heads, hidden / heads.
        gated: three matrices (SwiGLU) in place of two.
        rotary: rotary positions in place of an embedding of positions.
        tied: the head is the embedding's matrix.
        causal: half of the scores are masked, and fused attention leaves them out.
        dropout: in attention and after both halves of a layer.
        dtype: of the layers' matrix products; ``"float8"`` leaves attention, head and all else in bfloat16.
        parameter_count: where it is known better than from the sizes; default: from the sizes.

    The derived sizes are filled in: ``dataclasses.replace`` keeps them, so name them too when you change ``hidden``.

    Raises:
        ValueError: a size below 1, heads that ``kv_heads`` does not divide, an unknown dtype.

    Example:
        >>> gpt2 = Model(layers=12, hidden=768, heads=12, vocabulary=50304, sequence=1024, tied=True)
        >>> round(gpt2.parameters / 1e6)
        124
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    intermediate: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    rotary: bool = False
    tied: bool = False
    causal: bool = True
    dropout: bool = False
    dtype: str = "bfloat16"
    parameter_count: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary", "sequence"):
            checks.count("Model", name, getattr(self, name), "an int of at least 1", 1)
        for name in ("intermediate", "kv_heads", "head_dim", "parameter_count"):
            checks.count("Model", name, getattr(self, name), "an int of at least 0 (0: the default)", 0)
        for name in ("gated", "rotary", "tied", "causal", "dropout"):
            checks.flags("Model", **{name: getattr(self, name)})
        checks.one_of("Model", "dtype", self.dtype, DTYPES)
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"Model: kv_heads: expected a divisor of heads, {self.heads}, got {self.kv_heads}")
        derived = {
            "intermediate": 4 * self.hidden,
            "kv_heads": self.heads,
            "head_dim": max(1, self.hidden // self.heads),
        }
        for name, value in derived.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)

    @property
    def query(self) -> int:
        """Elements of all heads of q for a token."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Elements of all heads of k and v for a token."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def up(self) -> int:
        """Columns of the MLP's first product: gate and up together."""
        return self.intermediate * (2 if self.gated else 1)

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of one layer."""
        attention = self.hidden * (2 * self.query + self.key_value)
        return attention + self.hidden * (self.up + self.intermediate)

    @property
    def embedding_parameters(self) -> int:
        """Of embedding, positions and head."""
        positions = 0 if self.rotary else self.sequence * self.hidden
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + positions

    @property
    def parameters(self) -> int:
        """Of the model: matrices and embeddings. Biases and norms, below 0.1 %, are not counted."""
        return self.parameter_count or self.layers * self.layer_parameters + self.embedding_parameters

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward, as papers count model FLOPs: all scores, nothing computed again.

        Source: Narayanan et al., arXiv 2104.04473, without the recomputation.
        """
        scores = 2 * self.layers * self.sequence * self.query
        return 6 * (self.layers * self.layer_parameters + self.vocabulary * self.hidden + scores)

    @staticmethod
    def from_config(config: Any, sequence: int | None = None, **more: Any) -> Model:
        """From a configuration of transformers, such as a ``LlamaConfig`` or ``GPT2Config``, or a dict of one.

        Args:
            config: the configuration.
            sequence: default: the longest that the configuration allows.
            more: fields of ``Model``, where they should differ from the configuration.

        Raises:
            ValueError: the configuration lacks a size.

        Example:
            >>> sizes = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
            >>> Model.from_config({"model_type": "gpt2", "tie_word_embeddings": True, **sizes}).intermediate
            3072
        """
        if not isinstance(config, dict) and not hasattr(config, "__dict__"):
            expected = "a configuration of transformers, or a dict of one"
            checks.refuse_type("Model.from_config", "config", expected, config)
        get = config.get if isinstance(config, dict) else lambda name: getattr(config, name, None)

        def first(field: str, *names: str) -> Any:
            values = [get(name) for name in names]
            found = [v for v in values if v is not None]
            if not found and field not in more:
                raise ValueError(
                    f"Model.from_config: {field}: expected {' or '.join(names)} in the config, got neither"
                )
            return more.get(field, found[0] if found else None)

        kind, activation = str(get("model_type") or ""), str(get("hidden_act") or get("activation_function") or "")
        found = {
            "layers": first("layers", "num_hidden_layers", "n_layer"),
            "hidden": first("hidden", "hidden_size", "n_embd"),
            "heads": first("heads", "num_attention_heads", "n_head"),
            "vocabulary": first("vocabulary", "vocab_size"),
            "sequence": sequence or first("sequence", "max_position_embeddings", "n_positions"),
            "intermediate": get("intermediate_size") or get("n_inner") or 0,
            "kv_heads": get("num_key_value_heads") or 0,
            "head_dim": get("head_dim") or 0,
            "gated": activation in ("silu", "swish") or kind.startswith("gemma"),
            "rotary": get("rope_theta") is not None or get("rope_parameters") is not None,
            "tied": bool(get("tie_word_embeddings")),
        }
        return Model(**(found | more))

    @staticmethod
    def from_module(module: Any, sequence: int | None = None, **more: Any) -> Model:
        """From an ``nn.Module``: by its ``config`` where it is a model of transformers, else by its parameters.

        Without a config: layers are those of the longest ``ModuleList`` or ``Sequential``, hidden and vocabulary those
        of the largest embedding; the MLP's width is what the layers' other parameters amount to, and ``parameters`` is
        the module's own. ``heads`` and ``sequence`` must be given.

        Raises:
            ValueError: sizes that the module does not tell.

        Example:
            >>> import torch
            >>> layer = lambda: torch.nn.TransformerEncoderLayer(64, 4, 256)
            >>> parts = {"embedding": torch.nn.Embedding(100, 64), "layers": torch.nn.ModuleList([layer(), layer()])}
            >>> model = Model.from_module(torch.nn.ModuleDict(parts), sequence=32, heads=4)
            >>> model.layers, model.hidden, model.vocabulary
            (2, 64, 100)
        """
        import torch

        if not isinstance(module, torch.nn.Module):
            checks.refuse_type("Model.from_module", "module", "an nn.Module", module)
        total = sum(p.numel() for p in module.parameters())
        if getattr(module, "config", None) is not None:
            return Model.from_config(module.config, sequence, **({"parameter_count": total} | more))
        tables = [m for m in module.modules() if isinstance(m, torch.nn.Embedding)]
        lists = [m for m in module.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential))]
        if not tables or not lists:
            raise ValueError("Model.from_module: module: expected an embedding and a list of layers, or a config")
        if sequence is None or "heads" not in more:
            raise ValueError("Model.from_module: expected sequence and heads, which a module does not tell")
        table = max(tables, key=lambda m: m.weight.numel())
        layers = max(lists, key=len)
        hidden = table.embedding_dim
        matrices = sum(p.numel() for p in layers.parameters() if p.dim() > 1) // len(layers)
        kv_heads, heads = more.get("kv_heads") or more["heads"], more["heads"]
        head_dim = more.get("head_dim") or hidden // heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        found = {
            "layers": len(layers),
            "hidden": hidden,
            "vocabulary": table.num_embeddings,
            "sequence": sequence,
            "intermediate": max(1, (matrices - attention) // ((3 if more.get("gated") else 2) * hidden)),
            "parameter_count": total,
        }
        return Model(**(found | more))
