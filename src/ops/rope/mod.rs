//! Op family `rope`.
