//! Several runs one after the other, and runs that need not be made again (`--resume`).

use crate::commands::{Usage, fail};
use crate::device::DeviceError;
use crate::measure::outcome::{MAX_DISTURBED, POWER_CAP};
use crate::report::compare::keys::{ALIKE, Key, Known, WORKLOAD};
use crate::report::compare::read::Record;
use crate::report::compare::{Source, read, workload};
use crate::report::recommend::Tried;
use crate::report::xlsx::Book;
use crate::report::{COLUMNS, Row, Value, file};
use std::path::Path;
use std::sync::Mutex;

/// SIGINT and SIGTERM.
const INTERRUPTED: u8 = 130;

/// Runs every job: one that fails is told and does not stop the others, an interruption does, and so does a device that
/// is not there, which the others would but say again. Returns the first failure's exit code.
pub fn each<T>(jobs: impl IntoIterator<Item = T>, mut run: impl FnMut(T) -> anyhow::Result<u8>) -> u8 {
    let mut first = 0;
    for job in jobs {
        let (code, go_on) = match run(job) {
            Ok(code) => (code, true),
            Err(failure) => {
                let no_device = matches!(failure.downcast_ref(), Some(DeviceError::Unavailable(_)));
                (fail(&failure), !no_device)
            }
        };
        if code == INTERRUPTED {
            return code;
        }
        if first == 0 {
            first = code;
        }
        if !go_on {
            break;
        }
    }
    first
}

/// [`each`] of a sweep, whose runs all write to `book`; and what their graph rows say, in the order of `jobs`. A run that
/// `--resume` found made counts with the row that it left then; one that left no row is not among them.
pub fn tried<T>(
    jobs: impl IntoIterator<Item = T>,
    book: &Mutex<Book>,
    mut run: impl FnMut(T) -> anyhow::Result<u8>,
) -> (u8, Vec<Tried>) {
    let mut tried = Vec::new();
    let code = each(jobs, |job| {
        let (rows, found) = book.lock().map_or((0, 0), |b| (b.rows.len(), b.found.len()));
        let ran = run(job);
        if let Ok(book) = book.lock() {
            tried.extend(Tried::of_run(&book.rows[rows..]).or_else(|| Tried::of_run(&book.found[found..])));
        }
        ran
    });
    (code, tried)
}

/// What an earlier row must hold beyond the configuration to count as done.
#[derive(Debug, Clone, Copy, Default)]
pub struct Asked<'a> {
    /// Columns that are asked for.
    pub filled: &'a [&'a str],
    /// A row that `--strict` would have refused does not count.
    pub strict: bool,
}

impl Asked<'_> {
    fn holds(&self, row: &Record) -> bool {
        row.cell("status") == "ok"
            && (row.cell("digest_match") != "false" || workload::unordered(row.cell("command")))
            && self.filled.iter().all(|column| !row.cell(column).is_empty())
            && !(self.strict && disturbed(row))
    }
}

/// As [`crate::measure::Outcome::disturbances`], of a row.
fn disturbed(row: &Record) -> bool {
    let over = |column: &str, limit: f64| row.cell(column).parse::<f64>().is_ok_and(|x| x > limit);
    row.cell("steady_reached") != "true"
        || row.cell("digest_match") == "false"
        || row.cell("verdict") == "undecided"
        || row.cell("throttle_reasons").split('+').any(|r| !["", "none", POWER_CAP].contains(&r))
        || over("other_processes_max", 0.0)
        || over("disturbed_fraction", MAX_DISTURBED)
}

/// An earlier run.
#[derive(Debug, Clone, PartialEq)]
pub struct Done {
    pub run_id: String,
    pub repetition: u32,
    /// Its rows, the graph's last where it has one, in the order of [`COLUMNS`].
    pub rows: Vec<Vec<Value>>,
}

