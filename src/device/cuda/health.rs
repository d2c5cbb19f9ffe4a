//! State of the card, read through NVML by UUID. Everything is optional: a container may hide any of it.

use crate::device::Health;
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use std::ffi::OsStr;

/// An opened NVML and the device asked about.
#[derive(Debug)]
pub(super) struct Monitor {
    nvml: Option<Nvml>,
    uuid: String,
}

impl Monitor {
    pub fn new(uuid: &str) -> Self {
        // The versioned name comes with the driver, the bare one only with a toolkit.
        let nvml = Nvml::builder().lib_path(OsStr::new("libnvidia-ml.so.1")).init().ok();
        Self { nvml, uuid: uuid.to_owned() }
    }

    /// E.g. `580.159.04`.
    pub fn driver_version(&self) -> Option<String> {
        self.nvml.as_ref()?.sys_driver_version().ok()
    }

    pub fn read(&self) -> Health {
        let device = self.nvml.as_ref().and_then(|n| n.device_by_uuid(self.uuid.as_str()).ok());
        let Some(device) = device else { return Health::default() };
        let watts = |milliwatts: u32| milliwatts as f64 / 1e3;
        // Our own context is on the list too, under whatever number this process has outside a container.
        let others = device.running_compute_processes().ok().map(|p| p.len().saturating_sub(1));
        Health {
            sm_clock_mhz: device.clock_info(Clock::SM).ok().map(f64::from),
            temperature_c: device.temperature(TemperatureSensor::Gpu).ok().map(f64::from),
            power_w: device.power_usage().ok().map(watts),
            power_limit_w: device.enforced_power_limit().ok().map(watts),
            throttle_reasons: device.current_throttle_reasons().ok().map(reasons),
            other_processes: others,
        }
    }
}

/// Names joined with `+`; an idle GPU is not a throttled one.
fn reasons(reasons: ThrottleReasons) -> String {
    let names: Vec<String> = reasons
        .difference(ThrottleReasons::GPU_IDLE)
        .iter_names()
        .map(|(name, _)| name.to_ascii_lowercase())
        .collect();
    names.join("+")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_named_and_idle_is_none() {
        assert_eq!(reasons(ThrottleReasons::GPU_IDLE), "");
        let both = ThrottleReasons::SW_POWER_CAP | ThrottleReasons::GPU_IDLE | ThrottleReasons::HW_SLOWDOWN;
        assert_eq!(reasons(both), "sw_power_cap+hw_slowdown");
    }

    #[test]
    fn without_nvml_nothing_is_known() {
        let monitor = Monitor { nvml: None, uuid: "GPU-0".into() };
        assert_eq!(monitor.read(), Health::default());
        assert_eq!(monitor.driver_version(), None);
    }
}
