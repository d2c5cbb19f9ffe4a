//! The lowest place that is free for as long as a buffer lives.
//!
//! A model of a thousand layers has tens of thousands of buffers, and each would be compared with all that are placed
//! already. Neighbours live alike (the same part of one layer after the other), so they are kept in groups: most groups
//! are passed as a whole, because none of theirs lives when the new buffer does, or because all do and leave no gap
//! that is large enough.

/// Launches (inclusive) in which a buffer holds a value, in order.
type Live<'a> = &'a [(usize, usize)];

/// A buffer that has its place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Taken<'a> {
    pub offset: usize,
    pub end: usize,
    pub live: Live<'a>,
}

/// Buffers of a group, at most: the square root of the tens of thousands, roughly, which balances the two searches.
const GROUP: usize = 128;
/// Intervals of each buffer that a group knows apart; those of a micro-batch each, mostly two.
const KNOWN: usize = 4;

/// What a group knows of the `n`th intervals of its buffers.
#[derive(Debug, Clone, Copy)]
struct Interval {
    earliest: usize,
    latest: usize,
    /// Latest beginning and earliest end, where every buffer has an `n`th interval.
    common: Option<(usize, usize)>,
}

#[derive(Debug, Default)]
struct Group<'a> {
    /// By offset.
    taken: Vec<Taken<'a>>,
    end: usize,
    /// Largest gap between the buffers.
    gap: usize,
    known: [Option<Interval>; KNOWN],
}

/// What is placed, by offset.
#[derive(Debug, Default)]
pub(super) struct Placed<'a>(Vec<Group<'a>>);

fn overlap(a: Live, b: Live) -> bool {
    let (mut i, mut j) = (0, 0);
    while i < a.len() && j < b.len() {
        if a[i].0 <= b[j].1 && b[j].0 <= a[i].1 {
            return true;
        }
        if a[i].1 < b[j].1 { i += 1 } else { j += 1 }
    }
    false
}

impl<'a> Group<'a> {
    /// From its buffers.
    fn of(taken: Vec<Taken<'a>>) -> Self {
        let (mut end, mut gap) = (taken.first().map_or(0, |t| t.offset), 0);
        for t in &taken {
            gap = gap.max(t.offset.saturating_sub(end));
            end = end.max(t.end);
        }
        let known = std::array::from_fn(|n| {
            // The last one stands for all that follow.
            let of = |t: &Taken| match n + 1 == KNOWN {
                true => t.live.get(n).zip(t.live.last()).map(|(a, b)| (a.0, b.1)),
                false => t.live.get(n).copied(),
            };
            let all = || taken.iter().filter_map(of);
            let earliest = all().map(|l| l.0).min()?;
            let latest = all().map(|l| l.1).max()?;
            let latest_begin = all().map(|l| l.0).max()?;
            let earliest_end = all().map(|l| l.1).min()?;
            let whole = n + 1 < KNOWN && all().count() == taken.len();
            Some(Interval { earliest, latest, common: whole.then_some((latest_begin, earliest_end)) })
        });
        Self { taken, end, gap, known }
    }

    /// No buffer of the group lives when one that lives in `live` does. False also means: not known.
    fn none_lives(&self, live: Live) -> bool {
        let apart = |k: &Interval| live.iter().all(|l| l.0 > k.latest || l.1 < k.earliest);
        self.known.iter().flatten().all(apart)
    }

    /// Each buffer of the group lives at some time in `live`. False also means: not known.
    fn all_live(&self, live: Live) -> bool {
        let inside = |(begin, end): (usize, usize)| live.iter().any(|l| begin <= l.1 && end >= l.0);
        self.known.iter().flatten().filter_map(|k| k.common).any(inside)
    }
}

impl<'a> Placed<'a> {
    /// Lowest offset at which `bytes` are free throughout `live`.
    pub fn first_fit(&self, bytes: usize, live: Live) -> usize {
        let mut offset = 0;
        for group in &self.0 {
            let Some(first) = group.taken.first() else { continue };
            if first.offset >= offset + bytes {
                break;
            }
            if group.end <= offset || group.none_lives(live) {
                continue;
            }
            if group.gap < bytes && group.all_live(live) {
                offset = offset.max(group.end);
                continue;
            }
            for t in &group.taken {
                if t.offset >= offset + bytes {
                    break;
                }
                if t.end > offset && overlap(live, t.live) {
                    offset = t.end;
                }
            }
        }
        offset
    }

