"""Verdicts on two answers, and the measured comparison that leads to one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_core.__main__ import main
from eagle_core.compare import (
    TOLERANCE,
    Scored,
    Verdict,
    best_two,
    compare,
    first_difference,
    judge,
    timed,
    verdict,
)
from eagle_core.drafters import TreeSettings
from eagle_core.engine import generate
from eagle_core.events import Event, Step
from eagle_core.target import Target
from eagle_core.verify import Sampling
from tests.conftest import drafter_for, eagle_head, greedy, tiny_model, tiny_target

PROMPT = [3, 14, 15, 9, 26, 5]
TREE = TreeSettings(total_token=9, depth=3, top_k=3)


class TinyPair:
    """What `Pair` offers, over a tiny target with random heads."""

    def __init__(self, target: Target | None = None) -> None:
        self.target = target or tiny_target()
        self._drafters: dict[str, Any] = {}

    def drafter(self, method: str) -> Any:
        if method not in self._drafters:
            self._drafters[method] = drafter_for(method, self.target)
        return self._drafters[method]

    def why_not(self, method: str) -> str | None:
        return None

    def generate(self, prompt: list[int], *, method: str, **request: Any) -> Iterator[Event]:
        return generate(self.target, self.drafter(method), prompt, method=method, **request)


def save_tiny(folder: Path) -> tuple[str, str]:
    """Folders of a tiny chat model and of an EAGLE-3 head for it, as a user would have them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from eagle_core.checkpoints import save_head

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "w1 {% for m in messages %}{{ m['content'] }} {% endfor %}w2"
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template).save_pretrained(folder / "target")
    tiny_model("llama").save_pretrained(folder / "target")
    save_head(eagle_head("eagle3", draft_vocab=37), folder / "head")
    return str(folder / "target"), str(folder / "head")


def command(capsys, *argv: str) -> tuple[str, dict[str, Any]]:
    """What a command prints for people, and the object on its last line."""
    assert main(list(argv)) == 0
    *people, last = capsys.readouterr().out.splitlines()
    return "\n".join(people), json.loads(last)


# ------------------------------------------------------------------------------------------------- verdict


def test_equal_answers():
    assert first_difference([1, 2], [1, 2]) is None
    assert verdict([1, 2], [1, 2]) == Verdict("equal", why="All 2 ids are equal.")


def test_a_close_call_between_the_two_best_is_a_tie():
    found = verdict([1, 2, 3], [1, 9, 3], (Scored(9, "i", 4.0002), Scored(2, "b", 4.0)), tolerance=1e-3)
    assert (found.verdict, found.position, found.ours, found.theirs) == ("tie", 1, 2, 9)
    assert found.gap == pytest.approx(2e-4)
    assert "both are right" in found.why


@pytest.mark.parametrize(
    ("best", "why"),
    [
        ((Scored(9, "i", 4.5), Scored(2, "b", 4.0)), "not rounding"),
        ((Scored(9, "i", 4.0), Scored(7, "g", 4.0)), "not rounding"),  # ours is neither of the two best
        ((), "part at position 1"),
    ],
)
def test_anything_else_is_different(best, why):
    found = verdict([1, 2, 3], [1, 9, 3], best, tolerance=1e-3)
    assert found.verdict == "different" and found.position == 1 and why in found.why


def test_an_answer_that_only_begins_the_other_is_different():
    found = verdict([1, 2], [1, 2, 3])
    assert (found.verdict, found.position, found.ours, found.theirs, found.gap) == ("different", 2, None, 3, None)
    assert "ends at position 2" in found.why


def test_a_wider_dtype_has_a_narrower_tolerance():
    assert TOLERANCE["float64"] < TOLERANCE["float32"] < TOLERANCE["float16"] < TOLERANCE["bfloat16"]


# --------------------------------------------------------------------------------------- with the target


def test_the_gap_is_that_of_a_full_forward(target):
    answer = greedy(target.model, PROMPT, 6)
    with torch.inference_mode():
        logits = target.model(torch.tensor([PROMPT + answer[:4]])).logits[0, -1]
    values, tokens = logits.topk(2)
    assert tokens[0] == answer[4]
    found = judge(target, PROMPT, [*answer[:4], int(tokens[1]), 0], answer)
    assert (found.verdict, found.position) == ("different", 4)
    assert found.gap == pytest.approx(float(values[0] - values[1]), abs=1e-4)
    assert [s.token for s in found.best] == tokens.tolist()
    assert not target.lock.locked()


