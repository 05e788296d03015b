// Weights that are codes, in fused_step.cu: eight codes of a lane, and the rounding of a row.

// If errors are dropped, the new values of a row, float32: first elements 0 to 3 of each eight, then elements 4 to 7. So
// lanes that take eight elements each meet no other lane in a bank. Then twice, for this row and the next: uint32
// [scales], the largest magnitudes of the scales' elements as bits, and float32 [scales], the scales so far.
DYNAMIC_SHARED(row_memory);

// A row of codes, whose threads share it.
struct Row {
    uint32 tensor, number;
    uint64 first;  // element
    uint32 width, scales;
    bool is_measured;  // whether `largest` is that of all elements
    long long place;
    uint4 *values;
    uint32 *largest;
    float *before;
};

// The scale of an element of the row.
DEVICE uint32 scale_in(const Tensor &t, uint32 column) { return CODE_BITS == 8 ? 0 : column / (uint32)t.scale_width; }

static constexpr uint32 UNIT = 0x4b000000u;  // of 2**23, whose last bit is worth 1
static constexpr float OFFSET = CODE_BITS == 4 ? 8.0f : 128.0f;

// Eight codes: int8, or the codes plus 8 in nibbles.
struct Codes {
    Raw<CODE_BITS == 4 ? 1 : 2> raw;
    float scale;

    template <bool VECTOR>
    MEMBER void load(const void *p, const Offsets &at) {
        p = (const char *)p + at.element * CODE_BITS / 8;
        if constexpr (VECTOR) load_vector(p, raw);
        else load_items<1>(p, at.count * CODE_BITS / 8, raw);
    }
    template <bool VECTOR>
    MEMBER void store(void *p, const Offsets &at) const {
        if (ERROR == RETURNED && at.mask) store_vector((char *)p + at.element * CODE_BITS / 8, raw);
    }
    MEMBER void take_far(const Codes &there, int count) {}  // rows of codes have whole octets
    MEMBER void decode(float x[8]) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // a conversion to float takes longer
            const uint32 bits = CODE_BITS == 4 ? masked_or(raw.word[0] >> 4 * i, 15, UNIT)
                                               : permute(raw.word[i / 4] ^ 0x80808080u, UNIT, 0x7540 | i % 4);
            x[i] = multiply_exactly(bits_float(bits) - (8388608.0f + OFFSET), scale);
        }
    }
};

DEVICE void decode_weights(Codes &codes, const Tensor &t, const Row &row, const Offsets &at, float w[8]) {
    const uint32 column = (uint32)(at.element - row.first);
    codes.scale = at.mask ? row.before[scale_in(t, column)] : 0.0f;
    codes.decode(w);
}

// Take a lane's new values into the maxima of the row, and keep them for `round_row` if errors are dropped.
DEVICE void measure(const Tensor &t, const Row &row, const Offsets &at, int lane, const float w[8]) {
    const uint32 column = (uint32)(at.element - row.first);
    uint32 largest = 0;
    if (at.mask) {
        if constexpr (ERROR == DROPPED) {
            uint4 *values = row.values + column / 8;
            values[0] = make_uint4(float_bits(w[0]), float_bits(w[1]), float_bits(w[2]), float_bits(w[3]));
            values[row.width / 8] = make_uint4(float_bits(w[4]), float_bits(w[5]), float_bits(w[6]), float_bits(w[7]));
        }
        float magnitude = larger_magnitude(w[0], w[1]);
#pragma unroll
        for (int i = 2; i < 8; ++i) magnitude = larger_magnitude(magnitude, w[i]);
        largest = float_bits(magnitude);  // bits of magnitudes are in order, NaN above all
    }
    if constexpr (CODE_BITS == 8) {
        largest = warp_max(largest);
        if (lane == 0) atomicMax(row.largest, largest);
    } else if (at.mask) {
        atomicMax(row.largest + scale_in(t, column), largest);
    }
}

// The formulas of quantize/round_rows.py, with its `KEYS`, and `NEXT` of lowbit/tensor/trained/int8_weight.py.
static constexpr float MOST = CODE_BITS == 4 ? 7.0f : 127.0f;
__constant__ uint32 ROW_KEYS[2] = {0x45e50725u, 0x0e4a20c3u};
static constexpr long long NEXT = -0x61c8864680b583ebll;  // distance of the random offsets of two steps
static constexpr uint32 NOT_FINITE = 0x7f800000u;

