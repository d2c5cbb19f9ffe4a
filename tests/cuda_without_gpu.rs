//! The CUDA executor on a fake driver (tests/fake_cuda), which copies, captures and replays on the host: order of
//! work, the proof of equal work, faults and cleanup, without a GPU. Kernels compute nothing here.
//!
//! The libraries are found by LD_LIBRARY_PATH, which is read when a process starts, and the answers of the driver are
//! kept for a process: so each scenario is an ignored test that the parent runs in a process of its own.

use mbperf::capture::{ArmPlan, RunPlan, Segment};
use mbperf::device::cuda::executor::{CudaExecutor, CudaOptions, launch_cost};
use mbperf::device::cuda::libraries::{self, Availability};
use mbperf::device::cuda::matmul::Layout;
use mbperf::device::inject::Inject;
use mbperf::device::{Arm, DeviceError, Executor, Phase};
use mbperf::ops::Op;
use mbperf::ops::gemm::{Accumulate, Gemm};
use mbperf::ops::step::{Copy, Zero};
use mbperf::program::builder::Builder;
use mbperf::program::{DType, Init, Lifetime, memory};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// Builds the fake libraries into `folder`; false without a C compiler. There are two NVRTC, 12.8 and 13.0.
fn build(folder: &Path) -> bool {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_cuda");
    std::fs::create_dir(folder.join("only13")).unwrap();
    [
        ("libcuda", "libcuda.so.1", "-w"),
        ("libnvrtc", "libnvrtc.so.12", "-DMAJOR=12"),
        ("libnvrtc", "libnvrtc.so.13", "-w"),
        ("libnvrtc", "only13/libnvrtc.so.13", "-w"),
        ("libcublasLt", "libcublasLt.so.13", "-w"),
    ]
    .iter()
    .all(|(source, file, define)| {
        Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-w", define, "-o"])
            .arg(folder.join(file))
            .arg(sources.join(format!("{source}.c")))
            .status()
            .is_ok_and(|s| s.success())
    })
}

/// Runs an ignored test of this file in a process that sees the fake libraries.
fn scenario(name: &str, variables: &[(&str, &str)]) {
    let folder = tempfile::tempdir().unwrap();
    if !build(folder.path()) {
        eprintln!("skipped: no C compiler");
        return;
    }
    let here = folder.path().to_string_lossy().into_owned();
    let out = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", &format!("cuda_without_gpu::{name}"), "--nocapture"])
        .env("LD_LIBRARY_PATH", folder.path())
        .env("XDG_CACHE_HOME", folder.path())
        .envs(variables.iter().map(|(k, v)| (k, v.replace("{folder}", &here))))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && text.contains("1 passed"), "{name} {variables:?}:\n{text}");
}

#[test]
fn the_driver_is_asked_without_panic() {
    for (init, version, answer) in [
        ("0", "13000", "Ready"),
        ("0", "12080", "Ready"),
        ("100", "13000", "NoDevice"),
        ("34", "13000", "NoDriver"),
        ("999", "13000", "Unusable"),
        ("0", "12040", "Unusable"),
        ("803", "13000", "Unusable"),
    ] {
        scenario(
            "child_probe",
            &[("FAKE_CUDA_INIT", init), ("FAKE_CUDA_VERSION", version), ("EXPECT", answer)],
        );
    }
}

#[test]
fn both_arms_run_and_agree() {
    scenario("child_arms", &[]);
}

