// Tokens of 8 bits times a weight of 4 bits on the units for 8 bits of sm_90a.
//   int8 by int4     out[m, n] = token_scale[m] * sum_g scale[n, g] * (sum_k x[m, k] * (code[n, k] - zero[n, g])) + bias[n]
//   e4m3 by MXFP4    out[m, n] = token_scale[m] * sum_k x[m, k] * e2m1(code[n, k]) * 2^(scale[n, g] - 127) + bias[n]
// where g = k / GROUP. Inner sums of int8 are exact in int32; they are scaled and added in float32. Sums of e4m3 are added
// in float32 after 512 products, since the units keep about 14 bits of a sum.
//
// w4a8_mm_sm90.py puts ptx.cuh, sm90.cuh, load_words.cuh, w4a8_tiles_sm90.cuh, `multiply` (the wgmma instruction) and the
// consumer, w4a8_int4_sm90.cuh or w4a8_e2m1_sm90.cuh, before this source and compiles it for each combination of
//   CODES              INT4 or E2M1
//   OUT, SCALE         BF16 or FP16; the scale of INT4 also FP32
//   GROUP              codes along k that share a scale: 64, or a multiple of 128; 0: a row has one scale, or E2M1
//   ZERO               1: there are zero points, int8 in -8 .. 7
//   TOKENS             of a tile: a multiple of 16, at most 128
//   LAST_TOKENS        of tiles in the last rows, fewer; 0: as of the others
//   SPLIT              blocks of a cluster that share a tile's K: 1 or 2
//   LANES              warp groups that take turns at the K of the same 64 rows: 2; 1: each has 64 rows of 128
//   PERIOD             chunks that a warp group takes at a time, from adjacent slots of the ring: 4 or 8
//   STAGES             of the ring
//   VECTOR             1: the scales of a period can be loaded at once, as a row has those of whole periods
//
// A tile computes the transpose of out. Rows of the weight are the first operand of the product, which threads unpack
// in registers. Tokens are the second, which the TMA copies to shared memory. Blocks are persistent. Without SPLIT the
// two blocks of a cluster have adjacent rows, and each loads half of the tokens for both. Two warp groups multiply 64
// rows each, or take turns at the K of the same ones.
//
// The codes of x are stored in the order in which unpacking gives those of the weight. Thread t of four has a word of 8
// codes in each 32. Byte 32 i + 16 h + 4 t + j of a row is for k = 32 i + 8 t + 2 j + h with INT4, whose codes in the low
// halves of bytes come first, and for k = 32 i + 8 t + 4 h + j with E2M1.

DEVICE uint32 packed(float low, float high) {
    if constexpr (OUT == FP16) return to_half2(low, high);
    else return to_bf16x2(low, high);
}

DEVICE float number_at(const void *p, int i) {
    const uint32 bits = ((const unsigned short *)p)[i];
    return OUT == FP16 ? from_half(bits) : bits_float(bits << 16);
}

// Writes the results of a warp's 16 rows to the box of its warp group, whose rows are tokens, as the TMA swizzles it.
template <int COUNT>
DEVICE void fill_box(uint32 box, const float (&totals)[COUNT], const float *token_scale, const float (&bias)[2]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, matrix = lane / 8;
    const uint32 token = matrix / 2 * 8 + lane % 8, chunk = warp * 2 + matrix % 2;
    const uint32 to = box + token * 128 + (chunk ^ token % 8) * 16;
#pragma unroll
    for (int j = 0; j < COUNT / 8 / SOURCES; ++j) {
        uint32 result[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 scale = *(const float2 *)&token_scale[j * 16 + i / 2 * 8 + lane % 4 * 2];
            const float *two = &totals[j * 8 + i * 2];
            result[i] = packed(fmaf(two[0] * UNIT, scale.x, bias[i % 2]), fmaf(two[1] * UNIT, scale.y, bias[i % 2]));
        }
        store_matrices_transposed(to + j * 16 * 128, result);
    }
}

// Sends sums to the warps that finish their tokens, and adds those of this warp's tokens in the order of `SOURCES`: blocks
// of the cluster, and in each the warp groups that take turns.
DEVICE void exchange(Shared &shared, float (&totals)[TOKENS / 2], uint32 rank, uint32 parity) {
    constexpr int SQUARES = TOKENS / 16 / SOURCES;  // that a warp finishes
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int source = (SPLIT > 1 ? rank * LANES : 0) + turn();
    const uint32 arrived = shared_address(&shared.sums_arrived), read = shared_address(&shared.sums_read);
    if (threadIdx.x == 0) barrier_expect(arrived, sizeof(shared.sums));
    barrier_wait(read, parity ^ 1);
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j) {
        const float4 four = make_float4(totals[j * 4], totals[j * 4 + 1], totals[j * 4 + 2], totals[j * 4 + 3]);
        const int to = j / 2 / SQUARES, other = LANES == 1 ? warp : to % LANES * 4 + warp % 4;
        float4 *at = &shared.sums[(source * WARPS + other) * SQUARES + j / 2 % SQUARES][j % 2][lane];
        send(shared_address(at), SPLIT > 1 ? to / LANES : rank, four, arrived);
    }
    barrier_wait_after(arrived, parity);
#pragma unroll
    for (int j = 0; j < SQUARES * 2; ++j) {
        float4 four = {};
#pragma unroll
        for (int from = 0; from < SOURCES; ++from) {
            const float4 more = shared.sums[(from * WARPS + warp) * SQUARES + j / 2][j % 2][lane];
            four.x += more.x, four.y += more.y, four.z += more.z, four.w += more.w;
        }
        totals[j * 4] = four.x, totals[j * 4 + 1] = four.y, totals[j * 4 + 2] = four.z, totals[j * 4 + 3] = four.w;
    }
    __syncwarp();
    if (lane < SPLIT) barrier_arrive(read, SPLIT > 1 ? lane : rank);
}

