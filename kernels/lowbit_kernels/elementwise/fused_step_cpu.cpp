// One step of an optimizer over many tensors on a CPU: decode the states, update in float32, encode.
//
// fused_step_cpu.py compiles this file once for each variant (see fused_step.h). A strip is at most 256 neighbouring
// elements: a part of a row, or several short rows, with whole blocks of every state. It passes through the stages in
// arrays that stay in the L1 cache. Each stage is a loop that compilers vectorize. A strip that does not fill its last
// vector is updated in a copy, so every element takes the same path, in IEEE arithmetic (no contraction into fma):
// results do not depend on threads, alignment, sharding or the machine.

static constexpr int STRIP = TILE;
static constexpr int LANES = 16;          // numbers of the widest vector
static constexpr uint64 GRAIN = 1 << 15;  // elements that are worth one more thread

#define ALIGNED alignas(64)

template <int DTYPE>
struct Number {
    typedef unsigned short Bits;
};
template <>
struct Number<FP32> {
    typedef float Bits;
};
typedef Number<GRAD>::Bits Grad;
typedef Number<PARAM>::Bits Param;

// ---- numbers of fewer bits ---------------------------------------------------------------------------------------

// The magnitude of a number with an exponent biased by BIAS and MANTISSA bits, subnormal numbers included.
template <int MANTISSA, int BIAS>
DEVICE float from_small(uint32 magnitude) {
    const uint32 bits = (magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23);
    const float least = bits_float((128 - BIAS) << 23);  // the smallest that is not subnormal
    return magnitude >> MANTISSA ? bits_float(bits) : bits_float(bits + (1 << 23)) - least;
}

// The nearest such magnitude of |x|, ties to even; exponents beyond the format's are not clamped.
template <int MANTISSA, int BIAS>
DEVICE uint32 to_small(float x) {
    const uint32 a = float_bits(x) & 0x7fffffff;
    const uint32 rounded = a + ((1 << (22 - MANTISSA)) - 1) + (a >> (23 - MANTISSA) & 1);
    const float shift = bits_float((151 - BIAS - MANTISSA) << 23);  // its last bit is the smallest subnormal number
    const uint32 subnormal = float_bits(bits_float(a) + shift) - float_bits(shift);
    return a < (uint32)(128 - BIAS) << 23 ? subnormal : (rounded >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA);
}

DEVICE float from_half(uint32 half) {
    const uint32 magnitude = half & 0x7fff;
    const float x = from_small<10, 15>(magnitude);
    const uint32 bits = float_bits(x) + (magnitude >= 0x7c00 ? 112 << 23 : 0);
    return bits_float(bits | (half & 0x8000) << 16);
}
DEVICE uint32 to_half(float x) {
    uint32 magnitude = to_small<10, 15>(x);
    magnitude = magnitude < 0x7c00 ? magnitude : 0x7c00;
    return (x != x ? 0x7e00 : magnitude) | (float_bits(x) >> 16 & 0x8000);
}

DEVICE float from_e4m3(uint32 code) {
    const uint32 magnitude = code & 0x7f, sign = (code & 0x80) << 24;
    const float x = from_small<3, 7>(magnitude);
    return bits_float((magnitude == 0x7f ? 0x7fc00000 : float_bits(x)) | sign);
}
DEVICE uint32 to_e4m3(float x) {
    uint32 magnitude = to_small<3, 7>(x);
    magnitude = magnitude < 0x7e ? magnitude : 0x7e;
    return (x != x ? 0x7f : magnitude) | (float_bits(x) >> 24 & 0x80);
}

