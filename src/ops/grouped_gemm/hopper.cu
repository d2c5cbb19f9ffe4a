// Grouped product on the tensor cores of Hopper (sm_90a): one block of three warpgroups an SM walks over output tiles of
// TILE_M x TILE_N. One thread of the first warpgroup copies operands by the tensor memory accelerator into a ring of
// STAGES slots, the other two multiply (64 rows each) and store. The ring holds the next tile's first slots by the time that
// the last one's products are stored.
//
// Constants: LAYOUT (0 Nt, 1 Nn, 2 Tn), TILE_N (256 or 128), CLUSTER (1, or 2: blocks of a pair lie one above the other,
// share B, and each copies half of it into both), OUT (bf16 or float), ACCUMULATE (Tn only).
// M, N, K below are those of the tile's product: Nt and Nn rows x n x k, Tn n x k x rows of the expert.
//
// A slot holds panels of 64 lines of 64 elements (128 bytes): line r with K contiguous, or, with R contiguous, line k
// (then the tensor core transposes). Each is one copy, with the 128-byte swizzle that wgmma reads.

#define TILE_M 128
#define TILE_K 64
#define STAGES 4
#define LINE 128                           // bytes, as all sizes of shared memory below: as long as the swizzle
#define WARPGROUP 128
#define CONSUMERS 2
#define THREADS (WARPGROUP * (1 + CONSUMERS))
#define PANEL (64 * LINE)
#define A_PANELS (TILE_M / 64)
#define B_PANELS (TILE_N / 64)
#define A_BYTES (A_PANELS * PANEL)
#define B_BYTES (B_PANELS * PANEL)
#define SLOT (A_BYTES + B_BYTES)
#define FRAGS (TILE_N / 8)
#define ROWS_A_STEP (TILE_M * CLUSTER)     // rows of M of a cluster's tiles
#define A_K_CONTIGUOUS (LAYOUT != 2)
#define B_K_CONTIGUOUS (LAYOUT == 0)
#define RING_ALIGN 1024
#define FULL 0xffffffffu
// Registers a thread: 128 * 40 + 256 * 232 = 384 * 168, what the launch bound leaves each. The accumulators are TILE_N / 2.
#define PRODUCER_REGISTERS 40
#define CONSUMER_REGISTERS 232
// Named barriers; 0 is __syncthreads.
#define BARRIER_CONSUMER 1                 // and the next
// Row tiles of a cluster that are walked before the next columns. 1, 4, 8 and 16 were measured on an H200: 4 and 8 are best, by
// 1 to 2 % over the six products of qwen3_30b_a3b's experts.
#define BAND 8
// Outputs of fp32 leave by way of shared memory, STAGED_ROW bytes of a row at a time, padded so that rows start in different banks.
#define STAGED (sizeof(OUT) == 4)
#define STAGED_ROW 256
#define STAGED_PITCH (STAGED_ROW + 16)
#define STAGED_BYTES (STAGED ? CONSUMERS * 64 * STAGED_PITCH : 0)

struct __align__(128) TensorMap { u64 opaque[16]; };

// ---- barriers in shared memory, clusters -----------------------------------------------------------
__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
// Arrives at the same barrier of block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 rank) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" :: "r"(barrier), "r"(rank) : "memory");
}
__device__ __forceinline__ bool barrier_done(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done != 0;
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    while (!barrier_done(barrier, parity)) {}
}
// The same for a whole warp. Lanes may learn of it at different times, and wgmma and bar.sync are for warps that have not
// parted: the compiler takes them as proof that the warp has not, and does not bring it together before them.
__device__ __forceinline__ void barrier_wait_warp(u32 barrier, u32 parity) {
    while (!__all_sync(FULL, barrier_done(barrier, parity))) {}
    __syncwarp();
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 cluster_rank() {
    u32 r;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(r));
    return r;
}
template <int N> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N)); }
template <int N> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N)); }
__device__ __forceinline__ void named_sync(int barrier, int threads) {
    asm volatile("barrier.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

// ---- copies ---------------------------------------------------------------------------------------
// One panel from coordinates (x, y, z) of the map's tensor; zeros where the tensor ends.
__device__ __forceinline__ void copy_panel(u32 to, const TensorMap& map, int x, int y, int z, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
        :: "r"(to), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier) : "memory");
}
// The same into the same place of all blocks of the cluster; each block's barrier counts its bytes.
__device__ __forceinline__ void copy_panel_to_all(u32 to, const TensorMap& map, int x, int y, int z, u32 barrier) {
    const u16 blocks = (1 << CLUSTER) - 1;
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;"
        :: "r"(to), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(blocks) : "memory");
}

