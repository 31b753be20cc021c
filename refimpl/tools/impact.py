"""The impact table: public architectures at their published sizes, under the usual wrappings.

Configurations are those of the published `config.json` files, reduced to what decides shapes; models are
built on the meta device by `transformers`, and `peft` for LoRA, and audited (`audit`). Nothing is
downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..layout import num_blocks
from . import models
from .audit import audit

WORLD_SIZES = (2, 8, 64, 1024)
WRAPPINGS = ("per-block", "per-layer")
LORA_RANK = 16


def _decoder(
    width: int, inner: int, layers: int, heads: int, vocabulary: int, *, kind: str, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "architectures": [f"{kind.title()}ForCausalLM"],
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        **more,
    }


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "GPT-2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    "BERT-base": {"model_type": "bert", "architectures": ["BertModel"]},
    "ViT-B/16": {"model_type": "vit", "architectures": ["ViTForImageClassification"], "num_labels": 1000},
    "T5-base": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 768,
        "d_ff": 3072,
        "num_layers": 12,
        "num_heads": 12,
    },
    "Whisper-small": {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": 768,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
        "vocab_size": 51865,
    },
    "Qwen2.5-0.5B": _decoder(
        896, 4864, 24, 14, 151936, kind="qwen2", num_key_value_heads=2, tie_word_embeddings=True
    ),
    "Mistral-7B": _decoder(4096, 14336, 32, 32, 32000, kind="mistral"),
    "Llama-3-8B": _decoder(4096, 14336, 32, 32, 128256, kind="llama"),
    "Qwen3-8B": _decoder(4096, 12288, 36, 32, 151936, kind="qwen3", head_dim=128),
    "Llama-3-70B": _decoder(8192, 28672, 80, 64, 128256, kind="llama"),
    "Llama-3-405B": _decoder(16384, 53248, 126, 128, 128256, kind="llama"),
}
LORA_OF = "Qwen3-8B"


def impact(names: Sequence[str] = (*CONFIGURATIONS, f"{LORA_OF} LoRA")) -> dict[str, Any]:
    """The audits of the named models, as plain numbers; the same on every machine."""
    rows: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    for name in names:
        lora = name.endswith(" LoRA")
        model = models.from_config(CONFIGURATIONS[name.removesuffix(" LoRA")])
        if lora:
            model = models.with_lora(model, LORA_RANK)
        for wrapping in ("per-tensor", "per-block") if lora else WRAPPINGS:
            for orig in (False, True):
                try:
                    rows += _rows(name, model, wrapping, orig)
                except ValueError as error:  # FSDP1 does not flatten frozen with trainable parameters
                    refused.append({"model": name, "wrapping": wrapping, "why": str(error)})
    found: dict[str, Any] = {"rows": rows, "refused": refused}
    if any(name.endswith(" LoRA") for name in names):
        found["lora_bytes_per_state"] = _lora_bytes()
    return found


def _rows(name: str, model: nn.Module, wrapping: str, orig: bool) -> list[dict[str, Any]]:
    policy = models.wrapping(model, wrapping)
    return [
        {
            "model": name,
            **audit(model, policy, ranks, use_orig_params=orig, wrapping_name=wrapping).summary(),
        }
        for ranks in WORLD_SIZES
    ]


def _lora_bytes() -> dict[str, dict[str, int]]:
    """Bytes of one optimizer state of LoRA on Qwen3-8B, FP32 and 8-bit, by the layers that have adapters."""
    model = models.with_lora(models.from_config(CONFIGURATIONS[LORA_OF]), LORA_RANK)
    layers = {
        "q, v": ("q_proj", "v_proj"),
        "q, k, v, o": ("q_proj", "k_proj", "v_proj", "o_proj"),
        "all seven": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    }
    return {
        label: {
            "fp32": sum(4 * param.numel() for param in _adapters(model, names)),
            "8bit": sum(param.numel() + 4 * num_blocks(param.numel()) for param in _adapters(model, names)),
        }
        for label, names in layers.items()
    }


def _adapters(model: nn.Module, layers: Sequence[str]) -> list[torch.Tensor]:
    return [
        param
        for name, param in model.named_parameters()
        if param.requires_grad and any(f".{layer}." in name for layer in layers)
    ]


def markdown(found: Mapping[str, Any]) -> str:
    """The table for a page: one line a model, wrapping and `use_orig_params`, world sizes side by side."""
    head = [
        "model",
        "wrapping",
        "`use_orig_params`",
        "parameters",
        *(f"other precision, {ranks:,} ranks" for ranks in WORLD_SIZES),
        f"ranks disagree, {WORLD_SIZES[-2]} ranks",
        *(f"blocks move, {ranks:,} ranks" for ranks in WORLD_SIZES),
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    grouped: dict[tuple[str, str, bool], dict[int, Any]] = {}
    for row in found["rows"]:
        key = (row["model"], row["wrapping"], row["use_orig_params"])
        grouped.setdefault(key, {})[row["world_size"]] = row
    for (model, wrapping, orig), by_size in grouped.items():
        cells = [
            model,
            wrapping,
            str(orig),
            f"{by_size[WORLD_SIZES[0]]['params']:,}",
            *(_cell(by_size[size], "of_other_precision") for size in WORLD_SIZES),
            f"{by_size[WORLD_SIZES[-2]]['params_whose_ranks_disagree']:,}",
            *(f"{by_size[size]['params_whose_blocks_move']:,}" for size in WORLD_SIZES),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Mapping[str, Any], what: str) -> str:
    """Parameters, and the share of elements."""
    share = row[f"elements_{what}"] / row["elements"]
    return f"{row[f'params_{what}']:,} ({share:.2%})"
