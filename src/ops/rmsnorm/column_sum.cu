// The column sums that finish weight gradients. Defines: OUT (dtype of the gradients), SOURCES (matrices of partial sums: 1 to 3).

#ifndef OUT
#define OUT bf16
#endif
#ifndef SOURCES
#define SOURCES 1
#endif

// A matrix of partial sums [rows, width] and the gradients that its columns go to: column c to dw0 below end0, to dw1 below
// end1, else to dw2.
struct Partial {
    const float* sums;
    OUT *dw0, *dw1, *dw2;
    int rows, width, end0, end1;
};

// dw (+)= sum over rows of sums[row][c]. A block of 256 threads sums 32 columns of one matrix: 8 threads of four columns side by side, 32
// row groups; group g takes rows g, g + 32, ..., then the groups are added in order.
__device__ __forceinline__ void sum_columns(const Partial& p, int block, int accumulate) {
    __shared__ float4 groups[32][8];
    const int lane = threadIdx.x & 7, group = threadIdx.x >> 3;
    const int col = block * 32 + lane * 4;
    float4 s = make_float4(0.f, 0.f, 0.f, 0.f);
    if (col < p.width) {
        #pragma unroll 4
        for (int row = group; row < p.rows; row += 32) {
            const float4 v = *reinterpret_cast<const float4*>(p.sums + (i64)row * p.width + col);
            s.x += v.x; s.y += v.y; s.z += v.z; s.w += v.w;
        }
    }
    groups[group][lane] = s;
    __syncthreads();
    const int mine = block * 32 + threadIdx.x;
    if (threadIdx.x < 32 && mine < p.width) {
        const float* flat = reinterpret_cast<const float*>(groups);
        float sum = 0.f;
        for (int g = 0; g < 32; ++g) sum += flat[g * 32 + threadIdx.x];
        OUT* dw = mine < p.end0 ? p.dw0 + mine : mine < p.end1 ? p.dw1 + (mine - p.end0) : p.dw2 + (mine - p.end1);
        *dw = Store<OUT>::of(accumulate ? to_f32(*dw) + sum : sum);
    }
}

// Blocks below first1 are of the first matrix, those below first2 of the second, others of the third; a matrix that is not there is
// the last one again, which no block asks for.
extern "C" __global__ void __launch_bounds__(256) column_sum(
    const float* sums0, OUT* dw00, OUT* dw01, OUT* dw02, int rows0, int width0, int end00, int end01,
    const float* sums1, OUT* dw10, OUT* dw11, OUT* dw12, int rows1, int width1, int end10, int end11,
    const float* sums2, OUT* dw20, OUT* dw21, OUT* dw22, int rows2, int width2, int end20, int end21,
    int first1, int first2, int accumulate) {
    const int block = blockIdx.x;
    Partial p{sums0, dw00, dw01, dw02, rows0, width0, end00, end01};
    int first = 0;
#if SOURCES > 1
    if (block >= first1) {
        p = Partial{sums1, dw10, dw11, dw12, rows1, width1, end10, end11};
        first = first1;
    }
#endif
#if SOURCES > 2
    if (block >= first2) {
        p = Partial{sums2, dw20, dw21, dw22, rows2, width2, end20, end21};
        first = first2;
    }
#endif
    sum_columns(p, block - first, accumulate);
}