// ---- wgmma ----------------------------------------------------------------------------------------
// Orders writes of this thread to shared memory before the tensor core's reads (another proxy).
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
// The compiler may not move uses of the accumulators across this.
__device__ __forceinline__ void pin(float acc[FRAGS][4]) {
    #pragma unroll
    for (int j = 0; j < FRAGS; ++j)
        #pragma unroll
        for (int c = 0; c < 4; ++c) asm volatile("" : "+f"(acc[j][c]) :: "memory");
}
// Shared-memory descriptor (PTX ISA, wgmma matrix descriptor), 128-byte swizzle: from eight lines to the next are 1024
// bytes; with R contiguous the next 64 columns are one panel on.
__device__ __forceinline__ u64 descriptor(u32 address) {
    constexpr u64 leading = PANEL >> 4, stride = (8 * LINE) >> 4, swizzle_128 = 1;
    return ((address & 0x3ffffu) >> 4) | (leading << 16) | (stride << 32) | (swizzle_128 << 62);
}
// Bytes from one depth step of 16 to the next.
#define STEP(k_contiguous) ((k_contiguous) ? 16 * 2 : 16 * LINE)

// acc[64 x TILE_N of the four warps] = A[64 x 16] B[16 x TILE_N], plus acc if `add`. Asynchronous.
__device__ __forceinline__ void wgmma_tile(float acc[FRAGS][4], u64 da, u64 db, int add) {
#define F4(j) "+f"(acc[j][0]), "+f"(acc[j][1]), "+f"(acc[j][2]), "+f"(acc[j][3])
#if TILE_N == 256
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "%128, %129, p, 1, 1, %131, %132;\n}"
        :
        F4(0), F4(1), F4(2), F4(3),
        F4(4), F4(5), F4(6), F4(7),
        F4(8), F4(9), F4(10), F4(11),
        F4(12), F4(13), F4(14), F4(15),
        F4(16), F4(17), F4(18), F4(19),
        F4(20), F4(21), F4(22), F4(23),
        F4(24), F4(25), F4(26), F4(27),
        F4(28), F4(29), F4(30), F4(31)
        : "l"(da), "l"(db), "r"(add), "n"(A_K_CONTIGUOUS ? 0 : 1), "n"(B_K_CONTIGUOUS ? 0 : 1));
#else
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, %67, %68;\n}"
        :
        F4(0), F4(1), F4(2), F4(3),
        F4(4), F4(5), F4(6), F4(7),
        F4(8), F4(9), F4(10), F4(11),
        F4(12), F4(13), F4(14), F4(15)
        : "l"(da), "l"(db), "r"(add), "n"(A_K_CONTIGUOUS ? 0 : 1), "n"(B_K_CONTIGUOUS ? 0 : 1));
#endif
#undef F4
}

// ---- tiles ----------------------------------------------------------------------------------------
// The walk of a cluster over its tiles: every warp does it by itself. Tiles are counted expert by expert (with Nt and Nn
// the rows that no expert has come last, with depth 0), in an expert columns first: blocks that run together share rows of A and
// the weights of one expert.
struct Walk {
    const int* offsets;
    int experts, rows, n, k, column_tiles, rank;
    int expert, begin, end;      // the expert of the last tile and its rows
    int first, last;             // Nt, Nn: its tiles
    int scanned, before;         // Nt, Nn: the 32 experts that were looked at, and the tiles before them
    int m0, m_end, n0, depth;    // this block's tile; m0 >= m_end: only the other block of the pair has one

    __device__ Walk(const int* offsets, int experts, int rows, int n, int k, int rank)
        : offsets(offsets), experts(experts), rows(rows), n(n), k(k), rank(rank), first(0), last(0), scanned(0), before(0) {
        column_tiles = (columns() + TILE_N - 1) / TILE_N;
    }
    __device__ __forceinline__ int columns() const { return LAYOUT == 2 ? k : n; }
    __device__ __forceinline__ int offset(int e) const { return min(max(offsets[e], 0), rows); }
    __device__ __forceinline__ int tiles_of(int length) const {
        return (max(length, 0) + ROWS_A_STEP - 1) / ROWS_A_STEP * column_tiles;
    }

