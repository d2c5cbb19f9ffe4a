// Router: one warp a token, expert e in lane e % 32, slot e / 32; the whole row stays in registers.
// Constants: EXPERTS (1..512), TOPK (1..32), SIGMOID, PRE_SOFTMAX, FORCED, SKEW, BIAS (0 or 1), GROUPS (1..32),
// GROUPS_CHOSEN, HASH (if the experts are a function of the token's id: the layer's salt).

#ifndef SQRT_SOFTPLUS
#define SQRT_SOFTPLUS 0                    // with SIGMOID: the score is sqrt(softplus) in place of the sigmoid
#endif
#ifndef FIRST_TOKEN
#define FIRST_TOKEN 0  // of this tensor rank's rows in the micro-batch
#endif
#define SLOTS ((EXPERTS + 31) / 32)
#define TOKENS_PER_BLOCK 8
#define FULL 0xffffffffu
#define INFINITY_F __int_as_float(0x7f800000)
// Megatron's guard for rows of zeros.
#define SUM_EPS 1e-20f

// Floats as unsigned keys of the same order; -0 equals +0, NaN is 1 (below -inf), 0 is left for "taken".
__device__ __forceinline__ u32 order_key(float v) {
    u32 b = __float_as_uint(v + 0.f);
    if ((b << 1) > 0xff000000u) return 1u;
    return (b & 0x80000000u) ? ~b : (b | 0x80000000u);
}

#if GROUPS > 1
#define GROUP_SIZE (EXPERTS / GROUPS)
// The float of a key; a NaN for a NaN.
__device__ __forceinline__ float key_value(u32 k) { return __uint_as_float((k & 0x80000000u) ? k ^ 0x80000000u : ~k); }

// Takes the experts of all groups but the GROUPS_CHOSEN best ones out of the choice. A group's score is the sum of
// its TOPK / GROUPS_CHOSEN largest values, in descending order; lane g keeps that of group g.
__device__ __forceinline__ void keep_best_groups(u32 (&key)[SLOTS], int lane) {
    u32 group_key = 0u;
    #pragma unroll 1
    for (int g = 0; g < GROUPS; ++g) {
        u32 left[SLOTS];
        #pragma unroll
        for (int j = 0; j < SLOTS; ++j) left[j] = (lane + 32 * j) / GROUP_SIZE == g ? key[j] : 0u;
        float sum = 0.f;
        #pragma unroll 1
        for (int n = 0; n < TOPK / GROUPS_CHOSEN; ++n) {
            u32 best = 0u, at = EXPERTS;
            #pragma unroll
            for (int j = 0; j < SLOTS; ++j)
                if (left[j] > best) { best = left[j]; at = lane + 32 * j; }
            const u32 most = __reduce_max_sync(FULL, best);
            const int e = (int)__reduce_min_sync(FULL, best == most ? at : (u32)EXPERTS);
            #pragma unroll
            for (int j = 0; j < SLOTS; ++j)
                if (lane + 32 * j == e) left[j] = 0u;
            sum += key_value(most);
        }
        if (lane == g) group_key = order_key(sum);
    }
    u32 kept = 0u;  // bit g: group g
    #pragma unroll 1
    for (int n = 0; n < GROUPS_CHOSEN; ++n) {
        const u32 most = __reduce_max_sync(FULL, group_key);
        const int g = (int)__reduce_min_sync(FULL, group_key == most ? (u32)lane : 32u);
        kept |= 1u << g;
        if (lane == g) group_key = 0u;
    }
    #pragma unroll
    for (int j = 0; j < SLOTS; ++j) {
        const int e = lane + 32 * j;
        if (e < EXPERTS && !((kept >> (e / GROUP_SIZE)) & 1u)) key[j] = 0u;
    }
}
#endif

