//! Ranges for a profiler that is attached: step, layer, part, so that Nsight Systems shows the profile's names.
//!
//! No library is needed. A tool that wants ranges names its own in `NVTX_INJECTION64_PATH` before it starts the
//! program; that one is opened, given a table of slots, and fills in the functions it wants called. Without the
//! variable nothing is opened, and a launch pays the one branch of [`crate::device::host::Pacer`].

use crate::capture::ArmPlan;
use crate::device::Arm;
use crate::device::host::Watch;
use crate::device::record::Call;
use crate::program::Launch;
use libloading::os::unix::{Library as Dl, RTLD_LAZY, RTLD_LOCAL};
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Variable in which a tool names its library.
const VARIABLE: &str = "NVTX_INJECTION64_PATH";
/// The function in it that is called first.
const INITIALIZE: &[u8] = b"InitializeInjectionNvtx2";

/// Numbers of the NVTX interface (version 3): tables that a tool may ask for, groups of functions by their size (0 is
/// no function), the two functions used here, and the interface's version.
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;
const MODULES: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];
const CORE: usize = 1;
const RANGE_PUSH_A: usize = 9;
const RANGE_POP: usize = 11;
const VERSION: u32 = 3;

type Slot = AtomicPtr<c_void>;
type GetExportTable = extern "C" fn(u32) -> *const c_void;
type Initialize = unsafe extern "C" fn(GetExportTable) -> c_int;
type Push = unsafe extern "C" fn(*const c_char) -> c_int;
type Pop = unsafe extern "C" fn() -> c_int;

/// Slots for a tool's functions, and for each module the array of their addresses that the interface hands out.
struct Tables {
    slots: Vec<Vec<Slot>>,
    addresses: Vec<Vec<usize>>,
}

fn tables() -> &'static Tables {
    static TABLES: OnceLock<Tables> = OnceLock::new();
    TABLES.get_or_init(|| {
        let slots: Vec<Vec<Slot>> =
            MODULES.iter().map(|n| (0..*n).map(|_| Slot::new(std::ptr::null_mut())).collect()).collect();
        let address = |(id, slot): (usize, &Slot)| if id == 0 { 0 } else { slot.as_ptr() as usize };
        // One more entry ends each array.
        let addresses =
            slots.iter().map(|of| of.iter().enumerate().map(address).chain([0]).collect()).collect();
        Tables { slots, addresses }
    })
}

#[repr(C)]
struct Callbacks {
    struct_size: usize,
    get_module_function_table: extern "C" fn(c_int, *mut *const usize, *mut c_uint) -> c_int,
}

#[repr(C)]
struct VersionInfo {
    struct_size: usize,
    version: u32,
    reserved: u32,
    set_injection_version: extern "C" fn(u32),
}

extern "C" fn module_table(module: c_int, table: *mut *const usize, size: *mut c_uint) -> c_int {
    let module = usize::try_from(module).unwrap_or(0);
    let Some(addresses) = tables().addresses.get(module).filter(|a| a.len() > 1) else { return 0 };
    // SAFETY: the tool passes places to write to, or null for what it does not ask; the arrays live for the process.
    unsafe {
        if !table.is_null() {
            *table = addresses.as_ptr();
        }
        if !size.is_null() {
            *size = (addresses.len() - 1) as c_uint;
        }
    }
    1
}

extern "C" fn heard_version(_version: u32) {}

extern "C" fn export_table(id: u32) -> *const c_void {
    static CALLS: Callbacks =
        Callbacks { struct_size: size_of::<Callbacks>(), get_module_function_table: module_table };
    static INFO: VersionInfo = VersionInfo {
        struct_size: size_of::<VersionInfo>(),
        version: VERSION,
        reserved: 0,
        set_injection_version: heard_version,
    };
    match id {
        CALLBACKS => (&raw const CALLS).cast(),
        VERSION_INFO => (&raw const INFO).cast(),
        _ => std::ptr::null(),
    }
}

/// A tool that takes ranges.
#[derive(Debug, Clone, Copy)]
pub(super) struct Nvtx {
    push: Push,
    pop: Pop,
}