DEVICE uint32 to_bf16(float x) {
    const uint32 bits = float_bits(x);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Numbers as float32: converted into `own`, or where they are if they are float32. `store` writes `own` back.
template <int DTYPE>
DEVICE float *load(const void *from, int n, float *__restrict__ own) {
    if constexpr (DTYPE == FP32) return (float *)from;
    const unsigned short *p = (const unsigned short *)from;
    for (int i = 0; i < n; ++i) own[i] = DTYPE == BF16 ? bits_float((uint32)p[i] << 16) : from_half(p[i]);
    return own;
}

template <int DTYPE>
DEVICE void store(void *to, int n, const float *__restrict__ x) {
    if constexpr (DTYPE == FP32) return;
    unsigned short *__restrict__ p = (unsigned short *)to;
    for (int i = 0; i < n; ++i) p[i] = (unsigned short)(DTYPE == BF16 ? to_bf16(x[i]) : to_half(x[i]));
}

// ---- rounding of weights and moments in bf16: lowbit/numerics/rounding.py defines it -----------------------------------------

// The random bits of `n` elements that begin at global index `first`.
DEVICE void random_run(const uint32 *keys, uint64 first, int n, uint32 *out) {
    ALIGNED uint32 all[STRIP + 8];
    ALIGNED uint32 hashes[STRIP / 8 + 1];
    const uint64 octet = first >> 3;
    const int octets = (int)((first + n + 7 >> 3) - octet);
    for (int i = 0; i < octets; ++i) hashes[i] = hash(keys, octet + i);
    for (int i = 0; i < octets; ++i)
        for (int j = 0; j < 8; ++j) all[8 * i + j] = hashes[i] * multiplier(j) >> 16;
    memcpy(out, all + (first & 7), n * sizeof(uint32));
}

DEVICE void random_bits(const Tensor &t, const uint32 *keys, uint64 element, int n, uint32 *out) {
    if (t.run == 0) return random_run(keys, t.first_index + element, n, out);
    for (int done = 0; done < n;) {  // a shard of columns: one run after another
        const uint64 i = element + done, left = t.run - i % t.run;
        const int some = left < (uint64)(n - done) ? (int)left : n - done;
        random_run(keys, t.first_index + i / t.run * t.stride + i % t.run, some, out + done);
        done += some;
    }
}

// Round stochastically to bf16.
DEVICE void round_stochastically(const Tensor &t, const uint32 *keys, uint64 element, int n, float *x) {
    ALIGNED uint32 random[STRIP];
    random_bits(t, keys, element, n, random);
    for (int i = 0; i < n; ++i) {
        const uint32 bits = float_bits(x[i]);
        uint32 rounded = bits + random[i] & 0xffff0000u;
        rounded = (rounded & 0x7f800000) == 0x7f800000 ? bits & 0xffff0000u : rounded;  // never up to infinity
        x[i] = bits_float((bits & 0x7fffffff) > 0x7f800000 ? bits : rounded);
    }
}

// bf16 weights, and what `correction` keeps of them.
template <typename Correction>
DEVICE void decode_corrected(const Correction *correction, int n, float *w) {
    for (int i = 0; i < n; ++i) w[i] = joined_weight(w[i], correction[i]);
}
template <typename Correction>
DEVICE void encode_corrected(int n, float *__restrict__ w, Correction *__restrict__ correction) {
    for (int i = 0; i < n; ++i) {
        int below;
        w[i] = split_weight(w[i], below);
        correction[i] = (Correction)below;
    }
}

// ---- states in few bits ------------------------------------------------------------------------------------------

// The tables: those of fused_step.h, then a `Pieces` for each state that has cells.
struct Pieces {
    // The boundaries between pieces of the table in which magnitudes are evenly spaced, indexed by the power of two that
    // each lies in, and the piece before each.
    uint32 boundary[32], before[32];
    // In a piece, y has the rank floor(pos) with pos = y * slope + offset, at most `last`.
    float slope[16], offset[16];
    uint32 last[16];
    uint32 lowest;               // the power of two of boundary[0], as the exponent of a float
    unsigned char bytes[4][256];  // the values of all codes, the lowest bytes of all first
};
static constexpr int PIECES_WORDS = sizeof(Pieces) / 4;
DEVICE constexpr int pieces_before(int slot) {
    return ((slot > 0 && CELLS_0 > 0) + (slot > 1 && CELLS_1 > 0) + (slot > 2 && CELLS_2 > 0)) * PIECES_WORDS;
}
DEVICE const Pieces &pieces_of(const uint32 *table, int slot) {
    return *(const Pieces *)(table + values_before(STATES) + cells_before(STATES) + pieces_before(slot));
}

// The rank of |y| among the magnitudes that codes stand for: see `ranked` of fused_step_lanes.cuh.
template <int SLOT>
DEVICE uint32 look_rank_up(float y, const uint32 *cells) {
    constexpr int SHIFT = SHIFTS[SLOT];
    constexpr uint32 LEAST = (uint32)BASES[SLOT] << (SHIFT - 1), ONE = 0x3f800000;
    uint32 bits = float_bits(y) & 0x7fffffff;
    bits = bits < ONE ? bits : ONE;
    bits = bits > LEAST ? bits : LEAST;
    const uint32 low = bits << (25 - SHIFT) | float_bits(y) >> (7 + SHIFT);
    return cells[(bits >> (SHIFT - 1)) - BASES[SLOT]] + low >> 24;
}

template <int SLOT>
static constexpr uint32 ZERO_CODE = values_of(SLOT) / 2 - 1;

// The code of a magnitude, with the sign of y. The highest magnitude has no negative.
template <int SLOT>
DEVICE uint32 code_of(float y, uint32 rank) {
    if constexpr (!is_signed(SLOT)) return rank;
    constexpr uint32 ZERO = ZERO_CODE<SLOT>;
    return float_bits(y) >> 31 ? ZERO - (rank < ZERO ? rank : ZERO) : ZERO + rank;
}

#ifdef HAS_AVX512
// Lookups in registers are many times faster than lookups in memory.

DEVICE __m512i vector(const void *p) { return _mm512_loadu_si512(p); }
DEVICE __m512i pick_16(const void *table, __m512i at) { return _mm512_permutexvar_epi32(at, vector(table)); }
DEVICE __m512i pick_32(const uint32 *table, __m512i at) {
    return _mm512_permutex2var_epi32(vector(table), at, vector(table + 16));
}
DEVICE __m512i pick_256(const unsigned char *table, __m512i at) {
    const __m512i low = _mm512_permutex2var_epi8(vector(table), at, vector(table + 64));
    const __m512i high = _mm512_permutex2var_epi8(vector(table + 128), at, vector(table + 192));
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), low, high);
}
DEVICE void store_product(__m512i x, float scale, float *to) {
    _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_castsi512_ps(x), _mm512_set1_ps(scale)));
}

