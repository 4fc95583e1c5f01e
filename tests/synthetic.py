"""Invented runs for tests: valid events of any shape and text, from a seed. Never used by the product.

The growth is the real rule in miniature (a beam of `top_k`, `top_k` children for each expanded node, the best
`total - 1` candidates by value kept), the verdicts are dice, so that every fate turns up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from eagle_core.events import Candidate, Choice, Event, Fate, Finish, Node, Start, Step

WORDS = [
    " the",
    " a",
    " of",
    " tree",
    " and",
    " grows",
    " from",
    " its",
    " root",
    " to",
    " every",
    " leaf",
    " in",
    " one",
    " forward",
    ",",
    " so",
    " that",
    ".",
    " speculative",
    " decoding",
    " keeps",
    " what",
    " target",
    " would",
    " have",
    " said",
    " anyway",
    " 10",
    "+",
    "2",
    "=",
    "12",
    "\n",
    "def",
    " fib",
    "(",
    "n",
    "):",
    "\n    ",
    " return",
    " n",
    " if",
    " n",
    " <",
    " 2",
    " else",
]


def run(
    seed: int = 0,
    *,
    steps: int = 12,
    total: int = 24,
    depth: int = 6,
    top_k: int = 8,
    texts: Sequence[str] = WORDS,
    method: str = "eagle3",
    sharpness: float = 0.62,
    temperature: float = 0.0,
    cut: bool = False,
) -> list[Event]:
    """One complete run. `sharpness`: the share of its parent's probability that a best child gets."""
    rng = random.Random(seed)
    ids = {text: i for i, text in enumerate(dict.fromkeys(texts))}

    def token() -> tuple[int, str]:
        text = rng.choice(list(ids))
        return ids[text], text

    prompt = [rng.randrange(49152) for _ in range(17)]
    first = Choice(*token(), 0.8)
    settings = {
        "total_token": total,
        "depth": depth,
        "top_k": top_k,
        "expand_by": "value",
        "rerank": True,
        "static_tree": None,
    }
    out: list[Event] = [
        Start(
            method=method,
            pair={"target": "tiny", "drafter": "tiny-head", "layers": [2, 15, 27], "context": 8192},
            sampling={"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": seed},
            settings=settings, max_new_tokens=128, stop=[], prompt_ids=prompt,
            prompt_text="<|im_start|>user\nWhy does a tree help?<|im_end|>\n<|im_start|>assistant\n",
            first=first, emitted=[first.token], text=first.text, prefill_ms=41.2,
            device="cpu", dtype="float32", attention="sdpa", threads=2, versions={"torch": "0"}, machine="test",
        )
    ]  # fmt: skip
    root, position, drafted, kept, tokens, ms = first, len(prompt), 0, 0, 1, 41.2
    for index in range(steps):
        step, root = _step(rng, token, index, position, root, settings, sharpness, cut and index == steps - 1)
        out.append(step)
        position += len(step.accepted)
        drafted, kept, tokens = drafted + len(step.nodes) - 1, kept + len(step.accepted) - 1, tokens + len(step.emitted)
        ms += sum(step.timing.values())
    out.append(
        Finish(
            reason="eos" if cut else "length", text="", steps=steps, tokens=tokens, drafted=drafted, accepted=kept,
            seconds=ms / 1000, timing={"prefill_ms": 41.2},
        )
    )  # fmt: skip
    return out


def _step(rng, token, index, position, root, settings, sharpness, cut) -> tuple[Step, Choice]:  # type: ignore[no-untyped-def]
    total, depth, top_k = settings["total_token"], settings["depth"], settings["top_k"]
    rows: list[dict] = [
        {"token": root.token, "text": root.text, "parent": -1, "depth": 0, "c": 1.0, "v": 1.0, "expanded": total > 1}
    ]
    beam, forwards = [0], 0
    for level in range(1, depth + 1):
        if total == 1:
            break
        forwards += 1
        made = []
        for b in beam:
            left = 1.0
            for _ in range(top_k):
                c = left * sharpness * rng.uniform(0.5, 1.2)
                c = min(c, left)
                left -= c
                t, text = token()
                made.append(len(rows))
                rows.append(
                    {
                        "token": t,
                        "text": text,
                        "parent": b,
                        "depth": level,
                        "c": c,
                        "v": rows[b]["v"] * c,
                        "expanded": False,
                    }
                )
        beam = sorted(made, key=lambda i: -rows[i]["v"])[:top_k]
        if level < depth:
            for b in beam:
                rows[b]["expanded"] = True
    order = sorted(range(1, len(rows)), key=lambda i: (-rows[i]["v"], i))
    chosen = sorted([0, *order[: total - 1]])
    new = {old: i for i, old in enumerate([*chosen, *sorted(set(range(len(rows))) - set(chosen))])}
    children: dict[int, list[int]] = {}
    for old in chosen[1:]:
        children.setdefault(rows[old]["parent"], []).append(old)
    draws: dict[int, Choice] = {}
    for old in chosen:
        kids = children.get(old, [])
        if kids and rng.random() < 0.72:
            kid = rng.choices(kids, [rows[k]["c"] + 1e-6 for k in kids])[0]
            draws[old] = Choice(rows[kid]["token"], rows[kid]["text"], rng.uniform(0.4, 1.0))
        else:
            draws[old] = Choice(*token(), rng.uniform(0.2, 1.0))
    walk = [0]
    while (
        nxt := next((k for k in children.get(walk[-1], []) if rows[k]["token"] == draws[walk[-1]].token), None)
    ) is not None:
        walk.append(nxt)
    emitted = [rows[k]["token"] for k in walk[1:]] + [draws[walk[-1]].token]
    texts = [rows[k]["text"] for k in walk[1:]] + [draws[walk[-1]].text]
    kept = max(1, len(emitted) - 2) if cut else len(emitted)

    def fate(old: int) -> Fate:
        if old == 0:
            return "root"
        if old in walk:
            return "accepted" if walk.index(old) <= kept else "past the stop"
        return "not the draw" if rows[old]["parent"] in walk else "parent rejected"

    def node(old: int) -> Node:
        r, d = rows[old], draws[old]
        hit = old and rows[old]["token"] == draws[r["parent"]].token
        p = 1.0 if old == 0 else draws[r["parent"]].p if hit else rng.uniform(0, 0.3)
        return Node(
            new[old], r["token"], r["text"], new.get(r["parent"], -1), r["depth"], r["c"], r["v"], p, fate(old),
            d.token, d.text, d.p, r["expanded"],
        )  # fmt: skip

    bonus = draws[walk[-1]]
    nodes = [node(old) for old in chosen]
    dropped = [
        Candidate(i, r["token"], r["text"], new[r["parent"]], r["depth"], r["c"], r["v"], r["expanded"])
        for old, i in sorted(new.items(), key=lambda kv: kv[1])
        if i >= len(chosen)
        for r in [rows[old]]
    ]
    timing = {"draft_ms": 4.0 * forwards, "verify_ms": 30 + 0.5 * len(nodes), "other_ms": 1.5}
    step = Step(
        index=index, position=position, nodes=nodes, dropped=dropped, accepted=[new[old] for old in walk], bonus=bonus,
        top=[bonus, Choice(0, " runner-up", bonus.p / 2)], emitted=emitted[:kept], text="".join(texts[:kept]),
        timing=timing, forwards=forwards, settings=settings, outside=[],
    )  # fmt: skip
    return step, bonus
