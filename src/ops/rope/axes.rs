//! Rotary embedding over several axes: each pair of elements turns with one coordinate of its token.
//!
//! - Text with an image in it (Qwen3-VL, interleaved M-RoPE): pairs take turns between time, height and width; outside
//!   the image all three are the same number.
//! - Patches of an image (Qwen's vision tower): the first half of the pairs turns with the row, the second with the
//!   column, both with the same frequencies.
//! - Patches of a video (Wan): a third of the pairs, rounded down, turns with the row and as many with the column, the
//!   rest before them with the frame; each axis has frequencies of its own.

/// Where the coordinates of a position come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axes {
    /// Tokens of a sequence whose positions `start..start + side^2` are an image's, row by row. Axes: time, height, width.
    Text {
        start: usize,
        /// Image tokens in a row and in a column.
        side: usize,
        /// Pairs of each axis: of pair i axis `i % 3` while `i < 3 * section`, else time.
        section: [usize; 3],
    },
    /// Patches of images of `side` x `side`, in the order in which 2x2 of them are merged. Axes: row, column.
    Patches { side: usize },
    /// Patches of a video, frame by frame, row by row. Axes: frame, row, column.
    Video { height: usize, width: usize },
}

/// Patches that a merged token is wide and high.
pub const MERGE: usize = 2;

/// Row and column of patch `i` of an image of `side` patches: blocks of 2x2 in row order, rows within a block.
pub fn patch(i: usize, side: usize) -> (usize, usize) {
    let (block, within) = (i / (MERGE * MERGE), i % (MERGE * MERGE));
    let blocks = (side / MERGE).max(1);
    (block / blocks * MERGE + within / MERGE, block % blocks * MERGE + within % MERGE)
}

impl Axes {
    /// The axis that pair `i` of `pairs` turns with.
    pub fn of_pair(&self, i: usize, pairs: usize) -> usize {
        match self {
            Axes::Text { section, .. } => {
                let axis = i % 3;
                if axis > 0 && i < 3 * section[axis] { axis } else { 0 }
            }
            Axes::Patches { .. } => usize::from(i >= pairs.div_ceil(2)),
            Axes::Video { .. } => {
                let of_frames = pairs - 2 * (pairs / 3);
                (i + pairs / 3).saturating_sub(of_frames).checked_div(pairs / 3).unwrap_or(0)
            }
        }
    }

    /// The coordinate of `position` on `axis`.
    pub fn coordinate(&self, position: usize, axis: usize) -> usize {
        match *self {
            Axes::Text { start, side, .. } => {
                let image = side * side;
                if position < start {
                    position
                } else if position < start + image {
                    let at = position - start;
                    start + [0, at / side.max(1), at % side.max(1)][axis]
                } else {
                    // Text goes on after the largest coordinate of the image.
                    position - image + side
                }
            }
            Axes::Patches { side } => {
                let (row, column) = patch(position, side);
                [row, column][axis.min(1)]
            }
            Axes::Video { height, width } => {
                let (height, width) = (height.max(1), width.max(1));
                [position / (height * width), position / width % height, position % width][axis]
            }
        }
    }

    /// Radians per unit of pair i, for i < pairs.
    pub fn frequencies(&self, pairs: usize, base: f64) -> Vec<f64> {
        let of = |i: usize| match self {
            Axes::Text { .. } => base.powf(-(i as f64) / pairs as f64),
            Axes::Patches { .. } => {
                let half = pairs.div_ceil(2);
                base.powf(-((i % half) as f64) / half as f64)
            }
            Axes::Video { .. } => {
                let third = pairs / 3;
                let of_frames = pairs - 2 * third;
                let (at, of) = match i.checked_sub(of_frames) {
                    None => (i, of_frames),
                    Some(at) => (at % third, third),
                };
                base.powf(-(at as f64) / of as f64)
            }
        };
        (0..pairs).map(of).collect()
    }

    /// What the kernel is told: which coordinates, their two numbers, and the axis of every pair.
    pub fn defines(&self, pairs: usize) -> Vec<(&'static str, String)> {
        let (kind, first, second) = match *self {
            Axes::Text { start, side, .. } => (1, start, side),
            Axes::Patches { side } => (2, side, 0),
            Axes::Video { height, width } => (3, height, width),
        };
        let axes: Vec<String> = (0..pairs).map(|i| self.of_pair(i, pairs).to_string()).collect();
        vec![
            ("AXES", kind.to_string()),
            ("AXES_FIRST", first.to_string()),
            ("AXES_SECOND", second.to_string()),
            ("AXIS_OF_PAIR", if axes.is_empty() { "0".into() } else { axes.join(",") }),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_goes_on_after_the_images_largest_coordinate() {
        let axes = Axes::Text { start: 4, side: 3, section: [4, 2, 2] };
        let all = |p: usize| [0, 1, 2].map(|a| axes.coordinate(p, a));
        assert_eq!(all(3), [3, 3, 3]);
        assert_eq!(all(4), [4, 4, 4]);
        assert_eq!(all(8), [4, 5, 5]);
        assert_eq!(all(12), [4, 6, 6]);
        assert_eq!(all(13), [7, 7, 7]);
        // Time, height, width in turn while the sections last, then time.
        let of: Vec<usize> = (0..8).map(|i| axes.of_pair(i, 8)).collect();
        assert_eq!(of, [0, 1, 2, 0, 1, 2, 0, 0]);
    }

    #[test]
    fn patches_come_in_blocks_of_four() {
        let all: Vec<_> = (0..16).map(|i| patch(i, 4)).collect();
        assert_eq!(all[..6], [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]);
        assert_eq!(all[8..10], [(2, 0), (2, 1)]);
        let mut sorted = all.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), 16);
    }

    #[test]
    fn a_videos_pairs_are_of_frame_row_and_column() {
        let axes = Axes::Video { height: 3, width: 5 };
        assert_eq!([0, 1, 2].map(|a| axes.coordinate(15 + 2 * 5 + 4, a)), [1, 2, 4]);
        // Heads of 128: 22 pairs of frames, 21 of rows, 21 of columns.
        let of: Vec<usize> = (0..64).map(|i| axes.of_pair(i, 64)).collect();
        let count = |axis: usize| of.iter().filter(|a| **a == axis).count();
        assert_eq!([0, 1, 2].map(count), [22, 21, 21]);
        assert!(of.is_sorted());
        let f = axes.frequencies(64, 1e4);
        assert_eq!((f[0], f[22], f[43], f[22..43] == f[43..]), (1.0, 1.0, 1.0, true));
        assert_eq!((0..2).map(|i| axes.of_pair(i, 2)).collect::<Vec<_>>(), [0, 0]);
    }

    #[test]
    fn both_halves_of_a_patchs_pairs_have_the_same_frequencies() {
        let axes = Axes::Patches { side: 4 };
        let f = axes.frequencies(6, 1e4);
        assert_eq!(f[..3], f[3..]);
        assert_eq!((f[0], (f[1] - 1e4f64.powf(-1.0 / 3.0)).abs() < 1e-15), (1.0, true));
        assert_eq!((0..6).map(|i| axes.of_pair(i, 6)).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1]);
    }
}
