pub struct Share;
impl Share { pub fn from_rank_0(&self, _what:&str, make: impl FnOnce()->Result<Vec<u8>, crate::device::DeviceError>) -> Result<Vec<u8>, crate::device::DeviceError> { make() } }
