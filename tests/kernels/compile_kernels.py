"""Compile every Triton kernel for Hopper at deepseek-vl2-small's shapes; needs Triton, but no GPU.

Run as a program of its own (`python -m tests.kernels.compile_kernels`): where kernels are interpreted for other tests,
they cannot be compiled. Prints a line for each kernel: its name and those of the functions that it calls. Raises
ValueError for a kernel that takes more shared memory than there is, or that does not wait for the one before it.
"""

import itertools
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import (
    activation,
    batch_invariant,
    head_linear,
    latent_write,
    layer_norm,
    linear_strips,
    mha_decode,
    mla_decode,
    moe,
    moe_products,
    moe_strips,
    norm,
    patches,
    prefetch,
    prefill_triton,
    rope_cache,
    router,
    sample_triton,
    split_kv,
)
from kernels.tiles import FOLDER, Tiles, TileStep, default_decode_plan, default_plan, load_table
from tests.kernels import dependent_launch

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 << 10
"""Bytes that a program may have of it on Hopper."""
POINTERS = {
    "block_table": "*i64",
    "context_lens": "*i64",
    "slots": "*i64",
    "chosen": "*i64",
    "expert_ids": "*i64",
    "order": "*i32",
    "starts": "*i32",
    "cu_query_lens": "*i32",
    "cu_key_lens": "*i32",
    "accumulators": "*fp32",
    "maxima": "*fp32",
    "sums": "*fp32",
    "logits": "*fp32",
    "bias": "*fp32",
    "weights": "*fp32",
    "cos": "*fp32",
    "sin": "*fp32",
    "offset": "*fp32",
    "tiles": "*u8",
    "positions": "*i64",
    "frequencies": "*fp32",
}
BF16 = "*bf16"
SAMPLING = {
    "logits": "*fp32",
    "records": "*i32",
    "bias": "*i32",
    "in_prompt": "*u8",
    "counts": "*i32",
    "words": "*i32",
    "adjusted": "*fp32",
    "best": "*i64",
    "stats": "*fp32",
    "mass": "*fp32",
    "top": "*i64",
    "values": "*fp32",
    "ids": "*i32",
    "tokens": "*i64",
    "finite": "*i32",
    "chosen": "*fp32",
    "top_ids": "*i32",
    "top_values": "*fp32",
}
NUMBERS = {"scale": "fp32", "eps": "fp32", "scaling_factor": "fp32"}


