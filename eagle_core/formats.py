"""Reads public drafter formats: configurations in several dialects, tensors under several names, one plan.

    config.json ─► Settings (flattened, every look-up checked) ─┐
    weights     ─► one set of names ─► kind, by shapes ─────────┴─► _HeadReader, one method a question ─► Plan

A plan says what to build, which tensor goes where, and what the user should know; it builds and attaches nothing.
`checkpoints` turns plans into heads and reports.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle_core.errors import CheckpointError, InvalidRequest, PairMismatch
from eagle_core.sources import WEIGHT_FILES, locate

if TYPE_CHECKING:
    from torch import Tensor

    from eagle_core.heads import HeadConfig

__all__ = [
    "OVERRIDES",
    "RUNS",
    "Plan",
    "Settings",
    "TargetShape",
    "join",
    "kind_of",
    "read_json",
    "read_plan",
    "read_weights",
]

RUNS = "this version runs EAGLE-1/2/3 heads and draft language models"

OVERRIDES: dict[str, str] = {
    "attention_heads": "number of query heads",
    "capture": "boundaries to read, e.g. [2, 16, 29] (j: before layer j; n: after the last; -1: after the final norm)",
    "d2t": '"offset" or "absolute": how the draft-to-target table is written',
    "embedding": '"checkpoint" or "target": whose token embedding',
    "head_dim": "width of one attention head",
    "hidden_act": "activation of the MLP",
    "layer_ids": '"boundary" or "output": what the configured layer ids name',
    "lm_head": '"checkpoint" or "target": whose LM head',
    "logit_scale": "factor on the draft logits",
    "max_position_embeddings": "tokens the head can follow",
    "norm_before_residual": "the residual of layer 0 is the normed feature",
    "norm_output": "the normed output is fed back (EAGLE-3.1)",
    "rms_norm_eps": "epsilon of the norms",
    "rope": "rotary parameters as transformers' rope_parameters",
    "rope_theta": "rotary base",
}
"""Keyword arguments of `load_head` and `inspect`: what a configuration may get wrong, by name."""


# What a checkpoint is attached to --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What a head must know of its target; known from its configuration, before any weight is loaded."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context: int
    rope: dict[str, Any] | None = None

    @classmethod
    def of(cls, target: Any) -> TargetShape:
        """`target`: a `Target`, or a transformers configuration."""
        config = target.config if hasattr(target, "lm_head") else target.get_text_config()
        rope = getattr(config, "rope_parameters", None)
        return cls(
            name=getattr(target, "name", "") or getattr(config, "name_or_path", "") or config.model_type,
            num_layers=int(config.num_hidden_layers),
            hidden_size=int(config.hidden_size),
            vocab_size=int(getattr(target, "vocab_size", config.vocab_size)),
            context=int(getattr(config, "max_position_embeddings", None) or 1 << 20),
            rope=dict(rope) if isinstance(rope, dict) and "rope_theta" in rope else None,
        )


# Files ------------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.name} is missing in {path.parent}; a drafter folder holds config.json beside its weights"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download or write the file again") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__} where an object is expected")
    return content


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by name; mapped from the files, not copied."""
    for name in WEIGHT_FILES:
        path = folder / name
        if not path.exists():
            continue
        if not name.endswith(".index.json"):
            return _read_file(path)
        shards = read_json(path).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(v, str) and Path(v).name == v for v in shards.values()):
            raise CheckpointError(f"{path} has no weight_map from tensor names to file names; download it again")
        tensors: dict[str, Tensor] = {}
        for shard in sorted(set(shards.values())):
            if not (folder / shard).exists():
                raise CheckpointError(f"{name} names {shard}, which is missing in {folder}; download it")
            tensors |= _read_file(folder / shard)
        if absent := sorted(set(shards) - set(tensors)):
            raise CheckpointError(f"{name} promises {_some(absent)}, absent from its shards; download them again")
        return tensors
    found = sorted(p.name for p in folder.iterdir())
    if any(name.endswith(".gguf") for name in found):
        raise CheckpointError(f"{folder} holds GGUF weights, which are not read here; give the safetensors original")
    raise CheckpointError(
        f"weights are missing in {folder}: none of {', '.join(WEIGHT_FILES)} is there"
        f" (found: {', '.join(found) or 'nothing'})"
    )


def _read_file(path: Path) -> dict[str, Tensor]:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}); download it again") from error
    if not start:
        raise CheckpointError(f"{path} is empty (0 bytes); download it again")
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, ValueError, OSError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged or truncated ({error}); download it again") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} was refused: its pickle is damaged, or holds more than tensors, and loading that could run code;"
            " get the drafter as safetensors, or from a source you trust in that form"
        ) from error
    except Exception as error:  # what a parser of foreign bytes may meet has no end
        raise CheckpointError(
            f"{path} is damaged or no PyTorch file ({_first_line(error)}); download it again"
        ) from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a state dict of named tensors")
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path}: entry {key!r} is a {type(value).__name__}, not a tensor; the file is no plain state dict"
            )
    return dict(content)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# Configuration ----------------------------------------------------------------------------------------------------


