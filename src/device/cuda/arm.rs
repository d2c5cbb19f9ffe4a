//! One arm made ready: every launch prepared, equal ones once, and issued in order.

use super::context::{Context, Stream};
use super::counters::{self, Counters};
use super::graph::Instance;
use super::kernels::{Kernel, KernelLaunch};
use super::lanes::{Dependencies, Lanes};
use super::memory::{Memory, UTILITY};
use super::prep::{CudaPrep, DevPtr, Issue, OfflinePrep};
use super::target::Target;
use super::work::Work;
use crate::capture::ArmPlan;
use crate::device::DeviceError;
use crate::device::host::Pacer;
use crate::device::record::Unit;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// A launch that only has to be issued, and what it puts on a stream.
#[derive(Debug)]
pub(super) struct Prepared {
    /// Zero the counters of this launch and of those after it.
    zeroing: Vec<KernelLaunch>,
    issue: Rc<Issue>,
    pub work: Vec<Work>,
    /// To be zero when it starts.
    counters: Vec<DevPtr>,
}

impl Prepared {
    fn new(mut issue: Issue, counters: &mut Counters) -> Result<Self, DeviceError> {
        let counters = issue.launch_directly(counters)?;
        let mut work = Vec::new();
        issue.list_work(&mut work);
        Ok(Self { zeroing: Vec::new(), issue: Rc::new(issue), work, counters })
    }

    /// The same with launches before it that zero.
    fn behind(&self, zeroing: Vec<KernelLaunch>) -> Self {
        let work = zeroing.iter().map(KernelLaunch::work).chain(self.work.iter().cloned()).collect();
        Self { zeroing, issue: self.issue.clone(), work, counters: self.counters.clone() }
    }

    fn issue(&self, stream: &Stream, waited: &mut Duration) -> Result<(), DeviceError> {
        self.zeroing.iter().try_for_each(|z| z.issue(stream.raw))?;
        self.issue.issue(stream, waited)
    }
}

/// Launches by op, addresses, workspace and lane: the same one is prepared once for both arms and all micro-batches.
pub(super) type PreparedCache = HashMap<String, Rc<Prepared>>;

#[derive(Debug)]
pub(super) struct Arm {
    pub plan: ArmPlan,
    pub launches: Vec<Rc<Prepared>>,
    dependencies: Dependencies,
    /// By segment: whether a launch of it lies on a side lane, or waits for one outside.
    side_work: Vec<bool>,
}

/// Compiles on all cores what the arms' ops will ask for.
pub(super) fn warm<'a>(
    (target, sm_count): (&Target, usize),
    kernels: &mut super::kernels::KernelCache,
    arms: impl Iterator<Item = &'a ArmPlan>,
) -> Result<(), DeviceError> {
    let mut collected = OfflinePrep::collecting(target, sm_count);
    let mut seen = HashSet::new();
    for launch in arms.flat_map(|a| &a.program.launches) {
        if seen.insert(format!("{:?}", launch.op)) {
            collected.prepare(launch.op.as_ref()).map_err(|e| named(e, launch.op.name()))?;
        }
    }
    kernels.warm(collected.kernels())
}

fn named(error: DeviceError, op: &str) -> DeviceError {
    match error {
        DeviceError::Internal(message) if !message.starts_with(op) => {
            DeviceError::Internal(format!("{op}: {message}"))
        }
        other => super::context::in_phase(other, crate::device::Phase::Prepare, op),
    }
}

/// Puts before the first launch of each stretch that has counters those that zero all of the stretch.
fn zero_together(
    kernel: &Kernel,
    stretches: &[Option<usize>],
    keys: &[String],
    launches: &mut [Rc<Prepared>],
    cache: &mut PreparedCache,
) -> Result<(), DeviceError> {
    let mut words: HashMap<(usize, usize), (usize, Vec<DevPtr>)> = HashMap::new();
    // A launch that comes again in its stretch finds its counter used: a new part of the stretch begins with it.
    let mut parts: HashMap<usize, usize> = HashMap::new();
    for (i, stretch) in stretches.iter().enumerate() {
        let counters = &launches[i].counters;
        match stretch {
            _ if counters.is_empty() => {}
            Some(stretch) => {
                let part = parts.entry(*stretch).or_insert(0);
                let used = words
                    .get(&(*stretch, *part))
                    .is_some_and(|(_, w)| counters.iter().any(|c| w.contains(c)));
                *part += usize::from(used);
                words.entry((*stretch, *part)).or_insert_with(|| (i, Vec::new())).1.extend(counters);
            }
            None => {
                let what = format!("launch {i} counts, and nothing zeroes its counter");
                return Err(DeviceError::internal(what));
            }
        }
    }
    for (first, words) in words.into_values() {
        // Segments that share a graph share its launches: one object for the same words.
        let key = format!("zero {words:?} {}", keys[first]);
        launches[first] = match cache.get(&key) {
            Some(known) => known.clone(),
            None => {
                let made = Rc::new(launches[first].behind(counters::zeroing(kernel, &words)?));
                cache.insert(key, made.clone());
                made
            }
        };
    }
    Ok(())
}