// 64 at a time: look up the four bytes of their values separately, and interleave them.
DEVICE void decode_bytes(const Pieces &p, const uint32 *values, const unsigned char *codes, int n, float scale,
                         float *__restrict__ x) {
    const __m512i turned = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const int whole = n & -64;
    for (int i = 0; i < whole; i += 64) {
        const __m512i at = _mm512_permutexvar_epi32(turned, vector(codes + i));
        const __m512i a = pick_256(p.bytes[0], at), b = pick_256(p.bytes[1], at);
        const __m512i c = pick_256(p.bytes[2], at), d = pick_256(p.bytes[3], at);
        const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
        const __m512i above_ab = _mm512_unpackhi_epi8(a, b), above_cd = _mm512_unpackhi_epi8(c, d);
        store_product(_mm512_unpacklo_epi16(ab, cd), scale, x + i);
        store_product(_mm512_unpackhi_epi16(ab, cd), scale, x + i + 16);
        store_product(_mm512_unpacklo_epi16(above_ab, above_cd), scale, x + i + 32);
        store_product(_mm512_unpackhi_epi16(above_ab, above_cd), scale, x + i + 48);
    }
    for (int i = whole; i < n; ++i) x[i] = bits_float(values[codes[i]]) * scale;
}
DEVICE void decode_nibbles(const uint32 *values, const unsigned char *codes, int n, float scale, float *__restrict__ x) {
    for (int i = 0; i < n; i += 16) {
        const __m512i two = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)(codes + i / 2)));
        store_product(pick_16(values, _mm512_or_si512(two, _mm512_slli_epi64(two, 28))), scale, x + i);
    }
}