// logits [T,E], words, bias [E] -> scores [T,E], probs [T,K], index [T,K]; counts [E] was zeroed before.
extern "C" __global__ void __launch_bounds__(256) router_fwd(
    const float* logits, const unsigned* words, const float* bias, float* scores, float* probs, int* index,
    int* counts, int tokens, float scaling, unsigned seed_offset, unsigned draw) {
    const int lane = threadIdx.x & 31;
    const int t = blockIdx.x * TOKENS_PER_BLOCK + (threadIdx.x >> 5);
    if (t >= tokens) return;  // whole warps only

    float x[SLOTS], s[SLOTS];
    #pragma unroll
    for (int j = 0; j < SLOTS; ++j) {
        const int e = lane + 32 * j;
        x[j] = -INFINITY_F;
        if (e < EXPERTS) {
#if FORCED
            x[j] = normal_of(draw4(words, seed_offset, draw, (u32)(FIRST_TOKEN + t) * EXPERTS + e));
    #if SKEW
            // The logarithm in fp64: rounded to fp32 it is the reference's, so the choice is too.
            x[j] = __fadd_rn(x[j], (float)(-log(1.0 + (double)e)));
    #endif
#else
            x[j] = logits[(i64)t * EXPERTS + e];
#endif
        }
    }

#if SIGMOID
    #pragma unroll
    for (int j = 0; j < SLOTS; ++j)
    #if SQRT_SOFTPLUS
        s[j] = sqrtf(fmaxf(x[j], 0.f) + log1pf(expf(-fabsf(x[j]))));  // 0 beyond EXPERTS
    #else
        s[j] = 1.f / (1.f + expf(-x[j]));
    #endif
#else
    float top = x[0];
    #pragma unroll
    for (int j = 1; j < SLOTS; ++j) top = fmaxf(top, x[j]);
    top = warp_max(top);
    float sum = 0.f;
    #pragma unroll
    for (int j = 0; j < SLOTS; ++j) {
        s[j] = expf(x[j] - top);  // 0 beyond EXPERTS
        sum += s[j];
    }
    sum = warp_sum(sum);
    #pragma unroll
    for (int j = 0; j < SLOTS; ++j) s[j] = s[j] / sum;
#endif

    u32 key[SLOTS];
    #pragma unroll
    for (int j = 0; j < SLOTS; ++j) {
        const int e = lane + 32 * j;
        key[j] = 0u;
        if (e < EXPERTS) {
            scores[(i64)t * EXPERTS + e] = s[j];
#ifdef HASH
            key[j] = 1u;
#elif BIAS
            key[j] = order_key(s[j] + bias[e]);
#elif GROUPS > 1 && (SIGMOID || PRE_SOFTMAX)
            key[j] = order_key(s[j]);
#else
            key[j] = order_key(x[j]);
#endif
        }
    }
#if GROUPS > 1
    keep_best_groups(key, lane);
#endif

    // Top-k by repeated argmax. Lane k keeps the k-th choice.
    float chosen = 0.f;
    int mine = 0;
#ifdef HASH
    const u32 id = ((const u32*)bias)[t];  // the ids stand in the bias' place
    int taken = EXPERTS;                   // lane j: the j-th smallest expert that is taken
#endif
    #pragma unroll 1
    for (int k = 0; k < TOPK; ++k) {
#ifdef HASH
        // The rank-th expert that is left; src/ops/router/mod.rs holds the same in Rust.
        const uint4 w = philox(id, k / 4, HASH, 0x68617368u, 0u, 0u);
        const u32 word = (k & 2) ? ((k & 1) ? w.w : w.z) : ((k & 1) ? w.y : w.x);
        const int rank = (int)__umulhi(word, (u32)(EXPERTS - k));
        const int before = __popc(__ballot_sync(FULL, lane < k && taken - lane <= rank));
        const int e = rank + before;
        const int below = __shfl_up_sync(FULL, taken, 1);
        taken = lane < before ? taken : lane == before ? e : below;
#else
        u32 best = 0u, at = EXPERTS;
        #pragma unroll
        for (int j = 0; j < SLOTS; ++j)
            if (key[j] > best) { best = key[j]; at = lane + 32 * j; }  // strict: the lowest expert of the lane
        const u32 most = __reduce_max_sync(FULL, best);
        const int e = (int)__reduce_min_sync(FULL, best == most ? at : (u32)EXPERTS);
#endif
        float v = 0.f;
        #pragma unroll
        for (int j = 0; j < SLOTS; ++j)
            if (lane + 32 * j == e) {
                key[j] = 0u;
#if SIGMOID || PRE_SOFTMAX
                v = s[j];
#else
                v = x[j];
#endif
            }
        v = __shfl_sync(FULL, v, e & 31);
        if (lane == k) { chosen = v; mine = e; }
    }

    const bool holds = lane < TOPK;
    float p = chosen;
#if SIGMOID
    if (TOPK > 1) p = chosen / (warp_sum(holds ? chosen : 0.f) + SUM_EPS);
#elif !PRE_SOFTMAX
    const float high = warp_max(holds ? chosen : -INFINITY_F);
    p = holds ? expf(chosen - high) : 0.f;
    p = p / warp_sum(p);
#endif
    if (holds) {
        probs[(i64)t * TOPK + lane] = p * scaling;
        index[(i64)t * TOPK + lane] = mine;
        atomicAdd(counts + mine, 1);  // integers: any order gives the same sum
    }
}