/// The earlier runs in the file at `path`, oldest first, that have an `ok` row for each of `rows`, the rows
/// that the run about to start would leave. Rows are told apart by what `compare` pairs and refuses by, as far as that is
/// known before a device is opened: not by the GPU.
///
/// # Errors
/// A file that cannot be read, or that holds cells no run leaves (exit 2).
pub fn already_run(path: &Path, rows: &[Row], asked: Asked) -> anyhow::Result<Vec<Done>> {
    let source =
        Source { name: path.display().to_string(), bytes: file::read(path).map_err(|e| e.to_string()) };
    if source.bytes.as_ref().is_ok_and(Vec::is_empty) {
        return Ok(Vec::new());
    }
    let refused = |reason: String| Usage(format!("--resume: {reason}"));
    let records = read::records(&source).map_err(refused)?;
    for record in &records {
        read::worded(record).map_err(refused)?;
        if record.cell("status") == "ok" {
            record.number("step_time_ms_median").map_err(refused)?;
            repetition(record).map_err(refused)?;
        }
    }
    let text = |command: &str| workload::settings(command).unwrap_or_else(|| command.to_owned());
    // Key and further cells of a row.
    let identity = |cell: &dyn Fn(&str) -> String| {
        let of = |column: &str| if column == WORKLOAD { text(&cell("command")) } else { cell(column) };
        let asked = ALIKE.iter().filter(|f| f.known == Known::Asked);
        (Key::new(of, &[]), asked.map(|f| cell(f.name)).collect::<Vec<_>>())
    };
    let wanted: Vec<_> = rows
        .iter()
        .map(|row| {
            identity(&|column| {
                COLUMNS.iter().find(|c| c.name == column).map_or(String::new(), |c| (c.value)(row).cell())
            })
        })
        .collect();
    let done: Vec<_> = records
        .iter()
        .filter(|r| asked.holds(r))
        .map(|r| (r.cell("run_id"), identity(&|column| r.cell(column).to_owned()), r))
        .collect();
    let whole = |id: &str| wanted.iter().all(|w| done.iter().any(|(i, d, _)| *i == id && d == w));
    let mut runs: Vec<Done> = Vec::new();
    for (id, _, row) in done.iter().filter(|(id, _, _)| !wanted.is_empty() && whole(id)) {
        if !runs.iter().any(|known| known.run_id == *id) {
            let own = records.iter().filter(|r| r.cell("run_id") == *id).map(Record::values).collect();
            let repetition = repetition(row).map_err(refused)?;
            runs.push(Done { run_id: (*id).to_owned(), repetition, rows: own });
        }
    }
    Ok(runs)
}

