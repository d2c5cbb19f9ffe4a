//! What kernels are compiled for: chosen once when the device is opened, from the device, NVRTC and the driver, so that ops
//! choose their kernels for the same target. Machine code for the device's own architecture where NVRTC knows it; for a
//! device newer than NVRTC older machine code of its major version, else PTX, which the driver translates.

use super::context::Context;
use super::nvrtc;
use crate::device::DeviceError;

/// Oldest target of these kernels: bf16 tensor cores came with 8.0.
const OLDEST: u32 = 80;
/// Kernels of 9.0 use `wgmma`, which only the architecture-specific `sm_90a` has: without it 9.0 is no target.
const SPECIFIC_ONLY: u32 = 90;
/// From here on NVRTC knows an architecture-specific set, `sm_90a`.
const FIRST_SPECIFIC: u32 = 90;
/// Tegra chips, whose machine code and that of others do not run on each other (CUDA programming guide, binary
/// compatibility). 101 became 110 in CUDA 13.
const TEGRA: [u32; 4] = [87, 88, 101, 110];

/// What NVRTC is to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// Machine code.
    Cubin,
    /// Text that the driver translates when it is loaded.
    Ptx,
}

/// What every kernel of a process is compiled for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// As NVRTC names it: `sm_90a`, `sm_86`, `compute_89`.
    pub name: String,
    /// The compute capability that ops may count on, as major * 10 + minor.
    pub cc: u32,
    pub code: Code,
}

/// What has a say in the choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parties {
    /// Compute capability as major * 10 + minor.
    pub device: u32,
    /// Shared memory that the device gives one block at most, bytes.
    pub shared_bytes: usize,
    /// What NVRTC compiles for, as major * 10 + minor.
    pub supported: Vec<u32>,
    pub nvrtc: (i32, i32),
    /// CUDA version of the driver.
    pub driver: (i32, i32),
}

impl Parties {
    fn of(context: &Context) -> Result<Self, DeviceError> {
        Ok(Self {
            device: context.cc,
            shared_bytes: context.shared_bytes,
            supported: nvrtc::supported()?,
            nvrtc: nvrtc::version()?,
            driver: (context.driver_cuda / 1000, context.driver_cuda % 1000 / 10),
        })
    }

    /// The three versions, as errors name them.
    pub fn versions(&self) -> String {
        format!(
            "the GPU has compute capability {}.{}, NVRTC is {}.{}, the driver is for CUDA {}.{}",
            self.device / 10,
            self.device % 10,
            self.nvrtc.0,
            self.nvrtc.1,
            self.driver.0,
            self.driver.1
        )
    }

    /// What to do about code that the driver refuses.
    pub fn remedy(&self) -> String {
        let (driver, nvrtc) = (self.driver, self.nvrtc);
        if nvrtc > driver {
            format!(
                "update the driver to one for CUDA {}.{} or newer, or name the folder of an NVRTC {}.x up to {}.{} with \
                 --cuda_path",
                nvrtc.0, nvrtc.1, driver.0, driver.0, driver.1
            )
        } else {
            format!(
                "name the folder of an NVRTC {}.{} with --cuda_path, or update the driver",
                driver.0, driver.1
            )
        }
    }
}

/// The architecture as NVRTC names it: `sm_80` for 80; from Hopper on the architecture-specific set, `sm_90a`.
pub fn arch_name(cc: u32) -> String {
    format!("sm_{cc}{}", if cc >= FIRST_SPECIFIC { "a" } else { "" })
}

/// Shared memory that kernels for this capability may ask for a block, bytes (CUDA programming guide, technical
/// specifications per compute capability). Ops count on it, so an older target must not have more than the device.
fn shared_bytes(cc: u32) -> usize {
    match cc {
        80 | 87 => 163 << 10,
        90 | 100 | 101 | 103 | 110 => 227 << 10,
        _ => 99 << 10,
    }
}

