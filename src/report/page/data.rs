//! What a page is made from: result files with what lies beside them, as runs. Everything is checked here, so that
//! drawing meets no cell that it cannot read.

use super::beside::{self, Block, Pacing, PartTime, Phase, Step, StepsFile};
use crate::report::compare::keys::{Key, WORKLOAD};
use crate::report::compare::read::{self, Record, typed};
use crate::report::compare::{Source, workload};
use crate::report::xlsx::Book;
use crate::report::{COLUMNS, SCHEMA_VERSION, file};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Endings of the files that lie beside the rows.
const BESIDE: [&str; 4] = ["steps.csv", "blocks.csv", "profile.csv", "runs.jsonl"];

/// All files of a page.
#[derive(Debug, Default)]
pub struct Input {
    pub files: Vec<FileData>,
    /// What was left out, for a person.
    pub notes: Vec<String>,
}

/// One result file and its neighbours.
#[derive(Debug)]
pub struct FileData {
    /// As short as tells the files apart.
    pub name: String,
    pub rows: Vec<Record>,
    /// By run id; `None` where there is no such file.
    pub steps: Option<StepsFile>,
    pub blocks: Option<HashMap<String, Vec<Block>>>,
    pub parts: Option<Vec<PartTime>>,
}

/// The rows of one run: one arm or two.
#[derive(Debug, Clone)]
pub struct Run<'a> {
    pub file: &'a FileData,
    pub sides: Vec<&'a Record>,
}

/// Runs of one job: they differ in what was captured, in the file or in time.
#[derive(Debug)]
pub struct Group<'a> {
    pub title: String,
    pub runs: Vec<Run<'a>>,
}

impl Input {
    /// Reads every file; with `whole` the steps are kept cell by cell, for a workbook.
    ///
    /// # Errors
    /// One sentence that names the file, and the row and column where there is one.
    pub fn read(paths: &[PathBuf], whole: bool) -> Result<Self, String> {
        let mut input = Input::default();
        let mut taken: Vec<&PathBuf> = Vec::new();
        for path in paths {
            if taken.contains(&path) {
                input.notes.push(format!("{} is given twice: it is read once", path.display()));
                continue;
            }
            if let [main, of_rank @ ..] = &main_files(path)[..] {
                if !paths.contains(main) && !of_rank.iter().any(|m| paths.contains(m)) {
                    let main = of_rank.iter().find(|m| m.exists()).unwrap_or(main);
                    return Err(format!(
                        "{} lies beside result files and is none: give {}, and it is read too",
                        path.display(),
                        main.display()
                    ));
                }
                continue;
            }
            taken.push(path);
        }
        // Of several files, as `results/*.csv` names them, tables of something else are left out; alone one is refused.
        // Each is read once: a pipe has nothing more after that.
        let sources = taken.into_iter().map(|path: &PathBuf| {
            let bytes = file::read_results(path).map_err(|e| e.to_string());
            (path, Source { name: path.display().to_string(), bytes })
        });
        let (others, mut results): (Vec<_>, Vec<_>) =
            sources.partition(|(_, source)| read::is_other_table(source));
        if results.is_empty() {
            results = others;
        } else {
            let left_out =
                others.iter().map(|(_, s)| format!("{} holds no results of mbperf: it is left out", s.name));
            input.notes.extend(left_out);
        }
        let names = short_names(&results.iter().map(|(path, _)| *path).collect::<Vec<_>>());
        for ((path, source), name) in results.into_iter().zip(names) {
            let mut file = FileData::read(path, &source, name, whole, &mut input.notes)?;
            file.forget_rows_of(&input.files, &mut input.notes);
            input.files.push(file);
        }
        Ok(input)
    }

