"""A checkpoint's `config.json` as typed, frozen values; what we cannot serve is refused by name.

The published files leave out every field whose value is the default of the reference's own config
classes, so those defaults stand here and nowhere else. Zeros and nulls that the multi-head
checkpoint (tiny) gives for the MLA sizes mean "unused".
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

T = TypeVar("T")


class ConfigError(ValueError):
    """The checkpoint's configuration is missing, malformed, or asks for something that is not supported."""


class _Section(BaseModel):
    """A part of `config.json`. Fields that change nothing here (`auto_map`, `torch_dtype`, ...) are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class VisionConfig(_Section):
    """SigLIP tower. Sizes in pixels, channels, or counts."""

    model_name: str = "siglip_so400m_patch14_384"
    layers: int = Field(24, gt=0)
    width: int = Field(1024, gt=0)
    heads: int = Field(16, gt=0)
    patch_size: int = Field(16, gt=0)
    image_size: Literal[384] = 384
    mlp_ratio: float = Field(4.0, gt=0)
    class_token: Literal[False] = False

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def mlp_width(self) -> int:
        return int(self.width * self.mlp_ratio)

    @property
    def patches_per_side(self) -> int:
        """Patches that fit in a side; pixels left over at the right and bottom are dropped, as in the reference."""
        return self.image_size // self.patch_size


class ProjectorConfig(_Section):
    """2x2 merge, Linear, GELU, Linear from the tower's width to the language model's."""

    projector_type: Literal["downsample_mlp_gelu"] = "downsample_mlp_gelu"
    input_dim: int = Field(1152, gt=0)
    n_embed: int = Field(2048, gt=0)
    depth: Literal[2] = 2
    mlp_ratio: Literal[1] = 1
    downsample_ratio: Literal[2] = 2
    token_pooling: Literal[False] = False


class LanguageConfig(_Section):
    """DeepSeek-V2 decoder: MLA (small, base) or multi-head attention (tiny), dense and mixture-of-experts layers."""

    vocab_size: int = Field(102400, gt=0)
    hidden_size: int = Field(4096, gt=0)
    intermediate_size: int = Field(11008, gt=0)
    moe_intermediate_size: int = Field(1407, gt=0)
    num_hidden_layers: int = Field(30, gt=0)
    num_attention_heads: int = Field(32, gt=0)
    num_key_value_heads: int = Field(32, gt=0)
    n_shared_experts: int | None = Field(None, ge=0)
    n_routed_experts: int | None = Field(None, ge=0)
    num_experts_per_tok: int | None = Field(None, gt=0)
    routed_scaling_factor: float = 1.0
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] | None = None
    n_group: int | None = Field(None, gt=0)
    topk_group: int | None = Field(None, gt=0)
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = False
    first_k_dense_replace: int = Field(0, ge=0)
    moe_layer_freq: int = Field(1, gt=0)
    q_lora_rank: int | None = 1536
    kv_lora_rank: int | None = 512
    qk_nope_head_dim: int | None = 128
    qk_rope_head_dim: int | None = 64
    v_head_dim: int | None = 128
    use_mla: bool = True
    rope_theta: float = Field(10000.0, gt=0)
    rope_scaling: None = None
    rms_norm_eps: float = Field(1e-6, gt=0)
    max_position_embeddings: int = Field(2048, gt=0)
    bos_token_id: int = 100000
    eos_token_id: int = 100001
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    tie_word_embeddings: Literal[False] = False

    @model_validator(mode="after")
    def _is_supported(self) -> Self:
        if self.use_mla:
            for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
                if not getattr(self, name):
                    raise ValueError(f"{name} must be positive when use_mla is true, got {getattr(self, name)!r}")
            if self.qk_rope_head_dim % 2:  # type: ignore[operator]
                raise ValueError(f"qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")
        else:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of "
                    f"num_attention_heads {self.num_attention_heads}"
                )
            if self.num_key_value_heads != self.num_attention_heads:
                raise ValueError(
                    f"num_key_value_heads {self.num_key_value_heads} differs from num_attention_heads "
                    f"{self.num_attention_heads}: grouped-query attention is not supported"
                )
        if self.n_routed_experts:
            if self.topk_method is None:
                raise ValueError("topk_method is missing (its default in the reference is not a method it accepts)")
            if not self.num_experts_per_tok or self.num_experts_per_tok > self.n_routed_experts:
                raise ValueError(
                    f"num_experts_per_tok must be 1 to {self.n_routed_experts}, got {self.num_experts_per_tok!r}"
                )
            if self.topk_method == "noaux_tc" and self.scoring_func != "sigmoid":
                raise ValueError("topk_method noaux_tc needs scoring_func sigmoid")
            grouped = self.n_group and self.topk_group and self.n_routed_experts % self.n_group == 0
            if self.topk_method != "greedy" and not grouped:
                raise ValueError(
                    f"topk_method {self.topk_method} needs n_group (dividing n_routed_experts) and topk_group"
                )
        return self

    @property
    def query_rank(self) -> int:
        """Rank of the low-rank query, 0 where the query is projected directly (all published checkpoints)."""
        return self.q_lora_rank or 0

    @property
    def latent_rank(self) -> int:
        """Width of the cached latent: kv_lora_rank (MLA only)."""
        return self._used("kv_lora_rank")

    @property
    def nope_head_dim(self) -> int:
        """Width of the part of a head's query and key that carries no position (MLA only)."""
        return self._used("qk_nope_head_dim")

    @property
    def rope_head_dim(self) -> int:
        """Width of the part of a head's query and key that is rotated: all of it in multi-head attention."""
        return self._used("qk_rope_head_dim") if self.use_mla else self.qk_head_dim

    @property
    def value_head_dim(self) -> int:
        return self._used("v_head_dim") if self.use_mla else self.qk_head_dim

    @property
    def qk_head_dim(self) -> int:
        if self.use_mla:
            return self._used("qk_nope_head_dim") + self._used("qk_rope_head_dim")
        return self.hidden_size // self.num_attention_heads

    @property
    def softmax_scale(self) -> float:
        """`qk_head_dim ** -0.5`: no YaRN, hence no mscale (DeepSeek-V2 section 2.1 without its long-context part)."""
        return float(self.qk_head_dim**-0.5)

    @property
    def kv_row_size(self) -> int:
        """Values cached per token and layer: latent and rotated key (MLA), or keys and values of all heads."""
        if self.use_mla:
            return self.latent_rank + self.rope_head_dim
        return 2 * self.num_attention_heads * self.qk_head_dim

    @property
    def num_shared_experts(self) -> int:
        return self.n_shared_experts or 0

    @property
    def num_routed_experts(self) -> int:
        return self.n_routed_experts or 0

    def is_moe_layer(self, index: int) -> bool:
        """Whether decoder layer `index` (from 0) holds a mixture of experts rather than one dense MLP."""
        return self.num_routed_experts > 0 and index >= self.first_k_dense_replace and index % self.moe_layer_freq == 0

    def _used(self, name: str) -> int:
        value = getattr(self, name)
        if not value or not self.use_mla:
            raise ConfigError(f"{name} is not used by this checkpoint")
        return int(value)


