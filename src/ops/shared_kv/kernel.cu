// Heads of attention with one key that is its value too: queries normed and rotated in place, the key rotated, backward,
// and the rotation alone. Defines: HEAD_DIM, ROTARY (elements of a head, the last ones rotated), INV_FREQ (ROTARY / 2 doubles).
//
// A block takes a token, a warp a head at a time; lane l holds vectors l and l + 32 of the head's eighths. Neighbours 2i,
// 2i + 1 turn together; the results lie at i and ROTARY / 2 + i. A head is read whole before any of it is written.

#ifndef HEAD_DIM
#define HEAD_DIM 512
#define ROTARY 64
#define INV_FREQ 1.0, 0.5, 0.25, 0.125, 1.0, 0.5, 0.25, 0.125, 1.0, 0.5, 0.25, 0.125, 1.0, 0.5, 0.25, 0.125, \
    1.0, 0.5, 0.25, 0.125, 1.0, 0.5, 0.25, 0.125, 1.0, 0.5, 0.25, 0.125, 1.0, 0.5, 0.25, 0.125
#endif
#define HALF (ROTARY / 2)
#define OCTETS (ROTARY / 8)
#define VECTORS (HEAD_DIM / 8)
#define FIRST (VECTORS - OCTETS)       // of the rotated vectors
#define SLOTS ((VECTORS + 31) / 32)
#define THREADS 256
#define WARPS (THREADS / 32)

__device__ const double inv_freq[] = { INV_FREQ };

struct Angles {
    float c[HALF], s[HALF];
};

// As in mla_rope/kernel.cu: the position of a row, and its angles, formed and reduced in double.
__device__ __forceinline__ int position(int token, int seq, int start0, int len0, int start1) {
    const int i = token % seq;
    return i < len0 ? start0 + i : start1 + (i - len0);
}
__device__ __forceinline__ void fill_angles(Angles& angles, int pos) {
    for (int i = threadIdx.x; i < HALF; i += THREADS) {
        const double angle = (double)pos * inv_freq[i];
        const double turns = rint(angle * 0.15915494309189535);           // 1 / (2 pi)
        __sincosf((float)fma(turns, -6.283185307179586, angle), &angles.s[i], &angles.c[i]);
    }
    __syncthreads();
}
__device__ __forceinline__ void load4(const bf16* p, float* v) {
    const uint2 q = *reinterpret_cast<const uint2*>(p);
    v[0] = bf16_lo(q.x); v[1] = bf16_hi(q.x); v[2] = bf16_lo(q.y); v[3] = bf16_hi(q.y);
}
__device__ __forceinline__ void store4(bf16* p, const float* v) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
}
// Writes pairs 4j .. 4j + 3, neighbours in x, turned, to the rotated part `at`.
__device__ __forceinline__ void store_turned(const Angles& angles, int j, const float x[8], bf16* at) {
    float y[8];
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float c = angles.c[4 * j + e], s = angles.s[4 * j + e];
        y[e] = x[2 * e] * c - x[2 * e + 1] * s;
        y[4 + e] = x[2 * e + 1] * c + x[2 * e] * s;
    }
    store4(at + 4 * j, y);
    store4(at + HALF + 4 * j, y + 4);
}
// Loads what `store_turned` of octet j wrote, as it lies: first elements, then second ones.
__device__ __forceinline__ void load_halves(const bf16* at, int j, float y[8]) {
    load4(at + 4 * j, y);
    load4(at + HALF + 4 * j, y + 4);
}
// The transpose of the turn: halves to neighbours.
__device__ __forceinline__ void turn_back(const Angles& angles, int j, const float y[8], float x[8]) {
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float c = angles.c[4 * j + e], s = angles.s[4 * j + e];
        x[2 * e] = y[e] * c + y[4 + e] * s;
        x[2 * e + 1] = y[4 + e] * c - y[e] * s;
    }
}

// q [T, heads * HEAD_DIM] in place, rstd [T, heads]; kv [T, HEAD_DIM] -> k [T, HEAD_DIM].
extern "C" __global__ void __launch_bounds__(THREADS) shared_kv_fwd(bf16* q, const bf16* kv, bf16* k, float* rstd,
    int heads, int seq, int start0, int len0, int start1, float eps) {
    __shared__ Angles angles;
    const i64 token = blockIdx.x;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    fill_angles(angles, position((int)token, seq, start0, len0, start1));
    // Head `heads` stands for the key.
    for (int h = warp; h <= heads; h += WARPS) {
        const bool key = h == heads;
        const bf16* const from = key ? kv + token * HEAD_DIM : q + (token * heads + h) * HEAD_DIM;
        bf16* const to = key ? k + token * HEAD_DIM : q + (token * heads + h) * HEAD_DIM;
        float x[SLOTS][8], sum = 0.f;
        #pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            const int v = lane + 32 * i;
            if (v >= VECTORS) break;
            load8(from + 8 * v, x[i]);
            #pragma unroll
            for (int e = 0; e < 8; ++e) sum = fmaf(x[i][e], x[i][e], sum);
        }
        sum = warp_sum(sum);
        const float r = key ? 1.0f : 1.0f / sqrtf(sum / (float)HEAD_DIM + eps);
        if (!key && lane == 0) rstd[token * heads + h] = r;
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            const int v = lane + 32 * i;
            if (v >= VECTORS) break;
            #pragma unroll
            for (int e = 0; e < 8; ++e) x[i][e] *= r;
            if (v < FIRST)
                store8(to + 8 * v, x[i]);
            else
                store_turned(angles, v - FIRST, x[i], to + HEAD_DIM - ROTARY);
        }
    }
}

