"""The Triton form of `kernels.sample`: two launches from logits to tokens, whatever the rows of a step want.

    _scan     a program for each chunk of each row: penalties, bias and mask, noise, and the best of the chunk; for
              log-probabilities also the chunk's mass and its best raw logits
    _choose   a program a row: the best of the chunks; the cuts; log-probabilities; the count of the token

Only rows with penalties, bias or mask have their adjusted logits written down. Cost of greedy and of temperature alone:
the logits read once (105 MB at 256 rows of 102,400: 24 us at 4.3 TB/s); the noise is some 90 operations a number.

**The cuts without a sort.** Nobody asks for the set that top-k, top-p and min-p keep, only for its best score l + g.
`_scan` gives the best of all; that candidate stays if it is among the k largest and the mass of all larger logits is
below p of the whole, which one pass over the row tells. If it does not stay, neither does any logit that is not larger:
the best score among the larger ones is the next candidate. So a row whose kept tokens have the mass q takes about
1 + log(1 / q) passes, and the tokens are those of the reference, since the noise is. The k-th largest is found by
narrowing an interval of float32 keys, three pivots a pass; as soon as the candidates fit into one block, they are
listed and the rest of the work is done on the list.

A key is the number's bits as an int32 in the order of the numbers. A ranked number is an int64: the key above, the
inverted token id below, so that the maximum is the largest number and of equals the lowest id.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.lang import tl, triton
from kernels.sample_rules import MAX_TOP, RULE, WORDS, Outcome, Rules


def _word(name: str) -> Any:
    """Place of a field in a record, in words."""
    assert RULE.fields is not None
    return tl.constexpr(RULE.fields[name][1] // 4)


_SEED, _POSITION, _INVERSE_TEMPERATURE = _word("seed"), _word("position"), _word("inverse_temperature")
_TOP_K, _TOP_P, _LOG_MIN_P = _word("top_k"), _word("top_p"), _word("log_min_p")
_REPETITION, _PRESENCE, _FREQUENCY = _word("repetition"), _word("presence"), _word("frequency")
_HISTORY, _BIAS_FIRST, _BIAS_LAST = _word("history"), _word("bias_first"), _word("bias_last")
_GUIDE, _PLACE, _NUM_TOP = _word("guide"), _word("place"), _word("num_top")
_WORDS, _MAX_TOP = tl.constexpr(WORDS), tl.constexpr(MAX_TOP)
_NEVER = tl.constexpr(-(1 << 63))
"""Below every ranked number."""

CHUNK = 2048
"""Logits a program of `_scan` looks at."""
BLOCK = 8192
"""Logits a program of `_choose` looks at together, and what its list of candidates holds."""
CUT_WARPS = 32
"""Warps of a program of `_choose` that may have to look at its whole row."""


def choose_triton(logits: Tensor, rules: Rules | None, allowed: Tensor | None) -> Outcome:
    """`kernels.sample.choose`; raises ValueError on rows of logits that are not contiguous."""
    rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"rows of logits must be contiguous, their numbers are {logits.stride(1)} apart")
    device = logits.device
    out = Outcome.empty(rows, rules is not None and rules.num_top >= 0, device)
    if rows == 0:
        return out
    chunks = triton.cdiv(vocab_size, CHUNK)
    best = torch.empty(rows, chunks, dtype=torch.int64, device=device)
    # What is not needed is given as an array of the right type that nothing reads or writes.
    stats, mass, adjusted, values, ids = logits, logits, logits, logits, out.words
    top, chosen, top_ids, top_values = best, logits, out.words, logits
    records, bias, in_prompt, counts, words = out.words, out.words, out.words.view(torch.uint8), out.words, out.words
    if rules is not None:
        records, bias = rules.records, rules.bias
        in_prompt, counts = rules.in_prompt.view(torch.uint8), rules.counts
        stats = torch.empty(rows, chunks, dtype=torch.float32, device=device)
        if allowed is not None:
            words = allowed
        if rules.num_places:
            adjusted = torch.empty(rules.num_places, vocab_size, dtype=torch.float32, device=device)
        if rules.cuts:
            values = torch.empty(rows, BLOCK, dtype=torch.float32, device=device)
            ids = torch.empty(rows, BLOCK, dtype=torch.int32, device=device)
        if out.logprobs:
            mass = torch.empty(rows, chunks, 2, dtype=torch.float32, device=device)
            top = torch.empty(rows, chunks, MAX_TOP, dtype=torch.int64, device=device)
            chosen, top_ids, top_values = out.chosen, out.top_ids, out.top
    plain, cuts = rules is None, rules is not None and rules.cuts
    # Without fused multiply-adds, so that scores are rounded as the reference's are.
    _scan[(chunks, rows)](
        logits, records, bias, in_prompt, counts, words, adjusted, best, stats, mass, top,
        vocab_size, logits.stride(0), triton.cdiv(vocab_size, 32),
        PLAIN=plain, CHUNK=CHUNK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _choose[(rows,)](
        logits, records, counts, adjusted, best, stats, mass, top, values, ids,
        out.tokens, out.finite, chosen, top_ids, top_values,
        vocab_size, logits.stride(0), chunks,
        PLAIN=plain, CUTS=cuts, CHUNKS=triton.next_power_of_2(chunks), BLOCK=BLOCK,
        num_warps=CUT_WARPS if cuts else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _scan(
    logits, records, bias, in_prompt, counts, words, adjusted, best, stats, mass, top,
    vocab_size, stride, words_stride,
    PLAIN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = row * tl.num_programs(0) + chunk
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < vocab_size
    x = tl.load(logits + row * stride + index, mask=inside, other=-float("inf"))
    if not PLAIN:
        rule = records + row * _WORDS
        num_top = tl.load(rule + _NUM_TOP)
        if num_top >= 0:
            highest = tl.max(tl.where(x == x, x, float("inf")), axis=0)
            shift = tl.where(highest == -float("inf"), 0.0, highest)
            tl.store(mass + 2 * slot, highest)
            tl.store(mass + 2 * slot + 1, tl.sum(tl.exp(x - shift), axis=0))
            ranked = _rank(x, index, inside)
            for n in range(num_top):
                first = tl.max(ranked, axis=0)
                tl.store(top + slot * _MAX_TOP + n, first)
                ranked = tl.where(ranked == first, _NEVER, ranked)
        history = tl.load(rule + _HISTORY).to(tl.int64)
        if history >= 0:
            seen = tl.load(in_prompt + history * vocab_size + index, mask=inside, other=0)
            count = tl.load(counts + history * vocab_size + index, mask=inside, other=0)
            factor = _number(rule + _REPETITION)
            repeated = tl.where(x > 0, tl.div_rn(x, factor + tl.zeros_like(x)), x * factor)
            x = tl.where((seen != 0) | (count > 0), repeated, x)
            x -= tl.where(count > 0, _number(rule + _PRESENCE), 0.0)
            x -= _number(rule + _FREQUENCY) * count.to(tl.float32)
        last = tl.load(rule + _BIAS_LAST)
        entry = _find(bias, tl.load(rule + _BIAS_FIRST), last, chunk * CHUNK)
        last = _find(bias, entry, last, chunk * CHUNK + CHUNK)
        while entry < last:
            x = tl.where(index == tl.load(bias + 2 * entry), x + _number(bias + 2 * entry + 1), x)
            entry += 1
        guide = tl.load(rule + _GUIDE).to(tl.int64)
        if guide >= 0:
            word = tl.load(words + guide * words_stride + index // 32, mask=inside, other=0)
            x = tl.where((word >> (index % 32)) & 1 != 0, x, -float("inf"))
        place = tl.load(rule + _PLACE).to(tl.int64)
        if place >= 0:
            tl.store(adjusted + place * vocab_size + index, x, mask=inside)
        tl.store(stats + slot, tl.max(tl.where(x == x, x, float("inf")), axis=0))
        inverse_temperature = _number(rule + _INVERSE_TEMPERATURE)
        if inverse_temperature > 0:
            x = x * inverse_temperature + _noise(_stream(rule), index)
    tl.store(best + slot, tl.max(_rank(x, index, inside), axis=0))


@triton.jit
def _choose(
    logits, records, counts, adjusted, best, stats, mass, top, values, ids,
    tokens, finite, chosen, top_ids, top_values,
    vocab_size, stride, chunks,
    PLAIN: tl.constexpr, CUTS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    ranked = tl.load(best + row * chunks + chunk, mask=inside, other=_NEVER)
    first = tl.max(ranked, axis=0)
    token = _token_of(first)
    if PLAIN:
        highest = _value_of(first)
    else:
        highest = tl.max(tl.load(stats + row * chunks + chunk, mask=inside, other=-float("inf")), axis=0)
    good = (highest < float("inf")) & (highest > -float("inf"))
    if CUTS:
        rule = records + row * _WORDS
        cut = (tl.load(rule + _TOP_K) > 0) | (_number(rule + _TOP_P) < 1)
        cut = cut | (_number(rule + _LOG_MIN_P) > -float("inf"))
        if good & cut & (_number(rule + _INVERSE_TEMPERATURE) > 0):
            place = tl.load(rule + _PLACE).to(tl.int64)
            source = logits + row * stride
            if place >= 0:
                source = adjusted + place * vocab_size
            token = _cut(rule, source, values + row * BLOCK, ids + row * BLOCK, vocab_size, highest, token, BLOCK)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(finite + row, good.to(tl.int32))
    if not PLAIN:
        rule = records + row * _WORDS
        history = tl.load(rule + _HISTORY).to(tl.int64)
        if history >= 0:
            tl.atomic_add(counts + history * vocab_size + token, 1)
        num_top = tl.load(rule + _NUM_TOP)
        if num_top >= 0:
            peaks = tl.load(mass + 2 * (row * chunks + chunk), mask=inside, other=-float("inf"))
            masses = tl.load(mass + 2 * (row * chunks + chunk) + 1, mask=inside, other=0.0)
            peak = tl.max(peaks, axis=0)
            whole = peak + tl.log(tl.sum(masses * tl.exp(peaks - peak), axis=0))
            tl.store(chosen + row, tl.load(logits + row * stride + token) - whole)
            pair = tl.arange(0, CHUNKS * 32)
            wanted = (pair // 32 < chunks) & (pair % 32 < num_top)
            where = top + (row * chunks + pair // 32) * _MAX_TOP + pair % 32
            listed = tl.load(where, mask=wanted, other=_NEVER)
            for n in range(num_top):
                leader = tl.max(listed, axis=0)
                tl.store(top_ids + row * _MAX_TOP + n, _token_of(leader))
                tl.store(top_values + row * _MAX_TOP + n, _value_of(leader) - whole)
                listed = tl.where(listed == leader, _NEVER, listed)


@triton.jit
def _cut(rule, source, values, ids, vocab_size, highest, token, BLOCK: tl.constexpr):
    """The token of the best score among those that top-k, top-p and min-p keep; `token` has the best of all.

    source: the row's logits [V], highest their maximum; values and ids [BLOCK]: room for the list of candidates.
    """
    scale, k = _number(rule + _INVERSE_TEMPERATURE), tl.load(rule + _TOP_K)
    top_p, stream = _number(rule + _TOP_P), _stream(rule)
    highest = highest * scale
    listed = vocab_size * 0  # how many candidates the list holds; 0: the whole row is looked at
    kept = _key(highest * 0 - float("inf"))  # what top-k leaves has at least this key
    if (k > 0) & (k < vocab_size):
        # The k-th largest key lies in [kept, over): `above` counts those from `kept` on, at least k; from `over` on
        # there are fewer than k.
        above, over = vocab_size, _key(highest) + 1
        low, middle, high = _key(highest - 16), _key(highest - 4), _key(highest - 1)
        while (above > k) & (kept + 1 < over):
            at_low, at_middle, at_high = _count(source, values, vocab_size, listed, scale, low, middle, high, BLOCK)
            kept = tl.where(at_low >= k, low, kept)
            above = tl.where(at_low >= k, at_low, above)
            kept = tl.where(at_middle >= k, middle, kept)
            above = tl.where(at_middle >= k, at_middle, above)
            kept = tl.where(at_high >= k, high, kept)
            above = tl.where(at_high >= k, at_high, above)
            over = tl.where(at_high < k, tl.minimum(over, high), over)
            over = tl.where(at_middle < k, tl.minimum(over, middle), over)
            over = tl.where(at_low < k, tl.minimum(over, low), over)
            if (listed == 0) & (above <= BLOCK):
                listed = _list(source, values, ids, vocab_size, scale, kept, BLOCK)
            quarter = (over.to(tl.int64) - kept.to(tl.int64)) // 4
            step = tl.maximum(quarter, 1).to(tl.int32)
            low = tl.minimum(kept + step, over - 1)
            middle = tl.minimum(low + step, over - 1)
            high = tl.minimum(middle + step, over - 1)
    floor = tl.maximum(kept, _key(highest + _number(rule + _LOG_MIN_P)))
    whole = (highest * 0 - 1).to(tl.float64)  # the mass of what top-k left; not known yet
    searching = True
    while searching:
        candidate = _key(tl.load(source + token) * scale)
        rejected = candidate < floor
        above = vocab_size
        if (candidate >= floor) & (top_p < 1) & (candidate < _key(highest)):
            total, larger, above = _masses(source, values, vocab_size, listed, scale, kept, candidate, highest, BLOCK)
            whole = tl.where(whole < 0, total, whole)
            rejected = larger >= top_p * whole
            floor = tl.where(rejected, candidate + 1, floor)
        if rejected:
            if (listed == 0) & (above <= BLOCK):
                listed = _list(source, values, ids, vocab_size, scale, floor, BLOCK)
            token = _next(source, values, ids, vocab_size, listed, scale, floor, stream, BLOCK)
        searching = rejected
    return token


@triton.jit
def _look_at(source, values, vocab_size, listed, BLOCK: tl.constexpr):
    """Where the numbers to look at are, how many, and up to where memory may be read: the list, or the whole row."""
    data = source
    if listed > 0:
        data = values
    return data, tl.where(listed > 0, listed, vocab_size), tl.where(listed > 0, BLOCK, vocab_size)


@triton.jit
def _count(source, values, vocab_size, listed, scale, low, middle, high, BLOCK: tl.constexpr):
    """How many numbers have at least the key low, middle, high."""
    at_low = tl.zeros((BLOCK,), tl.int32)
    at_middle = tl.zeros((BLOCK,), tl.int32)
    at_high = tl.zeros((BLOCK,), tl.int32)
    data, size, limit = _look_at(source, values, vocab_size, listed, BLOCK)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        key = _key(tl.load(data + index, mask=index < limit, other=0.0) * scale)
        at_low += ((index < size) & (key >= low)).to(tl.int32)
        at_middle += ((index < size) & (key >= middle)).to(tl.int32)
        at_high += ((index < size) & (key >= high)).to(tl.int32)
    return tl.sum(at_low, axis=0), tl.sum(at_middle, axis=0), tl.sum(at_high, axis=0)


@triton.jit
def _masses(source, values, vocab_size, listed, scale, kept, candidate, highest, BLOCK: tl.constexpr):
    """Masses from the key `kept` on and above `candidate`, in units of the largest one's, and how many are above."""
    total, larger = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    above = tl.zeros((BLOCK,), tl.int32)
    data, size, limit = _look_at(source, values, vocab_size, listed, BLOCK)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(data + index, mask=index < limit, other=0.0) * scale
        key = _key(x)
        mass = tl.where((index < size) & (key >= kept), tl.exp(x - highest), 0.0)
        total += mass
        larger += tl.where(key > candidate, mass, 0.0)
        above += ((index < size) & (key > candidate)).to(tl.int32)
    # In float64, so that the order of the sum does not move the border.
    return tl.sum(total.to(tl.float64), axis=0), tl.sum(larger.to(tl.float64), axis=0), tl.sum(above, axis=0)


