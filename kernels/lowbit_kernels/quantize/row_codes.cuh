// The rounding of a row to int8 or e4m3 with its own scale, in the bits of `quantize_rowcol`. ptx.cuh stands before.
//
// FLOAT8: e4m3, else int8. HALF: numbers are fp16, else bf16. The ends of a row are the bits, as float32, of its largest
// number and of the magnitude of its smallest one. In their order NaN is last.

static constexpr float SMALLEST_SCALE = 1.1754943508222875e-38f;
static constexpr float INTEGERS = 12582912.0f;  // 1.5 * 2**23: its ulp is 1
static constexpr unsigned int INFINITE = 0x7f800000;

template <bool HALF>
DEVICE float low_half(unsigned int pair) { return HALF ? from_half(pair & 0xffff) : bits_float(pair << 16); }
template <bool HALF>
DEVICE float high_half(unsigned int pair) { return HALF ? from_half(pair >> 16) : bits_float(pair & 0xffff0000u); }

// The larger of two magnitudes as float32 bits.
template <bool HALF>
DEVICE unsigned int larger_half(unsigned int pair) {
    return max(float_bits(low_half<HALF>(pair)), float_bits(high_half<HALF>(pair)));
}

// x / divisor, rounded once, of a finite x >= 0 whose quotient is not subnormal; `inverse`: 1 / divisor, rounded.
DEVICE float divided(float x, float divisor, float inverse) {
    const float quotient = multiply_exactly(x, inverse);
    return fma_exactly(fma_exactly(-quotient, divisor, x), inverse, quotient);
}

// The scale of a row; NaN for a row with NaN or an infinity, whose codes are 0.
template <bool FLOAT8>
DEVICE float scale_of(unsigned int high, unsigned int low) {
    const unsigned int largest = max(high, low);
    if (largest == 0) return 1.0f;
    if (largest >= INFINITE) return bits_float(0x7fc00000);
    const float scale = FLOAT8 ? divided(bits_float(largest), 448.0f, 1.0f / 448)
                               : max(divided(bits_float(high), 127.0f, 1.0f / 127), bits_float(low) * (1.0f / 128));
    return max(scale, SMALLEST_SCALE);
}

// The factor of a row's numbers: 1 / scale, or 0 where that is NaN.
DEVICE float inverse_of(float scale) { return scale == scale ? reciprocal_exactly(scale) : 0.0f; }

// A number as a code of int8: the low byte of the bits of INTEGERS + code. The product is rounded before the sum.
DEVICE float integer_of(float x, float inverse) { return multiply_exactly(x, inverse) + INTEGERS; }

// Two neighbours rounded to codes, as numbers of fp16 (TO_HALF) or bf16. They must be finite unless the row's scale is.
template <bool FLOAT8, bool HALF, bool TO_HALF>
DEVICE unsigned int rounded_pair(unsigned int pair, float inverse) {
    const float low = low_half<HALF>(pair), high = high_half<HALF>(pair);
    if constexpr (FLOAT8) {
        const unsigned int halves = from_e4m3x2(to_e4m3x2(multiply_exactly(low, inverse), multiply_exactly(high, inverse)));
        return TO_HALF ? halves : to_bf16x2(from_half(halves & 0xffff), from_half(halves >> 16));
    }
    const float a = integer_of(low, inverse) - INTEGERS, b = integer_of(high, inverse) - INTEGERS;
    return TO_HALF ? to_half2(a, b) : to_bf16x2(a, b);
}
