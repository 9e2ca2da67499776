"""The model's forward pass in the form training wants: dense, differentiable, one shape a kind of batch.

It computes with the parameters of the serving modules (`model.vl2.DeepseekVL2`) what they compute: the tower over all
tiles, the projector, one pass of the decoder over prefixes and segments, with every expert evaluated and gated. There
is no cache and no page; attention is causal over the prefix, and each segment sees its prefix and itself. The residual
sums are float32, products are in the parameters' own type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.rope_cache import rope_tables
from model.attention import LatentAttention
from model.language import DecoderLayer
from model.moe import MLP
from model.vision import LAYER_NORM_EPS, VisionBlock
from model.vl2 import DeepseekVL2


@dataclass(frozen=True)
class Functions:
    """The functions that take the time; `compiled` gives them to torch.compile, once each."""

    vision_before: Callable[..., Tensor]
    vision_after: Callable[..., Tensor]
    attention_inputs: Callable[..., tuple[Tensor, Tensor, Tensor]]
    dense_layer_end: Callable[..., Tensor]
    moe_layer_end: Callable[..., tuple[Tensor, Tensor]]


def eager() -> Functions:
    return Functions(vision_before, vision_after, attention_inputs, dense_layer_end, moe_layer_end)


def compiled() -> Functions:
    """Compiled functions; the number of tokens of the decoder's is symbolic, so that all kinds share one program."""
    return Functions(
        torch.compile(vision_before, dynamic=False),
        torch.compile(vision_after, dynamic=False),
        _any_length(attention_inputs),
        _any_length(dense_layer_end),
        _any_length(moe_layer_end),
    )


Result = TypeVar("Result")


def _any_length(function: Callable[..., Result]) -> Callable[..., Result]:
    program = torch.compile(function, dynamic=False)

    def call(*arguments: object) -> Result:
        for argument in arguments[:3]:
            if isinstance(argument, Tensor) and not isinstance(argument, nn.Parameter):
                torch._dynamo.mark_dynamic(argument, 0)
        return program(*arguments)

    return call


# -- tower and projector ----------------------------------------------------------------------------------------------


