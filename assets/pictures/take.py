"""Take the README's pictures of the real page on real recordings: light.png, dark.png, why.png, phone.png, tree.gif.

    python assets/pictures/take.py [--chromium /usr/bin/chromium] [--recording sky3] [--step N]

Needs playwright and Pillow. The page runs in this process, on a free port, and no model is loaded.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

import app
from viz.models import Models
from viz.playground import Playground, Shelf

SHOTS = (
    ("light", {"width": 1440, "height": 900}, "light", "accept", None),
    ("dark", {"width": 1440, "height": 900}, "dark", "verify", None),
    ("why", {"width": 1440, "height": 900}, "light", "accept", "why"),
    ("phone", {"width": 390, "height": 844}, "light", "accept", None),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    parser.add_argument("--recording", default=None)
    parser.add_argument("--step", type=int, default=None, help="from 1; the default is the step that accepts most")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    shelf = Shelf()
    recording = shelf[args.recording or shelf.titles[0][1]]
    ground = Playground(Models(None, None), shelf, recording)
    page = app.build(ground, 24, False)
    address = app.start(page, None, None, block=False)
    steps = [e for e in recording.events if e.kind == "step"]
    step = (args.step or 1 + max(range(len(steps)), key=lambda i: len(steps[i].accepted))) - 1
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
        for name, size, scheme, phase, extra in SHOTS:
            tab = browser.new_page(viewport=size, color_scheme=scheme)
            arrive(tab, address)
            tab.evaluate(f"stage.jump({step}, '{phase}')")
            if extra:
                wrong = next(n.id for n in steps[step].nodes if n.fate == "not the draw")
                tab.evaluate(f"stage.choose({wrong})")
            tab.wait_for_timeout(600)
            tab.screenshot(path=HERE / f"{name}.png")
            tab.close()
        film(browser, address, step)
        browser.close()
    page.close()


def arrive(tab: Any, address: str) -> None:
    tab.goto(address)
    tab.wait_for_function("window.stage && stage.state.known && stage.state.steps > 0")


def film(browser: Any, address: str, step: int) -> None:
    """One step from its first drafter forward to its commit, as an animation."""
    from PIL import Image

    tab = browser.new_page(viewport={"width": 1240, "height": 860})
    arrive(tab, address)
    tab.evaluate("document.querySelector('.sidebar.open .toggle-button')?.click()")
    tab.wait_for_timeout(800)
    box = tab.evaluate(
        "(() => { const a = document.querySelector('.st-head').getBoundingClientRect(),"
        " b = document.querySelector('.st-chat').getBoundingClientRect();"
        " return { x: a.x - 8, y: a.y - 8, width: a.width + 16, height: b.bottom - a.y + 8 }; })()"
    )
    total = tab.evaluate(f"(stage.jump({step}), stage.state.total)")
    frames, seconds = [], 0.16
    for i in range(int(total / seconds) + 1):
        tab.evaluate(f"stage.seek({step}, {i * seconds})")
        tab.wait_for_timeout(30)
        shot = Image.open(io.BytesIO(tab.screenshot(clip=box))).convert("RGB")
        frames.append(shot.resize((920, round(shot.height * 920 / shot.width)), Image.Resampling.LANCZOS))
    palette = frames[len(frames) * 3 // 4].quantize(96)
    flat = [f.quantize(palette=palette, dither=Image.Dither.NONE) for f in frames]
    durations = [int(seconds * 1000)] * (len(flat) - 1) + [2200]
    flat[0].save(HERE / "tree.gif", save_all=True, append_images=flat[1:], duration=durations, loop=0, optimize=True)


if __name__ == "__main__":
    main()
