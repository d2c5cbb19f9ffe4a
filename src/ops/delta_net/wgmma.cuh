// wgmma for tiles of bf16 in shared memory: 64 rows to a panel line of 128 bytes, 128-byte swizzle.
//
// A tile [R, C] is C / 64 panels of R lines; the 16-byte chunk c of row r lies at c ^ (r & 7) of its line, and tiles start at
// multiples of 1024 bytes, where the swizzle repeats. The same tile serves as an operand whose rows are M or N and whose columns are
// summed over ("by columns"), and, transposed by the tensor core (TA, TB = 1), as one whose rows are summed over ("by rows").
// Accumulators: acc[j][e] of a warpgroup is row 16 (warp % 4) + lane / 4 + 8 (e >> 1), column 8 j + 2 (lane % 4) + (e & 1).
constexpr int LINE = 128;
template <int R> __device__ __forceinline__ int piece_at(int r, int c) { return (c >> 3) * (R * LINE) + r * LINE + (((c & 7) ^ (r & 7)) << 4); }
// Byte of element (r, col) of a tile of R rows.
template <int R> __device__ __forceinline__ int byte_at(int r, int col) { return piece_at<R>(r, col >> 3) + (col & 7) * 2; }

// Orders ordinary writes and cp.async before the tensor core's reads (another proxy); by the writing threads, before the barrier.
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
template <int N> __device__ __forceinline__ void zero(float (&acc)[N][4]) {
    #pragma unroll
    for (int n = 0; n < N; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) acc[n][e] = 0.f;
}
// Barrier `id` (1 to 15; 0 is __syncthreads) of THREADS threads of the block: to come without waiting, and to wait.
template <int THREADS> __device__ __forceinline__ void bar_arrive(int id) { asm volatile("bar.arrive %0, %1;" :: "r"(id), "n"(THREADS) : "memory"); }
template <int THREADS> __device__ __forceinline__ void bar_wait(int id) { asm volatile("bar.sync %0, %1;" :: "r"(id), "n"(THREADS) : "memory"); }

// Shared-memory descriptor (PTX ISA, wgmma matrix descriptor) of a tile of R rows: eight rows are 1024 bytes, the next 64 columns
// one panel on. Addresses in it count 16 bytes.
template <int R> __device__ __forceinline__ u64 descriptor(const void* tile) {
    constexpr u64 leading = (R * LINE) >> 4, stride = (8 * LINE) >> 4, swizzle_128 = 1;
    return ((smem_addr(tile) & 0x3ffffu) >> 4) | (leading << 16) | (stride << 32) | (swizzle_128 << 62);
}
// What to add for step k of 16: summed over columns (of a tile of R rows), over rows. And for 64 rows (of M or N) further down.
template <int R> __device__ __forceinline__ constexpr u64 column_step(int k) { return ((k >> 2) * (R * LINE) + (k & 3) * 32) >> 4; }
__device__ __forceinline__ constexpr u64 row_step(int k) { return k * (16 * LINE) >> 4; }
constexpr u64 HALF_STEP = (64 * LINE) >> 4;

#define F4(j) "+f"(acc[j][0]), "+f"(acc[j][1]), "+f"(acc[j][2]), "+f"(acc[j][3])
// acc[64 x 32] = (add: +=) A[64 x 16] B[16 x 32], both in shared memory. Asynchronous.
template <int TA, int TB> __device__ __forceinline__ void mma_ss(float (&acc)[4][4], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, add, 1, 1, %19, %20;\n}"
        : F4(0), F4(1), F4(2), F4(3)
        : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));
}
// The same with A a fragment in registers.
template <int TB> __device__ __forceinline__ void mma_rs(float (&acc)[4][4], const u32 (&a)[4], u64 b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, add, 1, 1, %22;\n}"
        : F4(0), F4(1), F4(2), F4(3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TB));
}
#undef F4
#define F4(j) "+f"(acc[j][0]), "+f"(acc[j][1]), "+f"(acc[j][2]), "+f"(acc[j][3])
// acc[64 x 64] = (add: +=) A[64 x 16] B[16 x 64], both in shared memory. Asynchronous.
template <int TA, int TB> __device__ __forceinline__ void mma_ss(float (&acc)[8][4], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, add, 1, 1, %35, %36;\n}"
        : F4(0), F4(1), F4(2), F4(3), F4(4), F4(5), F4(6), F4(7)
        : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));
}
// The same with A a fragment in registers.
template <int TB> __device__ __forceinline__ void mma_rs(float (&acc)[8][4], const u32 (&a)[4], u64 b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"
        : F4(0), F4(1), F4(2), F4(3), F4(4), F4(5), F4(6), F4(7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TB));
}
#undef F4
#define F4(j) "+f"(acc[j][0]), "+f"(acc[j][1]), "+f"(acc[j][2]), "+f"(acc[j][3])
// acc[64 x 128] = (add: +=) A[64 x 16] B[16 x 128], both in shared memory. Asynchronous.
template <int TA, int TB> __device__ __forceinline__ void mma_ss(float (&acc)[16][4], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, add, 1, 1, %67, %68;\n}"
        : F4(0), F4(1), F4(2), F4(3), F4(4), F4(5), F4(6), F4(7), F4(8), F4(9), F4(10), F4(11), F4(12), F4(13), F4(14), F4(15)
        : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));
}
// The same with A a fragment in registers.
template <int TB> __device__ __forceinline__ void mma_rs(float (&acc)[16][4], const u32 (&a)[4], u64 b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, add, 1, 1, %70;\n}"
        : F4(0), F4(1), F4(2), F4(3), F4(4), F4(5), F4(6), F4(7), F4(8), F4(9), F4(10), F4(11), F4(12), F4(13), F4(14), F4(15)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TB));
}
#undef F4

// 16 columns of an accumulator (n8 tiles 2k and 2k + 1) as the left operand of step k of the next product.
__device__ __forceinline__ void fragment(u32 (&a)[4], const float (&x)[4], const float (&y)[4]) {
    a[0] = pack_bf16(x[0], x[1]);
    a[1] = pack_bf16(x[2], x[3]);
    a[2] = pack_bf16(y[0], y[1]);
    a[3] = pack_bf16(y[2], y[3]);
}
