//! Op family `rope`: QKV split, per-head RMSNorm and rotary embedding.

mod positions;
pub use positions::Positions;
