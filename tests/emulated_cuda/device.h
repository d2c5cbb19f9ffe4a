// CUDA C on the host: what the compiler provides to a kernel, and the PTX instructions that mbperf's kernels use.
// nvrtc.cpp puts it before a kernel's text, whose asm statements it has turned into calls of ptx_<mnemonic>.
#pragma once
#include "runtime.h"
#include <math.h>
#include <stddef.h>
#include <string.h>

#define __device__
#define __host__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("emu_shared")))
#define __grid_constant__
#define EMU_LOCAL __attribute__((visibility("hidden")))

// ---- threads ---------------------------------------------------------------------------------------
struct dim3 { unsigned x, y, z; };
struct EmuThread { dim3 index; unsigned lane, warp; };
extern EMU_LOCAL EmuThread* emu_current;
extern EMU_LOCAL dim3 emu_block_index, emu_block_dim, emu_grid_dim;
#define threadIdx (emu_current->index)
#define blockIdx emu_block_index
#define blockDim emu_block_dim
#define gridDim emu_grid_dim
#define warpSize 32

extern EMU_LOCAL char emu_window[];          // shared memory: addresses count from here
#define EMU_DYNAMIC_AT 16                    // dynamic shared memory is promised no more than 16-byte alignment
#define emu_dynamic (emu_window + EMU_DYNAMIC_AT)

[[noreturn]] EMU_LOCAL void emu_fail(int code, const char* format, ...);
// Waits for all threads of the block; gives the OR of `value`.
EMU_LOCAL int emu_barrier(int value);
// Waits for the lanes of `mask`; the last one calls `op` with every lane's operands.
EMU_LOCAL void emu_meet(int kind, unsigned mask, void* mine, void (*op)(void** lanes, unsigned present));
#define EMU_FENCE asm volatile("" ::: "memory")

inline void __syncthreads() { EMU_FENCE; emu_barrier(0); EMU_FENCE; }
inline int __syncthreads_or(int p) { EMU_FENCE; const int r = emu_barrier(p != 0 ? 1 : 0); EMU_FENCE; return r; }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
[[noreturn]] inline void __trap() { emu_fail(EMU_LAUNCH_FAILED, "trap"); }

// ---- warps -----------------------------------------------------------------------------------------
enum { EMU_SYNC = 1, EMU_SHUFFLE, EMU_BALLOT, EMU_MATCH, EMU_REDUCE, EMU_MMA, EMU_LDMATRIX };
struct EmuWord { unsigned long long in, out; int from; };
EMU_LOCAL void emu_op_none(void**, unsigned);
EMU_LOCAL void emu_op_shuffle(void**, unsigned);
EMU_LOCAL void emu_op_ballot(void**, unsigned);
EMU_LOCAL void emu_op_match(void**, unsigned);
EMU_LOCAL void emu_op_min(void**, unsigned);   // of signed 64-bit words
EMU_LOCAL void emu_op_max(void**, unsigned);
EMU_LOCAL void emu_op_add(void**, unsigned);
EMU_LOCAL void emu_op_and(void**, unsigned);
EMU_LOCAL void emu_op_or(void**, unsigned);

