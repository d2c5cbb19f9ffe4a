// Heads of multi-latent attention from its up-projections: rotates the queries in place, and makes keys of each
// head's own part and the rotated part that all heads share; and backward.
// Defines: NOPE, ROTARY, VALUE (elements of a head), INV_FREQ (ROTARY / 2 doubles), AMPLITUDE.
//
// A block takes one token. Neighbours 2i, 2i + 1 turn together; the results lie at i and ROTARY / 2 + i. A thread
// turns 8 neighbouring inputs (4 pairs); the ROTARY / 8 threads of a head, a power of two, lie in one warp and read
// before any of them writes, so that the rotation may be in place.

#ifndef NOPE
#define NOPE 128
#define ROTARY 64
#define VALUE 128
#define INV_FREQ 1.0, 0.5, 0.25, 0.125
#define AMPLITUDE 1.0f
#endif
#define HALF (ROTARY / 2)
#define OCTETS (ROTARY / 8)
#define QK (NOPE + ROTARY)
#define THREADS 256

__device__ const double inv_freq[] = { INV_FREQ };

struct Angles {
    float c[HALF], s[HALF];
};

// Position in the sequence of row `token`; chunks of a context-parallel rank as in rope/positions.rs.
__device__ __forceinline__ int position(int token, int seq, int start0, int len0, int start1) {
    const int i = token % seq;
    return i < len0 ? start0 + i : start1 + (i - len0);
}
// Angles are formed and reduced to [-pi, pi] in double, as in rope/kernel.cu.
__device__ __forceinline__ void fill_angles(Angles& angles, int pos) {
    for (int i = threadIdx.x; i < HALF; i += THREADS) {
        const double angle = (double)pos * inv_freq[i];
        const double turns = rint(angle * 0.15915494309189535);           // 1 / (2 pi)
        float s, c;
        __sincosf((float)fma(turns, -6.283185307179586, angle), &s, &c);
        angles.c[i] = AMPLITUDE * c;
        angles.s[i] = AMPLITUDE * s;
    }
    __syncthreads();
}
// Pairs 4j .. 4j + 3 in x (as neighbours) -> their first elements in y[0..4], their second ones in y[4..8].
__device__ __forceinline__ void turn(const Angles& angles, int j, const float x[8], float y[8]) {
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float c = angles.c[4 * j + e], s = angles.s[4 * j + e];
        y[e] = x[2 * e] * c - x[2 * e + 1] * s;
        y[4 + e] = x[2 * e + 1] * c + x[2 * e] * s;
    }
}
// The transpose of `turn`.
__device__ __forceinline__ void turn_back(const Angles& angles, int j, const float y[8], float x[8]) {
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float c = angles.c[4 * j + e], s = angles.s[4 * j + e];
        x[2 * e] = y[e] * c + y[4 + e] * s;
        x[2 * e + 1] = y[4 + e] * c - y[e] * s;
    }
}
__device__ __forceinline__ void load4(const bf16* p, float v[4]) {
    const uint2 q = *reinterpret_cast<const uint2*>(p);
    v[0] = bf16_lo(q.x); v[1] = bf16_hi(q.x); v[2] = bf16_lo(q.y); v[3] = bf16_hi(q.y);
}
__device__ __forceinline__ void store4(bf16* p, const float v[4]) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
}
__device__ __forceinline__ void copy8(bf16* to, const bf16* from) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
}

