//! Result files made up for the tests of `compare`.

use mbperf::report::columns;
use std::path::{Path, PathBuf};

/// A CSV with the tool's own columns.
#[derive(Clone)]
pub struct Results {
    pub header: Vec<String>,
    pub rows: Vec<Vec<String>>,
}

impl Default for Results {
    fn default() -> Self {
        Self { header: columns::header().into_iter().map(String::from).collect(), rows: vec![] }
    }
}

const COMMON: &[(&str, &str)] = &[
    ("schema_version", "1"),
    ("status", "ok"),
    ("device", "cuda"),
    ("gpu_name", "NVIDIA H200"),
    ("gpu_memory_mib", "143771"),
    ("driver_version", "580.95"),
    ("cuda_version", "13.0"),
    ("gpu_target", "h100"),
    ("model_family", "llama"),
    ("model_recipe", "llama3_8b"),
    ("task", "pretrain"),
    ("recipe_dtype", "bf16"),
    ("compute_dtype", "bf16"),
    ("num_gpus", "8"),
    ("world_size", "1"),
    ("comm", "stand_in"),
    ("tp", "1"),
    ("pp", "1"),
    ("cp", "1"),
    ("ep", "1"),
    ("micro_batch_size", "1"),
    ("num_microbatches", "2"),
    ("num_microbatches_recipe", "16"),
    ("seq_length", "4096"),
    ("num_layers", "32"),
    ("pp_rank", "0"),
    ("stack_only", "false"),
    ("overlap_wgrad", "false"),
    ("cuda_graph_impl", "transformer_engine"),
    ("cuda_graph_scope", "attn+mlp"),
    ("te_rng_tracker", "true"),
    ("digest_match", "true"),
    ("host_model", "bare"),
    ("sm_clock_mhz_median", "1980"),
    ("power_limit_w", "700"),
    ("throttle_reasons", "none"),
    ("steady_reached", "true"),
    ("attention_backend", "own"),
    ("seed", "1234"),
    ("peak_memory_mib", "40000"),
    ("graph_memory_mib", "100"),
    ("command", "mbperf -m llama -mr llama3_8b -g h100"),
];

impl Results {
    /// Appends both rows of a run: eager step time and speedup, each with a relative 95 % half width.
    pub fn run(mut self, run_id: &str, eager_ms: f64, speedup: f64, half: f64) -> Self {
        for (arm, ms) in [("eager", eager_ms), ("graph", eager_ms / speedup)] {
            self.rows.push(vec![String::new(); self.header.len()]);
            for (column, cell) in COMMON {
                self.set_last(column, cell);
            }
            self.set_last("run_id", run_id);
            self.set_last("arm", arm);
            for (prefix, value, figure) in
                [("step_time_ms", ms, "step_time_ms_median"), ("speedup", speedup, "speedup")]
            {
                self.set_last(figure, &columns::number(value));
                self.set_last(&format!("{prefix}_ci95_low"), &columns::number(value * (1.0 - half)));
                self.set_last(&format!("{prefix}_ci95_high"), &columns::number(value * (1.0 + half)));
            }
        }
        self
    }

    /// One quiet run: 100 ms eager, speedup 1.25.
    pub fn one() -> Self {
        Self::default().run("base-1", 100.0, 1.25, 0.003)
    }

    /// Three quiet runs whose eager time is scaled, and whose speedup is.
    pub fn three(name: &str, time: f64, ratio: f64) -> Self {
        [0.998, 1.0, 1.002].iter().enumerate().fold(Self::default(), |r, (i, wobble)| {
            r.run(&format!("{name}-{i}"), 100.0 * time * wobble, 1.25 * ratio * wobble, 0.003)
        })
    }

    pub fn at(&self, column: &str) -> usize {
        self.header.iter().position(|c| c == column).unwrap()
    }

    pub fn set_last(&mut self, column: &str, cell: &str) {
        let (at, last) = (self.at(column), self.rows.len() - 1);
        self.rows[last][at] = cell.into();
    }

    /// The same file with a cell set in every row.
    pub fn with(mut self, column: &str, cell: &str) -> Self {
        let at = self.at(column);
        self.rows.iter_mut().for_each(|r| r[at] = cell.into());
        self
    }

    /// The same file with a cell set in one row.
    pub fn with_row(mut self, row: usize, column: &str, cell: &str) -> Self {
        let at = self.at(column);
        self.rows[row][at] = cell.into();
        self
    }

    /// The same file without a column.
    pub fn without(mut self, column: &str) -> Self {
        let at = self.at(column);
        self.header.remove(at);
        self.rows.iter_mut().for_each(|r| drop(r.remove(at)));
        self
    }

    /// Rows of two files in one.
    pub fn and(mut self, other: Results) -> Self {
        self.rows.extend(other.rows);
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut writer = csv::WriterBuilder::new().terminator(csv::Terminator::CRLF).from_writer(Vec::new());
        writer.write_record(&self.header).unwrap();
        self.rows.iter().for_each(|r| writer.write_record(r).unwrap());
        writer.into_inner().unwrap()
    }

    pub fn save(&self, folder: &Path, name: &str) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, self.bytes()).unwrap();
        path
    }
}
