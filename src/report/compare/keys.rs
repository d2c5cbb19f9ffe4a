//! What pairs rows (the configuration key), and what must be alike in rows that are paired.

use super::read::Record;

/// Columns of the configuration key. A column that a file lacks counts as empty.
pub const KEY: [&str; 26] = [
    "model_family",
    "model_recipe",
    "variant",
    "task",
    "recipe_dtype",
    "compute_dtype",
    "gpu_target",
    "num_gpus",
    "world_size",
    "tp",
    "pp",
    "cp",
    "ep",
    "pp_rank",
    "micro_batch_size",
    "num_microbatches",
    "num_microbatches_recipe",
    "seq_length",
    "num_layers",
    "stack_only",
    "cuda_graph_impl",
    "cuda_graph_scope",
    "host_model",
    WORKLOAD,
    "arm",
    "aa",
];
/// Settings of the command that have no column, in one text: see [`super::workload`].
pub const WORKLOAD: &str = "workload";

/// Cells of the key, in the order of [`KEY`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Vec<String>);

impl Key {
    /// `cell` gives the cell of a column, [`WORKLOAD`] among them; columns of `ignored` count as empty.
    pub fn new(cell: impl Fn(&str) -> String, ignored: &[String]) -> Self {
        let of = |column: &&str| match *column {
            _ if ignored.iter().any(|i| i == column) => String::new(),
            // The order of names in a scope means nothing.
            "cuda_graph_scope" => {
                let text = cell(column);
                let mut names: Vec<&str> = text.split('+').collect();
                names.sort_unstable();
                names.join("+")
            }
            _ => cell(column),
        };
        Key(KEY.iter().map(of).collect())
    }

    pub fn cells(&self) -> impl Iterator<Item = (&'static str, &str)> {
        KEY.iter().copied().zip(self.0.iter().map(String::as_str))
    }

    pub fn get(&self, column: &str) -> &str {
        self.cells().find(|(name, _)| *name == column).map_or("", |(_, cell)| cell)
    }

    /// Columns in which two keys differ, with both cells.
    pub fn differences<'a>(&'a self, other: &'a Key) -> Vec<(&'static str, &'a str, &'a str)> {
        self.cells()
            .zip(&other.0)
            .filter(|((_, a), b)| a != b)
            .map(|((name, a), b)| (name, a, b.as_str()))
            .collect()
    }

    /// The key in a few words: the recipe, what was captured, the arm, and the cells of `telling` columns.
    pub fn label(&self, telling: &[&str]) -> String {
        const ALWAYS: [&str; 7] = [
            "model_recipe",
            "gpu_target",
            "compute_dtype",
            "cuda_graph_impl",
            "cuda_graph_scope",
            "arm",
            "aa",
        ];
        let plain = |c: &str| c.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>();
        let always = ALWAYS.iter().map(|c| plain(self.get(c))).filter(|c| !c.is_empty());
        let telling =
            telling.iter().filter(|c| !ALWAYS.contains(c)).map(|c| format!("{c}={}", plain(self.get(c))));
        always.chain(telling).collect::<Vec<_>>().join(" ")
    }
}

/// Columns that must be alike in paired rows, exactly; a column that either file lacks is not compared.
/// [`CLOCK`] stands beside them with a rule of its own.
pub const ALIKE: [&str; 18] = [
    "schema_version",
    "device",
    "gpu_name",
    "gpu_memory_mib",
    "mig_profile",
    "driver_version",
    "cuda_version",
    "power_limit_w",
    "clock_mode",
    "comm",
    "te_rng_tracker",
    "approximations",
    "seed",
    "etp",
    "moe_routing",
    "tokens_routed",
    "tokens_padded",
    "tokens_dropped",
];
/// SM clocks that differ by more than this are unlike: below it, runs on one card differ by themselves.
pub const CLOCK_TOLERANCE: f64 = 0.05;
pub const CLOCK: &str = "sm_clock_mhz_median";

/// Columns whose difference is only said: figures stay comparable, their cause may lie there.
pub const WORTH_A_WARNING: [&str; 4] = ["gemm_plan_digest", "attention_backend", "host_name", "gpu_uuid"];

/// Names that `--allow-unlike` takes. Of the key, all but the arm: rows pair without looking at that column.
pub fn fields() -> impl Iterator<Item = &'static str> {
    ALIKE.into_iter().chain([CLOCK]).chain(KEY.into_iter().filter(|k| !["arm", "aa"].contains(k)))
}

/// A field that differs, with what either side holds.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Unlike {
    pub field: String,
    pub base: String,
    pub new: String,
}

/// Distinct cells of a column over rows; `None` when one of the files lacks it.
pub fn distinct(rows: &[&Record], column: &str) -> Option<Vec<String>> {
    let mut cells: Vec<String> = Vec::new();
    for row in rows {
        let cell = row.get(column)?;
        if !cells.iter().any(|c| c == cell) {
            cells.push(cell.to_owned());
        }
    }
    Some(cells)
}

/// The field's cells when they are not all one.
pub fn unlike(base: &[&Record], new: &[&Record], column: &str) -> Option<Unlike> {
    let (b, n) = (distinct(base, column)?, distinct(new, column)?);
    let alike = b.len() == 1 && b == n || column == CLOCK && clocks_agree(b.iter().chain(&n));
    let show = |cells: Vec<String>| {
        cells
            .into_iter()
            .map(|c| if c.is_empty() { "(empty)".into() } else { c })
            .collect::<Vec<_>>()
            .join(", ")
    };
    (!alike).then(|| Unlike { field: column.into(), base: show(b), new: show(n) })
}

fn clocks_agree<'a>(cells: impl Iterator<Item = &'a String>) -> bool {
    let clocks: Option<Vec<f64>> =
        cells.map(|c| c.parse().ok().filter(|x: &f64| x.is_finite() && *x > 0.0)).collect();
    clocks.is_some_and(|clocks| {
        let low = clocks.iter().copied().fold(f64::INFINITY, f64::min);
        let high = clocks.iter().copied().fold(0.0, f64::max);
        high <= low * (1.0 + CLOCK_TOLERANCE)
    })
}
