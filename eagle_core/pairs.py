"""Pairs: a target and what drafts for it, from a name to a running answer.

    pair = load_pair()                                  # the default pair; or a preset, a hub id, a local folder
    pair = load_pair("Qwen/Qwen3-1.7B", "AngelSlim/Qwen3-1.7B_eagle3")
    pair.methods                                        # ("vanilla", "lookup", "eagle3")
    pair.why_not("eagle2")                              # a sentence, or None
    for event in pair.generate("Why is the sky blue?", method="eagle3"): ...

A drafter that cannot be loaded never takes the target with it: the pair says why the method is missing, and decodes
plainly. Weights come through transformers' ordinary loading; code of a repository is never run.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from eagle_core import default_target
from eagle_core.default_target import Progress
from eagle_core.errors import (
    CheckpointError,
    EagleError,
    InvalidRequest,
    ModelNotFound,
    PairMismatch,
    UnsupportedTarget,
)
from eagle_core.sources import locate

if TYPE_CHECKING:
    import torch

    from eagle_core.budget import Costs
    from eagle_core.drafters import Drafter, TreeSettings
    from eagle_core.events import Event
    from eagle_core.target import Target
    from eagle_core.verify import Sampling

__all__ = ["DEFAULT", "PRESETS", "Pair", "Preset", "load_pair", "load_target", "spare_the_collector", "target_config"]

DEFAULT = default_target.NAME
_HEADS = Path(__file__).parent.parent / "assets" / "heads"


@dataclass(frozen=True, slots=True)
class Preset:
    """A target with drafters known to belong to it.

    Attributes:
        name: what a user types.
        target: hub id; for the default pair only where its weights originally come from.
        drafters: folders or hub ids of heads, and of draft language models.
        note: what a user should know before choosing it.
    """

    name: str
    target: str
    drafters: tuple[str, ...]
    note: str = ""


_UNTRIED = "public checkpoints, listed by their authors as a pair; needs the hub"

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            DEFAULT,
            default_target.HUB_ID,
            (str(_HEADS / f"eagle2-{DEFAULT}"), str(_HEADS / f"eagle3-{DEFAULT}")),
            "small, runs anywhere; heads trained by this project",
        ),
        Preset(
            "granite-3.1-1b",
            "ibm-granite/granite-3.1-1b-a400m-instruct",
            ("wantsleep/granite-3.1-1b-a400m-EAGLE3",),
            _UNTRIED,
        ),
        Preset("qwen3-1.7b", "Qwen/Qwen3-1.7B", ("AngelSlim/Qwen3-1.7B_eagle3",), _UNTRIED),
        Preset("qwen3-8b", "Qwen/Qwen3-8B", ("RedHatAI/Qwen3-8B-speculator.eagle3",), _UNTRIED),
        Preset(
            "llama-3.1-8b",
            "meta-llama/Llama-3.1-8B-Instruct",
            ("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
            _UNTRIED + "; the target is gated",
        ),
        Preset("vicuna-7b", "lmsys/vicuna-7b-v1.3", ("yuhuili/EAGLE-Vicuna-7B-v1.3",), _UNTRIED),
        Preset("gpt-oss-20b", "openai/gpt-oss-20b", ("RedHatAI/gpt-oss-20b-speculator.eagle3",), _UNTRIED),
    )
}


# Targets ----------------------------------------------------------------------------------------------------------


def _preset(name: str | None) -> Preset | None:
    """The preset that a name means: by its own name, or by its target's hub id."""
    if name is None:
        return PRESETS[DEFAULT]
    return PRESETS.get(name) or next((p for p in PRESETS.values() if p.target == name and p.name != DEFAULT), None)


def _folder(name: str | None, progress: Progress | None) -> tuple[Path, str]:
    """Where a target's files are, and what to call it."""
    preset = _preset(name)
    if preset is not None and preset.name == DEFAULT:
        return default_target.fetch(progress=progress), DEFAULT
    source = preset.target if preset else str(name)
    return locate(source), source


def target_config(name: str | None = None) -> Any:
    """The transformers configuration of a target, without its weights.

    Raises:
        ModelNotFound: there are no such files. UnsupportedTarget: transformers does not know the model.
    """
    folder, called = _folder(name, None)
    return _config(folder, called)


