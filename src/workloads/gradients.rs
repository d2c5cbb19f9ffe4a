//! Whole steps in f64: the main gradient of every weight against the change of the loss, so that a launch that a
//! workload forgot, doubled or gave the wrong buffer shows.

use super::testing::*;
use crate::config::{Dispatcher, LayerKind, RunConfig};
use crate::ops::cpu_args::Slot;
use crate::ops::testing::normals;
use crate::ops::{Access, CpuArgs};
use crate::program::{BufId, Buffer, Init, Launch, Lifetime, Program};

/// Half width of the central difference, in multiples of the random direction: so small that no token changes its experts.
const STEP: f64 = 1e-5;
/// Standard deviation of weights and of the direction: large enough that a part behind several small products moves
/// the loss.
const STD: f64 = 0.1;
/// Relative error allowed: that of the difference, about STEP^2, is far below.
const TOLERANCE: f64 = 1e-6;
/// Absolute error allowed: some units in the last place of a loss near 5, over the difference's width.
const ROUND_OFF: f64 = 8.0 * 5.0 * f64::EPSILON / (2.0 * STEP);

/// The memory of a program, unrounded. Views live in their root.
struct Memory<'a> {
    program: &'a Program,
    floats: Vec<Vec<f64>>,
    ints: Vec<Vec<i32>>,
}

impl<'a> Memory<'a> {
    fn new(program: &'a Program) -> Self {
        let mut m = Self { program, floats: Vec::new(), ints: Vec::new() };
        for b in &program.buffers {
            let room = if b.view_of.is_none() { b.len() } else { 0 };
            let (floats, ints) = if b.dtype.is_float() { (room, 0) } else { (0, room) };
            m.floats.push(vec![f64::NAN; floats]);
            m.ints.push(vec![0; ints]);
        }
        for (i, b) in program.buffers.iter().enumerate() {
            let id = BufId(i as u32);
            let seed = b.name.bytes().fold(7u32, |h, c| h.wrapping_mul(31).wrapping_add(c.into()));
            match &b.init {
                Init::Normal { std } => m.write(id, &normals(b.len(), seed, *std)),
                Init::Const { value } => m.write(id, &vec![*value; b.len()]),
                Init::Values { values } => m.write(id, values),
                Init::Words { words } => {
                    m.ints[i] = words.iter().map(|w| *w as i32).collect();
                }
                Init::Inherit | Init::Poison | Init::CopyOf { .. } => {}
            }
        }
        m
    }

    fn range(&self, id: BufId) -> (usize, std::ops::Range<usize>) {
        let (root, offset) = self.program.root(id);
        (root.0 as usize, offset..offset + self.program.buffer(id).len())
    }
    fn read(&self, id: BufId) -> Vec<f64> {
        let (root, range) = self.range(id);
        self.floats[root][range].to_vec()
    }
    fn write(&mut self, id: BufId, values: &[f64]) {
        let (root, range) = self.range(id);
        if self.program.buffer(id).dtype.is_float() {
            self.floats[root][range].copy_from_slice(values);
        } else {
            self.ints[root][range].iter_mut().zip(values).for_each(|(i, v)| *i = *v as i32);
        }
    }

    fn run(&mut self, launch: &Launch) {
        let specs = launch.op.args();
        let mut floats: Vec<Vec<f64>> = Vec::new();
        let mut ints: Vec<Vec<i32>> = Vec::new();
        for (spec, id) in specs.iter().zip(&launch.args) {
            let (root, range) = self.range(*id);
            let float = spec.dtype.is_float();
            floats.push(if float { self.floats[root][range.clone()].to_vec() } else { Vec::new() });
            ints.push(if float { Vec::new() } else { self.ints[root][range].to_vec() });
        }
        let slots = specs.iter().zip(floats.iter_mut().zip(&mut ints)).map(|(spec, (f, i))| {
            match (spec.dtype.is_float(), spec.access) {
                (true, Access::Read) => Slot::In(f),
                (true, _) => Slot::Out(f),
                (false, Access::Read) => Slot::IntIn(i),
                (false, _) => Slot::IntOut(i),
            }
        });
        launch.op.cpu_f64(&mut CpuArgs::new(launch.op.name(), slots.collect())).unwrap();
        for (i, (spec, id)) in specs.iter().zip(&launch.args).enumerate() {
            if spec.access != Access::Read {
                let (root, range) = self.range(*id);
                if spec.dtype.is_float() {
                    self.floats[root][range].copy_from_slice(&floats[i]);
                } else {
                    self.ints[root][range].copy_from_slice(&ints[i]);
                }
            }
        }
    }
}

