//! Op family `rmsnorm`.
