//! Run ids: the time to the second, readable and sorting in order, and a random part.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

/// A new id, e.g. `20261129T170711Z-5f0c2a91b3d4`. Unique over processes and machines: 48 random bits a second.
pub fn new() -> String {
    // `RandomState` is seeded by the system; process id and nanoseconds guard against a weak seed.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u128(now.as_nanos());
    hasher.write_u32(std::process::id());
    let stamp = timestamp(now.as_secs()).replace(['-', ':'], "");
    format!("{stamp}-{:012x}", hasher.finish() & 0xffff_ffff_ffff)
}

/// Now in UTC, e.g. `2026-11-29T17:07:11Z`.
pub fn utc_now() -> String {
    timestamp(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()))
}

/// ISO 8601 of seconds since 1970 (days to civil date after Hinnant, "chrono-compatible low-level date
/// algorithms").
fn timestamp(seconds: u64) -> String {
    let days = seconds / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Months count from March, so that the leap day comes last.
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_dates() {
        assert_eq!(timestamp(0), "1970-01-01T00:00:00Z");
        assert_eq!(timestamp(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(timestamp(1_709_251_199), "2024-02-29T23:59:59Z");
        assert_eq!(timestamp(1_798_761_599), "2026-12-31T23:59:59Z");
    }

    #[test]
    fn ids_do_not_repeat() {
        let ids: std::collections::HashSet<String> = (0..1000).map(|_| new()).collect();
        assert_eq!(ids.len(), 1000);
    }
}
