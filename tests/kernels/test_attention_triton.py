"""Attention's Triton kernels against float64: any lengths, and NaN wherever no one may look."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels import split_kv
from kernels.attention_backend import AttentionBackend, AttentionSetting, BackendError, choose_backend
from kernels.latent_write import write_latents_reference, write_latents_triton
from kernels.mha_decode import mha_decode_reference, mha_decode_triton
from kernels.mla_decode import mla_decode_reference, mla_decode_triton
from kernels.prefill_attention import prefill_attention, prefill_attention_reference
from kernels.prefill_triton import Form, prefill_triton
from kernels.tiles import DecodeForm
from tests.kernels.test_decode import LENGTHS, running_sum, scatter

pytest.importorskip("triton", reason="Triton is not installed on this platform")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3}
LONG = [1, 190, 0, 64, 700, 0, 33, 128, 0]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def assert_near(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


def deal(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """Deal blocks to so many programs, whatever the device."""
    monkeypatch.setattr(split_kv, "_multiprocessors", lambda device: programs)


def cached(lengths: list[int], row: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(kv_cache, block_table, context_lens): pages out of order, everything unused NaN, also what the table names."""
    kv_cache, table = scatter([torch.randn(n, row) for n in lengths], row)
    unused = int(kv_cache.isnan().all(-1).all(-1).nonzero()[0])
    for index, length in enumerate(lengths):
        table[index, -(-length // 64) :] = unused
    return kv_cache.to(DEVICE, dtype), table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("programs", "heads", "lengths"), [(1, 20, LENGTHS), (4, 16, LONG), (40, 32, LENGTHS)])
def test_mla_decode_of_any_lengths_and_programs(
    monkeypatch: pytest.MonkeyPatch, programs: int, heads: int, lengths: list[int], dtype: torch.dtype
) -> None:
    """Sequences within one program's run and cut between several; heads that fill no whole block."""
    rank, rope = 64, 16
    form = DecodeForm(tokens=64, heads=16, warps=4, stages=4, programs=-(-heads // 16))
    deal(monkeypatch, programs)
    kv_cache, table, context_lens = cached(lengths, rank + rope, dtype)
    latent = torch.randn(len(lengths), heads, rank, dtype=dtype, device=DEVICE)
    query_rope = torch.randn(len(lengths), heads, 48, dtype=dtype, device=DEVICE)[..., 32:]  # a part, as in attention
    out = mla_decode_triton(latent, query_rope, kv_cache, table, context_lens, scale=0.1, form=form)
    expected = mla_decode_reference(
        latent.double(), query_rope.double(), kv_cache.double(), table, context_lens, scale=0.1
    )
    assert_near(out, expected)
    assert (out[context_lens == 0] == 0).all()


def test_mla_decode_in_small_blocks_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    deal(monkeypatch, 7)
    kv_cache, table, context_lens = cached(LENGTHS, 80, torch.float32)
    arguments = (torch.randn(len(LENGTHS), 3, 64, device=DEVICE), torch.randn(len(LENGTHS), 3, 16, device=DEVICE))
    out = mla_decode_triton(*arguments, kv_cache, table, context_lens, scale=0.1)
    assert_near(out, mla_decode_reference(*arguments, kv_cache, table, context_lens, scale=0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("programs", "heads", "lengths"), [(1, 10, LENGTHS[:5]), (4, 3, LONG), (40, 2, LENGTHS)])
def test_mha_decode_of_any_lengths_and_programs(
    monkeypatch: pytest.MonkeyPatch, programs: int, heads: int, lengths: list[int], dtype: torch.dtype
) -> None:
    dim = 32
    deal(monkeypatch, programs)
    kv_cache, table, context_lens = cached(lengths, 2 * heads * dim, dtype)
    query = torch.randn(len(lengths), 3, heads, dim, dtype=dtype, device=DEVICE)[:, 1]  # a part of a joint projection
    out = mha_decode_triton(query, kv_cache, table, context_lens, scale=0.25, resident=heads)
    expected = mha_decode_reference(query.double(), kv_cache.double(), table, context_lens, scale=0.25)
    assert_near(out, expected)
    assert (out[context_lens == 0] == 0).all()


@pytest.mark.parametrize("kind", ["mla", "mha"])
def test_a_program_for_each_sequence(kind: str) -> None:
    """The batch-invariant form."""
    lengths, heads = LENGTHS, 3
    kv_cache, table, context_lens = cached(lengths, 80 if kind == "mla" else 2 * heads * 32, torch.float32)
    if kind == "mla":
        latent = torch.randn(len(lengths), heads, 64, device=DEVICE)
        arguments = (latent, torch.randn(len(lengths), heads, 16, device=DEVICE), kv_cache, table, context_lens)
        out, expected = (
            mla_decode_triton(*arguments, scale=0.1, whole=True),
            mla_decode_reference(*arguments, scale=0.1),
        )
    else:
        query = torch.randn(len(lengths), heads, 32, device=DEVICE)
        out = mha_decode_triton(query, kv_cache, table, context_lens, scale=0.1, whole=True)
        expected = mha_decode_reference(query, kv_cache, table, context_lens, scale=0.1)
    assert_near(out, expected)
    assert (out[context_lens == 0] == 0).all()


def test_no_sequence_has_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    deal(monkeypatch, 3)
    kv_cache, table, context_lens = cached([0, 1, 0], 80, torch.float32)
    context_lens.zero_()
    latent, rope = torch.randn(3, 16, 64, device=DEVICE), torch.randn(3, 16, 16, device=DEVICE)
    assert (mla_decode_triton(latent, rope, kv_cache, table, context_lens, scale=0.1) == 0).all()


def test_more_sequences_than_a_program_looks_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_kv, "LENGTHS", 4)
    monkeypatch.setattr("kernels.mla_decode.LENGTHS", 4)
    deal(monkeypatch, 3)
    kv_cache, table, context_lens = cached(LENGTHS, 80, torch.float32)
    arguments = (torch.randn(9, 16, 64, device=DEVICE), torch.randn(9, 16, 16, device=DEVICE))
    out = mla_decode_triton(*arguments, kv_cache, table, context_lens, scale=0.1)
    assert_near(out, mla_decode_reference(*arguments, kv_cache, table, context_lens, scale=0.1))


def test_pages_that_are_no_whole_number_of_blocks_are_refused() -> None:
    x = torch.zeros(1, 16, 64, device=DEVICE)
    with pytest.raises(ValueError, match="page of 24 tokens"):
        mla_decode_triton(
            x, x[..., :16], torch.zeros(1, 24, 80, device=DEVICE), torch.zeros(1, 1), torch.zeros(1), scale=1.0
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rope", [16, 0])
@pytest.mark.parametrize(
    ("query_lens", "key_lens"),
    [([5], [5]), ([3, 1, 40], [3, 90, 100]), ([64, 33], [64, 128]), ([1] * 9, [1, 2, 31, 32, 33, 5, 64, 65, 7])],
)
def test_prefill_of_any_lengths(dtype: torch.dtype, rope: int, query_lens: list[int], key_lens: list[int]) -> None:
    """Chunks with and without cached context, and NaN behind the last key."""
    heads, dim, form = 2, 32, Form(rows=32, columns=16, warps=4, stages=2)
    query = torch.randn(sum(query_lens), heads, dim + rope, device=DEVICE, dtype=dtype)
    rows, seen = torch.full((sum(key_lens) + 40, heads, 2 * dim), torch.nan), sum(key_lens)
    rows[:seen] = torch.randn(seen, heads, 2 * dim)
    key, value = rows.to(DEVICE, dtype)[:seen].split(dim, dim=-1)
    key_rope = torch.randn(seen + 40, rope, device=DEVICE, dtype=dtype)
    key_rope[seen:] = torch.nan
    lengths = {"cu_query_lens": running_sum(query_lens).to(DEVICE), "cu_key_lens": running_sum(key_lens).to(DEVICE)}
    out = prefill_triton(
        query, key, value, key_rope[:seen] if rope else None, query_lens=query_lens, scale=0.3, form=form, **lengths
    )
    whole = torch.cat((key, key_rope[:seen, None].expand(-1, heads, -1)), dim=-1)
    expected = prefill_attention_reference(
        query.double(), whole.double(), value.double(), query_lens=query_lens, key_lens=key_lens, scale=0.3
    )
    assert_near(out, expected)


@pytest.mark.parametrize("backend", [AttentionBackend.TRITON, AttentionBackend.TORCH])
@pytest.mark.parametrize(
    ("query_lens", "key_lens"), [([3, 0, 40, 1, 0], [3, 0, 100, 70, 0]), ([0, 0], [0, 0]), ([64], [64])]
)
def test_prefill_of_lengths_that_only_the_device_knows(
    backend: AttentionBackend, query_lens: list[int], key_lens: list[int]
) -> None:
    """Nobody's rows before and behind, of NaN; they stay as they are in the result."""
    heads, dim, rope, before, behind = 2, 32, 16, 5, 70
    first, last, seen = before, before + sum(query_lens), sum(key_lens)
    query = torch.full((last + behind, heads, dim + rope), torch.nan, device=DEVICE)
    query[first:last] = torch.randn(last - first, heads, dim + rope)
    sides = [torch.full((seen + behind, *shape), torch.nan, device=DEVICE) for shape in ((heads, 2 * dim), (rope,))]
    for side in sides:
        side[:seen] = torch.randn(side[:seen].shape)
    (key, value), key_rope = sides[0].split(dim, dim=-1), sides[1]
    out = torch.full((len(query), heads, dim), 7.0, device=DEVICE)
    prefill_attention(
        query,
        key,
        value,
        key_rope,
        query_lens=None,
        key_lens=None,
        cu_query_lens=(running_sum(query_lens) + before).to(torch.int32).to(DEVICE),
        cu_key_lens=running_sum(key_lens).to(DEVICE),
        scale=0.3,
        backend=backend,
        out=out,
    )
    assert (out[:first] == 7).all() and (out[last:] == 7).all()
    if seen:
        whole = torch.cat((key, key_rope[:, None].expand(-1, heads, -1)), dim=-1).double()
        expected = prefill_attention_reference(
            query[first:last].double(),
            whole[:seen],
            value[:seen].double(),
            query_lens=query_lens,
            key_lens=key_lens,
            scale=0.3,
        )
        assert_near(out[first:last], expected)


def test_prefill_of_more_sequences_than_a_program_looks_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.prefill_triton.SEQUENCES", 4)
    lens = [1, 40, 2, 33, 3, 1, 35, 2, 1]
    query, key, value = (torch.randn(sum(lens), 1, 16, device=DEVICE) for _ in range(3))
    arguments = {
        "query_lens": lens,
        "key_lens": lens,
        "cu_query_lens": running_sum(lens).to(DEVICE),
        "cu_key_lens": running_sum(lens).to(DEVICE),
        "scale": 0.3,
    }
    outputs = [
        prefill_attention(query, key, value, backend=backend, **arguments)  # type: ignore[arg-type]
        for backend in (AttentionBackend.TRITON, AttentionBackend.TORCH)
    ]
    assert_near(*outputs)


def test_prefill_refuses_widths_that_are_no_power_of_two() -> None:
    x, ends = torch.zeros(4, 1, 24), running_sum([4])
    with pytest.raises(ValueError, match="width 24"):
        prefill_triton(x, x, x, None, query_lens=[4], cu_query_lens=ends, cu_key_lens=ends, scale=1.0)


@pytest.mark.parametrize("write", [write_latents_triton, write_latents_reference])
def test_latents_are_written_to_their_slots_alone(write: object) -> None:
    assert callable(write)
    rank, rope, heads, nope, slots = 64, 16, 3, 32, [70, 3, 127]
    kv_cache = torch.full((3, 64, rank + rope), torch.nan, device=DEVICE)
    query = torch.randn(3, heads, nope + rope, device=DEVICE)
    angles = torch.rand(3, rope // 2, device=DEVICE)
    latent, weight = torch.randn(3, rank + rope, device=DEVICE), torch.ones(rank, device=DEVICE)
    where = torch.tensor(slots, device=DEVICE)
    write(query, latent, weight, (angles.cos(), angles.sin()), kv_cache, where, rope=rope, eps=1e-6)
    written = ~kv_cache.view(-1, rank + rope).isnan()
    assert written[slots].all() and not written.any(-1).index_fill(0, where, False).any()


CPU = torch.device("cpu")
SMALL = {"parts": (128, 64), "value_dim": 128, "dtype": torch.bfloat16}


@pytest.mark.parametrize("setting", ["auto", "torch"])
def test_without_a_gpu_the_backend_is_torch(setting: AttentionSetting) -> None:
    assert choose_backend(setting, device=CPU, **SMALL) is AttentionBackend.TORCH  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", ["flash-attn", "triton"])
def test_backends_of_gpus_are_refused_without_one(setting: AttentionSetting) -> None:
    with pytest.raises(BackendError, match=f"{setting} needs a GPU"):
        choose_backend(setting, device=CPU, **SMALL)  # type: ignore[arg-type]


class TestOnAGpu:
    """The choice for a GPU that is said to be there."""

    cuda = torch.device("cuda", 0)

    @pytest.fixture(autouse=True)
    def hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def choose(self, setting: AttentionSetting, **changes: object) -> AttentionBackend:
        return choose_backend(setting, device=self.cuda, **(SMALL | changes))  # type: ignore[arg-type]

    def install(self, monkeypatch: pytest.MonkeyPatch, *installed: AttentionBackend) -> None:
        def function(backend: AttentionBackend) -> object:
            if backend not in installed:
                raise ImportError("No module named 'flash_attn'")
            return len

        monkeypatch.setattr("kernels.attention_backend.flash_function", function)

    def test_triton_comes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(monkeypatch, AttentionBackend.FLASH_2, AttentionBackend.FLASH_4)
        assert self.choose("auto") is self.choose("triton") is AttentionBackend.TRITON

    def test_the_newest_flash_attention_that_serves_comes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(monkeypatch, AttentionBackend.FLASH_2, AttentionBackend.FLASH_4)
        assert self.choose("flash-attn") is AttentionBackend.FLASH_4
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        assert self.choose("flash-attn") is AttentionBackend.FLASH_2
        self.install(monkeypatch)
        with pytest.raises(BackendError, match="No module named 'flash_attn'"):
            self.choose("flash-attn")

    def test_numbers_and_widths_that_a_backend_cannot_take(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(monkeypatch, AttentionBackend.FLASH_4)
        assert self.choose("auto", dtype=torch.float32) is AttentionBackend.TRITON
        assert self.choose("auto", parts=(96,), value_dim=96) is AttentionBackend.FLASH_4
        assert self.choose("auto", parts=(24,), value_dim=24) is AttentionBackend.TORCH
        with pytest.raises(BackendError, match="16-bit numbers, not float32"):
            self.choose("flash-attn", dtype=torch.float32)
        with pytest.raises(BackendError, match="powers of two from 16 on, not 24"):
            self.choose("triton", parts=(24,), value_dim=24)

    def test_triton_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(monkeypatch)
        monkeypatch.setattr("kernels.attention_backend.has_triton", lambda: False)
        assert self.choose("auto") is AttentionBackend.TORCH
        with pytest.raises(BackendError, match="triton: is not installed"):
            self.choose("triton")
