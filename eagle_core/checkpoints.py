"""Public drafter checkpoints to `EagleHead`s, strictly.

    folder or hub id ─► config.json + tensors ─► one set of names ─► a plan, read off the shapes ─► EagleHead
                        (several dialects)       (layers.0.…)       (HeadConfig, where each        (borrowing what
                                                                     tensor goes, warnings)         it lacks)

Producers contradict each other and themselves, so the tensors decide wherever they can and the configuration only
where they cannot; what it says against them is a warning. Every tensor is used or named in a warning; a missing
one is an error that names it; no weight is ever left as initialised. Nothing is attached to the target before all
of it was checked.

What neither tensors nor configuration settle (layer-id convention, rotary base, norm flags) is assumed as most
producers do, said to be assumed, and can be overridden by name:

    head = load_head("owner/head", target, rope_theta=1e6, norm_output=False, capture=(2, 16, 29))
    self_test(head, target, ids)    # share of agreement; a wrong flag shows as a drop, not as an error

Source: the released code of SafeAILab/EAGLE, SpecForge, speculators, AngelSlim, ModelOpt, vLLM and SGLang.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle_core.errors import CheckpointError, InvalidRequest
from eagle_core.formats import OVERRIDES, Plan, Settings, TargetShape, join, kind_of, read_json, read_plan, read_weights
from eagle_core.sources import locate

if TYPE_CHECKING:
    import torch

    from eagle_core.heads import EagleHead, HeadConfig
    from eagle_core.target import Target

__all__ = [
    "OVERRIDES",
    "TargetShape",
    "configure",
    "estimate_memory",
    "inspect",
    "kind_of",
    "load_head",
    "run",
    "save_head",
    "self_test",
]

# Public functions -------------------------------------------------------------------------------------------------


def load_head(source: str | Path, target: Target, **overrides: Any) -> EagleHead:
    """Load an EAGLE head and attach it to its target.

    Args:
        source: a local folder or a hub id.
        target: the model it drafts for; lends what the head lacks, and is not changed.
        overrides: see `OVERRIDES`.

    Returns:
        The head in eval mode, on the target's device, in its dtype, without gradients. What `inspect` says of it is
        in its attribute `facts`.

    Raises:
        ModelNotFound: there are no such files. CheckpointError: they are damaged, incomplete or of another kind.
        PairMismatch: a sound head of another target. InvalidRequest: an override that does not exist or fit.
    """
    import torch

    from eagle_core.heads import EagleHead

    shape = TargetShape.of(target)
    plan = read_plan(source, shape, overrides)
    device, dtype = target.device, target.dtype
    tied = plan.lm_head == "tied to the embedding"
    shared = False
    if plan.embedding == "checkpoint" and not tied and plan.config.hidden_size == target.hidden_size:
        own = plan.tensors["embed_tokens.weight"].to(device, dtype)
        shared = own.shape == target.embedding.shape and torch.equal(own, target.embedding)
    tensors = {}
    for name, tensor in plan.tensors.items():
        if (shared and name == "embed_tokens.weight") or (tied and name == "lm_head.weight"):
            continue
        tensors[name] = tensor.to(device, dtype, copy=True)
        if not torch.isfinite(tensors[name]).all():
            raise CheckpointError(
                f"{plan.spelled.get(name, name)} of {source} has values beyond the range of {dtype}; load the target in"
                " bfloat16 or float32"
            )
    if tied:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    own_embedding = plan.embedding == "checkpoint" and not shared
    with torch.device("meta"):
        head = EagleHead(plan.config, own_embedding=own_embedding, own_lm_head=plan.lm_head != "target")
    head.load_state_dict(tensors, assign=True)
    if tied and head.lm_head is not None and head.embed_tokens is not None:
        head.lm_head.weight = head.embed_tokens.weight
    ids = plan.draft_to_target
    head.draft_to_target = None if ids is None else ids.to(device)
    head.rotary.to(device)
    head.requires_grad_(False).eval()
    if shared:
        plan.warnings.append("embed_tokens.weight equals the target's embedding; the target's is shared")
    head.facts = _facts(plan, shape, dtype)
    head.borrow(target.embedding, target.lm_head)
    return head


def inspect(source: str | Path, target: Any = None, **overrides: Any) -> dict[str, Any]:
    """What a drafter checkpoint is and how it would be run, without running it.

    Args:
        source: a local folder or a hub id.
        target: the `Target` or its transformers configuration; without it, what depends on it is left open.
        overrides: see `OVERRIDES`.

    Returns:
        A JSON-able dictionary: source, method ("eagle1", which EAGLE-2 runs too, "eagle3" or "chain"), variant,
        producer, layers (boundaries read), layers_assumed, num_layers, hidden_size, vocab_size, draft_vocab_size,
        coverage (share of the target's vocabulary that can be drafted), parameters, memory_bytes, dtype (of the
        file), context, target_context, rope, embedding, lm_head, flags, warnings.

    Raises:
        As `load_head`.
    """
    shape = None if target is None else TargetShape.of(target)
    if kind_of(source) == "lm":
        return _language_model_facts(source, shape)
    return _facts(read_plan(source, shape, overrides), shape, getattr(target, "dtype", None))


def _facts(plan: Plan, shape: TargetShape | None, dtype: Any) -> dict[str, Any]:
    import torch

    config = plan.config
    distinct = {tensor.data_ptr(): tensor for tensor in plan.tensors.values()}
    parameters = sum(tensor.numel() for tensor in distinct.values())
    in_file = plan.tensors["layers.0.self_attn.q_proj.weight"].dtype
    dtype = dtype if isinstance(dtype, torch.dtype) else in_file
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm", "fc_bias", "qkv_bias")
    return {
        "source": plan.source,
        "method": config.family,
        "variant": plan.variant,
        "producer": plan.producer,
        "layers": plan.layers,
        "layers_assumed": plan.layers_assumed,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "coverage": config.draft_vocab_size / config.vocab_size,
        "parameters": parameters,
        "memory_bytes": parameters * dtype.itemsize,
        "dtype": str(in_file).removeprefix("torch."),
        "context": config.max_position_embeddings,
        "target_context": None if shape is None else shape.context,
        "rope": config.rope,
        "embedding": plan.embedding,
        "lm_head": plan.lm_head,
        "flags": {flag: bool(getattr(config, flag)) for flag in flags},
        "warnings": list(plan.warnings),
    }


def _language_model_facts(source: str | Path, shape: TargetShape | None) -> dict[str, Any]:
    folder = locate(source)
    settings = Settings(read_json(folder / "config.json"), f"config.json of {source}")
    tensors = read_weights(folder)
    vocab, context = settings.integer("vocab_size"), settings.integer("max_position_embeddings")
    if vocab is None:
        raise CheckpointError(f"{settings.where} lacks vocab_size; add it")
    warnings = []
    if shape is not None and vocab != shape.vocab_size:
        warnings.append(
            f"the vocabulary has {vocab} tokens, that of {shape.name} {shape.vocab_size}; the two can be paired only if"
            " their tokenizers are the same"
        )
    parameters = sum(tensor.numel() for tensor in tensors.values())
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    return {
        "source": str(source),
        "method": "chain",
        "variant": f"draft language model ({settings.text('model_type') or 'unknown'})",
        "producer": settings.architectures or "unknown",
        "layers": [],
        "layers_assumed": False,
        "num_layers": settings.integer("num_hidden_layers") or settings.integer("n_layer"),
        "hidden_size": settings.integer("hidden_size") or settings.integer("n_embd"),
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "coverage": 1.0,
        "parameters": parameters,
        "memory_bytes": size,
        "dtype": ", ".join(kinds),
        "context": context,
        "target_context": None if shape is None else shape.context,
        "rope": None,
        "embedding": "checkpoint",
        "lm_head": "checkpoint",
        "flags": {},
        "warnings": warnings,
    }


def self_test(head: EagleHead, target: Target, ids: Sequence[int]) -> float:
    """Share of positions where the head's first choice, given the true text, is the target's own choice.

    A wrong layer, rotary base or norm flag shows here as a drop. Use text the target wrote itself, some 200 tokens.

    Args:
        ids: [P ≥ 3] token ids; pair t (state of token t, token t + 1) is compared with the target's argmax after
            token t + 1.
    """
    import torch

    from eagle_core.heads import HeadCache

    if len(ids) < 3:
        raise InvalidRequest(f"a self-test needs at least 3 tokens, got {len(ids)}")
    if len(ids) > min(target.context, head.config.max_position_embeddings):
        raise InvalidRequest(
            f"a self-test over {len(ids)} tokens exceeds the context of the target ({target.context}) or of the head"
            f" ({head.config.max_position_embeddings})"
        )
    device = target.device
    tokens = torch.tensor(list(ids), device=device)
    positions = torch.arange(len(tokens), device=device)
    with torch.inference_mode():
        session = target.session(len(tokens), head.config.capture)
        logits, states = target.forward(session.cache, tokens, positions, None, head.config.capture, 0)
        cache = HeadCache(head.config, len(tokens), device, target.dtype)
        _, read = head(tokens[None, 1:], head.fuse(states[None, :-1]), positions[None, :-1], cache)
        drafted = head.logits(read)[0].argmax(-1)
        if head.draft_to_target is not None:
            drafted = head.draft_to_target[drafted]
        return (drafted == logits[1:].argmax(-1)).float().mean().item()


def estimate_memory(
    target_config: Any, head: HeadConfig | None = None, *, tokens: int = 2048, dtype: Any = None
) -> dict[str, int]:
    """Bytes that a pair will take, from configurations alone.

    Args:
        target_config: the target's transformers configuration.
        head: the head's, or None.
        tokens: prompt and answer together, for the keys and values of both.
        dtype: of weights and cache; the configuration's own by default.

    Returns:
        target, head, cache and total, in bytes. What an embedding shared between the two takes is counted once.
    """
    import copy

    import torch
    from transformers import AutoModelForCausalLM

    from eagle_core.heads import EagleHead

    text = target_config.get_text_config()
    dtype = dtype or getattr(target_config, "dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(target_config))
        weights = sum(parameter.numel() for parameter in model.parameters())
        extra = (
            sum(p.numel() for p in EagleHead(head, own_lm_head=head.draft_vocab_size != head.vocab_size).parameters())
            if head
            else 0
        )
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    row = 2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or heads) * width
    if head:
        row += 2 * head.num_layers * head.num_key_value_heads * head.head_dim
    sizes = {"target": weights * dtype.itemsize, "head": extra * dtype.itemsize, "cache": row * tokens * dtype.itemsize}
    return {**sizes, "total": sum(sizes.values())}


# Writing ----------------------------------------------------------------------------------------------------------


def save_head(
    head: EagleHead,
    folder: str | Path,
    form: Literal["safeailab", "speculators"] = "safeailab",
    *,
    dtype: torch.dtype | None = None,
    verifier: str = "",
    notes: dict[str, Any] | None = None,
) -> None:
    """Write a head where other tools, and `load_head`, can read it.

    Args:
        head: any `EagleHead`; what it borrows from its target is not written.
        folder: made if need be; existing files of a head there are replaced, each at once.
        form: SafeAILab's names, or the speculators project's (EAGLE-3 only).
        dtype: of the weights in the file; the head's own by default.
        verifier: the target's name, for the speculators configuration.
        notes: JSON-able facts to keep in the configuration (how it was trained).

    Raises:
        InvalidRequest: the form cannot hold this head, or `dtype` its weights; weights that are not finite.
    """
    import torch
    from safetensors.torch import save_file

    config = head.config
    if form not in ("safeailab", "speculators"):
        raise InvalidRequest(f"form is {form!r}; choose 'safeailab' or 'speculators'")
    if form == "speculators" and config.family == "eagle1":
        raise InvalidRequest(
            "the speculators project gave up its form for EAGLE-1 heads, which runs them with the target's rotary"
            " embedding; use form='safeailab'"
        )
    if form == "speculators" and not config.fc:
        raise InvalidRequest("the speculators form has no heads without auxiliary states; use form='safeailab'")
    state = {
        name: tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        for name, tensor in head.state_dict().items()
    }
    for name, tensor in head.state_dict().items():
        if not torch.isfinite(state[name]).all():
            if not torch.isfinite(tensor).all():
                raise InvalidRequest(
                    f"{name} of this head holds NaN or infinity, so it cannot draft; write one from before its training"
                    " diverged"
                )
            raise InvalidRequest(
                f"{name} of this head reaches {float(tensor.abs().max()):.3g}, beyond the range of {dtype}; write it in"
                " bfloat16 or float32"
            )
    tied = (
        head.embed_tokens is not None and head.lm_head is not None and head.lm_head.weight is head.embed_tokens.weight
    )
    if tied:
        del state["lm_head.weight"]
    if form == "safeailab" and config.family == "eagle3" and config.num_layers == 1:
        state = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in state.items()}
    if (ids := head.draft_to_target) is not None:
        ids = ids.cpu()
        state["d2t"] = ids - torch.arange(len(ids))
        mask = torch.zeros(config.vocab_size, dtype=torch.bool)
        mask[ids] = True
        state["t2d"] = mask
    written = _written_config(config, form, tied, str(dtype or next(head.parameters()).dtype), verifier)
    if notes:
        written["notes"] = notes
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as scratch:
        save_file(state, Path(scratch) / "model.safetensors", metadata={"format": "pt"})
        (Path(scratch) / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        os.chmod(Path(scratch) / "model.safetensors", 0o644)
        for name in ("model.safetensors", "config.json"):
            os.replace(Path(scratch) / name, folder / name)


def _written_config(config: HeadConfig, form: str, tied: bool, dtype: str, verifier: str) -> dict[str, Any]:
    layer: dict[str, Any] = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype.removeprefix("torch."),
    }
    scaling = {key: value for key, value in config.rope.items() if key != "rope_theta"}
    flags: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "producer": "eagle-playground",
    }
    if config.logit_scale != 1.0:
        flags["logit_scale"] = config.logit_scale
    if config.target_hidden_size != config.hidden_size:
        flags["target_hidden_size"] = config.target_hidden_size
    rising = config.capture == tuple(sorted(set(config.capture)))
    if not rising:  # readers sort; only ours can be told not to
        flags["layer_id_convention"] = "exact"
    if form == "speculators":
        layer["rope_parameters"] = dict(config.rope)
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": 5,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": verifier or None, "architectures": []},
            },
            "tie_word_embeddings": tied,
            "eagle_aux_hidden_state_layer_ids": list(config.capture),
            **flags,
        }
    layer["rope_theta"] = config.rope["rope_theta"]
    layer["rope_scaling"] = None if scaling.get("rope_type") == "default" else scaling
    if config.family == "eagle1":
        return {
            "architectures": ["LlamaForCausalLM"],
            **layer,
            "bias": config.fc_bias,
            "qkv_bias": config.qkv_bias,
            **{key: flags[key] for key in ("logit_scale", "producer") if key in flags},
        }
    nested: dict[str, Any] = {"use_aux_hidden_state": config.fc}
    if not config.last_norm:
        nested["use_last_layernorm"] = False
    if not config.first_norm:
        nested["use_input_layernorm_in_first_layer"] = False
    if config.fc:
        # The common convention where it is unmistakable, an explicit word where it is not.
        outputs = config.capture[0] == 2 and rising
        ids = [j - 1 for j in config.capture] if outputs else list(config.capture)
        nested["eagle_aux_hidden_state_layer_ids"] = ids
        nested["layer_id_convention"] = "output" if outputs else "boundary" if rising else "exact"
    return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **flags, "eagle_config": nested}


# Command line -----------------------------------------------------------------------------------------------------


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("drafter", metavar="DRAFTER", help="a local folder or a hub id")
    parser.add_argument(
        "--target", metavar="T", help="the target it would draft for: a name, a local folder or a hub id"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help=f"override what the configuration says, the value as JSON; keys: {', '.join(OVERRIDES)}",
    )
    parser.add_argument(
        "--export",
        metavar=("FORM", "FOLDER"),
        nargs=2,
        help="also write the head there: as safeailab (the reference) or speculators (vLLM, SGLang)",
    )


def run(args: Namespace) -> dict[str, Any]:
    """Print what a drafter is, as a table; returns `inspect`'s dictionary."""
    target = None
    if args.target:
        from eagle_core.pairs import target_config

        target = target_config(args.target)
    overrides = {}
    for item in args.set:
        key, equals, value = item.partition("=")
        if not equals:
            raise InvalidRequest(f"--set takes KEY=VALUE, got {item!r}")
        try:
            overrides[key] = json.loads(value)
        except ValueError:
            overrides[key] = value
    facts = inspect(args.drafter, target, **overrides)
    print(_table(facts))
    if args.export:
        import torch

        from eagle_core.pairs import load_target

        form, folder = args.export
        loaded = load_target(args.target)
        head = load_head(args.drafter, loaded, **overrides)
        save_head(head, folder, form, dtype=getattr(torch, facts["dtype"], None), verifier=loaded.name)
        print(f"{'written':<17} {folder}, in the form of {form}, for {loaded.name}")
    return facts


def _table(facts: dict[str, Any]) -> str:
    count = facts["parameters"]
    words = f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"
    size = facts["memory_bytes"] / 2**20
    limits = f"{facts['context']} (drafter)" + (
        f", {facts['target_context']} (target)" if facts["target_context"] else ""
    )
    rows = [
        ("drafter", facts["source"]),
        ("method", f"{facts['method']}: {facts['variant']}"),
        ("producer", facts["producer"]),
        (
            "layers read",
            f"{join(facts['layers'])} ({'assumed' if facts['layers_assumed'] else 'given'})"
            if facts["layers"]
            else "none",
        ),
        ("draft vocabulary", f"{facts['draft_vocab_size']} of {facts['vocab_size']} tokens ({facts['coverage']:.1%})"),
        ("parameters", f"{words} in {facts['dtype']}, {size:.1f} MiB"),
        ("context", limits),
    ]
    if facts["rope"]:
        rows.append(("rotary embedding", ", ".join(f"{key} {value}" for key, value in facts["rope"].items())))
    rows += [("embedding", facts["embedding"]), ("LM head", facts["lm_head"])]
    rows += [("warning", text) for text in facts["warnings"]] or [("warnings", "none")]
    return "\n".join(f"{label:<17} {text}" for label, text in rows)
