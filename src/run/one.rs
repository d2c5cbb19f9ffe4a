//! One configuration: both of its arms, their rows.

use super::beside::{extrapolation, side_points, watchdog};
use super::facts::{add_device, facts, run_line};
use super::interrupt::Interrupt;
use super::open::{check_spin, choose_device, faults, open_device};
use super::settings::{given, options, target};
use super::{
    conclude, in_turn, lacking, plan, profile, ranks, save_config, say, say_unseen, tally, threads, usage,
};
use crate::args::Args;
use crate::capture::RunPlan;
use crate::commands::complain;
use crate::config::RunConfig;
use crate::device::guard::{Beat, Guarded};
use crate::device::inject::Inject;
use crate::device::{DeviceError, DeviceInfo, Executor};
use crate::dump;
use crate::extrapolate::Point;
use crate::host_model::HostModel;
use crate::measure::{self, Hooks, Options, Outcome, Status};
use crate::overrides::Resolved;
use crate::ranks::launch::Start;
use crate::report::xlsx::Book;
use crate::report::{Row, RunFacts, Target, Terminal, Writer, run_id, summary};
use crate::workloads::{share::RankShare, shrink};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// The device with both arms on it; an error where they did not fit together and each may fit alone.
type Both = Result<Guarded, DeviceError>;

/// A configuration that is about to be measured, or is: what its repetitions share.
struct Job<'a> {
    args: &'a Args,
    resolved: &'a Resolved,
    plan: &'a RunPlan,
    on_gpu: bool,
    interrupt: &'a Interrupt,
    beat: Beat,
    options: Options,
    facts: RunFacts,
    /// The facts as the watchdog and lost ranks see them.
    told: Arc<Mutex<RunFacts>>,
    writer: Writer,
    terminal: Terminal,
    /// Points of `--extrapolate`.
    extrapolated: Option<Vec<[Option<Point>; 2]>>,
    /// Shares with the one that the device was given whether it has happened.
    fault: Option<Inject>,
}

/// Measures one configuration as often as was asked for and writes its rows; returns the exit code.
///
/// # Errors
/// What stops it before there is a row of measured steps.
pub(super) fn one(
    mut resolved: Resolved,
    args: &Args,
    interrupt: &Interrupt,
    book: Option<&Arc<Mutex<Book>>>,
    start: Option<&Start>,
) -> anyhow::Result<u8> {
    interrupt.planning();
    let effective = resolved.config.clone();
    let faults = faults(args)?.filter(|_| start.is_none_or(|s| ranks::struck(s.rank)));
    let host_model = HostModel::load(&args.mbperf.host_model)?;
    let on_gpu = choose_device(args)?;
    check_spin(args, on_gpu)?;
    if !on_gpu && std::mem::take(&mut resolved.config.overlap_wgrad) {
        // `--device auto`: with `cpu` a rule refuses it.
        say(args, "device cpu: it has no streams, so that --overlap_wgrad changes nothing");
    }
    if !on_gpu && !args.mbperf.full_size {
        let change = shrink::shrink(&mut resolved.config, given(args));
        say(args, &format!("device cpu: the model is run in small ({change}); --full_size runs it whole"));
    }
    let mut options = options(&resolved, args, on_gpu);
    options.check().map_err(|e| usage(&e))?;
    let plan = plan(&resolved.config, args.mbperf.dump.is_some(), args.mbperf.comm_model)?;
    if !on_gpu {
        threads::check()?;
    }
    let target = target(&resolved, args);
    let _running = interrupt.running();
    let writer = files(args, &target, &effective, book, interrupt)?;
    let terminal = Terminal::new(args.mbperf.quiet);
    let mut facts = understood(args, &resolved, &plan, on_gpu, start);
    if let Some(model) = &host_model {
        let (costs, coverage) = model.costs(&plan, RankShare::of(&resolved.config)?.tokens);
        options.host_costs = Some(costs);
        facts.host_model = model.name.clone();
        facts.host_model_other_fraction = Some(coverage.other_fraction());
        facts.host_model_notice = coverage.notice(&model.name);
    }
    let repetitions = match args.mbperf.resume {
        true => lacking(args, &facts, &options, &writer)?,
        false => (1..=args.mbperf.repeat).collect(),
    };
    if repetitions.is_empty() {
        return Ok(0);
    }
    let told = Arc::new(Mutex::new(facts.clone()));
    let kept = book.cloned();
    let beat = watchdog(args, told.clone(), options.clone(), target.clone(), kept, start.is_some())?;
    let mut job = Job {
        args,
        resolved: &resolved,
        plan: &plan,
        on_gpu,
        interrupt,
        beat,
        options,
        facts,
        told,
        writer,
        terminal,
        extrapolated: None,
        fault: faults.clone(),
    };
    let leader = match start.map(|start| job.gather(start, target)).transpose() {
        Ok(leader) => leader,
        Err(_) if interrupt.flag().load(Ordering::Relaxed) => {
            complain("interrupted; finished rows stay");
            return Ok(Status::Interrupted.exit_code());
        }
        Err(error) => return Err(error),
    };
    let mut both = job.open(faults)?;
    let (code, outcomes) = job.repeat(&mut both, &repetitions)?;
    end(leader, both, &outcomes);
    if let Some(fault) = job.fault.filter(|f| !f.happened() && !outcomes.is_empty()) {
        complain(&format!(
            "--inject {fault} did not happen: the run ended before the phase {} came so far",
            fault.phase
        ));
    }
    if args.mbperf.repeat > 1 {
        say(args, &summary::repetitions(&outcomes));
    }
    Ok(code)
}

