"""The dropout mask as a pure function: Philox's known answers, its lanes, how much it keeps."""

import pytest
import torch
from warpsmith.reference.dropout import dropout, dropout_mask

# Words of counter 0 and key 0 (Random123, kat_vectors): 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
LANES = [0xE8D5, 0x6627, 0xC58D, 0xE169, 0xAC4C, 0xBC57, 0xDBD8, 0x9B00]


def test_lanes_are_halves_of_the_known_answer():
    seed = torch.zeros(2, dtype=torch.int64)
    for lane, value in enumerate(LANES):
        assert dropout_mask(seed, (8,), value / 65536)[lane]
        assert not dropout_mask(seed, (8,), (value + 1) / 65536)[lane]


def test_elements_do_not_depend_on_the_shape():
    seed = torch.tensor([-5, 2**62 + 3])
    mask = dropout_mask(seed, (1000,), 0.3)
    assert torch.equal(mask[:999].view(37, 27), dropout_mask(seed, (37, 27), 0.3))
    assert dropout_mask(seed, (), 0.0).shape == ()
    assert dropout_mask(seed, (0, 4), 0.3).shape == (0, 4)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_fraction_kept(p):
    n = 200_000
    kept = dropout_mask(torch.tensor([1, 2]), (n,), p).double().mean().item()
    assert abs(kept - (1 - p)) <= 4 * (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize(("index", "other"), [(0, 7), (1, 7), (1, 2**40)])
def test_both_words_of_the_seed_matter(index, other):
    one, two = torch.tensor([1, 2]), torch.tensor([1, 2])
    two[index] = other
    agree = (dropout_mask(one, (80_000,), 0.5) == dropout_mask(two, (80_000,), 0.5)).double().mean().item()
    assert abs(agree - 0.5) < 0.01


def test_kept_values_are_scaled_and_dropped_ones_zero():
    x, seed = torch.arange(1.0, 101.0), torch.tensor([3, 4])
    y = dropout(x, seed, 0.5)
    keeps = dropout_mask(seed, x.shape, 0.5)
    assert torch.equal(y[keeps], 2 * x[keeps])
    assert not y[~keeps].any()
    assert not dropout(torch.full((9,), torch.inf), seed, 1.0).any()