/// The newest target that device, NVRTC and driver all accept, machine code before PTX.
///
/// # Errors
/// None fits: the three versions, and which to change.
pub fn choose_target(parties: &Parties) -> Result<Target, String> {
    let Parties { device, supported, nvrtc, driver, .. } = parties;
    let device = *device;
    if device < OLDEST {
        return Err(format!(
            "{}: these kernels need 8.0 (A100) or newer: use another GPU",
            parties.versions()
        ));
    }
    if supported.contains(&device) {
        return Ok(Target { name: arch_name(device), cc: device, code: Code::Cubin });
    }
    let oldest = supported.iter().min().copied().unwrap_or(u32::MAX);
    if device < oldest {
        return Err(format!(
            "{}: that NVRTC compiles for no GPU so old: name the folder of an older NVRTC with --cuda_path",
            parties.versions()
        ));
    }
    let usable = |cc: &&u32| {
        (OLDEST..device).contains(*cc) && **cc != SPECIFIC_ONLY && shared_bytes(**cc) <= parties.shared_bytes
    };
    let alike = |cc: &&u32| **cc / 10 == device / 10 && !TEGRA.contains(cc) && !TEGRA.contains(&device);
    if let Some(cc) = supported.iter().filter(usable).filter(alike).max() {
        return Ok(Target { name: format!("sm_{cc}"), cc: *cc, code: Code::Cubin });
    }
    match supported.iter().filter(usable).max() {
        // A driver reads the PTX of its own CUDA version and of older ones.
        Some(cc) if nvrtc <= driver => Ok(Target { name: format!("compute_{cc}"), cc: *cc, code: Code::Ptx }),
        Some(cc) => Err(format!(
            "{}: that NVRTC knows no machine code for the GPU, and its PTX (compute_{cc}) is newer than the driver: {}",
            parties.versions(),
            parties.remedy()
        )),
        None => Err(format!(
            "{}: that NVRTC compiles for nothing that the GPU runs: name the folder of a newer NVRTC, up to {}.{}, with \
             --cuda_path, or update NVRTC and driver",
            parties.versions(),
            driver.0,
            driver.1
        )),
    }
}

/// The target of an opened device, and between whom it was chosen.
///
/// # Errors
/// NVRTC is missing, or nothing fits ([`choose_target`]).
pub fn of(context: &Context) -> Result<(Target, Parties), DeviceError> {
    let parties = Parties::of(context)?;
    let target = choose_target(&parties).map_err(DeviceError::Unavailable)?;
    Ok((target, parties))
}

