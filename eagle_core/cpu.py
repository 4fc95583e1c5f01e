"""The CPU path: the model's own modules, with the parts that cost time done the way a CPU likes.

A target forward over a few rows is bound by reading the weights, and the plain way wastes much of it: a matrix
product over 8 or 16 rows takes three times one row, although memory would allow it for the price of one; tree
attention first copies every key and value once for each query head that shares it.

    linear layers   weights packed once for MKL's GEMM, instead of being rearranged in every product; layers that
                    read the same rows (queries, keys and values; gate and up) in one product
    attention       grouped queries read shared keys where they are, also under a tree mask
    norms           one fused kernel
    the whole       recorded once and replayed, without Python and its module calls between the operators

Nothing of a model's code is replaced: linear layers and norms get another `forward`, attention is registered with
transformers' attention interface. Each part is kept only if it computes what the plain one does, to float32
rounding, and packing only where it is measured to be faster. `load_target(fast=False)` leaves all of it away.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

__all__ = ["GROUPED", "FastPath", "choose_threads"]

GROUPED = "sdpa_grouped"
"""transformers' name of `_grouped_attention`, once registered."""

_PACK_ROWS = 128  # rows that a packing is made for: measured best for 1 to 512 rows, and right for any
_TRIAL_ROWS = (1, 8, 24)
_TRIAL_BYTES = 64 << 20  # weights of a trial: more than caches hold
_ROUNDING = 1e-5  # largest difference that is rounding, relative to the largest output


class FastPath:
    """The fast form of a float32 model on a CPU, switched on. The model's weights must not change afterwards.

    Attributes:
        report: what was done, for people: `linear` (how products are computed), `packed` and `norms` (layers), and
            `trial_ms`, what decided: least times over the rows of the trial, plain and packed.
        on: whether it is switched on.
        replay: the recorded forward, once `record` was called and it agrees.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._forwards: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
        self._packs: list[_Pack] = []
        self.replay: Replay | None = None
        self.on = False
        self.report: dict[str, Any] = {"linear": "plain", "packed": 0, "norms": 0}
        self._pack_linears(_groups(model))
        self._fuse_norms([m for m in model.modules() if type(m).__name__.endswith("RMSNorm") and _plain(m)])
        config = getattr(model, "config", None)
        self._attention = getattr(config, "_attn_implementation", None) == "sdpa" and _on_cpu(model)
        self.enable()

    def _pack_linears(self, groups: list[list[nn.Linear]]) -> None:
        linears = [module for group in groups for module in group]
        if not linears or not _can_pack(linears):
            return
        sample = groups[: 1 + next((i for i, s in enumerate(_sizes(groups)) if s >= _TRIAL_BYTES), len(groups))]
        packs = _pack(sample)
        self.report["trial_ms"] = trial = _trial(sample, packs)
        if trial["packed"] >= trial["plain"]:
            return
        self.report["linear"] = "packed by MKL"
        for pack in [*packs, *_pack(groups[len(sample) :])]:
            forwards = pack.forwards()
            if all(_agree(m.forward, f, m.in_features) for m, f in zip(pack.modules, forwards, strict=True)):
                self._packs.append(pack)
                self._forwards += zip(pack.modules, forwards, strict=True)
                self.report["packed"] += len(forwards)

    def _fuse_norms(self, norms: list[nn.Module]) -> None:
        for module in norms:
            weight, epsilon = module.weight, getattr(module, "variance_epsilon", getattr(module, "eps", None))
            if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(epsilon, float):
                continue
            fused = partial(_fused_norm, weight, epsilon)
            if _agree(module.forward, fused, len(weight)):
                self._forwards.append((module, fused))
                self.report["norms"] += 1

    def record(self, num_layers: int) -> None:
        """Record the forward of a causal LM whose layers all take one mask; `replay` is left None where that fails."""
        if not self._attention:
            return
        self.replay = _record(self._model, num_layers, self._packs)
        self.report["recorded"] = self.replay is not None

    def enable(self) -> None:
        self.on = True
        for module, forward in self._forwards:
            module.forward = forward
        if self._attention:
            self._model.set_attn_implementation(GROUPED)  # type: ignore[operator]

    def disable(self) -> None:
        self.on = False
        for module, _ in self._forwards:
            vars(module).pop("forward", None)
        if self._attention:
            self._model.set_attn_implementation("sdpa")  # type: ignore[operator]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Plain transformers inside the `with`: what a comparison runs."""
        self.disable()
        try:
            yield
        finally:
            self.enable()


def _on_cpu(model: nn.Module) -> bool:
    return all(p.device.type == "cpu" for p in model.parameters())


def _plain(module: nn.Module) -> bool:
    """A module in float32 on the CPU whose `forward` nobody has changed."""
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, Tensor)
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and "forward" not in vars(module)
    )


@torch.inference_mode()  # with gradients on, fast layers are plain ones and would always agree
def _agree(plain: Callable[[Tensor], Tensor], fast: Callable[[Tensor], Tensor], width: int) -> bool:
    """Whether two ways to compute a layer differ by rounding only; rows of 1 and of several take different kernels."""
    for rows in (1, 5):
        x = torch.linspace(-1, 1, rows * width).sin().view(1, rows, width)
        a, b = plain(x), fast(x)
        if not (a - b).abs().max() <= _ROUNDING * (1 + a.abs().max()):
            return False
    return True