/// The NVRTC of the driver's own version is taken where there are two, and the target is the newest that all accept.
#[test]
fn the_target_is_chosen_from_device_nvrtc_and_driver() {
    // The fake device is a 9.0.
    for (driver, archs, answer) in [
        ("13000", "75 80 90", "NVRTC 13.0, sm_90a"),
        ("12080", "75 80 90", "NVRTC 12.8, sm_90a"),
        ("13010", "75 80 89", "NVRTC 13.0, compute_89 for capability 9.0"),
        ("14000", "80", "NVRTC 13.0, compute_80 for capability 9.0"),
        ("13000", "100 120", "compiles for no GPU so old"),
        ("13000", "50 75", "compiles for nothing that the GPU runs"),
    ] {
        let variables = [("FAKE_CUDA_VERSION", driver), ("FAKE_NVRTC_ARCHS", archs), ("EXPECT", answer)];
        scenario("child_target", &variables);
    }
    let refused = "update the driver to one for CUDA 13.0";
    let old = [("FAKE_CUDA_VERSION", "12080"), ("MBPERF_CUDA_PATH", "{folder}/only13"), ("EXPECT", refused)];
    for more in [("FAKE_CUDA_LOAD", "200"), ("FAKE_NVRTC_ARCHS", "80")] {
        scenario("child_target", &[&old[..], &[more]].concat());
    }
}

#[test]
fn every_launch_left_out_is_found() {
    scenario("child_omissions", &[]);
}

#[test]
fn injected_faults_take_their_paths() {
    scenario("child_faults", &[]);
}

#[test]
fn failures_of_the_driver_are_told_by_phase() {
    for (call, phase) in [
        ("cuStreamEndCapture", "capture"),
        ("cuGraphInstantiateWithFlags", "instantiate"),
        ("cuGraphUpload", "upload"),
    ] {
        scenario("child_capture_fails", &[("FAKE_CUDA_FAIL", call), ("EXPECT", phase)]);
    }
    scenario("child_graph_memory", &[("FAKE_CUDA_GRAPH_OOM", "1")]);
    scenario("child_launch_fails", &[("FAKE_CUDA_FAIL", "cuLaunchKernel")]);
}

#[test]
fn real_programs_are_prepared_captured_and_proved() {
    scenario("child_programs", &[]);
}

#[test]
#[ignore = "run by the_driver_is_asked_without_panic"]
fn child_probe() {
    let answer = libraries::probe();
    let expected = std::env::var("EXPECT").unwrap();
    assert!(format!("{answer:?}").starts_with(&expected), "{answer:?}, not {expected}");
    if !matches!(answer, Availability::Ready(_)) {
        let error = CudaExecutor::new(&plan(LEN), CudaOptions::default()).unwrap_err();
        assert!(matches!(error, DeviceError::Unavailable(_)), "{error}");
    }
    let mut text = Vec::new();
    let usable = mbperf::doctor::report(&mut text).unwrap();
    assert_eq!(usable, matches!(answer, Availability::Ready(_)), "{}", String::from_utf8_lossy(&text));
}

const LEN: usize = 64 + 1;

