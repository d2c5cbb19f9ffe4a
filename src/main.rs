//! argv -> Args -> RunConfig -> Program -> Segments -> Executor -> Steps -> Rows -> CSV.

use mbperf::args::{self, Command};
use mbperf::{commands, run};
use std::process::ExitCode;

/// Run by the loader, before Rust opens /dev/null for a standard output that was closed.
#[cfg(target_os = "linux")]
#[used]
// SAFETY: an entry of this section is a function that the loader calls once before `main`; this one allocates nothing.
#[unsafe(link_section = ".init_array")]
static LOOK_AT_STDOUT: extern "C" fn() = {
    extern "C" fn look() {
        use std::ffi::c_int;
        unsafe extern "C" {
            fn fcntl(descriptor: c_int, command: c_int, ...) -> c_int;
        }
        /// Asks for a descriptor's flags (fcntl.h): fails for one that is not open.
        const F_GETFD: c_int = 1;
        const STDOUT: c_int = 1;
        // SAFETY: libc's function, which every Linux program is linked with, by its own signature.
        if unsafe { fcntl(STDOUT, F_GETFD) } < 0 {
            commands::STDOUT_CLOSED.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    }
    look
};

fn main() -> ExitCode {
    // Past a limit of file sizes a write then fails, as on a full disk, and is told; otherwise the process is killed.
    #[cfg(unix)]
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Default::default());
    let command = match args::parse(std::env::args_os()) {
        Ok(command) => command,
        Err(e) => return commands::show(&e),
    };
    let code = match command {
        Command::Run(args) => run::run(&args),
        other => commands::dispatch(&other),
    };
    match code {
        Ok(code) => ExitCode::from(code),
        Err(failure) => ExitCode::from(commands::fail(&failure)),
    }
}
