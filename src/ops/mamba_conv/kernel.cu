// Causal depthwise convolution over tokens, width 4, with SiLU and, where BIAS is 1, a bias. A thread owns eight channels and walks ROWS
// tokens of a tile with the last inputs in registers.
constexpr int TAPS = 4;

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// Eight channels' weights [channel][tap] and biases.
struct Filter {
    float w[8][TAPS], bias[8];
    __device__ __forceinline__ Filter(const bf16* weight, const bf16* bias_, int c) {
        #pragma unroll
        for (int i = 0; i < TAPS; ++i) load8(weight + (i64)c * TAPS + i * 8, &w[2 * i][0]);
        #pragma unroll
        for (int e = 0; e < 8; ++e) bias[e] = 0.f;
        if (BIAS) load8(bias_ + c, bias);
    }
};
__device__ __forceinline__ void zero8(float v[8]) {
    #pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = 0.f;
}

// out[t, c] = silu(bias[c] + sum_k w[c, k] in[t - 3 + k, c]); in = columns first.. of rows of `width`.
// Grid (channels / 8 / threads, tiles of a sequence, batch).
extern "C" __global__ void __launch_bounds__(128) mamba_conv_fwd(const bf16* in, const bf16* weight, const bf16* bias, bf16* out,
    int width, int first, int channels, int seq) {
    const int c = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (c >= channels) return;
    const Filter f(weight, bias, c);
    const i64 row0 = (i64)blockIdx.z * seq;
    const int t0 = blockIdx.y * ROWS, end = min(t0 + ROWS, seq);
    const bf16* src = in + row0 * width + first + c;
    float x[TAPS][8];
    #pragma unroll
    for (int k = 0; k < TAPS - 1; ++k) {
        const int t = t0 - (TAPS - 1) + k;
        if (t >= 0) load8(src + (i64)t * width, x[k + 1]);
        else zero8(x[k + 1]);
    }
    #pragma unroll 4
    for (int t = t0; t < end; ++t) {
        #pragma unroll
        for (int k = 0; k < TAPS - 1; ++k)
            #pragma unroll
            for (int e = 0; e < 8; ++e) x[k][e] = x[k + 1][e];
        load8(src + (i64)t * width, x[TAPS - 1]);
        float o[8];
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            float v = f.bias[e];
            #pragma unroll
            for (int k = 0; k < TAPS; ++k) v += f.w[e][k] * x[k][e];
            o[e] = v * sigmoid(v);
        }
        store8(out + (row0 + t) * channels + c, o);
    }
}

// Whole rows of the gradient of the in-projection's output: dz as it is, the convolution's own part, ddt as it is.
// With p the value before SiLU and g = dout silu'(p): din[t] = sum_k w[k] g[t + 3 - k]; per tile, partial
// [tile][(4 + BIAS) * channels] holds dw [channel][tap], then dbias. A thread computes g of its tile and of the three tokens after
// it (whose share of dw belongs to the next tile).
extern "C" __global__ void __launch_bounds__(128) mamba_conv_bwd(const bf16* in, const bf16* weight, const bf16* bias, const bf16* dout,
    const bf16* dz, const bf16* ddt, bf16* din, float* partial, int width, int first, int channels, int tail, int seq) {
    const int v = blockIdx.x * blockDim.x + threadIdx.x, column = v * 8;
    if (column >= width) return;
    const i64 row0 = (i64)blockIdx.z * seq;
    const int t0 = blockIdx.y * ROWS, end = min(t0 + ROWS, seq);
    bf16* to = din + row0 * width + column;
    if (column < first || column >= first + channels) {
        const bf16* from = column < first ? dz + row0 * first + column : ddt + row0 * tail + (column - first - channels);
        const int stride = column < first ? first : tail;
        #pragma unroll 4
        for (int t = t0; t < end; ++t)
            *reinterpret_cast<uint4*>(to + (i64)t * width) = *reinterpret_cast<const uint4*>(from + (i64)t * stride);
        return;
    }
    const int c = column - first;
    const Filter f(weight, bias, c);
    const bf16* src = in + row0 * width + column;
    const bf16* grad = dout + row0 * channels + c;
    float x[TAPS][8], g[TAPS][8], dw[8][TAPS], db[8];
    #pragma unroll
    for (int k = 0; k < TAPS; ++k) {
        const int t = t0 - TAPS + k;
        if (k > 0 && t >= 0) load8(src + (i64)t * width, x[k]);
        else zero8(x[k]);
        zero8(g[k]);
        #pragma unroll
        for (int e = 0; e < 8; ++e) dw[e][k] = 0.f;
    }
    zero8(db);
    // Step t computes g[t] and, once three later ones are known, din[t - 3].
    #pragma unroll 2
    for (int t = t0; t < end + TAPS - 1; ++t) {
        #pragma unroll
        for (int k = 0; k < TAPS - 1; ++k)
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                x[k][e] = x[k + 1][e];
                g[k][e] = g[k + 1][e];
            }
        if (t < seq) {
            float d[8];
            load8(src + (i64)t * width, x[TAPS - 1]);
            load8(grad + (i64)t * channels, d);
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                float p = f.bias[e];
                #pragma unroll
                for (int k = 0; k < TAPS; ++k) p += f.w[e][k] * x[k][e];
                const float s = sigmoid(p), gp = d[e] * s * (1.f + p * (1.f - s));
                g[TAPS - 1][e] = gp;
                if (t < end) {
                    db[e] += gp;
                    #pragma unroll
                    for (int k = 0; k < TAPS; ++k) dw[e][k] += gp * x[k][e];
                }
            }
        } else {
            zero8(g[TAPS - 1]);
        }
        if (t - (TAPS - 1) >= t0) {
            float o[8];
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                o[e] = 0.f;
                #pragma unroll
                for (int k = 0; k < TAPS; ++k) o[e] += f.w[e][k] * g[TAPS - 1 - k][e];
            }
            store8(to + (i64)(t - (TAPS - 1)) * width, o);
        }
    }
    float* part = partial + ((i64)blockIdx.z * gridDim.y + blockIdx.y) * (TAPS + BIAS) * channels;
    #pragma unroll
    for (int i = 0; i < TAPS; ++i) store8(part + (i64)c * TAPS + i * 8, &dw[2 * i][0]);
    if (BIAS) store8(part + (i64)TAPS * channels + c, db);
}
