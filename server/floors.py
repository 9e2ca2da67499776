"""The least that a model's work can cost, from its configuration alone: bytes to move and operations to do.

Counted are weights, each once, cache rows, and products; not activations, norms, or what stands between two steps. Of
experts those are counted that so many tokens touch on average, if each chooses its k of E evenly: E (1 - (1 - k/E)^n).
"""

from __future__ import annotations

from dataclasses import dataclass

from model.config import LanguageConfig, ModelConfig


@dataclass(frozen=True)
class Cost:
    moved: float
    """Bytes."""
    operations: float
    """Two for each multiplication and addition."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.moved + other.moved, self.operations + other.operations)


def decode_step(config: ModelConfig, itemsize: int, *, batch: int, context: float) -> Cost:
    """A step of `batch` sequences with so many tokens in the cache."""
    language = config.language
    output = language.vocab_size * language.hidden_size
    weights = _layers(language, itemsize, batch) + output * itemsize
    rows = batch * context * language.kv_row_size * itemsize * language.num_hidden_layers
    attention = 4.0 * language.num_attention_heads * language.num_hidden_layers * batch * context
    # MLA's queries meet latents: rank + rope in the scores, rank in the sum.
    width = language.latent_rank + language.rope_head_dim / 2 if language.use_mla else language.qk_head_dim
    products = 2.0 * batch * (_active(language) + output)
    return Cost(weights + rows, products + attention * width)


def prefill(config: ModelConfig, itemsize: int, *, prompts: int, length: int) -> Cost:
    """`prompts` prompts of `length` tokens, of each the last token's logits."""
    language = config.language
    tokens, output = prompts * length, language.vocab_size * language.hidden_size
    pairs = prompts * length * (length + 1) / 2
    widths = language.qk_head_dim + language.value_head_dim
    attention = 2.0 * language.num_attention_heads * language.num_hidden_layers * widths * pairs
    products = 2.0 * (tokens * _active(language) + prompts * output)
    rows = tokens * language.kv_row_size * itemsize * language.num_hidden_layers
    return Cost(_layers(language, itemsize, tokens) + output * itemsize + rows, products + attention)


def vision(config: ModelConfig, itemsize: int, *, tiles: int) -> Cost:
    """Tower and projector over so many tiles."""
    tower, projector = config.vision, config.projector
    patches, tokens = tower.patches_per_side**2, config.features_per_side**2
    block = 4 * tower.width**2 + 2 * tower.width * tower.mlp_width
    embedding = 3 * tower.patch_size**2 * tower.width
    merged = projector.input_dim * projector.downsample_ratio**2
    projection = merged * projector.n_embed + projector.n_embed**2
    attention = 4.0 * tower.layers * patches**2 * tower.width
    products = 2.0 * (patches * (tower.layers * block + embedding) + tokens * projection)
    weights = tower.layers * block + embedding + projection
    return Cost(weights * itemsize, tiles * (products + attention))


def _layers(language: LanguageConfig, itemsize: int, tokens: int) -> float:
    """Bytes of all decoder layers' weights that `tokens` tokens touch; the router's are float32."""
    total = 0.0
    for index in range(language.num_hidden_layers):
        total += _attention(language) * itemsize
        if not language.is_moe_layer(index):
            total += 3 * language.hidden_size * language.intermediate_size * itemsize
            continue
        experts = language.num_routed_experts
        touched = experts * (1 - (1 - (language.num_experts_per_tok or 0) / experts) ** tokens)
        total += (touched + language.num_shared_experts) * _expert(language) * itemsize
        total += 4 * experts * language.hidden_size
    return total


def _active(language: LanguageConfig) -> int:
    """Weights of all decoder layers that one token is multiplied with."""
    total = 0
    for index in range(language.num_hidden_layers):
        total += _attention(language)
        if language.is_moe_layer(index):
            chosen = (language.num_experts_per_tok or 0) + language.num_shared_experts
            total += chosen * _expert(language) + language.num_routed_experts * language.hidden_size
        else:
            total += 3 * language.hidden_size * language.intermediate_size
    return total


def _expert(language: LanguageConfig) -> int:
    return 3 * language.hidden_size * language.moe_intermediate_size


def _attention(language: LanguageConfig) -> int:
    """Weights of one layer's projections."""
    hidden, heads = language.hidden_size, language.num_attention_heads
    output = heads * language.value_head_dim * hidden
    if not language.use_mla:
        return 3 * hidden * heads * language.qk_head_dim + output
    query = heads * language.qk_head_dim
    asked = hidden * language.query_rank + language.query_rank * query if language.query_rank else hidden * query
    latent = hidden * (language.latent_rank + language.rope_head_dim)
    expansion = language.latent_rank * heads * (language.nope_head_dim + language.value_head_dim)
    return asked + latent + expansion + output