/// Weights to activations, a product, gradients on a second lane, a layer that comes twice; in the graph arm with a
/// staging copy.
fn arm(len: usize, graphed: bool) -> ArmPlan {
    let mut b = Builder::default();
    let f32s = |b: &mut Builder, name: &str, lifetime, value| {
        b.buffer(name, DType::F32, &[len], lifetime, Init::Const { value })
    };
    let w = f32s(&mut b, "w", Lifetime::OptimizerState, 1.5);
    let out = f32s(&mut b, "out", Lifetime::OptimizerState, 0.0);
    let g = f32s(&mut b, "g", Lifetime::MainGrad, 7.0);
    let loss = b.buffer("loss", DType::F32, &[1], Lifetime::StepState, Init::Const { value: 2.5 });
    let words = Init::Words { words: vec![0] };
    let fault = b.buffer("fault", DType::I32, &[1], Lifetime::StepState, words);
    let x = b.activation("x", DType::F32, &[len]);
    let y = b.activation("y", DType::F32, &[len]);
    let [p, q, r] = ["p", "q", "r"].map(|n| b.activation(n, DType::Bf16, &[8, 8]));
    // A length off the 16-byte vectors is copied by the driver, which the fake one does; it runs no kernels.
    assert!(!(len * 4).is_multiple_of(16), "{len} elements would be copied by a kernel");
    let copy = || Copy { dtype: DType::F32, len };
    b.launch(copy(), &[w, x]);
    if graphed {
        let stage = b.activation("stage", DType::F32, &[len]);
        b.launch(copy(), &[x, stage]);
    }
    b.launch(Zero { dtype: DType::F32, len }, &[g]);
    let gemm =
        Gemm { m: 8, n: 8, k: 8, layout: Layout::Nt, batch: 1, out: DType::Bf16, accumulate: Accumulate::No };
    b.launch(gemm, &[p, q, r]);
    b.launch(copy(), &[x, g]);
    b.launch(copy(), &[x, y]);
    b.launch(copy(), &[x, y]);
    b.launch(copy(), &[y, out]);
    let mut program = b.finish().unwrap();
    program.digest = vec![out, g];
    program.loss = Some(loss);
    program.faults = vec![(fault, "more rows than the bound".into())];
    let s = usize::from(graphed);
    if graphed {
        program.launches[1].staging = true;
    }
    // Zero on the side lane after the first copy; the copy into g waits for it.
    program.launches[1 + s].lane = 1;
    program.launches[1 + s].after = vec![0];
    program.launches[3 + s].after = vec![1 + s];
    let end = program.launches.len();
    let segment = |launches, graph| Segment { launches, graph, label: format!("segment {graph:?}") };
    let (segments, captured): (Vec<Segment>, _) = if graphed {
        let list = vec![
            segment(0..1, None),
            segment(1..5, Some(0)),
            segment(5..6, Some(1)),
            segment(6..7, Some(1)),
            segment(7..8, None),
        ];
        (list, (0..end).map(|i| (1..7).contains(&i)).collect())
    } else {
        (vec![segment(0..end, None)], vec![false; end])
    };
    let memory = memory::plan(&program, &captured);
    ArmPlan { program: Arc::new(program), segments, memory }
}

fn plan(len: usize) -> RunPlan {
    RunPlan { eager: arm(len, false), graph: Some(arm(len, true)), seed: 7 }
}

fn steps(device: &mut CudaExecutor, arm: Arm, count: usize) -> Vec<(String, u64)> {
    // One step of run-ahead, as measuring does.
    let mut ahead = None;
    for _ in 0..count {
        let step = device.submit(arm).unwrap();
        assert!(step.submit_ms >= 0.0 && step.wait_ms == 0.0);
        if let Some(before) = ahead.replace(step) {
            assert_eq!(device.wait(before).unwrap().loss, Some(2.5));
        }
    }
    let done = device.wait(ahead.unwrap()).unwrap();
    assert_eq!((done.loss, done.grad_norm, done.fault), (Some(2.5), None, None));
    assert!(done.device_span_ms.unwrap() >= 0.0);
    device.digest().unwrap()
}

#[test]
#[ignore = "run by the_target_is_chosen_from_device_nvrtc_and_driver"]
fn child_target() {
    let expected = std::env::var("EXPECT").unwrap();
    let said = match CudaExecutor::new(&plan(LEN), CudaOptions::default()) {
        Ok(device) => {
            let info = device.info();
            let nvrtc = info.libraries.iter().find(|(name, _)| name == "NVRTC").map(|(_, version)| version);
            let told = info.notices.iter().any(|n| n.contains("does not know compute capability 9.0"));
            let other = if told { " for capability 9.0" } else { "" };
            assert_eq!(told, expected.contains("for capability"), "{:?}", info.notices);
            format!("NVRTC {}, {}{other}", nvrtc.unwrap(), info.kernel_target.unwrap())
        }
        Err(e) => {
            assert!(matches!(e, DeviceError::Unavailable(_)), "{e}");
            let said = e.to_string();
            for part in ["capability 9.0", "NVRTC is 13.0", "the driver is for CUDA 1"] {
                assert!(said.contains(part), "{said} lacks {part}");
            }
            said
        }
    };
    assert!(said.contains(&expected), "{said} lacks {expected}");
}