// By the piece that y lies in. If y is so near to a boundary that rounding of `pos` may decide, by the cells.
template <int SLOT>
DEVICE void encode_bytes(const float *y, int n, const uint32 *table, unsigned char *__restrict__ codes) {
    const Pieces &p = pieces_of(table, SLOT);
    const uint32 *cells = cells_of(table, SLOT);
    const __m512i lowest = _mm512_set1_epi32(p.lowest), one = _mm512_set1_epi32(1);
    const __m512 near = _mm512_set1_ps(0x1p-11f);
    for (int i = 0; i < n; i += 16) {
        const __m512 number = _mm512_loadu_ps(y + i);
        const __m512i turned = _mm512_rol_epi32(_mm512_castps_si512(number), 1);
        const __m512i power = _mm512_subs_epu16(_mm512_srli_epi32(turned, 24), lowest);  // not below 0
        __m512i piece = pick_32(p.before, power);
        const __mmask16 beyond = _mm512_cmpge_epu32_mask(turned, pick_32(p.boundary, power));
        piece = _mm512_mask_add_epi32(piece, beyond, piece, one);
        const __m512 slope = _mm512_castsi512_ps(pick_16(p.slope, piece));
        const __m512 pos = _mm512_add_ps(_mm512_mul_ps(_mm512_abs_ps(number), slope),
                                         _mm512_castsi512_ps(pick_16(p.offset, piece)));
        const __m512i whole = _mm512_cvttps_epi32(pos);
        const __m512 off = _mm512_abs_ps(_mm512_reduce_ps(pos, _MM_FROUND_TO_NEAREST_INT));
        const __mmask16 unsure = _mm512_cmp_ps_mask(off, near, _CMP_LT_OQ);
        __m512i rank = _mm512_min_epi32(whole, pick_16(p.last, piece));
        if (unsure) {
            ALIGNED uint32 exact[16];
            for (int j = 0; j < 16; ++j) exact[j] = look_rank_up<SLOT>(y[i + j], cells);
            rank = vector(exact);
        }
        if constexpr (is_signed(SLOT)) {
            const __m512i zero = _mm512_set1_epi32(ZERO_CODE<SLOT>);
            const __m512i negative = _mm512_sub_epi32(zero, _mm512_min_epi32(rank, zero));
            const __mmask16 is_negative = _mm512_movepi32_mask(_mm512_castps_si512(number));
            rank = _mm512_mask_blend_epi32(is_negative, _mm512_add_epi32(rank, zero), negative);
        }
        _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtepi32_epi8(rank));
    }
}

#else

DEVICE void decode_bytes(const Pieces &, const uint32 *values, const unsigned char *codes, int n, float scale,
                         float *__restrict__ x) {
    for (int i = 0; i < n; ++i) x[i] = bits_float(values[codes[i]]) * scale;
}
DEVICE void decode_nibbles(const uint32 *values, const unsigned char *codes, int n, float scale, float *__restrict__ x) {
    for (int i = 0; i < n / 2; ++i) {
        x[2 * i] = bits_float(values[codes[i] & 15]) * scale;
        x[2 * i + 1] = bits_float(values[codes[i] >> 4]) * scale;
    }
}
template <int SLOT>
DEVICE void encode_bytes(const float *y, int n, const uint32 *table, unsigned char *__restrict__ codes) {
    const uint32 *cells = cells_of(table, SLOT);
    for (int i = 0; i < n; ++i) codes[i] = (unsigned char)code_of<SLOT>(y[i], look_rank_up<SLOT>(y[i], cells));
}

#endif

