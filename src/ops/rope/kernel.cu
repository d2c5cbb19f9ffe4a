// Splits QKV rows into q, k and v, with an optional RMSNorm of each q and k head, and rotates; and backward.
// Defines: HEAD_DIM, ROTARY_DIM, VEC (elements of a vector access: 8, or 4 when ROTARY_DIM / 2 is no multiple
// of 8), GROUP (lanes that share a head), INV_FREQ (list of ROTARY_DIM / 2 doubles), AMPLITUDE (factor of rotated elements),
// ZERO_CENTERED (the norms' weights are stored less one), GATED (rows of qkv end in the q_heads heads of an output gate), BIAS
// (a bias is added to qkv in the forward without norm).
//
// A warp takes one token (or every splits-th head group of it) and computes the token's sines once for all its
// heads. GROUP lanes share a head; lane j of a group holds an item: elements j*VEC.. of the rotated half and
// their partners, so no exchange between lanes is needed to rotate. Past the rotated part an item is two
// neighbouring vectors that only pass through.

#ifndef HEAD_DIM
#define HEAD_DIM 128
#define ROTARY_DIM 128
#define VEC 8
#define GROUP 8
#define INV_FREQ 1.0, 0.5, 0.25, 0.125
#define ZERO_CENTERED 0
#define GATED 0
#define BIAS 0
#define AMPLITUDE 1.0f
#endif
#define HALF (ROTARY_DIM / 2)
#define PAIR_ITEMS (HALF / VEC)
#define REST ((HEAD_DIM - ROTARY_DIM) / VEC)
#define ITEMS (PAIR_ITEMS + (REST + 1) / 2)
#define HEADS_PER_WARP (32 / GROUP)
#define TABLE (HALF > 0 ? HALF : 1)
#define FWD_WARPS 4
#define BWD_WARPS 8

__device__ const double inv_freq[] = { INV_FREQ };

// AXES: each pair turns with one coordinate of its position, AXIS_OF_PAIR; src/ops/rope/axes.rs. 1: text with an image of
// AXES_SECOND^2 tokens at AXES_FIRST (time, height, width); 2: patches of images of AXES_FIRST^2 (row, column); 3: of a video of
// AXES_FIRST rows and AXES_SECOND columns (frame, row, column).
#ifdef AXES
__device__ const int axis_of_pair[] = { AXIS_OF_PAIR };
__device__ __forceinline__ int coordinate(int pos, int axis) {
#if AXES == 1
    constexpr int IMAGE = AXES_SECOND * AXES_SECOND;
    const int at = pos - AXES_FIRST;
    if (at < 0) return pos;
    if (at >= IMAGE) return pos - IMAGE + AXES_SECOND;
    return AXES_FIRST + (axis == 0 ? 0 : axis == 1 ? at / AXES_SECOND : at % AXES_SECOND);
#elif AXES == 3
    return axis == 0 ? pos / (AXES_FIRST * AXES_SECOND) : axis == 1 ? pos / AXES_SECOND % AXES_FIRST : pos % AXES_SECOND;
#else
    constexpr int BLOCKS = AXES_FIRST / 2 > 0 ? AXES_FIRST / 2 : 1;
    const int block = pos / 4, within = pos % 4;
    return axis == 0 ? block / BLOCKS * 2 + within / 2 : block % BLOCKS * 2 + within % 2;
#endif
}
#endif

#if VEC == 8
typedef uint4 Raw;
__device__ __forceinline__ void unpack(Raw q, float v[VEC]) {
    v[0] = bf16_lo(q.x); v[1] = bf16_hi(q.x); v[2] = bf16_lo(q.y); v[3] = bf16_hi(q.y);
    v[4] = bf16_lo(q.z); v[5] = bf16_hi(q.z); v[6] = bf16_lo(q.w); v[7] = bf16_hi(q.w);
}
__device__ __forceinline__ Raw pack(const float v[VEC]) {
    return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}
