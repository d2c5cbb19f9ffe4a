// Flow matching: samples, noise and times from the step words; and the loss with its gradient.

// A thread takes eight numbers of a token, or, past all of them, one frequency of a sequence's time embedding.
extern "C" __global__ void __launch_bounds__(256) flow_sample(const unsigned* words, bf16* noisy, bf16* target, bf16* time, int rows,
    int sequences, int seq, int start0, int len0, int start1, int length, int values, int frequencies, unsigned sample_seed,
    unsigned sample_draw, unsigned noise_seed, unsigned noise_draw, unsigned time_seed, unsigned time_draw) {
    const i64 item = (i64)blockIdx.x * blockDim.x + threadIdx.x, vectors = (i64)rows * (values / 8);
    const int half = frequencies / 2;
    const bool embeds = item >= vectors;
    const i64 row = embeds ? 0 : item / (values / 8);
    const i64 at = item - vectors;
    if (embeds && at >= (i64)sequences * half) return;
    const int b = embeds ? (int)(at / half) : (int)(row / seq);
    const uint4 w = draw4(words, time_seed, time_draw, (u32)b >> 2);
    const u32 word = (b & 2) ? ((b & 1) ? w.w : w.z) : ((b & 1) ? w.y : w.x);
    const float s = unit(word);
    if (embeds) {
        const int i = (int)(at % half);
        // Formed and reduced to [-pi, pi] in double; rope/kernel.cu says why.
        const double angle = (double)s * 1000.0 * exp(-9.210340371976184 * i / half);     // ln 10000
        const double turns = rint(angle * 0.15915494309189535);                           // 1 / (2 pi)
        float sine, cosine;
        __sincosf((float)fma(turns, -6.283185307179586, angle), &sine, &cosine);
        time[(i64)b * frequencies + i] = to_bf16(cosine);
        time[(i64)b * frequencies + half + i] = to_bf16(sine);
        return;
    }
    const int i = (int)(row % seq), position = i < len0 ? start0 + i : start1 + (i - len0);
    const int c = (int)(item % (values / 8)) * 8;
    const u32 first = ((u32)b * length + position) * values + c;
    float n[8], v[8];
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
        const float x = normal_of(draw4(words, sample_seed, sample_draw, first + e));
        const float noise = normal_of(draw4(words, noise_seed, noise_draw, first + e));
        n[e] = fmaf(s, noise, (1.f - s) * x);
        v[e] = noise - x;
    }
    store8(noisy + row * values + c, n);
    store8(target + row * values + c, v);
}

// A warp a token.
extern "C" __global__ void __launch_bounds__(256) flow_loss(bf16* prediction, const bf16* target, float* loss, int tokens, int values,
    float grad_scale) {
    const i64 row = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    if (row >= tokens) return;
    const float factor = 2.f * grad_scale / (float)values;
    float sum = 0.f;
    for (int c = (threadIdx.x & 31) * 8; c < values; c += 256) {
        float p[8], t[8];
        load8(prediction + row * values + c, p);
        load8(target + row * values + c, t);
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            p[e] -= t[e];
            sum = fmaf(p[e], p[e], sum);
            p[e] *= factor;
        }
        store8(prediction + row * values + c, p);
    }
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) loss[row] = sum / (float)values;
}
