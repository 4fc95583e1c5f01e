"""The reference run beside the answer: was it the same text, and did speculation pay?

    beside(ours, plain, found)  → {"verdict": "equal", "key": "equal", "n": 128, "speedup": 1.31, "pays": {…}}

`found` is the engine's own judgement (`eagle_core.compare.judge`); nothing is judged again here. A speed-up is a
quotient of two measured wall times. The break-even point is counted in plain forwards: a step that costs as much as
2.1 of them has to emit 2.1 tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle_core.metrics import METRICS, SHORTEST, Run

if TYPE_CHECKING:
    from eagle_core.compare import Verdict

__all__ = ["beside", "pays"]


def beside(ours: Run, plain: Run, found: Verdict) -> dict[str, Any]:
    """What the stage shows under an answer that was decoded plainly as well."""
    key = found.verdict or "ratio"
    told: dict[str, Any] = {
        "verdict": found.verdict or "none",
        "key": key,
        "n": len(ours.ids),
        "pays": pays(ours, plain),
    }
    if found.position is not None:
        told |= {
            "at": found.position + 1,
            "gap": None if found.gap is None else f"{found.gap:.2g}",
            "best": [[s.token, s.text, round(s.logit, 4)] for s in found.best],
            "mine": _label(found, found.ours),
            "plain": _label(found, found.theirs),
        }
    rate = [METRICS["tokens_per_second"].of(run) for run in (ours, plain)]
    if rate[0] and rate[1]:
        told["speedup"] = float(f"{rate[0] / rate[1]:.4g}")  # type: ignore[operator]
    return told


def pays(ours: Run, plain: Run) -> dict[str, Any] | None:
    """Does speculation pay on this answer? None where either run has no step to compare.

    `need` is the mean cost of a step in plain forwards, which is the acceptance length where it breaks even; `draft`,
    `verify` and `other` are its parts; `cause` names the larger reason where it does not pay.
    """
    one, step, tau = METRICS["step_ms"].of(plain), METRICS["step_ms"].of(ours), METRICS["tau"].of(ours)
    if not isinstance(one, float) or not isinstance(step, float) or not isinstance(tau, float) or one <= SHORTEST:
        return None
    parts = {
        k: sum(s.timing.get(f"{k}_ms", 0.0) for s in ours.steps) / len(ours.steps) / one
        for k in ("draft", "verify", "other")
    }
    need = step / one
    told = {"tau": tau, "need": need, "plain_ms": one, **parts}
    cause = None
    if tau < need:
        cause = "draft" if parts["draft"] > parts["verify"] - 1 else "verify"
        if tau < 1.3:
            cause = "accept"
    return {k: float(f"{v:.4g}") for k, v in told.items()} | {"pays": tau >= need, "cause": cause}


def _label(found: Verdict, token: int | None) -> str:
    if token is None:
        return "…"
    return next((s.text for s in found.best if s.token == token), f"#{token}")