inline void __syncwarp(unsigned mask = 0xffffffffu) { EMU_FENCE; emu_meet(EMU_SYNC, mask, nullptr, emu_op_none); EMU_FENCE; }
inline unsigned long long emu_word(int kind, unsigned mask, unsigned long long in, int from, void (*op)(void**, unsigned)) {
    EmuWord w = {in, 0, from};
    EMU_FENCE;
    emu_meet(kind, mask, &w, op);
    EMU_FENCE;
    return w.out;
}
template <typename T> inline T emu_shuffle(unsigned mask, T x, int from) {
    static_assert(sizeof(T) <= 8, "");
    unsigned long long in = 0;
    memcpy(&in, &x, sizeof x);
    const unsigned long long out = emu_word(EMU_SHUFFLE, mask, in, from, emu_op_shuffle);
    memcpy(&x, &out, sizeof x);
    return x;
}
template <typename T> inline T __shfl_sync(unsigned mask, T x, int lane, int width = 32) {
    return emu_shuffle(mask, x, (int)(emu_current->lane & ~(width - 1)) | (lane & (width - 1)));
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32) {
    const int own = emu_current->lane, from = own ^ bits;
    return emu_shuffle(mask, x, (from & ~(width - 1)) > (own & ~(width - 1)) ? own : from);
}
template <typename T> inline T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32) {
    const int own = emu_current->lane, from = own - (int)by;
    return emu_shuffle(mask, x, from < (own & ~(width - 1)) ? own : from);
}
template <typename T> inline T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32) {
    const int own = emu_current->lane, from = own + (int)by;
    return emu_shuffle(mask, x, from > (own | (width - 1)) ? own : from);
}
inline unsigned __ballot_sync(unsigned mask, int p) { return (unsigned)emu_word(EMU_BALLOT, mask, p != 0, 0, emu_op_ballot); }
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }
template <typename T> inline unsigned __match_any_sync(unsigned mask, T x) {
    unsigned long long in = 0;
    memcpy(&in, &x, sizeof x);
    return (unsigned)emu_word(EMU_MATCH, mask, in, 0, emu_op_match);
}
inline int __reduce_min_sync(unsigned mask, int x) { return (int)emu_word(EMU_REDUCE, mask, (long long)x, 0, emu_op_min); }
inline int __reduce_max_sync(unsigned mask, int x) { return (int)emu_word(EMU_REDUCE, mask, (long long)x, 0, emu_op_max); }
inline int __reduce_add_sync(unsigned mask, int x) { return (int)emu_word(EMU_REDUCE, mask, (long long)x, 0, emu_op_add); }
inline unsigned __reduce_min_sync(unsigned mask, unsigned x) { return (unsigned)emu_word(EMU_REDUCE, mask, x, 0, emu_op_min); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned x) { return (unsigned)emu_word(EMU_REDUCE, mask, x, 0, emu_op_max); }
inline unsigned __reduce_add_sync(unsigned mask, unsigned x) { return (unsigned)emu_word(EMU_REDUCE, mask, x, 0, emu_op_add); }
inline unsigned __reduce_and_sync(unsigned mask, unsigned x) { return (unsigned)emu_word(EMU_REDUCE, mask, x, 0, emu_op_and); }
inline unsigned __reduce_or_sync(unsigned mask, unsigned x) { return (unsigned)emu_word(EMU_REDUCE, mask, x, 0, emu_op_or); }

// ---- vectors ---------------------------------------------------------------------------------------
#define EMU_VECTOR(T, name) \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; }; \
    struct name##3 { T x, y, z; }; \
    struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; }; \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR(unsigned char, uchar)
EMU_VECTOR(short, short)
EMU_VECTOR(unsigned short, ushort)
EMU_VECTOR(int, int)
EMU_VECTOR(unsigned, uint)
EMU_VECTOR(long long, longlong)
EMU_VECTOR(unsigned long long, ulonglong)
EMU_VECTOR(float, float)
EMU_VECTOR(double, double)
#undef EMU_VECTOR