    /// Runs in the order of the files.
    pub fn runs(&self) -> Vec<Run<'_>> {
        let mut runs: Vec<Run> = Vec::new();
        for file in &self.files {
            let mut at: HashMap<(&str, &str), usize> = HashMap::new();
            for row in &file.rows {
                let key = (row.cell("run_id"), row.cell("repetition"));
                let index = *at.entry(key).or_insert_with(|| {
                    runs.push(Run { file, sides: vec![] });
                    runs.len() - 1
                });
                // The same row twice counts once.
                if !runs[index].sides.iter().any(|r| r.same_cells(row)) {
                    runs[index].sides.push(row);
                }
            }
        }
        runs
    }

    /// The runs by job.
    pub fn groups(&self) -> Vec<Group<'_>> {
        let mut groups: Vec<(Key, Vec<Run>)> = Vec::new();
        for run in self.runs() {
            let key = run.job();
            match groups.iter_mut().find(|(k, _)| *k == key) {
                Some((_, runs)) => runs.push(run),
                None => groups.push((key, vec![run])),
            }
        }
        let titles: Vec<(Key, String)> =
            groups.iter().map(|(key, runs)| (key.clone(), plain_title(&runs[0]))).collect();
        groups.into_iter().map(|(key, runs)| Group { title: title(&key, &runs, &titles), runs }).collect()
    }

    /// Rows and steps as a workbook's.
    pub fn book(&self) -> Book {
        let rows = self.files.iter().flat_map(|f| &f.rows);
        let steps = self.files.iter().filter_map(|f| f.steps.as_ref()).flat_map(|s| s.cells.iter().cloned());
        Book { rows: rows.map(Record::values).collect(), steps: steps.collect(), ..Book::default() }
    }
}

impl FileData {
    fn read(
        path: &Path,
        source: &Source,
        name: String,
        whole: bool,
        notes: &mut Vec<String>,
    ) -> Result<Self, String> {
        let rows = read::read(source)?;
        rows.iter().try_for_each(check)?;
        let mut unknown: Vec<&str> =
            rows[0].columns().filter(|n| !COLUMNS.iter().any(|c| c.name == *n)).collect();
        unknown.sort_unstable();
        if !unknown.is_empty() {
            notes.push(format!(
                "{}: columns that this mbperf does not know are left out: {}",
                source.name,
                unknown.join(", ")
            ));
        }
        // What lies beside packed rows is named as they would be unpacked.
        let path = &path.to_str().and_then(|p| p.strip_suffix(".gz")).map_or(path.to_owned(), PathBuf::from);
        let mut file = FileData {
            name,
            rows,
            steps: beside::steps(path, whole)?,
            blocks: beside::blocks(path)?,
            parts: beside::parts(path)?,
        };
        file.forget_steps_of_others(notes);
        Ok(file)
    }

    /// Rows of a file that was copied into another folder count once.
    fn forget_rows_of(&mut self, others: &[FileData], notes: &mut Vec<String>) {
        for other in others {
            let all = self.rows.len();
            self.rows.retain(|row| !other.rows.iter().any(|known| known.same_cells(row)));
            let same = all - self.rows.len();
            if same > 0 {
                notes.push(format!(
                    "{}: {same} of its {all} rows are in {} too: they count once",
                    self.name, other.name
                ));
            }
        }
    }

    /// Steps that are not as many as the rows say are of another measurement, or cut off: they would be drawn beside figures
    /// that do not rest on them.
    fn forget_steps_of_others(&mut self, notes: &mut Vec<String>) {
        let Some(steps) = &mut self.steps else { return };
        let mut sides: HashMap<&str, usize> = HashMap::new();
        for row in &self.rows {
            let at = sides.entry(row.cell("run_id")).or_default();
            let side = *at;
            *at += 1;
            let (Some(own), Some(wanted)) = (steps.runs.get(row.cell("run_id")), number(row, "steps_steady"))
            else {
                continue;
            };
            let counts =
                |s: &&Step| s.side == side && s.phase == Phase::Steady && s.pacing == Pacing::RunAhead;
            let found = own.iter().filter(counts).count();
            if found as f64 != wanted {
                let id = row.cell("run_id");
                notes.push(format!(
                    "{}: the steps file holds {found} steady steps of the {} arm of run {id} and its row counts {wanted}: steps \
                     of this run are left out",
                    self.name,
                    row.cell("arm")
                ));
                steps.runs.remove(id);
            }
        }
    }
}

