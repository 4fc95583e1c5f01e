"""The command line others script against: arguments, the last line of stdout, exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_core.__main__ import COMMANDS, main
from eagle_core.drafters import METHODS
from eagle_core.events import load_trace
from tests.conftest import HERE, numbers

CASE = HERE / "goldens" / "eagle3-vd"
GOLDEN = numbers(CASE / "rounds.json")["runs"][0]
IDS = ",".join(map(str, GOLDEN["prompt_ids"]))
PAIR = ["--target", str(CASE / "target"), "--drafter", str(CASE / "head"), "--prompt-ids", IDS]


def last_line(capsys: Any) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_generate_with_ids_and_a_trace(capsys: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    count = 20
    assert main(["generate", *PAIR, "--max-new-tokens", str(count), "--trace", str(trace)]) == 0
    out = last_line(capsys)
    assert out.keys() == {"method", "ids", "text", "steps", "tau", "seconds", "tokens_per_second", "finish"}
    want = GOLDEN["greedy_ids"][len(GOLDEN["prompt_ids"]) :][:count]
    assert out["ids"] == want and out["method"] == "eagle3" and out["finish"] == "length"
    start, *steps, finish = load_trace(trace.read_text().splitlines())
    assert start.kind == "start" and finish.kind == "finish" and len(steps) == out["steps"]
    assert out["tau"] == pytest.approx((count - 1) / len(steps))
    assert start.emitted + [t for s in steps for t in s.emitted] == out["ids"]
    assert start.pair["target"]["name"] and start.pair["drafter"]["capture"] == [2, 4, 5]


@pytest.mark.parametrize("method", ["vanilla", "lookup", "eagle3"])
def test_every_knob_is_taken(method: str, capsys: Any) -> None:
    knobs = ["--temperature", "0.8", "--top-p", "0.9", "--top-k", "20", "--min-p", "0.01", "--seed", "3",
             "--total-token", "9", "--depth", "3", "--tree-top-k", "4", "--max-new-tokens", "12",
             "--expand-by", "confidence"]  # fmt: skip
    assert main(["generate", *PAIR, "--method", method, *knobs]) == 0
    assert len(last_line(capsys)["ids"]) == 12


def test_sampled_methods_agree_on_the_command_line(capsys: Any) -> None:
    texts = []
    for method in ("vanilla", "eagle3", "lookup"):
        main(["generate", *PAIR, "--method", method, "--temperature", "1", "--seed", "7", "--max-new-tokens", "24"])
        texts.append(last_line(capsys)["ids"])
    assert texts[0] == texts[1] == texts[2]


def test_total_token_minus_one_measures(capsys: Any) -> None:
    assert main(["generate", *PAIR, "--total-token", "-1", "--max-new-tokens", "10"]) == 0
    assert len(last_line(capsys)["ids"]) == 10


def test_compare_says_equal(capsys: Any) -> None:
    assert main(["compare", *PAIR, "--max-new-tokens", "16"]) == 0
    out = last_line(capsys)
    assert {"verdict", "position", "gap", "ids", "tau", "speedup"} <= out.keys()
    assert out["verdict"] == "equal" and len(out["ids"]) == 16 and out["position"] is None


def test_inspect(capsys: Any) -> None:
    assert main(["inspect", str(CASE / "head"), "--target", str(CASE / "target")]) == 0
    out = last_line(capsys)
    assert {"method", "variant", "layers", "layers_assumed", "draft_vocab_size", "parameters", "warnings"} <= out.keys()
    assert out["method"] == "eagle3" and out["layers_assumed"] is True and out["layers"] == [2, 4, 5]


@pytest.mark.parametrize("form", ["safeailab", "speculators"])
def test_a_head_is_written_in_another_form(form: str, tmp_path: Path, capsys: Any) -> None:
    pair = ["--target", str(CASE / "target")]
    assert main(["inspect", str(CASE / "head"), *pair, "--export", form, str(tmp_path / "out")]) == 0
    before = last_line(capsys)
    assert main(["inspect", str(tmp_path / "out"), *pair]) == 0
    after = last_line(capsys)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("speculators_config" in written) is (form == "speculators")
    for fact in ("method", "layers", "draft_vocab_size", "dtype", "rope"):
        assert after[fact] == before[fact]
    texts = []
    for head in (CASE / "head", tmp_path / "out"):
        main(["generate", *pair, "--drafter", str(head), "--prompt-ids", "5,9,12", "--max-new-tokens", "12"])
        out = last_line(capsys)
        texts.append((out["ids"], out["tau"]))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("argv,names", [
    (["generate", *PAIR, "--depth", "0"], "depth"),
    (["generate", *PAIR, "--temperature", "-1"], "temperature"),
    (["generate", *PAIR, "--total-token", "1000"], "total_token"),
    (["generate", *PAIR, "--max-new-tokens", "0"], "max_new_tokens"),
    (["generate", *PAIR, "--trace", "no/such/folder/t.jsonl"], "trace"),
    (["generate", *PAIR, "--trace", "/dev/full"], "trace"),
    (["generate", *PAIR, "--method", "eagle2"], "EAGLE-1"),
    (["generate", *PAIR, "--static-tree", "[[0,1]]"], "static tree"),
    (["generate", *PAIR, "--static-tree", "{"], "static-tree"),
    (["generate", *PAIR, "--static-tree", "[" * 100_000], "static-tree"),
    (["generate", *PAIR[:4], "--prompt-ids", "1,x"], "prompt-ids"),
    (["generate", *PAIR[:4], "--prompt-ids", "1,999999"], "999999"),
    (["generate", *PAIR[:4], "--prompt", "hello"], "tokenizer"),
    (["generate", "--target", str(HERE), "--prompt-ids", "1"], "config.json"),
    (["generate", *PAIR[:2], "--drafter", str(HERE), "--prompt-ids", "1"], "config.json"),
    (["inspect", str(HERE)], "config.json"),
    (["inspect", str(CASE / "head"), "--target", str(CASE / "target"), "--export", "gguf", "x"], "speculators"),
])  # fmt: skip
def test_bad_input_is_one_sentence_and_code_2(argv: list[str], names: str, capsys: Any) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert names in err and "Traceback" not in err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_of_stdout_gets_the_whole_json(encoding: str, monkeypatch: Any) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding))
    assert main(["generate", *PAIR, "--max-new-tokens", "4"]) == 0
    lines = out.getvalue().decode(encoding).splitlines()
    assert len(json.loads(lines[-1])["ids"]) == 4 and any("Acceptance length" in line for line in lines)


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [sys.executable, "-m", "eagle_core", "inspect", str(CASE / "head")]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE.parent)
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    err = running.stderr.read()
    assert running.wait() == 0 and "Broken" not in err and "Traceback" not in err


@pytest.mark.parametrize("argv", [["generate"], ["nonsense"], [], ["generate", "--prompt", "a", "--method", "magic"]])
def test_usage_errors_are_code_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(argv)
    assert e.value.code == 2


def test_help_of_every_command_needs_no_torch() -> None:
    code = "import sys; from eagle_core.__main__ import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules, 'torch was imported for a help text'"
    for argv in (["--help"], *([name, "--help"] for name in COMMANDS)):
        out = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=HERE.parent)
        assert out.returncode == 0, out.stderr
        assert "usage" in out.stdout


def test_method_names_come_from_the_table() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "eagle_core", "generate", "--help"], capture_output=True, text=True, cwd=HERE.parent
    )
    assert all(name in out.stdout for name in METHODS)
