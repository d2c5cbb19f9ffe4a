//! Op family `grouped_gemm`.
