//! SIGINT and SIGTERM: a measurement ends with its step and keeps whole files; what does not come back within
//! seconds, and planning, ends at once. A second signal always does.

use crate::commands::complain;
use crate::report::Writer;
use anyhow::Context;
use signal_hook::iterator::Signals;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// SIGINT and SIGTERM.
pub(super) const INTERRUPTED: i32 = 130;
/// What a step and the files may take after the signal. Docker kills ten seconds after its SIGTERM.
const GRACE: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(20);

/// What a signal would cut short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Stage {
    /// Nothing is open: the process may end anywhere.
    Planning,
    /// Files and the device are open.
    Running,
    /// The last run has ended; a workbook may be on its way to the disk.
    Ending,
}

/// Of the process.
#[derive(Debug, Clone)]
pub(super) struct Interrupt {
    flag: Arc<AtomicBool>,
    stage: Arc<AtomicU8>,
    /// Files that are removed again if nothing came into them.
    made: Arc<Mutex<Vec<PathBuf>>>,
}

/// A run is under way until this is dropped.
pub(super) struct Running<'a>(&'a Interrupt);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.enter(Stage::Ending);
    }
}

impl Interrupt {
    /// Watches for the signals from now on.
    ///
    /// # Errors
    /// No handler or no thread can be had.
    pub fn watch() -> anyhow::Result<Self> {
        let own = Self {
            flag: Arc::default(),
            stage: Arc::new(AtomicU8::new(Stage::Planning as u8)),
            made: Arc::default(),
        };
        let signals = [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM];
        for signal in signals {
            // A second one ends the process in the handler itself, whatever hangs.
            signal_hook::flag::register_conditional_shutdown(signal, INTERRUPTED, own.flag.clone())
                .and_then(|_| signal_hook::flag::register(signal, own.flag.clone()))
                .context("cannot watch for signals")?;
        }
        let mut arrived = Signals::new(signals).context("cannot watch for signals")?;
        let watched = own.clone();
        super::thread("signals", move || {
            if arrived.forever().next().is_some() {
                watched.stop();
            }
        })?;
        Ok(own)
    }

    pub fn flag(&self) -> &AtomicBool {
        &self.flag
    }

    /// A run is planned.
    pub fn planning(&self) {
        self.enter(Stage::Planning);
    }

    /// Its files are about to be opened.
    pub fn running(&self) -> Running<'_> {
        self.enter(Stage::Running);
        Running(self)
    }

    /// The files of `writer` go if the process ends before anything came into them.
    pub fn opened(&self, writer: &Writer) {
        if let Ok(mut made) = self.made.lock() {
            *made = writer.made();
        }
    }

    fn enter(&self, stage: Stage) {
        self.stage.store(stage as u8, Ordering::SeqCst);
    }

    fn is_in(&self, stage: Stage) -> bool {
        self.stage.load(Ordering::SeqCst) == stage as u8
    }

    /// What the watching thread does after the first signal.
    fn stop(&self) {
        let noted = Instant::now();
        let mut told = false;
        loop {
            if self.is_in(Stage::Planning) {
                complain("interrupted before the run began");
                self.end();
            }
            if self.is_in(Stage::Running) && !told {
                told = true;
                complain(&format!(
                    "interrupt noted: the step under way is waited for, {} s at most; again to end at once",
                    GRACE.as_secs()
                ));
            }
            if self.is_in(Stage::Running) && noted.elapsed() >= GRACE {
                complain(
                    "interrupted; what was under way did not come back and was left; finished rows stay",
                );
                self.end();
            }
            std::thread::sleep(LOOK);
        }
    }

    fn end(&self) {
        super::last::say(INTERRUPTED as u8);
        for path in self.made.lock().map(|m| m.clone()).unwrap_or_default() {
            if path.metadata().is_ok_and(|m| m.is_file() && m.len() == 0) {
                let _ = std::fs::remove_file(path);
            }
        }
        // Without clean-up at exit, which would wait for what hangs.
        signal_hook::low_level::exit(INTERRUPTED);
    }
}
