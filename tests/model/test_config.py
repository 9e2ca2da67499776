"""Published configurations are read with the reference's defaults; what is not supported is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from model.config import ConfigError, load_config
from tests import goldens_data

CHECKPOINTS = Path(__file__).parents[2] / "configs" / "checkpoints"


def folder_with(tmp_path: Path, change: dict[str, Any], file: str = "config.json", base: str = "mla-sigmoid") -> Path:
    """A copy of a golden checkpoint's two configuration files with dotted fields replaced (or dropped, for ...)."""
    for name in ("config.json", "processor_config.json"):
        value = json.loads((goldens_data.checkpoint(base) / name).read_text())
        if name == file:
            for field, new in change.items():
                *path, last = field.split(".")
                section = value
                for part in path:
                    section = section[part]
                if new is ...:
                    section.pop(last, None)
                else:
                    section[last] = new
        (tmp_path / name).write_text(json.dumps(value))
    return tmp_path


def test_tiny_has_no_latent_attention() -> None:
    language = load_config(CHECKPOINTS / "deepseek-vl2-tiny").language
    assert not language.use_mla
    assert language.qk_head_dim == language.value_head_dim == language.rope_head_dim == 128
    assert language.softmax_scale == 128**-0.5
    assert language.kv_row_size == 2 * 10 * 128
    with pytest.raises(ConfigError, match="kv_lora_rank is not used"):
        _ = language.latent_rank


@pytest.mark.parametrize(
    ("name", "layers", "heads", "vocab", "eos"),
    [("deepseek-vl2-small", 27, 16, 102400, 100001), ("deepseek-vl2", 30, 32, 129280, 1)],
)
def test_omitted_fields_take_the_reference_defaults(name: str, layers: int, heads: int, vocab: int, eos: int) -> None:
    config = load_config(CHECKPOINTS / name)
    language = config.language
    assert (language.num_hidden_layers, language.num_attention_heads) == (layers, heads)
    assert (language.vocab_size, language.eos_token_id) == (vocab, eos)
    assert (language.latent_rank, language.nope_head_dim, language.rope_head_dim, language.value_head_dim) == (
        512,
        128,
        64,
        128,
    )
    assert language.softmax_scale == 192**-0.5
    assert language.kv_row_size == 576
    assert language.query_rank == 0
    assert (language.rope_theta, language.rms_norm_eps) == (10000.0, 1e-6)
    assert (config.vision.heads, config.vision.mlp_width, config.vision.patches_per_side) == (16, 4304, 27)
    assert config.features_per_side == 14
    assert len(config.candidate_resolutions) == 23


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tile_tag", "1D"),
        ("tile_tag", ...),
        ("global_view_pos", "tail"),
        ("quantization_config", {"quant_method": "awq"}),
        ("candidate_resolutions", [[384, 500]]),
        ("candidate_resolutions", []),
        ("projector_config.projector_type", "linear"),
        ("projector_config.depth", 3),
        ("projector_config.n_embed", 95),
        ("vision_config.image_size", 448),
        ("vision_config.heads", 5),
        ("language_config.rope_scaling", {"type": "yarn", "factor": 40}),
        ("language_config.topk_method", "gready"),
        ("language_config.topk_method", ...),
        ("language_config.scoring_func", "softmax"),
        ("language_config.num_experts_per_tok", 13),
        ("language_config.n_group", 5),
        ("language_config.hidden_act", "gelu"),
        ("language_config.attention_bias", True),
        ("language_config.tie_word_embeddings", True),
        ("language_config.qk_rope_head_dim", 15),
        ("language_config.kv_lora_rank", None),
        ("language_config.hidden_size", "wide"),
        ("language_config", ...),
        ("model_type", "llava"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field.split(".")[-1]):
        load_config(folder_with(tmp_path, {field: value}))


def test_grouped_query_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        load_config(folder_with(tmp_path, {"language_config.num_key_value_heads": 2}, base="mha"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("patch_size", 16),
        ("candidate_resolutions", [[384, 384]]),
        ("downsample_ratio", 3),
        ("image_mean", [0.4, 0.5, 0.5]),
        ("normalize", False),
        ("sft_format", "plain"),
    ],
)
def test_processor_config_must_agree(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        load_config(folder_with(tmp_path, {field: value}, file="processor_config.json"))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_config(tmp_path)
    for text in ("{", "[]", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=r"config\.json"):
            load_config(tmp_path)
