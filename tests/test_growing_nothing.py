"""A thousand requests, and nothing has grown: neither tensors, nor objects, nor the process.

Answers of every kind take turns over tiny models: finished, cancelled, abandoned in the middle, failing in a forward,
refused. What is alive is counted after every kind has had its turns, and again a thousand requests later.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_core.budget import Costs
from eagle_core.drafters import METHODS, TreeSettings
from eagle_core.errors import InvalidRequest
from eagle_core.pairs import Pair
from eagle_core.verify import Sampling
from tests.conftest import eagle_head, tiny_target

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of modules that only looking at all objects wakes

PROMPT = [5, 17, 42, 3, 8, 17, 42]
REQUESTS = 1000
MEGABYTES = 24
"""What the process may grow by: an allocator keeps some; one leaked cache of each request would be ten times that."""


class Bomb(Exception):
    pass


def small_pair() -> Pair:
    """A pair of a tiny target with every part that methods need."""
    pair = Pair(tiny_target())
    pair._parts |= {
        "eagle1 head": eagle_head("eagle1"),
        "eagle3 head": eagle_head("eagle3", "llama", 37),
        "draft model": tiny_target("qwen2", 5),
    }
    return pair


def finished(pair: Pair, how: dict[str, Any]) -> None:
    assert list(pair.generate(PROMPT, max_new_tokens=4, **how))[-1].kind == "finish"


def cancelled(pair: Pair, how: dict[str, Any]) -> None:
    cancel = threading.Event()
    events = pair.generate(PROMPT, max_new_tokens=50, cancel=cancel, **how)
    next(events)
    cancel.set()
    last = [*events][-1]
    assert last.kind == "finish" and last.reason == "cancelled"


def abandoned(pair: Pair, how: dict[str, Any]) -> None:
    events = pair.generate(PROMPT, max_new_tokens=50, **how)
    next(events)
    next(events)


def failing(pair: Pair, how: dict[str, Any]) -> None:
    plain, calls = pair.target.forward, [0]

    def forward(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise Bomb
        return plain(*args)

    pair.target.forward = forward  # type: ignore[method-assign]
    try:
        with suppress(Bomb):
            list(pair.generate(PROMPT, max_new_tokens=50, **how))
    finally:
        del pair.target.forward  # type: ignore[method-assign]
    assert calls[0] == 3


def refused(pair: Pair, how: dict[str, Any]) -> None:
    with suppress(InvalidRequest):
        pair.generate(PROMPT, max_new_tokens=0, **how)


KINDS: tuple[Callable[[Pair, dict[str, Any]], None], ...] = (finished, cancelled, abandoned, failing, refused)


def serve(pair: Pair, count: int) -> None:
    """`count` requests: kinds, methods, temperatures and budgets in every combination, one after another."""
    costs = Costs((1, 64), (10.0, 40.0), 1.0, 1.0)
    budgets = (TreeSettings(8, 2, 3), TreeSettings(-1, 2, 3, costs=costs))
    for i in range(count):
        how = {
            "method": [*METHODS][i % len(METHODS)],
            "sampling": Sampling(float(i // 5 % 2), seed=i),
            "settings": budgets[i // 3 % 2],
        }
        KINDS[i % len(KINDS)](pair, how)
        assert not pair.target.lock.locked()


def alive() -> tuple[int, int, Counter[str]]:
    """Tensors, their bytes, and objects by type."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [o for o in objects if isinstance(o, torch.Tensor)]
    plain = [t for t in tensors if t.layout == torch.strided]  # packed weights tell of no storage
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain}
    return len(tensors), sum(storages.values()), Counter(type(o).__qualname__ for o in objects)


def resident() -> int:
    """Bytes of the process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would wait for each other over such small models
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process's size where Linux tells it")
def test_a_thousand_requests_leave_nothing_behind() -> None:
    pair = small_pair()
    serve(pair, 160)  # every combination: caches reach their size, kernels are chosen
    alive()  # looking makes objects, too
    tensors, size, objects = alive()
    before = resident()
    serve(pair, REQUESTS)
    tensors_after, size_after, objects_after = alive()
    grown = {name: n - objects[name] for name, n in objects_after.items() if n - objects[name] > REQUESTS // 20}
    assert tensors_after - tensors <= 10, f"{tensors_after - tensors} tensors more"
    assert size_after - size <= 1 << 20, f"{size_after - size} bytes of tensors more"
    assert not grown, f"objects that grew: {grown}"
    assert resident() - before <= MEGABYTES << 20, f"{(resident() - before) >> 20} MB more"


def test_the_count_sees_a_leak() -> None:
    tensors, size, _ = alive()
    kept = [torch.zeros(100) for _ in range(50)]
    more, more_size, _ = alive()
    assert more - tensors == len(kept) and more_size - size == len(kept) * 400


def test_the_largest_cache_is_the_only_one_kept() -> None:
    """Buffers of an answer are handed on: a longer answer replaces them, a shorter one uses them as they are."""
    pair = small_pair()
    sizes = []
    for count in (4, 200, 4, 200):
        list(pair.generate(PROMPT, method="vanilla", max_new_tokens=count))
        spare = pair.target._spare
        assert spare is not None
        sizes.append(spare.nbytes)
    assert sizes[0] <= sizes[1] == sizes[2] == sizes[3]