@triton.jit
def _list(source, values, ids, vocab_size, scale, floor, BLOCK: tl.constexpr):
    """List the logits of at least the key `floor`, at most BLOCK, with their ids; how many there are."""
    listed = vocab_size * 0
    for start in range(0, vocab_size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(source + index, mask=index < vocab_size, other=-float("inf"))
        wanted = ((index < vocab_size) & (_key(x * scale) >= floor)).to(tl.int32)
        where = listed + tl.cumsum(wanted, axis=0) - 1
        tl.store(values + where, x, mask=wanted != 0)
        tl.store(ids + where, index, mask=wanted != 0)
        listed += tl.sum(wanted, axis=0)
    tl.debug_barrier()  # other threads read what these wrote
    return listed


@triton.jit
def _next(source, values, ids, vocab_size, listed, scale, floor, stream, BLOCK: tl.constexpr):
    """The token of the best score among those of at least the key `floor`."""
    best = tl.full((), _NEVER, tl.int64)
    data, size, limit = _look_at(source, values, vocab_size, listed, BLOCK)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(data + index, mask=index < limit, other=0.0) * scale
        wanted = (index < size) & (_key(x) >= floor)
        if listed > 0:
            index = tl.load(ids + index)
        best = tl.maximum(best, tl.max(_rank(x + _noise(stream, index), index, wanted), axis=0))
    return _token_of(best)


@triton.jit
def _find(bias, first, last, token):
    """The first of the entries first to last - 1 whose token is not smaller; `last` if there is none."""
    while first < last:
        middle = (first + last) // 2
        smaller = tl.load(bias + 2 * middle) < token
        first = tl.where(smaller, middle + 1, first)
        last = tl.where(smaller, last, middle)
    return first


@triton.jit
def _number(word):
    return tl.load(word).to(tl.float32, bitcast=True)


@triton.jit
def _key(x):
    """int32 in the order of the float32 x; of both zeros the same."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _rank(x, index, wanted):
    """x and its index as one int64; NaN counts as infinity; what is not wanted comes last."""
    key = _key(tl.where(x == x, x, float("inf"))).to(tl.int64)
    return tl.where(wanted, (key << 32) | (0x7FFFFFFF - index).to(tl.int64), _NEVER)


@triton.jit
def _value_of(ranked):
    key = (ranked >> 32).to(tl.int32)
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _token_of(ranked):
    return (0x7FFFFFFF - (ranked & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def _stream(rule):
    """What seed and position make of the noise: see `kernels.sample.gumbel_noise`."""
    seed, position = _long(rule + _SEED), _long(rule + _POSITION)
    return _mix(_mix(seed) + position)


@triton.jit
def _long(word):
    low, high = tl.load(word).to(tl.int64), tl.load(word + 1).to(tl.int64)
    return ((low & 0xFFFFFFFF) | (high << 32)).to(tl.uint64)


@triton.jit
def _noise(stream, index):
    """Standard Gumbel noise of the tokens `index`, float32."""
    bits = _mix(stream + (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    uniform = tl.minimum(((bits >> 11) + 1).to(tl.int64).to(tl.float32) * (2.0**-53), 1 - 2.0**-24)
    # -log1p(-uniform): what 1 - uniform loses in rounding is added again.
    rest = 1 - uniform
    return -tl.log((uniform - (1 - rest)) - tl.log(rest))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
