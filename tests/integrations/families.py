"""A small model of every family that ``patch`` knows, read from the integration's own table."""

from __future__ import annotations

import sys

import torch
import transformers
from warpsmith.integrations.transformers import FAMILIES

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
}
WITHOUT_DROPOUT = dict.fromkeys(["attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"], 0.0)
TOKENS = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones_like(TOKENS)
PADDED[1, :4] = 0


def classes_of(family):
    """{name: class} of a family's classes in the table, and its causal model."""
    config = transformers.AutoConfig.for_model(family)
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    module = sys.modules[model.__module__]
    found = {name: getattr(module, name) for name in FAMILIES[family]}
    assert model in found.values()
    return found, model


def small_model(family, implementation="eager", **options):
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **WITHOUT_DROPOUT, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        around_one = p.dim() == 1 and not name.endswith("bias") and family != "gemma2"
        p.data = torch.randn(p.shape, generator=generator) * 0.1 + around_one
    return model.train()