impl<'a> Run<'a> {
    /// The first row: what both arms share.
    pub fn first(&self) -> &'a Record {
        self.sides[0]
    }

    pub fn cell(&self, column: &str) -> &'a str {
        self.first().cell(column)
    }

    pub fn id(&self) -> &'a str {
        self.cell("run_id")
    }

    pub fn is_ok(&self) -> bool {
        self.sides.iter().all(|r| r.cell("status") == "ok")
    }

    /// The row of the graph arm.
    pub fn graph(&self) -> Option<&'a Record> {
        self.sides.iter().copied().find(|r| r.cell("arm") == "graph")
    }

    /// A figure that both rows hold.
    pub fn figure(&self, column: &str) -> Option<f64> {
        number(self.first(), column)
    }

    /// What was captured, in a few words.
    pub fn scope(&self) -> String {
        let (name, scope) = (self.cell("cuda_graph_impl"), self.cell("cuda_graph_scope"));
        match (name, scope) {
            ("none" | "", _) => "no graphs".into(),
            (name, "") => format!("{name}, each whole layer"),
            (name, scope) => format!("{name} {scope}"),
        }
    }

    /// Of the steps, those of this run.
    pub fn steps(&self) -> &'a [Step] {
        self.file.steps.as_ref().and_then(|s| s.runs.get(self.id())).map_or(&[], Vec::as_slice)
    }

    /// Name of side `at`.
    pub fn side_name(&self, at: usize) -> String {
        let row = self.sides[at];
        format!("{} {}", row.cell("arm"), row.cell("aa")).trim_end().to_owned()
    }

    /// What makes runs one job: all of the configuration but what is captured and how host time is counted, and the
    /// machine.
    fn job(&self) -> Key {
        const APART: [&str; 5] = ["cuda_graph_impl", "cuda_graph_scope", "host_model", "arm", "aa"];
        let row = self.first();
        let cell = |column: &str| match column {
            WORKLOAD => workload::settings(row.cell("command")).unwrap_or_default(),
            // The machine takes the place of a column that is ignored anyway.
            "gpu_target" => [row.cell("gpu_target"), row.cell("device"), row.cell("gpu_name")].join("\u{1}"),
            _ => row.cell(column).to_owned(),
        };
        Key::new(cell, &APART.map(String::from))
    }
}

/// A cell as a number; checked on reading, so that `None` means empty.
pub fn number(row: &Record, column: &str) -> Option<f64> {
    row.cell(column).parse().ok()
}

/// What a run is called among `runs`: what was captured, and what else tells it apart.
pub fn label(run: &Run, runs: &[Run]) -> String {
    let mut label = run.scope();
    let differ = |column: &str| runs.iter().any(|r| r.cell(column) != runs[0].cell(column));
    if differ("host_model") {
        label += &format!(", host {}", run.cell("host_model"));
    }
    if differ("repetition") && !run.cell("repetition").is_empty() {
        label += &format!(", repetition {}", run.cell("repetition"));
    }
    if !run.cell("aa").is_empty() {
        label += ", an arm against itself";
    }
    if runs.iter().any(|r| r.file.name != runs[0].file.name) {
        label += &format!(", {}", run.file.name);
    }
    let same = |r: &&Run| {
        r.scope() == run.scope()
            && r.file.name == run.file.name
            && ["host_model", "repetition", "aa"].iter().all(|c| r.cell(c) == run.cell(c))
    };
    let alike: Vec<&Run> = runs.iter().filter(same).collect();
    if alike.len() > 1
        && let Some(at) = alike.iter().position(|r| r.id() == run.id())
    {
        label += &format!(", run {}", at + 1);
    }
    label
}

/// Jobs' titles for the lines of a table: what all of them share is said once above it.
#[derive(Debug)]
pub struct Titles {
    /// What all share, as a sentence; `None` where they share nothing.
    pub shared: Option<String>,
    /// Parts of the titles that all have.
    parts: Vec<String>,
    /// With a single job, there is nothing to tell apart.
    one: bool,
}

impl Titles {
    const JOIN: &str = ", ";

