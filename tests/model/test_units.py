"""Single parts of the model against the reference's numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kernels.attention_backend import AttentionBackend, BackendError
from kernels.moe import moe_experts
from kernels.norm import rms_norm
from kernels.patches import unfold_pixels
from kernels.rope_cache import apply_rope_half, apply_rope_interleaved, rope_frequencies, rope_tables
from kernels.router import route
from model.attention import LatentAttention, MultiHeadAttention
from model.batch import PAGE_SIZE, Batch, Chunk, build_batch, upload
from model.checkpoint import load_model
from model.config import LanguageConfig, load_config
from model.vl2 import DeepseekVL2
from tests import goldens_data

CPU = torch.device("cpu")
UNITS, TENSORS = goldens_data.units()


@pytest.fixture(scope="module")
def models() -> dict[str, DeepseekVL2]:
    return {
        variant: load_model(goldens_data.checkpoint(variant), device=CPU, dtype=torch.float32)
        for variant in goldens_data.VARIANTS
    }


def assert_near(actual: Tensor, expected: Tensor, atol: float = 2e-5, rtol: float = 0.0) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=atol, rtol=rtol)


def rotary(config: LanguageConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    return rope_tables(positions, rope_frequencies(config.rope_head_dim, config.rope_theta, CPU))


@pytest.mark.parametrize(("unit", "apply"), [("rope_mla", apply_rope_interleaved), ("rope_mha", apply_rope_half)])
def test_rope_equals_the_reference(unit: str, apply: object) -> None:
    positions = TENSORS[f"{unit}/positions"][0]
    for name in "qk":
        x = TENSORS[f"{unit}/{name}"][0].transpose(0, 1)  # [tokens, heads, dim], strided on purpose
        cos, sin = rope_tables(positions, rope_frequencies(x.shape[-1], 10000.0, CPU))
        assert_near(apply(x, cos, sin).transpose(0, 1), TENSORS[f"{unit}/{name}_out"][0], atol=1e-5)  # type: ignore[operator]


def test_rope_refuses_shapes_it_cannot_serve() -> None:
    cos, sin = torch.zeros(4, 8), torch.zeros(4, 8)
    for shape in [(4, 2, 15), (5, 2, 16), (4, 16), (4, 2, 18)]:
        with pytest.raises(ValueError, match="rope takes"):
            apply_rope_interleaved(torch.zeros(shape), cos, sin)


def test_rms_norm_equals_the_reference() -> None:
    assert_near(rms_norm(TENSORS["rmsnorm/in"], torch.ones(32), 1e-6), TENSORS["rmsnorm/out"], atol=1e-6)


def route_by(settings: dict[str, object], hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return route(
        hidden,
        weight,
        bias,
        topk=settings["num_experts_per_tok"],  # type: ignore[arg-type]
        method=settings["topk_method"],  # type: ignore[arg-type]
        scoring=settings["scoring_func"],  # type: ignore[arg-type]
        normalize=settings.get("norm_topk_prob", False),  # type: ignore[arg-type]
        scaling_factor=settings.get("routed_scaling_factor", 1.0),  # type: ignore[arg-type]
        num_groups=settings.get("n_group", 1),  # type: ignore[arg-type]
        topk_groups=settings.get("topk_group", 1),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", list(UNITS["gates"]))
def test_gate_equals_the_reference(name: str) -> None:
    tensors = {key.split("/")[1]: value for key, value in TENSORS.items() if key.startswith(f"gate_{name}/")}
    chosen, weights = route_by(
        UNITS["gates"][name], tensors["in"].flatten(0, 1), tensors["weight"], tensors.get("e_score_correction_bias")
    )
    order = chosen.argsort(-1)
    assert torch.equal(chosen.gather(-1, order), tensors["topk_idx_sorted"])
    assert_near(weights.gather(-1, order), tensors["topk_weight_sorted"], rtol=1e-5)


@pytest.mark.parametrize("name", [n for n in UNITS["gates"] if "all_scores_equal" in UNITS["gates"][n]])
def test_gate_with_equal_scores_gives_the_reference_weights(name: str) -> None:
    settings = UNITS["gates"][name]
    experts = settings["n_routed_experts"]
    bias = torch.zeros(experts) if settings["topk_method"] == "noaux_tc" else None
    _, weights = route_by(settings, torch.zeros(1, 8), torch.zeros(experts, 8), bias)
    assert_near(weights[0], torch.tensor(settings["all_scores_equal"]["topk_weight"]), rtol=1e-5)


def test_gate_in_bfloat16_chooses_as_in_float32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(1000, 64).bfloat16(), torch.randn(64, 64)
    settings = {"num_experts_per_tok": 6, "topk_method": "greedy", "scoring_func": "softmax"}
    narrow, wide = (route_by(settings, x, weight, None)[0].sort(-1).values for x in (hidden, hidden.float()))
    assert torch.equal(narrow, wide)


@pytest.mark.parametrize("name", ["greedy_softmax", "group_limited", "noaux_1group"])
def test_moe_equals_the_reference(name: str) -> None:
    tensors = {key.split("/")[1]: value for key, value in TENSORS.items() if key.startswith(f"moe_{name}/")}
    experts, settings = UNITS["gates"][name]["n_routed_experts"], UNITS["gates"][name]
    hidden = tensors["in"].flatten(0, 1)
    chosen, weights = route_by(
        settings, hidden, tensors["w.gate.weight"], tensors.get("w.gate.e_score_correction_bias")
    )
    parts = [f"w.experts.{e}" for e in range(experts)]
    width = len(tensors["w.experts.0.gate_proj.weight"])
    gate_up = [torch.cat([tensors[f"{p}.gate_proj.weight"], tensors[f"{p}.up_proj.weight"]]) for p in parts]
    down = [tensors[f"{p}.down_proj.weight"] for p in parts]
    shared = len(tensors["w.shared_experts.gate_proj.weight"]) // width
    for s in range(shared):
        rows = slice(s * width, (s + 1) * width)
        gate_up.append(torch.cat([tensors[f"w.shared_experts.{p}_proj.weight"][rows] for p in ("gate", "up")]))
        down.append(tensors["w.shared_experts.down_proj.weight"][:, rows])
    chosen = torch.cat([chosen, torch.arange(experts, experts + shared).expand(len(chosen), -1)], dim=-1)
    weights = nn.functional.pad(weights, (0, shared), value=1.0)
    out = moe_experts(hidden, torch.stack(gate_up), torch.stack(down), chosen, weights)
    assert_near(out.view_as(tensors["out"]), tensors["out"], rtol=1e-5)


def run_attention(
    attention: LatentAttention | MultiHeadAttention, config: LanguageConfig, x: Tensor, kv_cache: Tensor, start: int
) -> Tensor:
    """Rows x [T, hidden] of one sequence at positions start.., its pages out of order, through the paged path."""
    pages = list(range(len(kv_cache)))[::-1]
    chunk = Chunk(token_ids=[0] * len(x), start=start, pages=pages)
    chunks: tuple[list[Chunk], list[Chunk]] = ([chunk], []) if len(x) == 1 and start else ([], [chunk])
    batch: Batch = build_batch(*chunks, logits_rows=[], device=CPU)
    return attention(x, rotary(config, batch.positions), batch, kv_cache)  # type: ignore[no-any-return]


def empty_cache(config: LanguageConfig, pages: int = 2) -> Tensor:
    return torch.full((pages, PAGE_SIZE, config.kv_row_size), torch.nan)  # what nobody wrote must not matter


@pytest.mark.parametrize("variant", goldens_data.VARIANTS)
def test_attention_equals_the_reference(models: dict[str, DeepseekVL2], variant: str) -> None:
    attention, config = models[variant].language.layers[0].attention, models[variant].config.language
    unit = {key.split("/")[1]: value[0] for key, value in TENSORS.items() if key.startswith(f"attn_{variant}/")}
    cache = empty_cache(config)
    start = 0
    for part in ("prefill", "decode", "chunk"):
        x = unit[f"{part}_in"]
        assert_near(run_attention(attention, config, x, cache, start), unit[f"{part}_out"])
        start += len(x)
    rows = cache[-1, :start]  # the first page of the sequence, as the pages are taken in reverse
    if config.use_mla:
        assert_near(rows[:, : config.latent_rank], unit["cache_second"][0])
        assert_near(rows[:, config.latent_rank :], unit["cache_first"][0])
    else:
        keys, values = rows.unflatten(-1, (2, config.num_attention_heads, -1)).unbind(1)
        assert_near(keys.transpose(0, 1), unit["cache_first"])
        assert_near(values.transpose(0, 1), unit["cache_second"])
    assert_near(run_attention(attention, config, unit["small_in"], empty_cache(config), 0), unit["small_out"])


@pytest.mark.parametrize("variant", goldens_data.VARIANTS)
def test_attention_at_high_positions_equals_the_reference(models: dict[str, DeepseekVL2], variant: str) -> None:
    """Five tokens at positions 1000..1004 that see only themselves: rows 0..4 of the cache, other angles."""
    attention, config = models[variant].language.layers[0].attention, models[variant].config.language
    x, expected = TENSORS[f"attn_{variant}/offset1000_in"][0], TENSORS[f"attn_{variant}/offset1000_out"][0]
    batch = build_batch([], [Chunk(token_ids=[0] * len(x), start=0, pages=[0])], logits_rows=[], device=CPU)
    out = attention(x, rotary(config, batch.positions + 1000), batch, empty_cache(config))
    assert_near(out, expected, atol=2e-4)


def test_low_rank_query_equals_the_reference() -> None:
    """No published checkpoint has one, the reference does."""
    unit = {key.split("/")[1]: value for key, value in TENSORS.items() if key.startswith("attn_q_lora/")}
    config = load_config(goldens_data.checkpoint("mla-softmax")).language.model_copy(
        update={"q_lora_rank": len(unit["w.q_a_proj.weight"])}
    )
    attention = LatentAttention(config, AttentionBackend.TORCH)
    weights = {key.removeprefix("w."): value for key, value in unit.items() if key.startswith("w.")}
    weights["q_kv_a_proj.weight"] = torch.cat(
        [weights.pop("q_a_proj.weight"), weights.pop("kv_a_proj_with_mqa.weight")]
    )
    attention.load_state_dict(weights)
    with torch.inference_mode():
        assert_near(run_attention(attention, config, unit["in"][0], empty_cache(config), 0), unit["out"][0])


def test_an_attention_backend_that_cannot_serve_is_an_error_at_start() -> None:
    with pytest.raises(BackendError, match="triton needs a GPU"):
        load_model(goldens_data.checkpoint("mha"), device=CPU, dtype=torch.float32, attention="triton")


@torch.inference_mode()
def test_vision_parts_equal_the_reference(models: dict[str, DeepseekVL2]) -> None:
    tower = models["mha"].vision
    block = tower.blocks[0]
    nothing, last_bias = torch.zeros_like(block.attn.proj.bias), block.mlp.fc2.bias
    for unit in ("siglip_block", "siglip_block_small"):
        out = block(TENSORS[f"{unit}/in"].clone(), nothing, block.attn.proj.bias)
        assert_near(out + block.attn.proj.bias + last_bias, TENSORS[f"{unit}/out"])
    pixels = torch.from_numpy(
        np.random.RandomState(5).standard_normal((1, 3, 384, 384)).astype(np.float32) * np.float32(0.5)
    )
    positions = UNITS["patch_embed_positions"]
    patches = unfold_pixels(pixels, tower.patch_size)
    embedded = tower.patch_embed(patches, tower.pos_embed) + tower.patch_embed.bias
    assert_near(embedded[:, positions], TENSORS["patch_embed/out_sampled"])
    assert_near(tower.forward_patches(patches)[:, positions], TENSORS["vision/out_sampled"], atol=3e-5)


@pytest.mark.parametrize("unit", ["projector_5x5", "projector_6x6"])
def test_projector_equals_the_reference(models: dict[str, DeepseekVL2], unit: str) -> None:
    assert_near(models["mha"].projector(TENSORS[f"{unit}/in"]), TENSORS[f"{unit}/out"])


def test_goldens_are_complete() -> None:
    assert {path.name for path in Path(goldens_data.GOLDENS).iterdir()} >= {*goldens_data.VARIANTS, "units", "images"}


def test_arrays_go_up_together_and_aligned() -> None:
    """Kernels are compiled for addresses that are multiples of 16 bytes."""
    arrays = [
        np.arange(3),
        np.array([], dtype=np.int64),
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.zeros((0, 4), np.int32),
        np.arange(5),
    ]
    tensors = upload(arrays, CPU)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.dtype == torch.from_numpy(array).dtype and tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)
    assert all((tensor.data_ptr() - tensors[0].data_ptr()) % 16 == 0 for tensor in tensors if tensor.numel())


class Recorded:
    """A prefetcher that notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[list[Tensor]] = []
        self.joined = False

    def start(self, weights: list[Tensor]) -> None:
        self.asked.append(weights)

    def join(self) -> None:
        self.joined = True


@pytest.mark.parametrize("variant", goldens_data.VARIANTS)
def test_a_layers_known_weights_are_prefetched(models: dict[str, DeepseekVL2], variant: str) -> None:
    model, prefetcher = models[variant], Recorded()
    language = model.config.language
    cache = [torch.zeros(2, PAGE_SIZE, language.kv_row_size) for _ in model.language.layers]
    batch = build_batch([Chunk([5], 0, [0])], [], logits_rows=[0], device=CPU)
    model(batch, cache, prefetcher=prefetcher)
    assert prefetcher.joined and len(prefetcher.asked) == language.num_hidden_layers
    for index, weights in enumerate(prefetcher.asked):
        moe = language.is_moe_layer(index)
        assert all(weight.is_contiguous() for weight in weights) and len(weights) == (3 if moe else 1)
        assert [len(weight) for weight in weights[1:]] == [language.num_shared_experts] * (2 * moe)
        if moe:  # what every token's last choices name
            experts = model.language.layers[index].mlp.experts  # type: ignore[union-attr]
            assert torch.equal(weights[1], experts.gate_up_weight[language.num_routed_experts :])  # type: ignore[union-attr,index]
