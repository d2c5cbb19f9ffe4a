//! Where the rows of a rank lie in the sequence.

/// Positions of `batch * seq` rows, row = b * seq + i. A context-parallel rank holds two chunks of each
/// sequence (rank r of cp: chunks r and 2cp-1-r); its rows are the first chunk's, then the second's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Positions {
    /// Sequences.
    pub batch: usize,
    /// Local rows of one sequence: the sum of the chunks' lengths.
    pub seq: usize,
    /// (start, length) in the global sequence; the second length is 0 when unused.
    pub chunks: [(usize, usize); 2],
}

impl Positions {
    /// All of every sequence is local.
    pub fn whole(batch: usize, seq: usize) -> Self {
        Self { batch, seq, chunks: [(0, seq), (seq, 0)] }
    }
    /// Rows on this rank.
    pub fn rows(&self) -> usize {
        self.batch * self.seq
    }
    /// Position of a row in its global sequence.
    pub fn position(&self, row: usize) -> usize {
        let i = row % self.seq.max(1);
        let [(start0, len0), (start1, _)] = self.chunks;
        if i < len0 { start0 + i } else { start1 + (i - len0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_run_through_both_chunks_of_every_sequence() {
        // Rank 0 of cp 2 with 16 tokens holds chunks 0 and 3 of four.
        let p = Positions { batch: 2, seq: 8, chunks: [(0, 4), (12, 4)] };
        let all: Vec<usize> = (0..p.rows()).map(|r| p.position(r)).collect();
        let one = [0, 1, 2, 3, 12, 13, 14, 15];
        assert_eq!(all, [one, one].concat());
        assert_eq!(Positions::whole(2, 3).position(4), 1);
    }
}