/// The loss of one step, with those of multi-token prediction, each weighed by `ahead`, and every weight's main gradient.
fn step(program: &Program, ahead: f64, moved: Option<(BufId, &[f64], f64)>) -> (f64, Vec<Vec<f64>>) {
    let mut m = Memory::new(program);
    if let Some((id, direction, by)) = moved {
        let weight: Vec<f64> = m.read(id).iter().zip(direction).map(|(w, d)| w + by * d).collect();
        m.write(id, &weight);
    }
    for l in &program.launches {
        m.run(l);
    }
    let grads = weights(program).iter().map(|(_, grad)| m.read(*grad)).collect();
    let depths = program.buffers.iter().enumerate();
    let depths = depths.filter(|(_, b)| b.name.starts_with("mtp") && b.name.ends_with(".loss"));
    let further: f64 = depths.map(|(i, _)| m.read(BufId(i as u32))[0]).sum();
    (m.read(program.loss.unwrap())[0] + ahead * further, grads)
}

/// Every weight with its main gradient.
fn weights(program: &Program) -> Vec<(BufId, BufId)> {
    let find = |name: &str| program.buffers.iter().position(|b| b.name == name).map(|i| BufId(i as u32));
    let weight = |b: &&Buffer| b.lifetime == Lifetime::Weight && b.view_of.is_some();
    let pair = |b: &Buffer| (find(&b.name).unwrap(), find(&format!("{}.grad", b.name)).unwrap());
    program.buffers.iter().filter(weight).map(pair).collect()
}

/// A capacity factor that drops tokens, without padding.
fn dropped() -> RunConfig {
    let mut cfg = padded();
    if let Some(moe) = &mut cfg.model.moe {
        (moe.capacity_factor, moe.pad_to_capacity, moe.drop_by_position) = (Some(0.75), false, true);
    }
    cfg
}

/// Each has its own time step.
fn two_videos() -> RunConfig {
    let mut cfg = diffusion();
    cfg.model.layers.truncate(1);
    (cfg.batch.micro_batch_size, cfg.batch.num_microbatches) = (2, 1);
    cfg
}

/// Every block of the tower feeds DeepStack, and the decoder has one layer.
fn vision_levels() -> RunConfig {
    let mut cfg = vision();
    cfg.model.layers.truncate(1);
    (cfg.batch.micro_batch_size, cfg.batch.num_microbatches) = (2, 1);
    if let Some(v) = &mut cfg.model.vision {
        v.deepstack = vec![0, 1];
    }
    cfg
}

/// Checks a configuration whose random choices do not depend on its weights; returns how many weights it has.
fn check(what: &str, mut cfg: RunConfig) -> usize {
    cfg.optimizer.kind = "none".into();
    cfg.model.init_method_std = STD;
    if let Some(moe) = &mut cfg.model.moe {
        // Forced logits would cut the router off from its gate; the auxiliary loss is no part of `loss`.
        moe.force_load_balancing = false;
        moe.aux_loss_coeff = 0.0;
    }
    let program = program(&cfg);
    // The mean over the depths, scaled.
    let ahead = cfg.model.mtp_loss_scaling_factor / cfg.model.mtp_num_layers.max(1) as f64;
    let (loss, grads) = step(&program, ahead, None);
    assert!(loss.is_finite(), "{what}: loss {loss}");
    let weights = weights(&program);
    for (i, (id, _)) in weights.iter().enumerate() {
        let name = &program.buffer(*id).name;
        let direction = normals(grads[i].len(), 40 + i as u32, STD);
        let analytic: f64 = grads[i].iter().zip(&direction).map(|(g, d)| g * d).sum();
        let at = |by: f64| step(&program, ahead, Some((*id, &direction, by))).0;
        let numeric = (at(STEP) - at(-STEP)) / (2.0 * STEP);
        assert!(numeric.abs() > 10.0 * ROUND_OFF, "{what}: the loss does not depend on {name}");
        let error = (analytic - numeric).abs();
        assert!(
            error < TOLERANCE * numeric.abs() + ROUND_OFF,
            "{what}: {name} has gradient {analytic:e} along a direction where the loss changes by {numeric:e}"
        );
    }
    weights.len()
}

