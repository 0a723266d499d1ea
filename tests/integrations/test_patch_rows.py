"""Every row of the table: a patched model beside the model as it was, in each way in which it is used."""

import copy
import re
from collections import defaultdict

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.masking_utils import sdpa_mask  # noqa: E402
from warpsmith.integrations.transformers import patch, register  # noqa: E402
from warpsmith.train import sync_audit  # noqa: E402

from tests.dispatched import Copies  # noqa: E402

from .families import (  # noqa: E402
    ALL,
    ENCODERS,
    PADDED,
    ROWS,
    TOKENS,
    VOCABULARY,
    WITHOUT_DROPOUT,
    class_of,
    inputs_of,
    small_model,
)
from .laws import assert_law_of_the_mean  # noqa: E402

# What a model is used with: its mask, whether activations are made again, whether embeddings and head are one.
USES = {
    "plain": (None, False, False),
    "padded left, checkpoints": (PADDED, True, False),
    "padded right, tied": (PADDED.flip(1), False, True),
    "packed": (None, False, False),
}
PACKED = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)  # two texts a row, of which none sees the other
# Each padding in one dtype: none of the two changes what the other one asks for.
RUNS = [(use, dtype) for use in USES for dtype in (torch.float32, torch.bfloat16)]
RUNS.remove(("padded left, checkpoints", torch.float32))
RUNS.remove(("padded right, tied", torch.bfloat16))
NO_HEAD = {"bert": "BertForMaskedLM", "vit": "ViTForImageClassification"}
LEFT = {"mixtral": "MixtralExperts", "qwen3_moe": "Qwen3MoeExperts", "gpt_oss": "GptOssExperts", **NO_HEAD}
BATCHES = torch.randint(1, VOCABULARY, (24, 2, 12), generator=torch.Generator().manual_seed(2))


def exact_attention(
    module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, dropout=0.0, **_
):
    """All in float64: eager attention takes its softmax in float32, where the mask of a padded row has no sum."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if attention_mask is None else scores.masked_fill(~attention_mask, -1e30)
    sinks = [] if s_aux is None else [s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)]
    weights = torch.cat([scores, *sinks], -1).softmax(-1)[..., : scores.shape[-1]]
    return (weights @ value).transpose(1, 2), None


def whole_mask(*arguments, **options):
    skips = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
    return sdpa_mask(*arguments, **{**options, **skips})


transformers.AttentionInterface.register("exact", exact_attention)
transformers.AttentionMaskInterface.register("exact", whole_mask)


def exactly(model):
    wide = copy.deepcopy(model).double()
    wide.set_attn_implementation("exact")
    wide.config._experts_implementation = "eager"  # the others take no float64
    return wide


def results(family, model, mask=None, **more):
    """Losses and gradients of some batches, the gradients of all layers together."""
    losses, gradients = [], defaultdict(list)
    for i, tokens in enumerate(BATCHES):
        loss = model(**inputs_of(family, mask, tokens), **more).loss
        losses.append(loss.detach())
        if i < 4:
            model.zero_grad()
            loss.backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    gradients[re.sub(r"\.\d+\.", ".*.", name)].append(p.grad.flatten())
    return {"loss": torch.stack(losses), **{n: torch.cat(g) for n, g in gradients.items()}}


@pytest.mark.parametrize(("use", "dtype"), RUNS, ids=str)
@pytest.mark.parametrize("family", ALL)
def test_loss_and_gradients_obey_the_law(family, dtype, use):
    mask, checkpoints, tied = USES[use]
    if use == "packed" and family in ENCODERS:
        pytest.skip("encoders of transformers have no positions that begin anew")
    more = {"position_ids": PACKED} if use == "packed" else {}
    # Which experts a token goes to is no matter of rounding in bfloat16 where it goes to all.
    experts = {"num_experts_per_tok": 4} if dtype == torch.bfloat16 else {}
    model = small_model(family, tie_word_embeddings=tied, **experts).to(dtype)
    exact = results(family, exactly(model), mask, **more)
    expected = results(family, model, mask, **more)
    if more:
        whole = exactly(model)(**inputs_of(family, mask, BATCHES[0])).loss
        assert not torch.equal(exact["loss"][0], whole)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with patch(model) as done:
        found = results(family, model, mask, **more)
    assert set(done.kept) == {LEFT[family]} if family in LEFT else not done.kept
    assert not done.unchecked
    assert_law_of_the_mean(found, expected, exact)


CACHES = {
    "dynamic": lambda config: transformers.DynamicCache(),
    "sliding": lambda config: transformers.DynamicCache(config=config),
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=24),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", [f for f in ALL if f not in ENCODERS])
def test_generation_gives_the_same_logits(family, cache):
    """From a padded prompt, longer than the windows."""
    model = small_model(family).eval()

    def logits():
        options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        out = model.generate(TOKENS, attention_mask=PADDED, past_key_values=CACHES[cache](model.config), **options)
        return torch.stack(out.logits), out.sequences

    expected, tokens = logits()
    with patch(model):
        found, ours = logits()
    assert torch.equal(tokens, ours)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ALL)
def test_what_is_saved_is_loaded_in_both_directions(family, tmp_path):
    stock, inputs = small_model(family), inputs_of(family)
    expected = stock(**inputs).loss
    stock.save_pretrained(tmp_path / "stock")
    ours = small_model(family)
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    done = patch(ours)
    ours.load_state_dict(stock.state_dict())
    ours.save_pretrained(tmp_path / "ours")
    loss = ours(**inputs).loss
    torch.testing.assert_close(loss, expected)
    for saved in ("stock", "ours"):
        loaded = class_of(family).from_pretrained(tmp_path / saved, attn_implementation="eager").train()
        assert torch.equal(loaded(**inputs).loss, expected)
        with patch(loaded) as again:
            assert again.replaced == done.replaced and torch.equal(loaded(**inputs).loss, loss)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("family", [f for f in ALL if "RMSNorm" in str(ROWS.get(f))])
def test_a_norm_beside_activations_of_another_dtype(family, dtypes):
    model = small_model(family)
    norm = next(m for m in model.modules() if type(m).__name__.endswith("RMSNorm")).to(dtypes[0])
    x = torch.randn(2, 3, *norm.weight.shape).to(dtypes[1])
    expected = norm(x)
    with patch(model):
        found = norm(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def gradients_of(model, family, seed=0):
    torch.manual_seed(seed)
    loss = model(**inputs_of(family)).loss
    return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)]


@pytest.mark.parametrize("family", ALL)
def test_a_bias_where_the_family_has_none(family):
    model = small_model(family)
    for linear in [m for m in model.modules() if isinstance(m, torch.nn.Linear)]:
        without = linear.bias is None
        linear.bias = torch.nn.Parameter(torch.linspace(-1, 1, linear.out_features)) if without else None
    expected = gradients_of(model, family)
    with patch(model) as done:
        torch.testing.assert_close(gradients_of(model, family), expected, rtol=1e-3, atol=1e-4)
    assert not done.unchecked and set(done.kept) <= {LEFT.get(family)}


@pytest.mark.parametrize("family", ALL)
def test_a_number_of_one_module_alone(family):
    """An eps or a scale that is not that of the modules beside it. In float64, but for torch's float32 loss."""
    model, changed = small_model(family, num_hidden_layers=2).double(), []
    model.config._experts_implementation = "eager"  # the others take no float64

    for path, module in model.named_modules():
        for key in [k for k, v in vars(module).items() if type(v) is float and v and ".1" not in path]:
            vars(module)[key] += 0.25
            expected = gradients_of(model, family)
            with patch(model):
                found = gradients_of(model, family)
            vars(module)[key] -= 0.25
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, check_dtype=False)
            changed.append(key)
    assert changed


