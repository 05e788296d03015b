// Symmetric products of fp16 matrices on sm_90a, of which one half is computed:
//
//     out[i] = alpha * a[i] @ b[i].T + beta * addend[i] + gamma * I
//
// symmetric_mm_sm90.py compiles this file with and without an addend (ADDS) and puts ptx.cuh, sm90.cuh and
// `multiply`, the wgmma instruction, before it. A tile is 128 x 128. Tiles on and below the diagonal are multiplied,
// and those below it are stored twice, the second time transposed.
//
// Blocks are persistent: a block takes every n-th tile of all matrices. One thread of the third warpgroup lets the
// TMA copy tiles of a and b into a ring in shared memory. The other two warpgroups take the block's tiles in turns.
// So one multiplies while the other adds and stores. A group waits for its turn: a barrier of the ring tells only two
// phases apart, and the group would take the other group's data for its own.

static constexpr int TILE = 128, TILE_K = 64, GROUPS = 2, THREADS = 128 * (GROUPS + 1), CLUSTER = 1;
static constexpr int BOX_BYTES = TILE * 128;  // 128 rows of 64 elements

struct Shared {
    unsigned char stage[STAGES][2][BOX_BYTES];  // of a and of b
    unsigned char box[GROUPS][2][BOX_BYTES];    // left and right half of a tile of the addend, then of the result
    uint64 full[STAGES], empty[STAGES], added[GROUPS];
};

struct Ring {
    int slot = 0;
    uint32 parity = 0;
    MEMBER void advance(int steps) {
        for (slot += steps; slot >= STAGES; slot -= STAGES) parity ^= 1;
    }
};

// The matrix of a tile, and the tile's first row and column.
struct Tile {
    int matrix, row, column;

    // `tiles` of a matrix, counted along the rows of the triangle.
    MEMBER Tile(int work, int tiles) : matrix(work / tiles) {
        const int number = work % tiles;
        int above = (int)((sqrtf(8.0f * number + 1.0f) - 1.0f) * 0.5f);
        if (above * (above + 1) / 2 > number) --above;
        if ((above + 1) * (above + 2) / 2 <= number) ++above;
        row = above * TILE;
        column = (number - above * (above + 1) / 2) * TILE;
    }
};

DEVICE void produce(Shared &shared, const TensorMap &a, const TensorMap &b, int m, int steps, int tiles, int total) {
    Ring ring;
    for (int work = blockIdx.x; work < total; work += gridDim.x) {
        const Tile tile(work, tiles);
        for (int step = 0; step < steps; ++step, ring.advance(1)) {
            const uint32 full = shared_address(&shared.full[ring.slot]);
            barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
            barrier_expect(full, 2 * BOX_BYTES);
            load_box(a, step * TILE_K, tile.matrix * m + tile.row, shared_address(shared.stage[ring.slot][0]), full);
            load_box(b, step * TILE_K, tile.matrix * m + tile.column, shared_address(shared.stage[ring.slot][1]), full);
        }
    }
}

// Group `of` multiplies when one group has called sync and the other arrive.
DEVICE int turn(int of) { return 2 + GROUPS + of; }

// The sums of a tile; `sums[i]`: of rows 64 i to 64 i + 63. `is_last`: no tile follows.
DEVICE void accumulate(Shared &shared, Ring &ring, float (&sums)[2][TILE / 2], int steps, bool is_last) {
    int before = 0;
    for (int step = 0; step < steps; ++step, ring.advance(1)) {
        barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
        const uint32 stage = shared_address(shared.stage[ring.slot][0]);
        const uint32 a = operand(stage), below = operand(stage + BOX_BYTES / 2), b = operand(stage + BOX_BYTES);
        product_fence();
#pragma unroll
        for (int k = 0; k < TILE_K / 16; ++k) {
            multiply(sums[0], a + 2 * k, b + 2 * k, step > 0 || k > 0);
            multiply(sums[1], below + 2 * k, b + 2 * k, step > 0 || k > 0);
        }
        product_commit();
        product_wait<1>();  // the previous step is done
        if (step > 0 && threadIdx.x % 32 == 0) barrier_arrive(shared_address(&shared.empty[before]));
        before = ring.slot;
    }
    if (!is_last) named_barrier_arrive(turn(1 - threadIdx.x / 128), 256);
    product_wait<0>();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&shared.empty[before]));
}

// Where 8 elements of a row lie in a group's box; `chunk` counts them from the left.
DEVICE uint32 place(int row, int chunk) {
    return chunk / 8 * BOX_BYTES + row * 128 + (chunk % 8 ^ row % 8) * 16;
}

DEVICE void put(Shared &shared, int group, int row, int column, uint32 bits) {
    *(unsigned short *)(shared.box[group][0] + place(row, column / 8) + column % 8 * 2) = (unsigned short)bits;
}

// Stores the group's box as the tile at this row and column. All of its threads call it.
DEVICE void store_tile(Shared &shared, const TensorMap &out, int group, int row, int column) {
    fence_for_tma();
    named_barrier_sync(1 + group, 128);
    if (threadIdx.x % 128 != 0) return;
    for (int i = 0; i < 2; ++i) {
        store_box(out, column + i * 64, row, shared_address(shared.box[group][i]));
        store_commit();
    }
}

