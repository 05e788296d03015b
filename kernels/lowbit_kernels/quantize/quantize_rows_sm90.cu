// Quantizes rows to int8 or e4m3, each with its own scale, for sm_90.
//
// quantize_rows_sm90.py compiles this file once for each combination of
//   X          BF16 or FP16
//   CODES      INT8 or E4M3
//   OUT        the dtype in which codes are written: CODES, or as numbers BF16 or FP16 (E4M3: FP16 only)
//   VECTORS    vectors of eight elements that a thread keeps
// and puts ptx.cuh and sm90.cuh before it.
//
// One block per row. Each thread issues all its loads at once to hide the latency of memory, and keeps the loaded words
// in registers until the scale is known. The start of this launch overlaps with the end of the previous one.

enum { BF16, FP16, INT8, E4M3 };

static constexpr int MAX_WARPS = 32;
static constexpr int BYTES = OUT == CODES ? 1 : 2;  // of a code
static constexpr int ENDS = CODES == E4M3 ? 1 : 2;  // extremes that the scale depends on: |x|, or max and -min
static_assert(CODES != E4M3 || OUT == E4M3 || OUT == FP16, "");
static constexpr float SMALLEST = 1.1754943508222875e-38f, INTEGERS = 12582912.0f;  // 1.5 * 2**23: its ulp is 1
static constexpr uint32 INFINITE = 0x7f800000;

DEVICE float low_half(uint32 pair) { return X == BF16 ? bits_float(pair << 16) : from_half(pair & 0xffff); }
DEVICE float high_half(uint32 pair) { return X == BF16 ? bits_float(pair & 0xffff0000u) : from_half(pair >> 16); }

// The larger of two magnitudes as float32 bits, in whose order NaN is largest.
DEVICE uint32 larger_half(uint32 pair) { return max(float_bits(low_half(pair)), float_bits(high_half(pair))); }

// The codes of two neighbours: as bytes in the lower half of the word, or as numbers in all of it. The product is
// rounded before the sum (no FMA).
DEVICE uint32 coded(uint32 pair, float inverse) {
    const float low = multiply_exactly(low_half(pair), inverse), high = multiply_exactly(high_half(pair), inverse);
    if constexpr (CODES == E4M3) return OUT == FP16 ? from_e4m3x2(to_e4m3x2(low, high)) : to_e4m3x2(low, high);
    const float a = low + INTEGERS, b = high + INTEGERS;
    if constexpr (OUT == INT8) return permute(float_bits(a), float_bits(b), 0x40);
    else if constexpr (OUT == BF16) return to_bf16x2(a - INTEGERS, b - INTEGERS);
    else return to_half2(a - INTEGERS, b - INTEGERS);
}

DEVICE void store_codes(unsigned char *row, int i, uint4 x, float inverse) {
    const uint32 a = coded(x.x, inverse), b = coded(x.y, inverse), c = coded(x.z, inverse), d = coded(x.w, inverse);
    if constexpr (BYTES == 1) ((uint2 *)row)[i] = make_uint2(permute(a, b, 0x5410), permute(c, d, 0x5410));
    else ((uint4 *)row)[i] = make_uint4(a, b, c, d);
}

// Grid: one block per row. Rows of x have `vectors` vectors and are `stride` elements apart; a block is whole warps and
// holds a whole row. codes [m, 8 * vectors], scale [m].
extern "C" __global__ void __launch_bounds__(MAX_WARPS * 32)
    quantize_rows(const unsigned char *x, long long stride, unsigned char *codes, float *scale, int vectors) {
    __shared__ uint32 found[ENDS][MAX_WARPS];
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long row = blockIdx.x;
    const uint4 *from = (const uint4 *)(x + row * stride * 2);
    wait_for_previous();
    let_next_start();

    uint4 kept[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        const int i = threadIdx.x + j * blockDim.x;
        kept[j] = i < vectors ? from[i] : make_uint4(0, 0, 0, 0);
    }
    // As signed integers, the bits of positive numbers are ordered like the numbers, above all negative numbers.
    uint32 low = 0, high = 0;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        const uint32 pairs[4] = {kept[j].x, kept[j].y, kept[j].z, kept[j].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            high = larger_signed_halves(high, pairs[i]);
            low = larger_signed_halves(low, pairs[i] ^ 0x80008000u);
        }
    }
    if constexpr (ENDS == 1) high = larger_halves(low, high);
    uint32 ends[2] = {warp_max(larger_half(high)), ENDS == 2 ? warp_max(larger_half(low)) : 0};
    if (warps > 1) {
        if (lane == 0)
            for (int i = 0; i < ENDS; ++i) found[i][warp] = ends[i];
        __syncthreads();
        for (int i = 0; i < ENDS; ++i) ends[i] = warp_max(lane < warps ? found[i][lane] : 0);
    }

    float own = CODES == E4M3 ? divide_exactly(bits_float(ends[0]), 448.0f)
                              : max(divide_exactly(bits_float(ends[0]), 127.0f), divide_exactly(bits_float(ends[1]), 128.0f));
    own = max(own, SMALLEST);
    const uint32 largest = max(ends[0], ends[1]);
    if (largest == 0) own = 1.0f;
    if (largest >= INFINITE) {
        own = bits_float(0x7fc00000);
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) kept[j] = make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x == 0) scale[row] = own;
    const float inverse = largest < INFINITE ? divide_exactly(1.0f, own) : 0.0f;
    unsigned char *to = codes + row * vectors * 8 * BYTES;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i < vectors) store_codes(to, i, kept[j], inverse);
    }
}
