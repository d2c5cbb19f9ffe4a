// Prelude of every kernel: bf16 without toolkit headers, vector access, reductions, Philox, and the few
// PTX instructions that the tensor-core kernels use. NVRTC needs no include folder.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// ---- bf16 ----------------------------------------------------------------------------------------
struct __align__(2) bf16 { u16 bits; };

__device__ __forceinline__ float to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float to_f32(float x) { return x; }
// Round to nearest even, as half::bf16::from_f32 does for finite values and infinities; NaN stays NaN.
__device__ __forceinline__ bf16 to_bf16(float x) {
    bf16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
    return r;
}
// Two floats to a packed pair, `lo` in the low half.
__device__ __forceinline__ u32 pack_bf16(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
__device__ __forceinline__ float bf16_lo(u32 p) { return __uint_as_float(p << 16); }
__device__ __forceinline__ float bf16_hi(u32 p) { return __uint_as_float(p & 0xffff0000u); }

template <typename T> struct Store;
template <> struct Store<bf16> { static __device__ __forceinline__ bf16 of(float x) { return to_bf16(x); } };
template <> struct Store<float> { static __device__ __forceinline__ float of(float x) { return x; } };

// ---- eight values at a time (16 bytes of bf16, 32 of float) ----------------------------------------
__device__ __forceinline__ void load8(const bf16* p, float v[8]) {
    uint4 q = *reinterpret_cast<const uint4*>(p);
    v[0] = bf16_lo(q.x); v[1] = bf16_hi(q.x); v[2] = bf16_lo(q.y); v[3] = bf16_hi(q.y);
    v[4] = bf16_lo(q.z); v[5] = bf16_hi(q.z); v[6] = bf16_lo(q.w); v[7] = bf16_hi(q.w);
}
__device__ __forceinline__ void load8(const float* p, float v[8]) {
    float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
    v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w; v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}
__device__ __forceinline__ void store8(bf16* p, const float v[8]) {
    *reinterpret_cast<uint4*>(p) = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}
__device__ __forceinline__ void store8(float* p, const float v[8]) {
    reinterpret_cast<float4*>(p)[0] = make_float4(v[0], v[1], v[2], v[3]);
    reinterpret_cast<float4*>(p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

// ---- reductions (fixed order: the same bits every time) --------------------------------------------
__device__ __forceinline__ float warp_sum(float x) {
    #pragma unroll
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
    #pragma unroll
    for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}
// Sum over a one-dimensional block of a multiple of 32 threads; every thread gets it. `scratch` holds 32 floats.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    x = warp_sum(x);
    __syncthreads();                      // scratch may still be read from an earlier call
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.f);
}
__device__ __forceinline__ float block_max(float x, float* scratch) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_max(lane < warps ? scratch[lane] : -3.4e38f);
}

// ---- exponentials ---------------------------------------------------------------------------------
constexpr float LOG2E = 1.4426950408889634f;

// 2^x in one instruction (relative error about 2^-22); exp2_fast(-inf) = 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }
__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// ---- Philox4x32-10 (Salmon et al., SC'11); src/ops/rng.rs holds the same in Rust -------------------
__device__ __forceinline__ uint4 philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
    #pragma unroll
    for (int i = 0; i < 10; ++i) {
        u32 h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
        u32 h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
        c0 = h1 ^ c1 ^ k0; c1 = l1; c2 = h0 ^ c3 ^ k1; c3 = l0;
        k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}
// Device words of the RNG tracker, see src/ops/rng.rs.
#define WORD_SEED_LO 0
#define WORD_SEED_HI 1
#define WORD_STEP 2
#define WORD_MICRO_BATCH 3
#define WORD_LR 4
// Four words for elements 4*quad .. 4*quad+3 of draw `draw` in the state at `seed_offset`.
__device__ __forceinline__ uint4 draw4(const u32* words, u32 seed_offset, u32 draw, u32 quad) {
    u64 seed = (((u64)words[WORD_SEED_HI] << 32) | words[WORD_SEED_LO]) + seed_offset;
    return philox(quad, draw, words[WORD_STEP], words[WORD_MICRO_BATCH], (u32)seed, (u32)(seed >> 32));
}
// A word as an exact float in [0, 1): the top 24 bits.
__device__ __forceinline__ float unit(u32 w) { return (float)(w >> 8) * (1.0f / 16777216.0f); }
// Nearly normal with variance 1, exact in every device: eight 16-bit halves of a draw summed (Irwin-Hall).
// Mean 8*32767.5 = 262140, variance 8*(2^32-1)/12; 1/sqrt of it is 1.8688124e-5.
__device__ __forceinline__ float normal_of(uint4 w) {
    u32 s = (w.x & 0xffff) + (w.x >> 16) + (w.y & 0xffff) + (w.y >> 16) + (w.z & 0xffff) + (w.z >> 16) + (w.w & 0xffff) + (w.w >> 16);
    return __fmul_rn((float)((int)s - 262140), 1.8688124e-5f);
}

// ---- asynchronous copies and tensor cores (sm_80 upward) -------------------------------------------
__device__ __forceinline__ u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void cp_async16(void* dst, const void* src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(smem_addr(dst)), "l"(src) : "memory");
}
// Copies 16 bytes, or writes zeros when `valid` is false (src must still be a legal address).
__device__ __forceinline__ void cp_async16_zfill(void* dst, const void* src, bool valid) {
    int n = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(smem_addr(dst)), "l"(src), "r"(n) : "memory");
}
// The same of 4 bytes.
__device__ __forceinline__ void cp_async4_zfill(void* dst, const void* src, bool valid) {
    const int n = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(smem_addr(dst)), "l"(src), "r"(n) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

__device__ __forceinline__ void ldsm_x4(u32 r[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
__device__ __forceinline__ void ldsm_x4_t(u32 r[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
// d[16x8] += a[16x16] (row) * b[16x8] (column), bf16 in, fp32 accumulate.
__device__ __forceinline__ void mma_16816(float d[4], const u32 a[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
