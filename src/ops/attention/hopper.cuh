// Shared by the attention kernels of compute capability 9.0: heads of 128 elements, whole causal sequences. Tiles in shared
// memory as wgmma reads them, its products, and the store of a tile.
//
// A block is one warpgroup and a tile 64 rows: two blocks share a multiprocessor, and one forms products while the other takes
// exponentials (measured on an H200: 491 TFLOP/s forward at 8192 tokens, 404 with two warpgroups and 128 rows a block).
//
// A tile is two panels of 64 columns (128 bytes a row). The 16-byte chunk c of row r lies at c ^ (r & 7), wgmma's
// 128-byte swizzle, and tiles start at multiples of 1024 bytes, where the swizzle repeats. One layout serves a product over
// the columns (scores) and one over the rows (the tensor core transposes then).
constexpr int D = 128;
constexpr int LINE = 128;                        // bytes of a row in a panel
constexpr int ROWS = 64;                         // of a tile: those of a warpgroup's product
constexpr int THREADS = 128;                     // of a warpgroup
constexpr int PANEL = ROWS * LINE;               // bytes
constexpr int TILE = 2 * PANEL;
// Byte of the 16-byte piece c (of 16) of row r in a tile.
__device__ __forceinline__ int piece_at(int r, int c) { return (c >> 3) * PANEL + r * LINE + (((c & 7) ^ (r & 7)) << 4); }

// Starts the copy of rows row0 .. row0+64 of a matrix with `rows` rows, `stride` elements apart. In place of rows beyond the end
// come zeros (ZERO), or copies of the last row where those rows are masked or not stored.
template <bool ZERO>
__device__ __forceinline__ void load_tile(u8* tile, const bf16* matrix, int row0, int rows, int stride) {
    constexpr int STEP = THREADS / 16;           // rows a pass: 8, so the swizzle of all of a thread's pieces is one
    const int c = threadIdx.x & 15, r = threadIdx.x >> 4;
    u8* const dst = tile + piece_at(r, c);
    const bf16* const src = matrix + c * 8;
    #pragma unroll
    for (int i = 0; i < ROWS; i += STEP) {
        const int row = row0 + r + i;
        const bf16* from = src + (i64)min(row, rows - 1) * stride;
        if (ZERO) cp_async16_zfill(dst + i * LINE, from, row < rows);
        else cp_async16(dst + i * LINE, from);
    }
}

// Orders writes of cp.async before the tensor core's reads (another proxy).
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
// The compiler may not move uses of the accumulators across this.
template <int N> __device__ __forceinline__ void pin(float (&acc)[N][4]) {
    #pragma unroll
    for (int j = 0; j < N; ++j)
        #pragma unroll
        for (int c = 0; c < 4; ++c) asm volatile("" : "+f"(acc[j][c]) :: "memory");
}

// Shared-memory descriptor (PTX ISA, wgmma matrix descriptor) of a tile with the 128-byte swizzle: eight rows are 1024 bytes; read
// by rows, the next 64 columns are one panel on. Addresses in it count 16 bytes.
__device__ __forceinline__ u64 descriptor(const void* tile) {
    constexpr u64 leading = PANEL >> 4, stride = (8 * LINE) >> 4, swizzle_128 = 1;
    return ((smem_addr(tile) & 0x3ffffu) >> 4) | (leading << 16) | (stride << 32) | (swizzle_128 << 62);
}
constexpr u64 TILE_STEP = TILE >> 4;             // from one tile's descriptor to the next one's
// What to add for step k of 16: columns, rows.
__device__ __forceinline__ u64 column_step(int k) { return ((k >> 2) * PANEL + (k & 3) * 32) >> 4; }
__device__ __forceinline__ u64 row_step(int k) { return k * (16 * LINE) >> 4; }

#define F4(j) "+f"(acc[j][0]), "+f"(acc[j][1]), "+f"(acc[j][2]), "+f"(acc[j][3])
// acc[64 x 64] = or += A[64 x 16] B[64 x 16]^T. Asynchronous.
__device__ __forceinline__ void multiply(float (&acc)[8][4], u64 a, u64 b, int add) {
    asm volatile("{\n"
        ".reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, add, 1, 1, 0, 0;\n}"
        : F4(0), F4(1), F4(2), F4(3), F4(4), F4(5), F4(6), F4(7)
        : "l"(a), "l"(b), "r"(add));
}
// acc[64 x 128] += A[64 x 16] B[16 x 128]: A a fragment in registers, B by rows. Asynchronous.
__device__ __forceinline__ void multiply_add(float (&acc)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile("{\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n}"
        : F4(0), F4(1), F4(2), F4(3), F4(4), F4(5), F4(6), F4(7), F4(8), F4(9), F4(10), F4(11), F4(12), F4(13), F4(14), F4(15)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef F4

// acc = A B^T over the 128 columns of two tiles. Asynchronous.
__device__ __forceinline__ void scores(float (&acc)[ROWS / 8][4], u64 a, u64 b) {
    #pragma unroll
    for (int k = 0; k < D / 16; ++k) multiply(acc, a + column_step(k), b + column_step(k), k);
}
// acc[64 x 128] += P B: P 64 x 64 as packed fragments, B a tile. Asynchronous.
__device__ __forceinline__ void accumulate(float (&acc)[D / 8][4], const u32 (&p)[ROWS / 16][4], u64 b) {
    #pragma unroll
    for (int k = 0; k < ROWS / 16; ++k) multiply_add(acc, p[k], b + row_step(k));
}
// A product's result as the left operand of the next.
__device__ __forceinline__ void pack(u32 (&p)[ROWS / 16][4], const float (&x)[ROWS / 8][4]) {
    #pragma unroll
    for (int k = 0; k < ROWS / 16; ++k) {
        p[k][0] = pack_bf16(x[2 * k][0], x[2 * k][1]);
        p[k][1] = pack_bf16(x[2 * k][2], x[2 * k][3]);
        p[k][2] = pack_bf16(x[2 * k + 1][0], x[2 * k + 1][1]);
        p[k][3] = pack_bf16(x[2 * k + 1][2], x[2 * k + 1][3]);
    }
}
template <int N> __device__ __forceinline__ void zero(float (&acc)[N][4]) {
    #pragma unroll
    for (int n = 0; n < N; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) acc[n][e] = 0.f;
}

// Rounds the block's 64 rows to bf16 and writes those below `rows` (row0: the first one's index), by way of a tile that no product
// reads any more: stores are 16 bytes and contiguous.
__device__ __forceinline__ void store_tile(u8* tile, const float (&acc)[D / 8][4], float factor0, float factor8,
                                           bf16* matrix, int row0, int rows, int stride) {
    const int lane = threadIdx.x & 31, first = threadIdx.x / 32 * 16;    // row of this warp
    __syncthreads();
    #pragma unroll
    for (int n = 0; n < D / 8; ++n) {
        u8* const here = tile + piece_at(first + (lane >> 2), n) + (lane & 3) * 4;
        *reinterpret_cast<u32*>(here) = pack_bf16(acc[n][0] * factor0, acc[n][1] * factor0);
        *reinterpret_cast<u32*>(here + 8 * LINE) = pack_bf16(acc[n][2] * factor8, acc[n][3] * factor8);
    }
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const int r = first + i + (lane >> 4), c = lane & 15;
        if (row0 + r < rows)
            *reinterpret_cast<uint4*>(matrix + (i64)(row0 + r) * stride + c * 8) = *reinterpret_cast<const uint4*>(tile + piece_at(r, c));
    }
}