def _config(folder: Path, called: str) -> Any:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{called} has no config.json, so it is no model; a target folder holds that and weights")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UnsupportedTarget(
            f"transformers does not know the model in {called} ({_first_line(error)}); code of a repository is never"
            " run here, so only architectures built into transformers can be targets"
        ) from error
    config.name_or_path = called
    return config


def load_target(
    name: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    progress: Progress | None = None,
    fast: bool = True,
    threads: int = 0,
) -> Target:
    """Load a target model.

    Args:
        name: a preset's name, a hub id or a local folder; None for the default, which is fetched on first use.
        dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU, else the checkpoint's own where the
            device can compute in it.
        device: "cuda", "cuda:1", "mps", "cpu", or "auto": the best there is, several GPUs where one is too small.
        progress: told how a first fetch of the default target goes; a bar on stderr by default.
        fast: take the CPU path (`cpu`) on a CPU; False is plain transformers.
        threads: of PyTorch on a CPU; 0 measures what reads fastest, unless `OMP_NUM_THREADS` is set.

    Raises:
        ModelNotFound: no such files, each reason with its remedy. UnsupportedTarget: the model cannot verify a tree,
        or transformers does not know it. CheckpointError: its weights are damaged or incomplete.
        InvalidRequest: the device or the dtype is not to be had.
    """
    import torch

    from eagle_core.target import Target

    if threads < 0:
        raise InvalidRequest(f"{threads} threads cannot compute; give at least 1, or 0 to choose by measuring")
    place = _device(device)
    folder, called = _folder(None if name is None else str(name), progress)
    config = _config(folder, called)
    model = _load_model(folder, called, config, _dtype(dtype, config, place), place, device == "auto")
    target = Target(model, _tokenizer(folder, called), called)
    if place == "cpu":
        if fast:
            target.quicken(threads)
        elif threads:
            torch.set_num_threads(threads)
    target.self_check()
    spare_the_collector()
    return target


def spare_the_collector() -> None:
    """Take everything that is loaded by now out of the garbage collector's sight.

    Libraries and models are hundreds of thousands of objects that stay. Looking through them takes 0.15 s and more, in
    the midst of an answer, and would be counted as time of that step. To be called again when a model has been let go,
    so that what held it in a circle is found.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _device(wanted: str) -> str:
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = wanted.split(":")[0]
    if kind not in ("cuda", "mps", "cpu"):
        raise InvalidRequest(f"there is no device {wanted!r}; choose auto, cuda, cuda:N, mps or cpu")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = wanted.partition(":")[2] or "0"
        if not index.isdigit() or int(index) >= count:
            raise InvalidRequest(
                f"{wanted} is not here: this machine offers {count} CUDA devices to PyTorch; try auto or cpu"
            )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise InvalidRequest("mps is not here: it needs a Mac with an Apple GPU; try auto or cpu")
    return wanted


def _bf16_missing(place: str) -> str | None:
    """Why a device cannot compute in bfloat16; None if it can."""
    import torch

    if place.startswith("cuda"):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return None
        return f"{torch.cuda.get_device_name(place)} has no bfloat16 arithmetic (that begins with NVIDIA Ampere)"
    if place == "mps":
        try:
            torch.ones(2, dtype=torch.bfloat16, device="mps").sum()
        except (TypeError, RuntimeError) as error:
            return f"this system's MPS has no bfloat16 ({_first_line(error)})"
    return None


def _dtype(wanted: str | torch.dtype, config: Any, place: str) -> torch.dtype:
    import torch

    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    names |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if wanted == "auto":
        if place == "cpu":
            return torch.float32
        own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        own = own if own in (torch.float32, torch.bfloat16, torch.float16) else torch.bfloat16
        return torch.float16 if own == torch.bfloat16 and _bf16_missing(place) else own
    chosen = names.get(str(wanted).removeprefix("torch."))
    if chosen is None:
        raise InvalidRequest(f"there is no dtype {wanted!r} here; choose auto, float32, bfloat16 or float16")
    if chosen == torch.bfloat16 and (reason := _bf16_missing(place)):
        raise InvalidRequest(f"bfloat16 is not to be had: {reason}; choose float16 or float32")
    return chosen


def _load_model(folder: Path, called: str, config: Any, dtype: torch.dtype, place: str, spread: bool) -> Any:
    """transformers' model, attention by sdpa where it has it, every weight from the file."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    where: Any = {"": place}
    if spread and place == "cuda" and _too_big(folder, dtype):
        where = "auto"
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False, "output_loading_info": True}
    if place != "cpu":
        options["device_map"] = where
    try:
        try:
            model, info = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", **options)
        except (ValueError, ImportError) as error:
            if "scaled_dot_product_attention" not in str(error) and "sdpa" not in str(error):
                raise
            model, info = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options)
    except torch.OutOfMemoryError as error:
        raise InvalidRequest(
            f"{called} does not fit into the memory of {place}; choose a smaller target, bfloat16, or the device cpu"
        ) from error
    except SafetensorError as error:
        raise CheckpointError(
            f"the weights of {called} are damaged ({_first_line(error)}); download them again"
        ) from error
    except OSError as error:
        raise ModelNotFound(
            f"the weights of {called} cannot be read ({_first_line(error)}); get the folder whole"
        ) from error
    except ImportError as error:
        raise UnsupportedTarget(f"{called} needs a package that is not installed: {_first_line(error)}") from error
    except (ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
        raise UnsupportedTarget(
            f"{called} cannot be loaded as a causal language model: {_first_line(error)}"
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"{called} lacks {len(missing)} weights, the first {missing[0]}; they would be random, get the folder whole"
        )
    model.config.name_or_path = called
    return model


def _too_big(folder: Path, dtype: torch.dtype) -> bool:
    """Whether the weights and some room for keys and values exceed the free memory of the first GPU."""
    import torch

    if torch.cuda.device_count() < 2:
        return False
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return size * 1.2 * dtype.itemsize / 2 > torch.cuda.mem_get_info(0)[0]


def _tokenizer(folder: Path, called: str) -> Any:
    """The tokenizer; None where the folder has none, and the target is driven by ids alone."""
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")
    if not any((folder / file).exists() for file in files):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, OSError, ImportError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the tokenizer of {called} cannot be loaded ({_first_line(error)}); get the folder whole"
        ) from error