def test_two_tokens_with_one_row_of_the_head_tie():
    model = deepcopy(tiny_model("llama"))
    first = greedy(model, PROMPT, 1)[0]
    twin = (first + 1) % 61
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[twin] = head[first]
    found = judge(Target(model), PROMPT, [twin], [first])
    assert (found.verdict, found.position) == ("tie", 0)
    assert found.gap == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=5), Sampling(1.3, top_k=7, top_p=0.9, seed=1)])
def test_the_best_of_the_noisy_scores_is_what_vanilla_draws(target, sampling):
    answer = timed(TinyPair(target).generate(PROMPT, method="vanilla", sampling=sampling, max_new_tokens=9)).ids
    for i, token in enumerate(answer):
        best = best_two(target, PROMPT, answer[:i], sampling)
        assert best[0].token == token
        assert best[0].logit >= best[-1].logit


def test_a_single_token_that_top_k_leaves_has_no_rival(target):
    assert len(best_two(target, PROMPT, [], Sampling(1.0, top_k=1))) == 1


# ------------------------------------------------------------------------------------------------ compare


@pytest.mark.parametrize("method", ["vanilla", "lookup", "chain", "eagle1", "eagle2", "eagle3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_method_says_what_vanilla_says(method, temperature):
    found = compare(
        TinyPair(), PROMPT, method=method, sampling=Sampling(temperature, seed=3), settings=TREE, max_new_tokens=24
    )
    assert found.verdict.verdict == "equal" and found.ours.ids == found.vanilla.ids
    assert len(found.ours.ids) == 24 and found.speedup > 0
    assert found.speedup == pytest.approx(found.vanilla.seconds / found.ours.seconds)
    assert len(found.vanilla.run.steps) == 23 and found.vanilla.run.starts[0].prompt_ids == PROMPT


def test_the_ratio_rule_has_no_verdict_by_ids_unless_greedy():
    pair = TinyPair()
    sampled = compare(pair, PROMPT, method="chain-sampled", sampling=Sampling(1.0), settings=TREE, max_new_tokens=8)
    assert sampled.verdict.verdict is None and "distribution" in sampled.verdict.why
    greedily = compare(pair, PROMPT, method="chain-sampled", sampling=Sampling(), settings=TREE, max_new_tokens=8)
    assert greedily.verdict.verdict == "equal"


def test_a_method_that_changes_the_text_is_caught():
    class Lossy(TinyPair):
        def generate(self, prompt: list[int], *, method: str, **request: Any) -> Iterator[Event]:
            for event in super().generate(prompt, method=method, **request):
                if method == "eagle3" and isinstance(event, Step) and event.index == 2:
                    event = replace(event, emitted=[(event.emitted[0] + 1) % 61, *event.emitted[1:]])
                yield event

    found = compare(Lossy(), PROMPT, method="eagle3", sampling=Sampling(), settings=TREE, max_new_tokens=12)
    assert found.verdict.verdict == "different" and found.verdict.gap is not None


# ------------------------------------------------------------------------------------------- command line


def test_compare_on_the_command_line(tmp_path, capsys):
    target, head = save_tiny(tmp_path)
    text, found = command(
        capsys, "compare", "--target", target, "--drafter", head, "--prompt", "w3 w4", "--max-new-tokens", "12"
    )
    assert {"verdict", "position", "gap", "ids", "tau", "speedup"} <= set(found)
    assert found["verdict"] == "equal" and found["position"] is None and found["gap"] is None
    assert found["ids"] == found["vanilla_ids"] == greedy(tiny_model("llama"), [1, 3, 4, 2], 12)
    assert found["tau"] >= 1 and found["speedup"] > 0
    assert "vanilla" in text and "eagle3" in text and "equal: All 12 ids are equal." in text


def test_a_method_that_the_pair_lacks_is_named_before_anything_runs(tmp_path, capsys):
    target, head = save_tiny(tmp_path)
    argv = ["compare", "--target", target, "--drafter", head, "--prompt-ids", "3,4", "--method", "eagle2"]
    assert main(argv) == 2
    assert "eagle2 cannot run with this pair" in capsys.readouterr().err
