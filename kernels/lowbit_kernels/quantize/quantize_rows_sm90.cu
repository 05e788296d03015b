// Quantizes rows to int8 or e4m3, each with its own scale, for sm_90.
//
// quantize_rows_sm90.py compiles this file once for each combination of
//   X          BF16 or FP16
//   CODES      INT8 or E4M3
//   OUT        the dtype in which codes are written: CODES, or as numbers BF16 or FP16 (E4M3: FP16 only)
//   VECTORS    vectors of eight elements that a thread keeps
//   TURNED     1: int8 codes are written in the order of int8_int4_mm_sm90.cu, in rows of whole 128 codes; the rest is 0
// and puts ptx.cuh, sm90.cuh and row_codes.cuh before it.
//
// One block per row. Each thread issues all its loads at once to hide the latency of memory, and keeps the loaded words
// in registers until the scale is known. The start of this launch overlaps with the end of the previous one.

enum { BF16, FP16, INT8, E4M3 };

static constexpr int MAX_WARPS = 32;
static constexpr int BYTES = OUT == CODES ? 1 : 2;  // of a code
static constexpr int ENDS = CODES == E4M3 ? 1 : 2;  // extremes that the scale depends on: |x|, or max and -min
static constexpr bool HALF = X == FP16;
static_assert(CODES != E4M3 || OUT == E4M3 || OUT == FP16, "");
static_assert(!TURNED || OUT == INT8, "");

// The codes of two neighbours: as bytes in the lower half of the word, or as numbers in all of it.
DEVICE uint32 coded(uint32 pair, float inverse) {
    if constexpr (BYTES == 2) return rounded_pair<CODES == E4M3, HALF, OUT == FP16>(pair, inverse);
    const float low = low_half<HALF>(pair), high = high_half<HALF>(pair);
    if constexpr (CODES == E4M3) return to_e4m3x2(multiply_exactly(low, inverse), multiply_exactly(high, inverse));
    return permute(float_bits(integer_of(low, inverse)), float_bits(integer_of(high, inverse)), 0x40);
}

DEVICE void store_codes(unsigned char *row, int i, uint4 x, float inverse) {
    const uint32 a = coded(x.x, inverse), b = coded(x.y, inverse), c = coded(x.z, inverse), d = coded(x.w, inverse);
    if constexpr (TURNED) {
        const uint32 first = permute(a, b, 0x5410), second = permute(c, d, 0x5410);
        uint32 *to = (uint32 *)row + i / 4 * 8 + i % 4;
        to[0] = permute(first, second, 0x6420), to[4] = permute(first, second, 0x7531);
    } else if constexpr (BYTES == 1) {
        ((uint2 *)row)[i] = make_uint2(permute(a, b, 0x5410), permute(c, d, 0x5410));
    } else {
        ((uint4 *)row)[i] = make_uint4(a, b, c, d);
    }
}

// Grid: one block per row. Rows of x have `vectors` vectors and are `stride` elements apart; a block is whole warps and
// holds a whole row. codes [m, 8 * vectors], scale [m]. With TURNED `vectors` is rounded up to a multiple of 16 for codes.
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
    uint32 ends[2] = {warp_max(larger_half<HALF>(high)), ENDS == 2 ? warp_max(larger_half<HALF>(low)) : 0};
    if (warps > 1) {
        if (lane == 0)
            for (int i = 0; i < ENDS; ++i) found[i][warp] = ends[i];
        __syncthreads();
        for (int i = 0; i < ENDS; ++i) ends[i] = warp_max(lane < warps ? found[i][lane] : 0);
    }

    const float own = scale_of<CODES == E4M3>(ends[0], ends[1]), inverse = inverse_of(own);
    if (own != own) {
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) kept[j] = make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x == 0) scale[row] = own;
    const int stored = TURNED ? (vectors + 15) / 16 * 16 : vectors;
    unsigned char *to = codes + row * stored * 8 * BYTES;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i < stored) store_codes(to, i, kept[j], inverse);
    }
}
