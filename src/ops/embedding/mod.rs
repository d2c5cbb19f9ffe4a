//! Op family `embedding`.