    // Goes to tile t, which is not before the last one. False: there is none. To be called by whole warps.
    __device__ __forceinline__ bool to(int t) {
#if LAYOUT == 2
        const int each = tiles_of(n);
        expert = t / each;
        if (expert >= experts) return false;
        first = expert * each;
        last = first + each;
        place(t - first);
        begin = offset(expert);
        end = offset(expert + 1);
        m_end = n;
        depth = max(end - begin, 0);
#else
        if (t >= last && !find(t)) return false;
        place(t - first);
        m0 += begin;
        m_end = end;
        depth = expert < experts ? k : 0;
#endif
        return true;
    }
    __device__ __forceinline__ void place(int in_expert) {
        const int row_tiles = (last - first) / column_tiles;
        // In bands of row tiles, rows first: those that run together share few columns and few rows.
        const int top = in_expert / (BAND * column_tiles) * BAND, height = min(BAND, row_tiles - top);
        const int in_band = in_expert - top * column_tiles, column = in_band / height;
        m0 = ((top + in_band - column * height) * CLUSTER + rank) * TILE_M;
        n0 = column * TILE_N;
    }
    __device__ bool find(int t) {
        const int lane = threadIdx.x & 31;
        for (; scanned < experts; scanned += 32) {
            const int e = scanned + lane;
            const int from = e < experts ? offset(e) : 0, to = e < experts ? offset(e + 1) : 0;
            const int tiles = tiles_of(to - from);
            int sum = tiles;
            #pragma unroll
            for (int o = 1; o < 32; o <<= 1) {
                const int y = __shfl_up_sync(FULL, sum, o);
                if (lane >= o) sum += y;
            }
            const u32 reached = __ballot_sync(FULL, before + sum > t);
            if (reached) {
                const int owner = __ffs(reached) - 1;
                expert = scanned + owner;
                begin = __shfl_sync(FULL, from, owner);
                end = __shfl_sync(FULL, to, owner);
                last = before + __shfl_sync(FULL, sum, owner);
                first = last - __shfl_sync(FULL, tiles, owner);
                return true;
            }
            before += __shfl_sync(FULL, sum, 31);
        }
        expert = experts;
        begin = offset(experts);
        end = rows;
        first = before;
        last = first + tiles_of(end - begin);
        return t < last;
    }
};

