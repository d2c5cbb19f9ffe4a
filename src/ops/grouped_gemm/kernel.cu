// Grouped product on tensor cores, one output tile of TILE_M x TILE_N a block of eight warps.
// Hopper has hopper.cu.
//
// Constants: LAYOUT (0 Nt, 1 Nn, 2 Tn), TILE_N (256 or 128), OUT (bf16 or float), ACCUMULATE (Tn only). Products are mma.sync
// m16n8k16, warps 2 x 4.
// M, N, K below are those of the tile's product: Nt and Nn rows x n x k, Tn n x k x rows of the expert.
//
// Operands pass through a ring of STAGES slots filled by cp.async. A slot holds lines of 64 elements (128 bytes):
// line r with K contiguous, or, with R contiguous, line k of each panel of 64 (then the tensor core transposes).
// The 16-byte chunk c of line l lies at c ^ (l & 7), so that eight lines at one chunk, which is what ldmatrix reads, hit
// all banks once. Slots start at multiples of 1024 bytes, where the swizzle repeats.

#define TILE_M 128
#define TILE_K 64
#define LINE 64
#define STAGES 3
#define THREADS 256
#define WARP_M 64
#define WARP_N (TILE_N / 4)
#define FRAGS_M (WARP_M / 16)
#define FRAGS_N (WARP_N / 16)   // pairs of n8 fragments
#define A_K_CONTIGUOUS (LAYOUT != 2)
#define B_K_CONTIGUOUS (LAYOUT == 0)
#define A_TILE (TILE_M * TILE_K)
#define B_TILE (TILE_N * TILE_K)
#define SLOT (A_TILE + B_TILE)
#define PANEL (LINE * TILE_K)   // elements of 64 columns, R contiguous
#define AHEAD 2                 // tiles whose copies are under way while one is multiplied
#define RING_ALIGN 1024
#define FULL 0xffffffffu

// One thread's part in copying one operand's tiles: R lines or columns, TILE_K deep.
template <int R, bool K_CONTIGUOUS> struct Loader {
    static constexpr int CHUNKS = R * TILE_K / 8 / THREADS;            // 16-byte chunks a thread copies
    static constexpr int PER_LINE = K_CONTIGUOUS ? TILE_K / 8 : R / 8;  // chunks of a line
    static constexpr int LINES = THREADS / PER_LINE;                   // lines between a thread's chunks: 8, 16, 32
    const bf16* safe;   // a legal address for chunks that are zeros
    const bf16* at;     // this thread's first chunk of the next tile
    i64 step, advance;  // elements between chunks, between tiles
    u32 there;          // bit i: chunk i lies inside R
    int k;              // depth of the first chunk in the tile
    int slot;           // its place in the slot, in elements

    // `matrix` is the operand's whole tensor; its element (r, k) lies at origin + r*ld + k or origin + k*ld + r.
    __device__ Loader(const bf16* matrix, i64 origin, int ld, int r0, int r_end) {
        const int line = threadIdx.x / PER_LINE, chunk = threadIdx.x % PER_LINE;
        safe = matrix;
        slot = chunk / 8 * PANEL + line * LINE + (((chunk & 7) ^ (line & 7)) * 8);
        step = (i64)LINES * ld;
        there = 0u;
        if (K_CONTIGUOUS) {
            k = chunk * 8;
            at = matrix + origin + (i64)(r0 + line) * ld + k;
            advance = TILE_K;
            #pragma unroll
            for (int i = 0; i < CHUNKS; ++i) there |= (u32)(r0 + line + i * LINES < r_end) << i;
        } else {
            k = line;
            at = matrix + origin + (i64)line * ld + r0 + chunk * 8;
            advance = (i64)TILE_K * ld;
            there = r0 + chunk * 8 < r_end ? FULL : 0u;
        }
    }
    // Starts the copy of the next tile, of which `k_left` elements of depth exist; the rest becomes zeros.
    __device__ __forceinline__ void load(bf16* tile, int k_left) {
        const bf16* p = at;
        #pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            const bool deep = k + (K_CONTIGUOUS ? 0 : i * LINES) < k_left;
            const bool valid = deep && ((there >> i) & 1u);
            cp_async16_zfill(tile + slot + i * LINES * LINE, valid ? p : safe, valid);
            p += step;
        }
        at += advance;
    }
};