// Adds to the sums of a tile, rounds and stores them. For each 8 neighbouring columns, a thread holds two in row
// lane / 4 of its warp's 16 rows and two in the row 8 below. A square has 16 x 16 elements: four matrices of 8 x 8,
// the second one under the first, the others right of these.
DEVICE void finish(Shared &shared, const TensorMap &out, const Tile &tile, int m, const float (&sums)[2][TILE / 2],
                   float alpha, float beta, float gamma) {
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, matrix = lane / 8;
    const uint32 box = shared_address(shared.box[group][0]);
    const bool on_diagonal = tile.row == tile.column;
    uint32 words[2][TILE / 16][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int above = half * 64 + warp * 16;  // rows of the tile above this warp's
#pragma unroll
        for (int square = 0; square < TILE / 16; ++square) {
            uint32 old[4];
            if (ADDS) load_matrices(box + place(above + matrix % 2 * 8 + lane % 8, square * 2 + matrix / 2), old);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float *own = sums[half] + (square * 2 + i / 2) * 4 + i % 2 * 2;
                float x = own[0], y = own[1];
                if (ADDS) {
                    x = alpha * x + beta * from_half(old[i] & 0xffff);
                    y = alpha * y + beta * from_half(old[i] >> 16);
                    const int row = above + i % 2 * 8 + lane / 4, column = square * 16 + i / 2 * 8 + lane % 4 * 2;
                    if (on_diagonal && row == column) x += gamma;
                    if (on_diagonal && row == column + 1) y += gamma;
                }
                words[half][square][i] = to_half2(x, y);
            }
        }
    }
    named_barrier_sync(1 + group, 128);  // the addend is read, and the tile before is stored
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int above = half * 64 + warp * 16;
#pragma unroll
        for (int square = 0; square < TILE / 16; ++square) {
            const uint32(&x)[4] = words[half][square];
            const uint32 own = place(above + matrix % 2 * 8 + lane % 8, square * 2 + matrix / 2);
            const uint32 turned = place(square * 16 + matrix / 2 * 8 + lane % 8, above / 8 + matrix % 2);
            if (!on_diagonal || above > square * 16) store_matrices(box + own, x[0], x[1], x[2], x[3]);
            if (on_diagonal && above > square * 16) store_matrices_transposed(box + turned, x);
            if (on_diagonal && above == square * 16) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int row = above + i / 2 % 2 * 8 + lane / 4, column = above + i / 4 * 8 + lane % 4 * 2 + i % 2;
                    const uint32 bits = x[i / 2] >> i % 2 * 16;
                    if (row >= column) put(shared, group, row, column, bits);
                    if (row > column) put(shared, group, column, row, bits);
                }
            }
        }
    }
    store_tile(shared, out, group, tile.matrix * m + tile.row, tile.column);
    if (on_diagonal) return;
    if (threadIdx.x % 128 == 0) store_wait<0>();
    named_barrier_sync(1 + group, 128);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int square = 0; square < TILE / 16; ++square) {
            const int row = square * 16 + matrix / 2 * 8 + lane % 8, chunk = half * 8 + warp * 2 + matrix % 2;
            store_matrices_transposed(box + place(row, chunk), words[half][square]);
        }
    }
    store_tile(shared, out, group, tile.matrix * m + tile.column, tile.row);
}

DEVICE void consume(Shared &shared, const TensorMap &addend, const TensorMap &out, int m, int steps, int tiles,
                    int total, float alpha, float beta, float gamma) {
    const int group = threadIdx.x / 128;
    const uint32 added = shared_address(&shared.added[group]);
    Ring ring;
    ring.advance(group * steps);
    uint32 parity = 0;
    const int step = gridDim.x;
    for (int work = blockIdx.x + group * step; work < total; work += GROUPS * step, parity ^= 1) {
        const Tile tile(work, tiles);
        if (threadIdx.x % 128 == 0) {
            store_wait<0>();  // the box is free
            if (ADDS) {
                barrier_expect(added, 2 * BOX_BYTES);
                for (int i = 0; i < 2; ++i)
                    load_box(addend, tile.column + i * 64, tile.matrix * m + tile.row,
                             shared_address(shared.box[group][i]), added);
            }
        }
        if (work >= step) named_barrier_sync(turn(group), 256);
        float sums[2][TILE / 2];
        accumulate(shared, ring, sums, steps, work + step >= total);
        ring.advance((GROUPS - 1) * steps);
        if (ADDS) barrier_wait(added, parity);
        finish(shared, out, tile, m, sums, alpha, beta, gamma);
    }
    if (threadIdx.x % 128 == 0) store_wait<0>();
}

// Grid: at most one block per multiprocessor. The maps describe a and b [count * m, k], addend and out [count * m, m],
// in boxes of 128 x 64; m is a multiple of 128, k of 64. `steps` is k / 64; `tiles` are those of a matrix, `total` of
// all.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmetric_mm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                 const __grid_constant__ TensorMap addend, const __grid_constant__ TensorMap out, int m, int steps,
                 int tiles, int total, float alpha, float beta, float gamma) {
    DYNAMIC_SHARED(memory);
    Shared &shared = *(Shared *)memory;
    if (threadIdx.x == 0) {
        if (shared_address(&shared) % 1024 != 0) __trap();  // the swizzle depends on address bits
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&shared.full[i]), 1);
            barrier_init(shared_address(&shared.empty[i]), 4);  // the warps of a group
        }
        for (int i = 0; i < GROUPS; ++i) barrier_init(shared_address(&shared.added[i]), 1);
        barrier_init_fence();
        prefetch(a), prefetch(b), prefetch(addend), prefetch(out);
    }
    named_barrier_sync(1 + GROUPS, THREADS);
    wait_for_previous();
    let_next_start();

    if (threadIdx.x >= GROUPS * 128) {
        give_registers<40>();
        if (threadIdx.x == GROUPS * 128) produce(shared, a, b, m, steps, tiles, total);
        __syncwarp();
    } else {
        take_registers<232>();
        consume(shared, addend, out, m, steps, tiles, total, alpha, beta, gamma);
        __syncwarp();
    }
}