// Place in the ring, and how often it was gone round.
struct Cursor {
    int slot = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ void produce(Walk& walk, const TensorMap& map_a, const TensorMap& map_b, u32 ring, u32 full, u32 empty) {
    Cursor at;
    const int clusters = gridDim.x / CLUSTER;
    for (int t = blockIdx.x / CLUSTER; walk.to(t); t += clusters) {
        if ((threadIdx.x & 31) == 0) {
            // A block without a tile needs no A. With Tn it is copied all the same (its columns lie past the end: zeros), as
            // NVRTC 13.0 sets the first panel's coordinate under the wrong predicate there if the copy hangs on this.
            const bool mine = LAYOUT == 2 || walk.m0 < walk.m_end;
            // Depth goes along the rows of all experts with Tn, and B of Nt and Nn is one matrix an expert.
            const int depth0 = LAYOUT == 2 ? walk.begin : 0, matrix = LAYOUT == 2 ? 0 : walk.expert;
            for (int d = 0; d < walk.depth; d += TILE_K) {
                const int depth = depth0 + d;
                const u32 slot = ring + at.slot * SLOT, filled = full + at.slot * 8;
                barrier_wait(empty + at.slot * 8, at.parity ^ 1);
                barrier_expect(filled, B_BYTES + (mine ? A_BYTES : 0));
                if (mine) {
                    #pragma unroll
                    for (int p = 0; p < A_PANELS; ++p) {
                        const int r = walk.m0 + p * 64;
                        copy_panel(slot + p * PANEL, map_a, A_K_CONTIGUOUS ? depth : r, A_K_CONTIGUOUS ? r : depth, 0, filled);
                    }
                }
                #pragma unroll
                for (int i = 0; i < B_PANELS / CLUSTER; ++i) {
                    const int p = walk.rank * (B_PANELS / CLUSTER) + i, r = walk.n0 + p * 64;
                    const int x = B_K_CONTIGUOUS ? depth : r, y = B_K_CONTIGUOUS ? r : depth;
                    if (CLUSTER == 1) copy_panel(slot + A_BYTES + p * PANEL, map_b, x, y, matrix, filled);
                    else copy_panel_to_all(slot + A_BYTES + p * PANEL, map_b, x, y, matrix, filled);
                }
                at.next();
            }
        }
        __syncwarp();
    }
}

// Lines from `left` on of this warpgroup's panel of A and of B become zeros: they are the next expert's rows.
__device__ __forceinline__ void clear_lines(u32 a, u32 b, int left, int group) {
    const int lines = TILE_K - left, chunks = LINE / 16;
    for (int i = threadIdx.x % WARPGROUP; i < (1 + B_PANELS) * lines * chunks; i += WARPGROUP) {
        const int panel = i / (lines * chunks), rest = i - panel * (lines * chunks);
        const u32 at = (panel ? b + (panel - 1) * PANEL : a) + left * LINE + rest * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" :: "r"(at), "r"(0) : "memory");
    }
    proxy_fence();
    __syncwarp();
    named_sync(BARRIER_CONSUMER + group, WARPGROUP);
}

// ---- stores ---------------------------------------------------------------------------------------
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Copies, or with ACCUMULATE adds: every element is added to once in a launch, so the order of rows changes no bit.
// (Sums below the least normal number become zero.)
__device__ __forceinline__ void bulk_store(float* to, u32 from, u32 bytes) {
    if (ACCUMULATE)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
            :: "l"(to), "r"(from), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
            :: "l"(to), "r"(from), "r"(bytes) : "memory");
}
// A warp's 16 rows of fp32 by way of its part of shared memory; part of a row is one copy. Accumulating in the L2 cache
// takes 5 % off the fp32 weight gradients of qwen3_30b_a3b (H200). With bf16 it is no faster than `store_tile`.
__device__ __forceinline__ void store_tile(const float acc[FRAGS][4], u32 stage, float* out, int row0, int row_end, int n0, int columns) {
    constexpr int PASS = STAGED_ROW / 4;  // columns
    const int lane = threadIdx.x & 31, r = row0 + lane;
    const u32 mine = stage + (lane >> 2) * STAGED_PITCH + (lane & 3) * 8;
    #pragma unroll
    for (int c0 = 0; c0 < TILE_N; c0 += PASS) {
        bulk_wait_read();
        __syncwarp();
        #pragma unroll
        for (int j = 0; j < PASS / 8; ++j)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* const from = acc[c0 / 8 + j] + 2 * half;
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};"
                    :: "r"(mine + half * (8 * STAGED_PITCH) + j * 32), "f"(from[0]), "f"(from[1]) : "memory");
            }
        proxy_fence();
        __syncwarp();
        const int there = min(columns - n0 - c0, PASS);
        if (lane < 16 && r < row_end && there > 0)
            bulk_store(out + (i64)r * columns + n0 + c0, stage + lane * STAGED_PITCH, there * 4);
        bulk_commit();
    }
}
// Four lanes hold four words each, lane q word i of place (i, q): afterwards lane q has those of (q, 0..3).
template <typename T> __device__ __forceinline__ void transpose(T w[4]) {
    const int lane = threadIdx.x & 3;
    #pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const bool odd = lane & 1;
        const T got = __shfl_xor_sync(FULL, odd ? w[i] : w[i + 1], 1);
        if (odd) w[i] = got; else w[i + 1] = got;
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
        const bool high = lane & 2;
        const T got = __shfl_xor_sync(FULL, high ? w[i] : w[i + 2], 2);
        if (high) w[i] = got; else w[i + 2] = got;
    }
}

// Accumulator c of a fragment: row lane/4 (+8 for c >= 2), columns 2*(lane%4) + (c & 1). Lanes of a row exchange
// theirs, so that each stores eight columns of one fragment.
__device__ __forceinline__ void store_tile(const float acc[FRAGS][4], u32, bf16* out, int row0, int row_end, int n0, int columns) {
    const int lane = threadIdx.x & 31;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row0 + half * 8 + (lane >> 2);
        bf16* const line = out + (i64)r * columns;
        #pragma unroll
        for (int j = 0; j < FRAGS; j += 4) {
            const int c = n0 + (j + (lane & 3)) * 8;
            const bool valid = r < row_end && c < columns;
#if ACCUMULATE
            float x[4], y[4], v[8];
            if (valid) load8(line + c, v);
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[i] = acc[j + i][2 * half];
                y[i] = acc[j + i][2 * half + 1];
            }
            transpose(x);
            transpose(y);
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                v[2 * i] += x[i];
                v[2 * i + 1] += y[i];
            }
            if (valid) store8(line + c, v);
