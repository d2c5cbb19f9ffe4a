// Biases of linear layers: added to rows, and their gradients. Defines: ROWS (bf16 or float, of what is added to), OUT
// (bf16 or float, of the gradient), EXPERTS (0: one bias for all rows), WEIGHTED (times the row's probability),
// ACCUMULATE (the gradient is added to). expert.cuh stands before this file.

#ifndef ROWS
#define ROWS bf16
#define OUT bf16
#define EXPERTS 0
#define WEIGHTED 0
#define ACCUMULATE 0
#endif

// x[row] += bias[expert of row] (* probs[row]). A grid of rows * column_blocks blocks, as in swiglu/kernel.cu. Rows of
// no expert stay as they are.
extern "C" __global__ void __launch_bounds__(256) bias_add(ROWS* x, const bf16* bias, const int* offsets, const float* probs, int cols,
    int column_blocks) {
    const int row = blockIdx.x / column_blocks;
    float factor = 1.f;
#if EXPERTS
    if (row >= offsets[EXPERTS]) return;
    bias += (i64)expert_of(offsets, EXPERTS, row) * cols;
    #if WEIGHTED
    factor = probs[row];
    #endif
#endif
    const int step = blockDim.x * column_blocks;
    for (int c = (blockIdx.x % column_blocks) * blockDim.x + threadIdx.x; c < cols / 8; c += step) {
        float v[8], b[8];
        load8(x + (i64)row * cols + 8 * c, v);
        load8(bias + 8 * c, b);
        #pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = fmaf(b[e], factor, v[e]);
        store8(x + (i64)row * cols + 8 * c, v);
    }
}

#define GRAD_THREADS 512
#define GRAD_VECTORS 8                            // of 8 columns each: a block's rows are read 128 bytes at a time
#define GRAD_LANES (GRAD_THREADS / GRAD_VECTORS)  // rows at a time

// grad[e] (+)= sum of dy[row] (* probs[row]) over the rows of expert e. Grid: column blocks, experts. Lane l of a block
// sums rows first + l, first + l + GRAD_LANES, ...; the lanes are then added in order.
extern "C" __global__ void __launch_bounds__(GRAD_THREADS) bias_grad(const bf16* dy, const int* offsets, const float* probs, OUT* grad,
    int rows, int cols) {
    __shared__ float sums[GRAD_LANES][GRAD_VECTORS * 8 + 1];
    const int vector = threadIdx.x % GRAD_VECTORS, lane = threadIdx.x / GRAD_VECTORS;
    const int c = blockIdx.x * GRAD_VECTORS + vector;
    int first = 0, last = rows;
#if EXPERTS
    first = offsets[blockIdx.y];
    last = min(offsets[blockIdx.y + 1], rows);
#endif
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    if (c < cols / 8) {
        #pragma unroll 4
        for (int row = first + lane; row < last; row += GRAD_LANES) {
            float v[8], factor = 1.f;
            load8(dy + (i64)row * cols + 8 * c, v);
#if WEIGHTED
            factor = probs[row];
#endif
            #pragma unroll
            for (int e = 0; e < 8; ++e) sum[e] = fmaf(v[e], factor, sum[e]);
        }
    }
    #pragma unroll
    for (int e = 0; e < 8; ++e) sums[lane][vector * 8 + e] = sum[e];
    __syncthreads();
    const int column = blockIdx.x * GRAD_VECTORS * 8 + threadIdx.x;
    if (threadIdx.x >= GRAD_VECTORS * 8 || column >= cols) return;
    float total = 0.f;
    #pragma unroll 8
    for (int l = 0; l < GRAD_LANES; ++l) total += sums[l][threadIdx.x];
    OUT* const out = grad + (i64)blockIdx.y * cols + column;
#if ACCUMULATE
    total += to_f32(*out);
#endif
    *out = Store<OUT>::of(total);
}

#if EXPERTS
// dprobs[row] += dy[row] . bias[expert of row]. One block a row; rows of no expert stay as they are.
extern "C" __global__ void __launch_bounds__(256) bias_prob_grad(const bf16* dy, const bf16* bias, const int* offsets, float* dprobs, int cols) {
    __shared__ float scratch[32];
    const int row = blockIdx.x;
    if (row >= offsets[EXPERTS]) return;
    bias += (i64)expert_of(offsets, EXPERTS, row) * cols;
    float sum = 0.f;
    for (int c = threadIdx.x; c < cols / 8; c += blockDim.x) {
        float v[8], b[8];
        load8(dy + (i64)row * cols + 8 * c, v);
        load8(bias + 8 * c, b);
        #pragma unroll
        for (int e = 0; e < 8; ++e) sum = fmaf(v[e], b[e], sum);
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) dprobs[row] += sum;
}
#endif
