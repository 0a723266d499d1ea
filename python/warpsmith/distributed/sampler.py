"""Which samples a rank reads, in an order that survives restarts and other world sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from warpsmith._core import checks

_STATE = ("seed", "length", "position")


class ResumableSampler(Sampler[int]):
    """Shuffled indices for one rank, resumable after any step and at any world size.

    The ranks share one endless stream: all samples in a random order, then all of them in another, and so on, each
    order a function of (seed, epoch). Step ``k`` of a job takes ``world_size`` neighbours of the stream, rank ``r`` the
    ``r``-th. So the state is one number, the stream's position, the same on all ranks; a job that resumes with more or
    fewer ranks goes on at that position, and the stream has neither a repeated nor a lost sample.

    One pass (``for index in sampler``) ends with the step that reaches the end of an epoch. All ranks take equally many
    steps: where ``world_size`` does not divide ``length``, the last step takes its remaining samples from the next
    epoch, which then begins behind them. Nothing is padded.

    Args:
        length: samples of the data set, at least 1.
        seed: of the order; any int of 64 bits.
        rank, world_size: of this process and of the job.

    ``state_dict()`` counts the indices that were drawn. A ``DataLoader`` with workers draws ahead of the training: call
    ``advance(n)`` after each step there, with the number of this rank's samples in it, and the state counts those. With
    ``drop_last=True`` a ``DataLoader`` loses the samples of the last batch.

    The order depends on neither device, torch version nor number of threads. An epoch's order takes 8 bytes a sample,
    and 24 while it is made.

    Raises:
        TypeError: an argument that is no int, a state that is no dict.
        ValueError: an argument out of range; a state of other data or of another seed.

    Example:
        >>> sampler = ResumableSampler(6, seed=0, rank=0, world_size=2)
        >>> drawn = [index for index in sampler]
        >>> len(drawn), sampler.state_dict()
        (3, {'seed': 0, 'length': 6, 'position': 6})
    """

    def __init__(self, length: int, *, seed: int, rank: int, world_size: int) -> None:
        super().__init__()
        for name, value in (("length", length), ("seed", seed), ("rank", rank), ("world_size", world_size)):
            checks.refuse_non_int("ResumableSampler", name, value)
            if not -(2**63) <= value < 2**63:
                checks.refuse("ResumableSampler", name, "an int of 64 bits", checks.value_text(value))
        if length < 1:
            raise ValueError(f"ResumableSampler: length: expected at least 1, got {length}")
        if world_size < 1:
            raise ValueError(f"ResumableSampler: world_size: expected at least 1, got {world_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"ResumableSampler: rank: expected 0 to {world_size - 1}, got {rank}")
        self.length, self.seed, self.rank, self.world_size = length, seed, rank, world_size
        self._drawn = 0  # the stream's position behind the last step that was drawn
        self._begun = 0  # the position at which this object began
        self._done: int | None = None  # the position behind what advance() counted, once it has been called
        self._orders: dict[int, Tensor] = {}

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete."""
        return self._position() // self.length

    def __len__(self) -> int:
        """Steps until the end of the epoch, the same on all ranks."""
        return _steps(self.length - self._drawn % self.length, self.world_size)

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(self)):
            place = self._drawn + self.rank
            index = self._index(place)
            self._drawn += self.world_size
            yield index

    def advance(self, samples: int) -> None:
        """Says that this rank, as every other, has trained on that many more samples.

        Example:
            >>> sampler = ResumableSampler(100, seed=0, rank=0, world_size=4)
            >>> ahead = [index for index, _ in zip(sampler, range(20))]
            >>> sampler.advance(8)
            >>> sampler.state_dict()["position"]
            32
        """
        checks.refuse_non_int("ResumableSampler.advance", "samples", samples)
        start = self._done if self._done is not None else self._begun
        done = start + samples * self.world_size
        if samples < 0 or done > self._drawn:
            most = (self._drawn - start) // self.world_size
            raise ValueError(
                f"ResumableSampler.advance: samples: expected 0 to {most}, which were drawn, got {samples}"
            )
        self._done = done

    def state_dict(self) -> dict[str, Any]:
        """``seed``, ``length`` and ``position``: plain numbers, equal on all ranks."""
        return {"seed": self.seed, "length": self.length, "position": self._position()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the state was taken, whatever the world size was."""
        if not isinstance(state, dict):
            checks.refuse_type("ResumableSampler.load_state_dict", "state", "a dict, as state_dict() gives", state)
        missing = [name for name in _STATE if type(state.get(name)) is not int]
        if missing:
            raise ValueError(f"ResumableSampler.load_state_dict: {missing[0]}: expected an int, got {state}")
        for name, own in (("seed", self.seed), ("length", self.length)):
            if state[name] != own:
                raise ValueError(f"ResumableSampler.load_state_dict: {name}: expected {own}, got {state[name]}")
        if not 0 <= state["position"] < 2**63:
            raise ValueError(
                f"ResumableSampler.load_state_dict: position: expected at least 0 and below 2**63, got "
                f"{state['position']}"
            )
        self._drawn = self._begun = state["position"]
        self._done = None

    def _position(self) -> int:
        return self._drawn if self._done is None else self._done

    def _index(self, place: int) -> int:
        epoch, offset = divmod(place, self.length)
        if epoch not in self._orders:
            first = self._drawn // self.length  # a step may reach into later epochs, never into earlier ones
            self._orders = {e: order for e, order in self._orders.items() if e >= first}
            self._orders[epoch] = _order(self.length, self.seed, epoch)
        return int(self._orders[epoch][offset])


def _steps(samples: int, world_size: int) -> int:
    return -(-samples // world_size)


def _order(length: int, seed: int, epoch: int) -> Tensor:
    """A random order of ``range(length)``: indices sorted by the hash of (seed, epoch, index)."""
    key = _mix(_mix(torch.tensor([seed])) + epoch)
    return torch.argsort(_mix(_mix(torch.arange(length)) + key), stable=True)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014) on int64, whose products wrap."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
