// Shared by the attention kernels: tiles of bf16 rows in shared memory, products of tiles, positions, dropout.
//
// A tile row holds D values (HEAD_DIM of a query or key, HEAD_DIM_V of a value) and one unused 16-byte piece. The
// row stride is an odd number of such pieces, so the eight rows that one ldmatrix phase reads lie in eight
// different bank groups.
// Heads whose width is no multiple of 16 are PADDING values narrower in memory: their tiles are filled up with zeros.
#ifndef PADDING
#define PADDING 0
#endif
constexpr int MEM_DIM = HEAD_DIM - PADDING, MEM_DIM_V = HEAD_DIM_V - PADDING;   // of a head in memory
constexpr int pieces(int d) { return d / 8; }                // 16-byte pieces of a row
constexpr int row_bytes(int d) { return (pieces(d) + 1) * 16; }
constexpr int steps(int d) { return d / 16; }                // mma steps along a row
constexpr int QK_BYTES = row_bytes(HEAD_DIM);                // of a tile row
constexpr int V_BYTES = row_bytes(HEAD_DIM_V);
// Heads too wide for one block's registers: WIDE blocks (1: one) form the same scores, each with a part of the columns of o,
// dq, dk and dv.
#ifndef WIDE
#define WIDE 1
#endif
constexpr int PART_QK = HEAD_DIM / WIDE, PART_V = HEAD_DIM_V / WIDE;

// The block's index, read anew: what is computed from it after the main loop takes no registers during it (the
// kernels use all 255).
__device__ __forceinline__ int block_again() {
    int x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}

// Global positions of the query rows: two chunks of the sequence.
struct Rows {
    int start0, len0, start1;
    __device__ __forceinline__ int position(int i) const { return i < len0 ? start0 + i : start1 + (i - len0); }
    // Smallest and largest position of rows a..=b (each chunk ascends).
    __device__ __forceinline__ int lowest(int a, int b) const {
        const int p = position(a);
        return a < len0 && b >= len0 ? min(p, start1) : p;
    }
    __device__ __forceinline__ int highest(int a, int b) const {
        const int p = position(b);
        return a < len0 && b >= len0 ? max(p, position(len0 - 1)) : p;
    }
#if WINDOW
    // First key that one of rows a..=b sees.
    __device__ __forceinline__ int first_seen(int a, int b) const { return max(lowest(a, b) - (WINDOW - 1), 0); }
#endif
};

// Which query rows of which head a block of the forward and dq kernels owns: heads first, late rows (the
// heaviest) before early ones.
template <int ROWS>
struct QueryBlock {
    int head_of_all, row0;                       // b * q_heads + h
    i64 first;                                   // row * q_heads + head where this sequence's head begins in q and o
    int kv_row, kv_head;                         // first row of k in this sequence
    __device__ __forceinline__ QueryBlock(int block, int batch, int q_len, int kv_len, int q_heads, int kv_heads) {
        const int heads = batch * q_heads;
        head_of_all = block % heads;
        row0 = ((q_len + ROWS - 1) / ROWS - 1 - block / heads) * ROWS;
        const int b = head_of_all / q_heads, h = head_of_all % q_heads;
        first = (i64)b * q_len * q_heads + h;
        kv_row = b * kv_len;
        kv_head = h / (q_heads / kv_heads);
    }
};

// Starts the copy of rows row0 .. row0+ROWS of a matrix with `rows` rows, `stride` elements apart. In place of
// rows beyond the end come zeros (ZERO), or copies of the last row, which are cheaper and do where those rows
// are masked or not stored.
template <int D, int ROWS, int THREADS, bool ZERO>
__device__ __forceinline__ void load_rows(u8* tile, const bf16* matrix, int row0, int rows, int stride) {
    constexpr int PIECES = pieces(D), STEP = THREADS / PIECES;  // rows a pass
    const int r = threadIdx.x / PIECES, c = threadIdx.x % PIECES;
    if (THREADS % PIECES != 0 && r >= STEP) return;
    const bool there = !PADDING || c * 8 < D - PADDING;
    const u8* src = reinterpret_cast<const u8*>(matrix + (there ? c * 8 : 0));
    u8* dst = tile + r * row_bytes(D) + c * 16;
    #pragma unroll
    for (int i = 0; i < ROWS; i += STEP) {
        if (ROWS % STEP != 0 && r + i >= ROWS) break;
        const int row = row0 + r + i;
        const u8* from = src + (i64)min(row, rows - 1) * (stride * 2);
        if (ZERO || PADDING)
            cp_async16_zfill(dst + i * row_bytes(D), from, (!ZERO || row < rows) && there);
        else
            cp_async16(dst + i * row_bytes(D), from);
    }
}

// Byte offset that a lane passes to ldmatrix for a 16x16 block: as operand A, or transposed as B.
template <int D>
__device__ __forceinline__ u32 lane_rows(int lane) { return (lane & 15) * row_bytes(D) + (lane >> 4) * 16; }
// The same for B given by its columns (rows of the tile are n).
template <int D>
__device__ __forceinline__ u32 lane_cols(int lane) {
    return ((lane & 7) + (lane >> 4) * 8) * row_bytes(D) + ((lane >> 3) & 1) * 16;
}

