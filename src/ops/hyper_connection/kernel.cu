// Hyper-connections: the maps of a token from its streams, the streams' weighted sum, the sublayer's output back into the
// streams, and the gradients. Defines: STREAMS (2 or 4), ITERATIONS (of Sinkhorn-Knopp), HEAD (pre alone), CARRIED (a head's
// backward adds another gradient), EPS.
//
// A block takes a token; in the backward of the maps a block takes tokens p, p + gridDim.x, ... and sums over them. A
// stream's values lie HIDDEN apart. Element (i, j) of res belongs to lane i * STREAMS + j of the first warp; the lanes
// above repeat them, so that every shuffle has the whole warp.

#ifndef STREAMS
#define STREAMS 4
#define ITERATIONS 20
#define HEAD 0
#define CARRIED 0
#define EPS 1e-6f
#endif
#define N STREAMS
#define THREADS 256
#define WARPS (THREADS / 32)
#define MAPS (HEAD ? N : N * (N + 2))
#define ROWS ((MAPS + 7) / 8 * 8)
#define SCALES 4
#define STEPS (2 * ITERATIONS - 1)
#define FULL 0xffffffffu

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Sums over a row and a column of res, one element a lane.
__device__ __forceinline__ float row_sum(float v) {
    #pragma unroll
    for (int o = 1; o < N; o <<= 1) v += __shfl_xor_sync(FULL, v, o);
    return v;
}
__device__ __forceinline__ float row_max(float v) {
    #pragma unroll
    for (int o = 1; o < N; o <<= 1) v = fmaxf(v, __shfl_xor_sync(FULL, v, o));
    return v;
}
__device__ __forceinline__ float column_sum(float v) {
    #pragma unroll
    for (int o = N; o < N * N; o <<= 1) v += __shfl_xor_sync(FULL, v, o);
    return v;
}

// The logit of map k.
__device__ __forceinline__ float logit(const float* proj, const bf16* scale, const bf16* base, int k, float rstd) {
    return fmaf(rstd * proj[k], to_f32(scale[min(k / N, 2)]), to_f32(base[k]));
}

// What Sinkhorn-Knopp leaves behind for its backward: the matrix after each step, and what was divided by.
struct Trail {
    float m[STEPS][32], by[STEPS][32];
};

// The lane's element of res from its logit; `p` is the softmax that it begins with. With `trail` each step is kept.
__device__ __forceinline__ float sinkhorn(float h, float* p, Trail* trail) {
    const float e = expf(h - row_max(h));
    *p = e / row_sum(e);
    float m = *p + EPS;
    #pragma unroll 1
    for (int t = 0; t < STEPS; ++t) {
        const float by = (t & 1 ? row_sum(m) : column_sum(m)) + EPS;
        m = m / by;
        if (trail) {
            trail->m[t][threadIdx.x] = m;
            trail->by[t][threadIdx.x] = by;
        }
    }
    return m;
}

// x [T, N*hidden], proj [T, ROWS] -> y [T, hidden], maps [T, MAPS], rstd [T].
extern "C" __global__ void __launch_bounds__(THREADS) hyper_pre_fwd(const bf16* x, const float* proj, const bf16* scale, const bf16* base,
    bf16* y, float* maps, float* rstd, int hidden, float eps) {
    __shared__ float scratch[32], pre[N];
    const i64 token = blockIdx.x;
    const int vectors = hidden / 8;
    x += token * N * hidden;
    float sum = 0.f;
    for (int c = threadIdx.x; c < N * vectors; c += THREADS) {
        float v[8];
        load8(x + 8 * c, v);
        #pragma unroll
        for (int e = 0; e < 8; ++e) sum = fmaf(v[e], v[e], sum);
    }
    sum = block_sum(sum, scratch);
    const float r = 1.0f / sqrtf(sum / (float)(N * hidden) + eps);
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x;
        proj += token * ROWS;
        maps += token * MAPS;
        if (lane == 0) rstd[token] = r;
        if (lane < N) {
            const float m = sigmoid(logit(proj, scale, base, lane, r)) + EPS;
            maps[lane] = m;
            pre[lane] = m;
        }
#if !HEAD
        if (lane >= N && lane < 2 * N) maps[lane] = 2.0f * sigmoid(logit(proj, scale, base, lane, r));
        float p;
        const float m = sinkhorn(logit(proj, scale, base, 2 * N + lane % (N * N), r), &p, nullptr);
        if (lane < N * N) maps[2 * N + lane] = m;
#endif
    }
    __syncthreads();
    for (int c = threadIdx.x; c < vectors; c += THREADS) {
        float all[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            float v[8];
            load8(x + (i64)j * hidden + 8 * c, v);
            #pragma unroll
            for (int e = 0; e < 8; ++e) all[e] = fmaf(pre[j], v[e], all[e]);
        }
        store8(y + token * hidden + 8 * c, all);
    }
}

