//! Digest of a buffer's raw bits: a sum that does not depend on the order, so that a GPU can add it up in any.

/// Mixes one word with its place (the finaliser of SplitMix64; Steele, Lea, Flood: "Fast splittable
/// pseudorandom number generators", OOPSLA 2014).
pub fn mix(bits: u32, index: u64) -> u64 {
    let mut z = (index << 32 | bits as u64).wrapping_add(0x9E37_79B9_7F4A_7C15).wrapping_add(index.wrapping_mul(0xBF58_476D_1CE4_E5B9));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Digest of a buffer from its elements' bits in order.
pub fn digest_bits(bits: impl Iterator<Item = u32>) -> u64 {
    bits.zip(0u64..).fold(0, |sum, (b, i)| sum.wrapping_add(mix(b, i)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_places_count() {
        let d = |v: &[u32]| digest_bits(v.iter().copied());
        assert_eq!(d(&[1, 2, 3]), d(&[1, 2, 3]));
        assert_ne!(d(&[1, 2, 3]), d(&[2, 1, 3]));
        assert_ne!(d(&[1, 2, 3]), d(&[1, 2, 2]));
        assert_ne!(d(&[0]), d(&[0, 0]));
    }
}
