//! argv -> Args -> RunConfig -> Program -> Segments -> Executor -> Steps -> Rows -> CSV.

use mbperf::args::{self, Command};
use mbperf::{commands, run};
use std::process::ExitCode;

fn main() -> ExitCode {
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