// Computes and stores a tile of COUNT * 2 tokens.
template <int COUNT>
DEVICE void consume_tile(Shared &shared, Consumer &consumer, const TensorMap &out, const void *bias, const float *token_scale,
                         const Shape &shape, const Schedule &schedule, uint32 rank, uint32 parity) {
    constexpr int FINISHED = COUNT * 2 / SOURCES;  // tokens
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
    const uint32 box = shared_address(shared.box[group]);
    const int column = schedule.row + (LANES == 1 ? group * 64 : 0), row = column + thread / 32 * 16 + lane / 4;
    const int own = schedule.token + (rank / BESIDE * LANES + turn()) * FINISHED, token = own + thread;
    // Loaded early, so that they arrive while the product runs.
    const float own_scale = thread < FINISHED && token < shape.m ? fabsf(token_scale[token]) : 0.0f;
    float totals[COUNT], own_bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) own_bias[i] = bias && row + i * 8 < shape.n ? number_at(bias, row + i * 8) : 0.0f;
    consumer.sum(totals, row);
    if constexpr (SOURCES > 1) exchange(shared, totals, rank, parity);
    if (thread == 0) store_wait<0>();
    if (thread < FINISHED) shared.token_scale[group][thread] = own_scale;
    named_barrier_sync(1 + group, 128);  // the box is free, the scales are in shared memory
    fill_box(box, totals, shared.token_scale[group], own_bias);
    fence_for_tma();
    named_barrier_sync(1 + group, 128);
    if (thread == 0 && column < shape.n) {
        store_box(out, column, own, box);
        store_commit();
    }
}

DEVICE void consume(Shared &shared, const TensorMap &out, const TensorMap &out_last, const void *scale,
                    const signed char *zero, const void *bias, const float *token_scale, const Shape &shape, uint32 rank) {
    Schedule schedule(shape, rank);
    Consumer consumer(shared, scale, zero, shape, schedule, token_scale);
    for (uint32 parity = 0; schedule.take(); parity ^= 1) {
        if constexpr (LAST_TOKENS > 0)
            if (schedule.is_last) {
                consume_tile<LAST_TOKENS / 2>(shared, consumer, out_last, bias, token_scale, shape, schedule, rank, parity);
                continue;
            }
        consume_tile<TOKENS / 2>(shared, consumer, out, bias, token_scale, shape, schedule, rank, parity);
    }
    if (threadIdx.x % 128 == 0) store_wait<0>();
}

// Whether a block leaves a quarter of the registers to the launch that rounds the next tokens: its blocks wait there.
static constexpr bool FEW = TOKENS <= 64 && CODES == INT4;

// Grid: a multiple of CLUSTER blocks, at most one per multiprocessor. codes [n, bytes]: tensor map in boxes of
// ROWS x PITCH bytes. x [m, k]: in boxes of TOKENS / BESIDE x CHUNK. out [m, n]: in boxes of TOKENS / SOURCES x 64. x_last and
// out_last: the same with LAST_TOKENS.
// scale and zero [n, groups], with E2M1 in place of zero the ranges of exponents that quantize_rows_sm90.cu writes; bias [n]
// of OUT or null, token_scale [m]. `chunks`: a multiple of TURN, at least SPLIT times TURN; codes of x beyond k are 0.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(FEW ? 512 : THREADS, 1)
    w4a8_mm(const __grid_constant__ TensorMap codes, const __grid_constant__ TensorMap x,
            const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap x_last,
            const __grid_constant__ TensorMap out_last, const void *scale, const signed char *zero, const void *bias,
            const float *token_scale, int m, int n, int chunks, int groups, int rows, int columns, int band, int full,
            int last_columns) {
    DYNAMIC_SHARED(memory);
    Shared &shared = *(Shared *)memory;
    const Shape shape = {m, n, chunks, groups, rows, columns, band, full, last_columns, (const unsigned char *)zero};
    const uint32 rank = cluster_rank();
    if (threadIdx.x == 0) {
        if (shared_address(memory) % 1024 != 0) __trap();  // the swizzle depends on the address
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&shared.full[i]), 1);
            barrier_init(shared_address(&shared.empty[i]), WARPS / LANES * BESIDE);
        }
        barrier_init(shared_address(&shared.sums_arrived), 1);
        barrier_init(shared_address(&shared.sums_read), WARPS * SPLIT);
        barrier_init_fence();
        prefetch(codes), prefetch(x), prefetch(out);
        if constexpr (LAST_TOKENS > 0) prefetch(x_last), prefetch(out_last);
    }
    if (threadIdx.x == GROUPS * 128) fetch(codes, shape, rank);
    Consumer::prepare(shared);
    __syncwarp();
    cluster_sync();
    wait_for_previous();
    let_next_start();

    if (threadIdx.x >= GROUPS * 128) {
        give_registers<40>();
        if (threadIdx.x == GROUPS * 128) produce(shared, codes, x, x_last, shape, rank);
        __syncwarp();
    } else {
        take_registers<FEW ? 168 : 232>();
        consume(shared, out, out_last, scale, zero, bias, token_scale, shape, rank);
        __syncwarp();
    }
    // The other block of the cluster may still write to this block's barriers.
    cluster_sync();
}