def _called(source: str) -> str:
    """What a trace calls a model: a hub id, or the name of its folder; where that lies is nobody else's business."""
    return Path(source).resolve().name if Path(source).is_dir() else source


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[0].strip() if lines else type(error).__name__)[:300]


# Pairs ------------------------------------------------------------------------------------------------------------


class Pair:
    """A target and its drafters; heads and draft models are loaded when a method first needs them.

    Args:
        target: the model that answers.
        drafters: folders or hub ids of EAGLE heads and draft language models; loaded on demand.

    Attributes:
        target: the model that answers.
        preset: name of the preset it was made from, or None.
    """

    def __init__(self, target: Target, drafters: Sequence[str | Path] = (), preset: str | None = None) -> None:
        self.target, self.preset = target, preset
        self._waiting = [str(source) for source in drafters]
        self._parts: dict[str, Any] = {"nothing": None}
        self._failures: list[str] = []
        self._drafters: dict[str, Drafter] = {}
        self._costs: dict[str, Costs] = {}
        self._lock = threading.RLock()

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods this pair can run."""
        from eagle_core.drafters import METHODS

        return tuple(name for name in METHODS if self.why_not(name) is None)

    def why_not(self, method: str) -> str | None:
        """Why a method cannot run with this pair, in a sentence; None if it can."""
        from eagle_core.drafters import METHODS

        if method not in METHODS:
            return f"there is no method {method!r}; choose one of {', '.join(METHODS)}"
        needs = METHODS[method].needs
        with self._lock:
            self._settle()
            if self._part(method) is not None:
                return None
            name = self.target.name
            if needs == "draft model":
                wanted = f"a draft language model with the vocabulary of {name}"
            else:
                wanted = f"an {needs.replace('eagle', 'EAGLE-').replace('EAGLE-1', 'EAGLE-1/2')} trained for {name}"
            failed = f" ({' '.join(self._failures)})" if self._failures else ""
            return f"{METHODS[method].label} needs {wanted}, and this pair has none{failed}"

    @property
    def failures(self) -> tuple[str, ...]:
        """What went wrong with drafters that this pair was meant to have; show it loudly."""
        with self._lock:
            self._settle()
            return tuple(self._failures)

    def add(self, drafter: str | Path, **overrides: Any) -> tuple[str, ...]:
        """Load a drafter now, and use it from the next answer on.

        Args:
            drafter: a folder or a hub id of an EAGLE head or a draft language model.
            overrides: what a head's configuration may get wrong (`checkpoints.OVERRIDES`).

        Returns:
            The methods it serves.

        Raises:
            EagleError: it cannot be used, see `checkpoints.load_head` and `load_target`; the pair is as before,
                apart from an entry in `failures`.
        """
        from eagle_core.drafters import METHODS

        with self._lock:
            try:
                needs, part = self._load(str(drafter), overrides)
            except EagleError as error:
                self._failures.append(str(error))
                raise
            self._parts[needs] = part
            served = tuple(name for name in METHODS if self._part(name) == needs)
            for name in served:
                self._drafters.pop(name, None)
                self._costs.pop(name, None)
            return served

    def drafter(self, method: str) -> Drafter:
        """The drafter of a method, made once. EAGLE-1 and EAGLE-2 share their head.

        Raises:
            InvalidRequest: there is no such method, or this pair cannot run it.
        """
        from eagle_core.drafters import METHODS

        with self._lock:
            if why := self.why_not(method):
                raise InvalidRequest(why)
            if method not in self._drafters:
                part = self._part(method)
                assert part is not None, "why_not names a method that lacks its part"
                self._drafters[method] = METHODS[method].make(self._parts[part], self.target)
            return self._drafters[method]

    def _part(self, method: str) -> str | None:
        """Which of the parts that a method can draft with this pair has; None if none."""
        from eagle_core.drafters import METHODS

        row = METHODS[method]
        return next((part for part in (row.needs, *row.instead) if part in self._parts), None)

    def facts(self, method: str) -> dict[str, Any]:
        """What `inspect` says of the head a method drafts with; empty for methods without one."""
        self.drafter(method)
        part = self._part(method)
        return {} if part is None else dict(getattr(self._parts[part], "facts", {}))

    def _settle(self) -> None:
        """Load what was announced; a failure is kept, not raised, so that the target stays usable."""
        waiting, self._waiting = self._waiting, []
        for source in waiting:
            try:
                needs, part = self._load(source, {})
            except EagleError as error:
                self._failures.append(str(error))
            else:
                self._parts.setdefault(needs, part)

    def _load(self, source: str, overrides: Mapping[str, Any]) -> tuple[str, Any]:
        from eagle_core.checkpoints import kind_of, load_head
        from eagle_core.cpu import FastPath

        if kind_of(source) != "lm":
            head = load_head(source, self.target, **overrides)
            if self.target.fast is not None:
                FastPath(head)
            return f"{head.config.family} head", head
        if overrides:
            raise InvalidRequest(f"{source} is a language model; only heads take {', '.join(overrides)}")
        import torch

        draft = load_target(
            source,
            dtype=self.target.dtype,
            device=str(self.target.device),
            fast=self.target.fast is not None,
            threads=torch.get_num_threads(),
        )
        _check_vocabulary(draft, self.target)
        return "draft model", draft

    def encode(
        self,
        prompt: str | Sequence[Mapping[str, str]] | Sequence[int],
        system: str | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], str | None, str | None]:
        """A prompt as the target reads it.

        Args:
            prompt: a question, a conversation as `{"role", "content"}` messages, or ids, which are taken as they are.
                Its text is tokenised with the template around it, as everywhere with transformers: a visitor who writes
                a control token such as `<|im_end|>` ends their own message.
            system: the system prompt, put before a question or conversation.
            template: options of the chat template, such as `{"enable_thinking": False}`.

        Returns:
            The ids, the text they come from (None for ids), and a note on what the user should know, or None.

        Raises:
            InvalidRequest: the target has no tokenizer, or its template refuses the conversation.
        """
        if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
            if system:
                raise InvalidRequest("a prompt of ids is taken as it is; a system prompt cannot be put before it")
            return [cast(int, token) for token in prompt], None, None
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise InvalidRequest(f"{self.target.name} has no tokenizer; give the prompt as ids (--prompt-ids 5,17,42)")
        talk = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [dict(cast(Mapping[str, str], message)) for message in talk]
        for message in messages:
            if not {"role", "content"} <= set(message) or not all(
                isinstance(message[k], str) for k in ("role", "content")
            ):
                raise InvalidRequest(f"a message needs a role and a content, both text; found {message!r}")
        if system:
            messages.insert(0, {"role": "system", "content": system})
        if any("\ud800" <= c <= "\udfff" for message in messages for c in message["content"]):
            raise InvalidRequest("the prompt holds bytes that are no text (half of a surrogate pair); leave them out")
        if not getattr(tokenizer, "chat_template", None):
            text = "\n\n".join(message["content"] for message in messages)
            note = f"{self.target.name} has no chat template; the prompt was read as plain text"
            return list(tokenizer(text)["input_ids"]), text, note
        from jinja2 import TemplateError

        try:
            options = dict(template or {})
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(
                f"the chat template of {self.target.name} refuses this conversation: {_first_line(error)}"
            ) from error
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]), text, None

    def generate(
        self,
        prompt: str | Sequence[Mapping[str, str]] | Sequence[int],
        *,
        method: str = "eagle3",
        sampling: Sampling | None = None,
        settings: TreeSettings | None = None,
        max_new_tokens: int = 128,
        stop: Sequence[str] | str = (),
        system: str | None = None,
        template: Mapping[str, Any] | None = None,
        cancel: threading.Event | None = None,
        record: bool = True,
        **unknown: Any,
    ) -> Iterator[Event]:
        """Answer a prompt, telling everything that happens: `engine.generate` says how, `encode` what a prompt can be.

        Raises:
            InvalidRequest: at once, before any forward, if anything asked cannot be honoured.
        """
        from eagle_core.budget import AUTO_LIMIT, measure_costs
        from eagle_core.drafters import TreeSettings
        from eagle_core.engine import generate

        drafter = self.drafter(method)
        settings = settings or TreeSettings()
        ids, text, note = self.encode(prompt, system, template)
        facts = self.facts(method)
        told = ("source", "variant", "producer", "layers", "layers_assumed", "coverage", "parameters", "warnings")
        pair: dict[str, Any] = {
            "preset": self.preset,
            "drafter": {key: _called(facts[key]) if key == "source" else facts[key] for key in told if key in facts},
            "prompt": {"system": system, "template": dict(template or {}), "note": note},
        }

        def answer(settings: TreeSettings) -> Iterator[Event]:
            return generate(
                self.target,
                drafter,
                ids,
                method=method,
                sampling=sampling,
                settings=settings,
                max_new_tokens=max_new_tokens,
                stop=stop,
                cancel=cancel,
                pair=pair,
                prompt_text=text,
                record=record,
                **unknown,
            )

        if settings.total_token == -1 and settings.costs is None:
            answer(replace(settings, total_token=AUTO_LIMIT))  # refuses what cannot be honoured before measuring
            with self._lock:
                if method not in self._costs:
                    known = next(iter(self._costs.values()), None)
                    self._costs[method] = measure_costs(self.target, drafter, known)
            settings = replace(settings, costs=self._costs[method])
        return answer(settings)


def _check_vocabulary(draft: Target, target: Target) -> None:
    """A draft model's ids must mean the target's tokens; rows that only pad a table may differ in number."""
    sizes = f"{draft.name} has {draft.vocab_size} tokens, {target.name} {target.vocab_size}"
    ours, theirs = draft.tokenizer, target.tokenizer
    if ours is not None and theirs is not None:
        if ours.get_vocab() != theirs.get_vocab():
            raise PairMismatch(
                f"the tokenizers differ ({sizes}), so the draft model's ids mean other tokens; choose a draft model of"
                " the same family"
            )
    elif draft.vocab_size != target.vocab_size:
        raise PairMismatch(f"the vocabularies differ ({sizes}); choose a draft model of the same family")


def load_pair(
    target: str | Path | Target | None = None,
    drafter: str | Path | Sequence[str | Path] | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    progress: Progress | None = None,
    fast: bool = True,
    threads: int = 0,
) -> Pair:
    """Load a target, and know what drafts for it.

    Args:
        target: as `load_target`, or a loaded `Target`.
        drafter: folders or hub ids, loaded at once; None for those of the preset, loaded when first needed.
        dtype, device, progress, fast, threads: as `load_target`.

    Raises:
        EagleError: as `load_target`, and as `Pair.add` for a drafter that was named.
    """
    from eagle_core.target import Target

    if isinstance(target, Target):
        loaded, preset = target, None
    else:
        name = None if target is None else str(target)
        loaded = load_target(name, dtype=dtype, device=device, progress=progress, fast=fast, threads=threads)
        preset = _preset(name)
    named = [] if drafter is None else [drafter] if isinstance(drafter, str | Path) else list(drafter)
    pair = Pair(loaded, () if named or preset is None else preset.drafters, preset.name if preset else None)
    for source in named:
        pair.add(source)
    return pair
