//! Op family `moe_permute`.
