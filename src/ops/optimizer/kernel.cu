// Norm of the gradients and fused Adam over flat arrays of up to 2^63 elements, eight elements at a time.

#ifndef GRAD
#define GRAD bf16    // element of the gradient
#endif
#ifndef VECTORS
#define VECTORS 1    // 1: every address is a multiple of 16 bytes; 0: element by element, the same sums
#endif
#ifndef THREADS
#define THREADS 512
#endif

template <typename T> __device__ __forceinline__ void get8(const T* p, float v[8]) {
#if VECTORS
    load8(p, v);
#else
    #pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = to_f32(p[j]);
#endif
}
template <typename T> __device__ __forceinline__ void put8(T* p, const float v[8]) {
#if VECTORS
    store8(p, v);
#else
    #pragma unroll
    for (int j = 0; j < 8; ++j) p[j] = Store<T>::of(v[j]);
#endif
}

__device__ __forceinline__ float squares(const float v[8], float sum) {
    #pragma unroll
    for (int j = 0; j < 8; ++j) sum += v[j] * v[j];
    return sum;
}

// partial[p] = sum of squares of the vectors p * THREADS + thread + n * partials * THREADS. Which element lands in
// which sum follows from len and partials (= blocks) alone.
extern "C" __global__ void __launch_bounds__(THREADS) grad_norm_partial(const GRAD* grad, float* partial, long long len) {
    __shared__ float scratch[32];
    const i64 vectors = len / 8, stride = (i64)gridDim.x * THREADS;
    i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    float sum[4] = {0.f, 0.f, 0.f, 0.f};       // four loads in flight
    for (; i + 3 * stride < vectors; i += 4 * stride) {
        float v[4][8];
        #pragma unroll
        for (int u = 0; u < 4; ++u) get8(grad + 8 * (i + u * stride), v[u]);
        #pragma unroll
        for (int u = 0; u < 4; ++u) sum[u] = squares(v[u], sum[u]);
    }
    for (; i < vectors; i += stride) {
        float v[8];
        get8(grad + 8 * i, v);
        sum[0] = squares(v, sum[0]);
    }
    // The last len % 8 elements: one each for the first threads of the last block.
    if (blockIdx.x == gridDim.x - 1 && 8 * vectors + threadIdx.x < len) {
        const float x = to_f32(grad[8 * vectors + threadIdx.x]);
        sum[1] += x * x;
    }
    const float total = block_sum((sum[0] + sum[1]) + (sum[2] + sum[3]), scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// norm = sqrt(sum of partials); scale = min(1, clip / (norm + 1e-6)), 1 when clip is 0. One block.
extern "C" __global__ void __launch_bounds__(1024) grad_norm_finish(const float* partial, float* norm, float* scale,
        int partials, float clip, float floor) {
    __shared__ float scratch[32];
    float sum = 0.f;
    for (int i = threadIdx.x; i < partials; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) {
        const float n = sqrtf(sum);
        norm[0] = n;
        // NaN must reach the weights: fminf would hide it.
        const float s = clip / (n + floor);
        scale[0] = clip > 0.f && !(s > 1.f) ? s : 1.f;
    }
}

struct Step {
    float scale, beta1, beta2, rest1, rest2, eps, decay, size, root;
    // One element: moments, then decoupled decay and the step.
    __device__ __forceinline__ void update(float g, float& w, float& m, float& v) const {
        g *= scale;
        m = beta1 * m + rest1 * g;
        v = beta2 * v + rest2 * (g * g);
        w = w * decay - size * (m / (sqrtf(v) * root + eps));
    }
};

// AdamW. log_beta = ln(beta): 1 - beta^t is taken as -expm1(t ln beta), which does not cancel at small t.
extern "C" __global__ void __launch_bounds__(256) adam(const GRAD* grad, const float* scale, const unsigned* words,
        float* master, float* m, float* v, bf16* param, long long len, float beta1, float beta2, float rest1, float rest2,
        float log_beta1, float log_beta2, float eps, float weight_decay) {
    const float t = (float)(words[WORD_STEP] + 1), lr = __uint_as_float(words[WORD_LR]);
    Step s;
    s.scale = scale[0];
    s.beta1 = beta1; s.beta2 = beta2; s.rest1 = rest1; s.rest2 = rest2; s.eps = eps;
    s.decay = 1.f - lr * weight_decay;
    s.size = lr / -expm1f(t * log_beta1);
    s.root = 1.f / sqrtf(-expm1f(t * log_beta2));
    const i64 vectors = len / 8, stride = (i64)gridDim.x * blockDim.x;
    const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    for (i64 i = thread; i < vectors; i += stride) {
        float g[8], w8[8], m8[8], v8[8];
        get8(grad + 8 * i, g);
        get8(master + 8 * i, w8);
        get8(m + 8 * i, m8);
        get8(v + 8 * i, v8);
        #pragma unroll
        for (int j = 0; j < 8; ++j) s.update(g[j], w8[j], m8[j], v8[j]);
        put8(master + 8 * i, w8);
        put8(m + 8 * i, m8);
        put8(v + 8 * i, v8);
        put8(param + 8 * i, w8);
    }
    const i64 last = 8 * vectors + thread;     // the last len % 8 elements
    if (last < len) {
        float w1 = master[last], m1 = m[last], v1 = v[last];
        s.update(to_f32(grad[last]), w1, m1, v1);
        master[last] = w1;
        m[last] = m1;
        v[last] = v1;
        param[last] = to_bf16(w1);
    }
}