class ModelConfig(_Section):
    """A whole DeepSeek-VL2 checkpoint: `config.json`, and the image token's name of `processor_config.json`."""

    vision: VisionConfig = Field(VisionConfig(), alias="vision_config")  # type: ignore[call-arg]
    projector: ProjectorConfig = Field(ProjectorConfig(), alias="projector_config")  # type: ignore[call-arg]
    language: LanguageConfig = Field(alias="language_config")
    candidate_resolutions: tuple[tuple[int, int], ...] = ((384, 384),)
    """(width, height) pairs; their order decides full ties, so it is kept."""
    tile_tag: Literal["2D"]
    global_view_pos: Literal["head"] = "head"
    quantization_config: None = None
    image_token: str = "<image>"

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.projector.input_dim != self.vision.width:
            raise ValueError(
                f"projector_config.input_dim {self.projector.input_dim} differs from "
                f"vision_config.width {self.vision.width}"
            )
        if self.projector.n_embed != self.language.hidden_size:
            raise ValueError(
                f"projector_config.n_embed {self.projector.n_embed} differs from "
                f"language_config.hidden_size {self.language.hidden_size}"
            )
        if not self.candidate_resolutions:
            raise ValueError("candidate_resolutions is empty")
        for width, height in self.candidate_resolutions:
            if width <= 0 or height <= 0 or width % self.vision.image_size or height % self.vision.image_size:
                raise ValueError(
                    f"candidate_resolutions: {width}x{height} is not made of {self.vision.image_size}-pixel tiles"
                )
        return self

    @property
    def features_per_side(self) -> int:
        """Side of the square of image tokens that one tile becomes: patches, padded to whole 2x2 groups, merged."""
        return -(-self.vision.patches_per_side // self.projector.downsample_ratio)


def load_config(folder: Path) -> ModelConfig:
    """Read `config.json` and `processor_config.json` of a checkpoint folder.

    Raises ConfigError that names the file and the field: a file that is absent or no JSON object, a
    value that is not supported, sizes that do not fit together, or two files that disagree.
    """
    config = _read_object(folder / "config.json")
    if config.get("model_type") != "deepseek_vl_v2":
        raise ConfigError(
            f"{folder / 'config.json'}: model_type is {config.get('model_type')!r}, not 'deepseek_vl_v2': "
            "this is not a DeepSeek-VL2 checkpoint"
        )
    parsed = _parse(folder / "config.json", ModelConfig.model_validate, config)
    processor = _parse(
        folder / "processor_config.json",
        _ProcessorConfig.model_validate,
        _read_object(folder / "processor_config.json"),
    )
    _check_agreement(folder, parsed, processor)
    return parsed.model_copy(update={"image_token": processor.image_token})


class _ProcessorConfig(_Section):
    """What `processor_config.json` may say; all but the token's name repeats `config.json` or is fixed."""

    candidate_resolutions: tuple[tuple[int, int], ...]
    patch_size: int
    downsample_ratio: int = 2
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    normalize: Literal[True] = True
    sft_format: Literal["deepseek"] = "deepseek"
    image_token: str = "<image>"

    @field_validator("image_mean", "image_std")
    @classmethod
    def _is_half(cls, value: tuple[float, float, float]) -> tuple[float, float, float]:
        if value != (0.5, 0.5, 0.5):
            raise ValueError("only (0.5, 0.5, 0.5) is supported")
        return value


def _check_agreement(folder: Path, config: ModelConfig, processor: _ProcessorConfig) -> None:
    pairs: list[tuple[str, object, object]] = [
        ("candidate_resolutions", processor.candidate_resolutions, config.candidate_resolutions),
        ("patch_size", processor.patch_size, config.vision.patch_size),
        ("downsample_ratio", processor.downsample_ratio, config.projector.downsample_ratio),
    ]
    for name, mine, theirs in pairs:
        if mine != theirs:
            raise ConfigError(f"{folder}: {name} is {mine} in processor_config.json and {theirs} in config.json")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


def _parse(path: Path, validate: Callable[[Any], T], value: dict[str, Any]) -> T:
    try:
        return validate(value)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']} (got {item['input']!r:.80})"
            for item in error.errors(include_url=False)
        )
        raise ConfigError(f"{path}: {problems}") from error