#[test]
#[ignore = "run by both_arms_run_and_agree"]
fn child_arms() {
    let plan = plan(LEN);
    let mut device = CudaExecutor::new(&plan, CudaOptions::default()).unwrap();
    device.reset().unwrap();
    let eager = steps(&mut device, Arm::Eager, 12);
    // The CPU device's hash of the same bits.
    let expected = mbperf::device::digest::digest_bits([1.5f32.to_bits(); LEN].into_iter());
    assert_eq!(eager, [("out".to_owned(), expected), ("g".to_owned(), expected)]);
    device.reset().unwrap();
    steps(&mut device, Arm::Graph, 2);
    let cost = device.capture().unwrap();
    assert_eq!((cost.graphs, cost.nodes, cost.launches_per_step), (2, 5, 3));
    assert_eq!(cost.memory_mib, Some(2.0 * 4096.0 / 1048576.0), "{}", cost.memory_note);
    assert_eq!(steps(&mut device, Arm::Graph, 10), eager);
    assert_eq!((device.launches_per_step(Arm::Eager), device.launches_per_step(Arm::Graph)), (7, 8));
    assert!(device.planned_bytes(Arm::Graph) >= device.planned_bytes(Arm::Eager));
    device.destroy_graphs().unwrap();
    let free = device.free_memory_mib().unwrap();
    for _ in 0..50 {
        device.capture().unwrap();
        assert_eq!(steps(&mut device, Arm::Graph, 1), eager);
        device.destroy_graphs().unwrap();
    }
    assert_eq!(device.free_memory_mib().unwrap(), free);
    // Buffers are read and written through the eager arm's names.
    let id = |name: &str| {
        let at = plan.eager.program.buffers.iter().position(|b| b.name == name).unwrap();
        mbperf::program::BufId(at as u32)
    };
    let values: Vec<f64> = (0..LEN).map(|i| i as f64 / 4.0).collect();
    device.write_buffer(id("w"), &values).unwrap();
    assert_eq!(device.read_f64(id("w")).unwrap(), values);
    assert!(device.write_buffer(id("w"), &values[1..]).is_err());
    assert_ne!(steps(&mut device, Arm::Eager, 1), eager);
    // A fault word is told with its meaning.
    device.write_buffer(id("fault"), &[1.0]).unwrap();
    let step = device.submit(Arm::Eager).unwrap();
    assert_eq!(device.wait(step).unwrap_err().to_string(), "more rows than the bound");
    assert!(device.wait(step).is_err(), "a step is waited for once");
    // Nobody waits: the ring is full after eight steps, and says so.
    let full = (0..9).map(|_| device.submit(Arm::Eager)).find_map(Result::err).unwrap();
    assert!(full.to_string().contains("in flight"), "{full}");
    assert_eq!(device.info().gpu_name.as_deref(), Some("Fake GPU"));
    let (own, bare) = launch_cost(&CudaOptions::default()).unwrap();
    assert!(own > 0.0 && bare > 0.0);
}

#[test]
#[ignore = "run by every_launch_left_out_is_found"]
fn child_omissions() {
    let plan = plan(LEN);
    let graph = plan.graph.as_ref().unwrap();
    let mut found = 0;
    for omit in 0..graph.program.launches.len() {
        let options = CudaOptions { omit_launch: Some(omit), ..Default::default() };
        let mut device = CudaExecutor::new(&plan, options).unwrap();
        device.reset().unwrap();
        // The second segment of a shared graph is never recorded itself; staging has no eager launch.
        let in_graph = (2..6).contains(&omit);
        match device.capture() {
            Err(DeviceError::Unequal(message)) => {
                assert!(in_graph && message.contains("segment"), "launch {omit}: {message}");
                found += 1;
            }
            Ok(_) => assert!(!in_graph, "launch {omit} was left out and not missed"),
            Err(e) => panic!("launch {omit}: {e}"),
        }
        // The stream is usable afterwards.
        steps(&mut device, Arm::Graph, 1);
    }
    assert_eq!(found, 4);
}

