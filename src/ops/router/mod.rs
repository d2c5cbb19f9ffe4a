//! Router: scores, top-k choice, probabilities and token counts from gate logits, and the gradient.
//!
//! T tokens, E experts, K chosen per token. The choice itself has no gradient.

mod bias;
mod reference;
#[cfg(test)]
mod tests;

use crate::config::ScoreFunction;
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::ops::rng::{Rng, WORDS, philox};
use crate::ops::{ArgSpec, Op, Sample, tolerance};
use crate::program::DType;
pub use bias::{CountAdd, ExpertBiasUpdate};

const SOURCE: KernelSource = KernelSource { name: "router/kernel.cu", text: include_str!("kernel.cu") };

/// One warp holds a token's row in registers, 16 values a lane: more would spill.
pub const MAX_EXPERTS: usize = 512;
/// Lane k of the token's warp holds the k-th choice.
pub const MAX_TOPK: usize = 32;
/// Threads of a block; one warp a token.
const THREADS: u32 = 256;
const TOKENS_PER_BLOCK: usize = THREADS as usize / 32;
/// Sets the draws of [`Hash`] apart from others of the same counters.
const HASH_STREAM: u32 = 0x6861_7368;
/// Added to sums that scores are divided by, as Megatron's router does, so that a row of zeros stays finite.
pub(crate) const SUM_EPS: f64 = 1e-20;

/// Scores and choice. Args: `logits` R f32 `[T,E]`, (`words` R U32 if `forced`), (`bias` R f32 `[E]` if
/// `expert_bias`), (`ids` R I32 `[T]` if `hash`), `scores` W f32 `[T,E]`, `probs` W f32 `[T,K]`, `index` W I32 `[T,K]`, `counts` W I32 `[E]`.
///
/// `scores` is the softmax, sigmoid or sqrt(softplus) of the logits in force over all experts; what is said of the sigmoid
/// below holds for the last too. The K experts with the largest
/// logits (with `expert_bias`: the largest score + bias) are chosen, in descending order, the lower expert
/// first among equals. `probs` times `scaling`: softmax over the K chosen logits, or with `pre_softmax` the
/// chosen scores as they are; sigmoid: the chosen scores divided by their sum when K > 1.
///
/// With `groups` the experts come from the best groups of neighbouring experts alone; a group's score is the sum of
/// its K / chosen largest values, of the scores (+ bias), or of the logits where softmax follows the choice
/// (Megatron-Core `group_limited_topk`; DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
///
/// `forced` replaces the logits by normal draws (quad t*E+e), minus ln(1+e) when `skew`: popularity falls
/// with the expert's index about as a Zipf law.
#[derive(Debug, Clone, PartialEq)]
pub struct RouterFwd {
    pub tokens: usize,
    pub experts: usize,
    pub topk: usize,
    pub score: ScoreFunction,
    pub pre_softmax: bool,
    pub scaling: Option<f64>,
    pub forced: Option<Rng>,
    pub skew: bool,
    pub expert_bias: bool,
    pub groups: Option<Groups>,
    /// The experts are a fixed function of the token's id, whatever its scores are (DeepSeek-V4's first layers).
    pub hash: Option<Hash>,
    /// Of these rows among those of the micro-batch, where tensor ranks share them: forced draws count from there.
    pub first_token: usize,
}

/// A fixed table of experts by token id: as random and distinct as the published one, by Philox in place of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hash {
    /// Tells layers apart.
    pub salt: u32,
}

impl Hash {
    /// The experts of token `id`: each draw is among those that are left.
    pub fn experts(&self, id: i32, experts: usize, chosen: &mut [i32]) {
        let mut taken: Vec<i32> = Vec::new();
        for (k, slot) in chosen.iter_mut().enumerate() {
            let word = philox([id as u32, (k / 4) as u32, self.salt, HASH_STREAM], [0, 0])[k % 4];
            let rank = ((u64::from(word) * (experts - k) as u64) >> 32) as i32;
            // How many taken experts lie at or below the rank-th one that is left.
            let before = taken.iter().zip(0..).filter(|&(t, j)| t - j <= rank).count();
            *slot = rank + before as i32;
            taken.insert(before, *slot);
        }
    }
}

/// Group-limited choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// Groups of equal size; one lane a group on the device, so at most 32.
    pub count: usize,
    /// Groups that a token's experts come from.
    pub chosen: usize,
}