def normalise(tiles: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 tiles [n, 384, 384, 3] to the tower's values in float32, rounded to ``dtype`` as serving rounds them."""
    return ((tiles.float() / 255 - 0.5) / 0.5).to(dtype)


def tower(model: DeepseekVL2, pixels: Tensor, functions: Functions) -> Tensor:
    """Values [n, 384, 384, 3] to patch features [n, patches, width]."""
    vision = model.vision
    config = model.config.vision
    side, patch = config.patches_per_side, config.patch_size
    weight = vision.patch_embed.weight
    used = pixels.to(weight.dtype)[:, : side * patch, : side * patch]
    used = used.unflatten(2, (side, patch)).unflatten(1, (side, patch))
    rows = used.permute(0, 1, 3, 5, 2, 4).reshape(
        len(pixels), side * side, -1
    )  # channel, y, x: the convolution's order
    stream = F.linear(rows, weight.flatten(1), vision.patch_embed.bias).float() + vision.pos_embed
    for module in vision.blocks:
        block = cast(VisionBlock, module)
        qkv = functions.vision_before(
            stream, block.norm1.weight, block.norm1.bias, block.attn.qkv.weight, block.attn.qkv.bias
        )
        query, key, value = qkv.unflatten(-1, (3, config.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        mlp = block.mlp
        stream = functions.vision_after(
            stream,
            attended,
            *(block.attn.proj.weight, block.attn.proj.bias, block.norm2.weight, block.norm2.bias),
            *(mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias),
        )
    return _layer_norm(stream, vision.norm.weight, vision.norm.bias).to(weight.dtype)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight.to(x.dtype), bias.to(x.dtype), LAYER_NORM_EPS)


def vision_before(stream: Tensor, norm: Tensor, norm_bias: Tensor, qkv: Tensor, qkv_bias: Tensor) -> Tensor:
    """Norm and the joint projection of a tower block."""
    return F.linear(_layer_norm(stream, norm, norm_bias).to(qkv.dtype), qkv, qkv_bias)


def vision_after(
    stream: Tensor,
    attended: Tensor,
    proj: Tensor,
    proj_bias: Tensor,
    norm: Tensor,
    norm_bias: Tensor,
    fc1: Tensor,
    fc1_bias: Tensor,
    fc2: Tensor,
    fc2_bias: Tensor,
) -> Tensor:
    """Output projection and MLP of a tower block, both added to the residual."""
    stream = stream + F.linear(attended, proj, proj_bias)
    inner = F.linear(_layer_norm(stream, norm, norm_bias).to(fc1.dtype), fc1, fc1_bias)
    return stream + F.linear(F.gelu(inner, approximate="tanh"), fc2, fc2_bias)


def project(model: DeepseekVL2, patches: Tensor) -> Tensor:
    """Patch features [n, side^2, width] to image tokens [n, 196, hidden]: 2x2 merge, channel-major, and the MLP."""
    side = model.config.vision.patches_per_side
    ratio = model.config.projector.downsample_ratio
    padding = -side % ratio
    grid = F.pad(patches.unflatten(1, (side, side)), (0, 0, 0, padding, 0, padding))
    merged = grid.unflatten(2, (-1, ratio)).unflatten(1, (-1, ratio)).permute(0, 1, 3, 5, 2, 4)
    tokens: Tensor = model.projector.layers(merged.flatten(3).flatten(1, 2))
    return tokens


# -- decoder ----------------------------------------------------------------------------------------------------------


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return scaled.to(weight.dtype) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, dim], pairs (2i, 2i + 1), result in split order."""
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attention_inputs(
    stream: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: Tensor,
    q_kv_a: Tensor,
    latent_norm: Tensor,
    kv_b: Tensor,
    eps: float,
    heads: int,
    nope: int,
    rope: int,
    value_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [T, heads, nope + rope] of rows [T, hidden]; values are padded with zeros to that width."""
    rank = latent_norm.shape[0]
    joint = F.linear(_rms_norm(stream, norm, eps), q_kv_a)
    query, latent, key_rope = joint.split((heads * (nope + rope), rank, rope), dim=-1)
    query = query.unflatten(-1, (heads, nope + rope))
    cos, sin = cos[:, None], sin[:, None]
    query = torch.cat((query[..., :nope], _rotate(query[..., nope:], cos, sin)), dim=-1)
    expanded = F.linear(_rms_norm(latent, latent_norm, 1e-6), kv_b).unflatten(-1, (heads, nope + value_dim))
    key_rope = _rotate(key_rope[:, None], cos, sin).expand(-1, heads, -1)
    key = torch.cat((expanded[..., :nope], key_rope), dim=-1)
    return query, key, F.pad(expanded[..., nope:], (0, nope + rope - value_dim))


def dense_layer_end(
    stream: Tensor, attended: Tensor, output: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """Output projection and dense MLP of a decoder layer, both added to the residual."""
    stream = stream + F.linear(attended, output)
    gate, up = F.linear(_rms_norm(stream, norm, eps), gate_up).chunk(2, dim=-1)
    return stream + F.linear(F.silu(gate) * up, down)


def moe_layer_end(
    stream: Tensor,
    attended: Tensor,
    output: Tensor,
    norm: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    eps: float,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """Output projection and mixture of experts, both added to the residual; and the load-balance loss.

    router float32 [E, hidden]; gate_up [E + S, 2I, hidden], down [E + S, hidden, I]: the last S experts are always on.
    All experts are evaluated: two large products are faster than sorting tokens for so few and narrow experts.
    """
    stream = stream + F.linear(attended, output)
    normed = _rms_norm(stream, norm, eps)
    scores = F.linear(normed.float(), router).softmax(-1)
    kept = scores >= scores.topk(topk, dim=-1).values[..., -1:]
    experts, routed = len(gate_up), len(router)
    gates = F.pad(scores * kept, (0, experts - routed), value=1.0)
    gate, up = F.linear(normed, gate_up.flatten(0, 1)).unflatten(-1, (experts, -1)).chunk(2, dim=-1)
    inner = (F.silu(gate) * up * gates[..., None].to(gate.dtype)).flatten(-2)
    stream = stream + F.linear(inner, down.transpose(0, 1).flatten(1))
    balance = (kept.float().mean(0) * scores.mean(0)).sum() * routed / topk
    return stream, balance


@dataclass(frozen=True)
class Output:
    """Of the segment tokens: the final hidden states, normed; and the layers' mean load-balance loss."""

    hidden: Tensor
    balance: Tensor


def segment_mask(batch: Mapping[str, Tensor], prefix: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, S, P + S] of the segment tokens: the visible prefix, and what came before in the segment."""
    segment, visible = batch["segment"].long(), batch["visible"].long()
    length = segment.shape[1]
    places = torch.arange(prefix, device=segment.device)
    sees_prefix = places < visible[..., None]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment.device).tril()
    same = (segment[:, :, None] == segment[:, None, :]) & causal
    allowed = torch.cat((sees_prefix, same), dim=-1)
    return torch.zeros(allowed.shape, dtype=dtype, device=segment.device).masked_fill(~allowed, float("-inf"))[:, None]


def decode(
    model: DeepseekVL2, batch: Mapping[str, Tensor], image_tokens: Tensor, functions: Functions, *, pad_id: int
) -> Output:
    """Runs the decoder over a batch (see `model.demo.dataset.fields`) with its tiles' tokens [B * tiles, 196, hidden].

    The embedding of ``pad_id`` gets no gradient: it stands at every position of a picture, where it is not used.
    """
    language, config = model.language, model.config.language
    rows, prefix = batch["prefix_ids"].shape
    dtype = language.embed_tokens.weight.dtype
    features = image_tokens.reshape(rows, -1, config.hidden_size)
    ends = torch.stack((model.image_newline, model.view_separator)).expand(rows, -1, -1)
    table = torch.cat((features, ends), dim=1)
    gather = batch["gather"].long()
    start = torch.arange(rows, device=gather.device)[:, None] * table.shape[1]
    pictured = table.flatten(0, 1).index_select(0, (gather.clamp(min=0) + start).flatten()).unflatten(0, (rows, prefix))
    ids = torch.cat((batch["prefix_ids"], batch["ids"]), dim=1).long()
    embedded = F.embedding(ids, language.embed_tokens.weight, padding_idx=pad_id)
    head = torch.where((gather >= 0)[..., None], pictured, embedded[:, :prefix])
    stream = torch.cat((head, embedded[:, prefix:]), dim=1).float().flatten(0, 1)

    counted = torch.arange(prefix, device=ids.device).expand(rows, -1)
    positions = torch.cat((counted, batch["positions"].long()), dim=1).flatten()
    cos, sin = rope_tables(positions, language.rotary.frequencies)
    mask = segment_mask(batch, prefix, dtype)
    balances = []
    last = len(language.layers) - 1
    for index, module in enumerate(language.layers):
        layer = cast(DecoderLayer, module)
        attention = cast(LatentAttention, layer.attention)
        inputs = functions.attention_inputs(
            *(stream, cos, sin, layer.input_layernorm.weight, attention.q_kv_a_proj.weight),
            *(attention.kv_a_layernorm.weight, attention.kv_b_proj.weight, config.rms_norm_eps),
            *(attention.heads, attention.nope, attention.rope, attention.value),
        )
        attended = _attend(inputs, mask, rows, prefix, attention.scale, attention.value, tail_only=index == last)
        if index == last:  # nothing reads what the prefix would become
            stream = stream.unflatten(0, (rows, -1))[:, prefix:].flatten(0, 1)
        common = (stream, attended, attention.o_proj.weight, layer.post_attention_layernorm.weight)
        if isinstance(layer.mlp, MLP):
            weights = (layer.mlp.gate_up_proj.weight, layer.mlp.down_proj.weight)
            stream = functions.dense_layer_end(*common, *weights, config.rms_norm_eps)
        else:
            mixture = layer.mlp
            experts = (mixture.router.weight, mixture.experts.gate_up_weight, mixture.experts.down_weight)
            stream, balance = functions.moe_layer_end(
                *common, *experts, config.rms_norm_eps, config.num_experts_per_tok
            )
            balances.append(balance)
    hidden = _rms_norm(stream.unflatten(0, (rows, -1)), language.norm.weight, config.rms_norm_eps)
    return Output(hidden, torch.stack(balances).mean() if balances else stream.new_zeros(()))


def _attend(
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor,
    rows: int,
    prefix: int,
    scale: float,
    value_dim: int,
    *,
    tail_only: bool,
) -> Tensor:
    """Attention, [B * (P + S), heads * value]: prefixes causally, segments by the mask; or of segments alone."""
    query, key, value = (part.unflatten(0, (rows, -1)).transpose(1, 2) for part in inputs)
    joined = F.scaled_dot_product_attention(query[:, :, prefix:], key, value, attn_mask=mask, scale=scale)
    if not tail_only:
        before = F.scaled_dot_product_attention(
            query[:, :, :prefix], key[:, :, :prefix], value[:, :, :prefix], is_causal=True, scale=scale
        )
        joined = torch.cat((before, joined), dim=2)
    return joined[..., :value_dim].transpose(1, 2).flatten(2).flatten(0, 1)


def logits(model: DeepseekVL2, hidden: Tensor) -> Tensor:
    """float32 logits of normed hidden states."""
    return F.linear(hidden, model.language.lm_head.weight).float()
