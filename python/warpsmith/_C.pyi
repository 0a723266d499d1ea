from collections.abc import Callable
from typing import Any

REDUCTIONS: dict[str, int]
NO_ELEMENTS: int
GRADIENT_MARKS: dict[str, int]
FP8_SCALINGS: tuple[str, ...]
LINEAR_ACTIVATIONS: tuple[str, ...]
SCALED_FLAGS: dict[str, int]
OPTIMIZER_STORAGES: dict[str, int]
OPTIMIZERS_THAT_CAST: frozenset[tuple[str, str]]
OPTIMIZER_ROWS: tuple[int, int]
OPTIMIZERS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...], int]]
LAYERWISE_OPTIMIZERS: frozenset[str]
DYNAMIC_MAPS: tuple[list[float], list[float]]
QUANT_BLOCK: int

def build() -> dict[str, Any]: ...
def ops() -> list[tuple[str, str, str, tuple[str, ...]]]: ...
def plan(op: str, **problem: Any) -> dict[str, Any]: ...
def plain_layers(
    exchange_api: Any, types: tuple[type, ...], modes: tuple[Callable[[], bool], ...], most: float
) -> Callable[..., bool | None]: ...
def main_grads(exchange_api: Any, types: tuple[type, ...]) -> Callable[..., int]: ...
def have_gradients(tensors: list[Any]) -> bool: ...

class StepWatch:
    def __init__(
        self,
        containers: list[tuple[Any, bool, list[tuple[Any, Any, int]]]],
        tensors: list[Any],
        addresses: list[int],
        trained: list[Any],
        requires_grad: list[bool],
        read_address: int,
    ) -> None: ...
    def same(self) -> bool: ...

class TensorWatch:
    def __init__(
        self,
        exchange_api: Any,
        local: Callable[[Any], Any],
        params: list[list[Any]],
        state: dict[Any, Any],
        names: tuple[str, ...],
        buckets: list[int],
        read_address: int = 0,
    ) -> None: ...
    def look(self, params: list[list[Any]], state: dict[Any, Any]) -> bool: ...
    @property
    def unusual(self) -> list[int]: ...
    def set_gradient(self, index: int, address: int, like_param: bool) -> None: ...
    def column(self, bucket: int) -> bytearray: ...
    def version(self, bucket: int) -> int: ...
    def mixed(self, bucket: int) -> bool: ...