/// Gradient of the gate logits. Args: `scores` R f32 `[T,E]`, `probs` R f32 `[T,K]`, `index` R I32 `[T,K]`,
/// `dprobs` R f32 `[T,K]`, `counts` R I32 `[E]`, `dlogits` W bf16 `[T,E]`.
///
/// The sum of the gradient through `probs` and `aux_scale` times that of the auxiliary load-balancing loss
/// `aux_coeff * E/(K*T*T) * sum_e counts[e] * sum_t s[t,e]` (Switch Transformer, arXiv:2101.03961, equation 4,
/// with top-k counts), s the scores (sigmoid: divided by their row sum), `counts` held fixed.
#[derive(Debug, Clone, PartialEq)]
pub struct RouterBwd {
    pub tokens: usize,
    pub experts: usize,
    pub topk: usize,
    pub score: ScoreFunction,
    pub pre_softmax: bool,
    pub scaling: Option<f64>,
    pub aux_coeff: f64,
    pub aux_scale: f32,
}

fn check(op: &str, tokens: usize, experts: usize, topk: usize) -> Result<(), DeviceError> {
    if experts == 0 || experts > MAX_EXPERTS {
        return Err(DeviceError::Invalid(format!(
            "{op}: {experts} experts, the kernel takes 1 to {MAX_EXPERTS}; choose a model with fewer experts"
        )));
    }
    if topk == 0 || topk > experts.min(MAX_TOPK) {
        let most = experts.min(MAX_TOPK);
        return Err(DeviceError::Invalid(format!(
            "{op}: top-k of {topk} with {experts} experts, the kernel takes 1 to {most}; lower moe_router_topk"
        )));
    }
    if tokens > i32::MAX as usize / experts {
        return Err(DeviceError::Invalid(format!(
            "{op}: {tokens} tokens x {experts} experts exceed 2^31 scores; lower the micro-batch or the sequence"
        )));
    }
    Ok(())
}

fn check_groups(op: &str, experts: usize, topk: usize, groups: Option<Groups>) -> Result<(), DeviceError> {
    let Some(Groups { count, chosen }) = groups else { return Ok(()) };
    let size = experts / count.max(1);
    let legal = (1..=MAX_TOPK).contains(&count)
        && experts.is_multiple_of(count)
        && (1..=count.min(topk)).contains(&chosen)
        && topk <= chosen * size
        && topk / chosen <= size;
    if legal {
        return Ok(());
    }
    Err(DeviceError::Invalid(format!(
        "{op}: {topk} of {experts} experts from {chosen} of {count} groups: groups must be of equal size, up to \
         {MAX_TOPK}, and the chosen ones hold the choice; change moe_router_num_groups or moe_router_group_topk"
    )))
}

/// Compile-time constants that both kernels share.
fn defines(experts: usize, topk: usize, score: ScoreFunction, pre: bool) -> Vec<(&'static str, String)> {
    let flag = |b: bool| (b as u32).to_string();
    let softplus = (score == ScoreFunction::SqrtSoftplus).then(|| ("SQRT_SOFTPLUS", flag(true)));
    let defines = vec![
        ("EXPERTS", experts.to_string()),
        ("TOPK", topk.to_string()),
        ("SIGMOID", flag(score != ScoreFunction::Softmax)),
        ("PRE_SOFTMAX", flag(pre)),
    ];
    defines.into_iter().chain(softplus).collect()
}

impl RouterFwd {
    fn outputs_at(&self) -> usize {
        1 + self.forced.is_some() as usize + self.expert_bias as usize + self.hash.is_some() as usize
    }
}

