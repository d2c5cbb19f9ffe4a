// Shared by the kernels for narrow sliding windows: heads of 64 elements, whole causal sequences, a row sees the last WINDOW keys up
// to its own.
//
// The unit is a strip of 16 rows, one tensor-core fragment. The queries of a strip see keys of their own strip and of the BACK strips
// before it; so a warp takes one strip and STRIPS strips of the other side, computes (16 + WINDOW) / WINDOW of the pairs that are
// visible, and masks only in strips that an edge of the window cuts. Strips of sequences begin at multiples of 16 on both sides, so
// which pairs of two strips see each other depends on nothing but how many strips they lie apart, which is a constant once unrolled.
//
// In shared memory a row is its 128 bytes, and the 16-byte piece c of row r lies at c ^ (r & 7): the eight rows that one ldmatrix phase
// reads lie in eight different bank groups.
constexpr int D = 64;
constexpr int LINE = D * 2;                              // bytes of a row
constexpr int STRIP = 16, STRIP_BYTES = STRIP * LINE;
constexpr int BACK = (WINDOW - 1 + STRIP - 1) / STRIP, STRIPS = BACK + 1;
constexpr int PIECES = LINE / 16;

// Whether some pair of a query strip and the key strip `back` strips before it is hidden. The distance query - key lies in
// 16 * back - 15 ..= 16 * back + 15 there, and is 0 .. WINDOW where they see each other.
__device__ constexpr bool cut(int back) { return back == 0 || back * STRIP + STRIP - 1 >= WINDOW; }
__device__ __forceinline__ bool visible(int distance) { return distance >= 0 && distance < WINDOW; }

__device__ __forceinline__ int piece_at(int r, int c) { return r * LINE + ((c ^ (r & 7)) << 4); }

// What a lane passes to ldmatrix for 16 rows and 16 columns: `at` + the strip's offset + (turn ^ 32 * step of 16 columns).
struct Lane {
    u32 at, turn;
    __device__ __forceinline__ u32 of(int strip, int step) const { return at + strip * STRIP_BYTES + (turn ^ (step * 32)); }
};
// As operand A, or transposed as B.
__device__ __forceinline__ Lane lane_rows(u32 tile, int lane) {
    return {tile + (lane & 15) * LINE, (u32)(((lane >> 4) ^ (lane & 7)) << 4)};
}
// As B given by its columns (rows of the tile are n).
__device__ __forceinline__ Lane lane_cols(u32 tile, int lane) {
    return {tile + ((lane & 7) + (lane >> 4) * 8) * LINE, (u32)((((lane >> 3) & 1) ^ (lane & 7)) << 4)};
}