// Gradients through the maps and the weighted sum: with the logits' gradients dh, dproj = dh rstd scale, the sums of dh (base)
// and dh rstd proj (scale), and dx = pre dy + res dnext - x rstd^2 (sum of scale times its gradient) / (N hidden).
extern "C" __global__ void __launch_bounds__(THREADS) hyper_pre_bwd(const bf16* x, const float* proj, const bf16* scale, const bf16* base,
    const float* maps, const float* rstd, const bf16* dy, const float* dmaps, const bf16* dnext, bf16* dx, bf16* dproj, float* partial,
    int tokens, int hidden) {
    __shared__ float scratch[32], dots[N], weights[MAPS], pull;
#if !HEAD
    __shared__ Trail trail;
#endif
    const int vectors = hidden / 8, lane = threadIdx.x & 31;
    float base_sum = 0.f, scale_sum[3] = {0.f, 0.f, 0.f};   // of warp 0: lane k has map k of pre and post
#if !HEAD
    float res_sum = 0.f;                                    // lane e has element e of res
#endif
    for (i64 token = blockIdx.x; token < tokens; token += gridDim.x) {
        const bf16* const xs = x + token * N * hidden;
        float dot[N];
        #pragma unroll
        for (int j = 0; j < N; ++j) dot[j] = 0.f;
        for (int c = threadIdx.x; c < vectors; c += THREADS) {
            float d[8];
            load8(dy + token * hidden + 8 * c, d);
            #pragma unroll
            for (int j = 0; j < N; ++j) {
                float v[8];
                load8(xs + (i64)j * hidden + 8 * c, v);
                #pragma unroll
                for (int e = 0; e < 8; ++e) dot[j] = fmaf(v[e], d[e], dot[j]);
            }
        }
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            const float sum = block_sum(dot[j], scratch);
            if (threadIdx.x == 0) dots[j] = sum;
        }
        if (threadIdx.x < MAPS) weights[threadIdx.x] = maps[token * MAPS + threadIdx.x];
        __syncthreads();
        if (threadIdx.x < 32) {
            const float r = rstd[token];
            const float* const own = proj + token * ROWS;
            bf16* const to = dproj + token * ROWS;
            // Of pre (lanes below N) and post (below 2 N).
            float dh = 0.f, pulled = 0.f;
            if (lane < N) {
                const float s = weights[lane] - EPS;
                dh = dots[lane] * s * (1.0f - s);
            }
#if !HEAD
            const float* const given = dmaps + token * (MAPS - N);
            if (lane >= N && lane < 2 * N) dh = given[lane - N] * weights[lane] * (1.0f - 0.5f * weights[lane]);
#endif
            if (lane < (HEAD ? N : 2 * N)) {
                to[lane] = to_bf16(dh * r * to_f32(scale[lane / N]));
                pulled = dh * r * own[lane];
                base_sum += dh;
            }
            const float of_pre = warp_sum(lane < N ? pulled : 0.f);
            scale_sum[0] += of_pre;
            float all = of_pre * to_f32(scale[0]);
#if !HEAD
            const float of_post = warp_sum(lane >= N && lane < 2 * N ? pulled : 0.f);
            scale_sum[1] += of_post;
            const int e = lane % (N * N), k = 2 * N + e;
            float p;
            sinkhorn(logit(own, scale, base, k, r), &p, &trail);
            float d = given[N + e];
            #pragma unroll 1
            for (int t = STEPS - 1; t >= 0; --t) {
                const float m = trail.m[t][lane];
                d = (d - (t & 1 ? row_sum(d * m) : column_sum(d * m))) / trail.by[t][lane];
            }
            d = p * (d - row_sum(d * p));
            if (lane < N * N) {
                to[k] = to_bf16(d * r * to_f32(scale[2]));
                res_sum += d;
            }
            const float of_res = warp_sum(lane < N * N ? d * r * own[k] : 0.f);
            scale_sum[2] += of_res;
            all += of_post * to_f32(scale[1]) + of_res * to_f32(scale[2]);
#endif
            if (lane >= MAPS && lane < ROWS) to[lane] = to_bf16(0.f);
            if (lane == 0) pull = -all * r * r / (float)(N * hidden);
        }
        __syncthreads();
        for (int c = threadIdx.x; c < vectors; c += THREADS) {
            float d[8];
            load8(dy + token * hidden + 8 * c, d);
#if !HEAD
            float next[N][8];
            #pragma unroll
            for (int j = 0; j < N; ++j) load8(dnext + (token * N + j) * hidden + 8 * c, next[j]);
#endif
            #pragma unroll
            for (int i = 0; i < N; ++i) {
                float v[8];
                load8(xs + (i64)i * hidden + 8 * c, v);
                #pragma unroll
                for (int e = 0; e < 8; ++e) v[e] = fmaf(weights[i], d[e], pull * v[e]);
#if !HEAD
                #pragma unroll
                for (int j = 0; j < N; ++j) {
                    const float res = weights[2 * N + i * N + j];
                    #pragma unroll
                    for (int e = 0; e < 8; ++e) v[e] = fmaf(res, next[j][e], v[e]);
                }
#elif CARRIED
                float other[8];
                load8(dnext + (token * N + i) * hidden + 8 * c, other);
                #pragma unroll
                for (int e = 0; e < 8; ++e) v[e] += other[e];
#endif
                store8(dx + (token * N + i) * hidden + 8 * c, v);
            }
        }
        __syncthreads();   // the next token writes dots, weights and pull
    }
    if (threadIdx.x < 32) {
        partial += (i64)blockIdx.x * (ROWS + SCALES);
        if (lane < (HEAD ? N : 2 * N)) partial[lane] = base_sum;
#if !HEAD
        if (lane < N * N) partial[2 * N + lane] = res_sum;
#endif
        if (lane >= MAPS && lane < ROWS) partial[lane] = 0.f;
        if (lane < SCALES) partial[ROWS + lane] = lane == 0 ? scale_sum[0] : lane == 1 ? scale_sum[1] : lane == 2 ? scale_sum[2] : 0.f;
    }
}

