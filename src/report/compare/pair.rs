//! Pairs rows by configuration key, and gathers the runs of each side.

use super::keys::{self, ALIKE, Field, KEY, Key, SIDE_OF_AA, WORKLOAD};
use super::near::Side;
use super::read::Record;
use super::{Missing, Options, Report, workload};
use crate::keys::short;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Rows of one configuration on one side.
#[derive(Debug, Default)]
pub struct Runs<'a> {
    /// Rows that are `ok`, by run id.
    runs: Vec<(&'a str, Vec<&'a Record>)>,
    /// Rows that are not.
    pub failed: Vec<&'a Record>,
}

impl<'a> Runs<'a> {
    /// Rows that are `ok`.
    pub fn records(&self) -> Vec<&'a Record> {
        self.runs.iter().flat_map(|(_, rows)| rows.iter().copied()).collect()
    }
    /// Rows of each run.
    pub fn by_run(&self) -> impl Iterator<Item = &[&'a Record]> {
        self.runs.iter().map(|(_, rows)| rows.as_slice())
    }
    pub fn len(&self) -> usize {
        self.runs.len()
    }
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }
}

/// One configuration that both sides hold.
#[derive(Debug)]
pub struct Pair<'a> {
    pub key: Key,
    pub base: Runs<'a>,
    pub new: Runs<'a>,
    /// Fields of the key that a row of the pair does not tell; none that may be unlike.
    pub untold: Vec<&'static str>,
}

/// Columns that tell the rows of one run apart beside its id; a file may lack them.
const REPEAT: &str = "repetition";