// q [T, heads * QK] in place; kv [T, heads * (NOPE + VALUE)], k_rope [T, ROTARY] -> k [T, heads * QK], v [T, heads * VALUE].
extern "C" __global__ void __launch_bounds__(THREADS) mla_rope_fwd(bf16* q, const bf16* kv, const bf16* k_rope, bf16* k, bf16* v,
    int heads, int seq, int start0, int len0, int start1) {
    __shared__ Angles angles;
    __shared__ __align__(16) bf16 turned[ROTARY];
    const i64 token = blockIdx.x;
    fill_angles(angles, position((int)token, seq, start0, len0, start1));
    if (threadIdx.x < OCTETS) {
        float x[8], y[8];
        load8(k_rope + token * ROTARY + 8 * threadIdx.x, x);
        turn(angles, threadIdx.x, x, y);
        store4(turned + 4 * threadIdx.x, y);
        store4(turned + HALF + 4 * threadIdx.x, y + 4);
    }
    __syncthreads();

    // Every lane runs the same number of rounds, so that __syncwarp finds the whole warp.
    for (int round = 0; round < heads * OCTETS; round += THREADS) {
        const int item = round + threadIdx.x, j = item % OCTETS;
        const bool active = item < heads * OCTETS;
        bf16* const head = q + (token * heads + item / OCTETS) * QK + NOPE;
        float x[8], y[8];
        if (active) {
            load8(head + 8 * j, x);
            turn(angles, j, x, y);
        }
        __syncwarp();
        if (active) {
            store4(head + 4 * j, y);
            store4(head + HALF + 4 * j, y + 4);
        }
    }
    constexpr int K_PIECES = QK / 8, V_PIECES = VALUE / 8;
    for (int item = threadIdx.x; item < heads * K_PIECES; item += THREADS) {
        const int h = item / K_PIECES, at = item % K_PIECES * 8;
        const bf16* from = at < NOPE ? kv + (token * heads + h) * (NOPE + VALUE) + at : turned + (at - NOPE);
        copy8(k + (token * heads + h) * QK + at, from);
    }
    for (int item = threadIdx.x; item < heads * V_PIECES; item += THREADS) {
        const int h = item / V_PIECES, at = item % V_PIECES * 8;
        copy8(v + (token * heads + h) * VALUE + at, kv + (token * heads + h) * (NOPE + VALUE) + NOPE + at);
    }
}

// dq [T, heads * QK] in place; dk [T, heads * QK], dv [T, heads * VALUE] -> dkv [T, heads * (NOPE + VALUE)] and
// dk_rope [T, ROTARY], the sum over the heads in a fixed order.
extern "C" __global__ void __launch_bounds__(THREADS) mla_rope_bwd(bf16* dq, const bf16* dk, const bf16* dv, bf16* dkv, bf16* dk_rope,
    int heads, int seq, int start0, int len0, int start1) {
    constexpr int LINES = THREADS / OCTETS;                                // heads that are summed side by side
    __shared__ Angles angles;
    __shared__ float sums[LINES][ROTARY];
    __shared__ float total[ROTARY];
    const i64 token = blockIdx.x;
    fill_angles(angles, position((int)token, seq, start0, len0, start1));
    for (int round = 0; round < heads * OCTETS; round += THREADS) {
        const int item = round + threadIdx.x, j = item % OCTETS;
        const bool active = item < heads * OCTETS;
        bf16* const head = dq + (token * heads + item / OCTETS) * QK + NOPE;
        float x[8], y[8];
        if (active) {
            load4(head + 4 * j, y);
            load4(head + HALF + 4 * j, y + 4);
            turn_back(angles, j, y, x);
        }
        __syncwarp();
        if (active) store8(head + 8 * j, x);
    }
    constexpr int K_PIECES = NOPE / 8, V_PIECES = VALUE / 8, PIECES = K_PIECES + V_PIECES;
    for (int item = threadIdx.x; item < heads * PIECES; item += THREADS) {
        const int h = item / PIECES, piece = item % PIECES;
        const bf16* from = piece < K_PIECES ? dk + (token * heads + h) * QK + piece * 8
                                            : dv + (token * heads + h) * VALUE + (piece - K_PIECES) * 8;
        copy8(dkv + (token * heads + h) * (NOPE + VALUE) + piece * 8, from);
    }
    const int j = threadIdx.x % OCTETS, line = threadIdx.x / OCTETS;
    float sum[8], x[8];
    #pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] = 0.f;
    for (int h = line; h < heads; h += LINES) {
        load8(dk + (token * heads + h) * QK + NOPE + 8 * j, x);
        #pragma unroll
        for (int e = 0; e < 8; ++e) sum[e] += x[e];
    }
    #pragma unroll
    for (int e = 0; e < 8; ++e) sums[line][8 * j + e] = sum[e];
    __syncthreads();
    for (int i = threadIdx.x; i < ROTARY; i += THREADS) {
        float all = 0.f;
        for (int l = 0; l < LINES; ++l) all += sums[l][i];
        total[i] = all;
    }
    __syncthreads();
    if (threadIdx.x < OCTETS) {
        float y[8];
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            y[e] = total[4 * threadIdx.x + e];
            y[4 + e] = total[HALF + 4 * threadIdx.x + e];
        }
        turn_back(angles, threadIdx.x, y, x);
        store8(dk_rope + token * ROTARY + 8 * threadIdx.x, x);
    }
}