# ------------------------------------------------------------------------------------------------ linear layers


_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that read the same rows wherever they occur together: one product does for all of them."""


def _groups(model: nn.Module) -> list[list[nn.Linear]]:
    """The plain linear layers of a model, siblings together, in the order in which a forward meets them."""
    groups: list[list[nn.Linear]] = []
    for module in model.modules():
        children = {n: m for n, m in module.named_children() if type(m) is nn.Linear and _plain(m)}
        for names in _SIBLINGS:
            together = [children[n] for n in names if n in children]
            if len(together) == len(names) and len({(m.in_features, m.bias is None) for m in together}) == 1:
                groups.append(together)
                for name in names:
                    del children[name]
        groups += [[m] for m in children.values()]
    return groups


@cache
def _product() -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """The product for recordings: a script, which takes the number of rows from its input."""
    source = """
def product(x: Tensor, packed: Tensor, shape: Tensor, bias: Optional[Tensor]) -> Tensor:
    return torch.ops.mkl._mkl_linear(x, packed, shape, bias, x.numel() // x.size(-1))
"""
    return torch.jit.CompilationUnit(source).product


class _Pack:
    """Linear layers over the same input, their weights packed as one matrix."""

    def __init__(self, modules: list[nn.Linear]) -> None:
        self.modules = modules
        weights = [m.weight.detach() for m in modules]
        weight = weights[0] if len(modules) == 1 else torch.cat(weights)
        biases = [m.bias.detach() for m in modules if m.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACK_ROWS)
        self.shape = weight.new_zeros(1).expand(weight.shape)  # all that the operator reads of the plain weights
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def product(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., the sum of all out]."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            return _product()(x, self.packed, self.shape, self._bias)
        rows = x.numel() // x.shape[-1]
        return torch.ops.mkl._mkl_linear.default(x, self.packed, self.shape, self._bias, rows)

    def forwards(self) -> list[Callable[[Tensor], Tensor]]:
        """One for each module."""
        if len(self.modules) == 1:
            return [partial(self._alone, self.modules[0])]
        return [partial(self._shared, i, module) for i, module in enumerate(self.modules)]

    def _alone(self, module: nn.Linear, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # a packed product has no derivative
            return F.linear(x, module.weight, module.bias)
        return self.product(x)

    def _shared(self, i: int, module: nn.Linear, x: Tensor) -> Tensor:
        """The i-th module's part. The first of a forward computes all, the last takes what is left."""
        if torch.is_grad_enabled():
            return F.linear(x, module.weight, module.bias)
        if self._input is not x:
            self._input = x
            self._outputs = self.product(x).split([m.out_features for m in self.modules], -1)
        out = self._outputs[i]
        if i == len(self.modules) - 1:
            self._input, self._outputs = None, ()
        return out


def _can_pack(linears: list[nn.Linear]) -> bool:
    """Whether this PyTorch can pack for MKL, and memory holds a second form of the weights with as much to spare."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if not hasattr(torch.ops.mkl, "_mkl_linear"):
        return False
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return True
    return sum(m.weight.nbytes for m in linears) * 2 < free


def _pack(groups: list[list[nn.Linear]]) -> list[_Pack]:
    # Most of packing is touching fresh memory, which threads of our own do side by side.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(_Pack, groups))


def _sizes(groups: list[list[nn.Linear]]) -> Iterator[int]:
    """Bytes of the groups up to and with each."""
    return accumulate(sum(m.weight.nbytes for m in group) for group in groups)


def _products(work: list[tuple[Callable[[Tensor], Tensor], Tensor]]) -> None:
    for product, x in work:
        product(x)


@torch.inference_mode()
def _trial(groups: list[list[nn.Linear]], packs: list[_Pack]) -> dict[str, float]:
    """Milliseconds of these layers over `_TRIAL_ROWS`, plain and packed, taken in turns; the least of three."""
    total = {"plain": 0.0, "packed": 0.0}
    for rows in _TRIAL_ROWS:
        inputs = {g[0].in_features: torch.zeros(1, rows, g[0].in_features) for g in groups}
        ways: dict[str, Callable[[], Any]] = {
            "plain": partial(_products, [(m, inputs[m.in_features]) for g in groups for m in g]),
            "packed": partial(_products, [(p.product, inputs[p.modules[0].in_features]) for p in packs]),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(3):
            for name, work in ways.items():
                began = time.perf_counter()
                work()
                times[name].append((time.perf_counter() - began) * 1e3)
        for name in ways:
            total[name] += min(times[name])
    return {name: round(ms, 3) for name, ms in total.items()}


# -------------------------------------------------------------------------------------------- norms, attention


def _fused_norm(weight: Tensor, epsilon: float, x: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


def _grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' "sdpa", without a copy of the keys for each query head that shares them.

    query: [B, heads, T, D]; key, value: [B, kv_heads, L, D]; attention_mask: [B, 1, T, L] bool or None.
    Returns [B, T, heads, D].
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=bool(causal) and attention_mask is None and query.shape[2] > 1,
        enable_gqa=bool(query.shape[1] != key.shape[1]),
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, _grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


# ---------------------------------------------------------------------------------------------------- recording


Replay = Callable[..., list[Tensor]]
"""A model's forward over T rows behind a cache's, without Python between its operators:

    replay(tokens [1, T], positions [1, T], mask [1, 1, T, L + T] bool, slots [T], *rows)

`slots` say where the cache takes the new rows; `rows` are each layer's keys and values, [1, kv_heads, capacity,
head_dim], which are written to. Returns logits [1, T, V], then the states [1, T, H] at every boundary, 0 to the number
of layers; the last one is after the final norm."""


class _RecordedLayer(CacheLayerMixin):
    """Rows that came as arguments of the recorded forward."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("a recorded forward brings its rows")

    def place(self, keys: Tensor, values: Tensor, slots: Tensor, end: Any) -> None:
        self.keys, self.values, self.is_initialized = keys, values, True
        self._slots, self._end = slots, end

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self._slots, key_states)
        self.values.index_copy_(2, self._slots, value_states)
        return self.keys[:, :, : self._end], self.values[:, :, : self._end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # the mask is given

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return 0


class _Forward:
    """What is recorded. Lengths are read off the mask, so that the recording holds for all of them. Packed weights are
    arguments, because they cannot be constants of a recording; all other weights are."""

    def __init__(self, model: nn.Module, num_layers: int, packs: list[_Pack]) -> None:
        self.model, self.packs = model, packs
        self.layers = [_RecordedLayer() for _ in range(num_layers)]
        self.packed = [pack.packed for pack in packs]

    def run(self, tokens: Tensor, positions: Tensor, mask: Tensor, slots: Tensor, *more: Tensor) -> list[Tensor]:
        """`more`: the rows, then the packed weights."""
        count = 2 * len(self.layers)
        for i, layer in enumerate(self.layers):
            layer.place(more[2 * i], more[2 * i + 1], slots, mask.shape[-1])
        for pack, packed in zip(self.packs, more[count:], strict=True):
            pack.packed = packed
        try:
            out = self.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                cache=Cache(layers=self.layers),
                use_cache=True,
                output_hidden_states=True,
            )
        finally:
            for pack, packed in zip(self.packs, self.packed, strict=True):
                pack.packed = packed
        return [out.logits, *out.hidden_states]


