//! What a process still says and saves where it must end in the middle: a device call hangs and cannot be taken back, or a
//! signal finds one that does.

use crate::report::xlsx::Book;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

type Words = Box<dyn FnOnce(u8) + Send>;

/// Of the process, as its end is.
static WORDS: Mutex<Option<Words>> = Mutex::new(None);

/// Calls `words` with the exit code before an end in the middle; in place of what was set before.
pub(super) fn words(words: impl FnOnce(u8) + Send + 'static) {
    if let Ok(mut set) = WORDS.lock() {
        *set = Some(Box::new(words));
    }
}

/// The usual end has come: it says the same.
pub(super) fn clear() {
    if let Ok(mut set) = WORDS.lock() {
        *set = None;
    }
}

/// Says them, once.
pub(super) fn say(code: u8) {
    let words = WORDS.lock().ok().and_then(|mut set| set.take());
    if let Some(words) = words {
        words(code);
    }
}

/// The book, unless what hangs holds it.
pub(super) fn book(book: &Arc<Mutex<Book>>) -> Option<MutexGuard<'_, Book>> {
    const TRIES: usize = 50;
    (0..TRIES).find_map(|_| {
        book.try_lock().ok().or_else(|| {
            std::thread::sleep(Duration::from_millis(20));
            None
        })
    })
}
