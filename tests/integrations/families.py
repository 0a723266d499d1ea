"""A small model of every family that ``patch`` knows, read from the integration's own table."""

import sys

import pytest
import torch
import transformers
from warpsmith.integrations.transformers import FAMILIES as ROWS

WINDOW, VOCABULARY = 5, 61
# A config keeps the names that it does not know as plain attributes.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
    "query_pre_attn_scalar": 16,
    "pad_token_id": 0,
    "eos_token_id": None,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
    "no_rope_layers": [1, 0, 1],
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 1.7,
    "logit_scale": 0.3,
    "local_attention": 2 * WINDOW,
    "global_attn_every_n_layers": 2,
    "image_size": 8,
    "patch_size": 2,
    "num_labels": 7,
}
PHI3 = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
SPECIAL = {"phi3": PHI3, "vit": {"intermediate_size": 96}}
# By family of the table: the model_type of its config, where that is another.
MODEL_TYPES = {"gemma3": "gemma3_text"}
ENCODERS = {"vit": "ViTForImageClassification", "bert": "BertForMaskedLM", "modernbert": "ModernBertForMaskedLM"}
WITHOUT_DROPOUT = dict.fromkeys(
    [
        *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "mlp_dropout", "embedding_dropout"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
    ],
    0.0,
)
TOKENS = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones_like(TOKENS)
PADDED[1, :4] = 0
CODES = torch.randn(VOCABULARY, 16, generator=torch.Generator().manual_seed(2))


THERE = [family for family in ROWS if MODEL_TYPES.get(family, family) in transformers.CONFIG_MAPPING]
# A class that this transformers lacks is skipped by name.
ALL = [f if f in THERE else pytest.param(f, marks=pytest.mark.skip(f"transformers has no {f}")) for f in ROWS]
# What hangs on modules is asked of these, whose parts the others share.
FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "gpt2"]


def class_of(family):
    """A family's model with a loss."""
    config = transformers.CONFIG_MAPPING[MODEL_TYPES.get(family, family)]
    return getattr(transformers, ENCODERS.get(family, ""), None) or transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config]


def classes_of(family):
    """{name: class} of a family's classes in the table, and its model with a loss."""
    model = class_of(family)
    module = sys.modules[model.__module__]
    return {name: getattr(module, name) for name in ROWS[family]}, model


def small_model(family, implementation="eager", **options):
    model_type, special = MODEL_TYPES.get(family, family), SPECIAL.get(family, {})
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **WITHOUT_DROPOUT, **special, **options})
    model = class_of(family)._from_config(config, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        around_one = p.dim() == 1 and not name.endswith(("bias", "sinks")) and "gemma" not in family
        p.data = torch.randn(p.shape, generator=generator) * 0.1 + around_one
    return model.train()


def loss_and_gradients(model, **inputs):
    """Of a causal model."""
    model.zero_grad()
    loss = model(TOKENS, **{"labels": TOKENS, "use_cache": False, **inputs}).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def inputs_of(family, mask=None, tokens=TOKENS):
    """What a model's loss is of; labels are tokens that the mask shows, whose logits are made of such alone."""
    if family == "vit":
        # A pixel of two by two by three channels for each token, of sixteen tokens.
        codes = CODES[tokens.repeat(1, 2)[:, :12]].reshape(len(tokens), 3, 8, 8)
        return {"pixel_values": codes, "labels": tokens[:, 0] % SIZES["num_labels"]}
    seen = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    before = seen if family in ENCODERS else torch.nn.functional.pad(seen[:, :-1], (1, 0), value=True)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(~(seen & before), -100)}