#[test]
#[ignore = "run by injected_faults_take_their_paths"]
fn child_faults() {
    let plan = plan(LEN);
    let device = |fault: &str| {
        let inject = Some(fault.parse::<Inject>().unwrap());
        CudaExecutor::new(&plan, CudaOptions { inject, ..Default::default() })
    };
    let capture = |fault: &str| {
        let mut d = device(fault).unwrap();
        d.reset().unwrap();
        let error = d.capture().unwrap_err();
        // A second try works, and so do eager steps.
        d.capture().unwrap();
        steps(&mut d, Arm::Graph, 2);
        error
    };
    assert!(matches!(device("prepare:driver_error").unwrap_err(), DeviceError::Driver { .. }));
    for phase in ["capture", "instantiate", "upload"] {
        let e = capture(&format!("{phase}:driver_error:2"));
        assert!(matches!(e, DeviceError::Capture { .. }), "{e}");
        let e = capture(&format!("{phase}:out_of_memory"));
        assert!(matches!(e, DeviceError::OutOfMemory { .. }), "{e}");
    }
    let e = capture("capture:wrong_result:2");
    assert!(matches!(e, DeviceError::Unequal(_)), "{e}");
    // A wrong result in a replay is seen in the digest.
    let mut d = device("steady:wrong_result").unwrap();
    d.reset().unwrap();
    d.capture().unwrap();
    let good = steps(&mut d, Arm::Graph, 1);
    d.set_phase(Phase::Steady);
    assert_ne!(steps(&mut d, Arm::Graph, 1), good);
    let mut d = device("steady:driver_error").unwrap();
    d.set_phase(Phase::Steady);
    assert!(matches!(d.submit(Arm::Graph).unwrap_err(), DeviceError::Driver { phase: Phase::Steady, .. }));
    // More than the card has.
    let e = CudaExecutor::new(&self::plan((1 << 28) + 1), CudaOptions::default()).unwrap_err();
    let text = e.to_string();
    assert!(matches!(e, DeviceError::OutOfMemory { .. }), "{text}");
    assert!(text.contains("MiB are free") && text.contains("--num_layers"), "{text}");
}

#[test]
#[ignore = "run by failures_of_the_driver_are_told_by_phase"]
fn child_capture_fails() {
    // The product is captured alone in preparation: without it, so that only the arm's graphs fail.
    let mut plan = plan(LEN);
    without_product(&mut plan);
    let mut device = CudaExecutor::new(&plan, CudaOptions::default()).unwrap();
    device.reset().unwrap();
    let e = device.capture().unwrap_err();
    let expected = std::env::var("EXPECT").unwrap();
    assert!(matches!(e, DeviceError::Capture { phase, .. } if phase.to_string() == expected), "{e}");
    steps(&mut device, Arm::Graph, 2);
    steps(&mut device, Arm::Eager, 2);
}

fn without_product(plan: &mut RunPlan) {
    for arm in [&mut plan.eager].into_iter().chain(plan.graph.as_mut()) {
        let mut program = (*arm.program).clone();
        let product = program.launches.iter_mut().find(|l| l.op.name() == "gemm").unwrap();
        product.op = Arc::new(Zero { dtype: DType::Bf16, len: 64 }) as Arc<dyn Op>;
        product.args = product.args[2..].to_vec();
        arm.program = Arc::new(program);
    }
}

#[test]
#[ignore = "run by failures_of_the_driver_are_told_by_phase"]
fn child_graph_memory() {
    let mut device = CudaExecutor::new(&plan(LEN), CudaOptions::default()).unwrap();
    device.reset().unwrap();
    let e = device.capture().unwrap_err();
    assert!(matches!(e, DeviceError::OutOfMemory { phase: Phase::Instantiate, .. }), "{e}");
    steps(&mut device, Arm::Graph, 1);
}

#[test]
#[ignore = "run by failures_of_the_driver_are_told_by_phase"]
fn child_launch_fails() {
    let e = CudaExecutor::new(&plan(LEN), CudaOptions::default()).unwrap_err();
    assert!(e.to_string().contains("cublasLtMatmul"), "{e}");
}

