// Tiles of bf16 in shared memory and their products on tensor cores, for kernels that work in chunks of tokens. A tile row
// ends in one 16-byte piece of padding: the eight rows of an ldmatrix phase then lie in eight different bank groups.

extern __shared__ __align__(16) u8 shared[];

// Starts the copy of `ROWS` rows of COLS elements; zeros in place of rows from `valid` on.
template <int ROWS, int COLS, int THREADS>
__device__ __forceinline__ void load_tile(u8* tile, const bf16* src, int stride, int valid) {
    constexpr int PIECES = COLS / 8, ROW = (PIECES + 1) * 16;
    if (THREADS % PIECES == 0) {                 // a thread keeps its column
        constexpr int STEP = THREADS % PIECES == 0 ? THREADS / PIECES : 1;
        const int r = threadIdx.x / PIECES, c = threadIdx.x % PIECES;
        const bf16* from = src + c * 8;
        u8* to = tile + r * ROW + c * 16;
        #pragma unroll 4
        for (int i = 0; i < ROWS; i += STEP) {
            if (ROWS % STEP != 0 && r + i >= ROWS) break;
            cp_async16_zfill(to + i * ROW, from + (i64)min(r + i, valid - 1) * stride, r + i < valid);
        }
        return;
    }
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        const int r = i / PIECES, c = i % PIECES;
        cp_async16_zfill(tile + r * ROW + c * 16, src + (i64)min(r, valid - 1) * stride + c * 8, r < valid);
    }
}

// Byte offset that a lane gives to ldmatrix for the 16x16 block at (row, col). `by_rows`: operand A, and with .trans
// operand B whose tile rows are k. `by_cols`: operand B whose tile rows are n, and with .trans operand A whose tile
// rows are k.
template <int ROW> __device__ __forceinline__ u32 by_rows(int row, int col) {
    const int lane = threadIdx.x & 31;
    return (row + (lane & 15)) * ROW + col * 2 + (lane >> 4) * 16;
}
template <int ROW> __device__ __forceinline__ u32 by_cols(int row, int col) {
    const int lane = threadIdx.x & 31;
    return (row + (lane & 7) + (lane >> 4) * 8) * ROW + col * 2 + ((lane >> 3) & 1) * 16;
}
// acc[16 x 16] += a * b, b the four registers of one ldmatrix.
__device__ __forceinline__ void mma_pair(float (&acc)[8], const u32 a[4], const u32 b[4]) {
    mma_16816(acc, a, b[0], b[1]);
    mma_16816(acc + 4, a, b[2], b[3]);
}
template <int TILES> __device__ __forceinline__ void clear(float (&acc)[TILES][8]) {
    #pragma unroll
    for (int i = 0; i < TILES; ++i)
        #pragma unroll
        for (int e = 0; e < 8; ++e) acc[i][e] = 0.f;
}
// A 16x16 accumulator (two 16x8 fragments) as operand A.
__device__ __forceinline__ void as_operand(u32 (&a)[4], const float (&acc)[8]) {
    a[0] = pack_bf16(acc[0], acc[1]);
    a[1] = pack_bf16(acc[2], acc[3]);
    a[2] = pack_bf16(acc[4], acc[5]);
    a[3] = pack_bf16(acc[6], acc[7]);
}
// Element e of a 16x16 accumulator: its row is lane / 4 + row_of(e), its column 2 (lane % 4) + col_of(e).
__device__ __forceinline__ constexpr int row_of(int e) { return (e & 2) * 4; }
__device__ __forceinline__ constexpr int col_of(int e) { return (e & 1) + (e & 4) * 2; }
