//! What pairs rows (the configuration key), and what must be alike in rows that are paired.

use super::read::Record;

/// What a column must hold for a row to be known by it. What is not known is unlike, on one side or on both: a pass
/// must not rest on a cell that nobody wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// A value in every row.
    Always,
    /// A value in rows of a GPU; a CPU has none.
    OnGpu,
    /// A value in rows of a model with experts (`moe_routing` is not empty).
    WithExperts,
    /// Empty is an answer too, such as "no variant"; the column must be there.
    Perhaps,
}

/// Who knows a column's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    /// The command and its recipe, before a device is opened: `--resume` looks at it.
    Asked,
    /// The device that ran.
    Found,
}

/// A column that tells rows apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    pub name: &'static str,
    pub holds: Holds,
    pub known: Known,
}

const fn asked(name: &'static str, holds: Holds) -> Field {
    Field { name, holds, known: Known::Asked }
}

const fn found(name: &'static str, holds: Holds) -> Field {
    Field { name, holds, known: Known::Found }
}

use Holds::{Always, OnGpu, Perhaps, WithExperts};

/// Columns of the configuration key: rows pair that are alike in all of them.
pub const KEY: [Field; 27] = [
    asked("model_family", Always),
    asked("model_recipe", Always),
    asked("variant", Perhaps),
    asked("task", Always),
    asked("recipe_dtype", Always),
    asked("compute_dtype", Always),
    asked("gpu_target", Always),
    asked("num_gpus", Always),
    asked("world_size", Always),
    asked("tp", Always),
    asked("pp", Always),
    asked("cp", Always),
    asked("ep", Always),
    asked("pp_rank", Always),
    asked("micro_batch_size", Always),
    asked("num_microbatches", Always),
    asked("num_microbatches_recipe", Always),
    asked("seq_length", Always),
    asked("num_layers", Always),
    asked("stack_only", Always),
    asked("overlap_wgrad", Always),
    asked("cuda_graph_impl", Always),
    // Empty without graphs, and where each whole layer is one.
    asked("cuda_graph_scope", Perhaps),
    asked("host_model", Always),
    asked(WORKLOAD, Always),
    asked("arm", Always),
    asked(SIDE_OF_AA, Perhaps),
];
/// The sides of an arm that was timed against itself (`--aa`); empty in runs of two arms.
pub const SIDE_OF_AA: &str = "aa";
pub const SIDES_OF_AA: [&str; 2] = ["a", "b"];
/// Settings of the command that have no column, in one text: see [`super::workload`]. Read from the column `command`.
pub const WORKLOAD: &str = "workload";

/// Columns that must be alike in paired rows: exactly, but for [`CLOCK`].
pub const ALIKE: [Field; 17] = [
    asked("schema_version", Always),
    asked("device", Always),
    found("gpu_name", OnGpu),
    // Tells MIG slices apart too.
    found("gpu_memory_mib", OnGpu),
    found("driver_version", OnGpu),
    found("cuda_version", OnGpu),
    found("power_limit_w", OnGpu),
    found(CLOCK, OnGpu),
    asked("comm", Always),
    asked("te_rng_tracker", Always),
    asked("approximations", Perhaps),
    asked("seed", Always),
    asked("moe_routing", Perhaps),
    // As the device counted them.
    found("tokens_routed", WithExperts),
    found("tokens_padded", WithExperts),
    found("tokens_dropped", WithExperts),
    // Programs that ran before the timed one leave memory with the driver: that of graphs is then less.
    found("microbatches_extrapolated", Perhaps),
];
/// SM clocks that differ by more than this are unlike: below it, runs on one card differ by themselves.
pub const CLOCK_TOLERANCE: f64 = 0.05;
pub const CLOCK: &str = "sm_clock_mhz_median";

/// Columns whose difference is only said: figures stay comparable, their cause may lie there.
pub const WORTH_A_WARNING: [Field; 5] = [
    found("gemm_plan_digest", Perhaps),
    found("attention_backend", Perhaps),
    found("arms_in_turn", Perhaps),
    found("host_name", Perhaps),
    found("gpu_uuid", Perhaps),
];

/// Names that `--allow-unlike` takes. Of the key, all but the arm: rows pair without looking at that column.
pub fn fields() -> impl Iterator<Item = &'static str> {
    ALIKE.iter().chain(KEY.iter().filter(|f| f.name != "arm")).map(|f| f.name)
}

/// Cells of the key, in the order of [`KEY`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Vec<String>);

impl Key {
    /// `cell` gives the cell of a column, [`WORKLOAD`] among them; columns of `ignored` count as empty.
    pub fn new(cell: impl Fn(&str) -> String, ignored: &[String]) -> Self {
        let of = |field: &Field| match field.name {
            column if ignored.iter().any(|i| i == column) => String::new(),
            // The order of names in a scope means nothing.
            column @ "cuda_graph_scope" => {
                let text = cell(column);
                let mut names: Vec<&str> = text.split('+').collect();
                names.sort_unstable();
                names.join("+")
            }
            column => cell(column),
        };
        Key(KEY.iter().map(of).collect())
    }

    pub fn cells(&self) -> impl Iterator<Item = (&'static str, &str)> {
        KEY.iter().map(|f| f.name).zip(self.0.iter().map(String::as_str))
    }

