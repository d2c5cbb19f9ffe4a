//! `--dump DIR`: one eager step from the seed, written as safetensors for an independent referee
//! (`tests/pytorch/check.py`): weights before the step, tokens, routing, loss and every main gradient.

use crate::config::RunConfig;
use crate::device::{Arm, DeviceError, Executor};
use crate::program::{BufId, Lifetime, Program};
use crate::report::{Paths, file};
use crate::run::files::{CONFIG_KIND, CONFIG_START};
use anyhow::Context;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use std::path::Path;

/// Buffers of routing decisions that the referee needs; they are kept past the step.
const ROUTING: [&str; 3] = [".moe.index", ".moe.scores", ".moe.dest"];

/// Inputs beside tokens: of an image tower, and of a diffusion transformer.
const INPUTS: [&str; 5] = ["pixels.mb", "noisy.mb", "target.mb", "time.mb", "text.mb"];

/// Lets the routing outlive the step, so that it can be read afterwards.
pub fn keep_routing(program: &mut Program) {
    for b in program.buffers.iter_mut().filter(|b| ROUTING.iter().any(|r| b.name.ends_with(r))) {
        b.lifetime = Lifetime::StepState;
    }
}

/// Files of tensors, by the end of their name.
const TENSORS: [&str; 3] = ["weights", "grads", "step"];
/// What follows the header's length in a file of tensors: the header, JSON.
const TENSORS_MARK: (usize, &[u8]) = (8, b"{\"");

/// Adds the files in `dir` to what the command writes.
pub fn files(dir: &Path, paths: &mut Paths) {
    const OPTION: &str = "--dump";
    // In a folder that is made later nothing can be of another kind.
    let fresh = !dir.is_dir();
    for name in TENSORS {
        let path = dir.join(format!("{name}.safetensors"));
        match fresh {
            true => paths.appends(OPTION, &path),
            false => paths.replaces_at(OPTION, &path, TENSORS_MARK.0, TENSORS_MARK.1, "file of tensors"),
        };
    }
    let config = dir.join("config.json");
    match fresh {
        true => paths.appends(OPTION, &config),
        false => paths.replaces(OPTION, &config, CONFIG_START, CONFIG_KIND),
    };
}

/// Makes the folder and tries a file there, before anything runs; leaves none.
///
/// # Errors
/// A folder that cannot be made or written.
pub fn check(dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("--dump: cannot create {}", dir.display()))?;
    let mut paths = Paths::default();
    files(dir, &mut paths);
    paths.check().map_err(anyhow::Error::msg)
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
            || INPUTS.iter().any(|i| name.starts_with(i))
            || ROUTING.iter().any(|r| name.ends_with(r))
    });
    let step = read_all(program, executor, step)?;
    for (file, tensors) in TENSORS.into_iter().zip([weights, grads, step]) {
        write(&dir.join(format!("{file}.safetensors")), &tensors)?;
    }
    let config = dir.join("config.json");
    file::replace(&config, serde_json::to_string_pretty(cfg)?.as_bytes())
        .map_err(|e| anyhow::anyhow!("--dump: cannot write {}: {e}", config.display()))
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
    // Beside it first: what does not fit leaves nothing, and what was there stays.
    let new = path.with_extension("new");
    let written = serialize_to_file(views, None, &new)
        .map_err(anyhow::Error::from)
        .and_then(|()| Ok(std::fs::rename(&new, path)?));
    if written.is_err() {
        let _ = std::fs::remove_file(&new);
    }
    written.map_err(|e| anyhow::anyhow!("--dump: cannot write {}: {e}", path.display()))
}