// `n` elements of one scale.
template <int SLOT>
DEVICE void decode(const unsigned char *codes, float scale, int n, const uint32 *table, float *__restrict__ x) {
    const uint32 *values = table + values_before(SLOT);
    if constexpr (FORMATS[SLOT] == STATE_8BIT) decode_bytes(pieces_of(table, SLOT), values, codes, n, scale, x);
    else if constexpr (FORMATS[SLOT] == STATE_4BIT) decode_nibbles(values, codes, n, scale, x);
    else
        for (int i = 0; i < n; ++i) x[i] = from_e4m3(codes[i]) * scale;
}

// Divides a block by its scale, which it returns. A block that holds a NaN or an infinity gets a NaN.
template <int SLOT>
DEVICE float scale_down(const float *x, int n, float *__restrict__ y) {
    constexpr uint32 FLOOR = 0x0d800000, LARGE = 0x7e000000, INFINITE = 0x7f800000;  // 2**-100, 2**125
    uint32 largest = FLOOR;
    for (int i = 0; i < n; ++i) {
        const uint32 magnitude = float_bits(x[i]) & 0x7fffffff;
        largest = largest > magnitude ? largest : magnitude;
    }
    uint32 kept = largest;
    if constexpr (has_powers(SLOT)) {  // the power of two above, at most 2**127
        kept = largest + 0x7fffff & 0xff800000;
        kept = kept < INFINITE ? kept : INFINITE - 0x800000;
    }
    float scale = bits_float(largest < INFINITE ? kept : 0x7fc00000);
    if constexpr (FORMATS[SLOT] == STATE_FLOAT8) scale /= 448.0f;
    const float inverse = 1.0f / scale;
    if (largest < LARGE) {
        for (int i = 0; i < n; ++i) y[i] = x[i] * inverse;
    } else {  // the inverse is subnormal
        for (int i = 0; i < n; ++i) y[i] = x[i] / scale;
    }
    return scale;
}

// Codes of 4 bits, two in a byte, from 16 random bits an element.
template <int SLOT>
DEVICE void encode_nibbles(const float *y, const uint32 *random, int n, unsigned char *__restrict__ codes) {
    ALIGNED uint32 each[STRIP];
    for (int i = 0; i < n; ++i) {
        float z = has_powers(SLOT) ? y[i] : bits_float(float_bits(y[i]) & 0x7fffffff);
        z = z > 0.0f ? z : 0.0f;  // also for NaN
        z = z < 1.0f ? z : 1.0f;
        if constexpr (has_powers(SLOT)) {
            const int code = (int)(float_bits(z) + (random[i] << 7 | 64) >> 23) - 112;
            each[i] = (uint32)(code > 0 ? code : 0);
        } else {
            z *= 49.0f;
            const int whole = (int)sqrtf(z);
            const float root = (float)whole, draw = (float)(int)random[i] + 0.5f;
            const int level = whole + ((z - root * root) * 65536.0f > draw * (2.0f * root + 1.0f));
            each[i] = (uint32)(y[i] < 0.0f ? 7 - level : 7 + level);
        }
    }
    for (int i = 0; i < n / 2; ++i) codes[i] = (unsigned char)(each[2 * i] | each[2 * i + 1] << 4);
}

// `n` elements that are divided by their scales already. `random`: their bits, for codes of 4 bits.
template <int SLOT>
DEVICE void encode(const float *y, const uint32 *random, int n, const uint32 *table,
                   unsigned char *__restrict__ codes) {
    if constexpr (FORMATS[SLOT] == STATE_FLOAT8) {
        for (int i = 0; i < n; ++i) {
            uint32 code = to_e4m3(y[i]);
            if constexpr (!is_signed(SLOT)) code += (code & 0x7f) == 0;  // a second moment never rounds to zero
            codes[i] = (unsigned char)code;
        }
    } else if constexpr (FORMATS[SLOT] == STATE_8BIT) {
        encode_bytes<SLOT>(y, n, table, codes);
    } else {
        encode_nibbles<SLOT>(y, random, n, codes);
    }
}

