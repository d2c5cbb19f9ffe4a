//! Whether the threads of the CPU device can be had: its libraries start them on first use, and end the process where
//! that fails.

use std::io;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::thread::{Builder, available_parallelism};

/// Threads of one matrix product, at most (matrixmultiply's own bound), beside the calling one.
const OF_PRODUCTS: usize = 3;

/// Starts as many threads as a run on the CPU will, all at once, and lets them go.
///
/// # Errors
/// One cannot be started.
pub(super) fn check() -> anyhow::Result<()> {
    let given = |name: &str| std::env::var(name).ok()?.parse::<usize>().ok();
    let workers = given("RAYON_NUM_THREADS")
        .filter(|n| *n > 0)
        .unwrap_or_else(|| available_parallelism().map_or(1, NonZeroUsize::get));
    rehearse(workers + OF_PRODUCTS, None).map_err(|(n, e)| {
        none(&format!("thread {} of the {} that a run on the CPU uses", n + 1, workers + OF_PRODUCTS), &e)
    })?;
    // Now, while they are known to fit. An error means that a pool is there already.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(workers).build_global();
    Ok(())
}

/// Why there is no such thread, and what to do.
pub(super) fn none(what: &str, e: &io::Error) -> anyhow::Error {
    anyhow::anyhow!(
        "{what} cannot be started: {e}; raise the limit of threads (`ulimit -u`, a container's pids limit) or of memory \
         (`ulimit -v`), or set RAYON_NUM_THREADS=1"
    )
}

/// Gives how many could be started, and why no more.
fn rehearse(count: usize, stack_bytes: Option<usize>) -> Result<(), (usize, io::Error)> {
    let gate = Arc::new(Mutex::new(()));
    let closed = gate.lock();
    let mut threads = Vec::new();
    let mut result = Ok(());
    for n in 0..count {
        let gate = gate.clone();
        let builder = stack_bytes.map_or_else(Builder::new, |b| Builder::new().stack_size(b));
        match builder.spawn(move || drop(gate.lock())) {
            Ok(thread) => threads.push(thread),
            Err(e) => {
                result = Err((n, e));
                break;
            }
        }
    }
    drop(closed);
    threads.into_iter().for_each(|t| drop(t.join()));
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_cannot_start_is_an_error() {
        assert!(rehearse(4, None).is_ok());
        // No machine has so much address space.
        let (started, e) = rehearse(4, Some(1 << 60)).unwrap_err();
        assert_eq!(started, 0);
        let said = none("a thread", &e).to_string();
        assert!(said.contains("ulimit -u") && !said.contains('\n'), "{said}");
    }
}