impl Arm {
    pub fn prepare(
        context: &Rc<Context>,
        prep: &mut CudaPrep,
        memory: &Memory,
        plan: &ArmPlan,
        cache: &mut PreparedCache,
        counters: &mut Counters,
    ) -> Result<Self, DeviceError> {
        let covered: usize = plan.segments.iter().map(|s| s.launches.len()).sum();
        if covered != plan.program.launches.len() {
            return Err(DeviceError::internal("the segments do not cover the program's launches"));
        }
        let mut launches = Vec::with_capacity(covered);
        let stretches = counters::stretches(&plan.program.launches);
        let mut keys = Vec::with_capacity(covered);
        for (i, launch) in plan.program.launches.iter().enumerate() {
            let args: Vec<DevPtr> =
                launch.args.iter().map(|id| memory.address(plan, *id)).collect::<Result<_, _>>()?;
            let workspace = memory.workspace(plan, i);
            let key = format!("lane {} {:?} {args:?} {workspace:?}", launch.lane, launch.op);
            let prepared = match cache.get(&key) {
                Some(known) => known.clone(),
                None => {
                    let issue =
                        launch.op.prepare(prep, &args, workspace).map_err(|e| named(e, launch.op.name()))?;
                    let made = Rc::new(Prepared::new(issue, counters)?);
                    cache.insert(key.clone(), made.clone());
                    made
                }
            };
            launches.push(prepared);
            keys.push(key);
        }
        let kernel = prep.kernel(UTILITY, "zero_counters", &[], 0)?;
        zero_together(&kernel, &stretches, &keys, &mut launches, cache)?;
        let all = &plan.program.launches;
        let beside = |i: usize| all[i].lane > 0 || all[i].after.iter().any(|j| all[*j].lane > 0);
        let side_work = plan.segments.iter().map(|s| s.launches.clone().any(beside)).collect();
        Ok(Self { plan: plan.clone(), launches, dependencies: Dependencies::new(context, plan)?, side_work })
    }

    /// Issues the launches of `range` but `omit`; graphs not yet captured count as eager segments
    /// (`graphed` false). The error names the launch.
    pub fn issue(
        &self,
        range: Range<usize>,
        lanes: &Lanes,
        graphed: bool,
        omit: Option<usize>,
        waited: &mut Duration,
        pacer: &mut Pacer,
    ) -> Result<(), DeviceError> {
        for i in range {
            pacer.before(i);
            let stream = lanes.of(self.plan.program.launches[i].lane);
            let issued = self.dependencies.before(i, stream, graphed).and_then(|()| {
                if omit != Some(i) {
                    self.launches[i].issue(stream, waited)?;
                }
                self.dependencies.after(i, stream)
            });
            if let Err(e) = issued {
                return Err(super::context::in_phase(e, crate::device::Phase::Prepare, &self.place(i)));
            }
            pacer.after(i);
        }
        Ok(())
    }

    /// What to call launch `i` in a message.
    fn place(&self, i: usize) -> String {
        let launch = &self.plan.program.launches[i];
        match launch.layer {
            Some(layer) => format!("launch {i}, {} in layer {layer}", launch.op.name()),
            None => format!("launch {i}, {}", launch.op.name()),
        }
    }

    /// Issues a whole step on the lanes: graphs where there are some, launches otherwise.
    pub fn step(
        &self,
        lanes: &Lanes,
        graphs: &[Instance],
        waited: &mut Duration,
        pacer: &mut Pacer,
    ) -> Result<(), DeviceError> {
        lanes.fork()?;
        let graphed = !graphs.is_empty();
        // Replays of the main lane alone leave the side lanes to run beside them; these wait again when they have work.
        let mut ahead = false;
        for (s, segment) in self.plan.segments.iter().enumerate() {
            match segment.graph.and_then(|g| graphs.get(g)) {
                Some(instance) if !self.side_work[s] => {
                    pacer.before_replay(s);
                    instance.launch(lanes.main()).map_err(|e| {
                        super::context::in_phase(e, crate::device::Phase::Prepare, &segment.label)
                    })?;
                    ahead = true;
                    pacer.after_replay(s);
                }
                Some(instance) => {
                    pacer.before_replay(s);
                    lanes.join()?;
                    instance.launch(lanes.main()).map_err(|e| {
                        super::context::in_phase(e, crate::device::Phase::Prepare, &segment.label)
                    })?;
                    lanes.fork()?;
                    pacer.after_replay(s);
                }
                None if std::mem::take(&mut ahead) => {
                    if self.side_work[s] {
                        lanes.fork()?;
                    } else {
                        ahead = true;
                    }
                    self.issue(segment.launches.clone(), lanes, graphed, None, waited, pacer)?;
                }
                None => self.issue(segment.launches.clone(), lanes, graphed, None, waited, pacer)?,
            }
        }
        lanes.join()
    }

    /// What each launch puts on the device; `None` where the step decides.
    pub fn expected(&self) -> Vec<Option<Vec<Unit>>> {
        let of = |l: &Rc<Prepared>| (!l.issue.varies()).then(|| l.work.iter().map(Work::unit).collect());
        self.launches.iter().map(of).collect()
    }

    /// Kernels, copies and memsets of one step.
    pub fn work_per_step(&self) -> usize {
        self.launches.iter().map(|l| l.work.len()).sum()
    }
}
