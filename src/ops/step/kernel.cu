// Step words, synthetic tokens and random inputs. Word indices are the prelude's.

#ifndef OUT
#define OUT bf16   // element of random_fill's output
#endif

extern "C" __global__ void step_begin(unsigned* words, float* loss) {
    words[WORD_MICRO_BATCH] = 0;
    loss[0] = 0.f;
}

extern "C" __global__ void micro_batch_set(unsigned* words, unsigned micro_batch) { words[WORD_MICRO_BATCH] = micro_batch; }

// cos(pi r) for r in [0, 1] as sin(pi (1/2 - r)), the sine by its Taylor series up to y^13 (|y| <= pi/2: the next
// term is below 7e-10). Only correctly rounded products and sums: the CPU's bits, see StepEnd::learning_rate.
__device__ __forceinline__ float cos_pi(float r) {
    const float y = __fmul_rn(3.14159265f, __fsub_rn(0.5f, r)), y2 = __fmul_rn(y, y);
    const float terms[6] = {1.60590438e-10f, -2.50521084e-8f, 2.75573192e-6f, -1.98412698e-4f, 8.33333333e-3f, -1.66666667e-1f};
    float s = terms[0];
    #pragma unroll
    for (int i = 1; i < 6; ++i) s = __fadd_rn(__fmul_rn(s, y2), terms[i]);
    return __fadd_rn(y, __fmul_rn(y, __fmul_rn(s, y2)));
}

extern "C" __global__ void step_end(unsigned* words, float lr, float min_lr, unsigned warmup, unsigned decay) {
    const u32 step = words[WORD_STEP] + 1;
    float rate;
    if (step < warmup) {
        rate = __fmul_rn(lr, __fdiv_rn(__uint2float_rn(step), __uint2float_rn(warmup)));
    } else if (step >= decay) {
        rate = min_lr;
    } else {
        const float done = __fdiv_rn(__uint2float_rn(step - warmup), __uint2float_rn(decay - warmup));
        const float share = __fmul_rn(0.5f, __fadd_rn(cos_pi(done), 1.f));
        rate = __fadd_rn(min_lr, __fmul_rn(share, __fsub_rn(lr, min_lr)));
    }
    words[WORD_STEP] = step;
    words[WORD_MICRO_BATCH] = 0;
    words[WORD_LR] = __float_as_uint(rate);
}

// Token at global position `pos` of sequence `b`: word number b * 2^24 + pos of the draw, scaled to [0, vocab).
__device__ __forceinline__ int token(const unsigned* words, unsigned seed_offset, unsigned draw, unsigned b, unsigned pos, unsigned vocab) {
    const uint4 w = draw4(words, seed_offset, draw, (b << 22) + (pos >> 2));
    const u32 j = pos & 3, x = j == 0 ? w.x : j == 1 ? w.y : j == 2 ? w.z : w.w;
    return (int)__umulhi(x, vocab);
}

// Rows [batch, seq]; row i of a sequence is at position start0 + i below len0, then start1 + i - len0.
extern "C" __global__ void __launch_bounds__(256) token_gen(const unsigned* words, int* ids, int* labels, int tokens,
        int seq, int start0, int len0, int start1, unsigned vocab, unsigned seed_offset, unsigned draw) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= tokens) return;
    const int b = row / seq, i = row - b * seq;
    const u32 pos = i < len0 ? start0 + i : start1 + i - len0;
    ids[row] = token(words, seed_offset, draw, b, pos, vocab);
    labels[row] = token(words, seed_offset, draw, b, pos + 1, vocab);
}

// out[i] = std * normal(draw i).
extern "C" __global__ void __launch_bounds__(256) random_fill(const unsigned* words, OUT* out, unsigned len,
        float std, unsigned seed_offset, unsigned draw) {
    const i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < len; i += stride)
        out[i] = Store<OUT>::of(__fmul_rn(normal_of(draw4(words, seed_offset, draw, (u32)i)), std));
}

// Copies 16-byte vectors, four a thread in flight: a copy node of the driver moves about two thirds as much a second.
extern "C" __global__ void __launch_bounds__(256) copy_vectors(const unsigned char* x, unsigned char* out, long long vectors) {
    const uint4* from = reinterpret_cast<const uint4*>(x);
    uint4* to = reinterpret_cast<uint4*>(out);
    const i64 base = (i64)blockIdx.x * 1024 + threadIdx.x;
    uint4 v[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) if (base + i * 256 < vectors) v[i] = from[base + i * 256];
    #pragma unroll
    for (int i = 0; i < 4; ++i) if (base + i * 256 < vectors) to[base + i * 256] = v[i];
}
