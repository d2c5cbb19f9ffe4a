//! A step as data: buffers and an ordered list of launches. Knows ops by their trait, no device.

pub mod builder;
pub mod lanes;
pub mod memory;

use crate::ops::Op;
use serde::Serialize;
use std::sync::Arc;

/// Element type of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    Bf16,
    F32,
    I32,
    /// Raw bits: RNG words, step words, digests (two words a value).
    U32,
    /// Masks and flags.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::Bf16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::U8 => 1,
        }
    }
    pub const fn is_float(self) -> bool {
        matches!(self, DType::Bf16 | DType::F32)
    }
}

/// Index of a buffer in its [`Program`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct BufId(pub u32);

/// How long the bytes of a buffer matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Lifetime {
    /// bf16 weights, set from the seed at reset, written by the optimizer.
    Weight,
    /// Master weights and moments, fp32.
    OptimizerState,
    /// Main gradients; zeroed once a step.
    MainGrad,
    /// Step, learning rate, seed, loss: survive a step.
    StepState,
    /// Written and last read within one step; the planner reuses the bytes.
    Activation,
    /// Set once from the seed at reset, read only (given inputs, rotary tables).
    Constant,
    /// Pinned host memory, target of copies that a `host_sync` launch waits for.
    Host,
}

/// How a buffer that survives a step gets its first value at reset.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// Normal(0, std) of (seed, `key`, global element index): the same for every layout of ranks.
    Normal {
        std: f64,
    },
    Const {
        value: f64,
    },
    /// These values, one an element (small parameters with a rule of their own).
    Values {
        values: Vec<f64>,
    },
    /// A view that adds nothing: its bytes are what the buffers below it say.
    Inherit,
    /// Filled with a poison pattern (NaN bytes), to be written before it is read.
    Poison,
    /// fp32 copy of another buffer (master weights of a weight), elements from `offset` on.
    CopyOf {
        source: BufId,
        offset: usize,
    },
    /// Raw words, e.g. the seed and step of the RNG tracker.
    Words {
        words: Vec<u32>,
    },
}

/// One tensor. Shapes are row-major, the last dimension contiguous.
#[derive(Debug, Clone, Serialize)]
pub struct Buffer {
    /// E.g. `layer3.attn.qkv.weight`; also the key of its random values.
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub lifetime: Lifetime,
    pub init: Init,
    /// This buffer is elements `offset..` of another (flat weights and gradients).
    pub view_of: Option<(BufId, usize)>,
    /// How a local element index maps to the index in the whole model's tensor.
    pub shard: Shard,
}

/// Where a rank's part of a weight lies in the whole tensor, so that random values do not depend on
/// the layout of ranks. Rows/cols of the tensor seen as `[rows, cols]`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Shard {
    /// Local row blocks: (first global row, rows). Empty: rows 0.. as they are.
    pub row_blocks: Vec<(usize, usize)>,
    /// First global column and the whole tensor's number of columns; `None`: all columns are local.
    pub cols: Option<(usize, usize)>,
}

impl Buffer {
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }
}

/// Part of a model step that a launch belongs to. No launch crosses a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Token generation, step words: outside every graph.
    Step,
    Embedding,
    /// The image tower, and where its features meet the decoder's tokens.
    Vision,
    Attn,
    Mlp,
    MoeRouter,
    MoePreprocess,
    MoeExperts,
    Mamba,
    /// Multi-token prediction, beside its layers.
    Mtp,
    Head,
    Loss,
    /// What arrives from and goes to other pipeline stages.
    Pipeline,
    /// Data-parallel reduction of the main gradients.
    GradReduce,
    Optimizer,
}

impl Part {
    /// Its name in profiles, traces and ranges; as it is serialised.
    pub fn name(self) -> &'static str {
        match self {
            Part::Step => "step",
            Part::Embedding => "embedding",
            Part::Vision => "vision",
            Part::Attn => "attn",
            Part::Mlp => "mlp",
            Part::MoeRouter => "moe_router",
            Part::MoePreprocess => "moe_preprocess",
            Part::MoeExperts => "moe_experts",
            Part::Mamba => "mamba",
            Part::Mtp => "mtp",
            Part::Head => "head",
            Part::Loss => "loss",
            Part::Pipeline => "pipeline",
            Part::GradReduce => "grad_reduce",
            Part::Optimizer => "optimizer",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    Forward,
    Backward,
    /// Neither: tokens, zeroing, reduction, optimizer.
    Other,
}

impl Pass {
    pub fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
            Pass::Other => "other",
        }
    }
}

/// One op with its buffers.
#[derive(Debug, Clone)]
pub struct Launch {
    pub op: Arc<dyn Op>,
    /// In the order of `op.args()`.
    pub args: Vec<BufId>,
    /// Index of the layer in the local stack; `None` outside the stack.
    pub layer: Option<usize>,
    pub part: Part,
    pub pass: Pass,
    pub micro_batch: usize,
    /// Stream: 0 is the main one.
    pub lane: usize,
    /// Launches on other lanes that must be done first.
    pub after: Vec<usize>,
    /// A copy into a TE graph's static buffers: in the graph arm only.
    pub staging: bool,
    /// Repeats a forward launch in the backward pass: real work, but no model FLOPs.
    pub recompute: bool,
}

impl Launch {
    /// Waits for the device on the host: never lies in a graph.
    pub fn host_sync(&self) -> bool {
        self.op.host_sync()
    }
}

/// What one rank does in one step.
#[derive(Debug, Clone, Default)]
pub struct Program {
    pub buffers: Vec<Buffer>,
    pub launches: Vec<Launch>,
    /// Buffers that the equality check hashes: master weights, moments, main gradients (or outputs
    /// and gradients of a bare stack).
    pub digest: Vec<BufId>,
    /// f32 scalar: mean loss of the step. `None` for a share without a loss.
    pub loss: Option<BufId>,
    /// f32 scalar: norm of the gradients before clipping.
    pub grad_norm: Option<BufId>,
    /// Transformer Engine captures a layer once for each micro-batch when there are pipeline stages, once for all
    /// otherwise (rules file, section 6).
    pub graph_per_micro_batch: bool,
    /// i32 scalars that must be 0 after a step (row overflow), each with what it means.
    pub faults: Vec<(BufId, String)>,
}

impl Program {
    /// FLOPs of a step that the model asks for: what recompute does twice counts once.
    pub fn model_flops(&self) -> f64 {
        self.launches.iter().filter(|l| !l.recompute).map(|l| l.op.model_flops()).sum()
    }
    /// Streams of a step.
    pub fn lanes(&self) -> usize {
        self.launches.iter().map(|l| l.lane + 1).max().unwrap_or(1)
    }
    pub fn buffer(&self, id: BufId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }
    /// The buffer whose memory `id` lies in, and the element offset there.
    pub fn root(&self, id: BufId) -> (BufId, usize) {
        match self.buffer(id).view_of {
            None => (id, 0),
            Some((parent, offset)) => {
                let (root, base) = self.root(parent);
                (root, base + offset)
            }
        }
    }
}
