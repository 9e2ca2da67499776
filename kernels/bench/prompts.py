"""Cases of attention over prompts: on every backend that serves here."""

from collections.abc import Iterator
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from kernels.attention_backend import AttentionBackend, AttentionSetting, BackendError, choose_backend
from kernels.bench.measure import Case, Work, copies, relative_error
from kernels.bench.setups import Setup
from kernels.prefill_attention import prefill_attention, prefill_attention_reference

MOST_PROMPTS = 64
Prompts = tuple[tuple[int, int], ...]


def cases(setup: Setup) -> Iterator[Case]:
    for mla in (True, False):
        geometry = setup.geometry if mla else setup.heads
        if mla != bool(geometry.rank):
            continue
        for backend in backends(setup, mla):
            for prompts in setup.sizes.prompts:
                kind, case = (
                    f"{'mla' if mla else 'mha'} prefill, {backend.value}",
                    partial(prefill, setup, mla, backend),
                )
                yield Case(kind, name_of(prompts), partial(case, prompts), setup.tolerance)
                if backend is AttentionBackend.TRITON:
                    shape = f"{name_of(prompts)}, captured"
                    yield Case(kind, shape, partial(case, prompts, captured=True), setup.tolerance)


def backends(setup: Setup, mla: bool) -> list[AttentionBackend]:
    """All that serve these widths on this device, the one that would be chosen first."""
    geometry = setup.geometry if mla else setup.heads
    parts = (geometry.nope, geometry.rope) if mla else (geometry.value,)
    device = torch.empty(0).device
    found: list[AttentionBackend] = []
    for setting in get_args(AttentionSetting):
        try:
            backend = choose_backend(setting, device=device, dtype=setup.dtype, parts=parts, value_dim=geometry.value)
        except BackendError:
            continue
        if backend not in found:
            found.append(backend)
    return found


def name_of(prompts: Prompts) -> str:
    (new, cached), count = prompts[0], len(prompts)
    if len(set(prompts)) > 1:
        return f"{count} ragged, {sum(new for new, _ in prompts)} new"
    return f"{count} x {new}" + (f" on {cached} cached" if cached else "")


def prefill(setup: Setup, mla: bool, backend: AttentionBackend, prompts: Prompts, *, captured: bool = False) -> Work:
    """captured: as a graph has it, the lengths on the device and room for MOST_PROMPTS of them."""
    geometry = setup.geometry if mla else setup.heads
    heads, value_width, rope = geometry.heads, geometry.value, geometry.rope if mla else 0
    width = geometry.nope if mla else geometry.value
    query_lens, key_lens = [new for new, _ in prompts], [new + cached for new, cached in prompts]
    tokens, keys = sum(query_lens), sum(key_lens)
    query = setup.random(tokens, heads, width + rope)
    row_bytes = (heads * (width + value_width) + rope) * setup.dtype.itemsize
    sides = [_keys_and_values(setup, mla, keys) for _ in range(copies(keys * row_bytes, most=4))]
    rotated = setup.random(keys, rope) if mla else None
    empty = [0] * (MOST_PROMPTS - len(prompts) if captured else 0)
    cu_query_lens, cu_key_lens = (_running_sum(lengths + empty) for lengths in (query_lens, key_lens))
    scale = (width + rope) ** -0.5
    calls = [
        partial(
            prefill_attention,
            query,
            *side,
            rotated,
            query_lens=None if captured else query_lens,
            key_lens=None if captured else key_lens,
            cu_query_lens=cu_query_lens,
            cu_key_lens=cu_key_lens,
            scale=scale,
            backend=backend,
            out=torch.empty(tokens, heads, value_width, dtype=setup.dtype) if captured else None,
        )
        for side in sides
    ]

    def error() -> float:
        """Of the first and last prompt's first and last head."""
        out = calls[0]()
        errors = []
        for number in {0, len(prompts) - 1}:
            new, seen = query_lens[number], key_lens[number]
            first, first_key = int(cu_query_lens[number]), int(cu_key_lens[number])
            some = torch.tensor([0, heads - 1])
            key, value = (part[first_key : first_key + seen, some].double() for part in sides[0])
            if rotated is not None:
                shared = rotated[first_key : first_key + seen, None].double().expand(-1, 2, -1)
                key = torch.cat((key, shared), dim=-1)
            asked = query[first : first + new, some].double()
            expected = prefill_attention_reference(asked, key, value, query_lens=[new], key_lens=[seen], scale=scale)
            errors.append(relative_error(out[first : first + new, some], expected))
        return max(errors)

    pairs = sum(new * cached + new * (new + 1) / 2 for new, cached in prompts)
    moved = query.nbytes + keys * row_bytes + tokens * heads * value_width * setup.dtype.itemsize
    return Work(calls, error, moved, 2.0 * heads * (width + rope + value_width) * pairs)


def _keys_and_values(setup: Setup, mla: bool, keys: int) -> tuple[Tensor, Tensor]:
    """As they lie in memory: side by side in every head where latents are expanded, else as rows of the cache."""
    if mla:
        geometry = setup.geometry
        expanded = setup.random(keys, geometry.heads, geometry.nope + geometry.value)
        return expanded[..., : geometry.nope], expanded[..., geometry.nope :]
    rows = setup.random(keys, 2, setup.heads.heads, setup.heads.value)
    return rows[:, 0], rows[:, 1]


def _running_sum(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
