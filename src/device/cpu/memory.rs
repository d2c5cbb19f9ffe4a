//! Memory that the machine and the process's own limit can still give.

/// Address space that glibc sets aside for the heap of each thread.
const THREAD_HEAP: u64 = 64 << 20;

/// Bytes; `None` where the kernel does not say (no Linux). Under a limit of address space (`ulimit -v`) room is left
/// for the threads' heaps and for two copies of `largest` bytes, the largest buffer, which ops and digests make.
pub(super) fn free(largest: u64) -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let machine = kib(&read("/proc/meminfo")?, "MemAvailable:");
    let own = read("/proc/self/limits").zip(read("/proc/self/status")).and_then(|(limits, status)| {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
        let room = address_space(&limits)?.saturating_sub(kib(&status, "VmSize:")?);
        Some(room.saturating_sub(threads * THREAD_HEAP).saturating_sub(largest.saturating_mul(2)))
    });
    machine.into_iter().chain(own).min()
}

/// Bytes of a line `name  123 kB`.
fn kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The soft limit in the text of `/proc/self/limits`; `None`: unlimited.
fn address_space(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|l| l.strip_prefix("Max address space"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_lines_are_read() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max address space         2048000000           unlimited            bytes     \n";
        assert_eq!(address_space(limits), Some(2_048_000_000));
        assert_eq!(address_space(&limits.replace("2048000000", "unlimited")), None);
        assert_eq!(kib("VmPeak:\t  9 kB\nVmSize:\t    1234 kB\n", "VmSize:"), Some(1234 * 1024));
    }
}