impl Op for RouterFwd {
    fn name(&self) -> &'static str {
        "router_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let (t, e, k) = (self.tokens, self.experts, self.topk);
        let mut args = vec![ArgSpec::read("logits", DType::F32, &[t, e])];
        if self.forced.is_some() {
            args.push(ArgSpec::read("words", DType::U32, &[WORDS]).sample(Sample::Below(1 << 16)));
        }
        if self.expert_bias {
            args.push(ArgSpec::read("bias", DType::F32, &[e]).sample(Sample::Normal(0.1)));
        }
        if self.hash.is_some() {
            args.push(ArgSpec::read("ids", DType::I32, &[t]).sample(Sample::Below(1 << 17)));
        }
        args.push(ArgSpec::write("scores", DType::F32, &[t, e]));
        args.push(ArgSpec::write("probs", DType::F32, &[t, k]));
        args.push(ArgSpec::write("index", DType::I32, &[t, k]));
        args.push(ArgSpec::write("counts", DType::I32, &[e]));
        args
    }
    /// Subtract, exponential, sum, divide: four a score; comparisons of the choice are not counted.
    fn flops(&self) -> f64 {
        4.0 * self.tokens as f64 * self.experts as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        // `index` and `counts` are exact.
        if arg >= self.outputs_at() + 2 { 0.0 } else { tolerance(DType::F32, self.experts, 0) }
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        check(self.name(), self.tokens, self.experts, self.topk)?;
        check_groups(self.name(), self.experts, self.topk, self.groups)?;
        let flag = |b: bool| (b as u32).to_string();
        let mut defines = defines(self.experts, self.topk, self.score, self.pre_softmax);
        defines.push(("FORCED", flag(self.forced.is_some())));
        defines.push(("SKEW", flag(self.skew)));
        defines.push(("BIAS", flag(self.expert_bias)));
        let Groups { count, chosen } = self.groups.unwrap_or(Groups { count: 1, chosen: 1 });
        defines.push(("GROUPS", count.to_string()));
        defines.push(("GROUPS_CHOSEN", chosen.to_string()));
        if self.first_token > 0 {
            let first = crate::ops::int_param(self.name(), "first_token", self.first_token)?;
            defines.push(("FIRST_TOKEN", first.to_string()));
        }
        let none = DevPtr(0);
        let words = if self.forced.is_some() { args[1] } else { none };
        let out = self.outputs_at();
        let hashed = usize::from(self.hash.is_some());
        // Where the hash chooses, the bias has no say: its place holds the ids.
        let bias = if self.expert_bias || hashed == 1 { args[out - 1] } else { none };
        if let Some(hash) = self.hash {
            if self.expert_bias {
                return Err(DeviceError::internal("router_fwd: a hash and a bias choose experts"));
            }
            defines.push(("HASH", format!("{}u", hash.salt)));
        }
        let rng = self.forced.unwrap_or(Rng { seed_offset: 0, draw: 0 });
        let counts = args[out + 3];
        let zero = Issue::Zero { dst: counts, bytes: self.experts * DType::I32.size() };
        if self.tokens == 0 {
            return Ok(zero);
        }
        let kernel = cuda.kernel(SOURCE, "router_fwd", &defines, 0)?;
        let config = Config::linear(self.tokens.div_ceil(TOKENS_PER_BLOCK), THREADS);
        let params = [
            Param::Ptr(args[0]),
            Param::Ptr(words),
            Param::Ptr(bias),
            Param::Ptr(args[out]),
            Param::Ptr(args[out + 1]),
            Param::Ptr(args[out + 2]),
            Param::Ptr(counts),
            Param::I32(self.tokens as i32),
            Param::F32(self.scaling.unwrap_or(1.0) as f32),
            Param::U32(rng.seed_offset),
            Param::U32(rng.draw),
        ];
        Ok(Issue::Many(vec![zero, cuda.launch(&kernel, config, &params)?]))
    }
}

impl RouterBwd {
    /// Factor of `counts[e]` in the gradient of the normalised scores.
    pub(crate) fn aux_factor(&self) -> f64 {
        let t = self.tokens.max(1) as f64;
        self.aux_scale as f64 * self.aux_coeff * self.experts as f64 / (self.topk as f64 * t * t)
    }
}

impl Op for RouterBwd {
    fn name(&self) -> &'static str {
        "router_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let (t, e, k) = (self.tokens, self.experts, self.topk);
        vec![
            ArgSpec::read("scores", DType::F32, &[t, e]).sample(Sample::Custom),
            ArgSpec::read("probs", DType::F32, &[t, k]).sample(Sample::Custom),
            ArgSpec::read("index", DType::I32, &[t, k]).sample(Sample::Custom),
            ArgSpec::read("dprobs", DType::F32, &[t, k]),
            ArgSpec::read("counts", DType::I32, &[e]).sample(Sample::Custom),
            ArgSpec::write("dlogits", DType::Bf16, &[t, e]),
        ]
    }
    /// Weighted sum, subtract, scale: four a score.
    fn flops(&self) -> f64 {
        4.0 * self.tokens as f64 * self.experts as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, self.experts, 0)
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        reference::consistent_inputs(self, seed)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        check(self.name(), self.tokens, self.experts, self.topk)?;
        if self.tokens == 0 {
            return Ok(Issue::Nothing);
        }
        // The forward kernel of the same source needs its constants too.
        let mut defines = defines(self.experts, self.topk, self.score, self.pre_softmax);
        for name in ["FORCED", "SKEW", "BIAS"] {
            defines.push((name, "0".to_string()));
        }
        for name in ["GROUPS", "GROUPS_CHOSEN"] {
            defines.push((name, "1".to_string()));
        }
        let kernel = cuda.kernel(SOURCE, "router_bwd", &defines, 0)?;
        let config = Config::linear(self.tokens.div_ceil(TOKENS_PER_BLOCK), THREADS);
        let mut params: Vec<Param> = args.iter().map(|&p| Param::Ptr(p)).collect();
        params.push(Param::I32(self.tokens as i32));
        params.push(Param::F32(self.scaling.unwrap_or(1.0) as f32));
        params.push(Param::F32(self.aux_factor() as f32));
        cuda.launch(&kernel, config, &params)
    }
}