/// The tool that is attached to this process, asked once. `None`: there is none, or it takes no ranges.
pub(super) fn attached() -> Option<Nvtx> {
    static ATTACHED: OnceLock<Option<Nvtx>> = OnceLock::new();
    *ATTACHED.get_or_init(|| {
        let path = std::env::var_os(VARIABLE).filter(|p| !p.is_empty())?;
        // SAFETY: opening runs the library's initialisers; it is the tool that the user started this program under.
        let library = unsafe { Dl::open(Some(path), RTLD_LAZY | RTLD_LOCAL) }.ok()?;
        // SAFETY: the interface's one entry, of this signature.
        let initialize = unsafe { library.get::<Initialize>(INITIALIZE) }.ok().map(|f| *f)?;
        // SAFETY: as above; the function it is given is valid for the whole process.
        let taken = unsafe { initialize(export_table) } != 0;
        if !taken {
            return None;
        }
        // Its functions are called until the process ends.
        std::mem::forget(library);
        let slot = |id: usize| {
            let pointer = tables().slots.get(CORE)?.get(id)?.load(Ordering::Acquire);
            (!pointer.is_null()).then_some(pointer)
        };
        let (push, pop) = (slot(RANGE_PUSH_A)?, slot(RANGE_POP)?);
        // SAFETY: the tool put functions of these signatures there, as the interface says.
        unsafe {
            Some(Nvtx {
                push: std::mem::transmute::<*mut c_void, Push>(push),
                pop: std::mem::transmute::<*mut c_void, Pop>(pop),
            })
        }
    })
}

/// Where ranges go.
pub(super) trait Sink: std::fmt::Debug {
    fn push(&mut self, name: &CStr);
    fn pop(&mut self);
}

impl Sink for Nvtx {
    fn push(&mut self, name: &CStr) {
        // SAFETY: the tool's function, given a string that it copies before it returns.
        unsafe { (self.push)(name.as_ptr()) };
    }
    fn pop(&mut self) {
        // SAFETY: as above; every pop has its push.
        unsafe { (self.pop)() };
    }
}

/// A range's name by its place in [`Names`]; `NONE` is no range.
type Name = u32;
const NONE: Name = Name::MAX;

/// Names of the ranges of one arm, made once: nothing is formatted while a step is issued.
#[derive(Debug)]
pub(super) struct Names {
    step: CString,
    names: Vec<CString>,
    /// Layer and part of each launch and of each segment's replay.
    launches: Vec<[Name; 2]>,
    replays: Vec<[Name; 2]>,
}

impl Names {
    pub fn new(arm: Arm, plan: &ArmPlan) -> Self {
        let mut names: Vec<CString> = Vec::new();
        let mut by_text: HashMap<String, Name> = HashMap::new();
        let mut name = |text: String| -> Name {
            *by_text.entry(text.clone()).or_insert_with(|| {
                names.push(CString::new(text).unwrap_or_default());
                (names.len() - 1) as Name
            })
        };
        let layer = |l: &Launch| {
            l.layer.map(|at| format!("layer {at} {}, micro-batch {}", l.pass.name(), l.micro_batch))
        };
        let launches = &plan.program.launches;
        let of_launches = launches
            .iter()
            .map(|l| [layer(l).map_or(NONE, &mut name), name(l.part.name().to_owned())])
            .collect();
        let mut of_replays = Vec::with_capacity(plan.segments.len());
        for segment in &plan.segments {
            let inside = &launches[segment.launches.clone()];
            let first = inside.first().and_then(layer);
            let whole = first.filter(|f| inside.iter().all(|l| layer(l).as_ref() == Some(f)));
            // A graph of one layer by its parts, a larger one by its own name.
            let title = match whole {
                Some(_) => {
                    let mut parts: Vec<&str> = inside.iter().map(|l| l.part.name()).collect();
                    parts.dedup();
                    format!("graph {}", parts.join("+"))
                }
                None => format!("graph {}", segment.label),
            };
            of_replays.push([whole.map_or(NONE, &mut name), name(title)]);
        }
        let step = CString::new(format!("{arm} step")).unwrap_or_default();
        Self { step, launches: of_launches, replays: of_replays, names }
    }
}

/// Ranges of one step while it is issued; all are closed when it goes.
#[derive(Debug)]
pub(super) struct Ranges<'a> {
    names: &'a Names,
    sink: &'a mut dyn Sink,
    open: [Name; 2],
}

impl<'a> Ranges<'a> {
    pub fn new(names: &'a Names, sink: &'a mut dyn Sink) -> Self {
        sink.push(&names.step);
        Self { names, sink, open: [NONE; 2] }
    }

    /// Closes what does not go on and opens what begins: the outer level first.
    fn enter(&mut self, wanted: [Name; 2]) {
        let kept = self.open.iter().zip(&wanted).take_while(|(a, b)| a == b).count();
        for level in (kept..self.open.len()).rev() {
            if self.open[level] != NONE {
                self.sink.pop();
            }
            self.open[level] = NONE;
        }
        for (open, wanted) in self.open.iter_mut().zip(wanted).skip(kept) {
            if let Some(name) = self.names.names.get(wanted as usize) {
                self.sink.push(name);
                *open = wanted;
            }
        }
    }
}

