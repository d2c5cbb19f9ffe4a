//! The graphs are checked and planned for an H200 that is described, not present: cuDNN (9.8 and newer) accepts
//! graphs, chooses engines and compiles plans without a device. Leaves out what the machine has no library for.

use super::descriptor::{Descriptor, Kind, Name};
use super::engine::{Target, choose};
use super::error::CudnnError;
use super::sdpa::{Pass, SdpaSpec};
use crate::device::cuda::context::Context;
use crate::device::cuda::libraries::{self, Availability, Library, probe};

/// An H200's properties as cuDNN spells them.
const H200: &str = r#"{"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],
"regsPerBlock":65536,"multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152,
"maxSharedMemoryPerBlockOptin":232448,"reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,
"maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,"pciDeviceId":9013,"isTccDriver":0,
"supportCoopLaunch":1,"totalGlobalMem":150000000000,"smClockRateKHz":1980000,"memClockRateKHz":3201000,
"l2CacheSize":62914560,"cudaDeviceId":0,"deviceVer":900,"driverVer":13000,"deviceName":"NVIDIA H200"}"#;

/// Versions that take a device's description.
const OLDEST_DESCRIBED: usize = 90_800;

fn described() -> Result<Descriptor, CudnnError> {
    let d = Descriptor::new(Kind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, "an H200")?;
    d.set(Name::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, H200.as_bytes())?;
    d.finalize()?;
    Ok(d)
}

/// Whole tiles, tails, grouped and plain heads; the sizes of the benchmarks.
fn specs() -> Vec<SdpaSpec> {
    let mut all = Vec::new();
    for (batch, q_heads, kv_heads, seq, head_dim, head_dim_v) in [
        (1, 32, 8, 8192, 128, 128),
        (1, 32, 4, 4096, 128, 128),
        (2, 4, 4, 256, 64, 64),
        (1, 8, 2, 512, 128, 128),
        (2, 4, 2, 77, 64, 64),
        (1, 4, 4, 2, 128, 128),
        (1, 16, 16, 4096, 192, 128),
    ] {
        let scale_bits = (1.0 / (head_dim as f32).sqrt()).to_bits();
        for (pass, deterministic) in [(Pass::Forward, true), (Pass::Backward, true), (Pass::Backward, false)]
        {
            all.push(SdpaSpec {
                pass,
                batch,
                q_heads,
                kv_heads,
                seq,
                kv_seq: seq,
                causal: true,
                head_dim,
                head_dim_v,
                scale_bits,
                deterministic,
            });
        }
    }
    // Without a mask: an image tower, a rank's part of a video, cross-attention to a text, tails of both.
    for (q_heads, kv_heads, seq, kv_seq, head_dim) in
        [(16, 16, 256, 256, 72), (20, 20, 9360, 37440, 128), (20, 20, 9360, 512, 128), (4, 2, 77, 130, 64)]
    {
        let scale_bits = (1.0 / (head_dim as f32).sqrt()).to_bits();
        for pass in [Pass::Forward, Pass::Backward] {
            all.push(SdpaSpec {
                pass,
                batch: 1,
                q_heads,
                kv_heads,
                seq,
                kv_seq,
                causal: false,
                head_dim,
                head_dim_v: head_dim,
                scale_bits,
                deterministic: true,
            });
        }
    }
    all
}

/// The library's version, where it is there.
fn version() -> Option<usize> {
    libraries::ensure_cudnn().ok()?;
    // SAFETY: the library was opened just now and has the function.
    Some(unsafe { cudarc::cudnn::sys::cudnnGetVersion() })
}

#[test]
fn graphs_are_accepted() {
    let Some(version) = version().filter(|v| *v >= OLDEST_DESCRIBED) else {
        eprintln!("left out: no cuDNN of 9.8 or newer here");
        return;
    };
    for spec in specs() {
        let graph = spec.graph(version).and_then(|g| g.finish(None));
        assert!(graph.is_ok(), "{spec:?}: {graph:?}");
    }
}

#[test]
fn a_refusal_carries_the_librarys_words() {
    if version().is_none() {
        eprintln!("left out: no cuDNN here");
        return;
    }
    // A tensor without extents.
    let d = Descriptor::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR, "an empty tensor").unwrap();
    let error = d.finalize().unwrap_err().to_string();
    assert!(error.contains("finalize of an empty tensor: CUDNN_STATUS_BAD_PARAM"), "{error}");
}

#[test]
fn plans_are_built_for_a_described_h200() {
    // Compiled kernels are handed to the driver: it must be there, and not for another kind of device.
    let driver = libraries::find(Library::Driver).is_ok();
    let other = matches!(probe(), Availability::Ready(_)) && Context::open(0).is_ok_and(|c| c.cc != 90);
    let version = version().filter(|v| *v >= OLDEST_DESCRIBED && driver && !other);
    let Some(version) = version else {
        eprintln!("left out: needs cuDNN of 9.8 or newer and a driver");
        return;
    };
    let device = described().unwrap();
    let target = Target::Described(&device);
    for spec in specs() {
        let engine = spec.graph(version).and_then(|g| g.finish(target.handle()));
        let engine = engine.and_then(|g| choose(g, &target));
        match engine {
            Ok(e) => eprintln!("{spec:?}: {} bytes, {}", e.workspace_bytes, e.plan.label),
            // Unlike widths came late: our own kernels run where there is no plan.
            Err(e) if spec.head_dim != spec.head_dim_v => eprintln!("{spec:?}: no plan, {e}"),
            Err(e) => panic!("{spec:?}: {e}"),
        }
    }
}