// scores [T,E], probs, index, dprobs [T,K], counts [E] -> dlogits [T,E]. `aux` = gradient of a normalised
// score per count.
extern "C" __global__ void __launch_bounds__(256) router_bwd(
    const float* scores, const float* probs, const int* index, const float* dprobs, const int* counts,
    bf16* dlogits, int tokens, float scaling, float aux) {
    const int lane = threadIdx.x & 31;
    const int t = blockIdx.x * TOKENS_PER_BLOCK + (threadIdx.x >> 5);
    if (t >= tokens) return;

    const bool holds = lane < TOPK;
    const i64 mine = (i64)t * TOPK + lane;
    const int chosen = holds ? index[mine] : 0;
    const float dq = holds ? dprobs[mine] * scaling : 0.f;

    float s[SLOTS], g[SLOTS];  // scores, and gradient: of the scores, then of the logits
    #pragma unroll
    for (int j = 0; j < SLOTS; ++j) {
        const int e = lane + 32 * j;
        s[j] = e < EXPERTS ? scores[(i64)t * EXPERTS + e] : 0.f;
        g[j] = e < EXPERTS ? aux * (float)counts[e] : 0.f;
    }

    // What lane k adds at its expert.
    float add = dq;
#if SIGMOID
    float sum = 0.f, dot = 0.f;
    #pragma unroll
    for (int j = 0; j < SLOTS; ++j) { sum += s[j]; dot += g[j] * s[j]; }
    sum = warp_sum(sum) + SUM_EPS;
    dot = warp_sum(dot) / sum;
    #pragma unroll
    for (int j = 0; j < SLOTS; ++j) g[j] = (g[j] - dot) / sum;
    if (TOPK > 1) {
        const float sk = holds ? scores[(i64)t * EXPERTS + chosen] : 0.f;
        const float kept = warp_sum(sk) + SUM_EPS;
        add = (dq - warp_sum(dq * sk) / kept) / kept;
    }
#elif !PRE_SOFTMAX
    float dot = 0.f;
    #pragma unroll
    for (int j = 0; j < SLOTS; ++j) dot += g[j] * s[j];
    dot = warp_sum(dot);
    #pragma unroll
    for (int j = 0; j < SLOTS; ++j) g[j] = s[j] * (g[j] - dot);
    const float q = holds ? probs[mine] / scaling : 0.f;
    add = q * (dq - warp_sum(q * dq));
#endif

    #pragma unroll 1
    for (int k = 0; k < TOPK; ++k) {
        const int e = __shfl_sync(FULL, chosen, k);
        const float v = __shfl_sync(FULL, add, k);
        #pragma unroll
        for (int j = 0; j < SLOTS; ++j)
            if (lane + 32 * j == e) g[j] += v;
    }

#if SIGMOID
    #pragma unroll
    for (int j = 0; j < SLOTS; ++j)
    #if SQRT_SOFTPLUS
        // Softplus' slope is the sigmoid, 1 - exp(-softplus).
        g[j] = s[j] > 0.f ? g[j] * -expm1f(-s[j] * s[j]) / (2.f * s[j]) : 0.f;
    #else
        g[j] = g[j] * s[j] * (1.f - s[j]);
    #endif
#elif PRE_SOFTMAX
    float dot = 0.f;
    #pragma unroll
    for (int j = 0; j < SLOTS; ++j) dot += g[j] * s[j];
    dot = warp_sum(dot);
    #pragma unroll
    for (int j = 0; j < SLOTS; ++j) g[j] = s[j] * (g[j] - dot);
#endif
    #pragma unroll
    for (int j = 0; j < SLOTS; ++j) {
        const int e = lane + 32 * j;
        if (e < EXPERTS) dlogits[(i64)t * EXPERTS + e] = to_bf16(g[j]);
    }
}
