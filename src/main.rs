//! argv -> Args -> RunConfig -> Program -> Segments -> Executor -> Steps -> Rows -> CSV.

use mbperf::args::{self, Command};
use mbperf::{commands, run};
use std::process::ExitCode;

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