// ---- numbers ---------------------------------------------------------------------------------------
template <typename To, typename From> inline To emu_bits(From x) { static_assert(sizeof(To) == sizeof(From), ""); To y; memcpy(&y, &x, sizeof y); return y; }
inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
inline float __int_as_float(int x) { return emu_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline double __longlong_as_double(long long x) { return emu_bits<double>(x); }
inline long long __double_as_longlong(double x) { return emu_bits<long long>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return expf(x * 2.302585093f); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x); *c = cosf(x); }
inline float __saturatef(float x) { return x != x || x < 0.f ? 0.f : x > 1.f ? 1.f : x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __int2float_rn(int x) { return (float)x; }
inline float __ull2float_rn(unsigned long long x) { return (float)x; }
// Conversions saturate, and give 0 for NaN.
inline int __float2int_rn(float x) { return x != x ? 0 : x >= 2147483648.f ? 0x7fffffff : x < -2147483648.f ? (int)0x80000000 : (int)rintf(x); }
inline int __float2int_rz(float x) { return x != x ? 0 : x >= 2147483648.f ? 0x7fffffff : x < -2147483648.f ? (int)0x80000000 : (int)x; }
inline unsigned __float2uint_rn(float x) { return !(x > 0.f) ? 0u : x >= 4294967296.f ? 0xffffffffu : (unsigned)rintf(x); }
inline unsigned __float2uint_rz(float x) { return !(x > 0.f) ? 0u : x >= 4294967296.f ? 0xffffffffu : (unsigned)x; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
inline int __mulhi(int a, int b) { return (int)(((long long)a * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)(((unsigned __int128)a * b) >> 64); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned __brev(unsigned x) { unsigned r = 0; for (int i = 0; i < 32; ++i) r |= ((x >> i) & 1u) << (31 - i); return r; }
#define EMU_MIN_MAX(T) \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
template <typename T> inline T __ldg(const T* p) { return *p; }
template <typename T> inline T __ldcs(const T* p) { return *p; }
template <typename T> inline T __ldcg(const T* p) { return *p; }
template <typename T> inline void __stcs(T* p, T x) { *p = x; }
template <typename T> inline void __stcg(T* p, T x) { *p = x; }

// ---- atomics: integers only, as the project's kernels may use -----------------------------------------
#define EMU_ATOMICS(T) \
    inline T atomicAdd(T* p, T x) { return __atomic_fetch_add(p, x, __ATOMIC_RELAXED); } \
    inline T atomicSub(T* p, T x) { return __atomic_fetch_sub(p, x, __ATOMIC_RELAXED); } \
    inline T atomicOr(T* p, T x) { return __atomic_fetch_or(p, x, __ATOMIC_RELAXED); } \
    inline T atomicAnd(T* p, T x) { return __atomic_fetch_and(p, x, __ATOMIC_RELAXED); } \
    inline T atomicExch(T* p, T x) { return __atomic_exchange_n(p, x, __ATOMIC_RELAXED); } \
    inline T atomicCAS(T* p, T old, T x) { __atomic_compare_exchange_n(p, &old, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); return old; } \
    inline T atomicMax(T* p, T x) { T old = *p; while (old < x && !__atomic_compare_exchange_n(p, &old, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {} return old; } \
    inline T atomicMin(T* p, T x) { T old = *p; while (x < old && !__atomic_compare_exchange_n(p, &old, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {} return old; }
EMU_ATOMICS(int)
EMU_ATOMICS(unsigned)
EMU_ATOMICS(unsigned long long)
#undef EMU_ATOMICS

// ---- shared-memory addresses, asynchronous copies, tensor cores ----------------------------------------
inline size_t __cvta_generic_to_shared(const void* p) { return (unsigned)((const char*)p - emu_window); }
inline char* emu_shared_at(unsigned address) { return emu_window + (int)address; }
EMU_LOCAL void emu_copy(unsigned dst, const void* src, int bytes, int from_src);   // cp.async
EMU_LOCAL void emu_commit();
EMU_LOCAL void emu_wait(int groups_left);
struct EmuMma { float* d; unsigned a[4], b[2]; };
struct EmuTile { const char* row; unsigned r[4]; int transposed; };
EMU_LOCAL void emu_op_mma(void**, unsigned);
EMU_LOCAL void emu_op_ldmatrix(void**, unsigned);
EMU_LOCAL const char* emu_check_shared(unsigned address, int bytes, const char* what);

inline void ptx_cp_async_cg_shared_global(unsigned dst, const void* src, int bytes) { emu_copy(dst, src, bytes, bytes); }
inline void ptx_cp_async_cg_shared_global(unsigned dst, const void* src, int bytes, int from_src) { emu_copy(dst, src, bytes, from_src); }
inline void ptx_cp_async_ca_shared_global(unsigned dst, const void* src, int bytes) { emu_copy(dst, src, bytes, bytes); }
inline void ptx_cp_async_ca_shared_global(unsigned dst, const void* src, int bytes, int from_src) { emu_copy(dst, src, bytes, from_src); }
inline void ptx_cp_async_commit_group() { emu_commit(); }
inline void ptx_cp_async_wait_group(int left) { EMU_FENCE; emu_wait(left); EMU_FENCE; }
inline void ptx_cp_async_wait_all() { EMU_FENCE; emu_commit(); emu_wait(0); EMU_FENCE; }

// Round to nearest even; NaN becomes the canonical one (PTX ISA, cvt).
inline unsigned short emu_bf16(float x) {
    const unsigned b = __float_as_uint(x);
    if (x != x) return 0x7fff;
    return (unsigned short)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}
inline void ptx_cvt_rn_bf16_f32(unsigned short& d, float x) { d = emu_bf16(x); }
inline void ptx_cvt_rn_bf16x2_f32(unsigned& d, float high, float low) { d = (unsigned)emu_bf16(high) << 16 | emu_bf16(low); }
inline float emu_flush(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.f, x) : x; }   // smallest normal
inline void ptx_ex2_approx_ftz_f32(float& y, float x) { y = emu_flush(exp2f(emu_flush(x))); }
template <typename T> inline void ptx_ld_global_nc_v4_u32(unsigned& x, unsigned& y, unsigned& z, unsigned& w, const T* p) {
    const uint4 q = *reinterpret_cast<const uint4*>(p);
    x = q.x; y = q.y; z = q.z; w = q.w;
}
template <typename T> inline void ptx_mov_u32(T& x, unsigned v) { x = (T)v; }
template <typename T> inline void ptx_mov_u64(T& x, unsigned long long v) { x = (T)v; }
#define emu_sreg_ctaid_x emu_block_index.x
#define emu_sreg_ctaid_y emu_block_index.y
EMU_LOCAL unsigned long long emu_nanoseconds();
#define emu_sreg_globaltimer emu_nanoseconds()

inline void emu_ldmatrix(unsigned& r0, unsigned& r1, unsigned& r2, unsigned& r3, unsigned address, int transposed) {
    EmuTile t;
    t.row = emu_check_shared(address, 16, "ldmatrix");
    t.transposed = transposed;
    EMU_FENCE;
    emu_meet(EMU_LDMATRIX + 16 * transposed, 0xffffffffu, &t, emu_op_ldmatrix);
    EMU_FENCE;
    r0 = t.r[0]; r1 = t.r[1]; r2 = t.r[2]; r3 = t.r[3];
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& r0, unsigned& r1, unsigned& r2, unsigned& r3, unsigned address) {
    emu_ldmatrix(r0, r1, r2, r3, address, 0);
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& r0, unsigned& r1, unsigned& r2, unsigned& r3, unsigned address) {
    emu_ldmatrix(r0, r1, r2, r3, address, 1);
}
inline void ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3,
    unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1, float c0, float c1, float c2, float c3) {
    float d[4] = {c0, c1, c2, c3};
    EmuMma m = {d, {a0, a1, a2, a3}, {b0, b1}};
    EMU_FENCE;
    emu_meet(EMU_MMA, 0xffffffffu, &m, emu_op_mma);
    EMU_FENCE;
    d0 = d[0]; d1 = d[1]; d2 = d[2]; d3 = d[3];
}

// ---- the table of kernels ----------------------------------------------------------------------------
template <typename F, F* f> struct EmuEntry;
template <typename... A, void (*f)(A...)> struct EmuEntry<void(A...), f> {
    static constexpr int count = sizeof...(A);
    static constexpr unsigned sizes[count + 1] = {(unsigned)sizeof(A)..., 0};
    template <int... I> struct Places {};
    template <int N, int... I> struct Upto : Upto<N - 1, N - 1, I...> {};
    template <int... I> struct Upto<0, I...> { typedef Places<I...> Type; };
    template <int... I> static void call(void** args, Places<I...>) { f(*static_cast<A*>(args[I])...); }
    static void invoke(void** args) { call(args, typename Upto<count>::Type()); }
};
#define EMU_KERNEL(name, threads) \
    {#name, &EmuEntry<decltype(name), name>::invoke, EmuEntry<decltype(name), name>::count, EmuEntry<decltype(name), name>::sizes, (unsigned)(threads)}