    /// Takes a place.
    pub fn insert(&mut self, new: Taken<'a>) {
        // The last group that begins at or before it.
        let at = self.0.partition_point(|g| g.taken.first().is_some_and(|t| t.offset <= new.offset));
        let at = at.saturating_sub(1);
        let mut taken = match self.0.get_mut(at) {
            Some(group) => std::mem::take(&mut group.taken),
            None => {
                self.0.push(Group::of(vec![new]));
                return;
            }
        };
        taken.insert(taken.partition_point(|t| t.offset <= new.offset), new);
        if taken.len() > GROUP {
            let rest = taken.split_off(GROUP / 2);
            self.0.insert(at + 1, Group::of(rest));
        }
        self.0[at] = Group::of(taken);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Against every placed buffer, one by one.
    fn plain(placed: &[Taken], bytes: usize, live: Live) -> usize {
        let mut offset = 0;
        for t in placed {
            if t.offset >= offset + bytes {
                break;
            }
            if t.end > offset && overlap(live, t.live) {
                offset = t.end;
            }
        }
        offset
    }

    fn compare(mut buffers: Vec<(usize, Vec<(usize, usize)>)>) {
        buffers.sort_by_key(|b| (std::cmp::Reverse(b.0), b.1[0].0));
        let (mut placed, mut list): (Placed, Vec<Taken>) = Default::default();
        for (bytes, live) in &buffers {
            let offset = placed.first_fit(*bytes, live);
            assert_eq!(offset, plain(&list, *bytes, live));
            let new = Taken { offset, end: offset + bytes, live };
            placed.insert(new);
            list.insert(list.partition_point(|t| t.offset <= offset), new);
        }
        let in_order: Vec<usize> = placed.0.iter().flat_map(|g| &g.taken).map(|t| t.offset).collect();
        assert!(in_order.is_sorted() && in_order.len() == buffers.len());
    }

    /// As a transformer's: saved from the forward to the backward pass, or used for a launch or two.
    fn layers(count: usize, passes: usize) -> Vec<(usize, Vec<(usize, usize)>)> {
        let step = 16 * count;
        let saved = (0..count * 4).map(|i| {
            let live = (0..passes).map(|p| (p * step + i * 2, p * step + step - 1 - i * 2)).collect();
            (512 * (1 + i % 3), live)
        });
        let short = (0..count * 4).map(|i| {
            let live = (0..passes).map(|p| (p * step + i * 3, p * step + i * 3 + 2)).collect();
            (512 * (1 + i % 5), live)
        });
        saved.chain(short).collect()
    }

    #[test]
    fn groups_change_no_place() {
        for passes in [1, 2, 6] {
            compare(layers(100, passes));
        }
    }

    #[test]
    fn thousands_of_layers_are_packed_at_once() {
        let mut buffers = layers(4000, 2);
        buffers.sort_by_key(|b| (std::cmp::Reverse(b.0), b.1[0].0));
        let begun = std::time::Instant::now();
        let mut placed = Placed::default();
        for (bytes, live) in &buffers {
            let offset = placed.first_fit(*bytes, live);
            placed.insert(Taken { offset, end: offset + bytes, live });
        }
        // One by one it takes minutes: the margin is that of a busy machine.
        assert!(begun.elapsed().as_secs() < 20, "{:?}", begun.elapsed());
    }

    proptest! {
        #[test]
        fn any_buffers_are_placed_as_one_by_one(
            seeds in prop::collection::vec((1usize..6, prop::collection::vec((0usize..40, 0usize..12), 1..7)), 1..400)
        ) {
            let buffers = seeds.into_iter().map(|(units, steps)| {
                let mut from = 0;
                let live = steps.into_iter().map(|(skip, length)| {
                    let begin = from + skip;
                    from = begin + length + 1;
                    (begin, begin + length)
                });
                (units * 512, live.collect())
            });
            compare(buffers.collect());
        }
    }
}
