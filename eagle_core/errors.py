"""What can go wrong, told to the person who can mend it.

Every mistake a user can make raises a subclass of `EagleError`; its message is one or two sentences
that say what was wrong, what was found, and what to do. Mistakes of a programmer `assert` instead.

    EagleError
    ├── InvalidRequest      a setting or a prompt that cannot be honoured
    ├── EngineBusy          a second answer was asked of an engine that is still giving one
    ├── UnsupportedTarget   a model that cannot verify a tree
    ├── NotFinite           a target that computed NaN or infinity
    ├── CheckpointError     a drafter's files: missing, damaged, contradictory, or of another kind
    ├── PairMismatch        a sound drafter that belongs to another target
    ├── ModelNotFound       weights that are neither in the cache nor reachable
    ├── TraceError          a trace file that cannot be read
    └── TrainingError       a corpus or a training run that cannot go on
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "EagleError",
    "EngineBusy",
    "InvalidRequest",
    "ModelNotFound",
    "NotFinite",
    "PairMismatch",
    "TraceError",
    "TrainingError",
    "UnsupportedTarget",
]


class EagleError(Exception):
    """Base of every error a user can cause; catching it catches them all."""


class InvalidRequest(EagleError, ValueError):
    """A setting or a prompt that cannot be honoured; raised before any forward."""


class EngineBusy(EagleError):
    """Another answer is being generated on this engine; finish, cancel or close it first."""


class UnsupportedTarget(EagleError):
    """A model that cannot verify a draft tree; raised before any forward."""


class NotFinite(EagleError):
    """The target computed NaN or infinity, so no token can be drawn; the answer ends with what was told before."""


class CheckpointError(EagleError):
    """A drafter checkpoint that is missing, damaged, contradictory or of an unknown kind."""


class PairMismatch(EagleError):
    """A sound drafter checkpoint that does not fit this target."""


class ModelNotFound(EagleError):
    """Weights that are neither cached nor reachable."""


class TraceError(EagleError, ValueError):
    """A trace that is not ours, is damaged, or is of a newer schema."""


class TrainingError(EagleError):
    """A corpus that does not fit, or a training run that cannot go on."""