class Settings:
    """A drafter's configuration, flattened over its dialects; every look-up checks the type.

    vLLM wraps a head's own configuration in "model", speculators in "transformer_layer_config"; ModelOpt, SpecForge
    and AngelSlim keep what is theirs in "eagle_config". Outer keys win over inner ones, except the wrapper's names.
    """

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw, self.where = raw, where
        outer = {key: value for key, value in raw.items() if value is not None}
        self.wrapped = isinstance(raw.get("model"), dict)
        inner: dict[str, Any] = {}
        for key in ("model", "transformer_layer_config"):
            if isinstance(raw.get(key), dict):
                inner |= {k: v for k, v in outer.pop(key).items() if v is not None}
                outer.pop("model_type", None)
        self.nested = raw["eagle_config"] if isinstance(raw.get("eagle_config"), dict) else {}
        self.values = inner | outer

    @property
    def speculators(self) -> str | None:
        """The kind a speculators configuration names, None for other configurations."""
        kind = self.raw.get("speculators_model_type")
        if kind is None and isinstance(wrapper := self.raw.get("speculators_config"), dict):
            kind = wrapper.get("algorithm", "unknown")
        return None if kind is None else str(kind)

    @property
    def architectures(self) -> str:
        """All class names it mentions, joined."""
        names: list[Any] = []
        for part in (self.raw, self.raw.get("model"), self.raw.get("transformer_layer_config")):
            if isinstance(part, dict):
                value = part.get("architectures")
                names += value if isinstance(value, list) else [value]
        return " ".join(str(name) for name in names if name)

    def _get(self, key: str, kinds: type | tuple[type, ...], what: str) -> Any:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; expected {what}")
        return value

    def integer(self, key: str) -> int | None:
        value = self._get(key, int, "a whole number")
        if value is not None and not 1 <= value <= 1 << 31:
            raise CheckpointError(f"{self.where}: {key} is {value}; expected a number from 1 to {1 << 31}")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        value = self._get(key, (int, float), "a number")
        if value is not None and not low < value <= high:
            raise CheckpointError(
                f"{self.where}: {key} is {value}; expected a number above {low:g} and at most {high:g}"
            )
        return None if value is None else float(value)

    def flag(self, key: str, nested: bool = False) -> bool | None:
        """A truth value; `nested`: "eagle_config" is asked first."""
        if nested and isinstance(value := self.nested.get(key), bool):
            return value
        value = self._get(key, bool, "true or false")
        return value

    def text(self, key: str) -> str | None:
        value = self._get(key, str, "a name")
        return value


_REQUIRED_ROPE = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}