@torch.inference_mode()
def _record(model: nn.Module, num_layers: int, packs: list[_Pack]) -> Replay | None:
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    forward = _Forward(model, num_layers, packs)

    def example(count: int, length: int, capacity: int) -> tuple[Tensor, ...]:
        """Rows that see every second one before them, and themselves."""
        at = torch.arange(length + count)
        slots = at[length:]
        seen = (at <= slots[:, None]) & (at % 2 == 1) | (at == slots[:, None])
        tokens = torch.arange(7, 7 + count) % config.vocab_size
        rows = torch.linspace(-9, 9, 2 * num_layers * heads * capacity * width).sin()
        return tokens[None], slots[None], seen[None, None], slots, *rows.view(-1, 1, heads, capacity, width).clone()

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # tracing reads every attribute of the model, some of which warn when they are read
    model.requires_grad_(False)  # constants of a recording need no gradients, nor does a model that answers
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tracing warns of every Python branch of the model: it is checked below
            traced = torch.jit.trace(forward.run, (*example(2, 5, 16), *forward.packed), check_trace=False)

        def replay(*given: Tensor) -> list[Tensor]:
            return traced(*given, *forward.packed)

        for count, length, capacity in ((1, 40, 64), (12, 7, 24)):
            given, again = example(count, length, capacity), example(count, length, capacity)
            for a, b in zip(
                [*forward.run(*given, *forward.packed), *given[4:]], [*replay(*again), *again[4:]], strict=True
            ):
                if a.shape != b.shape or not (a - b).abs().max() <= _ROUNDING * (1 + a.abs().max()):
                    return None
    except Exception:  # code of other people, recorded in a way it was not written for: then it is not
        return None
    finally:
        logging.set_verbosity(verbosity)
    return replay


# ------------------------------------------------------------------------------------------------------ threads


def choose_threads(forward: Callable[[], Any]) -> int:
    """Set PyTorch's threads to what reads fastest here: its default, or half of it (cores that share one pipeline, or
    a neighbour that needs them). An `OMP_NUM_THREADS` in the environment stays as it is.

    Args:
        forward: a target forward over a few rows.

    Returns:
        threads in use from now on.
    """
    default = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ or default == 1:
        return default
    times = {}
    for threads in (default, max(default // 2, 1)):
        torch.set_num_threads(threads)
        forward()
        spans = []
        for _ in range(3):
            began = time.perf_counter()
            forward()
            spans.append(time.perf_counter() - began)
        times[threads] = min(spans)
    best = min(times, key=lambda threads: times[threads])
    torch.set_num_threads(best)
    return best