#[test]
fn every_weight_has_the_gradient_of_the_loss() {
    for (what, cfg) in [
        ("dense", dense()),
        ("alltoall", moe(Dispatcher::Alltoall)),
        ("flex", moe(Dispatcher::Flex)),
        ("padded", padded()),
        ("dropped", dropped()),
        ("hybrid", hybrid()),
        ("delta_net", delta_net()),
        ("gpt_oss", gpt_oss()),
        ("vision", vision()),
        ("diffusion", diffusion()),
        ("diffusion of two videos", two_videos()),
        ("vision in two sequences, all DeepStack levels after one layer", vision_levels()),
        ("deepseek_v4", deepseek_v4()),
    ] {
        assert!(check(what, cfg) >= 13, "{what}");
    }
}

/// Biases under every dispatcher, of a dense MLP, with the other activations, where the rows are padded, and beside norms of
/// q and k; a bound that bites.
#[test]
fn biases_everywhere() {
    let biased = |mut cfg: RunConfig| {
        (cfg.model.add_bias_linear, cfg.model.add_qkv_bias) = (true, true);
        cfg
    };
    let mut flex = gpt_oss();
    if let Some(moe) = &mut flex.model.moe {
        moe.dispatcher = Dispatcher::Flex;
    }
    let mut padded_glu = gpt_oss();
    padded_glu.model.activation_clamp = Some(0.05);
    if let Some(moe) = &mut padded_glu.model.moe {
        (moe.capacity_factor, moe.pad_to_capacity) = (Some(1.0), true);
    }
    let mut dense_glu = gpt_oss();
    dense_glu.model.layers = vec![crate::config::LayerKind::Dense; 2];
    dense_glu.model.hidden_dropout = 0.1;
    let mut qkv = dense();
    qkv.model.add_qkv_bias = true;
    for (what, cfg) in [
        ("dense with biases", biased(dense())),
        ("experts with biases", biased(moe(Dispatcher::Alltoall))),
        ("clamped unit, flex", flex),
        ("clamped unit, padded", padded_glu),
        ("clamped unit, dense", dense_glu),
        ("bias of qkv alone", qkv),
    ] {
        check(what, cfg);
    }
}

#[test]
fn shared_experts_with_and_without_a_gate() {
    for gate in [false, true] {
        let mut cfg = moe(Dispatcher::Alltoall);
        if let Some(moe) = &mut cfg.model.moe {
            moe.shared_expert_intermediate_size = Some(40);
            moe.shared_expert_gate = gate;
        }
        check(if gate { "gated shared expert" } else { "shared expert" }, cfg);
    }
}

#[test]
fn latent_experts_with_and_without_a_shared_one() {
    for (dispatcher, shared, dropout) in [
        (Dispatcher::Alltoall, None, 0.0),
        (Dispatcher::Flex, Some(40), 0.0),
        (Dispatcher::Alltoall, Some(40), 0.1),
    ] {
        let mut cfg = moe(dispatcher);
        cfg.model.hidden_dropout = dropout;
        if let Some(moe) = &mut cfg.model.moe {
            moe.latent_size = Some(24);
            moe.shared_expert_intermediate_size = shared;
        }
        check("latent experts", cfg);
    }
}

#[test]
fn a_tied_embedding_gets_the_gradients_of_both_ends() {
    let mut cfg = dense();
    cfg.model.tied_embeddings = true;
    let separate = check("separate embedding", dense());
    assert_eq!(check("tied embedding", cfg), separate - 1);
}

/// Of the main model's weights too: the depths' losses go back through it, and through embedding and head, which they share.
#[test]
fn multi_token_prediction_adds_its_losses() {
    let ahead = |mut cfg: RunConfig, depths: usize, repeated: bool| {
        (cfg.model.mtp_num_layers, cfg.model.mtp_repeated) = (depths, repeated);
        // Large, so that a part of it that is missing is no round-off.
        cfg.model.mtp_loss_scaling_factor = 0.7;
        cfg
    };
    let mut plain = dense();
    plain.model.mtp_layers = vec![LayerKind::AttnOnly, LayerKind::MlpOnly];
    let without = check("no depth", ahead(plain.clone(), 0, false));
    let one = check("one depth", ahead(plain.clone(), 1, false)) - without;
    assert_eq!(check("two depths", ahead(plain.clone(), 2, false)) - without, 2 * one);
    assert_eq!(check("two depths of one layer", ahead(plain, 2, true)) - without, one);
    check("latent attention and experts, one depth", ahead(deepseek(), 1, false));
    check("streams, one depth", ahead(deepseek_v4(), 1, false));
}
