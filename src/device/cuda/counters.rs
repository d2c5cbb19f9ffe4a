//! The words that products count in (see [`super::direct`]): where they lie, and which launch zeroes them.

use super::context::{Context, DeviceMemory, Stream};
use super::kernels::{Kernel, KernelLaunch};
use super::prep::{Config, DevPtr, Param};
use crate::device::DeviceError;
use crate::program::Launch;
use std::collections::HashMap;
use std::rc::Rc;

/// Bytes from one word to the next: what cuBLASLt wants a workspace aligned to, and all of it that such a product gets.
pub(super) const SLOT_BYTES: usize = 256;
/// Words of one allocation: more than most runs need.
const SLOTS: usize = 1024;
/// Words that one launch zeroes: parameters of `zero_counters`.
const AT_ONCE: usize = 16;

/// Words of one run, each of one prepared product.
#[derive(Debug)]
pub(super) struct Counters {
    context: Rc<Context>,
    /// Where products are captured.
    pub stream: Stream,
    memory: Vec<DeviceMemory>,
    used: usize,
}

impl Counters {
    pub fn new(context: &Rc<Context>) -> Result<Self, DeviceError> {
        Ok(Self { stream: context.stream()?, context: context.clone(), memory: Vec::new(), used: 0 })
    }

    /// The next word; it is the next still until [`Self::keep`]. `None`: no memory is left for it.
    pub fn next(&mut self) -> Option<DevPtr> {
        if self.used == self.memory.len() * SLOTS {
            self.memory.push(self.context.alloc(SLOTS * SLOT_BYTES, "counters of matrix products").ok()?);
        }
        Some(self.memory.last()?.ptr.offset(self.used % SLOTS * SLOT_BYTES))
    }

    pub fn keep(&mut self) {
        self.used += 1;
    }
}

/// Launches that zero `words`. Their number depends on that of the words alone, so that both arms have as many.
pub(super) fn zeroing(kernel: &Kernel, words: &[DevPtr]) -> Result<Vec<KernelLaunch>, DeviceError> {
    let one = |words: &[DevPtr]| {
        // Parameters that are left over name the last word again.
        let params: Vec<Param> = (0..AT_ONCE).map(|i| words[i.min(words.len() - 1)].into()).collect();
        kernel.bind(Config::linear(1, 1), &params)
    };
    words.chunks(AT_ONCE).map(one).collect()
}

/// By launch: a number for the stretch of one layer's pass on one lane that it lies in. The words of a stretch are zeroed
/// together by its first launch that has one: in the order of the lane before all of them, and behind those of the same
/// launches in the micro-batch before. Staging belongs to none, so that the stretches of both arms are alike.
pub(super) fn stretches(launches: &[Launch]) -> Vec<Option<usize>> {
    let mut count = 0;
    let mut current = HashMap::new();
    let of = |l: &Launch| {
        if l.staging {
            return None;
        }
        let place = (l.layer, l.pass, l.micro_batch);
        let (known, number) = current.entry(l.lane).or_insert_with(|| (place, next(&mut count)));
        if *known != place {
            (*known, *number) = (place, next(&mut count));
        }
        Some(*number)
    };
    launches.iter().map(of).collect()
}

fn next(count: &mut usize) -> usize {
    *count += 1;
    *count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::kernels::KernelCache;
    use crate::device::cuda::memory::UTILITY;
    use crate::device::cuda::target::{Code, Target};
    use crate::ops::step::Copy;
    use crate::program::{DType, Part, Pass};
    use std::sync::Arc;

    fn launch(lane: usize, layer: usize, pass: Pass, micro_batch: usize) -> Launch {
        Launch {
            op: Arc::new(Copy { dtype: DType::F32, len: 1 }),
            args: Vec::new(),
            layer: Some(layer),
            part: Part::Attn,
            pass,
            micro_batch,
            lane,
            after: Vec::new(),
            staging: false,
            recompute: false,
        }
    }

    #[test]
    fn stretches_are_passes_of_layers_on_a_lane() {
        let (forward, backward) = (Pass::Forward, Pass::Backward);
        let mut launches = vec![
            launch(0, 0, forward, 0),
            launch(0, 0, forward, 0),
            launch(0, 1, forward, 0),
            launch(0, 1, backward, 0),
            launch(1, 1, backward, 0),
            launch(0, 1, backward, 0),
            launch(0, 0, backward, 0),
            launch(1, 1, backward, 0),
            launch(0, 0, forward, 1),
            // The same layer and pass, but something lay between.
            launch(0, 0, forward, 0),
        ];
        let of = |l: &[Launch]| stretches(l).into_iter().map(|s| s.unwrap_or(0)).collect::<Vec<_>>();
        assert_eq!(of(&launches), [1, 1, 2, 3, 4, 3, 5, 4, 6, 7]);
        launches[1].staging = true;
        launches[1].layer = Some(7);
        assert_eq!(of(&launches), [1, 0, 2, 3, 4, 3, 5, 4, 6, 7]);
    }

    #[test]
    fn as_many_launches_zero_as_the_words_need() {
        let target = Target { name: "sm_90a".into(), cc: 90, code: Code::Cubin };
        let kernel = KernelCache::collecting(&target).get(UTILITY, "zero_counters", &[], 0).unwrap();
        let words: Vec<DevPtr> = (1..40).map(|i| DevPtr(i * 256)).collect();
        for (n, want) in [(0, 0), (1, 1), (16, 1), (17, 2), (39, 3)] {
            let launches = zeroing(&kernel, &words[..n]).unwrap();
            assert_eq!(launches.len(), want, "{n}");
            let zeroed: std::collections::BTreeSet<u64> =
                launches.iter().flat_map(|l| l.parts().2.iter().copied()).collect();
            assert_eq!(zeroed.into_iter().map(DevPtr).collect::<Vec<_>>(), words[..n], "{n}");
        }
    }
}
