//! Issuing, and the record of what was issued: the same list for an eager step, a capture and a graph's nodes.

use super::context::{Stream, check};
use super::counters::Counters;
use super::graph;
use super::prep::{DevPtr, Issue};
use crate::device::DeviceError;
use cudarc::driver::sys;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One unit of work on the device, as a graph node describes it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Work {
    Kernel { name: Arc<str>, grid: [u32; 3], block: [u32; 3], shared_bytes: u32 },
    Copy { bytes: usize },
    Set { bytes: usize },
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Work::Kernel { name, grid, block, shared_bytes } => {
                write!(f, "kernel {name} grid {grid:?} block {block:?} shared {shared_bytes}")
            }
            Work::Copy { bytes } => write!(f, "copy of {bytes} bytes"),
            Work::Set { bytes } => write!(f, "memset of {bytes} bytes"),
        }
    }
}

impl Issue {
    /// Puts the work on `stream`. Adds the time spent waiting on the host to `waited`.
    ///
    /// The same call serves eager steps and capture. Nothing is allocated, formatted or looked up.
    pub(super) fn issue(&self, stream: &Stream, waited: &mut Duration) -> Result<(), DeviceError> {
        match self {
            Issue::Nothing => Ok(()),
            Issue::Kernel(launch) => launch.issue(stream.raw),
            Issue::Matmul(plan) => plan.issue(stream.raw),
            Issue::PerExpert(call) => call.issue(stream),
            Issue::Sdpa(call) => call.issue(stream),
            Issue::Nccl(call) => call.issue(stream),
            Issue::Copy { dst, src, bytes } => stream.copy(*dst, *src, *bytes),
            Issue::Zero { dst, bytes } => stream.fill(*dst, 0, *bytes),
            Issue::CopyToHostAndWait { dst, src, bytes } => {
                let start = Instant::now();
                if *bytes > 0 {
                    // SAFETY: `dst` is pinned host memory and `src` device memory of the executor, both of
                    // at least `bytes` bytes, and the wait below ends before either can be freed.
                    check("cuMemcpyDtoHAsync_v2", unsafe {
                        sys::cuMemcpyDtoHAsync_v2(dst.0 as *mut _, src.0, *bytes, stream.raw)
                    })?;
                }
                stream.synchronize()?;
                *waited += start.elapsed();
                Ok(())
            }
            Issue::Many(parts) => parts.iter().try_for_each(|p| p.issue(stream, waited)),
        }
    }

    /// Launches products ourselves where that spares a memset. Gives the words that are to be zero whenever this is
    /// issued.
    pub(super) fn launch_directly(&mut self, counters: &mut Counters) -> Result<Vec<DevPtr>, DeviceError> {
        match self {
            Issue::Matmul(plan) => Ok(plan.launch_directly(counters)?.into_iter().collect()),
            Issue::Many(parts) => {
                let words: Vec<_> =
                    parts.iter_mut().map(|p| p.launch_directly(counters)).collect::<Result<_, _>>()?;
                Ok(words.concat())
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Whether it puts other work on a stream from one step to the next.
    pub(super) fn varies(&self) -> bool {
        match self {
            Issue::PerExpert(_) => true,
            Issue::Nccl(call) => call.varies(),
            Issue::Many(parts) => parts.iter().any(Issue::varies),
            _ => false,
        }
    }

    /// Adds what `issue` puts on a stream, in order.
    pub(super) fn list_work(&self, out: &mut Vec<Work>) {
        match self {
            Issue::Nothing => {}
            Issue::Kernel(launch) => out.push(launch.work()),
            Issue::Matmul(plan) => out.extend(plan.work().iter().cloned()),
            Issue::PerExpert(call) => out.extend(call.work()),
            Issue::Sdpa(call) => out.extend(call.work().iter().cloned()),
            Issue::Nccl(call) => out.extend(call.work().iter().cloned()),
            Issue::Copy { bytes, .. } | Issue::CopyToHostAndWait { bytes, .. } if *bytes > 0 => {
                out.push(Work::Copy { bytes: *bytes });
            }
            Issue::Zero { bytes, .. } if *bytes > 0 => out.push(Work::Set { bytes: *bytes }),
            Issue::Copy { .. } | Issue::CopyToHostAndWait { .. } | Issue::Zero { .. } => {}
            Issue::Many(parts) => parts.iter().for_each(|p| p.list_work(out)),
        }
    }
}

/// What `issue` puts on a stream, learnt from the driver: captured alone and thrown away. For library calls,
/// whose kernels only the library knows.
pub(super) fn captured_alone(
    stream: &Stream,
    issue: impl FnOnce(&Stream) -> Result<(), DeviceError>,
) -> Result<Vec<Work>, DeviceError> {
    let capture = graph::Capture::begin(stream)?;
    issue(stream)?;
    Ok(graph::read(&capture.end()?)?.work)
}

/// The first place where two lists differ, in words. `None`: equal.
pub fn difference(expected: &[Work], found: &[Work]) -> Option<String> {
    let at = expected.iter().zip(found).position(|(a, b)| a != b);
    let at = at.or((expected.len() != found.len()).then_some(expected.len().min(found.len())))?;
    let say = |list: &[Work]| list.get(at).map_or("nothing".to_owned(), ToString::to_string);
    Some(format!(
        "{} launches against {}; at place {at}: {} against {}",
        expected.len(),
        found.len(),
        say(expected),
        say(found)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::prep::DevPtr;

    #[test]
    fn empty_pieces_leave_no_work() {
        let (dst, src) = (DevPtr(512), DevPtr(1024));
        let issue = Issue::Many(vec![
            Issue::Nothing,
            Issue::Copy { dst, src, bytes: 0 },
            Issue::Zero { dst, bytes: 8 },
            Issue::Many(vec![Issue::Copy { dst, src, bytes: 4 }]),
        ]);
        let mut work = Vec::new();
        issue.list_work(&mut work);
        assert_eq!(work, [Work::Set { bytes: 8 }, Work::Copy { bytes: 4 }]);
    }

    #[test]
    fn a_difference_is_told_by_place() {
        let a = [Work::Set { bytes: 8 }, Work::Copy { bytes: 4 }];
        assert_eq!(difference(&a, &a), None);
        assert!(difference(&a, &a[..1]).unwrap().contains("place 1: copy of 4 bytes against nothing"));
        let b = [Work::Set { bytes: 8 }, Work::Copy { bytes: 5 }];
        assert!(difference(&a, &b).unwrap().contains("place 1: copy of 4 bytes against copy of 5 bytes"));
    }
}