// The new scale of elements with this largest magnitude, whose scale so far is `before`.
DEVICE float new_scale(uint32 largest, float before) {
    float scale = fmaxf(divide_exactly(bits_float(largest), MOST), bits_float(0x00800000u));
    if (bits_float(largest) == multiply_exactly(before, MOST)) scale = before;
    if (largest == 0) scale = 1.0f;
    return largest >= NOT_FINITE ? bits_float(0x7fffffffu) : scale;
}

// x / scale for the elements of a scale, correctly rounded, in three operations for each. (Markstein's theorem, with the
// nearest reciprocal. Multiplied by a power of two, a scale has a reciprocal, and remainders that count do not underflow.)
DEVICE void divide_eight(float x[8], float scale) {
    const uint32 bits = float_bits(scale);
    const float power = bits_float(bits < 0x17800000u ? 0x5f800000u      // below 2**-80: times 2**64
                                   : bits < 0x71800000u ? 0x3f800000u    // 1
                                                        : 0x1f800000u);  // from 2**100 on: times 2**-64
    const float divisor = multiply_exactly(scale, power), inverse = reciprocal_exactly(divisor);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float dividend = multiply_exactly(x[i], power), q = multiply_exactly(dividend, inverse);
        x[i] = fma_exactly(fma_exactly(-q, divisor, dividend), inverse, q);
    }
}

// The codes of q, the values over their scale, rounded stochastically. A result is 1.5 * 2**23 plus the code, whose last
// byte is the code.
DEVICE uint32 rounded_code(float q, uint32 random) {
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2**23: a sum rounds half to even
    const float nearest = (q + SHIFT) - SHIFT, rest = q - nearest;
    const float draw = bits_float(permute(random, UNIT, 0x7532)) - 8388607.0f;  // the upper 16 bits, plus 1
    const float code = draw < fabsf(rest) * 65536.0f ? nearest + copysignf(1.0f, rest) : nearest;
    return float_bits(limit_magnitude(code, MOST) + SHIFT);
}

// The codes of the eight values `q` from this column of a measured row on. Their scale is stored with its first element.
DEVICE void round_eight(Codes &codes, const Tensor &t, const Row &row, uint32 column, float q[8]) {
    const uint32 i = scale_in(t, column);
    const float scale = codes.scale = new_scale(row.largest[i], row.before[i]);
    if (column % (uint32)t.scale_width == 0) t.param_scale[(uint64)row.number * row.scales + i] = scale;
    uint32 random[8], code[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = scale == scale ? q[i] : 0.0f;
    divide_eight(q, scale == scale ? scale : 1.0f);
    draw_eight(ROW_KEYS, (long long)((uint64)row.place + column), random);
#pragma unroll
    for (int i = 0; i < 8; ++i) code[i] = rounded_code(q[i], random[i]);
    if constexpr (CODE_BITS == 4) {
        codes.raw.word[0] = 0x88888888u;
#pragma unroll
        for (int i = 0; i < 8; ++i) codes.raw.word[0] ^= (code[i] & 15) << 4 * i;  // adds 8 to four bits
    } else {
        codes.raw.word[0] = gather(code[0], code[1], code[2], code[3], 0x0040);
        codes.raw.word[1] = gather(code[4], code[5], code[6], code[7], 0x0040);
    }
}

DEVICE void encode_weights(Codes &codes, const Tensor &t, const Scalars &, const Row &row, const Offsets &at, int lane,
                           float w[8]) {
    if (!row.is_measured) measure(t, row, at, lane, w);
    else if (at.mask) round_eight(codes, t, row, (uint32)(at.element - row.first), w);
}

DEVICE void round_row(const Tensor &t, const Row &row) {
    for (uint32 column = 8 * threadIdx.x; column < row.width; column += 8 * blockDim.x) {
        const uint4 low = row.values[column / 8], high = row.values[column / 8 + row.width / 8];
        const uint32 bits[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        float q[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) q[i] = bits_float(bits[i]);
        Codes made;
        round_eight(made, t, row, column, q);
        store_vector((char *)t.param + (row.first + column) * CODE_BITS / 8, made.raw);
    }
}