    /// The column that tells the rows of one run apart: its arms, or the sides of an arm timed against itself.
    pub fn told_apart_by(&self) -> &'static str {
        if self.get(SIDE_OF_AA).is_empty() { "arm" } else { SIDE_OF_AA }
    }

    /// What the rows of one run have in common, with the columns' names: without them a run of two arms could be taken for
    /// one of an arm against itself.
    pub fn of_run(&self) -> Vec<(&'static str, &str)> {
        self.cells().filter(|(name, _)| *name != self.told_apart_by()).collect()
    }

    /// Keys of both rows of a run of an arm against itself; none of a run of two arms, where one may stand alone.
    pub fn of_both_sides(&self) -> Vec<Key> {
        if self.told_apart_by() != SIDE_OF_AA {
            return vec![];
        }
        let of = |side: &str| {
            let cells = self.cells().map(|(name, cell)| if name == SIDE_OF_AA { side } else { cell });
            Key(cells.map(str::to_owned).collect())
        };
        SIDES_OF_AA.map(of).into()
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

/// A field that differs or is not known, with what either side holds.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Unlike {
    pub field: String,
    pub base: String,
    pub new: String,
}

/// What stands in a message for a cell that is not there or holds nothing.
pub const ABSENT: &str = "(absent)";
pub const EMPTY: &str = "(empty)";
/// Distinct cells of a side that a message shows.
const SHOWN: usize = 4;

impl Field {
    /// What a row holds: `Ok` where that is known, nothing included; else what a message shows in its place.
    pub fn cell<'a>(&self, row: &'a Record) -> Result<&'a str, &'static str> {
        let must = match self.holds {
            Always => true,
            OnGpu => row.cell("device") != "cpu",
            WithExperts => !row.cell("moe_routing").is_empty(),
            Perhaps => false,
        };
        match row.get(self.name) {
            None if must || self.holds == Perhaps => Err(ABSENT),
            Some(cell) if must && cell.trim().is_empty() => Err(EMPTY),
            cell => Ok(cell.unwrap_or_default()),
        }
    }

    /// The field as unlike when some row of either side does not tell it. `cell` is [`Field::cell`], or what takes its
    /// place for a field that is no column.
    pub fn untold<'a>(
        &self,
        base: &[&'a Record],
        new: &[&'a Record],
        cell: &impl Fn(&'a Record) -> Result<String, String>,
    ) -> Option<Unlike> {
        let told = base.iter().chain(new).all(|row| cell(row).is_ok());
        (!told).then(|| self.shown(base, new, cell))
    }

    /// The field as unlike when it is not told, or when the cells are not all one.
    pub fn unlike<'a>(
        &self,
        base: &[&'a Record],
        new: &[&'a Record],
        cell: &impl Fn(&'a Record) -> Result<String, String>,
    ) -> Option<Unlike> {
        let cells: Result<Vec<String>, String> = base.iter().chain(new).map(|row| cell(row)).collect();
        let alike = cells.is_ok_and(|cells| match self.name {
            CLOCK => clocks_agree(&cells),
            _ => cells.windows(2).all(|w| w[0] == w[1]),
        });
        (!alike).then(|| self.shown(base, new, cell))
    }

    fn shown<'a>(
        &self,
        base: &[&'a Record],
        new: &[&'a Record],
        cell: &impl Fn(&'a Record) -> Result<String, String>,
    ) -> Unlike {
        let show = |rows: &[&'a Record]| {
            let mut cells: Vec<String> = Vec::new();
            for row in rows {
                let cell = cell(row).unwrap_or_else(|untold| untold);
                let cell = if cell.is_empty() { EMPTY.to_owned() } else { cell };
                if !cells.contains(&cell) {
                    cells.push(cell);
                }
                if cells.len() > SHOWN {
                    cells[SHOWN] = "...".into();
                    break;
                }
            }
            cells.join(", ")
        };
        Unlike { field: self.name.into(), base: show(base), new: show(new) }
    }
}

/// Clocks of a GPU within [`CLOCK_TOLERANCE`]; of a CPU there are none.
fn clocks_agree(cells: &[String]) -> bool {
    if cells.iter().all(String::is_empty) {
        return true;
    }
    let clocks: Option<Vec<f64>> =
        cells.iter().map(|c| c.parse().ok().filter(|x: &f64| x.is_finite() && *x > 0.0)).collect();
    clocks.is_some_and(|clocks| {
        let low = clocks.iter().copied().fold(f64::INFINITY, f64::min);
        let high = clocks.iter().copied().fold(0.0, f64::max);
        high <= low * (1.0 + CLOCK_TOLERANCE)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::COLUMNS;

    /// A name that no file has is never compared, and nobody would miss it.
    #[test]
    fn every_field_is_a_column_and_stands_once() {
        let all: Vec<&str> = KEY.iter().chain(&ALIKE).chain(&WORTH_A_WARNING).map(|f| f.name).collect();
        for (at, name) in all.iter().enumerate() {
            assert!(*name == WORKLOAD || COLUMNS.iter().any(|c| c.name == *name), "{name} is no column");
            assert!(!all[..at].contains(name), "{name} stands twice");
        }
        assert!(!COLUMNS.iter().any(|c| c.name == WORKLOAD) && COLUMNS.iter().any(|c| c.name == "command"));
    }

    #[test]
    fn clocks_are_numbers_of_one_card_or_none_at_all() {
        let agree = |cells: &[&str]| clocks_agree(&cells.iter().map(|c| (*c).to_owned()).collect::<Vec<_>>());
        assert!(agree(&["1980", "1935", "1980"]) && agree(&["", ""]));
        for cells in [&["1980", "1200"][..], &["0", "0"], &["1980", ""], &["x", "x"]] {
            assert!(!agree(cells), "{cells:?}");
        }
    }
}