// dq = rstd (dq - q mean(dq q)), turned back, in place; dkv = dk + dv, turned back.
extern "C" __global__ void __launch_bounds__(THREADS) shared_kv_bwd(const bf16* q, const float* rstd, const bf16* dk, const bf16* dv,
    bf16* dq, bf16* dkv, int heads, int seq, int start0, int len0, int start1, float eps) {
    __shared__ Angles angles;
    const i64 token = blockIdx.x;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    fill_angles(angles, position((int)token, seq, start0, len0, start1));
    for (int h = warp; h <= heads; h += WARPS) {
        const bool key = h == heads;
        const i64 at = key ? token * HEAD_DIM : (token * heads + h) * HEAD_DIM;
        const bf16* const first = key ? dk + at : dq + at;
        const bf16* const second = key ? dv + at : q + at;
        bf16* const to = key ? dkv + at : dq + at;
        float g[SLOTS][8], x[SLOTS][8], sum = 0.f;
        #pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            const int v = lane + 32 * i;
            if (v >= VECTORS) break;
            if (v < FIRST) {
                load8(first + 8 * v, g[i]);
                load8(second + 8 * v, x[i]);
            } else {
                load_halves(first + HEAD_DIM - ROTARY, v - FIRST, g[i]);
                load_halves(second + HEAD_DIM - ROTARY, v - FIRST, x[i]);
            }
            #pragma unroll
            for (int e = 0; e < 8; ++e) sum = fmaf(x[i][e], g[i][e], sum);
        }
        const float mean = warp_sum(sum) / (float)HEAD_DIM;
        const float r = key ? 1.0f : rstd[token * heads + h];
        const float factor = key ? 1.0f : -mean;             // of x beside g
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            const int v = lane + 32 * i;
            if (v >= VECTORS) break;
            #pragma unroll
            for (int e = 0; e < 8; ++e) g[i][e] = r * fmaf(factor, x[i][e], g[i][e]);
            if (v >= FIRST) {
                float turned[8];
                turn_back(angles, v - FIRST, g[i], turned);
                store8(to + 8 * v, turned);
            } else {
                store8(to + 8 * v, g[i]);
            }
        }
    }
}

// The rotated part of every head of x [T, heads * HEAD_DIM], in place. The OCTETS lanes of a head, a power of two, lie in one
// warp and read before any of them writes; every lane runs the same number of rounds, so that __syncwarp finds them all.
extern "C" __global__ void __launch_bounds__(THREADS) turn_heads(bf16* x, int heads, int seq, int start0, int len0, int start1, float eps) {
    __shared__ Angles angles;
    const i64 token = blockIdx.x;
    fill_angles(angles, position((int)token, seq, start0, len0, start1));
    for (int round = 0; round < heads * OCTETS; round += THREADS) {
        const int item = round + threadIdx.x, j = item % OCTETS;
        const bool active = item < heads * OCTETS;
        bf16* const at = x + (token * heads + item / OCTETS + 1) * HEAD_DIM - ROTARY;
        float v[8];
        if (active) load8(at + 8 * j, v);
        __syncwarp();
        if (active) store_turned(angles, j, v, at);
    }
}
extern "C" __global__ void __launch_bounds__(THREADS) turn_heads_back(bf16* x, int heads, int seq, int start0, int len0, int start1, float eps) {
    __shared__ Angles angles;
    const i64 token = blockIdx.x;
    fill_angles(angles, position((int)token, seq, start0, len0, start1));
    for (int round = 0; round < heads * OCTETS; round += THREADS) {
        const int item = round + threadIdx.x, j = item % OCTETS;
        const bool active = item < heads * OCTETS;
        bf16* const at = x + (token * heads + item / OCTETS + 1) * HEAD_DIM - ROTARY;
        float y[8], v[8];
        if (active) load_halves(at, j, y);
        __syncwarp();
        if (active) {
            turn_back(angles, j, y, v);
            store8(at + 8 * j, v);
        }
    }
}