/// Opens what is written. `effective`: the configuration before a CPU run made it small.
fn files(
    args: &Args,
    target: &Target,
    effective: &RunConfig,
    book: Option<&Arc<Mutex<Book>>>,
    interrupt: &Interrupt,
) -> anyhow::Result<Writer> {
    let mut writer = Writer::open_in(target, args.mbperf.csv_dialect)?;
    book.into_iter().for_each(|b| writer.keep(b.clone()));
    profile::prepare(args, &mut writer)?;
    interrupt.opened(&writer);
    if let Some(dir) = &args.mbperf.dump {
        dump::check(dir).map_err(|e| usage(&format!("{e:#}; choose another folder for --dump")))?;
    }
    save_config(effective, args)?;
    Ok(writer)
}

/// What is known before anything runs; says what was understood (rules file, section 2).
fn understood(
    args: &Args,
    resolved: &Resolved,
    plan: &RunPlan,
    on_gpu: bool,
    start: Option<&Start>,
) -> RunFacts {
    let mut facts = facts(resolved, plan, args);
    let tracker = if facts.te_rng_tracker { "on" } else { "off" };
    let graphs = &facts.cuda_graph_impl;
    say(
        args,
        &format!("graphs: {graphs}, layers captured: {}; RNG tracker {tracker}", facts.captured_layers),
    );
    facts.device = if on_gpu { "cuda" } else { "cpu" }.into();
    if start.is_some() {
        let wire = if on_gpu { "nccl" } else { "tcp" };
        facts.comm = if facts.comm == "none" { wire.into() } else { format!("{wire}+stand_in") };
    }
    facts
}

/// Lets the other ranks go and closes the device.
fn end(leader: Option<ranks::Leader>, both: Both, outcomes: &[Outcome]) {
    let unfinished = outcomes.iter().find(|o| !matches!(o.status, Status::Ok));
    match (&leader, unfinished) {
        (Some(leader), Some(outcome)) => {
            leader.lead.give_up(outcome.status.exit_code());
            // Its communicators would wait for ranks that are gone; the process ends soon.
            std::mem::forget(both);
        }
        (Some(leader), None) => {
            leader.lead.done();
            drop(both);
        }
        (None, _) => drop(both),
    }
}