// ---- a strip -----------------------------------------------------------------------------------------------------

struct Strip {
    const Grad *grad;
    Param *param;
    void *correction;
    void *state[3];
    float *scale[3];
    uint64 element;  // offset of the first element in the tensor
    int n, row;      // elements of the strip; elements of a row if the strip has several rows
};

DEVICE constexpr int bytes(int slot, int n) {  // of a state of n elements
    return FORMATS[slot] == STATE_4BIT    ? (n + 1) / 2
           : has_scale(slot)              ? n
           : FORMATS[slot] == STATE_BF16 ? 2 * n
                                          : 4 * n;
}

template <int SLOT>
DEVICE float *decode_state(const Strip &s, int n, const uint32 *table, float *own) {
    if constexpr (SLOT >= STATES) return own;
    else if constexpr (has_scale(SLOT)) {
        const int block = block_of(SLOT) < s.row ? block_of(SLOT) : s.row;
        const unsigned char *codes = (const unsigned char *)s.state[SLOT];
        for (int start = 0; start < n; start += block) {
            const int some = n - start < block ? n - start : block;
            decode<SLOT>(codes + bytes(SLOT, start), s.scale[SLOT][start / block], some, table, own + start);
        }
        return own;
    } else return load<FORMATS[SLOT] == STATE_BF16 ? BF16 : FP32>(s.state[SLOT], n, own);
}

template <int SLOT>
DEVICE void encode_state(const Tensor &t, const Scalars &k, const Strip &s, int n, const uint32 *table, float *x) {
    if constexpr (SLOT >= STATES) return;
    else if constexpr (has_scale(SLOT)) {
        const int block = block_of(SLOT) < s.row ? block_of(SLOT) : s.row;
        for (int i = s.n; i < n; ++i) x[i] = 0.0f;  // must not count in the absmax
        ALIGNED float y[STRIP];
        for (int start = 0; start < n; start += block) {
            const int some = n - start < block ? n - start : block;
            s.scale[SLOT][start / block] = scale_down<SLOT>(x + start, some, y + start);
        }
        ALIGNED uint32 random[STRIP];
        if constexpr (is_stochastic(SLOT)) random_bits(t, k.keys[SLOT + 1], s.element, n, random);
        encode<SLOT>(y, random, n, table, (unsigned char *)s.state[SLOT]);
    } else if constexpr (FORMATS[SLOT] == STATE_BF16) {
        if constexpr (is_stochastic(SLOT)) round_stochastically(t, k.keys[SLOT + 1], s.element, n, x);
        store<BF16>(s.state[SLOT], n, x);
    }
}

