"""The target: any Hugging Face decoder-only LM, its code untouched, taught to read a tree.

A tree is read as one row of tokens with a 4-D boolean mask (who sees whom) and explicit positions (depth, not
slot). `Target` knows the model; a `Session` holds one answer's cache:

    session = target.session(capacity, capture=(2, 15, 27))
    logits, features = session.prefill(ids)          # causal, commits every row
    logits, features = session.verify(tree)          # tree mask, commits nothing
    session.commit(path, count)                      # the accepted rows close ranks behind the text

What a model must be able to do is checked before any forward (`Target.__init__`), and that it really does it by
`Target.self_check`: a tree forward must equal the same paths read one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from eagle_core.cache import LiveCache
from eagle_core.cpu import GROUPED, FastPath, Replay, choose_threads
from eagle_core.errors import UnsupportedTarget
from eagle_core.heads import POST_NORM
from eagle_core.tree import DraftTree, ancestor_mask

__all__ = ["Session", "Target"]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ({},),
    "guidance_scale": (1.0,),
}
"""Parts of a generation config that change the text, and the values at which they do not."""

_PREFILL_CHUNK = 512  # rows of one prefill forward: bounds memory, and how long a cancel has to wait


class Target:
    """A causal LM that can verify draft trees.

    Args:
        model: a transformers causal LM in eval mode, loaded with `attn_implementation` "sdpa" (or "eager").
        tokenizer: its tokenizer, or None for a target that is driven by ids alone.
        name: what to call it on screens and in traces.

    Attributes:
        context: tokens the model can hold, prompt and answer together; with LongRoPE, those of its short factors.
        eos_ids: every id that ends an answer, from the generation config.
        not_applied: what the generation config asks for beyond temperature, top-k, top-p and min-p; the engine does not
            apply it, and events say so.
        lock: held by the answer in progress (see `engine`).
        fast: the CPU path in use (`cpu`), or None for plain transformers.

    Raises:
        UnsupportedTarget: the model cannot verify a tree; the message names the reason.
    """

    def __init__(self, model: Any, tokenizer: Any = None, name: str = "") -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name or getattr(model.config, "name_or_path", "") or type(model).__name__
        self.config = model.config.get_text_config()
        self.lock = threading.Lock()
        self.fast: FastPath | None = None
        self._layer_kinds = _layer_kinds(model, self.config)
        self._window = getattr(self.config, "sliding_window", None)
        self._spare: LiveCache | None = None
        if (attention := self.attention) not in ("sdpa", "eager", GROUPED):
            raise UnsupportedTarget(
                f"{self.name} was loaded with {attention!r} attention, which cannot take a tree mask;"
                " load it with attn_implementation='sdpa'"
            )
        ends = getattr(model, "generation_config", None)
        eos = getattr(ends, "eos_token_id", None)
        eos = self.config.eos_token_id if eos is None else eos
        self.eos_ids: frozenset[int] = frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
        self.not_applied: dict[str, Any] = {
            name: value
            for name, neutral in _NEUTRAL.items()
            if (value := getattr(ends, name, None)) is not None and value not in neutral
        }
        self.context: int = _context(self.config)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def attention(self) -> str:
        """transformers' name of the attention implementation in use."""
        return str(self.config._attn_implementation)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head: the width of the logits."""
        weight = self.lm_head.weight
        assert isinstance(weight, Tensor)
        return int(weight.shape[0])

    @property
    def embedding(self) -> Tensor:
        """[V, H], the input embedding."""
        return self.model.get_input_embeddings().weight

    @property
    def lm_head(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def session(self, capacity: int, capture: Sequence[int] = ()) -> Session:
        """A fresh cache of at least `capacity` rows; buffers of the last session are reused when they fit."""
        cache, self._spare = self._spare, None
        if cache is None or cache.capacity < capacity:
            cache = LiveCache(self.num_layers, -(-capacity // 256) * 256)
        cache.length = 0
        return Session(self, cache, tuple(capture))

    def release(self, session: Session) -> None:
        """Hand a session's buffers back for the next one."""
        self._spare = session.cache

    @torch.inference_mode()
    def forward(
        self,
        cache: LiveCache,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        capture: tuple[int, ...],
        keep: int,
    ) -> tuple[Tensor, Tensor]:
        """One forward over T new rows behind `cache.length` committed ones; commits nothing.

        Args:
            tokens, positions: [T] int64.
            visible: [T, length + T] bool, or None for plain causal order.
            capture: hidden states to return (`heads.POST_NORM` and boundaries).
            keep: logits of the last `keep` rows, 0 for all.

        Returns:
            logits [keep or T, V] float32 and features [T, len(capture) · H] in the model's dtype.
        """
        n = self.num_layers
        replay = self.fast.replay if self.fast is not None and self.fast.on else None
        if replay is not None and keep == 0 and n not in capture:
            rows = cache.rows(cache.length + len(tokens))
            if rows is not None:
                return self._replay(replay, rows, cache.length, tokens, positions, visible, capture)
        wanted = sorted({n if j == POST_NORM else j for j in capture if j != n})
        last_raw: list[Tensor] = []
        hook = None
        if n in capture:  # the state after the last layer before the norm is in no output
            hook = _decoder_layers(self.model, n)[-1].register_forward_hook(
                lambda _m, _a, out: last_raw.append(out[0] if isinstance(out, tuple) else out)
            )
        try:
            out = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                attention_mask=None if visible is None else self._mask(visible, positions, cache.length),
                cache=cache,
                use_cache=True,
                output_hidden_states=wanted or None,
                logits_to_keep=keep,
            )
        finally:
            if hook is not None:
                hook.remove()
        states = out.hidden_states
        parts = [last_raw[0] if j == n else states[n if j == POST_NORM else j] for j in capture]
        features = torch.cat([p[0].to(self.device) for p in parts], -1) if parts else tokens.new_empty(len(tokens), 0)
        return out.logits[0].float(), features

    def _replay(
        self,
        replay: Replay,
        rows: list[Tensor],
        length: int,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        capture: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """`forward` by the recording, over the rows of a cache."""
        slots = torch.arange(length, length + len(tokens))
        if visible is None:
            visible = torch.arange(length + len(tokens)) <= slots[:, None]
        mask = self._mask(visible, positions, length)
        assert isinstance(mask, Tensor)
        logits, *states = replay(tokens[None], positions[None], mask, slots, *rows)
        parts = [states[j][0] for j in capture]  # the state after the norm, `POST_NORM`, is the last
        return logits[0], torch.cat(parts, -1) if parts else tokens.new_empty(len(tokens), 0)

    def _mask(self, visible: Tensor, positions: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """The model's own form of a visibility table: 4-D, windowed where a layer is, additive for "eager"."""
        masks = {}
        for kind in self._layer_kinds:
            mask = visible
            if kind == "sliding_attention":
                seen_at = torch.cat((torch.arange(length, device=positions.device), positions))
                assert self._window is not None
                mask = visible & (positions[:, None] - seen_at[None, :] < self._window)
            if self.attention == "eager":
                floor = torch.finfo(self.dtype).min
                mask = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(~mask, floor)
            masks[kind] = mask[None, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @torch.inference_mode()
    def quicken(self, threads: int = 0) -> None:
        """Take the CPU path, and the number of threads that reads fastest, unless `threads` says how many."""
        self.fast = FastPath(self.model)
        if len(self._layer_kinds) == 1:
            self.fast.record(self.num_layers)
        if threads:
            torch.set_num_threads(threads)
            return
        rows = torch.arange(12, device=self.device) % self.vocab_size
        cache = LiveCache(self.num_layers, 16)
        choose_threads(lambda: self.forward(cache, rows, rows, None, (), 0))

    def plain(self) -> AbstractContextManager[None]:
        """Plain transformers inside the `with`: what a comparison runs."""
        return nullcontext() if self.fast is None else self.fast.off()

    @torch.inference_mode()
    def self_check(self) -> None:
        """Read a small tree at once and its paths one by one; both must agree (three forwards of a few tokens).

        Raises:
            UnsupportedTarget: they differ by more than rounding, so a tree cannot be verified with this model.
        """
        device = self.device
        text, left, right = [
            torch.tensor(ids, device=device) % self.vocab_size for ids in ([11, 7, 5], [3, 2], [13, 17])
        ]
        parents = torch.tensor([-1, 0, 0, 1, 2], device=device)

        def read(rows: Tensor, tree: bool) -> Tensor:
            session = self.session(16)
            session.prefill(text)
            depth = torch.arange(len(rows), device=device)
            seen = torch.ones(len(rows), len(rows), dtype=torch.bool, device=device).tril()
            if tree:
                seen = ancestor_mask(parents, 2)
                depth = seen.sum(1) - 1
            visible = torch.cat((seen.new_ones(len(rows), len(text)), seen), 1)
            return self.forward(session.cache, rows, len(text) + depth, visible, (), 0)[0]

        root = text[:1]
        whole = read(torch.cat((root, left[:1], right[:1], left[1:], right[1:])), True)
        a, b = read(torch.cat((root, left)), False), read(torch.cat((root, right)), False)
        error = torch.stack(((whole[[0, 1, 3]] - a).abs().max(), (whole[[0, 2, 4]] - b).abs().max())).max().item()
        scale = a.abs().max().item()
        tolerance = (1e-3 if self.dtype == torch.float32 else 5e-2) * (1 + scale)
        if not error <= tolerance:
            raise UnsupportedTarget(
                f"{self.name} does not read a draft tree as its paths: logits differ by {error:.3g}, {tolerance:.3g} is"
                " allowed; its attention ignores the tree mask or the positions, so it cannot be a target here"
            )


class Session:
    """One answer's cache on a target. Not shared between threads; the engine holds the target's lock meanwhile."""

    def __init__(self, target: Target, cache: LiveCache, capture: tuple[int, ...]) -> None:
        self.target, self.cache, self.capture = target, cache, capture

    def prefill(self, tokens: Tensor, cancelled: Any = None) -> tuple[Tensor, Tensor]:
        """Read `tokens` [P] causally and commit them all.

        Args:
            cancelled: called between chunks; a true result stops the prefill.

        Returns:
            logits of the last row read [1, V], features of all rows read [≤ P, F].
        """
        features = []
        for chunk in tokens.split(_PREFILL_CHUNK):
            positions = torch.arange(self.cache.length, self.cache.length + len(chunk), device=chunk.device)
            logits, part = self.target.forward(self.cache, chunk, positions, None, self.capture, 1)
            self.cache.advance(len(chunk))
            features.append(part)
            if cancelled is not None and cancelled():
                break
        return logits, torch.cat(features)

    def verify(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """The target at every node of a tree, in one forward; `commit` says what stays.

        Returns:
            logits [N, V] float32 and features [N, F].
        """
        length, n = self.cache.length, len(tree)
        if n == 1:
            positions = torch.full((1,), length, device=tree.tokens.device)
            return self.target.forward(self.cache, tree.tokens, positions, None, self.capture, 0)
        visible = torch.cat((tree.ancestors.new_ones(n, length), tree.ancestors), 1)
        return self.target.forward(self.cache, tree.tokens, length + tree.depth, visible, self.capture, 0)

    def commit(self, path: Tensor, count: int, straight: bool) -> None:
        """Keep the rows of the accepted path. `path`: [≥ count] ascending nodes; `straight`: they are 0, 1, 2, …"""
        if straight:
            self.cache.advance(count)
        else:
            self.cache.commit(path, count)


def _layer_kinds(model: Any, config: Any) -> tuple[str, ...]:
    """The kinds of attention layer a model has; refuses what cannot be rolled back or cannot take a tree mask."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedTarget(f"{name} is an encoder-decoder model; a target must be a decoder-only language model")
    if model.get_output_embeddings() is None:
        raise UnsupportedTarget(f"{name} has no LM head; load the model for causal language modelling")
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        if getattr(model, "_is_stateful", False) or not getattr(config, "num_attention_heads", None):
            raise UnsupportedTarget(
                f"{name} keeps a recurrent state instead of keys and values; a rejected draft could not be taken back"
            )
        windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if windowed else "full_attention"]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedTarget(
            f"{name} has layers of type {', '.join(unknown)}; only full and sliding-window attention can verify a tree,"
            " because a rejected draft must be taken back from the cache"
        )
    if getattr(config, "alibi", False):
        raise UnsupportedTarget(
            f"{name} takes positions from the order of rows (ALiBi), so siblings of a tree cannot share one"
        )
    return tuple(dict.fromkeys(kinds))


def _context(config: Any) -> int:
    """Tokens a model can hold. LongRoPE ends where its short factors do: one position beyond, and every row of a
    forward is rotated by the long factors, so a deep draft would change how its neighbours are read."""
    context = getattr(config, "max_position_embeddings", None) or 1 << 20
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(each for each in rope.values() if isinstance(each, dict))):  # for all layers, or each kind
        if part.get("rope_type") == "longrope":
            context = min(context, part.get("original_max_position_embeddings") or context)
    return int(context)


def _decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of decoder layers: the module list of that length nearest to the root."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedTarget(f"{type(model).__name__} has no list of {count} decoder layers to read a state from")