def _rope(
    settings: Settings, producer: str, head_dim: int, overrides: dict[str, Any], warnings: list[str]
) -> dict[str, Any]:
    """transformers' `rope_parameters` out of any spelling; a kind that cannot be computed is refused by name."""
    where, values = settings.where, settings.values
    source = overrides.get("rope", values.get("rope_parameters"))
    if source is None:
        source = values.get("rope_scaling") or {}
    if not isinstance(source, dict):
        raise CheckpointError(f"{where}: the rope parameters are {source!r}; expected an object with rope_type")
    rope = {key: value for key, value in source.items() if value is not None}
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    sections = rope.pop("mrope_section", None), rope.pop("mrope_interleaved", None)
    if kind == "mrope" or any(sections):
        kind = "default" if kind == "mrope" else kind
        warnings.append("the multi-axis rotary embedding (mrope) is computed for text, where all its axes are equal")
    kind = {"su": "longrope"}.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in _REQUIRED_ROPE:
        raise CheckpointError(
            f"{where}: rope scaling of the unknown kind {kind!r}; known are {', '.join(_REQUIRED_ROPE)}"
            " (override with rope={...} if one of them computes the same)"
        )
    theta = overrides.get("rope_theta", rope.pop("rope_theta", None) or values.get("rope_theta"))
    rope.pop("rope_theta", None)
    if theta is None:
        theta = 10000.0
    elif kind in ("linear", "dynamic") and producer == "SafeAILab" and "rope_theta" not in overrides and theta != 10000:
        warnings.append(
            f"rope_theta {theta:g} is not used: the reference implementation rotates with base 10000 where rope"
            " scaling is linear or dynamic (override with rope_theta=…)"
        )
        theta = 10000.0
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 1 < theta < 1e12:
        raise CheckpointError(f"{where}: rope_theta is {theta!r}; expected a number above 1")
    if rope.pop("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"{where}: partial_rotary_factor is not 1; no published head rotates a part of its width")
    for key in _REQUIRED_ROPE[kind]:
        if key not in rope and not (key == "factor" and "factor" in values):
            raise CheckpointError(f"{where}: rope scaling of the kind {kind!r} lacks {key!r}")
    for key, value in rope.items():
        if key in ("short_factor", "long_factor"):
            sound = isinstance(value, list) and len(value) == head_dim // 2
            sound = sound and all(isinstance(v, int | float) and 0 < v < 1e9 for v in value)
        else:
            sound = isinstance(value, bool | str) or (isinstance(value, int | float) and 0 <= value < 1e9)
            sound = sound and (key != "factor" or (not isinstance(value, bool | str) and value > 0))
        if not sound:
            raise CheckpointError(f"{where}: rope parameter {key} is {value!r}, which cannot be computed with")
    return {"rope_type": kind, "rope_theta": float(theta), **rope}


# Names and kinds --------------------------------------------------------------------------------------------------

_RENAMED = (
    (r"midlayer\.", "layers.0."),
    (r"transformer\.", "layers.0."),  # speculators' EAGLE-1
    (r"fusion_fc\.", "fc."),
    (r"aux_norm_low\.", "fc_norm.0."),
    (r"aux_norm_mid\.", "fc_norm.1."),
    (r"aux_norm_high\.", "fc_norm.2."),
    (r"input_embeds_norm\.", "layers.0.input_layernorm."),
    (r"embed_layernorm\.", "embedding_layernorm."),
    (r"(pre_)?lm_head_layernorm\.", "norm."),
    (r"draft_id_to_target_id$", "d2t"),
)


def _normalise(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """One set of names. Returns tensors by our names, and our names' spelling in the file."""
    out: dict[str, Tensor] = {}
    spelled: dict[str, str] = {}
    for original, tensor in tensors.items():
        name = original.removeprefix("model.")
        for pattern, ours in _RENAMED:
            name = re.sub("^" + pattern, ours, name)
        if name in out:
            raise CheckpointError(
                f"{spelled[name]!r} and {original!r} are names of the same tensor; the file is ambiguous"
            )
        out[name], spelled[name] = tensor, original
    for name in list(out):  # SGLang calls the input norm of later layers hidden_norm
        match = re.fullmatch(r"layers\.([1-9]\d*)\.hidden_norm\.weight", name)
        if match and (ours := f"layers.{match[1]}.input_layernorm.weight") not in out:
            out[ours], spelled[ours] = out.pop(name), spelled.pop(name)
    return out, spelled


def _kind(names: Mapping[str, tuple[int, ...]], settings: Settings) -> str:
    """eagle1, eagle3, lm (a whole language model), the name of a method not run here, or "" for none known.

    `names`: shapes by normalised names.
    """

    def has(pattern: str) -> bool:
        return any(re.match(pattern, name) for name in names)

    speculators, architectures = settings.speculators, settings.architectures
    if has(r"(logit_head\.)?markov_(head\.|w1)") or speculators == "dspark":
        return "DSpark"
    if has(r"prefix_gru\."):
        return "Domino"
    if has(r"\d+\.\d+\.(linear\.)?weight$") or has(r"medusa_heads?\."):
        return "Medusa"
    if "mask_hidden" in names or speculators == "peagle" or "PEagle" in architectures or "Peagle" in architectures:
        return "P-EAGLE"
    if has(r"layers\.0\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)\."):
        return "MLA"
    per_head_norms = "layers.0.self_attn.q_norm.weight" in names and "hidden_norm.weight" in names
    flash = "DFlash" in architectures or "dflash_config" in settings.raw or str(speculators).startswith("dflash")
    if flash or (per_head_norms and "fc.weight" in names):
        return "DFlash"
    if has(r"(layers\.\d+\.)?eh_proj\."):
        return "MTP"
    if speculators not in (None, "eagle", "eagle3"):
        return f"speculators {speculators!r}"
    hidden = names.get("layers.0.post_attention_layernorm.weight") or names.get("norm.weight") or (0,)
    for projection in ("q_proj", "k_proj", "v_proj"):
        shape = names.get(f"layers.0.self_attn.{projection}.weight")
        if shape is None or len(shape) != 2:
            continue
        if shape[1] == 2 * hidden[0]:
            return "eagle3"
        if shape[1] == hidden[0] and "fc.weight" in names:
            return "eagle1"
        break
    if "layers.0.hidden_norm.weight" in names:
        return "eagle3"
    if "fc.weight" in names and has(r"layers\.0\."):
        return "eagle1"
    if _whole_model(names):
        return "lm"
    return ""


def _whole_model(names: Mapping[str, Any]) -> bool:
    embeds = any(re.search(r"(embed_tokens|wte|word_embeddings|embed_in)\.weight$", name) for name in names)
    return embeds and "fc.weight" not in names and len(names) > 8


_FOREIGN_NOTES = {
    "MLA": "EAGLE-3 with latent attention (MLA)",
}


def _refuse(
    kind: str, name: str, names: Mapping[str, tuple[int, ...]], settings: Settings, shape: TargetShape | None
) -> None:
    """Raise the error for a checkpoint that is not an EAGLE head, with what is wrong with it beyond that."""
    faults = []
    values = settings.values
    if kind == "P-EAGLE" and "mask_hidden" not in names:
        faults.append("its tensor mask_hidden is missing, so no engine could run it")
    if kind == "DFlash":
        nested = values.get("dflash_config")
        nested = nested if isinstance(nested, dict) else {}
        if nested.get("mask_token_id", values.get("mask_token_id")) is None:
            faults.append("its config names no mask_token_id, so no engine could run it")
    width = 0
    if kind == "Medusa":
        heads = {match[2] for name_ in names if (match := re.match(r"(medusa_heads?\.)?(\d+)\.", name_))}
        width = next((s[-1] for n, s in names.items() if re.search(r"\.linear\.weight$", n) and len(s) == 2), 0)
        faults.append(f"{len(heads)} heads of hidden size {width}")
    elif (norm := names.get("norm.weight")) and len(norm) == 1:
        width = norm[0]
    if shape is not None and width and kind == "Medusa" and width != shape.hidden_size:
        faults.append(f"they do not fit the hidden size {shape.hidden_size} of {shape.name} either")
    label = _FOREIGN_NOTES.get(kind, kind)
    article = "an" if label[0] in "AEIMO" and label not in ("Medusa",) else "a"
    detail = f" ({'; '.join(faults)})" if faults else ""
    if kind == "lm":
        raise CheckpointError(
            f"{name} is a whole language model, not an EAGLE head; draft with it by the methods chain and chain-sampled"
        )
    raise CheckpointError(f"{name} is {article} {label} checkpoint{detail}; {RUNS}")


# The plan ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Plan:
    """A checkpoint understood: what to build, from which tensors, and what to tell the user."""

    source: str
    config: HeadConfig
    tensors: dict[str, Tensor]  # by parameter names of `EagleHead`
    spelled: dict[str, str]  # names in the file
    draft_to_target: Tensor | None
    producer: str
    variant: str
    layers: list[int | str]
    layers_assumed: bool
    embedding: str
    lm_head: str
    warnings: list[str] = field(default_factory=list)


def read_plan(source: str | Path, shape: TargetShape | None, overrides: dict[str, Any]) -> Plan:
    """Read and understand a checkpoint; attaches nothing.

    Raises:
        ModelNotFound, CheckpointError, PairMismatch, InvalidRequest (an unknown override).
    """
    import torch

    _check_overrides(overrides)
    folder = locate(source)
    name = str(source)
    settings = Settings(read_json(folder / "config.json"), f"config.json of {name}")
    tensors, spelled = _normalise(read_weights(folder))
    sizes = {key: tuple(value.shape) for key, value in tensors.items()}
    kind = _kind(sizes, settings)
    if not kind:
        raise CheckpointError(
            f"{name} is not recognised as a drafter: it holds {_some(sorted(spelled.values()))}; {RUNS}"
        )
    if kind not in ("eagle1", "eagle3"):
        _refuse(kind, name, sizes, settings, shape)
    if scaled := [
        n for n in spelled.values() if re.search(r"(weight_scale|weight_packed|qweight|qzeros|input_scale)", n)
    ]:
        raise CheckpointError(f"{name} is quantised ({_some(scaled)}); give the head in bfloat16, float16 or float32")
    reader = _HeadReader(name, settings, tensors, spelled, sizes, kind, shape, overrides)
    plan = reader.plan()
    for key, tensor in plan.tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"{plan.spelled.get(key, key)} of {name} holds values that are not finite (NaN or infinity); the file"
                " is damaged or its training diverged"
            )
    return plan


def _check_overrides(overrides: dict[str, Any]) -> None:
    unknown = sorted(set(overrides) - set(OVERRIDES))
    if unknown:
        raise InvalidRequest(f"{', '.join(unknown)} cannot be overridden; what can: {', '.join(OVERRIDES)}")
    allowed = {
        "d2t": ("offset", "absolute"),
        "layer_ids": ("boundary", "output"),
        "embedding": ("checkpoint", "target"),
        "lm_head": ("checkpoint", "target"),
        "norm_before_residual": (True, False),
        "norm_output": (True, False),
    }
    for key, choices in allowed.items():
        if key in overrides and not any(overrides[key] is c or overrides[key] == c for c in choices):
            raise InvalidRequest(f"{key} is {overrides[key]!r}; choose one of {', '.join(map(str, choices))}")
    for key in ("head_dim", "attention_heads", "max_position_embeddings"):
        value = overrides.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidRequest(f"{key} is {value!r}; expected a positive whole number")
    for key in ("rope_theta", "logit_scale", "rms_norm_eps"):
        value = overrides.get(key, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise InvalidRequest(f"{key} is {value!r}; expected a positive number")
    if not isinstance(overrides.get("hidden_act", ""), str):
        raise InvalidRequest(f"hidden_act is {overrides['hidden_act']!r}; expected a name such as 'silu'")
    capture = overrides.get("capture", (0,))
    if not isinstance(capture, Sequence) or isinstance(capture, str) or not capture:
        raise InvalidRequest(f"capture is {capture!r}; expected a list of boundaries such as [2, 16, 29]")
    if not all(isinstance(j, int) and not isinstance(j, bool) for j in capture):
        raise InvalidRequest(f"capture is {list(capture)!r}; boundaries are whole numbers")


class _HeadReader:
    """Works out one EAGLE head; each method settles one question and may add to `warnings`."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        tensors: dict[str, Tensor],
        spelled: dict[str, str],
        sizes: dict[str, tuple[int, ...]],
        family: str,
        shape: TargetShape | None,
        overrides: dict[str, Any],
    ) -> None:
        self.name, self.settings, self.overrides = name, settings, overrides
        self.tensors, self.spelled, self.sizes = tensors, spelled, sizes
        self.family: Literal["eagle1", "eagle3"] = "eagle1" if family == "eagle1" else "eagle3"
        self.shape = shape
        self.warnings: list[str] = []
        self.used: set[str] = set()

    # helpers

    def missing(self, name: str, because: str = "") -> CheckpointError:
        if any(spelling.startswith("midlayer.") for spelling in self.spelled.values()):
            name = re.sub(r"^layers\.0\.", "midlayer.", name)
        return CheckpointError(f"{name} is missing in {self.name}{because}; the checkpoint is incomplete, get it whole")

    def dims(self, name: str, count: int) -> tuple[int, ...]:
        if name not in self.sizes:
            raise self.missing(name)
        if len(self.sizes[name]) != count or 0 in self.sizes[name]:
            found = list(self.sizes[name])
            raise CheckpointError(f"{self.spelled[name]} of {self.name} has shape {found}; expected {count} dimensions")
        return self.sizes[name]

    def conflict(self, key: str, says: Any, tensors_say: Any) -> None:
        if says is not None and says != tensors_say:
            self.warnings.append(
                f"config.json says {key} {says}, the tensors say {tensors_say}; the tensors are followed"
            )

    # questions

    def producer(self) -> str:
        settings, names = self.settings, set(self.spelled.values())
        if isinstance(by := settings.raw.get("producer"), str):
            return by
        if settings.speculators:
            return "speculators"
        if settings.wrapped:
            return "vLLM"
        if any(
            key in settings.nested
            for key in ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm")
        ):
            return "ModelOpt"
        if any(name.startswith("model.") for name in names):
            return "NeMo"
        fc = self.sizes.get("fc.weight", (0, 0))
        if self.family == "eagle3" and fc[0] > self.hidden_size():
            return "AngelSlim"
        if "Eagle3" in settings.architectures:
            return "SpecForge" if any(name.startswith("midlayer.") for name in names) else "unknown"
        return "SafeAILab"

    def hidden_size(self) -> int:
        for key in ("layers.0.post_attention_layernorm.weight", "norm.weight"):
            if key in self.sizes:
                return self.dims(key, 1)[0]
        raise self.missing("layers.0.post_attention_layernorm.weight")

    def num_layers(self) -> int:
        indices = {int(match[1]) for name in self.sizes if (match := re.match(r"layers\.(\d{1,4})\.", name))}
        count = max(indices) + 1
        if absent := sorted(set(range(count)) - indices):
            raise self.missing(f"layers.{absent[0]}", f", which has layers up to {count - 1}")
        self.conflict("num_hidden_layers", self.settings.integer("num_hidden_layers"), count)
        return count

    def heads(self, hidden: int) -> tuple[int, int, int]:
        """Query heads, key-value heads, and the width of one."""
        settings = self.settings
        q = self.dims("layers.0.self_attn.q_proj.weight", 2)[0]
        k = self.dims("layers.0.self_attn.k_proj.weight", 2)[0]
        count = self.overrides.get("attention_heads", settings.integer("num_attention_heads"))
        configured = self.overrides.get("head_dim", settings.integer("head_dim"))
        by_norm = self.sizes.get("layers.0.self_attn.q_norm.weight")
        by_count = q // count if count and q % count == 0 else None
        candidates: list[int | None]
        if by_norm and len(by_norm) == 1:
            candidates = [by_norm[0]]
        elif self.family == "eagle1" and "head_dim" not in self.overrides:
            candidates = [by_count, configured]  # the reference ignores head_dim
        else:
            candidates = [configured, by_count]
        if not any(candidates) and count is None:
            raise CheckpointError(
                f"{settings.where} lacks num_attention_heads{' (it is empty)' if not settings.raw else ''}, which no"
                " tensor tells; add it, or pass attention_heads=… or head_dim=…"
            )
        for dim in candidates:
            if dim and q % dim == 0 and k % dim == 0 and (q // dim) % (k // dim) == 0 and dim % 2 == 0:
                break
        else:
            raise CheckpointError(
                f"num_attention_heads {count} (head_dim {configured}) of {self.name} does not divide q_proj of {q} rows"
                f" and k_proj of {k} rows into whole heads; correct config.json, or pass head_dim=…"
            )
        self.conflict("num_attention_heads", settings.integer("num_attention_heads"), q // dim)
        self.conflict("num_key_value_heads", settings.integer("num_key_value_heads"), k // dim)
        if self.family == "eagle3":
            self.conflict("head_dim", settings.integer("head_dim"), dim)
        return q // dim, k // dim, dim

    def vocab_size(self) -> int:
        """The target's vocabulary, as the checkpoint knows it."""
        configured = self.settings.integer("vocab_size")
        proofs = {}
        if "embed_tokens.weight" in self.sizes:
            proofs["embed_tokens.weight"] = self.dims("embed_tokens.weight", 2)[0]
        if "t2d" in self.sizes:
            proofs["t2d"] = self.dims("t2d", 1)[0]
        if len(set(proofs.values())) > 1:
            raise CheckpointError(f"{self.name} disagrees with itself about the vocabulary: {proofs}")
        size = next(iter(proofs.values()), configured)
        if size is None:
            if self.shape is None:
                raise CheckpointError(f"{self.settings.where} lacks vocab_size, which no tensor tells; add it")
            size = self.shape.vocab_size
            self.warnings.append(f"config.json lacks vocab_size; the target's {size} is assumed")
        self.conflict("vocab_size", configured, size)
        if self.shape is not None and size != self.shape.vocab_size:
            raise PairMismatch(
                f"{self.name} was made for a vocabulary of {size} tokens, {self.shape.name} has"
                f" {self.shape.vocab_size}; it belongs to another target"
            )
        return size

    def draft_vocabulary(self, vocab: int, hidden: int, target_hidden: int) -> tuple[int, str, Tensor | None]:
        """Size of the draft vocabulary, whose LM head, and the target id of every draft id (None: the same ids)."""
        own = "lm_head.weight" in self.sizes and self.overrides.get("lm_head") != "target"
        configured = self.settings.integer("draft_vocab_size")
        if own:
            size, lm_head = self.dims("lm_head.weight", 2)[0], "checkpoint"
            self.conflict("draft_vocab_size", configured, size)
        else:
            tied = self.settings.flag("tie_word_embeddings") and "embed_tokens.weight" in self.sizes
            size, lm_head = vocab, "tied to the embedding" if tied else "target"
            if "lm_head" in self.overrides:
                if self.overrides["lm_head"] == "checkpoint":
                    raise self.missing("lm_head.weight")
                lm_head = "target"
            elif configured not in (None, vocab) or (not tied and target_hidden != hidden):
                raise self.missing("lm_head.weight")
            elif not tied and self.family == "eagle3":
                self.warnings.append("lm_head.weight is not in the file; the target's LM head is used")
            if lm_head == "target" and target_hidden != hidden:
                raise PairMismatch(
                    f"the target's LM head reads {target_hidden} values and the head gives {hidden}; it needs an own"
                    " lm_head.weight"
                )
        if size > vocab:
            raise CheckpointError(f"{self.name}: lm_head.weight has {size} rows, more than the vocabulary of {vocab}")
        if "d2t" not in self.sizes:
            if size != vocab:
                raise CheckpointError(
                    f"d2t is missing in {self.name}: its draft vocabulary has {size} tokens, the target's {vocab}, and"
                    " nothing tells which is which; get the checkpoint whole"
                )
            return size, lm_head, None
        length = self.dims("d2t", 1)[0]
        if length != size:
            raise CheckpointError(
                f"d2t of {self.name} has {length} entries, its lm_head.weight {size} rows; they must agree"
            )
        return size, lm_head, self.draft_map(vocab)

    def draft_map(self, vocab: int) -> Tensor | None:
        """d2t as absolute target ids; None where they are 0, 1, 2, … over the whole vocabulary."""
        import torch

        table = self.tensors["d2t"]
        self.used |= {"d2t", "t2d"}
        if table.is_floating_point() or table.dtype == torch.bool or table.is_complex():
            raise CheckpointError(f"d2t of {self.name} is of type {table.dtype}; expected whole numbers")
        table = table.to(torch.int64)
        index = torch.arange(len(table))
        readings = {"offset": table + index, "absolute": table}
        style = self.overrides.get("d2t")
        if style is None and "t2d" in self.tensors:
            kept = self.tensors["t2d"].bool().nonzero().flatten()
            style = next((s for s, ids in readings.items() if torch.equal(ids.sort().values, kept)), None)
            if style is None:
                raise CheckpointError(
                    f"d2t and t2d of {self.name} contradict each other: neither as offsets nor as ids does d2t give the"
                    f" {len(kept)} tokens that t2d marks; get the checkpoint again, or pass d2t='offset' or 'absolute'"
                )
        if style is None:
            rising = len(table) > 1 and bool((table.diff() > 0).all())
            style = "absolute" if rising or int(readings["offset"].max()) >= vocab else "offset"
        ids = readings[style]
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab:
            raise CheckpointError(
                f"d2t of {self.name} is out of range: read as {style} it names token {low if low < 0 else high},"
                f" the vocabulary is 0 to {vocab - 1}"
            )
        if len(ids.unique()) != len(ids):
            raise CheckpointError(f"d2t of {self.name} names a token twice (read as {style}); get the checkpoint again")
        if style == "absolute" and "t2d" not in self.tensors:
            self.warnings.append("d2t is read as target ids, not as offsets (override with d2t='offset')")
        return None if len(ids) == vocab and torch.equal(ids, index) else ids

    def features(self, hidden: int) -> tuple[int, int, bool]:
        """Width of a target state, how many states are read, and whether fc fuses them."""
        settings, shape = self.settings, self.shape
        declared = settings.integer("target_hidden_size")
        width = shape.hidden_size if shape is not None else declared or hidden
        if self.family == "eagle1":
            columns = self.dims("fc.weight", 2)[1]
            if columns != 2 * hidden:
                raise CheckpointError(
                    f"fc.weight of {self.name} takes {columns} values; an EAGLE-1 head takes embedding and state,"
                    f" {2 * hidden}"
                )
            if width != hidden:
                raise PairMismatch(
                    f"{self.name} was made for a target of hidden size {hidden} (fc.weight takes {columns} values),"
                    f" {shape.name if shape else 'its config'} has hidden size {width}; it belongs to another target"
                )
            return hidden, 1, True
        no_aux = settings.flag("use_aux_hidden_state", nested=True) is False
        if "fc.weight" not in self.sizes:
            if not no_aux and self.overrides.get("capture") is None:
                raise self.missing("fc.weight", " and its config does not say use_aux_hidden_state: false")
            if width != hidden:
                raise PairMismatch(
                    f"{self.name} has no fc.weight and reads states of width {hidden}; the target's are {width} wide"
                )
            return width, 1, False
        if no_aux:
            self.warnings.append("config.json says use_aux_hidden_state false, but fc.weight is there; it is used")
        columns = self.dims("fc.weight", 2)[1]
        listed = self.layer_ids()
        chosen = self.overrides.get("capture")
        if chosen and columns % width == 0 and columns // width != len(chosen):
            raise InvalidRequest(f"capture lists {len(chosen)} boundaries, {self.name} reads {columns // width} states")
        count = len(self.overrides["capture"]) if "capture" in self.overrides else len(listed) if listed else None
        count = count or settings.integer("num_aux_hidden_states") or settings.integer("num_aux_layers")
        expected = count or 3
        if columns == expected * width:
            return width, expected, True
        if count is None and shape is None and columns % width == 0:
            return width, columns // width, True
        sound = columns % expected == 0 and columns // expected == (declared or hidden) and shape is not None
        states = f"{columns // width} states" if columns % width == 0 else "no whole number of states"
        error = (
            PairMismatch
            if sound or (shape is not None and columns % width and columns % expected == 0)
            else CheckpointError
        )
        raise error(
            f"fc.weight of {self.name} takes {columns} values, which is {states} of hidden size {width}; {expected}"
            f" states {'are listed' if count else 'are usual'}, {expected * width} values"
            + (f" ({columns // expected} each would be another target's width)" if columns % expected == 0 else "")
            + ("; pass capture=[…] if the head reads others" if count is None else "")
        )

    def layer_ids(self) -> list[int] | None:
        """The configured layer ids, as written and checked for type."""
        settings = self.settings
        for holder in (settings.raw, settings.nested):
            for key in ("eagle_aux_hidden_state_layer_ids", "layer_ids"):
                value = holder.get(key)
                if value is None or (holder is settings.raw and key == "layer_ids"):
                    continue
                whole = isinstance(value, list) and all(isinstance(j, int) and not isinstance(j, bool) for j in value)
                if not whole or not value or min(value) < 0 or max(value) > 10000:
                    raise CheckpointError(
                        f"{settings.where}: {key} is {value!r}; expected layer numbers such as [1, 15, 28]"
                    )
                return value
        return None

    def capture(self, count: int, fused: bool) -> tuple[tuple[int, ...], list[int | str], bool]:
        """Boundaries to read, how to show them, and whether they are an assumption.

        Without a target the boundaries are placeholders where they depend on its number of layers.
        """
        from eagle_core.heads import POST_NORM, default_capture

        n = self.shape.num_layers if self.shape is not None else None
        if (given := self.overrides.get("capture")) is not None:
            boundaries = tuple(given)
            if len(boundaries) != count:
                raise InvalidRequest(f"capture lists {len(boundaries)} boundaries, {self.name} reads {count} states")
            if n is not None and not all(j == POST_NORM or 0 <= j <= n for j in boundaries):
                raise InvalidRequest(f"capture is {list(boundaries)}; this target has layer boundaries 0 to {n}")
            return boundaries, _shown(boundaries), False
        if self.family == "eagle1" or not fused:
            return (POST_NORM,), _shown((POST_NORM,)), False
        ids = self.layer_ids()
        if ids is None:
            if count != 3:
                raise CheckpointError(
                    f"{self.settings.where} lists no layers for the {count} states that fc.weight takes;"
                    " pass capture=[…]"
                )
            if n is None:
                return (POST_NORM,) * 3, ["2", "n // 2", "n - 3"], True
            if n < 3:
                raise PairMismatch(
                    f"{self.name} lists no layers, and a target of {n} layers is too shallow for the usual ones;"
                    " pass capture=[…]"
                )
            self.warnings.append(
                f"layers assumed: config.json lists none, so the states before layers {join(default_capture(n))} are"
                " read, as every implementation does by default (override with capture=[…])"
            )
            return default_capture(n), _shown(default_capture(n)), True
        written = self.settings.nested.get("layer_id_convention", self.settings.raw.get("layer_id_convention"))
        if sorted(set(ids)) != ids and written != "exact":
            self.warnings.append(f"layer ids {ids} are read in ascending order, as every implementation does")
            if len(set(ids)) != len(ids):
                raise CheckpointError(f"{self.settings.where}: layer ids {ids} name a layer twice")
            ids = sorted(ids)
        convention, assumed = (written, False) if written == "exact" else self.convention(ids, n)
        boundaries = tuple(j + 1 for j in ids) if convention == "output" else tuple(ids)
        if n is not None and max(boundaries) > n:
            raise PairMismatch(
                f"{self.name} reads layer {max(ids)}, but {self.shape.name if self.shape else 'the target'} has {n}"
                " layers; it belongs to another target (or pass capture=[…])"
            )
        if assumed:
            self.warnings.append(
                f"layer ids {ids} are assumed to name layer outputs; readers disagree"
                " (override with layer_ids='boundary')"
            )
        return boundaries, _shown(boundaries), assumed

    def convention(self, ids: list[int], n: int | None) -> tuple[str, bool]:
        """What ids name, "boundary" (before the layer) or "output" (after it), and whether that is a guess."""
        if (given := self.overrides.get("layer_ids")) is not None:
            return given, False
        written = self.settings.nested.get("layer_id_convention")
        if written in ("boundary", "output"):
            return written, False
        if self.settings.speculators and "eagle_aux_hidden_state_layer_ids" in self.settings.raw:
            return "boundary", False
        if n is not None and ids[-1] == n:
            return "boundary", False  # no layer n exists whose output this could be
        if ids[0] in (1, 2):  # the usual low layer, before or after counting
            return ("output" if ids[0] == 1 else "boundary"), False
        return "output", True

    def norm_flags(self, producer: str) -> tuple[bool, bool]:
        """norm_before_residual and norm_output, which no tensor tells."""
        settings = self.settings
        before = self.overrides.get("norm_before_residual", settings.flag("norm_before_residual"))
        if before is None:
            before = False
            if settings.speculators == "eagle3":
                self.warnings.append(
                    "norm_before_residual is not in config.json and readers disagree on its default; false is assumed"
                    " (override with norm_before_residual=True)"
                )
        output = self.overrides.get("norm_output", settings.flag("norm_output"))
        if output and "norm_output" not in self.overrides and producer == "SpecForge":
            self.warnings.append(
                "norm_output is true: read as EAGLE-3.1's normed feedback; SpecForge itself uses the name for the norm"
                " before the LM head (override with norm_output=False)"
            )
        return bool(before), bool(output)

    def biases(self, names: Sequence[str], what: str) -> bool:
        present = [name for name in names if name in self.sizes]
        if present and len(present) < len(names):
            raise self.missing(next(name for name in names if name not in self.sizes), f", though it has {present[0]}")
        if not present and what and self.settings.flag(what):
            self.warnings.append(f"config.json says {what} true, but {names[0]} and its kin are absent; there is none")
        return bool(present)

    def plan(self) -> Plan:
        import torch
        from transformers.activations import ACT2FN

        from eagle_core.heads import HeadConfig

        settings, sizes, eagle3 = self.settings, self.sizes, self.family == "eagle3"
        hidden = self.hidden_size()
        self.conflict("hidden_size", settings.integer("hidden_size"), hidden)
        producer = self.producer()
        layers = self.num_layers()
        heads, kv_heads, head_dim = self.heads(hidden)
        vocab = self.vocab_size()
        width, count, fused = self.features(hidden)
        self.embedding_check(hidden, width)
        draft_vocab, lm_head, draft_to_target = self.draft_vocabulary(vocab, hidden, width)
        capture, shown, assumed = self.capture(count, fused)
        before_residual, norm_output = self.norm_flags(producer)
        if eagle3 and settings.flag("use_mtp_layernorm", nested=True):
            raise CheckpointError(
                f"{settings.where}: use_mtp_layernorm is true, an arithmetic this version does not run"
            )
        act = self.overrides.get("hidden_act", settings.text("hidden_act") or "silu")
        if act not in ACT2FN:
            raise CheckpointError(
                f"{settings.where}: hidden_act {act!r} is unknown; pass hidden_act='silu' if that is meant"
            )
        if settings.integer("sliding_window") and settings.flag("use_sliding_window") is not False:
            self.warnings.append(
                f"sliding_window {settings.integer('sliding_window')} is not applied: the head sees all text"
            )
        norm_tensors = [f"fc_norm.{i}.weight" for i in range(count)]
        fc_norm = any(name in sizes for name in norm_tensors) or bool(
            settings.flag("fc_norm") or settings.flag("use_aux_norm")
        )
        before_fc = "input_norm.weight" in sizes or bool(settings.flag("norm_before_fc", nested=True))
        if (fc_norm or before_fc) and not (eagle3 and fused):
            raise CheckpointError(
                f"{self.name} has norms for features but no fc.weight that fuses them; it contradicts itself"
            )
        bias = "fc.bias" in sizes
        if not eagle3 and not bias:
            says = settings.flag("fusion_bias") if settings.speculators else settings.flag("bias")
            if says or (says is None and not settings.speculators and "bias" not in settings.values):
                self.warnings.append("fc.bias is not in the file although config.json implies one; it is taken as zero")
        attn = "layers.0.self_attn."
        eps = self.overrides.get("rms_norm_eps", settings.number("rms_norm_eps", 0, 1) or 1e-6)
        rope = self.rope(producer, head_dim)
        limit = self.overrides.get("max_position_embeddings") or settings.integer("max_position_embeddings")
        if limit is None:
            limit = settings.integer("max_sequence_length") or 2048
        first = "layers.0.input_layernorm.weight" in sizes
        if eagle3 and not first and settings.flag("use_input_layernorm_in_first_layer", nested=True) is not False:
            first = True
        last = "norm.weight" in sizes or (eagle3 and settings.flag("use_last_layernorm", nested=True) is not False)
        if not eagle3 and settings.speculators and settings.flag("layernorms"):
            first = last = True
        config = HeadConfig(
            family=self.family,
            hidden_size=hidden,
            target_hidden_size=width,
            intermediate_size=self.dims("layers.0.mlp.gate_proj.weight", 2)[0],
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab,
            draft_vocab_size=draft_vocab,
            capture=capture,
            num_layers=layers,
            max_position_embeddings=limit,
            rms_norm_eps=float(eps),
            hidden_act=act,
            rope=rope,
            fc=fused,
            fc_bias=bias,
            qkv_bias=self.biases([f"{attn}{p}_proj.bias" for p in "qkv"], "qkv_bias"),
            o_bias=self.biases([f"{attn}o_proj.bias"], ""),
            norm_before_residual=before_residual,
            norm_before_fc=before_fc,
            fc_norm=fc_norm,
            norm_output=norm_output,
            mlp_bias=self.biases([f"layers.0.mlp.{p}_proj.bias" for p in ("gate", "up", "down")], "mlp_bias"),
            qk_norm=self.biases([f"{attn}{p}_norm.weight" for p in "qk"], ""),
            embedding_norm="embedding_layernorm.weight" in sizes or bool(not eagle3 and settings.flag("layernorms")),
            first_norm=first,
            last_norm=last,
            logit_scale=self.overrides.get("logit_scale", settings.number("logit_scale", 0, 1e6) or 1.0),
        )
        embedding = "checkpoint" if self.own_embedding else "target"
        tensors = self.assign(config, embedding, lm_head)
        if lm_head == "tied to the embedding":
            tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
        if not all(
            tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) for tensor in tensors.values()
        ):
            odd = next(
                key for key, tensor in tensors.items() if not tensor.is_floating_point() or tensor.element_size() < 2
            )
            raise CheckpointError(
                f"{self.spelled.get(odd, odd)} of {self.name} is of type {tensors[odd].dtype}; give the head in"
                " bfloat16, float16 or float32"
            )
        return Plan(
            source=self.name,
            config=config,
            tensors=tensors,
            spelled=self.spelled,
            draft_to_target=draft_to_target,
            producer=producer,
            variant=_variant(config),
            layers=shown,
            layers_assumed=assumed,
            embedding=embedding,
            lm_head=lm_head,
            warnings=self.warnings,
        )

    def rope(self, producer: str, head_dim: int) -> dict[str, Any]:
        free = not {"rope", "rope_theta"} & set(self.overrides)
        rope = _rope(self.settings, producer, head_dim, self.overrides, self.warnings)
        if producer == "AngelSlim" and rope["rope_theta"] != 10000 and free:
            self.warnings.append(
                f"rope_theta {rope['rope_theta']:g} is used as config.json says, but AngelSlim trains with 10000"
                " whatever it says; compare the self-test with rope_theta=10000"
            )
        if self.settings.speculators == "eagle" and self.shape is not None and self.shape.rope and free:
            if dict(self.shape.rope) != rope:  # this converter's heads were run with the verifier's rotary embedding
                self.warnings.append(
                    f"the rotary parameters are the target's, {self.shape.rope}, as the speculators project ran such"
                    " heads"
                )
            return dict(self.shape.rope)
        return rope

    @property
    def own_embedding(self) -> bool:
        return "embed_tokens.weight" in self.sizes and self.overrides.get("embedding") != "target"

    def embedding_check(self, hidden: int, width: int) -> None:
        if self.overrides.get("embedding") == "checkpoint" and "embed_tokens.weight" not in self.sizes:
            raise self.missing("embed_tokens.weight")
        if not self.own_embedding and width != hidden:
            raise PairMismatch(
                f"{self.name} is {hidden} wide and its target {width}, so it needs an embedding of its own, but"
                " embed_tokens.weight is missing; get the checkpoint whole"
            )

    def assign(self, config: HeadConfig, embedding: str, lm_head: str) -> dict[str, Tensor]:
        """Every parameter's tensor; what is left over is named in a warning."""
        import torch

        from eagle_core.heads import EagleHead

        try:
            with torch.device("meta"):
                layout = EagleHead(config, own_embedding=embedding == "checkpoint", own_lm_head=lm_head == "checkpoint")
        except (KeyError, ValueError, TypeError, ZeroDivisionError, OverflowError, RuntimeError) as error:
            raise CheckpointError(f"{self.settings.where} describes a head that cannot be built: {error}") from error
        if not torch.isfinite(layout.rotary.inv_freq).all():
            raise CheckpointError(
                f"{self.settings.where}: its rope parameters {config.rope} give frequencies that are not finite"
            )
        tensors: dict[str, Tensor] = {}
        for name, parameter in layout.state_dict().items():
            expected = tuple(parameter.shape)
            if name not in self.tensors:
                raise self.missing(name)
            tensor = self.tensors[name]
            if name.startswith("fc.") and config.family == "eagle3" and tensor.dim() > 0 and len(tensor) > expected[0]:
                if name == "fc.weight":
                    self.warnings.append(
                        f"{self.spelled[name]} has {len(tensor)} rows; the {len(tensor) - expected[0]} beyond the"
                        " hidden size are early-stop signals and not used"
                    )
                tensor = tensor[: expected[0]]
            if tuple(tensor.shape) != expected:
                raise CheckpointError(
                    f"{self.spelled[name]} of {self.name} has shape {list(tensor.shape)}, expected {list(expected)}"
                )
            tensors[name] = tensor
        self.used |= set(tensors)
        self.name_leftovers()
        return tensors

    def name_leftovers(self) -> None:
        harmless: dict[str, str] = {
            r"t2d$": "a mask that only training needs",
            r"(layers\.\d+\.self_attn\.)?rotary_emb\.": "rotary frequencies, computed anew",
            r"verifier_": "parts of the target",
            r"parallel_draft_heads\.": "heads for parallel drafting",
            r"embed_tokens\.weight$": "set aside by embedding='target'",
            r"lm_head\.weight$": "set aside by lm_head='target'",
            r"layers\.[1-9]\d*\.hidden_norm\.": "layers after the first norm their input once",
        }
        left = sorted(set(self.sizes) - self.used)
        unknown = []
        for name in left:
            reason = next((why for pattern, why in harmless.items() if re.match(pattern, name)), None)
            if reason:
                self.warnings.append(f"{self.spelled[name]} is not used: {reason}")
            else:
                unknown.append(self.spelled[name])
        if unknown:
            self.warnings.append(
                f"not used, because no known EAGLE head has them: {', '.join(unknown)}; if the head computes with them,"
                " its drafts will be worse than meant"
            )


def _shown(boundaries: Sequence[int]) -> list[int | str]:
    return ["final norm" if j == -1 else j for j in boundaries]


def join(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items))


def _some(names: Sequence[str], limit: int = 6) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest if names else "nothing"


def _variant(config: HeadConfig) -> str:
    notes = []
    if config.family == "eagle1":
        label = "EAGLE-1/2"
        if config.embedding_norm or config.first_norm or config.last_norm:
            notes.append("extra norms")
    else:
        label = "EAGLE-3"
        if config.fc_norm or config.norm_output or config.norm_before_fc:
            label = "EAGLE-3.1"
        notes += [
            flag
            for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
            if getattr(config, flag)
        ]
        if not config.fc:
            notes.append("no auxiliary states")
    if config.num_layers > 1:
        notes.append(f"{config.num_layers} layers")
    return f"{label} ({', '.join(notes)})" if notes else label


def kind_of(source: str | Path) -> str:
    """What a drafter checkpoint is: "eagle1", "eagle3", "lm" (a whole language model), another method's name, or "".

    Raises:
        ModelNotFound, CheckpointError: it cannot be read.
    """
    folder = locate(source)
    settings = Settings(read_json(folder / "config.json"), f"config.json of {source}")
    tensors, _ = _normalise(read_weights(folder))
    return _kind({name: tuple(tensor.shape) for name, tensor in tensors.items()}, settings)