/// What a user should know of the choice: that it is not the device's own architecture.
pub fn notice(target: &Target, parties: &Parties) -> Option<String> {
    let how = match target.code {
        Code::Cubin => "older machine code",
        Code::Ptx => "PTX that the driver translates",
    };
    (target.cc != parties.device).then(|| {
        format!(
            "kernels are compiled for {}, {how}, since NVRTC {}.{} does not know compute capability {}.{}: times are not the \
             GPU's best; a newer NVRTC (--cuda_path) compiles for it",
            target.name,
            parties.nvrtc.0,
            parties.nvrtc.1,
            parties.device / 10,
            parties.device % 10
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `nvrtcGetSupportedArchs` gives: of 12.0, 12.8 and 13.0.
    const NVRTC_12_0: &[u32] = &[50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90];
    const NVRTC_12_8: &[u32] = &[50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 120];
    const NVRTC_13_0: &[u32] = &[75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121];

    fn parties(device: u32, supported: &[u32], nvrtc: (i32, i32), driver: (i32, i32)) -> Parties {
        Parties { device, shared_bytes: shared_bytes(device), supported: supported.into(), nvrtc, driver }
    }
    fn name(p: &Parties) -> (String, u32, Code) {
        let t = choose_target(p).unwrap_or_else(|e| panic!("{p:?}: {e}"));
        (t.name, t.cc, t.code)
    }

    #[test]
    fn the_devices_own_architecture_comes_first() {
        for (device, wanted) in
            [(80, "sm_80"), (89, "sm_89"), (90, "sm_90a"), (100, "sm_100a"), (120, "sm_120a")]
        {
            for (supported, nvrtc) in [(NVRTC_12_8, (12, 8)), (NVRTC_13_0, (13, 0))] {
                // A driver of another version too: what it refuses is told when it is loaded.
                for driver in [(12, 8), (13, 0)] {
                    let p = parties(device, supported, nvrtc, driver);
                    assert_eq!(name(&p), (wanted.into(), device, Code::Cubin));
                    assert_eq!(notice(&choose_target(&p).unwrap(), &p), None);
                }
            }
        }
    }

    #[test]
    fn a_newer_device_gets_machine_code_of_its_major_version() {
        // B300 and GB10 under NVRTC 12.8; never the specific set, which no other device runs.
        for (device, wanted, cc) in [(103, "sm_100", 100), (121, "sm_120", 120)] {
            let p = parties(device, NVRTC_12_8, (12, 8), (12, 9));
            assert_eq!(name(&p), (wanted.into(), cc, Code::Cubin));
            let said = notice(&choose_target(&p).unwrap(), &p).unwrap();
            assert!(
                said.contains(wanted) && said.contains("NVRTC 12.8") && said.contains("--cuda_path"),
                "{said}"
            );
        }
        // An RTX 40 under a made-up NVRTC: 8.0 has more shared memory a block than 8.9, and 8.7 is a Tegra.
        assert_eq!(name(&parties(89, &[80, 86, 87], (12, 0), (12, 8))).0, "sm_86");
    }

    #[test]
    fn a_device_of_a_newer_major_version_gets_ptx() {
        let p = parties(120, NVRTC_12_0, (12, 0), (12, 8));
        // Not 9.0, of which the kernels need the specific set; and 8.9 fits the 99 KiB of a 12.0.
        assert_eq!(name(&p), ("compute_89".into(), 89, Code::Ptx));
        assert!(notice(&choose_target(&p).unwrap(), &p).unwrap().contains("PTX"));
        assert_eq!(name(&parties(100, NVRTC_12_0, (12, 0), (12, 8))).0, "compute_89");
        // A device of the future.
        let future = Parties { shared_bytes: 300 << 10, ..parties(140, NVRTC_13_0, (13, 0), (14, 0)) };
        assert_eq!(name(&future), ("compute_121".into(), 121, Code::Ptx));
        // A Tegra does not run the machine code of others, but reads their PTX.
        assert_eq!(name(&parties(110, &[100, 103], (13, 0), (13, 0))).0, "compute_103");
    }

    #[test]
    fn what_fits_nobody_names_the_three_versions_and_what_to_change() {
        let refused = |p: Parties, change: &str| {
            let e = choose_target(&p).unwrap_err();
            for part in [
                format!("compute capability {}.{}", p.device / 10, p.device % 10),
                format!("NVRTC is {}.{}", p.nvrtc.0, p.nvrtc.1),
                format!("CUDA {}.{}", p.driver.0, p.driver.1),
                change.to_owned(),
            ] {
                assert!(e.contains(&part), "{e} lacks {part}");
            }
        };
        // Too old for the kernels, whatever NVRTC says.
        refused(parties(60, NVRTC_12_8, (12, 8), (12, 8)), "use another GPU");
        refused(parties(60, NVRTC_13_0, (13, 0), (13, 0)), "use another GPU");
        // Too old for a made-up NVRTC.
        refused(parties(80, &[90, 100, 120], (14, 0), (14, 0)), "an older NVRTC");
        // PTX of an NVRTC that is newer than the driver.
        refused(parties(140, NVRTC_13_0, (13, 0), (12, 8)), "update the driver to one for CUDA 13.0");
        // Nothing that it runs.
        refused(parties(100, &[75, 90], (12, 0), (12, 8)), "a newer NVRTC");
        refused(parties(100, &[], (12, 0), (12, 8)), "NVRTC");
    }

    #[test]
    fn what_to_do_follows_from_who_is_older() {
        let of = |nvrtc, driver| parties(90, NVRTC_13_0, nvrtc, driver).remedy();
        assert!(of((13, 0), (12, 8)).contains("update the driver to one for CUDA 13.0"));
        assert!(of((13, 0), (12, 8)).contains("NVRTC 12.x up to 12.8"));
        assert!(of((12, 8), (13, 0)).contains("NVRTC 13.0"));
    }

    #[test]
    fn architecture_names_carry_the_specific_set_from_hopper_on() {
        let names: Vec<String> = [80, 89, 90, 100, 120].into_iter().map(arch_name).collect();
        assert_eq!(names, ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"]);
    }
}