impl Job<'_> {
    /// Waits for the other ranks.
    fn gather(&mut self, start: &Start, target: Target) -> anyhow::Result<ranks::Leader> {
        self.writer.expect_ranks(start.size)?;
        let (args, cfg) = (self.args, &self.resolved.config);
        let abandon = ranks::abandon(args, self.told.clone(), self.options.clone(), target);
        let flag = self.interrupt.flag();
        match ranks::gather(args, cfg, start, self.on_gpu, flag, abandon) {
            Ok(leader) => {
                say(args, &ranks::said(start, cfg, self.on_gpu));
                Ok(leader)
            }
            // An interrupted wait is no failed run.
            Err(error) if flag.load(Ordering::Relaxed) => Err(error.into()),
            Err(error) => Err(self.failed_before_steps(error)),
        }
    }

    /// Times what `--extrapolate` asks for, and opens the device of both arms.
    fn open(&mut self, faults: Option<Inject>) -> anyhow::Result<Both> {
        let (args, flag) = (self.args, self.interrupt.flag());
        let points = side_points(
            self.resolved,
            args,
            self.on_gpu,
            &self.options,
            &self.beat,
            flag,
            &mut self.terminal,
        );
        self.extrapolated = points.map_err(|error| self.failed_before_steps(error))?;
        let mut executor = match open_device(self.plan, args, self.on_gpu, faults, self.beat.clone()) {
            Ok(executor) => executor,
            Err(error) if in_turn::worth_a_try(args, self.plan, &error) => return Ok(Err(error)),
            Err(error) => return Err(self.failed_before_steps(error)),
        };
        let info = executor.info();
        info.notices.iter().for_each(|n| say(args, n));
        add_device(&mut self.facts, &info);
        if let Some(dir) = &args.mbperf.dump {
            dump::dump(dir, &self.resolved.config, &self.plan.eager.program, &mut executor)?;
        }
        Ok(Ok(executor))
    }

    /// Measures and writes these repetitions. Gives the first exit code that is not 0.
    fn repeat(&mut self, both: &mut Both, repetitions: &[u32]) -> anyhow::Result<(u8, Vec<Outcome>)> {
        let own = &self.args.mbperf;
        let (mut code, mut outcomes) = (0, Vec::new());
        for &repetition in repetitions {
            if !outcomes.is_empty() {
                self.facts.run_id = run_id::new();
                self.facts.started_at = run_id::utc_now();
            }
            self.facts.repetition = repetition as usize;
            let over_before = self.fault.as_ref().is_some_and(Inject::happened);
            if let Ok(mut told) = self.told.lock() {
                told.clone_from(&self.facts);
            }
            // A profiler is heard by every later launch of the process.
            let last = !own.no_profile && repetitions.last() == Some(&repetition);
            self.options.busy = self.on_gpu && !own.no_samplers && last;
            self.options.profile = own.profile && last;
            let outcome = self.measure(both)?;
            let points = self.extrapolated.as_deref();
            self.facts.extrapolation = points.map(|points| extrapolation(self.resolved, points, &outcome));
            let found = self.write(&outcome)?;
            code = if code == 0 { found } else { code };
            // Of the measurement that it happened in: later ones are sound.
            if let Some(fault) = self.fault.as_ref().filter(|f| !over_before && f.happened()) {
                say_unseen(fault, &outcome);
            }
            let interrupted = matches!(outcome.status, Status::Interrupted);
            outcomes.push(outcome);
            if interrupted {
                break;
            }
        }
        Ok((code, outcomes))
    }

    /// Both arms together, or each alone where they do not fit so.
    fn measure(&mut self, both: &mut Both) -> anyhow::Result<Outcome> {
        let mut outcome = None;
        if let Ok(executor) = both {
            let line = run_line(self.resolved, &executor.info(), &self.facts);
            self.writer.begin_run(&self.facts.run_id, &line)?;
            let flag = self.interrupt.flag();
            let hooks = Hooks { interrupt: flag, progress: &mut self.terminal, sink: &mut self.writer };
            outcome = Some(measure::run(executor, &self.options, hooks));
            if let Some(found) = tally::read(&self.plan.eager.program, executor) {
                self.facts.tokens_routed = Some(found.routed);
                (self.facts.tokens_dropped, self.facts.tokens_padded) =
                    (Some(found.dropped), Some(found.padded));
            }
        }
        if outcome.as_ref().is_none_or(|o| in_turn::failed_so(self.args, self.plan, o)) {
            outcome = self.measure_in_turn(both)?.or(outcome);
        }
        match (outcome, both) {
            (Some(outcome), _) => Ok(outcome),
            (None, Err(error)) => {
                let error = std::mem::replace(error, DeviceError::internal("told already"));
                Err(self.failed_before_steps(error))
            }
            (None, Ok(_)) => Err(DeviceError::internal("a run without an outcome").into()),
        }
    }

    /// Each arm alone; `None`: the graph arm does not fit so either.
    fn measure_in_turn(&mut self, both: &mut Both) -> anyhow::Result<Option<Outcome>> {
        say(self.args, "the arms do not fit in memory together: each is tried alone");
        if both.is_ok() {
            // Both go before one is opened anew; what was run so far keeps its own id.
            *both = Err(DeviceError::internal("no device is open"));
            self.facts.run_id = run_id::new();
        }
        let line = run_line(self.resolved, &DeviceInfo::default(), &self.facts);
        self.writer.begin_run(&self.facts.run_id, &line)?;
        let flag = self.interrupt.flag();
        let hooks = Hooks { interrupt: flag, progress: &mut self.terminal, sink: &mut self.writer };
        let found = in_turn::measure(self.args, self.plan, self.on_gpu, &self.beat, &self.options, hooks);
        Ok(found.map(|(outcome, info)| {
            add_device(&mut self.facts, &info);
            outcome
        }))
    }

    /// Writes a measurement and says what it found; returns its exit code.
    fn write(&mut self, outcome: &Outcome) -> anyhow::Result<u8> {
        let reason = outcome.status.reason();
        let rows = Row::of_run(&self.facts, &self.options, outcome, &reason);
        self.writer.rows(&rows)?;
        self.writer.blocks(&outcome.blocks)?;
        let profiles = profile::profiles(self.plan, outcome);
        let code = conclude(self.args, &rows, &profiles, outcome, &reason, &self.writer)?;
        let own = profile::conclude(self.args, &profiles, outcome, &self.facts, &mut self.writer)?;
        Ok(if code == 0 { own } else { code })
    }

    /// A run that failed before its first step still leaves its rows.
    fn failed_before_steps(&mut self, error: DeviceError) -> anyhow::Error {
        let reason = error.to_string();
        if !matches!(error, DeviceError::Unavailable(_)) {
            let rows = Row::without_outcome(&self.facts, &self.options, "failed", &reason);
            if let Err(unwritten) = self.writer.rows(&rows) {
                return unwritten.into();
            }
        }
        error.into()
    }
}
