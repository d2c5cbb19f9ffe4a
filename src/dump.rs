//! `--dump DIR`: one eager step from the seed, written as safetensors for an independent referee
//! (`tests/pytorch/check.py`): weights before the step, tokens, routing, loss and every main gradient.

use crate::config::RunConfig;
use crate::device::{Arm, DeviceError, Executor};
use crate::program::{BufId, Lifetime, Program};
use crate::report::file;
use anyhow::Context;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use std::path::Path;

/// Buffers of routing decisions that the referee needs; they are kept past the step.
const ROUTING: [&str; 3] = [".moe.index", ".moe.scores", ".moe.dest"];

/// Lets the routing outlive the step, so that it can be read afterwards.
pub fn keep_routing(program: &mut Program) {
    for b in program.buffers.iter_mut().filter(|b| ROUTING.iter().any(|r| b.name.ends_with(r))) {
        b.lifetime = Lifetime::StepState;
    }
}

/// Makes the folder and tries a file there, before anything runs.
///
/// # Errors
/// A folder that cannot be made or written.
pub fn check(dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("--dump: cannot create {}", dir.display()))?;
    // Leaves nothing behind: a run that fails later has dumped nothing.
    let config = dir.join("config.json");
    file::check(&config, b"{", "configuration")
        .map_err(|reason| anyhow::anyhow!("--dump: cannot write {}: {reason}", config.display()))
}

/// Runs one step and writes `weights.safetensors`, `step.safetensors`, `grads.safetensors` and `config.json`.
///
/// # Errors
/// A device failure, or a folder that cannot be written.
pub fn dump(
    dir: &Path,
    cfg: &RunConfig,
    program: &Program,
    executor: &mut dyn Executor,
) -> anyhow::Result<()> {
    executor.reset()?;
    let ids = || (0..program.buffers.len() as u32).map(BufId);
    let weights = read_all(program, executor, ids().filter(|&i| is_tensor(program, i, Lifetime::Weight)))?;
    let ticket = executor.submit(Arm::Eager)?;
    executor.wait(ticket)?;
    let grads = read_all(program, executor, ids().filter(|&i| is_tensor(program, i, Lifetime::MainGrad)))?;
    let step = ids().filter(|&i| {
        let name = &program.buffer(i).name;
        name == "loss"
            || name.starts_with("ids.")
            || name.starts_with("labels.")
            || ROUTING.iter().any(|r| name.ends_with(r))
    });
    let step = read_all(program, executor, step)?;
    for (file, tensors) in [("weights", weights), ("grads", grads), ("step", step)] {
        write(&dir.join(format!("{file}.safetensors")), &tensors)?;
    }
    let config = dir.join("config.json");
    file::replace(&config, serde_json::to_string_pretty(cfg)?.as_bytes())
        .with_context(|| format!("--dump: cannot write {}", config.display()))
}

/// One weight (not the flat buffer that holds all, nor its shards and buckets).
fn is_tensor(program: &Program, id: BufId, lifetime: Lifetime) -> bool {
    let b = program.buffer(id);
    b.lifetime == lifetime && b.view_of.is_some() && b.shape.len() == 2
}

type Tensor = (String, Vec<usize>, Vec<u8>);

fn read_all(
    program: &Program,
    executor: &mut dyn Executor,
    ids: impl Iterator<Item = BufId>,
) -> Result<Vec<Tensor>, DeviceError> {
    ids.map(|id| {
        let b = program.buffer(id);
        let bytes = executor.read(id)?.iter().flat_map(|v| v.to_le_bytes()).collect();
        Ok((b.name.clone(), b.shape.clone(), bytes))
    })
    .collect()
}

fn write(path: &Path, tensors: &[Tensor]) -> anyhow::Result<()> {
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| Ok((name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes)?)));
    let views: Vec<_> = views.collect::<Result<_, safetensors::SafeTensorError>>()?;
    serialize_to_file(views, None, path).with_context(|| {
        // Half a file would be taken for a whole one.
        let _ = std::fs::remove_file(path);
        format!("--dump: cannot write {}", path.display())
    })
}