__device__ __forceinline__ Raw zero() { return make_uint4(0, 0, 0, 0); }
#else
typedef uint2 Raw;
__device__ __forceinline__ void unpack(Raw q, float v[VEC]) {
    v[0] = bf16_lo(q.x); v[1] = bf16_hi(q.x); v[2] = bf16_lo(q.y); v[3] = bf16_hi(q.y);
}
__device__ __forceinline__ Raw pack(const float v[VEC]) { return make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])); }
__device__ __forceinline__ Raw zero() { return make_uint2(0, 0); }
#endif

// What this lane holds of its head.
struct Lane {
    int sub;                 // which of the warp's heads
    int item;
    bool first, second;      // whether its two vectors exist
    bool pair;               // whether they are rotated
    int at0, at1;            // element offsets in the head
};
__device__ __forceinline__ Lane lane_layout() {
    Lane l;
    const int lane = threadIdx.x & 31;
    l.sub = lane / GROUP;
    l.item = lane % GROUP;
    l.pair = l.item < PAIR_ITEMS;
    l.first = l.item < ITEMS;
    const int rest = 2 * (l.item - PAIR_ITEMS);
    l.second = l.pair || (l.first && rest + 1 < REST);
    l.at0 = l.pair ? l.item * VEC : ROTARY_DIM + rest * VEC;
    l.at1 = l.pair ? HALF + l.item * VEC : l.at0 + VEC;
    return l;
}
__device__ __forceinline__ void load_item(const bf16* head, const Lane& l, bool active, Raw& a, Raw& b) {
    a = active && l.first ? *reinterpret_cast<const Raw*>(head + l.at0) : zero();
    b = active && l.second ? *reinterpret_cast<const Raw*>(head + l.at1) : zero();
}
__device__ __forceinline__ void store_item(bf16* head, const Lane& l, bool active, const float a[VEC], const float b[VEC]) {
    if (active && l.first) *reinterpret_cast<Raw*>(head + l.at0) = pack(a);
    if (active && l.second) *reinterpret_cast<Raw*>(head + l.at1) = pack(b);
}
// Sum over the lanes of a head; every lane of the warp must take part.
__device__ __forceinline__ float head_sum(float x) {
    #pragma unroll
    for (int o = GROUP / 2; o; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

// Position in the sequence of row `token`; chunks of a context-parallel rank as in rope/positions.rs.
__device__ __forceinline__ int position(int token, int seq, int start0, int len0, int start1) {
    const int i = token % seq;
    return i < len0 ? start0 + i : start1 + (i - len0);
}
// Fills the warp's table with the cosines and sines of `pos`. The angle is formed and reduced to [-pi, pi] in
// double: a float near 8191 is only exact to 2^-12 radians. In that range the fast sine and cosine are off by
// less than 2^-21, and need no stack as the exact ones do.
__device__ __forceinline__ void fill_angles(int pos, float (*table)[TABLE]) {
    __syncwarp();            // the table may still be read for the token before
    for (int i = threadIdx.x & 31; i < HALF; i += 32) {
#ifdef AXES
        const double angle = (double)coordinate(pos, axis_of_pair[i]) * inv_freq[i];
#else
        const double angle = (double)pos * inv_freq[i];
#endif
        const double turns = rint(angle * 0.15915494309189535);           // 1 / (2 pi)
        float s, c;
        __sincosf((float)fma(turns, -6.283185307179586, angle), &s, &c);
        table[0][i] = AMPLITUDE * c;
        table[1][i] = AMPLITUDE * s;
    }
    __syncwarp();
}
// This lane's cosines and sines.
__device__ __forceinline__ void read_angles(const Lane& l, float (*table)[TABLE], float c[VEC], float s[VEC]) {
    #pragma unroll
    for (int e = 0; e < VEC; ++e) {
        c[e] = l.pair ? table[0][l.item * VEC + e] : 1.f;
        s[e] = l.pair ? table[1][l.item * VEC + e] : 0.f;
    }
}
// Head h of a token among q, then k, then v.
__device__ __forceinline__ i64 head_offset(i64 token, int h, int heads) { return (token * heads + h) * HEAD_DIM; }
template <typename T>
__device__ __forceinline__ T* pick_head(T* q, T* k, T* v, i64 token, int h, int q_heads, int kv_heads) {
    if (h < q_heads) return q + head_offset(token, h, q_heads);
    h -= q_heads;
    if (h < kv_heads) return k + head_offset(token, h, kv_heads);
    return v + head_offset(token, h - kv_heads, kv_heads);
}

// The same with the output gate's heads after them.
__device__ __forceinline__ const bf16* pick_gradient(const bf16* dq, const bf16* dk, const bf16* dv, const bf16* dgate, i64 token, int h,
    int q_heads, int kv_heads) {
    const int gate = h - q_heads - 2 * kv_heads;
    if (GATED && gate >= 0) return dgate + head_offset(token, gate, q_heads);
    return pick_head(dq, dk, dv, token, h, q_heads, kv_heads);
}
// Vectors of a norm's weight.
__device__ __forceinline__ void unpack_weight(Raw q, float v[VEC]) {
    unpack(q, v);
    #pragma unroll
    for (int e = 0; e < VEC; ++e) v[e] += ZERO_CENTERED;
}

template <bool NORM>
__device__ __forceinline__ void forward(const bf16* qkv, const bf16* bias, const bf16* q_weight, const bf16* k_weight, bf16* q, bf16* k, bf16* v, float* rstd,
    int tokens, int q_heads, int kv_heads, int splits, int seq, int start0, int len0, int start1, float eps) {
    __shared__ float tables[FWD_WARPS][2][TABLE];
    const int warp = threadIdx.x >> 5;
    const int work = (int)blockIdx.x * FWD_WARPS + warp;              // tokens * splits fits an int
    const i64 token = work / splits;
    if (token >= tokens) return;
    const Lane l = lane_layout();
    const int normed = q_heads + kv_heads, heads = normed + kv_heads, width = heads + GATED * q_heads;
    int h = (work % splits) * HEADS_PER_WARP + l.sub;
    Raw ra, rb;
    load_item(qkv + head_offset(token, h, width), l, h < heads, ra, rb);
    float c[VEC], s[VEC];
    fill_angles(position((int)token, seq, start0, len0, start1), tables[warp]);
    read_angles(l, tables[warp], c, s);
    // Every lane runs the same number of rounds, so that head_sum finds the whole warp.
    for (int round = (work % splits) * HEADS_PER_WARP; round < heads; round += splits * HEADS_PER_WARP) {
        const int next = h + splits * HEADS_PER_WARP;
        Raw na, nb;
        load_item(qkv + head_offset(token, next, width), l, next < heads, na, nb);
        float a[VEC], b[VEC];
        unpack(ra, a);
        unpack(rb, b);
#if BIAS
        Raw ba, bb;
        load_item(bias + h * HEAD_DIM, l, h < heads, ba, bb);
        float add0[VEC], add1[VEC];
        unpack(ba, add0);
        unpack(bb, add1);
        #pragma unroll
        for (int e = 0; e < VEC; ++e) { a[e] += add0[e]; b[e] += add1[e]; }
#endif
        if (NORM) {
            float sum = 0.f;
            #pragma unroll
            for (int e = 0; e < VEC; ++e) sum = fmaf(a[e], a[e], fmaf(b[e], b[e], sum));
            const float r = 1.0f / sqrtf(head_sum(sum) * (1.0f / HEAD_DIM) + eps);
            if (h < normed) {
                if (l.item == 0) rstd[token * normed + h] = r;
                Raw wa, wb;
                load_item(h < q_heads ? q_weight : k_weight, l, true, wa, wb);
                float w0[VEC], w1[VEC];
                unpack_weight(wa, w0);
                unpack_weight(wb, w1);
                #pragma unroll
                for (int e = 0; e < VEC; ++e) { a[e] = a[e] * r * w0[e]; b[e] = b[e] * r * w1[e]; }
            }
        }
        if (h < normed && l.pair) {
            #pragma unroll
            for (int e = 0; e < VEC; ++e) {
                const float x = a[e], y = b[e];
                a[e] = x * c[e] - y * s[e];
                b[e] = y * c[e] + x * s[e];
            }
        }
        if (h < heads) store_item(pick_head(q, k, v, token, h, q_heads, kv_heads), l, true, a, b);
        ra = na;
        rb = nb;
        h = next;
    }
}

#if !BIAS
extern "C" __global__ void __launch_bounds__(128) qkv_rope_fwd(const bf16* qkv, bf16* q, bf16* k, bf16* v,
    int tokens, int q_heads, int kv_heads, int splits, int seq, int start0, int len0, int start1)
#else
extern "C" __global__ void __launch_bounds__(128) qkv_rope_bias_fwd(const bf16* qkv, const bf16* bias, bf16* q, bf16* k, bf16* v,
    int tokens, int q_heads, int kv_heads, int splits, int seq, int start0, int len0, int start1)
#endif
{
#if !BIAS
    const bf16* const bias = qkv;    // not read
#endif
    forward<false>(qkv, bias, qkv, qkv, q, k, v, (float*)0, tokens, q_heads, kv_heads, splits, seq, start0, len0, start1, 0.f);
}
extern "C" __global__ void __launch_bounds__(128) qkv_norm_rope_fwd(const bf16* qkv, const bf16* q_weight, const bf16* k_weight, bf16* q, bf16* k, bf16* v, float* rstd,
    int tokens, int q_heads, int kv_heads, int splits, int seq, int start0, int len0, int start1, float eps) {
    forward<true>(qkv, qkv, q_weight, k_weight, q, k, v, rstd, tokens, q_heads, kv_heads, splits, seq, start0, len0, start1, eps);
}

// The gradient rotates back, then goes through the norm as in rmsnorm/kernel.cu. Block p takes tokens
// p, p + gridDim.x, ...; its warps share their head groups, and the weight gradients are added over lanes,
// then warps, in a fixed order.
template <bool NORM>
__device__ __forceinline__ void backward(const bf16* dq, const bf16* dk, const bf16* dv, const bf16* dgate, const bf16* qkv, const bf16* q_weight, const bf16* k_weight,
    const float* rstd, bf16* dqkv, float* dw_partial,
    int tokens, int q_heads, int kv_heads, int splits, int seq, int start0, int len0, int start1) {
    __shared__ float tables[BWD_WARPS][2][TABLE];
    __shared__ float sums[NORM ? BWD_WARPS : 1][NORM ? 2 * HEAD_DIM : 1];
    const int warp = threadIdx.x >> 5;
    const Lane l = lane_layout();
    const int normed = q_heads + kv_heads, heads = normed + kv_heads + GATED * q_heads;
    float dw[2][2][VEC];     // [q or k][first or second vector]
    #pragma unroll
    for (int e = 0; e < VEC; ++e) dw[0][0][e] = dw[0][1][e] = dw[1][0][e] = dw[1][1][e] = 0.f;
    const int mine = (tokens - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;   // tokens of this block
    for (int work = warp; work < mine * splits; work += BWD_WARPS) {
        const i64 token = blockIdx.x + (i64)(work / splits) * gridDim.x;
        const int first_round = (work % splits) * HEADS_PER_WARP;
        int h = first_round + l.sub;
        Raw ra, rb;
        load_item(pick_gradient(dq, dk, dv, dgate, token, h, q_heads, kv_heads), l, h < heads, ra, rb);
        fill_angles(position((int)token, seq, start0, len0, start1), tables[warp]);
        for (int round = first_round; round < heads; round += splits * HEADS_PER_WARP) {
            const int next = h + splits * HEADS_PER_WARP;
            Raw na, nb, xa, xb;
            if (NORM) load_item(qkv + head_offset(token, h, heads), l, h < normed, xa, xb);
            load_item(pick_gradient(dq, dk, dv, dgate, token, next, q_heads, kv_heads), l, next < heads, na, nb);
            float a[VEC], b[VEC];
            unpack(ra, a);
            unpack(rb, b);
            if (h < normed && l.pair) {
                // Read here, not once a token: the registers hold the weight gradients.
                float c[VEC], s[VEC];
                read_angles(l, tables[warp], c, s);
                #pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    const float x = a[e], y = b[e];
                    a[e] = x * c[e] + y * s[e];
                    b[e] = y * c[e] - x * s[e];
                }
            }
            if (NORM) {
                float x0[VEC], x1[VEC], w0[VEC], w1[VEC];
                unpack(xa, x0);
                unpack(xb, x1);
                Raw wa, wb;
                load_item(h < q_heads ? q_weight : k_weight, l, h < normed, wa, wb);
                unpack_weight(wa, w0);
                unpack_weight(wb, w1);
                const float r = h < normed ? rstd[token * normed + h] : 0.f;
                const bool is_q = h < q_heads, is_k = !is_q && h < normed;
                float sum = 0.f;
                #pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    x0[e] *= r;
                    x1[e] *= r;
                    const float g0 = a[e] * x0[e], g1 = b[e] * x1[e];
                    dw[0][0][e] += is_q ? g0 : 0.f;
                    dw[0][1][e] += is_q ? g1 : 0.f;
                    dw[1][0][e] += is_k ? g0 : 0.f;
                    dw[1][1][e] += is_k ? g1 : 0.f;
                    sum = fmaf(g0, w0[e], fmaf(g1, w1[e], sum));
                }
                const float mean = head_sum(sum) * (1.0f / HEAD_DIM);
                if (h < normed) {
                    #pragma unroll
                    for (int e = 0; e < VEC; ++e) {
                        a[e] = r * (a[e] * w0[e] - x0[e] * mean);
                        b[e] = r * (b[e] * w1[e] - x1[e] * mean);
                    }
                }
            }
            store_item(dqkv + head_offset(token, h, heads), l, h < heads, a, b);
            ra = na;
            rb = nb;
            h = next;
        }
    }
    if constexpr (NORM) {
        #pragma unroll
        for (int t = 0; t < 2; ++t)
            #pragma unroll
            for (int e = 0; e < VEC; ++e) {
                float a = dw[t][0][e], b = dw[t][1][e];
                #pragma unroll
                for (int o = 16; o >= GROUP; o >>= 1) {
                    a += __shfl_xor_sync(0xffffffffu, a, o);
                    b += __shfl_xor_sync(0xffffffffu, b, o);
                }
                if (l.sub == 0 && l.first) sums[warp][t * HEAD_DIM + l.at0 + e] = a;
                if (l.sub == 0 && l.second) sums[warp][t * HEAD_DIM + l.at1 + e] = b;
            }
        __syncthreads();
        for (int i = threadIdx.x; i < 2 * HEAD_DIM; i += BWD_WARPS * 32) {
            float sum = 0.f;
            #pragma unroll
            for (int w = 0; w < BWD_WARPS; ++w) sum += sums[w][i];
            dw_partial[(i64)blockIdx.x * 2 * HEAD_DIM + i] = sum;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) qkv_rope_bwd(const bf16* dq, const bf16* dk, const bf16* dv, const bf16* dgate, bf16* dqkv,
    int tokens, int q_heads, int kv_heads, int splits, int seq, int start0, int len0, int start1) {
    backward<false>(dq, dk, dv, dgate, dq, dq, dq, (const float*)0, dqkv, (float*)0, tokens, q_heads, kv_heads, splits, seq, start0, len0, start1);
}
extern "C" __global__ void __launch_bounds__(256, 2) qkv_norm_rope_bwd(const bf16* dq, const bf16* dk, const bf16* dv, const bf16* dgate, const bf16* qkv, const bf16* q_weight, const bf16* k_weight,
    const float* rstd, bf16* dqkv, float* dw_partial,
    int tokens, int q_heads, int kv_heads, int splits, int seq, int start0, int len0, int start1) {
    backward<true>(dq, dk, dv, dgate, qkv, q_weight, k_weight, rstd, dqkv, dw_partial, tokens, q_heads, kv_heads, splits, seq, start0, len0, start1);
}
