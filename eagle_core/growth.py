"""How a tree grows out of a drafter: a fixed template (EAGLE-1) or dynamically (EAGLE-2, EAGLE-3).

Both ask the same of the drafter, an `Expand`: run on some nodes, give each one's log-probabilities. Growing is
level by level, one drafter forward a level:

    level 1    children of the root           top_k candidates, from the extend forward
    level 2…   the beam's children            top_k candidates for each of the top_k best candidates of the level above
    rerank     all candidates of all levels   the `total_token − 1` of highest value become the tree

so a tree of depth D costs D drafter forwards (the extend and D − 1 levels) and weighs
`top_k + (D − 1) · top_k²` candidates. Values are products of confidences, so no child outranks its parent;
scores are float32 and ties go to the earlier candidate, so the chosen set always holds every parent (an
unstable top-k, or scores in half precision, may keep a child and drop its parent).

A text that repeats itself is drafted better by looking it up (`drafters.lookup`). What a lookup found, a chain of
tokens behind the root, can be *grafted*: one tree, one budget, one rerank.

    level 1    sat .41  lay .22  ran .09      the chain says sat: both agree, so the candidate's odds rise
    level 2    on .70   by .08                the chain says on: likewise
    level 3    the .31  a .20                 the chain says Mr.: one candidate more
    beyond                                    Whiskers, said, …: the drafter is not asked

Sources: EAGLE §4.2 (template), EAGLE-2 §4.1 (expansion) and §4.2 (reranking).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from eagle_core.budget import Pace, best_size, next_level_pays
from eagle_core.drafters.base import MAX_NODES, TreeSettings
from eagle_core.errors import InvalidRequest
from eagle_core.tree import BOTH, HEAD, LOOKUP, Candidates, DraftTree, ancestor_mask, root_tree

__all__ = ["EAGLE1_TREE", "Expand", "Graft", "Template", "grow_dynamic", "grow_template"]

_FLOOR = 1e-3  # its probability is held between this and 1 minus this before its odds are taken


class Expand(Protocol):
    """What growth needs of a drafter. Each call is one drafter forward."""

    to_target: Tensor | None
    """[Vd] int64, target id of every draft id; None if they are the same."""

    def first(self) -> Tensor:
        """[1, Vd] float32, log-probabilities of the root's children (computed by the extend forward)."""

    def level(self, parents: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """Run on B nodes of one level. `parents`: [B] int64, each one's row among the nodes of the last call (0 on
        level 1, the extend's last pair); `tokens`: [B] target ids. Returns [B, Vd] float32 log-probabilities."""


@dataclass(frozen=True, slots=True, eq=False)
class Graft:
    """A chain that a lookup says follows the root; of length 0 where it found nothing.

    Two opinions on one token are *pooled* in log-odds: with c the drafter's probability and r the lookup's rate,

        logit P = logit r + agreement + trust · logit c       and the token's siblings share what is left, 1 − P,

    so the children of a node still sum to 1 at most, values stay probabilities, and one rerank weighs both sources.
    `agreement` is there because two that agree are more certain than either. Where the drafter was not asked (behind
    its last level, behind a node that the beam left out, about a token that it lacks) r stands alone.

    Attributes:
        tokens: [L] int64, target ids, on the drafter's device.
        draft: [L] the drafter's own id of each token; None where it cannot draft it.
        alone: [L] float32, log r, on the drafter's device.
        odds: [L] float32, logit r + agreement, on the drafter's device.
        trust: [L] float32, on the drafter's device.
    """

    tokens: Tensor
    draft: Sequence[int | None]
    alone: Tensor
    odds: Tensor
    trust: Tensor

    def __len__(self) -> int:
        return len(self.draft)

    def pooled(self, logp: Tensor, parent: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """What becomes of the chain's token `i` and of its siblings.

        Args:
            logp: [B, Vd], the drafter's, of the nodes it ran on.
            parent: [B] bool, which of them the token follows; none where the beam left that one out.

        Returns:
            log P [], and what its siblings' log-probabilities gain or lose [].
        """
        j = self.draft[i]
        if j is None:  # a drafter says nothing of words that it lacks
            return self.alone[i], torch.where(parent.any(), (-self.alone[i].exp()).log1p(), 0)
        said = torch.where(parent, logp[:, j], 0).sum()
        said = said.nan_to_num(-torch.inf).clamp(math.log(_FLOOR), math.log1p(-_FLOOR))
        rest = (-said.exp()).log1p()
        odds = self.odds[i] + self.trust[i] * (said - rest)
        asked = parent.any()
        return torch.where(asked, logsigmoid(odds), self.alone[i]), torch.where(asked, logsigmoid(-odds) - rest, 0)


class _Level(NamedTuple):
    """Candidates of one level, a row each: see `Candidates`. `void` rows are none, `beam` rows are to be expanded."""

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    confidence: Tensor
    value: Tensor
    source: Tensor
    void: Tensor
    beam: Tensor


def grow_dynamic(
    expand: Expand,
    root: Tensor,
    settings: TreeSettings,
    graft: Graft | None = None,
    pace: Pace | None = None,
) -> DraftTree:
    """EAGLE-2's tree (EAGLE-3 grows the same one), with a looked-up chain grafted on if there is one.

    Args:
        expand: the drafter.
        root: [1] int64, the last emitted token.
        settings: `total_token`, `depth` (of what the drafter drafts), `top_k`, `expand_by`, `rerank`. Without rerank
            the beam is the tree, so of the chain only what the beam took up.
        graft: what a lookup found; it may reach deeper than `depth`.
        pace: what the answer has taught about its drafts, where `total_token` −1 decides by it.

    Returns:
        A tree of min(total_token, candidates + 1) nodes, with all candidates. Where a chain was grafted it may lack a
        candidate for each level, as only the device knows which of the chain's tokens the drafter had drafted itself.
    """
    depth, device = settings.depth, root.device
    logp = expand.first()
    k = min(settings.top_k, logp.shape[-1])
    levels: list[_Level] = []
    made = 0  # candidates of the levels before
    above = torch.full((1,), -1, device=device)  # candidate number of each expanded node
    above_value = torch.zeros(1, device=device)
    chain = 0 if graft is None else len(graft)
    tip, tip_value = above, above_value  # [1], the candidate of the chain's last token
    if pace is None and settings.auto is not None and device.type == "cpu":  # elsewhere, looking at values would stall
        pace = Pace(settings.auto)
    for d in range(1, depth + 1):
        top, token = _likeliest(logp, k)
        if expand.to_target is not None:
            token = expand.to_target[token]
        parent_row = torch.arange(len(above), device=device).repeat_interleave(k)
        if pace is not None:
            weight = above_value.exp()
            pace.level(d, ((weight[:, None] * top.exp()).sum(0) / weight.sum().clamp_min(1e-9)).tolist())
        tokens, parents, source = token.flatten(), above[parent_row], torch.full_like(parent_row, HEAD)
        if graft is not None and d <= chain:
            parent = above == tip
            mine, others = graft.pooled(logp, parent, d - 1)
            same = parent[:, None] & (token == graft.tokens[d - 1])
            top = torch.where(same, mine, (top + torch.where(parent, others, 0)[:, None]).clamp_max(0))
            source = torch.where(same.flatten(), BOTH, source)
        confidence = top.flatten()
        value = above_value[parent_row] + confidence
        void = unranked = torch.zeros_like(value, dtype=torch.bool)
        if graft is not None and d <= chain:  # the chain's token as one candidate more, void if it is there already
            tip_value = tip_value + mine
            merged = same.any()[None]
            tokens = torch.cat((tokens, graft.tokens[d - 1 : d]))
            parents = torch.cat((parents, tip))
            parent_row = torch.cat((parent_row, parent.to(torch.int8).argmax()[None]))
            confidence, value = torch.cat((confidence, mine[None])), torch.cat((value, tip_value))
            source = torch.cat((source, source.new_full((1,), LOOKUP)))
            unranked = torch.cat((void, merged | ~parent.any()))  # behind a node that was not run, none can be
            void = torch.cat((void, merged))
            tip_row = torch.where(merged, same.flatten().to(torch.int8).argmax(), len(value) - 1)
            tip = made + tip_row
        rank = (value if settings.expand_by == "value" else confidence).masked_fill(unranked, -torch.inf)
        beam = _ranked(rank)[:k]
        in_beam = torch.zeros_like(void).index_fill_(0, beam, True)
        levels.append(_Level(tokens, parents, torch.full_like(parents, d), confidence, value, source, void, in_beam))
        if pace is not None and d < depth:
            worth = value[beam].exp() * pace.scale(d + 1)
            known = [level.value[~level.void].exp() * pace.scale(i) for i, level in enumerate(levels, 1)]
            if graft is not None and d <= chain:  # what the chain goes on with is there without another forward
                known.append((tip_value + graft.alone[d:].cumsum(0)).exp())
                worth = torch.where(beam == tip_row, 0, worth)
            best_first = torch.cat(known).sort(descending=True).values.tolist()
            shares = pace.hands_down(d + 1)
            if not next_level_pays(best_first, worth.tolist(), shares, pace.costs, pace.costs.drafting(d)):
                depth = d
        if d < depth:
            logp = expand.level(parent_row[beam], tokens[beam], d)
            above, above_value = made + beam, value[beam]
        made += len(value)
        if d == depth:
            break
    grafted = min(depth, chain)
    if graft is not None and chain > depth and settings.rerank:
        rest = torch.arange(chain - depth, device=device)
        alone, plain = graft.alone[depth:], torch.zeros_like(rest, dtype=torch.bool)
        parents = torch.where(rest == 0, tip, made + rest - 1)
        lookup = torch.full_like(rest, LOOKUP)
        beyond = tip_value + alone.cumsum(0)
        levels.append(_Level(graft.tokens[depth:], parents, depth + 1 + rest, alone, beyond, lookup, plain, plain))
        made += len(rest)
    rows = _Level(*(torch.cat(parts) for parts in zip(*levels, strict=True)))
    count = min(settings.limit - 1, made - grafted if settings.rerank else k * depth)
    score = rows.value.clamp_min(torch.finfo(torch.float32).min).masked_fill(rows.void, -torch.inf)
    order = _ranked(score)
    if pace is not None:
        scale = torch.tensor([pace.scale(d) for d in range(max(depth, chain) + 1)])
        worths = (score.exp() * scale[rows.depth])[order].tolist()
        count = min(count, best_size(worths, pace.costs, pace.costs.drafting(depth))[0] - 1)
    if settings.rerank:
        chosen = order[:count].sort().values
    else:  # what the beam kept, level by level: its first `count`
        chosen = rows.beam.logical_not().to(torch.int8).argsort(stable=True)[:count].sort().values
    node = torch.where(rows.void, -2, -1).index_copy_(0, chosen, torch.arange(1, count + 1, device=device))
    parent_node = torch.where(rows.parents[chosen] < 0, 0, node[rows.parents[chosen].clamp_min(0)])
    tree_parents = torch.cat((parent_node.new_full((1,), -1), parent_node))
    one = rows.value.new_ones(1)
    confidence, value = rows.confidence.exp(), rows.value.exp()
    who = None if graft is None else rows.source
    return DraftTree(
        torch.cat((root, rows.tokens[chosen])),
        tree_parents,
        ancestor_mask(tree_parents, max(depth, chain)),
        torch.cat((one, confidence[chosen])),
        torch.cat((one, value[chosen])),
        depth,
        Candidates(rows.tokens, rows.parents, rows.depth, confidence, value, node, who),
        source=None if who is None else torch.cat((who.new_full((1,), HEAD), who[chosen])),
    )


def _likeliest(logp: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` highest of each row, and where they are. Where a head overflowed, NaN counts as impossible: it compares
    with nothing, so a NaN child could be kept without its parent and would then be read as a child of the root."""
    values, index = logp.topk(k, -1)
    return values.nan_to_num(-torch.inf, neginf=-torch.inf), index


def _ranked(score: Tensor) -> Tensor:
    """Indices from the highest score down; ties go to the lower index, so to the earlier candidate."""
    return score.sort(descending=True, stable=True).indices


@dataclass(frozen=True, slots=True)
class Template:
    """A static tree as rank paths: `(0, 2)` is the third-likeliest child of the likeliest child of the root.

    Args of `parse`: paths in any order; every prefix must be present. Rows are sorted by (length, path), so parents
    precede children.
    """

    paths: tuple[tuple[int, ...], ...]

    @classmethod
    def parse(cls, paths: Sequence[Sequence[int]]) -> Template:
        """Check and sort. Raises `InvalidRequest` naming the offending path."""
        for path in paths:
            if not path or any(not isinstance(r, int) or isinstance(r, bool) or not 0 <= r < 64 for r in path):
                raise InvalidRequest(f"static tree: {list(path)} is no path; ranks are whole numbers from 0 to 63")
        rows = sorted({tuple(p) for p in paths}, key=lambda p: (len(p), p))
        if not rows:
            raise InvalidRequest("the static tree is empty; give at least one path such as [0]")
        if len(rows) + 1 > MAX_NODES:
            raise InvalidRequest(
                f"the static tree has {len(rows)} drafted nodes; with the root at most {MAX_NODES} fit, leave some out"
            )
        known = set(rows)
        for path in rows:
            if len(path) > 1 and path[:-1] not in known:
                raise InvalidRequest(f"static tree: {list(path)} has no parent; add {list(path[:-1])}")
        return cls(tuple(rows))

    def cut(self, depth: int, ranks: int) -> Template:
        """The same template without nodes deeper than `depth` or of a rank that a vocabulary of `ranks` lacks."""
        return Template(tuple(p for p in self.paths if len(p) <= depth and max(p) < ranks))


EAGLE1_TREE = Template(
    (
        *((a,) for a in range(4)),
        *((0, a) for a in range(3)),
        *((1, a) for a in range(2)),
        *((2, a) for a in range(2)),
        (3, 0),
        *((0, 0, a) for a in range(3)),
        *((0, 1, a) for a in range(2)),
        *((0, 2, a) for a in range(2)),
        (1, 0, 0),
        *((0, 0, 0, a) for a in range(3)),
        *((0, 0, 0, 0, a) for a in range(2)),
    )
)
"""The reference's default: 25 drafted nodes, 4 / 8 / 8 / 3 / 2 by level (its name there is mc_sim_7b_63)."""


def grow_template(expand: Expand, root: Tensor, template: Template) -> DraftTree:
    """EAGLE-1's tree: the same shape at every step, filled with each inner node's own likeliest children.

    Only inner nodes are run, so a template of depth D costs D drafter forwards.
    """
    device = root.device
    paths = template.paths
    if not paths:  # every rank lies beyond the draft vocabulary
        return root_tree(root, 1)
    index = {path: i + 1 for i, path in enumerate(paths)}
    parents = torch.tensor([-1] + [index.get(p[:-1], 0) for p in paths]).to(device, non_blocking=True)
    inner: list[tuple[int, ...]] = [()]  # nodes with children, of the level above
    logp = expand.first()
    tokens, confidence, value = [root], [root.new_ones(1, dtype=torch.float32)], [root.new_ones(1, dtype=torch.float32)]
    depth = max(map(len, paths))
    for d in range(1, depth + 1):
        rows = [p for p in paths if len(p) == d]
        parent_row = torch.tensor([inner.index(p[:-1]) for p in rows]).to(device, non_blocking=True)
        rank = torch.tensor([p[-1] for p in rows]).to(device, non_blocking=True)
        likeliest_logp, likeliest = _likeliest(logp, max(p[-1] for p in rows) + 1)
        ids = likeliest[parent_row, rank]
        p = likeliest_logp[parent_row, rank].exp()
        ids = ids if expand.to_target is None else expand.to_target[ids]
        above = torch.cat(value)[torch.tensor([index.get(r[:-1], 0) for r in rows]).to(device, non_blocking=True)]
        tokens.append(ids)
        confidence.append(p)
        value.append(above * p)
        children = [i for i, r in enumerate(rows) if any(q[:-1] == r for q in paths)]
        if d < depth:
            rows_below = torch.tensor(children).to(device, non_blocking=True)
            logp = expand.level(parent_row[rows_below], ids[rows_below], d)
            inner = [rows[i] for i in children]
    return DraftTree(
        torch.cat(tokens),
        parents,
        ancestor_mask(parents, depth),
        torch.cat(confidence),
        torch.cat(value),
        depth,
    )