// Fragments of depth step kk (16 of TILE_K) from a slot; `tile` is a shared-memory address in bytes.
__device__ __forceinline__ void load_a(u32 f[FRAGS_M][4], u32 tile, int warp_m, int lane, int kk) {
    #pragma unroll
    for (int i = 0; i < FRAGS_M; ++i) {
        if (A_K_CONTIGUOUS) {
            const int l = warp_m * WARP_M + i * 16 + (lane & 15), c = kk * 2 + (lane >> 4);
            ldsm_x4(f[i], tile + l * (LINE * 2) + ((c ^ (lane & 7)) << 4));
        } else {  // one panel a warp row
            const int l = kk * 16 + (lane & 7) + (lane >> 4) * 8, c = i * 2 + ((lane >> 3) & 1);
            ldsm_x4_t(f[i], tile + warp_m * (PANEL * 2) + l * (LINE * 2) + ((c ^ (lane & 7)) << 4));
        }
    }
}
__device__ __forceinline__ void load_b(u32 f[FRAGS_N][4], u32 tile, int warp_n, int lane, int kk) {
    #pragma unroll
    for (int i = 0; i < FRAGS_N; ++i) {
        if (B_K_CONTIGUOUS) {
            const int l = warp_n * WARP_N + i * 16 + (lane & 7) + (lane >> 4) * 8, c = kk * 2 + ((lane >> 3) & 1);
            ldsm_x4(f[i], tile + l * (LINE * 2) + ((c ^ (lane & 7)) << 4));
        } else {
            const int l = kk * 16 + (lane & 15), c = warp_n * (WARP_N / 8) + i * 2 + (lane >> 4);
            ldsm_x4_t(f[i], tile + (c >> 3) * (PANEL * 2) + l * (LINE * 2) + (((c & 7) ^ (lane & 7)) << 4));
        }
    }
}

__device__ __forceinline__ void store2(bf16* p, float x, float y) { *reinterpret_cast<u32*>(p) = pack_bf16(x, y); }
__device__ __forceinline__ void store2(float* p, float x, float y) { *reinterpret_cast<float2*>(p) = make_float2(x, y); }
__device__ __forceinline__ float2 load2(const bf16* p) {
    const u32 v = *reinterpret_cast<const u32*>(p);
    return make_float2(bf16_lo(v), bf16_hi(v));
}
__device__ __forceinline__ float2 load2(const float* p) { return *reinterpret_cast<const float2*>(p); }

// The rows of row tile `target`: tiles are counted expert by expert, then over the padding rows at the end.
struct Rows { int expert, begin, end; };  // expert == experts: padding