// acc[M*16, N] = A B^T; A rows at `a`, B rows at `b` (both with the lane's offset), over D columns.
template <int D, int M, int N>
__device__ __forceinline__ void scores(float (&acc)[M][N / 8][4], u32 a, u32 b) {
    #pragma unroll
    for (int m = 0; m < M; ++m)
        #pragma unroll
        for (int n = 0; n < N / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.f;
    #pragma unroll
    for (int k = 0; k < steps(D); ++k) {
        u32 fa[M][4];
        #pragma unroll
        for (int m = 0; m < M; ++m) ldsm_x4(fa[m], a + m * 16 * row_bytes(D) + k * 32);
        #pragma unroll
        for (int n = 0; n < N / 16; ++n) {
            u32 fb[4];
            ldsm_x4(fb, b + n * 16 * row_bytes(D) + k * 32);
            #pragma unroll
            for (int m = 0; m < M; ++m) {
                mma_16816(acc[m][2 * n], fa[m], fb[0], fb[1]);
                mma_16816(acc[m][2 * n + 1], fa[m], fb[2], fb[3]);
            }
        }
    }
}

// acc[M*16, D] += bf16(P) B; P [M*16, K] in registers, B rows (K of them, of a tile of ROW columns) at `b` with lane_rows.
template <int D, int M, int K, int ROW = D>
__device__ __forceinline__ void accumulate(float (&acc)[M][D / 8][4], const float (&p)[M][K / 8][4], u32 b) {
    #pragma unroll
    for (int k = 0; k < K / 16; ++k) {
        u32 fa[M][4];
        #pragma unroll
        for (int m = 0; m < M; ++m) {
            fa[m][0] = pack_bf16(p[m][2 * k][0], p[m][2 * k][1]);
            fa[m][1] = pack_bf16(p[m][2 * k][2], p[m][2 * k][3]);
            fa[m][2] = pack_bf16(p[m][2 * k + 1][0], p[m][2 * k + 1][1]);
            fa[m][3] = pack_bf16(p[m][2 * k + 1][2], p[m][2 * k + 1][3]);
        }
        #pragma unroll
        for (int n = 0; n < steps(D); ++n) {
            u32 fb[4];
            ldsm_x4_t(fb, b + k * 16 * row_bytes(ROW) + n * 32);
            #pragma unroll
            for (int m = 0; m < M; ++m) {
                mma_16816(acc[m][2 * n], fa[m], fb[0], fb[1]);
                mma_16816(acc[m][2 * n + 1], fa[m], fb[2], fb[3]);
            }
        }
    }
}

// Rounds a warp's 16 rows to bf16 and writes those below `rows` (row0: the first one's index), by way of
// the warp's own 16 tile rows at `tile`, so that stores are 16 bytes and contiguous.
template <int D>
__device__ __forceinline__ void store_rows(
    u8* tile, const float (&acc)[D / 8][4], float factor0, float factor8, bf16* matrix, int row0, int rows, int stride) {
    constexpr int PIECES = pieces(D), ROW_BYTES = row_bytes(D);
    const int lane = threadIdx.x & 31;
    __syncwarp();                                // the warp's other lanes may still read these rows
    u8* at = tile + (lane >> 2) * ROW_BYTES + (lane & 3) * 4;
    #pragma unroll
    for (int n = 0; n < D / 8; ++n) {
        *reinterpret_cast<u32*>(at + n * 16) = pack_bf16(acc[n][0] * factor0, acc[n][1] * factor0);
        *reinterpret_cast<u32*>(at + 8 * ROW_BYTES + n * 16) = pack_bf16(acc[n][2] * factor8, acc[n][3] * factor8);
    }
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < 16 * PIECES; i += 32) {
        const int piece = i + lane, r = piece / PIECES, c = piece % PIECES;
        if (row0 + r < rows && (!PADDING || c * 8 < D - PADDING))
            *reinterpret_cast<uint4*>(matrix + (i64)(row0 + r) * stride + c * 8) =
                *reinterpret_cast<const uint4*>(tile + r * ROW_BYTES + c * 16);
    }
}

#if DROPOUT
// Redraws which probabilities are kept; src/ops/rng.rs. The counter holds the low 32 bits of index / 4.
struct Keep {
    u32 draw, step, micro_batch, key_lo, key_hi, threshold;
    __device__ __forceinline__ Keep(const unsigned* words, u32 seed_offset, u32 draw_, u32 threshold_) {
        const u64 seed = (((u64)words[WORD_SEED_HI] << 32) | words[WORD_SEED_LO]) + seed_offset;
        draw = draw_; step = words[WORD_STEP]; micro_batch = words[WORD_MICRO_BATCH];
        key_lo = (u32)seed; key_hi = (u32)(seed >> 32); threshold = threshold_;
    }
    __device__ __forceinline__ uint4 quad(u64 index) const {
        return philox((u32)(index >> 2), draw, step, micro_batch, key_lo, key_hi);
    }
    static __device__ __forceinline__ u32 pick(uint4 w, u32 i) {
        return (i & 2) ? ((i & 1) ? w.w : w.z) : ((i & 1) ? w.y : w.x);
    }
    __device__ __forceinline__ bool one(u64 index) const { return (pick(quad(index), (u32)index & 3) >> 8) >= threshold; }
    // Elements index and index + 1.
    __device__ __forceinline__ void two(u64 index, bool& a, bool& b) const {
        const u32 i = (u32)index & 3;
        const uint4 w = quad(index);
        a = (pick(w, i) >> 8) >= threshold;
        b = (i == 3 ? one(index + 1) : (pick(w, i + 1) >> 8) >= threshold);
    }
};
#endif