// The memory of the strip must reach to the end of its last vector.
DEVICE void step_strip(const Tensor &t, const Scalars &k, float factor, const Strip &s, const uint32 *table) {
    const int n = (s.n + LANES - 1) & -LANES;
    ALIGNED float own[5][STRIP];
    for (int i = 0; i < n; i += 16) {  // of the next strip
        __builtin_prefetch(s.grad + STRIP + i);
        __builtin_prefetch(s.param + STRIP + i);
    }
    const float *__restrict__ g = load<GRAD>(s.grad, n, own[0]);
    float *__restrict__ w = load<PARAM>(s.param, n, own[1]);
    if constexpr (TWO_PARTS) w = (float *)memcpy(own[1], w, n * sizeof(float));
    if constexpr (ROUNDING == CORRECTED) decode_corrected((const signed char *)s.correction, n, w);
    if constexpr (ROUNDING == EXACT) decode_corrected((const short *)s.correction, n, w);
    ALIGNED float error[STRIP];
    float *__restrict__ x0 = decode_state<0>(s, n, table, own[2]);
    float *__restrict__ x1 = decode_state<1>(s, n, table, own[3]);
    float *__restrict__ x2 = decode_state<2>(s, n, table, own[4]);
    float c[COEFFICIENTS];
    memcpy(c, k.c, sizeof(c));
    for (int i = 0; i < n; ++i) {
        float x[3] = {STATES > 0 ? x0[i] : 0.0f, STATES > 1 ? x1[i] : 0.0f, STATES > 2 ? x2[i] : 0.0f};
        float weight = w[i];
        update_element(c, g[i] * factor, weight, x);
        w[i] = weight;
        if constexpr (ERROR == RETURNED) error[i] = weight;
        if constexpr (ERROR == TRIED) continue;
        if constexpr (ERROR == GIVEN) compensate_element(c, ((const float *)s.correction)[i], x);
        if (STATES > 0) x0[i] = x[0];
        if (STATES > 1) x1[i] = x[1];
        if (STATES > 2) x2[i] = x[2];
    }
    if constexpr (ERROR == TRIED) {
        memcpy(s.correction, w, n * sizeof(float));
        return;
    }
    if constexpr (ROUNDING == STOCHASTIC) round_stochastically(t, k.keys[0], s.element, n, w);
    if constexpr (ROUNDING == CORRECTED) encode_corrected(n, w, (signed char *)s.correction);
    if constexpr (ROUNDING == EXACT) encode_corrected(n, w, (short *)s.correction);
    if constexpr (ERROR != GIVEN) store<PARAM>(s.param, n, w);
    if constexpr (ERROR == RETURNED) {
        for (int i = 0; i < n; ++i) {
            float x[3] = {STATES > 0 ? x0[i] : 0.0f, STATES > 1 ? x1[i] : 0.0f, STATES > 2 ? x2[i] : 0.0f};
            compensate_element(c, error[i] - bits_float(to_bf16(w[i]) << 16), x);
            if (STATES > 0) x0[i] = x[0];
            if (STATES > 1) x1[i] = x[1];
            if (STATES > 2) x2[i] = x[2];
        }
    }
    encode_state<0>(t, k, s, n, table, x0);
    encode_state<1>(t, k, s, n, table, x1);
    encode_state<2>(t, k, s, n, table, x2);
}

// Update a strip in a copy of whole vectors.
DEVICE void step_copy(const Tensor &t, const Scalars &k, float factor, const Strip &s, const uint32 *table) {
    ALIGNED Grad grad[STRIP] = {};
    ALIGNED Param param[STRIP] = {};
    ALIGNED unsigned char correction[4 * STRIP] = {};
    ALIGNED unsigned char state[3][4 * STRIP] = {};
    Strip copy = s;
    copy.grad = (const Grad *)memcpy(grad, s.grad, s.n * sizeof(Grad));
    copy.param = (Param *)memcpy(param, s.param, s.n * sizeof(Param));
    copy.correction = correction;
    if (CORRECTION_BYTES > 0) memcpy(correction, s.correction, s.n * CORRECTION_BYTES);
    for (int i = 0; i < STATES; ++i) copy.state[i] = memcpy(state[i], s.state[i], bytes(i, s.n));
    step_strip(t, k, factor, copy, table);
    memcpy(s.param, param, s.n * sizeof(Param));
    if (CORRECTION_BYTES > 0) memcpy(s.correction, correction, s.n * CORRECTION_BYTES);
    for (int i = 0; i < STATES; ++i) {
        if (FORMATS[i] == STATE_4BIT && s.n & 1) state[i][s.n / 2] &= 15;  // the unused half byte of an odd row is 0
        memcpy(s.state[i], state[i], bytes(i, s.n));
    }
}

// ---- a tensor, cut into strips -----------------------------------------------------------------------------------

struct Cut {
    uint64 rows_a_strip, strips_a_row, strips;  // rows_a_strip or strips_a_row is 1
};

DEVICE Cut cut(const Tensor &t) {
    const uint64 cols = t.cols;
    if (t.numel == 0) return {1, 1, 0};
    const uint64 rows = t.numel / cols;
    if (cols % LANES == 0 && 2 * cols <= STRIP) {
        const uint64 together = STRIP / cols;
        return {together, 1, (rows + together - 1) / together};
    }
    const uint64 each = (cols + STRIP - 1) / STRIP;
    return {1, each, rows * each};
}