#if !HEAD
// next_j = sum_i res_ij x_i + post_j out.
extern "C" __global__ void __launch_bounds__(THREADS) hyper_post_fwd(const bf16* x, const bf16* out, const float* maps, bf16* next, int hidden) {
    const i64 token = blockIdx.x;
    float weights[MAPS - N];
    #pragma unroll
    for (int k = 0; k < MAPS - N; ++k) weights[k] = maps[token * MAPS + N + k];
    for (int c = threadIdx.x; c < hidden / 8; c += THREADS) {
        float o[8], v[N][8];
        load8(out + token * hidden + 8 * c, o);
        #pragma unroll
        for (int i = 0; i < N; ++i) load8(x + (token * N + i) * hidden + 8 * c, v[i]);
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            float sum[8];
            #pragma unroll
            for (int e = 0; e < 8; ++e) sum[e] = weights[j] * o[e];
            #pragma unroll
            for (int i = 0; i < N; ++i)
                #pragma unroll
                for (int e = 0; e < 8; ++e) sum[e] = fmaf(weights[N + i * N + j], v[i][e], sum[e]);
            store8(next + (token * N + j) * hidden + 8 * c, sum);
        }
    }
}

// dout = sum_j post_j dnext_j; dmaps: out . dnext_j, then x_i . dnext_j.
extern "C" __global__ void __launch_bounds__(THREADS) hyper_post_bwd(const bf16* x, const bf16* out, const float* maps, const bf16* dnext,
    bf16* dout, float* dmaps, int hidden) {
    __shared__ float parts[WARPS][MAPS - N];
    const i64 token = blockIdx.x;
    float post[N], dot[MAPS - N];
    #pragma unroll
    for (int j = 0; j < N; ++j) post[j] = maps[token * MAPS + N + j];
    #pragma unroll
    for (int k = 0; k < MAPS - N; ++k) dot[k] = 0.f;
    for (int c = threadIdx.x; c < hidden / 8; c += THREADS) {
        float d[N][8], v[8], sum[8];
        #pragma unroll
        for (int j = 0; j < N; ++j) load8(dnext + (token * N + j) * hidden + 8 * c, d[j]);
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            sum[e] = 0.f;
            #pragma unroll
            for (int j = 0; j < N; ++j) sum[e] = fmaf(post[j], d[j][e], sum[e]);
        }
        store8(dout + token * hidden + 8 * c, sum);
        load8(out + token * hidden + 8 * c, v);
        #pragma unroll
        for (int j = 0; j < N; ++j)
            #pragma unroll
            for (int e = 0; e < 8; ++e) dot[j] = fmaf(v[e], d[j][e], dot[j]);
        #pragma unroll
        for (int i = 0; i < N; ++i) {
            load8(x + (token * N + i) * hidden + 8 * c, v);
            #pragma unroll
            for (int j = 0; j < N; ++j)
                #pragma unroll
                for (int e = 0; e < 8; ++e) dot[N + i * N + j] = fmaf(v[e], d[j][e], dot[N + i * N + j]);
        }
    }
    #pragma unroll
    for (int k = 0; k < MAPS - N; ++k) {
        const float sum = warp_sum(dot[k]);
        if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5][k] = sum;
    }
    __syncthreads();
    if (threadIdx.x < MAPS - N) {
        float sum = 0.f;
        #pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += parts[w][threadIdx.x];
        dmaps[token * (MAPS - N) + threadIdx.x] = sum;
    }
}