// x, computed anew as far as the compiler knows: addresses that depend on it take no registers outside the place of their use.
__device__ __forceinline__ int anew(int x) {
    int y;
    asm volatile("mov.u32 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Starts the copy of a block's rows row0 .. row0+ROWS of a matrix with `rows` rows, `stride` elements apart. In place of rows outside
// come zeros (ZERO), or copies of the nearest row where those rows are masked.
template <int ROWS, int THREADS, bool ZERO>
__device__ __forceinline__ void load_rows(u8* tile, const bf16* matrix, int row0, int rows, int stride) {
    constexpr int STEP = THREADS / PIECES;
    const int thread = anew(threadIdx.x), r = thread / PIECES, c = thread % PIECES;
    #pragma unroll (ROWS / STEP <= 16 ? ROWS / STEP : 4)   // a lone warp's addresses would take all registers
    for (int i = 0; i < ROWS; i += STEP) {
        if (ROWS % STEP != 0 && r + i >= ROWS) break;
        const int row = row0 + r + i;
        const bf16* const from = matrix + (i64)min(max(row, 0), rows - 1) * stride + c * 8;
        u8* const to = tile + piece_at(r + i, c);
        if (ZERO) cp_async16_zfill(to, from, row < rows);
        else cp_async16(to, from);
    }
}

// The same of a warp's own strip, rows beyond the end as copies of the last.
__device__ __forceinline__ void load_strip(u8* strip, const bf16* matrix, int row0, int rows, int stride) {
    const int lane = anew(threadIdx.x & 31);
    #pragma unroll
    for (int i = 0; i < STRIP; i += 4) {
        const int r = i + lane / PIECES, c = lane % PIECES;
        cp_async16(strip + piece_at(r, c), matrix + (i64)min(row0 + r, rows - 1) * stride + c * 8);
    }
}

// Rounds a warp's strip to bf16 and writes its rows below `rows`, by way of the warp's own buffer: stores are 16 bytes and contiguous.
__device__ __forceinline__ void store_strip(u8* strip, const float (&acc)[D / 8][4], float factor0, float factor8,
                                            bf16* matrix, int row0, int rows, int stride) {
    const int lane = anew(threadIdx.x & 31);
    __syncwarp();                                        // the warp's other lanes may still read the buffer
    #pragma unroll
    for (int n = 0; n < D / 8; ++n) {
        u8* const at = strip + piece_at(lane >> 2, n) + (lane & 3) * 4;
        *reinterpret_cast<u32*>(at) = pack_bf16(acc[n][0] * factor0, acc[n][1] * factor0);
        *reinterpret_cast<u32*>(at + 8 * LINE) = pack_bf16(acc[n][2] * factor8, acc[n][3] * factor8);
    }
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < STRIP; i += 4) {
        const int r = i + lane / PIECES, c = lane % PIECES;
        if (row0 + r < rows)
            *reinterpret_cast<uint4*>(matrix + (i64)(row0 + r) * stride + c * 8) = *reinterpret_cast<const uint4*>(strip + piece_at(r, c));
    }
}

// A strip's 64 columns as operand A.
__device__ __forceinline__ void load_fragments(u32 (&a)[D / 16][4], const Lane& from) {
    #pragma unroll
    for (int k = 0; k < D / 16; ++k) ldsm_x4(a[k], from.of(0, k));
}

// acc[m][16 x 16] = A[m] B^T over the 64 columns of strip `strip` at `b` (lane_cols), for m from ..= to.
template <int M>
__device__ __forceinline__ void scores(float (&acc)[M][2][4], const u32 (&a)[M][D / 16][4], const Lane& b, int strip, int from = 0, int to = M - 1) {
    #pragma unroll
    for (int m = 0; m < M; ++m)
        #pragma unroll
        for (int e = 0; e < 4; ++e) acc[m][0][e] = acc[m][1][e] = 0.f;
    #pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        u32 f[4];
        ldsm_x4(f, b.of(strip, k));
        #pragma unroll
        for (int m = 0; m < M; ++m) {
            if (m < from || m > to) continue;
            mma_16816(acc[m][0], a[m][k], f[0], f[1]);
            mma_16816(acc[m][1], a[m][k], f[2], f[3]);
        }
    }
}

// A product's result as the left operand of the next.
__device__ __forceinline__ void pack(u32 (&a)[4], const float (&x)[2][4]) {
    a[0] = pack_bf16(x[0][0], x[0][1]);
    a[1] = pack_bf16(x[0][2], x[0][3]);
    a[2] = pack_bf16(x[1][0], x[1][1]);
    a[3] = pack_bf16(x[1][2], x[1][3]);
}

// acc[m][16 x 64] += A[m] B, B the rows of strip `strip` at `b` (lane_rows), for m from ..= to.
template <int M>
__device__ __forceinline__ void accumulate(float (&acc)[M][D / 8][4], const u32 (&a)[M][4], const Lane& b, int strip, int from = 0, int to = M - 1) {
    #pragma unroll
    for (int n = 0; n < D / 16; ++n) {
        u32 f[4];
        ldsm_x4_t(f, b.of(strip, n));
        #pragma unroll
        for (int m = 0; m < M; ++m) {
            if (m < from || m > to) continue;
            mma_16816(acc[m][2 * n], a[m], f[0], f[1]);
            mma_16816(acc[m][2 * n + 1], a[m], f[2], f[3]);
        }
    }
}

template <int N> __device__ __forceinline__ void zero(float (&acc)[N][4]) {
    #pragma unroll
    for (int n = 0; n < N; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) acc[n][e] = 0.f;
}

// What a block owns: `rows` rows from row0 on of sequence b, key head kv_head, and `heads` query heads from first_head on: the key
// head's group, or an equal part of it. Grid: x tiles of `rows` rows, y q_heads / heads, z batch.
struct Owned {
    int row0, b, kv_head, first_head, heads;
    __device__ __forceinline__ Owned(int rows, int group, int heads_) {
        heads = heads_;
        row0 = blockIdx.x * rows;
        first_head = blockIdx.y * heads;
        kv_head = first_head / group;
        b = blockIdx.z;
    }
};

// Keys of a forward or dq block: those that its rows see.
constexpr int WARPS = 8, THREADS = WARPS * 32, ROWS = WARPS * STRIP;
constexpr int KEYS = ROWS + BACK * STRIP;
// Blocks a multiprocessor, of 96 and 112 KiB at a window of 128.
constexpr int BLOCKS_PER_SM = 2;