/// The small form of a command line's program, as `--device cpu` shrinks it, with one layer more so that graphs hand
/// over to graphs.
fn small(line: &str) -> RunPlan {
    use mbperf::workloads::{self, share::RankShare, shrink};
    let argv = std::iter::once("mbperf").chain(line.split_whitespace());
    let mbperf::args::Command::Run(args) = mbperf::args::parse(argv).unwrap() else {
        panic!("{line} is no run")
    };
    let catalogue = mbperf::recipe::Catalogue::load(None).unwrap();
    let mut cfg = mbperf::overrides::resolve(&args, &catalogue, &|_| None).unwrap().config;
    shrink::shrink(&mut cfg, shrink::Given::default());
    let chunks = cfg.parallel.pp * cfg.parallel.vp;
    let first = cfg.model.layers[0];
    let chunk = cfg.model.layers.len() / chunks;
    cfg.model.layers = [&cfg.model.layers[..chunk], &[first]].concat().repeat(chunks);
    let program = workloads::build(&cfg, &RankShare::of(&cfg).unwrap()).unwrap();
    mbperf::capture::plan(program, &cfg.graph, cfg.seed).unwrap()
}

/// Every kernel's arguments, every address and every graph of real programs: only the arithmetic is missing.
#[test]
#[ignore = "run by real_programs_are_prepared_captured_and_proved"]
fn child_programs() {
    const LLAMA: &str = "-m llama -mr llama3_8b -g h100";
    const QWEN: &str = "-m qwen -mr qwen3_30b_a3b -g h100";
    const PADDED: &str = "model.moe_token_dispatcher_type=alltoall --use_tokendrop true";
    const DROPOUT: &str = "model.attention_dropout=0.1 model.hidden_dropout=0.1";
    let lines = [
        format!("{LLAMA} --cuda_graph_scope attn {DROPOUT}"),
        format!("{LLAMA} --cuda_graph_scope attn,mlp"),
        format!("{LLAMA} --cuda_graph_impl transformer_engine"),
        format!("{LLAMA} --cuda_graph_scope full_iteration --grad_dtype fp32"),
        format!("{LLAMA} -cp 1 --stack_only --cuda_graph_scope full_iteration"),
        format!("{LLAMA} -pp 4 -cp 1 --pp_rank 1 --max_microbatches 5 --cuda_graph_scope attn,mlp {DROPOUT}"),
        format!(
            "{LLAMA} -pp 2 -vp 2 -cp 1 --pp_rank 1 --max_microbatches 3 --cuda_graph_scope full_iteration"
        ),
        format!("{QWEN} -pp 4 -ep 4 --pp_rank 1 --max_microbatches 3"),
        QWEN.to_owned(),
        format!("{QWEN} --cuda_graph_scope attn,moe_router {DROPOUT}"),
        format!(
            "{QWEN} model.moe_token_dispatcher_type=alltoall --cuda_graph_scope attn,moe_router,moe_preprocess"
        ),
        format!("{QWEN} {PADDED} --cuda_graph_impl transformer_engine --cuda_graph_scope moe"),
        format!("{QWEN} {PADDED} --cuda_graph_impl local --cuda_graph_scope full_iteration"),
    ];
    let mut failures = Vec::new();
    for line in &lines {
        let run = || -> Result<String, DeviceError> {
            let mut device = CudaExecutor::new(&small(line), CudaOptions::default())?;
            device.reset()?;
            for arm in [Arm::Eager, Arm::Graph] {
                let step = device.submit(arm)?;
                device.wait(step)?;
            }
            let cost = device.capture()?;
            for _ in 0..2 {
                let step = device.submit(Arm::Graph)?;
                device.wait(step)?;
            }
            device.digest()?;
            Ok(format!("{} graphs, {} nodes", cost.graphs, cost.nodes))
        };
        match run() {
            Ok(text) => println!("{line}: {text}"),
            Err(e) => failures.push(format!("{line}: {e}")),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
