//! Kernels: compiled by NVRTC, cached, looked up once, launched with checked parameters.
use super::prep::{Config, KernelSource, Param};
use crate::device::DeviceError;

#[derive(Debug)]
pub struct KernelCache;
#[derive(Debug, Clone)]
pub struct Kernel;
#[derive(Debug)]
pub struct KernelLaunch;

impl KernelCache {
    pub fn get(
        &mut self,
        _source: KernelSource,
        _entry: &str,
        _defines: &[(&str, String)],
        _shared_bytes: u32,
    ) -> Result<Kernel, DeviceError> {
        Err(DeviceError::internal("not built"))
    }
}
impl Kernel {
    pub fn bind(&self, _config: Config, _params: &[Param]) -> Result<KernelLaunch, DeviceError> {
        Err(DeviceError::internal("not built"))
    }
}
