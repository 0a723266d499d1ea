"""warpsmith.nn.LinearCrossEntropyHead: a linear layer and its loss."""

import copy

import pytest
import torch
import warpsmith


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_is_a_linear_layer_and_a_loss(bias, softcap):
    ours = warpsmith.nn.LinearCrossEntropyHead(16, 50, bias, softcap=softcap, label_smoothing=0.1)
    theirs = torch.nn.Linear(16, 50, bias)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    hidden, target = torch.randn(3, 7, 16), torch.randint(0, 50, (3, 7))
    target[1, 2] = -100
    logits = theirs(hidden)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    torch.testing.assert_close(ours.logits(hidden), logits)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)
    loss, stats = ours(hidden, target, return_stats=True)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(stats.lse, logits.logsumexp(-1))
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_a_weight_shared_with_an_embedding_gets_both_gradients():
    embedding = torch.nn.Embedding(50, 16)
    head = warpsmith.nn.LinearCrossEntropyHead(16, 50, reduction="sum")
    head.weight = embedding.weight
    tokens = torch.randint(0, 50, (4, 9))
    head(embedding(tokens[:, :-1]), tokens[:, 1:]).backward()
    found, embedding.weight.grad = embedding.weight.grad, None
    logits = embedding(tokens[:, :-1]) @ embedding.weight.t()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    torch.testing.assert_close(found, embedding.weight.grad)


def test_options_deepcopy_and_repr():
    head = warpsmith.nn.LinearCrossEntropyHead(16, 50, ignore_index=3, reduction="none", max_chunk_bytes=400)
    head = copy.deepcopy(head)
    loss = head(torch.randn(5, 16), torch.tensor([0, 3, 2, 3, 1]))
    assert [bool(x) for x in loss] == [True, False, True, False, True]
    assert "out_features=50, bias=False, ignore_index=3, reduction='none'" in repr(head)
    meta = warpsmith.nn.LinearCrossEntropyHead(16, 50, device="meta", dtype=torch.bfloat16)
    empty = torch.empty(5, 16, device="meta", dtype=torch.bfloat16)
    assert meta(empty, torch.empty(5, device="meta", dtype=torch.int64)).shape == ()


def test_a_bad_reduction_is_named():
    with pytest.raises(ValueError, match="LinearCrossEntropyHead: reduction: expected none, mean or sum, got avg"):
        warpsmith.nn.LinearCrossEntropyHead(16, 50, reduction="avg")