impl Watch for Ranges<'_> {
    fn begin(&mut self, call: Call) {
        let wanted = match call {
            Call::Launch(i) => self.names.launches.get(i),
            Call::Replay(s) => self.names.replays.get(s),
        };
        self.enter(wanted.copied().unwrap_or([NONE; 2]));
    }
    fn end(&mut self, _call: Call) {}
}

impl Drop for Ranges<'_> {
    fn drop(&mut self) {
        self.enter([NONE; 2]);
        self.sink.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::plan;
    use crate::config::{GraphImpl, Scope};
    use crate::workloads::testing::{dense, program, with_graphs};

    /// Names in the order of their beginning, indented by how deep they lie.
    #[derive(Debug, Default)]
    struct Kept {
        lines: Vec<String>,
        depth: usize,
    }

    impl Sink for Kept {
        fn push(&mut self, name: &CStr) {
            self.lines.push(format!("{}{}", " ".repeat(self.depth), name.to_str().unwrap()));
            self.depth += 1;
        }
        fn pop(&mut self) {
            self.depth = self.depth.checked_sub(1).expect("a range is open");
        }
    }

    fn told(arm: Arm, plan: &ArmPlan) -> Vec<String> {
        let names = Names::new(arm, plan);
        let mut kept = Kept::default();
        let mut ranges = Ranges::new(&names, &mut kept);
        for (s, segment) in plan.segments.iter().enumerate() {
            match segment.graph {
                Some(_) => ranges.begin(Call::Replay(s)),
                None => segment.launches.clone().for_each(|l| ranges.begin(Call::Launch(l))),
            }
        }
        drop(ranges);
        assert_eq!(kept.depth, 0, "every range is closed");
        kept.lines
    }

    #[test]
    fn ranges_are_step_layer_and_part() {
        let cfg = with_graphs(dense(), GraphImpl::TransformerEngine, &[Scope::Attn]);
        let plan = plan(program(&cfg), &cfg.graph, 1).unwrap();
        let eager = told(Arm::Eager, &plan.eager);
        assert_eq!(eager[0], "eager step");
        let at = eager.iter().position(|l| l == " layer 0 forward, micro-batch 0").unwrap();
        assert_eq!(eager[at + 1..at + 3], ["  attn", "  mlp"]);
        assert_eq!(eager[at + 3], " layer 1 forward, micro-batch 0");
        assert!(
            eager.contains(&" optimizer".to_owned()) && eager.contains(&" embedding".to_owned()),
            "{eager:?}"
        );
        let graph = told(Arm::Graph, plan.graph.as_ref().unwrap());
        let at = graph.iter().position(|l| l == " layer 1 backward, micro-batch 1").unwrap();
        let of_layer: Vec<&String> = graph[at + 1..].iter().take_while(|l| l.starts_with("  ")).collect();
        assert!(of_layer.iter().any(|l| *l == "  graph attn"), "{of_layer:?}");
        assert!(of_layer.iter().any(|l| *l == "  mlp"), "{of_layer:?}");
    }

    #[test]
    fn a_graph_of_many_layers_is_one_range() {
        let cfg = with_graphs(dense(), GraphImpl::Local, &[Scope::FullIteration]);
        let plan = plan(program(&cfg), &cfg.graph, 1).unwrap();
        let graph = told(Arm::Graph, plan.graph.as_ref().unwrap());
        assert!(graph.contains(&" graph iteration".to_owned()), "{graph:?}");
        assert!(!graph.iter().any(|l| l.contains("layer")), "{graph:?}");
    }

    #[test]
    fn the_tables_are_the_interfaces() {
        let (mut table, mut size) = (std::ptr::null(), 0);
        assert_eq!(module_table(CORE as c_int, &mut table, &mut size), 1);
        assert_eq!(size, 16);
        // SAFETY: the array just handed out has one entry more than its size.
        let entries = unsafe { std::slice::from_raw_parts(table, size as usize + 1) };
        assert!(entries[0] == 0 && entries[16] == 0 && entries[1..16].iter().all(|e| *e != 0));
        assert_eq!(entries[RANGE_PUSH_A], tables().slots[CORE][RANGE_PUSH_A].as_ptr() as usize);
        for nothing in [0, -1, 7, 100] {
            assert_eq!(module_table(nothing, &mut table, &mut size), 0);
        }
        assert!(
            export_table(0).is_null() && export_table(2).is_null() && !export_table(VERSION_INFO).is_null()
        );
    }
}
