//! Hash of raw bits, the same on every device: a sum of mixed elements, so that the order of work does not matter.

/// Odd constant that spreads the element index (2^64 over the golden ratio; Steele, Lea, Flood: "Fast splittable
/// pseudorandom number generators", 2014).
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// One element's share: SplitMix64's finaliser over the bits and the index. `utility.cu` holds the same.
fn mix(bits: u32, index: u64) -> u64 {
    let mut z = (bits as u64).wrapping_add((index + 1).wrapping_mul(SPREAD));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Hash of a buffer's elements in order: the bits of f32 and 32-bit integers, 16 bits for bf16, 8 for bytes.
pub fn digest_bits(elements: impl Iterator<Item = u32>) -> u64 {
    elements.zip(0u64..).fold(0, |sum, (bits, i)| sum.wrapping_add(mix(bits, i)))
}

#[cfg(test)]
mod tests {
    use super::digest_bits;

    #[test]
    fn every_bit_and_every_place_counts() {
        let base = [1u32, 2, 3, 0];
        let of = |v: &[u32]| digest_bits(v.iter().copied());
        assert_eq!(of(&[]), 0);
        for i in 0..base.len() {
            for bit in 0..32 {
                let mut other = base;
                other[i] ^= 1 << bit;
                assert_ne!(of(&base), of(&other));
            }
        }
        assert_ne!(of(&base), of(&[2, 1, 3, 0]), "order");
        assert_ne!(of(&base), of(&base[..3]), "length, though the last element is 0");
    }
}
