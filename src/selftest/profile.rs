//! What `--profile` records, against what is known of the step: the parts' sum is the time that the device was busy, and
//! the trace's names are the launch list. Last of all: a profiler slows down what follows it in the process.

use super::Log;
use super::steps::{small, steps};
use crate::capture::{ArmPlan, RunPlan};
use crate::device::cuda::executor::{CudaExecutor, CudaOptions};
use crate::device::cuda::libraries::{Library, find};
use crate::device::record::Recorded;
use crate::device::{Arm, DeviceError, Executor};
use crate::profile::{CLOSE, Profile, trace};
use serde_json::Value;
use std::collections::BTreeMap;

/// A step on one stream: kernels beside each other would each count, and their sum be more than the busy time.
const STEPS: [(&str, &str); 3] = [
    ("llama attn", "-m llama -mr llama3_8b -g h100 --cuda_graph_scope attn"),
    ("llama full_iteration", "-m llama -mr llama3_8b -g h100 --cuda_graph_scope full_iteration"),
    (
        "qwen attn,moe_router,moe_preprocess",
        "-m qwen -mr qwen3_30b_a3b -g h100 model.moe_token_dispatcher_type=alltoall \
         --cuda_graph_scope attn,moe_router,moe_preprocess",
    ),
];

pub fn run(log: &mut Log, options: &CudaOptions) {
    for (name, line) in STEPS {
        let name = format!("profile: {name}");
        if log.wants(&name) {
            let found = match find(Library::Cupti) {
                Err(reason) => Ok(format!("left out, CUPTI is not installed: {reason}")),
                Ok(_) => both_arms(line, options),
            };
            log.record(&name, found);
        }
    }
}

fn both_arms(line: &str, options: &CudaOptions) -> Result<String, String> {
    let plan = small(line)?;
    let told = |e: DeviceError| e.to_string();
    let mut device = CudaExecutor::new(&plan, options.clone()).map_err(told)?;
    device.reset().map_err(told)?;
    device.capture().map_err(told)?;
    let mut found = Vec::new();
    for arm in [Arm::Eager, Arm::Graph] {
        steps(&mut device, arm, 1).map_err(told)?;
        let recorded = device.profile(arm)?;
        let of_arm = of_arm(&plan, arm).ok_or_else(|| format!("no {arm} arm"))?;
        found.push(judge(arm, of_arm, recorded).map_err(|why| format!("{arm} arm: {why}"))?);
    }
    device.destroy_graphs().map_err(told)?;
    Ok(found.join("; "))
}

fn of_arm(plan: &RunPlan, arm: Arm) -> Option<&ArmPlan> {
    match arm {
        Arm::Eager => Some(&plan.eager),
        Arm::Graph => plan.graph.as_ref(),
    }
}

/// What a recorded step of `plan` shows, or what is wrong with it.
fn judge(arm: Arm, plan: &ArmPlan, recorded: Recorded) -> Result<String, String> {
    let profile = Profile::new(arm, plan, recorded);
    if let Some(difference) = &profile.matched.difference {
        return Err(difference.clone());
    }
    let parts_ns = profile.attributed().0.device_ns;
    let off = parts_ns as f64 / profile.busy_ns.max(1) as f64 - 1.0;
    if off.abs() > CLOSE {
        return Err(format!(
            "the parts' sum is {:+.1} % off the busy time ({:.3} ms), {:.0} % allowed",
            off * 100.0,
            profile.busy_ns as f64 / 1e6,
            CLOSE * 100.0
        ));
    }
    let names = names_of_trace(&profile)?;
    Ok(format!(
        "{names} names of the {arm} step's trace are the launch list's, its parts' sum is {:+.2} % off the busy time",
        off * 100.0
    ))
}

/// Reads the trace back: of every launch, the names of its slices must be those that it is known to put on the device.
/// Gives the number of slices.
fn names_of_trace(profile: &Profile) -> Result<usize, String> {
    let text = trace::render(std::slice::from_ref(profile), &[]);
    let trace: Value = serde_json::from_str(&text).map_err(|e| format!("the trace is no JSON: {e}"))?;
    let mut found: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
    let slices = trace["traceEvents"].as_array().into_iter().flatten().filter(|e| e["ph"] == "X");
    for slice in slices {
        match (slice["args"]["launch"].as_u64(), slice["name"].as_str()) {
            (Some(launch), Some(name)) => found.entry(launch as usize).or_default().push(name),
            _ => return Err(format!("a slice of the trace has no launch or no name: {slice}")),
        }
    }
    for (launch, expected) in profile.recorded.expected.iter().enumerate() {
        // `None`: products that are sized by the step.
        let Some(expected) = expected else { continue };
        let mut expected: Vec<&str> = expected.iter().map(|unit| &*unit.name).collect();
        let mut own = found.get(&launch).cloned().unwrap_or_default();
        expected.sort_unstable();
        own.sort_unstable();
        if own != expected {
            return Err(format!("launch {launch}: the trace has {own:?}, the launch list {expected:?}"));
        }
    }
    Ok(found.values().map(Vec::len).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::CpuExecutor;

    /// A step as the CPU records it, whose references stand for kernels.
    fn recorded(arm: Arm) -> (ArmPlan, Recorded) {
        let plan = small(STEPS[0].1).unwrap();
        let of_arm = of_arm(&plan, arm).unwrap().clone();
        let mut device = CpuExecutor::new(plan, None, None).unwrap();
        device.reset().unwrap();
        device.capture().unwrap();
        (of_arm, device.profile(arm).unwrap())
    }

    #[test]
    fn a_sound_profile_passes_and_each_defect_is_told() {
        for arm in [Arm::Eager, Arm::Graph] {
            let (plan, sound) = recorded(arm);
            let said = judge(arm, &plan, sound.clone()).unwrap();
            assert!(said.starts_with(&format!("{} names", sound.records.len())), "{said}");
            let broken = |change: &dyn Fn(&mut Recorded)| {
                let mut recorded = sound.clone();
                change(&mut recorded);
                judge(arm, &plan, recorded).unwrap_err()
            };
            let lost = broken(&|r| drop(r.records.remove(3)));
            assert!(lost.contains("recorded") || lost.contains("launch"), "{lost}");
            let renamed = broken(&|r| r.records[3].unit.name = "stranger".into());
            assert!(renamed.contains("stranger") || renamed.contains("launch"), "{renamed}");
            // One kernel as long as all, beside the others: counted twice.
            let beside = broken(&|r| r.records[3].end_ns = r.records.iter().map(|r| r.end_ns).max().unwrap());
            assert!(beside.contains("off the busy time"), "{beside}");
        }
    }

    /// What the matching takes for equal is looked for in the file that a person opens.
    #[test]
    fn the_trace_is_read_back() {
        let (plan, recorded) = recorded(Arm::Graph);
        let count = recorded.records.len();
        let mut profile = Profile::new(Arm::Graph, &plan, recorded);
        assert_eq!(names_of_trace(&profile), Ok(count));
        let (one, other) = (profile.matched.launches[1], profile.matched.launches[2]);
        assert_ne!(profile.recorded.records[1].unit.name, profile.recorded.records[2].unit.name);
        (profile.matched.launches[1], profile.matched.launches[2]) = (other, one);
        assert!(names_of_trace(&profile).unwrap_err().contains("the launch list"));
        profile.matched.launches[1] = None;
        assert!(names_of_trace(&profile).unwrap_err().contains("no launch"));
    }
}