    pub fn of(groups: &[Group]) -> Self {
        let parts = |g: &Group| g.title.split(Self::JOIN).map(String::from).collect::<Vec<_>>();
        let mut shared = groups.first().map(parts).unwrap_or_default();
        for group in groups {
            let own = parts(group);
            shared.retain(|part| own.contains(part));
        }
        Titles {
            shared: (!shared.is_empty()).then(|| format!("All runs: {}.", shared.join(Self::JOIN))),
            parts: shared,
            one: groups.len() < 2,
        }
    }

    /// What a line is called: what its job does not share with all others, and the run.
    pub fn row(&self, group: &Group, run: &str) -> String {
        let own: Vec<&str> =
            group.title.split(Self::JOIN).filter(|part| !self.parts.iter().any(|p| p == part)).collect();
        if self.one || own.is_empty() { run.to_owned() } else { format!("{}: {run}", own.join(Self::JOIN)) }
    }
}

/// Heading of a job: recipe, precision, sequence and machine, then what tells it from others of the same.
fn title(key: &Key, runs: &[Run], others: &[(Key, String)]) -> String {
    let mut title = plain_title(&runs[0]);
    let alike: Vec<&Key> = others.iter().filter(|(_, t)| *t == title).map(|(k, _)| k).collect();
    let telling = key.cells().filter(|(name, cell)| {
        // What the machine differs in is in the plain title.
        *name != "gpu_target" && !cell.is_empty() && alike.iter().any(|k| k.get(name) != *cell)
    });
    for (name, cell) in telling {
        title += &match name {
            WORKLOAD => format!(", {cell}"),
            _ => format!(", {name} {cell}"),
        };
    }
    title
}

fn plain_title(first: &Run) -> String {
    let mut title = format!("{} {}", first.cell("model_recipe"), first.cell("compute_dtype"));
    for (column, unit) in [("seq_length", "sequence"), ("num_layers", "layers")] {
        if !first.cell(column).is_empty() {
            title += &format!(", {unit} {}", first.cell(column));
        }
    }
    match first.cell("gpu_name") {
        "" => title + ", on " + first.cell("device"),
        name => title + ", on " + name,
    }
}

/// Cells that are drawn must be what their columns hold.
fn check(row: &Record) -> Result<(), String> {
    if row.cell("schema_version") != SCHEMA_VERSION.to_string() {
        let what =
            format!("version {}; this mbperf reads version {SCHEMA_VERSION}", row.cell("schema_version"));
        return Err(row.wrong("schema_version", &what));
    }
    typed(row)
}

/// The result file that a file beside it may belong to; a rank's steps (`<name>.rankN.steps.csv`) belong to `<name>.csv`.
fn main_files(path: &Path) -> Vec<PathBuf> {
    let stem = || {
        let name = path.file_name()?.to_str()?;
        let name = name.strip_suffix(".gz").unwrap_or(name);
        BESIDE.iter().find_map(|end| name.strip_suffix(end)?.strip_suffix('.'))
    };
    let Some(stem) = stem() else { return Vec::new() };
    let of_rank = stem.rsplit_once(".rank").filter(|(_, rank)| rank.parse::<usize>().is_ok());
    let names = [Some(stem), of_rank.map(|(name, _)| name)];
    names.into_iter().flatten().map(|name| path.with_file_name(format!("{name}.csv"))).collect()
}

/// File names without their folders, where that tells them apart.
fn short_names(paths: &[&PathBuf]) -> Vec<String> {
    let short = |p: &PathBuf| {
        let name = p.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        match name.as_str() {
            file::STDOUT => "standard input".to_owned(),
            _ => name.strip_suffix(".csv").unwrap_or(&name).to_owned(),
        }
    };
    let shorts: Vec<String> = paths.iter().map(|p| short(p)).collect();
    let twice = |s: &String| shorts.iter().filter(|o| *o == s).count() > 1;
    paths
        .iter()
        .zip(&shorts)
        .map(|(path, short)| if twice(short) { path.display().to_string() } else { short.clone() })
        .collect()
}
