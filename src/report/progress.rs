//! Progress on standard error: a line that is redrawn on a terminal, plain lines elsewhere, or nothing.

use crate::measure::{Progress, Update};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Without a terminal one line at most this often while timing.
const PLAIN_INTERVAL: Duration = Duration::from_secs(5);

/// Shows the progress of a measurement.
pub enum Terminal {
    Bar(ProgressBar),
    /// Log lines; when the last one on timing was written.
    Plain(Option<Instant>),
    Quiet,
}

impl Terminal {
    /// Bar or plain lines by what standard error is.
    pub fn new(quiet: bool) -> Self {
        if quiet {
            return Terminal::Quiet;
        }
        if !std::io::stderr().is_terminal() {
            return Terminal::Plain(None);
        }
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Terminal::Bar(bar)
    }

    /// Says one line that stays.
    pub fn say(&self, line: &str) {
        match self {
            Terminal::Bar(bar) => bar.println(line),
            // A closed standard error is no reason to stop.
            Terminal::Plain(_) => drop(writeln!(std::io::stderr(), "{line}")),
            Terminal::Quiet => {}
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Terminal::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

impl Progress for Terminal {
    fn stage(&mut self, what: &str) {
        match self {
            Terminal::Bar(bar) => {
                // Redrawing costs host time: while blocks are timed only updates between them redraw.
                if what.starts_with("timing") {
                    bar.disable_steady_tick()
                }
                bar.set_message(what.to_string());
            }
            _ => self.say(what),
        }
    }

    fn update(&mut self, update: &Update) {
        let text = line(update);
        match self {
            Terminal::Bar(bar) => {
                bar.set_message(text);
                bar.tick();
            }
            Terminal::Plain(last) if last.is_none_or(|at| at.elapsed() >= PLAIN_INTERVAL) => {
                *last = Some(Instant::now());
                self.say(&text);
            }
            _ => {}
        }
    }
}

fn line(update: &Update) -> String {
    // A first block may be over before its pair is: more may follow this line.
    let mut text = match update.pairs {
        0 => "timing: no whole pair of blocks yet".to_owned(),
        1 => "timing: 1 pair of blocks".to_owned(),
        pairs => format!("timing: {pairs} pairs of blocks"),
    };
    if update.max_time_s > 0.0 {
        text += &format!(", {:.1} of {:.1} s", update.elapsed_s, update.max_time_s);
    }
    if let Some(speedup) = update.speedup {
        text += &format!(", speedup {speedup:.4}");
    }
    if let Some(half) = update.half_width {
        text += &format!(" +-{:.2} %", half * 100.0);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn updates_say_only_what_is_known() {
        let update = Update { elapsed_s: 1.25, max_time_s: 20.0, pairs: 3, half_width: None, speedup: None };
        assert_eq!(line(&update), "timing: 3 pairs of blocks, 1.2 of 20.0 s");
        let update = Update { half_width: Some(0.004), speedup: Some(1.25), max_time_s: 0.0, ..update };
        assert_eq!(line(&update), "timing: 3 pairs of blocks, speedup 1.2500 +-0.40 %");
    }
}
