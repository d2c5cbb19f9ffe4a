//! Op family `swiglu`.
