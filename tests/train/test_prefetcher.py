"""Batches come in order, whole, and as the loader gives them; the device copies one ahead, and nobody waits for it."""

import collections
import dataclasses
import types

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from warpsmith.testing.checks.cuda import no_waits
from warpsmith.train import Prefetcher, PrefetchStats

Pair = collections.namedtuple("Pair", ["x", "name"])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    rest: tuple


class Broken(RuntimeError):
    pass


class Numbers(Dataset):
    """The tensor of each number; ``broken`` raises."""

    def __init__(self, count, broken=None):
        self.count, self.broken = count, broken

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if i == self.broken:
            raise Broken(f"sample {i}")
        return torch.full((3,), float(i))


def numbers(prefetcher):
    return [float(batch.flatten()[0]) for batch in prefetcher]


def nested(i):
    x, ints = torch.full((2, 3), float(i)), torch.tensor([i])
    return {
        "dict": {"x": x, "text": "a"},
        "ordered": collections.OrderedDict(b=x, a=ints),
        "default": collections.defaultdict(list, x=[x, None]),
        "proxy": types.MappingProxyType({"x": x}),
        "pair": Pair(ints, "name"),
        "sample": Sample(x.t(), (ints, 3.5, {"deep": [x.to(memory_format=torch.contiguous_format)]})),
        "size": x.shape,
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(2).to_sparse(),
    }


def leaves(value):
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if hasattr(value, "items"):
        return [leaf for k, v in value.items() for leaf in [k, *leaves(v)]]
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in leaves(v)]
    return [value]


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_nested_stays_so(device):
    for i, batch in enumerate(Prefetcher((nested(i) for i in range(4)), device)):
        expected = nested(i)
        for kind in ("dict", "ordered", "default", "pair", "sample", "size"):
            assert type(batch[kind]) is type(expected[kind]), kind
        assert batch["default"].default_factory is list and batch["sample"].x.stride() == expected["sample"].x.stride()
        for found, wanted in zip(leaves(batch), leaves(expected), strict=True):
            if isinstance(wanted, torch.Tensor):
                assert found.device.type == device and torch.equal(found.cpu().to_dense(), wanted.to_dense())
            else:
                assert found == wanted


@pytest.mark.parametrize("device", DEVICES)
def test_order_length_and_passes(device):
    loader = DataLoader(Numbers(7), batch_size=2, shuffle=False)
    prefetcher = Prefetcher(loader, device)
    assert len(prefetcher) == 4
    for _ in range(2):
        assert numbers(prefetcher) == [0, 2, 4, 6] and prefetcher.stats().batches == 4
    both = [(float(a[0, 0]), float(b[0, 0])) for a, b in zip(prefetcher, prefetcher, strict=True)]
    assert both == [(i, i) for i in (0, 2, 4, 6)]
    assert float(next(iter(prefetcher))[0, 0]) == 0  # a pass that is left
    assert numbers(prefetcher) == [0, 2, 4, 6]