/// Pairs in the order of the baseline. What a side lacks, doubled rows and fields of the key that rows do not tell go into
/// the report.
pub fn pair<'a>(
    base: &'a [Record],
    new: &'a [Record],
    options: &Options,
    report: &mut Report,
) -> Vec<Pair<'a>> {
    // Parsing a command line takes a millisecond: each once, and on all cores.
    let lines: HashSet<&str> = base.iter().chain(new).map(|r| r.cell("command")).collect();
    let commands: Commands =
        lines.into_par_iter().map(|command| (command, workload::settings(command))).collect();
    let base = side(base, "base", options, &commands, report);
    let new = side(new, "new", options, &commands, report);
    let all = |side: &[(Key, Runs<'a>)]| side.iter().flat_map(|(_, runs)| runs.records()).collect::<Vec<_>>();
    let (of_base, of_new) = (all(&base), all(&new));
    let ignored = |field: &Field| options.allow_unlike.iter().any(|f| f == field.name);
    let untold = |field: &Field| field.untold(&of_base, &of_new, &|row| cell(field, row, &commands));
    report.unlike.extend(KEY.iter().filter(|f| !ignored(f)).filter_map(untold));
    for (name, groups) in [("base", &base), ("new", &new)] {
        halves(name, groups, report);
    }
    let index: HashMap<Key, usize> = new.iter().enumerate().map(|(at, (k, _))| (k.clone(), at)).collect();
    let same_run = |(key, runs): &(Key, Runs)| {
        let ids: HashSet<&str> = runs.runs.iter().map(|(id, _)| *id).collect();
        index.get(key).is_some_and(|at| new[*at].1.runs.iter().any(|(id, _)| ids.contains(id)))
    };
    if base.iter().any(same_run) {
        report.warnings.push("runs are on both sides: they are compared with themselves".into());
    }
    let mut pairs = Vec::new();
    let base_keys: Vec<Key> = base.iter().map(|(k, _)| k.clone()).collect();
    let (new_keys, new): (Vec<Key>, Vec<Runs>) = new.into_iter().unzip();
    let sides = [Side::new(&base_keys), Side::new(&new_keys)];
    let mut new: Vec<Option<Runs>> = new.into_iter().map(Some).collect();
    for (key, base) in base {
        let new = index.get(&key).and_then(|at| new[*at].take()).unwrap_or_default();
        lacking(&key, &base, &new, &sides, report);
        if !base.is_empty() && !new.is_empty() {
            let (b, n) = (base.records(), new.records());
            let mut untold = Vec::new();
            for field in &KEY {
                let cell = |row: &'a Record| cell(field, row, &commands);
                if !ignored(field) {
                    untold.extend(field.untold(&b, &n, &cell).map(|_| field.name));
                } else if let Some(unlike) = field.unlike(&b, &n, &cell)
                    && !report.unlike_allowed.contains(&unlike)
                {
                    report.unlike_allowed.push(unlike);
                }
            }
            pairs.push(Pair { key, base, new, untold });
        }
    }
    if pairs.is_empty() {
        // Told at once, rather than one field after the other as the user allows them.
        report.unlike.extend(ALIKE.iter().filter(|f| !ignored(f)).filter_map(untold));
    }
    for (key, runs) in new_keys.iter().zip(&new) {
        if let Some(runs) = runs {
            lacking(key, &Runs::default(), runs, &sides, report);
        }
    }
    pairs
}

/// Says which side has no figure of a configuration, and why.
fn lacking(key: &Key, base: &Runs, new: &Runs, [base_keys, new_keys]: &[Side; 2], report: &mut Report) {
    for (side, runs, other, keys) in [("base", base, new, base_keys), ("new", new, base, new_keys)] {
        if !runs.is_empty() {
            // A change that fails in one pass of three is no better for the other two.
            let failed: Vec<_> = runs.failed.iter().filter(|r| r.cell("status") == "failed").collect();
            if let Some(row) = failed.first().filter(|_| side == "new" && base.failed.is_empty()) {
                let (count, all) = (failed.len(), failed.len() + runs.len());
                let reason = format!(
                    "{count} of {all} runs failed, none in base: {} ({})",
                    row.cell("status_reason"),
                    row.place()
                );
                report.missing.push(Missing {
                    side,
                    label: key.label(&[]),
                    reason,
                    excusable: other.is_empty(),
                });
            }
            continue;
        }
        let reason = match runs.failed.first() {
            Some(row) => format!("{}: {} ({})", row.cell("status"), row.cell("status_reason"), row.place()),
            None => keys.nearest(key),
        };
        let excusable = side == "base" || runs.failed.is_empty() || other.is_empty();
        report.missing.push(Missing { side, label: key.label(&[]), reason, excusable });
    }
}

/// Says which runs lack a row that other runs of the configuration have, or that every run of its kind has: rows of a run
/// are written together.
fn halves(side: &'static str, groups: &[(Key, Runs)], report: &mut Report) {
    let mut configurations: BTreeMap<_, Vec<&(Key, Runs)>> = BTreeMap::new();
    for group in groups {
        configurations.entry(group.0.of_run()).or_default().push(group);
    }
    let ids = |runs: &Runs| -> BTreeSet<String> {
        let failed = runs.failed.iter().map(|r| r.cell("run_id").to_owned());
        runs.runs.iter().map(|(id, _)| (*id).to_owned()).chain(failed).collect()
    };
    for members in configurations.values() {
        contradictions(members, report);
        let mut found: Vec<(Key, BTreeSet<String>)> =
            members.iter().map(|(key, runs)| (key.clone(), ids(runs))).collect();
        let all: BTreeSet<String> = found.iter().flat_map(|(_, ids)| ids.clone()).collect();
        for expected in members.iter().flat_map(|(key, _)| key.of_both_sides()) {
            if !found.iter().any(|(key, _)| *key == expected) {
                found.push((expected, BTreeSet::new()));
            }
        }
        for (key, own) in found {
            let lacking: Vec<&String> = all.difference(&own).collect();
            if let Some(first) = lacking.first() {
                let what = if key.told_apart_by() == SIDE_OF_AA { "side" } else { "arm" };
                let reason = format!(
                    "{} of its {} runs have no row of this {what}, only of the other ({first})",
                    lacking.len(),
                    all.len()
                );
                report.missing.push(Missing { side, label: key.label(&[]), reason, excusable: true });
            }
        }
    }
}

/// A run's speedup stands in both of its rows.
fn contradictions(members: &[&(Key, Runs)], report: &mut Report) {
    let mut first: HashMap<(&str, &str), &Record> = HashMap::new();
    for row in members.iter().flat_map(|(_, runs)| runs.records()) {
        let seen = first.entry((row.cell("run_id"), row.cell(REPEAT))).or_insert(row);
        if seen.cell("speedup") != row.cell("speedup") {
            let text =
                format!("{:?}, and {:?} in {}", row.cell("speedup"), seen.cell("speedup"), seen.place());
            report.reasons.push(row.wrong("speedup", &format!("the arms of one run have one: {text}")));
        }
    }
}

type Commands<'a> = HashMap<&'a str, Option<String>>;

/// What a row holds of a field, [`WORKLOAD`] among them: see [`Field::cell`].
fn cell(field: &Field, row: &Record, commands: &Commands) -> Result<String, String> {
    if field.name != WORKLOAD {
        return field.cell(row).map(str::to_owned).map_err(str::to_owned);
    }
    let command = match row.get("command") {
        None => return Err(keys::ABSENT.into()),
        Some(command) if command.trim().is_empty() => return Err(keys::EMPTY.into()),
        Some(command) => command,
    };
    match commands.get(command) {
        Some(Some(settings)) if settings.is_empty() => Ok("(no settings)".into()),
        Some(Some(settings)) => Ok(settings.clone()),
        _ => Err(format!("(a command that this mbperf cannot read: {})", short(command))),
    }
}

fn side<'a>(
    records: &'a [Record],
    name: &str,
    options: &Options,
    commands: &Commands<'a>,
    report: &mut Report,
) -> Vec<(Key, Runs<'a>)> {
    let mut groups: Vec<(Key, Runs)> = Vec::new();
    let mut index: HashMap<Key, usize> = HashMap::new();
    // Of a group's runs, by id.
    let mut places: HashMap<(usize, &str), usize> = HashMap::new();
    for record in records {
        let settings = commands.get(record.cell("command")).and_then(Option::as_deref);
        let cell = |column: &str| match column {
            WORKLOAD => settings.unwrap_or_default().to_owned(),
            _ => record.cell(column).to_owned(),
        };
        let key = Key::new(cell, &options.allow_unlike);
        let at = *index.entry(key.clone()).or_insert_with(|| {
            groups.push((key, Runs::default()));
            groups.len() - 1
        });
        let runs = &mut groups[at].1;
        if record.cell("status") != "ok" {
            if record.cell("digest_match") == "false" {
                report.reasons.push(record.wrong("digest_match", "false: the arms did not do the same work"));
            }
            runs.failed.push(record);
            continue;
        }
        let id = record.cell("run_id");
        let place = *places.entry((at, id)).or_insert(runs.runs.len());
        if place == runs.runs.len() {
            runs.runs.push((id, vec![record]));
            continue;
        }
        let rows = &mut runs.runs[place].1;
        match rows.iter().find(|r| r.cell(REPEAT) == record.cell(REPEAT)) {
            None => rows.push(record),
            Some(first) if first.same_cells(record) => {
                let text = format!("{} repeats {} in {name}: counted once", record.place(), first.place());
                report.warnings.push(text);
            }
            Some(first) => report.reasons.push(format!(
                "{} and {} are rows of one run (run_id {id:?}) and one configuration, and differ",
                first.place(),
                record.place()
            )),
        }
    }
    groups
}

/// Columns of the key in which pairs differ: a label names them.
pub fn telling(pairs: &[Pair]) -> Vec<&'static str> {
    let tells = |column: &&str| pairs.iter().any(|p| p.key.get(column) != pairs[0].key.get(column));
    KEY.iter().map(|f| f.name).filter(tells).collect()
}