DEVICE Strip strip_of(const Tensor &t, const Cut &cut, uint64 index) {
    const uint64 cols = t.cols, row = index / cut.strips_a_row * cut.rows_a_strip;
    const uint64 col = index % cut.strips_a_row * STRIP, element = row * cols + col;
    const uint64 end = cut.rows_a_strip > 1 ? t.numel : (row + 1) * cols;
    const uint64 limit = cut.rows_a_strip > 1 ? cut.rows_a_strip * cols : (uint64)STRIP;
    Strip s;
    s.grad = (const Grad *)t.grad + element;
    s.param = (Param *)t.param + element;
    s.correction = (char *)t.correction + element * CORRECTION_BYTES;
    s.element = element;
    s.n = (int)(end - element < limit ? end - element : limit);
    s.row = cut.rows_a_strip > 1 ? (int)cols : STRIP;
    for (int i = 0; i < STATES; ++i) {
        const uint64 block = block_of(i);
        const uint64 at = FORMATS[i] == STATE_4BIT ? row * ((cols + 1) / 2) + col / 2 : element * bytes(i, 1);
        s.state[i] = (char *)t.state[i] + at;
        s.scale[i] = t.scale[i] + row * ((cols + block - 1) / block) + col / block;
    }
    return s;
}

// ---- the step ----------------------------------------------------------------------------------------------------

struct Work {  // of one thread: the strips [first, last)
    const Tensor *tensors;
    const Scalars *scalars;
    const uint32 *table;
    float factor;
    uint64 first, last;
};

static void *run(void *argument) {
    const Work &work = *(const Work *)argument;
    uint64 before = 0;
    for (const Tensor *t = work.tensors; before < work.last; ++t) {
        const Cut pieces = cut(*t);
        const uint64 start = work.first > before ? work.first - before : 0;
        const uint64 end = work.last - before < pieces.strips ? work.last - before : pieces.strips;
        for (uint64 i = start; i < end; ++i) {
            const Strip s = strip_of(*t, pieces, i);
            const Scalars &scalars = work.scalars[t - work.tensors];
            if (s.n % LANES == 0) step_strip(*t, scalars, work.factor, s, work.table);
            else step_copy(*t, scalars, work.factor, s, work.table);
        }
        before += pieces.strips;
    }
    return nullptr;
}

// `table`: the tables of the states, see `Pieces`. `control`: null, or the factor of the gradients and whether to skip
// the step (not 0). At most `threads` threads work on the step, the calling one among them.
extern "C" void step(const Tensor *tensors, const Group *groups, Scalars *scalars, const uint32 *table,
                     long long count, const float *control, long long threads) {
    if (control && control[1] != 0.0f) return;
    uint64 strips = 0, elements = 0;
    for (long long i = 0; i < count; ++i) {
        prepare_tensor(tensors[i], groups[tensors[i].group], scalars[i]);
        strips += cut(tensors[i]).strips;
        elements += tensors[i].numel;
    }
    const uint64 worth = elements / GRAIN < 1 ? 1 : elements / GRAIN, limit = 64;
    uint64 workers = (uint64)threads < worth ? threads : worth;
    workers = workers < limit ? workers : limit;
    Work work[64];
    pthread_t handles[64];
    bool started[64] = {};
    for (uint64 i = workers; i-- > 0;) {
        work[i] = {tensors, scalars, table, control ? control[0] : 1.0f, strips * i / workers, strips * (i + 1) / workers};
        if (i > 0) started[i] = pthread_create(&handles[i], nullptr, run, &work[i]) == 0;
    }
    for (uint64 i = 0; i < workers; ++i)
        if (!started[i]) run(&work[i]);
    for (uint64 i = 0; i < workers; ++i)
        if (started[i]) pthread_join(handles[i], nullptr);
}