@pytest.mark.parametrize("device", DEVICES)
def test_any_iterable_and_an_early_end(device):
    class Short:
        def __len__(self):
            return 10

        def __iter__(self):
            yield from (torch.tensor([float(i)]) for i in range(3))

    assert len(Prefetcher(Short(), device)) == 10 and numbers(Prefetcher(Short(), device)) == [0, 1, 2]
    once = Prefetcher((torch.tensor([float(i)]) for i in range(3)), device)
    assert numbers(once) == [0, 1, 2] and numbers(once) == []
    with pytest.raises(TypeError, match="has no len"):
        len(once)
    assert numbers(Prefetcher([], device)) == [] and numbers(Prefetcher([torch.ones(1)], device)) == [1]

    class Indexed:
        def __getitem__(self, i):
            if i == 2:
                raise IndexError
            return torch.tensor([float(i)])

    assert numbers(Prefetcher(Indexed(), device)) == [0, 1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_an_error_comes_as_itself_behind_the_batches_before_it(device, workers):
    prefetcher, seen = Prefetcher(DataLoader(Numbers(8, broken=5), num_workers=workers), device), []
    with pytest.raises(Broken, match="sample 5"):
        for batch in prefetcher:
            seen.append(float(batch[0, 0]))
    assert seen == [0, 1, 2, 3, 4] and prefetcher.stats().batches == 5


@pytest.mark.parametrize("device", DEVICES)
def test_a_transform_runs_on_the_device(device):
    scale = torch.full((3,), 2.0, device=device)
    prefetcher = Prefetcher(DataLoader(Numbers(4)), device, transform=lambda batch: batch * scale + 1)
    assert numbers(prefetcher) == [1, 3, 5, 7]


@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_of_the_loader_come_alike(device):
    def run(wrap):
        torch.manual_seed(0)
        return numbers(wrap(DataLoader(Numbers(16), shuffle=True)))

    assert run(lambda loader: Prefetcher(loader, device)) == run(lambda loader: loader)


def test_stats_on_the_cpu_count_every_wait(monkeypatch):
    clock = iter(float(i) for i in range(100))
    monkeypatch.setattr("warpsmith.train.prefetcher.time.perf_counter", lambda: next(clock))
    prefetcher = Prefetcher([torch.ones(1)] * 3, "cpu")
    assert prefetcher.stats() == PrefetchStats()
    assert len(list(prefetcher)) == 3
    found = prefetcher.stats()
    # The clock reads the start, twice a batch, the last question and the end.
    assert found == PrefetchStats(batches=3, seconds=8.0, loading_s=3.0, waits=3, waiting_s=3.0)
    assert str(found) == "the device waited for 3 of 3 batches, at most 3.000 of 8.000 s; the loader took 3.000 s"
    assert [prefetcher.stats().seconds for _ in prefetcher] == [3.0, 6.0, 9.0]  # of the second pass, while it runs


@pytest.mark.parametrize(
    "given, error, message",
    [
        ((3, "cpu"), TypeError, "Prefetcher: loader: expected an iterable of batches, got"),
        (([], 0), TypeError, "Prefetcher: device: expected a torch.device or its name, got"),
        (([], "meta"), ValueError, "Prefetcher: device: expected the CPU or CUDA, got meta"),
        (([], "nonsense"), ValueError, "Prefetcher: device: expected the CPU or CUDA, got nonsense"),
    ],
)
def test_bad_arguments(given, error, message):
    with pytest.raises(error, match=message):
        Prefetcher(*given)
    with pytest.raises(TypeError, match="Prefetcher: transform: expected a function of a batch, or None, got"):
        Prefetcher([], "cpu", transform=3)


@pytest.mark.gpu
def test_no_wait_and_no_memory_taken_too_early():
    """Batches of one size, so that their memory is taken again; steps that read each late."""
    batches = [torch.full((1 << 20,), float(i)).pin_memory() for i in range(12)]
    torch.cuda._sleep(1000)
    found = []
    with no_waits():
        for batch in Prefetcher(batches, "cuda"):
            torch.cuda._sleep(20_000_000)
            found.append(batch.sum() / batch.numel())
            del batch
    assert torch.stack(found).tolist() == list(range(12))


@pytest.mark.gpu
def test_the_device_waits_for_a_slow_loader_alone():
    import time

    def run(loading_s, cycles):
        def batches():
            for _ in range(10):
                time.sleep(loading_s)
                yield torch.ones(4)

        prefetcher = Prefetcher(batches(), "cuda")
        for _ in prefetcher:
            torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        return prefetcher.stats()

    slow, fast = run(0.05, 1000), run(0.0, 40_000_000)
    assert slow.waits == 10 and slow.waiting_s > 0.4
    assert fast.waits <= 3 and fast.batches == 10


@pytest.mark.gpu
def test_an_unpinned_tensor_that_is_written_again():
    def batches():
        one = torch.empty(1 << 20)
        for i in range(8):
            yield one.fill_(i)

    found = []
    for batch in Prefetcher(batches(), "cuda"):
        torch.cuda._sleep(10_000_000)
        found.append(batch.mean())
    assert torch.stack(found).tolist() == list(range(8))