// The same x in every stream.
extern "C" __global__ void __launch_bounds__(THREADS) hyper_expand(const bf16* x, bf16* out, int hidden) {
    const i64 token = blockIdx.x;
    for (int c = threadIdx.x; c < hidden / 8; c += THREADS) {
        const uint4 v = *reinterpret_cast<const uint4*>(x + token * hidden + 8 * c);
        #pragma unroll
        for (int j = 0; j < N; ++j) *reinterpret_cast<uint4*>(out + (token * N + j) * hidden + 8 * c) = v;
    }
}

// The same x added to every stream.
extern "C" __global__ void __launch_bounds__(THREADS) hyper_expand_add(const bf16* x, const bf16* add, bf16* out, int hidden) {
    const i64 token = blockIdx.x;
    for (int c = threadIdx.x; c < hidden / 8; c += THREADS) {
        float v[8];
        load8(x + token * hidden + 8 * c, v);
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            float sum[8];
            load8(add + (token * N + j) * hidden + 8 * c, sum);
            #pragma unroll
            for (int e = 0; e < 8; ++e) sum[e] += v[e];
            store8(out + (token * N + j) * hidden + 8 * c, sum);
        }
    }
}

// Sum of the streams.
extern "C" __global__ void __launch_bounds__(THREADS) hyper_sum(const bf16* x, bf16* out, int hidden) {
    const i64 token = blockIdx.x;
    for (int c = threadIdx.x; c < hidden / 8; c += THREADS) {
        float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            float v[8];
            load8(x + (token * N + j) * hidden + 8 * c, v);
            #pragma unroll
            for (int e = 0; e < 8; ++e) sum[e] += v[e];
        }
        store8(out + token * hidden + 8 * c, sum);
    }
}
#endif
