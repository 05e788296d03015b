// Tokens in the registers of weight_mm_decode_sm90.cu, rounded to int8 or e4m3 codes with a scale each. It uses the macros
// TOKENS, SPLIT and BITS of that file. ptx.cuh, sm90.cuh and row_codes.cuh stand before.
//
// x[set][word][tile][pair] is the x of a token: of column g of tile `tile`, or, with fewer than 8 tokens, of column g %
// TOKENS, in lanes 4 g + t. The ends of a token, or of parts of one, are the two halves of a word, as magnitudes: of its
// largest number in the lower half, and of its smallest one in the upper.

// The warps of a block and the blocks of a cluster exchange these. COUNT is 16 tokens, or 1 if nothing is rounded.
template <int COUNT, int WARPS>
struct TokenScales {
    alignas(16) uint32 ends[COUNT][WARPS];  // from each warp
    float4 sent[COUNT == 1 ? 1 : 8][4];     // of 16 tokens, from each block
    float scale[COUNT];
};

template <int SETS, int TILES, int PAIRS>
DEVICE uint32 ends_of(const uint32 (&x)[SETS][4][TILES][PAIRS], int tile) {
    uint32 high = 0, low = 0;
#pragma unroll
    for (int set = 0; set < SETS; ++set)
#pragma unroll
        for (int i = 0; i < 4 * PAIRS; ++i) {
            const uint32 pair = x[set][i / PAIRS][tile][i % PAIRS];
            high = larger_signed_halves(high, pair), low = larger_signed_halves(low, pair ^ 0x80008000);
        }
    return larger_signed_halves(permute(high, low, 0x5410), permute(high, low, 0x7632));
}

// The ends of a token over all warps of a block, or, in `sent`, all blocks of a cluster.
template <int COUNT, int WARPS>
DEVICE uint32 ends_of_block(const TokenScales<COUNT, WARPS> &tokens, int token) {
    uint32 ends = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i += 4) {
        const uint4 four = *(const uint4 *)&tokens.ends[token][i];
        ends = larger_signed_halves(ends, larger_signed_halves(four.x, four.y));
        ends = larger_signed_halves(ends, larger_signed_halves(four.z, four.w));
    }
    return ends;
}
template <int COUNT, int WARPS>
DEVICE uint32 ends_of_cluster(const TokenScales<COUNT, WARPS> &tokens, int token) {
    uint32 ends = 0;
#pragma unroll
    for (int i = 0; i < SPLIT; ++i) ends = larger_signed_halves(ends, ((const uint32 *)tokens.sent[i])[token]);
    return ends;
}

// Sends the ends of the block's tokens to all blocks of the cluster: a lane sends four tokens to one block. They count for
// the barrier at `exchanged`.
template <int COUNT, int WARPS>
DEVICE void send_ends(TokenScales<COUNT, WARPS> &tokens, uint32 exchanged, int rank) {
    constexpr int QUARTERS = (TOKENS + 3) / 4;
    const int lane = threadIdx.x % 32, part = lane % QUARTERS;
    if (lane >= SPLIT * QUARTERS) return;
    float four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = bits_float(part * 4 + i < TOKENS ? ends_of_block(tokens, part * 4 + i) : 0);
    send(shared_address(&tokens.sent[rank][part]), lane / QUARTERS, make_float4(four[0], four[1], four[2], four[3]),
         exchanged);
}

// Rounds the pairs of a word to codes: as numbers, or, with INTEGERS, as int8 in the first half of the registers. For BITS
// 4 the first register gets the codes of even k, as `four_of` unpacks those of the weight.
template <bool FLOAT8, bool HALF, bool TO_HALF, bool INTEGERS, int PAIRS>
DEVICE void round_word(uint32 (&pairs)[PAIRS], float inverse) {
    uint32 even[PAIRS], odd[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        even[i] = float_bits(integer_of(low_half<HALF>(pairs[i]), inverse));
        odd[i] = float_bits(integer_of(high_half<HALF>(pairs[i]), inverse));
        if (!INTEGERS) pairs[i] = rounded_pair<FLOAT8, HALF, TO_HALF>(pairs[i], inverse);
    }
    const auto joined = [](uint32 a, uint32 b, uint32 c, uint32 d) {
        return permute(permute(a, b, 0x40), permute(c, d, 0x40), 0x5410);
    };
    if (INTEGERS && BITS == 4) {
        pairs[0] = joined(even[0], even[1], even[PAIRS - 2], even[PAIRS - 1]);
        pairs[1] = joined(odd[0], odd[1], odd[PAIRS - 2], odd[PAIRS - 1]);
    } else if (INTEGERS) {
        pairs[0] = joined(even[0], odd[0], even[1], odd[1]);
    }
}

// Rounds x to codes of e4m3 (FLOAT8) or int8, from bf16 or fp16 (HALF) to numbers of bf16 or fp16 (TO_HALF) or to INTEGERS.
// All WARPS warps call it. The codes of a token with a NaN or an infinity are arbitrary, since its scale is NaN.
template <bool FLOAT8, bool HALF, bool TO_HALF, bool INTEGERS, int SETS, int TILES, int PAIRS, int COUNT, int WARPS>
DEVICE void round_tokens(uint32 (&x)[SETS][4][TILES][PAIRS], TokenScales<COUNT, WARPS> &tokens, uint32 exchanged, int rank) {
    constexpr bool SHARES = TOKENS < 8;  // columns have other chunks of the same tokens
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    const bool is_first = lane % 4 == 0 && (!SHARES || g < TOKENS);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        uint32 ends = ends_of(x, tile);
        if constexpr (TOKENS == 1) ends = warp_max(ends & 0xffff) | warp_max(ends >> 16) << 16;
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2)
            if (TOKENS > 1 && (lanes < 4 || (SHARES && lanes >= 4 * TOKENS)))
                ends = larger_signed_halves(ends, __shfl_xor_sync(0xffffffff, ends, lanes));
        if (is_first) tokens.ends[tile * 8 + g][warp] = ends;
    }
    named_barrier_sync(3, WARPS * 32);
    if constexpr (SPLIT > 1) {
        cluster_wait();  // the other blocks run and have initialised their barriers
        if (warp == 0) send_ends(tokens, exchanged, rank);
        __syncwarp();
        barrier_wait_after(exchanged, 0);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const int token = tile * 8 + (SHARES ? g % TOKENS : g);
        const uint32 ends = SPLIT > 1 ? ends_of_cluster(tokens, token) : ends_of_block(tokens, token);
        const uint32 high = float_bits(low_half<HALF>(ends)), low = float_bits(high_half<HALF>(ends));
        const float scale = scale_of<FLOAT8>(high, low), inverse = inverse_of(scale);
        if (warp == 0 && is_first) tokens.scale[token] = scale;
#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
            for (int word = 0; word < 4; ++word)
                round_word<FLOAT8, HALF, TO_HALF, INTEGERS>(x[set][word][tile], inverse);
    }
}
