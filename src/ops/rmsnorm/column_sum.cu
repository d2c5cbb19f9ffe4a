// The column sum that finishes weight gradients. Defines: OUT (dtype of the gradients).

#ifndef OUT
#define OUT bf16
#endif

// Column c of the row sums goes to dw0 below end0, to dw1 below end1, else to dw2: dw (+)= sum over rows of
// partial[row][c]. A block of 256 threads sums 32 columns: 8 threads of four columns side by side, 32 row groups; group g
// takes rows g, g + 32, ..., then the groups are added in order.
extern "C" __global__ void __launch_bounds__(256) column_sum(const float* partial, OUT* dw0, OUT* dw1, OUT* dw2, int rows, int width, int end0,
    int end1, int accumulate) {
    __shared__ float4 groups[32][8];
    const int lane = threadIdx.x & 7, group = threadIdx.x >> 3;
    const int col = blockIdx.x * 32 + lane * 4;
    float4 s = make_float4(0.f, 0.f, 0.f, 0.f);
    if (col < width) {
        #pragma unroll 4
        for (int row = group; row < rows; row += 32) {
            const float4 v = *reinterpret_cast<const float4*>(partial + (i64)row * width + col);
            s.x += v.x; s.y += v.y; s.z += v.z; s.w += v.w;
        }
    }
    groups[group][lane] = s;
    __syncthreads();
    const int mine = blockIdx.x * 32 + threadIdx.x;
    if (threadIdx.x < 32 && mine < width) {
        const float* flat = reinterpret_cast<const float*>(groups);
        float sum = 0.f;
        for (int g = 0; g < 32; ++g) sum += flat[g * 32 + threadIdx.x];
        OUT* dw = mine < end0 ? dw0 + mine : mine < end1 ? dw1 + (mine - end0) : dw2 + (mine - end1);
        *dw = Store<OUT>::of(accumulate ? to_f32(*dw) + sum : sum);
    }
}
