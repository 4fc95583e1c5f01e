"""Plain decoding, the method every other one is measured against."""

from __future__ import annotations

from eagle_core.drafters.base import Drafter, Feedback, TreeSettings
from eagle_core.tree import DraftTree, root_tree

__all__ = ["Vanilla"]


class Vanilla(Drafter):
    """Drafts nothing: the tree is its root, the target's draw is the only token of a step."""

    def propose(self, feedback: Feedback, settings: TreeSettings) -> DraftTree:
        return root_tree(feedback.root)
