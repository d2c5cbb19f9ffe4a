//! Op family `step`.