__device__ __forceinline__ Rows find_rows(const int* offsets, int experts, int rows, int target) {
    const int lane = threadIdx.x & 31;
    int before = 0;
    for (int first = 0; first < experts; first += 32) {
        const int e = first + lane;
        const int begin = e < experts ? min(max(offsets[e], 0), rows) : 0;
        const int end = e < experts ? min(max(offsets[e + 1], 0), rows) : 0;
        const int tiles = (max(end - begin, 0) + TILE_M - 1) / TILE_M;
        int sum = tiles;
        #pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const int y = __shfl_up_sync(FULL, sum, o);
            if (lane >= o) sum += y;
        }
        const u32 reached = __ballot_sync(FULL, before + sum > target);
        if (reached) {
            const int owner = __ffs(reached) - 1;
            const int skipped = target - before - __shfl_sync(FULL, sum - tiles, owner);
            return {first + owner, __shfl_sync(FULL, begin, owner) + skipped * TILE_M, __shfl_sync(FULL, end, owner)};
        }
        before += __shfl_sync(FULL, sum, 31);
    }
    return {experts, min(max(offsets[experts], 0), rows) + (target - before) * TILE_M, rows};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) grouped_gemm(
    const int* offsets, const bf16* a, const bf16* b, OUT* d, int experts, int rows, int n, int k) {
    extern __shared__ __align__(16) unsigned char shared[];
    bf16* const ring = reinterpret_cast<bf16*>(shared + (0u - smem_addr(shared)) % RING_ALIGN);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int warp_m = warp >> 2, warp_n = warp & 3;

    // Column tiles run fastest: blocks that run together share rows of A and the weights of one expert.
    const int columns = LAYOUT == 2 ? k : n;
    const int column_tiles = (columns + TILE_N - 1) / TILE_N;
    const int row_tile = blockIdx.x / column_tiles, n0 = (blockIdx.x % column_tiles) * TILE_N;
#if LAYOUT == 2
    const int row_tiles = (n + TILE_M - 1) / TILE_M;
    const int e = row_tile / row_tiles;
    const int m0 = (row_tile % row_tiles) * TILE_M, m_end = n;
    const int begin = min(max(offsets[e], 0), rows), depth = min(max(offsets[e + 1], 0), rows) - begin;
    #if ACCUMULATE
    if (depth <= 0) return;  // d stays as it is
    #endif
    OUT* const out = d + (i64)e * n * k;
    Loader<TILE_M, false> load_m(a, (i64)begin * n, n, m0, m_end);
    Loader<TILE_N, false> load_n(b, (i64)begin * k, k, n0, columns);
#else
    const Rows tile = find_rows(offsets, experts, rows, row_tile);
    const int m0 = tile.begin, m_end = tile.end, depth = k;
    OUT* const out = d;
    if (tile.expert == experts) {
        const float zeros[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        for (int i = threadIdx.x; i < TILE_M * (TILE_N / 8); i += THREADS) {
            const int r = m0 + i / (TILE_N / 8), c = n0 + i % (TILE_N / 8) * 8;
            if (r < m_end && c < columns) store8(out + (i64)r * columns + c, zeros);
        }
        return;
    }
    Loader<TILE_M, true> load_m(a, 0, k, m0, m_end);
    Loader<TILE_N, B_K_CONTIGUOUS> load_n(b, (i64)tile.expert * n * k, B_K_CONTIGUOUS ? k : n, n0, columns);
#endif
    const int tiles = (max(depth, 0) + TILE_K - 1) / TILE_K;

    // Copies run AHEAD tiles before the products. Those of tile t go to slot t % STAGES. A group is committed for every t, empty beyond the last, so that
    // the count of groups in flight tells which tile has arrived.
    int k_left = depth;
    #pragma unroll
    for (int t = 0; t < AHEAD; ++t) {
        if (t < tiles) {
            load_m.load(ring + t * SLOT, k_left);
            load_n.load(ring + t * SLOT + A_TILE, k_left);
        }
        k_left -= TILE_K;
        cp_async_commit();
    }

    float acc[FRAGS_M][FRAGS_N * 2][4];
    #pragma unroll
    for (int i = 0; i < FRAGS_M; ++i)
        #pragma unroll
        for (int j = 0; j < FRAGS_N * 2; ++j)
            #pragma unroll
            for (int c = 0; c < 4; ++c) acc[i][j][c] = 0.f;

    const u32 ring_addr = smem_addr(ring);
    u32 fa[2][FRAGS_M][4], fb[2][FRAGS_N][4];
    int read = 0, write = AHEAD;  // slots
    cp_async_wait<AHEAD - 1>();       // tile 0 is here
    __syncthreads();
    load_a(fa[0], ring_addr, warp_m, lane, 0);
    load_b(fb[0], ring_addr + A_TILE * 2, warp_n, lane, 0);

    for (int t = 0; t < tiles; ++t) {
        const u32 slot = ring_addr + read * (SLOT * 2);
        #pragma unroll
        for (int kk = 0; kk < TILE_K / 16; ++kk) {
            if (kk + 1 < TILE_K / 16) {
                load_a(fa[(kk + 1) & 1], slot, warp_m, lane, kk + 1);
                load_b(fb[(kk + 1) & 1], slot + A_TILE * 2, warp_n, lane, kk + 1);
            } else {
                // Tile t+1 is here once at most AHEAD-1 of the AHEAD+1+t groups are in flight. After the barrier
                // no warp reads slot `read` any more: the next round may overwrite it. (Beyond the last tile
                // the fragments are stale and unused.)
                cp_async_wait<AHEAD - 1>();
                __syncthreads();
                read = read + 1 == STAGES ? 0 : read + 1;
                const u32 next = ring_addr + read * (SLOT * 2);
                load_a(fa[0], next, warp_m, lane, 0);
                load_b(fb[0], next + A_TILE * 2, warp_n, lane, 0);
            }
            if (kk == 0) {
                // The slot of tile t-1, which the barrier of the last round freed.
                if (t + AHEAD < tiles) {
                    load_m.load(ring + write * SLOT, k_left);
                    load_n.load(ring + write * SLOT + A_TILE, k_left);
                }
                k_left -= TILE_K;
                cp_async_commit();
                write = write + 1 == STAGES ? 0 : write + 1;
            }
            #pragma unroll
            for (int i = 0; i < FRAGS_M; ++i)
                #pragma unroll
                for (int j = 0; j < FRAGS_N; ++j) {
                    mma_16816(acc[i][2 * j], fa[kk & 1][i], fb[kk & 1][j][0], fb[kk & 1][j][1]);
                    mma_16816(acc[i][2 * j + 1], fa[kk & 1][i], fb[kk & 1][j][2], fb[kk & 1][j][3]);
                }
        }
    }
    cp_async_wait<0>();

    // Accumulator c of a fragment: row lane/4 (+8 for c >= 2), columns 2*(lane%4) + (c & 1).
    #pragma unroll
    for (int i = 0; i < FRAGS_M; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = m0 + warp_m * WARP_M + i * 16 + half * 8 + (lane >> 2);
            if (r >= m_end) continue;
            OUT* const line = out + (i64)r * columns;
            #pragma unroll
            for (int j = 0; j < FRAGS_N * 2; ++j) {
                const int c = n0 + warp_n * WARP_N + j * 8 + (lane & 3) * 2;
                if (c >= columns) continue;
                float x = acc[i][j][2 * half], y = acc[i][j][2 * half + 1];
#if ACCUMULATE
                const float2 old = load2(line + c);
                x += old.x;
                y += old.y;
#endif
                store2(line + c, x, y);
            }
        }
}
