// Instructions of sm_90a: barriers in shared memory, tile copies by the tensor memory accelerator (TMA), products of
// warpgroups (four warps), clusters of blocks. Addresses are byte addresses in shared memory.

typedef unsigned int uint32;
typedef unsigned long long uint64;

// A matrix in global memory and the boxes in which it is copied, as cuTensorMapEncodeTiled describes them.
struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

DEVICE uint32 shared_address(const void *p) { return (uint32)__cvta_generic_to_shared(p); }

// ---- barriers --------------------------------------------------------------------------------------------------------

DEVICE void barrier_init(uint32 barrier, uint32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the other blocks of the cluster and to the TMA.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives once, and adds `bytes` to what the phase waits for.
DEVICE void barrier_expect(uint32 barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once at the barrier with the same address in block `rank` of the cluster. It orders only the accesses of the
// TMA and of products to shared memory. With cluster scope, the compiler would flush all memory here.
DEVICE void barrier_arrive(uint32 barrier, uint32 rank) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier), "r"(rank) : "memory");
}

#define BARRIER_WAIT(name, acquire) \
    DEVICE void name(uint32 barrier, uint32 parity) { \
        uint32 over; \
        do { \
            asm volatile( \
                "{\n.reg .pred p;\n" \
                "mbarrier.try_wait.parity" acquire ".shared::cta.b64 p, [%1], %2;\n" \
                "selp.u32 %0, 1, 0, p;\n}" : "=r"(over) : "r"(barrier), "r"(parity) : "memory"); \
        } while (!over); \
    }

// Whether the phase of this parity is over, after a short wait at most.
DEVICE bool barrier_is_over(uint32 barrier, uint32 parity) {
    uint32 over;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}" : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
    return over;
}

// Waits until the phase of this parity is over. A new barrier counts as having finished a phase of parity 1.
BARRIER_WAIT(barrier_wait, "")

// The same with acquire at cluster scope: for data that other blocks sent to this block's shared memory.
BARRIER_WAIT(barrier_wait_after, ".acquire.cluster")

// Named barrier 1..15: waits for `threads` threads of the block, which are whole warps.
DEVICE void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- clusters --------------------------------------------------------------------------------------------------------

DEVICE uint32 cluster_rank() {
    uint32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Waits for all threads of the cluster.
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same in two steps: every thread has called cluster_arrive before a cluster_wait returns. The relaxed arrival
// orders no earlier writes, except those to barriers that barrier_init_fence covers.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address in block `rank` of the cluster of what is at `address` here.
DEVICE uint32 in_block(uint32 address, uint32 rank) {
    uint32 result;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
    return result;
}

// Sends 16 bytes to another block, both addresses `in_block` of it. They count for the barrier there.
DEVICE void send(uint32 address, uint32 barrier, float4 x) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::
                     "r"(address), "r"(barrier), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

// The same to the same address in block `rank`, for the barrier at `barrier` there.
DEVICE void send(uint32 address, uint32 rank, float4 x, uint32 barrier) {
    send(in_block(address, rank), in_block(barrier, rank), x);
}

// ---- launches that overlap -------------------------------------------------------------------------------------------

// Waits until all earlier launches on the stream are done and their writes visible, if the launch itself did not wait.
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next launch, if it allows overlap, take multiprocessors as they become free. Call it after
// wait_for_previous, since attention (decode_attention.py) reads before its own wait what is older than the launch that
// made its query. quantize_rows_sm90.cu calls it before: it makes no query, and the product of its codes waits first.
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- TMA -------------------------------------------------------------------------------------------------------------

DEVICE void prefetch(const TensorMap &map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// Copies `bytes` from global to shared memory and counts them for `barrier`. All are multiples of 16.
DEVICE void load_bulk(uint32 to, const void *from, uint32 bytes, uint32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                     "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier) : "memory");
}

// Copies the box of `map` that begins at column x, row y to shared memory; its bytes count for `barrier`. Elements
// outside the matrix are written as zeros and count too.
DEVICE void load_box(const TensorMap &map, int x, int y, uint32 to, uint32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
            "r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier) : "memory");
}

// Prefetches that box into the L2 cache.
DEVICE void prefetch_box(const TensorMap &map, int x, int y) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(x), "r"(y) : "memory");
}

// Copies a box to every block of the cluster whose bit is set in `blocks`, at the same addresses.
DEVICE void load_box(const TensorMap &map, int x, int y, uint32 to, uint32 barrier, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::
            "r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(blocks) : "memory");
}

// Copies shared memory to the box of `map` at column x, row y; elements outside the matrix are not written.
DEVICE void store_box(const TensorMap &map, int x, int y, uint32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::
                     "l"(&map), "r"(x), "r"(y), "r"(from) : "memory");
}
DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the last `PENDING` committed stores of this thread have read their shared memory.
template <int PENDING>
DEVICE void store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Orders this thread's writes to shared memory before reads by the TMA.
DEVICE void fence_for_tma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- products of warpgroups --------------------------------------------------------------------------------------------

// The matrix descriptor of an operand in shared memory: rows of 128 bytes in groups of eight, 1024 bytes apart, with
// the 16-byte chunks of a row permuted as by the TMA's 128-byte swizzle (chunk ^ row % 8). `operand` gives the lower
// half, OPERAND_HIGH is the upper. 32 bytes further along K: + 2.
DEVICE uint32 operand(uint32 address) { return (address >> 4 & 0x3fff) | 1 << 16; }
static constexpr uint32 OPERAND_HIGH = 1 << 30 | 1024 >> 4;

// Call before the first product that adds to registers which have been read or written since the last product.
DEVICE void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all but the last `PENDING` committed groups of products are done.
template <int PENDING>
DEVICE void product_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Tells the compiler that asynchronous products may read or write this register until here.
DEVICE void in_use(float &x) { asm volatile("" : "+f"(x)::"memory"); }
DEVICE void in_use(uint32 &x) { asm volatile("" : "+r"(x)::"memory"); }

template <int REGISTERS>
DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Stores four 8x8 matrices of 16-bit elements to shared memory. A lane holds two elements of each matrix in one word;
// lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void store_matrices(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::
                     "r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// The same with each matrix transposed.
DEVICE void store_matrices_transposed(uint32 address, const uint32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::
                     "r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// Loads four such matrices, as they are and transposed.
#define LOAD_MATRICES(name, transposed) \
    DEVICE void name(uint32 address, uint32 (&x)[4]) { \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" transposed ".shared.b16 {%0, %1, %2, %3}, [%4];" \
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory"); \
    }
LOAD_MATRICES(load_matrices, "")
LOAD_MATRICES(load_matrices_transposed, ".trans")

DEVICE uint32 shared_word(uint32 address) {
    uint32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
DEVICE uint4 shared_vector(uint32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}
// Loads 1, 2 or 4 words.
template <int WORDS>
DEVICE void shared_words(uint32 *to, uint32 address) {
    if constexpr (WORDS == 4) {
        const uint4 x = shared_vector(address);
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else if constexpr (WORDS == 2) {
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(address) : "memory");
    } else {
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(to[0]) : "r"(address) : "memory");
    }
}
// Loads a word that no thread writes any more: the compiler may move or drop the load.
DEVICE uint32 constant_word(uint32 address) {
    uint32 x;
    asm("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}
DEVICE void store_pair(uint32 address, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