#else
            u32 w[4];
            #pragma unroll
            for (int i = 0; i < 4; ++i) w[i] = pack_bf16(acc[j + i][2 * half], acc[j + i][2 * half + 1]);
            transpose(w);
            if (valid) *reinterpret_cast<uint4*>(line + c) = make_uint4(w[0], w[1], w[2], w[3]);
#endif
        }
    }
}
__device__ __forceinline__ void store_zeros(OUT* out, int row0, int row_end, int n0, int columns) {
    const float zeros[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    for (int i = threadIdx.x % WARPGROUP; i < 64 * FRAGS; i += WARPGROUP) {
        const int r = row0 + i / FRAGS, c = n0 + i % FRAGS * 8;
        if (r < row_end && c < columns) store8(out + (i64)r * columns + c, zeros);
    }
}

// One arrival a warp at the barrier of every block of the cluster: each block's copies wait for all that they overwrite.
__device__ __forceinline__ void release(u32 empty) {
    const int lane = threadIdx.x & 31;
    if (lane < CLUSTER) barrier_arrive(empty, lane);
}

__device__ __forceinline__ void consume(Walk& walk, OUT* d, u32 ring, u32 full, u32 empty) {
    const int group = threadIdx.x / WARPGROUP - 1, warp = (threadIdx.x / 32) & 3;
    const int clusters = gridDim.x / CLUSTER, columns = walk.columns();
    Cursor at;
    float acc[FRAGS][4];
    for (int t = blockIdx.x / CLUSTER; walk.to(t); t += clusters) {
        OUT* const out = LAYOUT == 2 ? d + (i64)walk.expert * walk.n * walk.k : d;
        const int row0 = walk.m0 + group * 64;
        if (walk.depth == 0) {
            if (!ACCUMULATE) store_zeros(out, row0, walk.m_end, walk.n0, columns);
            continue;
        }
        const int steps = (walk.depth + TILE_K - 1) / TILE_K;
        if (walk.m0 >= walk.m_end) {
            for (int s = 0; s < steps; ++s) {
                barrier_wait_warp(full + at.slot * 8, at.parity);
                release(empty + at.slot * 8);
                at.next();
            }
            continue;
        }
        pin(acc);
        u32 last = 0;   // the barrier of the slot that the last products read
        for (int s = 0; s < steps; ++s) {
            const u32 slot = ring + at.slot * SLOT, a = slot + group * PANEL, b = slot + A_BYTES;
            barrier_wait_warp(full + at.slot * 8, at.parity);
#if LAYOUT == 2
            const int left = walk.depth - s * TILE_K;
            if (left < TILE_K) clear_lines(a, b, left, group);
#endif
            const u64 da = descriptor(a), db = descriptor(b);
            wgmma_fence();
            #pragma unroll
            for (int kk = 0; kk < TILE_K / 16; ++kk)
                wgmma_tile(acc, da + kk * (STEP(A_K_CONTIGUOUS) >> 4), db + kk * (STEP(B_K_CONTIGUOUS) >> 4), s | kk);
            wgmma_commit();
            wgmma_wait<1>();
            if (s > 0) release(last);
            last = empty + at.slot * 8;
            at.next();
        }
        wgmma_wait<0>();
        pin(acc);
        release(last);
        store_tile(acc, ring + STAGES * SLOT + (group * 4 + warp) * (16 * STAGED_PITCH), out, row0 + warp * 16, walk.m_end, walk.n0, columns);
    }
    if (STAGED) bulk_wait();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) grouped_gemm_hopper(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const int* offsets, OUT* d,
    int experts, int rows, int n, int k) {
    extern __shared__ __align__(RING_ALIGN) u8 shared[];
    const u32 ring = smem_addr(shared), full = ring + STAGES * SLOT + STAGED_BYTES, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, CLUSTER * CONSUMERS * (WARPGROUP / 32));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_sync();
    Walk walk(offsets, experts, rows, n, k, CLUSTER == 1 ? 0 : cluster_rank());
    if (threadIdx.x < WARPGROUP) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x < 32) produce(walk, map_a, map_b, ring, full, empty);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        consume(walk, d, ring, full, empty);
    }
    // A block of a pair stays until the other no longer writes to its shared memory.
    cluster_sync();
}