@pytest.mark.parametrize("family", ALL)
def test_dropout_is_where_the_model_has_it(family):
    """With torch's numbers; our attention draws its own."""
    model = small_model(family, **dict.fromkeys(WITHOUT_DROPOUT, 0.3))
    expected = gradients_of(model, family)
    with patch(model, attention=False) as done:
        torch.testing.assert_close(gradients_of(model, family), expected, rtol=1e-3, atol=1e-4)
    with patch(small_model(family), attention=False) as without:
        assert done.kept == without.kept
    of_attention = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    model = small_model(family, **dict.fromkeys(of_attention, 0.3))
    with patch(model):
        assert not torch.equal(gradients_of(model, family, 0)[0], gradients_of(model, family, 1)[0])


@pytest.mark.parametrize("family", ALL)
def test_autocast(family):
    model = small_model(family, num_experts_per_tok=4)
    exact = results(family, exactly(model))
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(family, model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with patch(model) as done:
            found = results(family, model)
    assert not done.unchecked and "on random rows" not in str(done.kept)
    assert_law_of_the_mean(found, expected, exact)


def copies(model, inputs):
    """How many tensors of activations torch copies, forward and backward, and how often the host waits."""
    with Copies(TOKENS.numel() * 16) as forward:
        loss = model(**inputs).loss
    with Copies(TOKENS.numel() * 16) as backward:
        loss.backward()
    with sync_audit("cpu") as audit:
        model(**inputs).loss.backward()
    return len(forward.found), len(backward.found), audit.total


@pytest.mark.parametrize("implementation", ["eager", "warpsmith"])
@pytest.mark.parametrize("family", ALL)
def test_a_patched_model_copies_and_waits_no_more_than_as_it_was(family, implementation):
    register()
    model, inputs = small_model(family, implementation), inputs_of(family)
    expected = copies(model, inputs)
    with patch(model):
        found = copies(model, inputs)
    assert all(a <= b for a, b in zip(found, expected, strict=True)), (found, expected)
