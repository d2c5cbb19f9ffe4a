//! Whether the threads of the CPU device can be had: its libraries start them on first use, and end the process where
//! that fails.

use std::io;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{Builder, available_parallelism};

/// Threads of one matrix product, at most (matrixmultiply's own bound), beside the calling one.
const OF_PRODUCTS: usize = 3;
/// Memory that must be left for a thread to be started. Under a limit of memory (`ulimit -v`) a thread whose stack just fits
/// finds none for what it sets up first, and the process is aborted without a word of ours. Far above a stack, and
/// above what the allocator ever takes from memory that was freed: it is asked of the system each time.
const SPARE_BYTES: usize = 64 << 20;

/// Starts as many threads as a run on the CPU will, all at once, and lets them go.
///
/// # Errors
/// One cannot be started.
pub(super) fn check() -> anyhow::Result<()> {
    let given = |name: &str| std::env::var(name).ok()?.parse::<usize>().ok();
    let workers = given("RAYON_NUM_THREADS")
        .filter(|n| *n > 0)
        .unwrap_or_else(|| available_parallelism().map_or(1, NonZeroUsize::get));
    rehearse(workers + OF_PRODUCTS, None, SPARE_BYTES).map_err(|(n, e)| {
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

/// Gives how many could be started, and why no more. One after the other: a thread that is only about to run has not taken
/// its memory yet, so that how far this comes would depend on who is faster.
fn rehearse(count: usize, stack_bytes: Option<usize>, spare_bytes: usize) -> Result<(), (usize, io::Error)> {
    let gate = Arc::new(Mutex::new(()));
    let closed = gate.lock();
    let mut threads = Vec::new();
    let mut result = Ok(());
    for n in 0..count {
        let (runs, running) = mpsc::channel();
        let gate = gate.clone();
        let builder = stack_bytes.map_or_else(Builder::new, |b| Builder::new().stack_size(b));
        let body = move || {
            let _ = runs.send(());
            drop(gate.lock());
        };
        let started = spare(spare_bytes).and_then(|()| builder.spawn(body));
        match started {
            Ok(thread) => threads.push(thread),
            Err(e) => {
                result = Err((n, e));
                break;
            }
        }
        // One that ended instead of running says nothing, and is no reason to wait.
        let _ = running.recv();
    }
    drop(closed);
    threads.into_iter().for_each(|t| drop(t.join()));
    result
}

/// Asks for memory that is not used.
fn spare(bytes: usize) -> io::Result<()> {
    let asked = Vec::<u8>::new().try_reserve_exact(bytes);
    asked.map_err(|_| io::Error::other(format!("less than {} MiB of memory are left", bytes >> 20)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_cannot_start_is_an_error() {
        assert!(rehearse(4, None, SPARE_BYTES).is_ok());
        // No machine has so much address space.
        let (started, e) = rehearse(4, Some(1 << 60), SPARE_BYTES).unwrap_err();
        assert_eq!(started, 0);
        let said = none("a thread", &e).to_string();
        assert!(said.contains("ulimit -u") && !said.contains('\n'), "{said}");
    }

    #[test]
    fn memory_must_be_left_for_a_thread_to_start() {
        let (started, e) = rehearse(4, None, 1 << 60).unwrap_err();
        assert_eq!(started, 0);
        assert!(e.to_string().contains("MiB of memory are left"), "{e}");
    }
}
