// Splits the columns of a matrix into two matrices, or joins them. A thread moves 8 values.
// Parameters: columns of both in pieces of 8.

// x [rows, first + second] -> y [rows, first], z [rows, second]
extern "C" __global__ void __launch_bounds__(256) split_columns(
    const bf16* x, bf16* y, bf16* z, long long pieces, int first, int second) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pieces) return;
    const i64 row = i / (first + second);
    const int col = (int)(i - row * (first + second));
    const uint4 v = reinterpret_cast<const uint4*>(x)[i];
    if (col < first)
        reinterpret_cast<uint4*>(y)[row * first + col] = v;
    else
        reinterpret_cast<uint4*>(z)[row * second + (col - first)] = v;
}

// y [rows, first], z [rows, second] -> x [rows, first + second]
extern "C" __global__ void __launch_bounds__(256) join_columns(
    const bf16* y, const bf16* z, bf16* x, long long pieces, int first, int second) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pieces) return;
    const i64 row = i / (first + second);
    const int col = (int)(i - row * (first + second));
    reinterpret_cast<uint4*>(x)[i] = col < first ? reinterpret_cast<const uint4*>(y)[row * first + col]
                                                 : reinterpret_cast<const uint4*>(z)[row * second + (col - first)];
}
