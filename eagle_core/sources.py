"""Where weights come from: a local folder, or a repository on the Hugging Face hub.

    locate("~/heads/mine")                  the folder itself
    locate("owner/name"), "owner/name@rev"  the files needed, downloaded once into the hub's own cache

Only data is fetched (configuration, tokenizer, one set of weights), never code. Each way a download can fail is
told apart, because each has another remedy: a login, accepted terms, a spelling, a connection.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eagle_core.errors import ModelNotFound

__all__ = ["WEIGHT_FILES", "locate"]

WEIGHT_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
)
"""Names under which weights are published, the preferred first."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[\w.\-]+)?(@[\w.\-/]+)?")
_DATA = (".json", ".jinja", ".txt", ".model", ".tiktoken")


def locate(name: str | Path) -> Path:
    """The folder that holds a model's files.

    Args:
        name: a local folder, or a hub id, optionally with "@revision".

    Raises:
        ModelNotFound: there is no such folder, or the hub did not hand the files over; the message says which of
            the possible reasons it was and what to do.
    """
    text = str(name)
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        return folder
    if folder.is_file():
        raise ModelNotFound(f"{text} is a file; give the folder that holds it together with its config.json")
    if isinstance(name, Path) or not _HUB_ID.fullmatch(text):
        raise ModelNotFound(f"there is no folder {text!r}, and that is no hub id (owner/name); check the path")
    repo, _, revision = text.partition("@")
    return _download(repo, revision or None)


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # of whichever client the hub library is built on
    )

    try:
        siblings = HfApi().model_info(repo, revision=revision).siblings or []
        wanted = _wanted(sibling.rfilename for sibling in siblings)
        return Path(snapshot_download(repo, revision=revision, allow_patterns=wanted))
    except HFValidationError as error:
        raise ModelNotFound(f"{repo!r} is neither a folder nor a hub id (owner/name); check the spelling") from error
    except HfHubHTTPError as error:
        raise ModelNotFound(_refusal(repo, error)) from error
    except (HTTPError, ConnectionError) as error:  # no way to the hub: what an earlier run left will do
        return _cached(repo, revision, error)
    except OSError as error:
        raise ModelNotFound(f"the files of {repo} could not be stored: {error}; make room or set HF_HOME") from error


def _cached(repo: str, revision: str | None, unreachable: Exception) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        raise ModelNotFound(
            f"{repo} is neither a folder nor in the local hub cache, and the hub cannot be reached; connect to the"
            " network, set HF_ENDPOINT to a mirror, or give a local folder"
        ) from unreachable


def _wanted(files: Iterable[str]) -> list[str]:
    """The data files at the top of a repository, with one set of weights."""
    top = [name for name in files if "/" not in name]
    data = [name for name in top if name.endswith(_DATA) and not name.endswith(".index.json")]
    for first in WEIGHT_FILES:
        if first in top:
            shards = []
            if first.endswith(".index.json"):
                stem, suffix = first.removesuffix(".index.json").rsplit(".", 1)
                shards = [name for name in top if re.fullmatch(rf"{stem}-\d+-of-\d+\.{suffix}", name)]
            return [*data, first, *shards]
    return data


def _refusal(repo: str, error: Any) -> str:
    from huggingface_hub.errors import GatedRepoError, RevisionNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    page = f"https://huggingface.co/{repo}"
    if isinstance(error, GatedRepoError) or status == 403:
        return (
            f"{repo} is gated (403): accept its terms at {page} with your account, then give this machine that"
            " account's token (`hf auth login`, or the variable HF_TOKEN)"
        )
    if status == 401:
        return (
            f"the hub shows {repo} only to those who may read it (401), if it exists at all: check the name, and"
            " log in with a token that may read it (`hf auth login`, or the variable HF_TOKEN)"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no such revision (404); look at {page}/tree/main, or leave the part after @ out"
    if status == 404:
        return f"there is no {repo} on the hub (404); check the spelling of owner/name, or give a local folder"
    return f"the hub answered {status} for {repo}; try again later, set HF_ENDPOINT to a mirror, or give a local folder"
