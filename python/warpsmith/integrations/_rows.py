"""Which class of transformers gets which part: a row for each family of models."""

from typing import Any, NamedTuple

from warpsmith._core import checks
from warpsmith.integrations import _parts
from warpsmith.integrations._modules import Part


class Row(NamedTuple):
    """The classes of one of transformers' files: what their names begin with, and for the rest of a name its part."""

    prefix: str
    parts: dict[str, Part]
    layer_norm: bool = False  # whether its norms are of torch's own class

    def part_of(self, cls: type) -> Part | None:
        return self.parts.get(cls.__name__.removeprefix(self.prefix)) if cls.__name__.startswith(self.prefix) else None


_HEAD = {"ForCausalLM": _parts.CAUSAL_HEAD}
_COMMON = {"RMSNorm": _parts.RMS_WIDENS, "Attention": _parts.ROTARY, **_HEAD}
_LLAMA = {**_COMMON, "MLP": _parts.GATED, "DecoderLayer": _parts.DECODER}
_QK = {"Attention": _parts.QK_ROTARY}
_GEMMA = {**_LLAMA, "RMSNorm": _parts.RMS_AROUND_ZERO, "DecoderLayer": _parts.GEMMA_DECODER}
_OLMO2 = {**_HEAD, "RMSNorm": _parts.RMS, "MLP": _parts.GATED, "Attention": _parts.ROTARY}
_EXPERTS = {**_COMMON, "DecoderLayer": _parts.DECODER}
_GPT_OSS = {**_EXPERTS, "RMSNorm": _parts.RMS, "Attention": _parts.ROTARY_HALVES}
_COHERE = {
    **_HEAD,
    "LayerNorm": _parts.LAYER_NORM_OF_WEIGHT,
    "MLP": _parts.GATED,
    "Attention": _parts.ROTARY_INTERLEAVED,
    "DecoderLayer": _parts.PARALLEL_DECODER,
}
_GPT2 = {
    "MLP": _parts.gelu("c_fc", "c_proj", "dropout"),
    "Block": _parts.block("ln_1", "attn", "ln_2"),
    "LMHeadModel": _parts.CAUSAL_HEAD,
}
_BERT = {
    "Intermediate": _parts.gelu("dense"),
    "SelfOutput": _parts.SUM_BEHIND,
    "Output": _parts.SUM_BEHIND,
    "PredictionHeadTransform": _parts.gelu("dense", "LayerNorm"),
}
_MODERNBERT = {
    "MLP": _parts.GATED_WI,
    "Attention": _parts.ROTARY,
    "EncoderLayer": _parts.block("attn_norm", "attn", "mlp_norm"),
    "ForMaskedLM": _parts.MASKED_HEAD,
}
_VIT = {
    "MLP": _parts.gelu("fc1", "fc2"),
    "Layer": _parts.block("layernorm_before", "attention", "layernorm_after", "dropout"),
}

# By the file of transformers.
_FAMILIES = {
    "llama": Row("Llama", _LLAMA),
    "mistral": Row("Mistral", _LLAMA),
    "ministral": Row("Ministral", _LLAMA),
    "qwen2": Row("Qwen2", _LLAMA),
    "granite": Row("Granite", _LLAMA),
    "smollm3": Row("SmolLM3", _LLAMA),
    "phi3": Row("Phi3", {**_LLAMA, "MLP": _parts.GATED_PACKED}),
    "qwen3": Row("Qwen3", {**_LLAMA, **_QK}),
    "gemma2": Row("Gemma2", _GEMMA),
    "gemma3": Row("Gemma3", {**_GEMMA, **_QK}),
    "olmo2": Row("Olmo2", _OLMO2),
    "cohere": Row("Cohere", _COHERE),
    "mixtral": Row("Mixtral", _EXPERTS),
    "qwen3_moe": Row("Qwen3Moe", {**_LLAMA, **_QK}),
    "gpt_oss": Row("GptOss", _GPT_OSS),
    "gpt2": Row("GPT2", _GPT2, True),
    "bert": Row("Bert", _BERT, True),
    "modernbert": Row("ModernBert", _MODERNBERT, True),
    "vit": Row("ViT", _VIT, True),
}
#: By module of Python.
ROWS = {f"transformers.models.{name}.modeling_{name}": row for name, row in _FAMILIES.items()}
#: What :func:`patch` knows: by file of transformers and class, what replaces its forward.
FAMILIES = {name: {row.prefix + n: part.what for n, part in row.parts.items()} for name, row in _FAMILIES.items()}


def row_of(model_or_class: Any) -> Row | None:
    """The row of the file that defines a model's class."""
    cls = model_or_class if isinstance(model_or_class, type) else type(model_or_class)
    return ROWS.get(cls.__module__)


def part_of(cls: type) -> Part | None:
    """What a module of a class gets."""
    row = row_of(cls)
    return None if row is None else row.part_of(cls)


def add_family(model_class: type, *, like: str) -> None:
    """Tells :func:`patch` of a model of your own, whose modules compute what those of a known family compute.

    Args:
        model_class: the model's class, such as ``MyForCausalLM``. Its file defines the others, of which those with a
            part have the names of the known family's classes, with another beginning: ``MyRMSNorm``, ``MyMLP``.
        like: a name of ``FAMILIES``.

    A row that says more than the modules compute does no harm: ``patch`` compares each with its own forward.

    Raises:
        ValueError: an unknown family, or a class whose name ends in no way that the family's names do.

    Example:
        >>> import transformers
        >>> from warpsmith.integrations.transformers import add_family
        >>> add_family(transformers.HeliumForCausalLM, like="llama")
    """
    if like not in _FAMILIES:
        checks.refuse("add_family", "like", f"one of {', '.join(_FAMILIES)}", like)
    row, name = _FAMILIES[like], model_class.__name__
    end = next((n for n in (*row.parts, "Model", "PreTrainedModel") if name.endswith(n) and n != name), None)
    if end is None:
        checks.refuse("add_family", "model_class", f"a name that ends as those of {row.prefix} do", name)
    ROWS[model_class.__module__] = row._replace(prefix=name.removesuffix(end))