def compile_kernel(kernel: Any, constants: dict[str, Any], pointers: list[str], **options: int) -> None:
    """Compile one kernel: `pointers` are its 16-bit arrays, other names go by the tables above, the rest are int32."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = BF16
        else:
            signature[name] = POINTERS.get(name) or NUMBERS.get(name) or "i32"
    sides = ("width", "stride", "_token", "_head", "inner", "outer")
    given = {name: kind for name, kind in signature.items() if kind != "constexpr"}
    aligned = [name for name, kind in given.items() if kind.startswith("*") or name.endswith(sides)]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=HOPPER, options=options)
    if compiled.metadata.shared > SHARED_MEMORY:
        raise ValueError(f"{kernel.__name__} {constants} {options} takes {compiled.metadata.shared} B of shared memory")
    if "PDL" in constants:
        check_waiting(kernel.__name__, compiled.asm["ptx"], list(given))
    print(*sorted(functions_of(kernel)), flush=True)


def check_waiting(name: str, ptx: str, arguments: list[str]) -> None:
    """Raises ValueError for a kernel that breaks the rule of programmatic dependent launch (kernels/lang.py)."""
    early = dependent_launch.PARAMETERS
    if name == "_down_strips":
        early = early | {"expert_ids"}  # which the kernel before it has waited for, see there
    try:
        dependent_launch.check(ptx, arguments, early)
        if name == "_gate_up_strips" and not dependent_launch.waits_first(ptx):
            raise ValueError("lets the next kernel start before it has waited")
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def functions_of(kernel: Any) -> set[str]:
    """Names of a kernel and of the functions it calls."""
    called = [kernel.fn.__globals__.get(name) for name in kernel.fn.__code__.co_names]
    inner = [functions_of(function) for function in called if isinstance(function, triton.JITFunction)]
    return {f"{kernel.__module__}.{kernel.__name__}"}.union(*inner)


def main() -> None:
    wide = {"num_warps": 4, "num_stages": 3}
    compile_attention()
    compile_experts()
    pdl = {"PDL": True}
    compile_kernel(activation._silu_mul, {"BLOCK": 1024} | pdl, ["x", "y"], num_warps=4)
    for absent in (["residual", "chosen", "total"], ["chosen"], ["total"]):
        constants = {"BLOCK": 2048, **dict.fromkeys(absent)} | pdl
        compile_kernel(norm._norm, constants, ["x", "residual", "weight", "out", "total"], num_warps=8)
    compile_kernel(prefetch._prefetch, {"PIECE": 4096, "PIECES": 32}, ["weight"], num_warps=1)
    compile_kernel(rope_cache._rope_tables, {"BLOCK": 32} | pdl, [], num_warps=1)
    compile_kernel(layer_norm._layer_norm, {"BLOCK": 2048} | pdl, ["x", "weight", "bias", "y"], num_warps=4)
    shape = {"HEIGHT": 384, "WIDTH": 384, "SIZE": 14, "COLUMNS": 592, "BLOCK": 2048}
    compile_kernel(patches._tile_patches, shape | pdl, ["out"], num_warps=8)
    shape = {"SIDE": 27, "MERGED": 14, "RATIO": 2, "BLOCK": 1024}
    compile_kernel(patches._merge_patches, shape | pdl, ["features", "out"], num_warps=4)
    POINTERS["weight"] = "*fp32"  # of the router, which is float32
    compile_kernel(router._logits, {"EXPERTS": 2, "WIDTH": 2048} | pdl, ["hidden"], num_warps=4)
    for experts in (64, 128):  # of small, and of base
        shape = {"ROWS": 32, "EXPERTS": experts, "DEPTH": 64, "PRECISION": "tf32x3"}
        compile_kernel(router._logits_of_blocks, shape | pdl, ["hidden"], num_warps=8, num_stages=3)
    for softmax in (True, False):
        rules = {"SOFTMAX": softmax, "BIASED": not softmax, "NORMALIZE": not softmax, **pdl}
        compile_kernel(router._choose, {"TOPK": 6, "SHARED": 2, "EXPERTS": 64, "CHOICES": 16, **rules}, [], num_warps=1)
    for rows, columns, depth in ((16, 64, 128), (32, 16, 512), (64, 128, 128)):
        shape = {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth, "WHOLE": rows < 64}
        for side in ("w_inner", "w_outer"):  # along which the weights lie side by side, as Triton is told
            constants = {"x_inner": 1, side: 1} | shape | pdl
            compile_kernel(head_linear._head_linear, constants, ["x", "weight", "y"], **wide)
    for columns, depth in ((4, 2048), (1, 16384)):
        shape = {"COLUMNS": columns, "DEPTH": depth}
        compile_kernel(linear_strips._linear_strips, shape | pdl, ["x", "weight", "y"], num_warps=8)
    for bias in (True, False):
        compile_kernel(
            batch_invariant._linear, {"BIAS": bias, "TILE": 64}, ["x", "weight", "bias", "y"], num_warps=4, num_stages=4
        )
    arrays = ["query", "latent", "norm_weight", "kv_cache"]
    compile_kernel(latent_write._write_latents, {"HEADS": 16, "RANK": 512, "HALF": 32} | pdl, arrays, num_warps=4)
    POINTERS.update(SAMPLING)
    for plain, cuts in ((True, False), (False, False), (False, True)):
        unfused: dict[str, Any] = {"enable_fp_fusion": False}
        compile_kernel(sample_triton._scan, {"PLAIN": plain, "CHUNK": sample_triton.CHUNK}, [], num_warps=4, **unfused)
        sizes = {"CHUNKS": 64, "BLOCK": sample_triton.BLOCK}
        warps = sample_triton.CUT_WARPS if cuts else 4
        compile_kernel(sample_triton._choose, {"PLAIN": plain, "CUTS": cuts, **sizes}, [], num_warps=warps, **unfused)


def compile_attention() -> None:
    cached = ["query_latent", "query_rope", "query", "kv_cache", "out"]
    lengths = {"LENS": split_kv.LENGTHS, "PDL": True}
    plans = [default_decode_plan(heads, torch.bfloat16) for heads in (16, 32)]
    for path in FOLDER.glob("*.json"):
        plans += load_table(path).mla_decode.values()
    forms = {step.form for plan in plans for step in plan.steps}
    for form in forms:
        sizes = {"RANK": 512, "ROPE": 64, "PAGE": 64, "TOKENS": form.tokens, "HEADS": form.heads, "STAGES": form.stages}
        for whole in (False, True):
            compile_kernel(mla_decode._attend, sizes | lengths | {"WHOLE": whole}, cached, num_warps=form.warps)
    sizes = {"DIM": 128, "PAGE": 64, "TOKENS": mha_decode.TOKENS, "STAGES": mha_decode.STAGES}
    for whole in (False, True):
        compile_kernel(mha_decode._attend_head, sizes | lengths | {"WHOLE": whole}, cached, num_warps=4)
    for part, tokens in itertools.product((128, 512), {form.tokens for form in forms}):
        sizes = {"TOKENS": tokens, "PIECES": split_kv.PIECES, "PART": part}
        compile_kernel(split_kv._combine, sizes | lengths, ["out"], num_warps=4)
    half = prefill_triton.HALF
    for rope in (64, 0):
        sizes = {"KEY": 128, "ROPE": rope, "VALUE": 128, "ROWS": half.rows, "COLUMNS": half.columns}
        constants = sizes | {"STAGES": half.stages, "SEQUENCES": prefill_triton.SEQUENCES, "PDL": True}
        arrays = ["query", "key", "value", "key_rope", "out"]
        compile_kernel(prefill_triton._prefill, constants, arrays, num_warps=half.warps, num_stages=half.stages)


def compile_experts() -> None:
    """With every tile shape of the default plan and of the tables, at small's width."""
    plans = [default_plan(torch.bfloat16)]
    for path in FOLDER.glob("*.json"):
        plans += load_table(path).experts.values()
    pdl, shape = {"PDL": True}, {"TOPK": 8, "DEPTH": 2048}
    products: set[tuple[bool, Tiles]] = set()
    for step in (step for plan in plans for step in plan.steps):
        if isinstance(step, TileStep):
            products |= {(True, step.gate_up), (False, step.down)}
            continue
        constants = {"SLOTS": 32, "COLUMNS": step.gate_up.columns, **shape, **pdl}
        arrays = ["hidden", "weight", "activated"]
        compile_kernel(moe_strips._gate_up_strips, constants, arrays, num_warps=step.gate_up.warps)
        constants = {"CHOICES": 8, "COLUMNS": step.down.columns, **shape, **pdl}
        arrays = ["activated", "weight", "out"]
        compile_kernel(moe_strips._down_strips, constants, arrays, num_warps=step.down.warps)
    for gated, tiles in products:
        sides = {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth, "GROUP": tiles.group}
        constants = {"TOPK": 8, "SLOTS": 128, "GATED": gated, "EVEN": True, "AHEAD": tiles.ahead, **sides, **pdl}
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        compile_kernel(moe_products._product, constants, ["x", "weight", "y"], **options)
    compile_kernel(moe_products._sort_by_expert, {"BLOCK": 8192, **pdl}, [], num_warps=16)
    compile_kernel(moe._weighted_sum, {"TOPK": 8, "BLOCK": 1024, **pdl}, ["outputs", "out"], num_warps=4)


if __name__ == "__main__":
    main()
