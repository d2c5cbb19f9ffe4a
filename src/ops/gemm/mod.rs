//! Op family `gemm`.
