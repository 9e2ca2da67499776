"""The demo model's sizes, as the checkpoint's own configuration files say them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model.tokenizer import PAD

CANDIDATES: tuple[tuple[int, int], ...] = (
    (384, 384),
    (384, 768),
    (768, 384),
    (768, 768),
    (384, 1152),
    (1152, 384),
    (384, 1536),
    (1536, 384),
)
"""(width, height) of the local views: up to four tiles."""

VOCABULARY_SIZE = 1024


def config_json(*, bos_token_id: int, eos_token_id: int) -> dict[str, Any]:
    """``config.json`` of the demo checkpoint: deepseek-vl2-small's structure, 11.8 million parameters."""
    return {
        "model_type": "deepseek_vl_v2",
        "candidate_resolutions": [list(candidate) for candidate in CANDIDATES],
        "global_view_pos": "head",
        "tile_tag": "2D",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.38.2",
        "vision_config": {
            "model_name": "siglip_so400m_patch14_384",
            "model_type": "vision",
            "layers": 7,
            "width": 256,
            "heads": 4,
            "mlp_ratio": 3.75,
            "patch_size": 14,
        },
        "projector_config": {"model_type": "mlp_projector", "input_dim": 256, "n_embed": 256},
        "language_config": {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "torch_dtype": "bfloat16",
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": 256,
            "intermediate_size": 704,
            "moe_intermediate_size": 128,
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "q_lora_rank": None,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "max_position_embeddings": 4096,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
        },
    }


def processor_config_json() -> dict[str, Any]:
    """``processor_config.json`` of the demo checkpoint."""
    return {
        "processor_class": "DeepseekVLV2Processor",
        "candidate_resolutions": [list(candidate) for candidate in CANDIDATES],
        "patch_size": 14,
        "downsample_ratio": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "normalize": True,
        "image_token": "<image>",
        "pad_token": PAD,
        "sft_format": "deepseek",
        "add_special_token": False,
        "mask_prompt": False,
        "ignore_id": -100,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes readable JSON with a newline at the end."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