fn repetition(row: &Record) -> Result<u32, String> {
    let cell = row.cell("repetition");
    match cell.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err(row.wrong("repetition", &format!("{cell:?} is no count from 1 on"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Options;
    use crate::report::{RunFacts, Target, Writer};

    #[test]
    fn a_failing_job_does_not_stop_the_others_and_the_first_code_stays() {
        let mut ran = Vec::new();
        let code = each([0u8, 5, 6, 0], |job| {
            ran.push(job);
            match job {
                5 => Err(Usage("x".into()).into()),
                code => Ok(code),
            }
        });
        assert_eq!((code, ran), (2, vec![0, 5, 6, 0]));
        assert_eq!(each([0u8, 0], |_| Ok(0)), 0);
    }

    #[test]
    fn a_device_that_is_not_there_is_asked_for_once() {
        let mut ran = 0;
        let code = each([0u8, 0, 0], |_| {
            ran += 1;
            if ran == 2 { Err(DeviceError::Unavailable("no driver".into()).into()) } else { Ok(0) }
        });
        assert_eq!((code, ran), (3, 2));
    }

    #[test]
    fn an_interruption_stops_the_rest() {
        let mut ran = 0;
        let code = each([1u8, 130, 0], |job| {
            ran += 1;
            Ok(job)
        });
        assert_eq!((code, ran), (130, 2));
    }

    fn facts() -> RunFacts {
        RunFacts {
            run_id: "first".into(),
            device: "cpu".into(),
            model_recipe: "llama3_8b".into(),
            seed: 1,
            repetition: 1,
            command: "mbperf -m llama -mr llama3_8b -g h100 -o x.csv".into(),
            ..RunFacts::default()
        }
    }

    fn written(status: &'static str, arms: usize) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.csv");
        let facts = facts();
        let rows = Row::without_outcome(&facts, &Options::default(), status, "");
        Writer::open(&Target::File(path.clone())).unwrap().rows(&rows[..arms]).unwrap();
        (folder, path)
    }

    #[test]
    fn only_whole_ok_runs_of_the_same_configuration_count() {
        let asked = |path: &Path, change: &dyn Fn(&mut RunFacts)| {
            let mut facts = RunFacts { run_id: "second".into(), started_at: "later".into(), ..facts() };
            change(&mut facts);
            let rows = Row::without_outcome(&facts, &Options::default(), "skipped", "");
            already_run(path, &rows, Asked::default()).unwrap().pop().map(|done| done.run_id)
        };
        let (_folder, path) = written("ok", 2);
        assert_eq!(asked(&path, &|_| {}).as_deref(), Some("first"));
        assert_eq!(asked(&path, &|f| f.command += " --max_time 5 --resume").as_deref(), Some("first"));
        let other: [&dyn Fn(&mut RunFacts); 12] = [
            &|f| f.seed = 2,
            &|f| f.tp = 2,
            &|f| f.device = "cuda".into(),
            &|f| f.cuda_graph_scope = vec!["attn".into()],
            &|f| f.command += " --hidden_size 64",
            &|f| f.command += " model.ffn_hidden_size=64",
            &|f| f.command += " --attention_backend own",
            &|f| f.command += " --spin_percent 2",
            &|f| f.overlap_wgrad = true,
            &|f| f.host_model = "pytorch".into(),
            &|f| f.moe_routing = Some("skewed"),
            // Nobody knows what that is.
            &|f| f.command = "mbperf --from_the_future".into(),
        ];
        for change in other {
            assert_eq!(asked(&path, change), None);
        }
        // Cells that are asked for and that an earlier run did not leave.
        let rows = facts();
        let rows = Row::without_outcome(&rows, &Options::default(), "skipped", "");
        let filled = |filled: &[&str]| already_run(&path, &rows, Asked { filled, strict: false }).unwrap();
        let done = filled(&["command"]);
        assert_eq!(
            done.iter().map(|d| (d.run_id.as_str(), d.repetition)).collect::<Vec<_>>(),
            [("first", 1)]
        );
        // With the graph's row, as the file has it.
        let arm = COLUMNS.iter().position(|c| c.name == "arm").unwrap();
        assert_eq!(done[0].rows.last().unwrap()[arm], Value::Text("graph".into()));
        assert!(filled(&["command", "step_time_ms_extrapolated"]).is_empty());
        // These rows do not say that their times were steady.
        assert!(already_run(&path, &rows, Asked { filled: &[], strict: true }).unwrap().is_empty());
        for (status, arms) in [("failed", 2), ("skipped", 2), ("ok", 1)] {
            let (_folder, path) = written(status, arms);
            assert_eq!(asked(&path, &|_| {}), None, "{status} {arms}");
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("new.csv"), "").unwrap();
        assert_eq!(asked(&folder.path().join("new.csv"), &|_| {}), None);
    }

    /// Other bits are no sign of other work where attention may add in any order, and are no proof of equal work either.
    #[test]
    fn unequal_bits_count_where_the_order_was_left_open() {
        let done = |more: &str, strict: bool| {
            let (_folder, path) = written("ok", 2);
            let mut reader = csv::Reader::from_path(&path).unwrap();
            let header = reader.headers().unwrap().clone();
            let command = format!("{}{more}", facts().command);
            let mut writer = csv::Writer::from_writer(Vec::new());
            writer.write_record(&header).unwrap();
            for row in reader.records().map(Result::unwrap) {
                let cells = header.iter().zip(&row).map(|(column, cell)| match column {
                    "digest_match" => "false",
                    "steady_reached" => "true",
                    "command" => &command,
                    _ => cell,
                });
                writer.write_record(cells).unwrap();
            }
            std::fs::write(&path, writer.into_inner().unwrap()).unwrap();
            let facts = RunFacts { command, ..facts() };
            let rows = Row::without_outcome(&facts, &Options::default(), "skipped", "");
            !already_run(&path, &rows, Asked { filled: &["digest_match"], strict }).unwrap().is_empty()
        };
        assert!(done(" --attention_deterministic false", false));
        assert!(!done(" --attention_deterministic false", true));
        assert!(!done(" --attention_deterministic true", false));
        assert!(!done("", false));
    }
}
