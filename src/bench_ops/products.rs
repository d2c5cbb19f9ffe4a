//! The algorithm that a product was given against the others that cuBLASLt lists for it.

use super::bench::{Bench, LAUNCHES, in_turns};
use crate::device::DeviceError;
use crate::device::cuda::executor::CudaOptions;
use crate::device::cuda::matmul::MOST_CANDIDATES;
use crate::ops::Op;
use std::sync::Arc;

/// Ops that are one product of cuBLASLt's.
const PRODUCTS: [&str; 2] = ["gemm", "block_gemm"];
/// Launches of a replay that only tells slow from fast, and how many of the fastest are then timed as all ops are. Over
/// so few launches a clock's drift is a few percent (`tuner.rs`), and the library's list holds several algorithms that
/// near to the best, seldom six.
const GLANCE_LAUNCHES: usize = 6;
const CONTENDERS: usize = 6;

/// Microseconds of one launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Times {
    pub chosen_us: f64,
    /// The best of the list; `None`: the op is no single product, or memory is short.
    pub list_best_us: Option<f64>,
}

/// Times what is `chosen`, and for a product the library's list beside it. Chosen and listed ones are replayed in
/// turns, each over buffers of its own. The best of the list is a minimum of six noisy medians: it errs on the fast
/// side, against the chosen one.
pub(super) fn time(op: &Arc<dyn Op>, mut chosen: Bench, options: &CudaOptions) -> Result<Times, DeviceError> {
    let listed = match PRODUCTS.contains(&op.name()) {
        true => contenders(op, options)?,
        false => Vec::new(),
    };
    if listed.is_empty() {
        return Ok(Times { chosen_us: chosen.time()?, list_best_us: None });
    }
    let mut all = vec![chosen];
    all.extend(listed);
    let times = in_turns(&mut all)?;
    let list_best_us = times[1..].iter().copied().min_by(f64::total_cmp);
    Ok(Times { chosen_us: times[0], list_best_us })
}

/// The fastest of the list at a glance; none where they do not fit the device together.
fn contenders(op: &Arc<dyn Op>, options: &CudaOptions) -> Result<Vec<Bench>, DeviceError> {
    let forced = |n: usize| CudaOptions { gemm_candidate: Some(n), ..options.clone() };
    let glance = |n: usize| Bench::open(op, &forced(n), GLANCE_LAUNCHES)?.glance();
    let mut seen = Vec::new();
    for n in 0..MOST_CANDIDATES {
        match glance(n) {
            Ok(us) => seen.push((us, n)),
            // The list has ended.
            Err(DeviceError::Invalid(_)) => break,
            // Listed algorithms may refuse to run. A device that is broken fails at the chosen one too.
            Err(_) => {}
        }
    }
    let open = |n: usize| Bench::open(op, &forced(n), LAUNCHES);
    match fastest(seen).into_iter().map(open).collect() {
        Err(DeviceError::OutOfMemory { .. }) => Ok(Vec::new()),
        other => other,
    }
}

/// Numbers of the [`CONTENDERS`] fastest.
fn fastest(mut seen: Vec<(f64, usize)>) -> Vec<usize> {
    seen.sort_by(|a, b| a.0.total_cmp(&b.0));
    seen.into_iter().take(CONTENDERS).map(|(_, n)| n).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::matmul::Layout;
    use crate::ops::gemm::{Accumulate, BlockGemm, Gemm};
    use crate::program::DType;

    #[test]
    fn the_fastest_are_timed_again() {
        let seen = vec![(3.0, 0), (1.0, 1), (2.0, 5), (9.0, 6), (8.0, 7), (7.0, 8), (6.0, 9), (f64::NAN, 10)];
        assert_eq!(fastest(seen), [1, 5, 0, 9, 8, 7]);
        assert_eq!(fastest(vec![]), [0usize; 0]);
    }

    #[test]
    fn products_are_ops() {
        let all = Gemm {
            m: 8,
            n: 8,
            k: 8,
            layout: Layout::Nt,
            batch: 1,
            out: DType::Bf16,
            accumulate: Accumulate::No,
        };
        assert_eq!(PRODUCTS, [all.name(), BlockGemm { all: all.clone() }.name()]);
    }
}
