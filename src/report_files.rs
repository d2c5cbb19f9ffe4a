//! `mbperf report` and `--xlsx`: which files go in, which come out, and what is tried before the work.

use crate::args::{Args, ReportArgs};
use crate::commands::{self, Usage, fail, say};
use crate::report::page::{self, data::Input};
use crate::report::xlsx::{self, Book};
use crate::report::{file, page::PAGE_START};
use anyhow::Context;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// `mbperf report`: everything is read and drawn before anything is written.
///
/// # Errors
/// A file that cannot be read or an output of another kind (exit 2); an output that cannot be written (exit 1).
pub fn run(args: &ReportArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let to_stdout = args.output.as_deref() == Some(Path::new("-"));
    if to_stdout {
        commands::stdout_is_open()?;
    }
    let page_file = args.output.as_deref().filter(|_| !to_stdout);
    if let Some(path) = page_file {
        check(path, "-o/--output", PAGE_START.as_bytes(), "page of `mbperf report`")?;
    }
    if let Some(path) = &args.xlsx {
        check(path, "--xlsx", xlsx::MAGIC, "workbook")?;
    }
    if let (Some(page), Some(xlsx)) = (page_file, &args.xlsx)
        && page == xlsx
    {
        return Err(Usage(format!("-o and --xlsx both name {}: give two files", page.display())).into());
    }
    let input = Input::read(&args.files, args.xlsx.is_some()).map_err(Usage)?;
    input.notes.iter().for_each(|note| say(note));
    if args.output.is_some() {
        let page = page::render(&input);
        match page_file {
            Some(path) => write(path, page.as_bytes(), "the page")?,
            None => out.write_all(page.as_bytes()).and_then(|()| out.flush())?,
        }
    }
    if let Some(path) = &args.xlsx {
        save_book(&input.book(), path)?;
    }
    Ok(())
}

/// Collects what the command writes, when `--xlsx` asks for a workbook.
///
/// # Errors
/// A file that cannot be written (exit 2).
pub fn book(args: &Args) -> anyhow::Result<Option<Arc<Mutex<Book>>>> {
    let Some(path) = &args.mbperf.xlsx else { return Ok(None) };
    check(path, "--xlsx", xlsx::MAGIC, "workbook")?;
    Ok(Some(Arc::default()))
}

/// Writes the workbook of a command that ended with `code`, if there is anything in it; returns the exit code.
///
/// # Errors
/// A workbook that cannot be written.
pub fn save(args: &Args, book: Option<&Mutex<Book>>, code: u8) -> anyhow::Result<u8> {
    let (Some(book), Some(path)) = (book, &args.mbperf.xlsx) else { return Ok(code) };
    let Ok(book) = book.lock() else { return Ok(code) };
    if !book.is_empty() {
        match save_book(&book, path) {
            // The first failure's code stays.
            Err(e) if code != 0 => {
                fail(&e);
                return Ok(code);
            }
            other => other?,
        }
        if !args.mbperf.quiet {
            say(&format!("workbook: {}", path.display()));
        }
    }
    Ok(code)
}

fn check(path: &Path, option: &str, magic: &[u8], kind: &str) -> anyhow::Result<()> {
    file::check(path, magic, kind).map_err(|reason| {
        Usage(format!("{option}: cannot write {}: {reason}; choose another file", path.display())).into()
    })
}

fn save_book(book: &Book, path: &Path) -> anyhow::Result<()> {
    let bytes = book.bytes().with_context(|| format!("cannot make the workbook {}", path.display()))?;
    write(path, &bytes, "the workbook")
}

fn write(path: &Path, bytes: &[u8], what: &str) -> anyhow::Result<()> {
    // With the cause in the same text: the cause alone is taken for standard output's.
    file::replace(path, bytes).map_err(|e| {
        anyhow::anyhow!(
            "cannot write {what} to {}: {e}; make room there or choose another file",
            path.display()
        )
    })
}
