"""The one noun: `DraftTree`, a guess at how the text goes on, as a tree of tokens.

Node 0 is the *root*: the last emitted token, whose keys and values the target does not hold yet. Every other
node is a drafted token that may follow its parent. Vanilla decoding is a tree of one node; a chain, a
prompt-lookup continuation or a block drafter's output is a path; Medusa and EAGLE-1 are a fixed template;
EAGLE-2 and EAGLE-3 grow theirs. A parent always precedes its children, so one pass in index order suffices
for everything below.

    tokens   = [ the, cat, dog, sat, ran ]            the ─┬─ cat ─┬─ sat
    parents  = [  -1,   0,   0,   1,   1 ]                 │       └─ ran
    depth    = [   0,   1,   1,   2,   2 ]                 └─ dog
    ancestors (row i = what node i may attend to inside the tree; the *tree attention mask*):
        the  1 . . . .
        cat  1 1 . . .
        dog  1 . 1 . .
        sat  1 1 . 1 .
        ran  1 1 . . 1

The target reads the nodes as one row of `N` tokens: node i sits at absolute position `committed + depth[i]`,
in cache slot `committed + i`, and attends to all committed text plus `ancestors[i]`.
Source: EAGLE-2 §4 (tree attention); `topK_genrate` of the reference implementation builds the same mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BOTH", "HEAD", "LOOKUP", "Candidates", "DraftTree", "ancestor_mask", "path_tree", "root_tree"]

HEAD, LOOKUP, BOTH = range(3)
"""Who drafted a node, where a method has two sources: numbers of `events.SOURCES`."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Everything the drafter scored in one step, kept or not: enough to replay the growth.

    Rows are in generation order: level by level, the best beam node's children first. All tensors have
    length M, on the drafter's device, and are never read on the step's critical path.

    Attributes:
        tokens: [M] int64, target token ids.
        parents: [M] int64, row of the parent, −1 for a child of the root.
        depth: [M] int64, 1 for a child of the root.
        confidence: [M] float32, draft probability given the parent.
        value: [M] float32, product of confidences along the path.
        node: [M] int64, index of the tree node it became, −1 where rerank left it out, −2 where the row is void: a
            looked-up token that stands there as the drafter's candidate already.
        source: [M] int64, `HEAD`, `LOOKUP` or `BOTH`; None for a drafter of one source.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    confidence: Tensor
    value: Tensor
    node: Tensor
    source: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """A draft tree of N nodes on one device. Invariants: `parents[0] == -1`, `0 <= parents[i] < i`.

    Attributes:
        tokens: [N] int64, target token ids; `tokens[0]` is the last emitted token.
        parents: [N] int64.
        ancestors: [N, N] bool, reflexive: row i holds node i and its ancestors.
        confidence: [N] float32, draft probability given the parent (1 for the root).
        value: [N] float32, product of confidences along the path (1 for the root).
        forwards: drafter forwards it took to draft this tree.
        candidates: all that was scored, for methods that choose among candidates.
        proposal: [N, V] float32, row i the drafter's processed distribution from which the child of node i was
            sampled; only for sampled drafts, which the ratio rule verifies.
        source: [N] int64, who drafted each node (the root's means nothing); None for a drafter of one source.
    """

    tokens: Tensor
    parents: Tensor
    ancestors: Tensor
    confidence: Tensor
    value: Tensor
    forwards: int = 0
    candidates: Candidates | None = None
    proposal: Tensor | None = None
    source: Tensor | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def depth(self) -> Tensor:
        """[N] int64, edges between each node and the root."""
        return self.ancestors.sum(1) - 1


def ancestor_mask(parents: Tensor, max_depth: int) -> Tensor:
    """The reflexive ancestor relation of a parent array, without a loop over nodes or a host sync.

    `A ← A ∪ A·A` doubles the reach of every row, so `ceil(log2(max_depth + 1))` products close it.

    Args:
        parents: [N] int64, −1 for the root.
        max_depth: an upper bound of the depth of any node.

    Returns:
        [N, N] bool.
    """
    n = parents.shape[0]
    index = torch.arange(n, device=parents.device)
    reach = (index[None, :] == parents[:, None]) | (index[None, :] == index[:, None])
    for _ in range(max(max_depth, 1).bit_length()):
        counts = reach.float()
        reach = counts @ counts > 0
    return reach


def root_tree(token: Tensor, forwards: int = 0) -> DraftTree:
    """The tree of one node: what vanilla decoding verifies. `token`: [1] int64."""
    return path_tree(token, token.new_ones(1, dtype=torch.float32), forwards)


def path_tree(tokens: Tensor, confidence: Tensor, forwards: int = 0, proposal: Tensor | None = None) -> DraftTree:
    """A tree without branches: root first, every node the child of the one before it.

    Args:
        tokens: [N] int64.
        confidence: [N] float32, 1 for the root.
        forwards: drafter forwards spent.
        proposal: see `DraftTree.proposal`.
    """
    n = tokens.shape[0]
    index = torch.arange(n, device=tokens.device)
    return DraftTree(
        tokens,
        index - 1,
        index[:, None] >= index[None, :],
        confidence,
        confidence.cumprod(0),
        forwards,
        None,
        proposal,
    )
