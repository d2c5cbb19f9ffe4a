//! Which kernels compute attention: what was asked for, and what ran.

use super::{Failure, SdpaSpec, Sdpas};
use crate::device::DeviceError;
use crate::device::cuda::prep::{DevPtr, Issue};
use std::collections::HashSet;

/// `--attention_backend`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum AttentionBackend {
    /// cuDNN where it is there and takes the shape, our own kernels otherwise, and where they were measured to be faster (short
    /// sequences; src/ops/attention/hopper.rs).
    #[default]
    Auto,
    /// cuDNN; an error where it cannot.
    Cudnn,
    Own,
}

/// What a run asks of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionChoice {
    pub backend: AttentionBackend,
    /// Same bits every time. Off: cuDNN may sum the gradient of the queries in any order. Our own kernels are
    /// deterministic in any case.
    pub deterministic: bool,
}

impl Default for AttentionChoice {
    fn default() -> Self {
        Self { backend: AttentionBackend::Auto, deterministic: true }
    }
}

/// What ran, over the launches that one executor prepared.
#[derive(Debug, Default)]
pub(in crate::device::cuda) struct AttentionUse {
    version: Option<String>,
    own: bool,
    /// A plan adds in any order.
    pub unordered: bool,
    plans: HashSet<SdpaSpec>,
    /// Device memory that cuDNN's plans took, beside the planned memory.
    pub bytes: usize,
    /// Why cuDNN did not run something that it was tried for; first reasons only, one a kind.
    pub refusals: Vec<String>,
}

impl AttentionUse {
    pub fn ran_cudnn(&self) -> bool {
        self.version.is_some()
    }

    /// Our own kernels are to run.
    pub fn took_own(&mut self) {
        self.own = true;
    }

    /// For the row: `cudnn 9.14.0`, `own`, both joined with `+`; `None` without attention.
    pub fn title(&self) -> Option<String> {
        let order = if self.unordered { " not deterministic" } else { "" };
        let cudnn = self.version.as_ref().map(|v| format!("cudnn {v}{order}"));
        let own = self.own.then(|| "own".to_owned());
        match (cudnn, own) {
            (Some(c), Some(o)) => Some(format!("{c}+{o}")),
            (c, o) => c.or(o),
        }
    }
}

/// An attention by cuDNN, or `None` when our own kernels are to run. `wanted`: the shape, or why cuDNN has no plan
/// for it. Errors: [`DeviceError::Unavailable`] where cuDNN was demanded and refuses; a broken device.
pub(in crate::device::cuda) fn choose(
    sdpas: &mut Sdpas,
    choice: AttentionChoice,
    used: &mut AttentionUse,
    wanted: Result<SdpaSpec, String>,
    args: &[DevPtr],
) -> Result<Option<Issue>, DeviceError> {
    // Without a device this only collects kernels, and all may be needed.
    if choice.backend == AttentionBackend::Own || !sdpas.is_online() {
        used.own = true;
        return Ok(None);
    }
    let called = match wanted {
        Ok(spec) => sdpas.call(&spec, args).map(|call| (spec, call)),
        Err(reason) => Err(Failure::Refused(super::CudnnError::own("attention", reason))),
    };
    match called {
        Ok((spec, call)) => {
            used.version = sdpas.version();
            used.unordered |= spec.unordered();
            if used.plans.insert(spec) {
                used.bytes += call.plan_bytes();
            }
            Ok(Some(Issue::Sdpa(call)))
        }
        Err(Failure::Device(e)) => Err(e),
        Err(Failure::Refused(e)) if choice.backend == AttentionBackend::Cudnn => {
            Err(DeviceError::Unavailable(format!(
                "--attention_backend cudnn: {e}; use auto or own, or set {} to see each step",
                super::DEBUG_VARIABLE
            )))
        }
        Err(Failure::Refused(e)) => {
            used.own = true;
            let reason = format!("attention runs on mbperf's own kernels: {e}");
            if !used.refusals.contains(&reason) {
                used.refusals.push(reason);
            }
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_title_names_what_ran() {
        let mut used = AttentionUse::default();
        assert_eq!(used.title(), None);
        used.own = true;
        assert_eq!(used.title().as_deref(), Some("own"));
        used.version = Some("9.14.0".into());
        assert_eq!(used.title().as_deref(), Some("cudnn 9.14.0+own"));
        (used.own, used.unordered) = (false, true);
        assert_eq!(used.title().as_deref(), Some("cudnn 9.14.0 not deterministic"));
    }

    #[test]
    fn without_a_device_own_kernels_are_collected() {
        let mut used = AttentionUse::default();
        let choice = AttentionChoice { backend: AttentionBackend::Cudnn, deterministic: true };
        let issue = choose(&mut Sdpas::offline(), choice, &mut used, Err("no".into()), &[]).unwrap();
        assert!(issue.is_none());
    }
}
