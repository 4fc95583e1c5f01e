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

Sources: EAGLE §4.2 (template), EAGLE-2 §4.1 (expansion) and §4.2 (reranking).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle_core.budget import best_size, next_level_pays
from eagle_core.drafters.base import MAX_NODES, TreeSettings
from eagle_core.errors import InvalidRequest
from eagle_core.tree import Candidates, DraftTree, ancestor_mask, root_tree

__all__ = ["EAGLE1_TREE", "Expand", "Template", "grow_dynamic", "grow_template"]


class Expand(Protocol):
    """What growth needs of a drafter. Each call is one drafter forward."""

    to_target: Tensor | None
    """[Vd] int64, target id of every draft id; None if they are the same."""

    def first(self) -> Tensor:
        """[1, Vd] float32, log-probabilities of the root's children (computed by the extend forward)."""

    def level(self, parents: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """Run on B nodes of one level. `parents`: [B] int64, each one's row among the nodes of the last call (0 on
        level 1, the extend's last pair); `tokens`: [B] target ids. Returns [B, Vd] float32 log-probabilities."""


def grow_dynamic(expand: Expand, root: Tensor, settings: TreeSettings) -> DraftTree:
    """EAGLE-2's tree (EAGLE-3 grows the same one).

    Args:
        expand: the drafter.
        root: [1] int64, the last emitted token.
        settings: `total_token`, `depth`, `top_k`, `expand_by`, `rerank`.

    Returns:
        A tree of min(total_token, candidates + 1) nodes, with all candidates.
    """
    depth = settings.depth
    logp = expand.first()
    k = min(settings.top_k, logp.shape[-1])
    logp, token = _likeliest(logp, k)  # [1, K]
    device = root.device
    levels: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # token, parent candidate, log-confidence, log-value
    in_beam: list[Tensor] = []
    above = torch.full((1,), -1, device=device)  # candidate number of each expanded node
    above_value = torch.zeros(1, device=device)
    made = 0  # candidates of the levels before
    costs = settings.auto if root.device.type == "cpu" else None  # elsewhere, looking at values would stall the device
    for d in range(1, depth + 1):
        confidence = logp.flatten()
        value = (above_value[:, None] + logp).flatten()
        tokens = token.flatten() if expand.to_target is None else expand.to_target[token.flatten()]
        levels.append((tokens, above.repeat_interleave(k), confidence, value))
        rank = value if settings.expand_by == "value" else confidence
        beam = _ranked(rank)[:k]
        in_beam.append(torch.zeros(len(rank), dtype=torch.bool, device=device).index_fill_(0, beam, True))
        if costs is not None and d < depth:
            ranked = torch.cat([part[3] for part in levels]).sort(descending=True).values.exp().tolist()
            parents_worth, worth = above_value.exp().sum().item(), value[beam].exp()
            share = min(worth.sum().item() / max(parents_worth, 1e-9), 1.0)
            if not next_level_pays(ranked, worth.tolist(), share, costs, costs.extend_ms + (d - 1) * costs.level_ms):
                depth = d
        if d < depth:
            logp, token = _likeliest(expand.level(beam // k, tokens[beam], d), k)
            above, above_value = made + beam, value[beam]
        made += len(rank)
        if d == depth:
            break
    tokens, parents, confidence, value = (torch.cat(parts) for parts in zip(*levels, strict=True))
    beams = torch.cat(in_beam)
    count = min(settings.limit - 1, made if settings.rerank else k * depth)
    if costs is not None:
        ranked = value.sort(descending=True).values.exp().tolist()
        count = min(count, best_size(ranked, costs, costs.extend_ms + (depth - 1) * costs.level_ms)[0] - 1)
    if settings.rerank:
        chosen = _ranked(value)[:count].sort().values
    else:  # what the beam kept, level by level: its first `count`
        chosen = beams.logical_not().to(torch.int8).argsort(stable=True)[:count].sort().values
    node = torch.full((made,), -1, device=device).index_copy_(0, chosen, torch.arange(1, count + 1, device=device))
    parent_node = torch.where(parents[chosen] < 0, 0, node[parents[chosen].clamp_min(0)])
    tree_parents = torch.cat((parents.new_full((1,), -1), parent_node))
    level_of = torch.cat([torch.full((len(part[0]),), d, device=device) for d, part in enumerate(levels, 1)])
    one = value.new_ones(1)
    confidence, value = confidence.exp(), value.exp()
    return DraftTree(
        torch.cat((root, tokens[chosen])),
        tree_parents,
        ancestor_mask(tree_parents, depth),
        torch.cat((one, confidence[chosen])),
        torch.cat((one, value[chosen])),
        depth,
        Candidates(tokens, parents, level_of, confidence, value, node),
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
