//! The target's registered memory, as the device reads and writes it: the unsafe island of the benchmark.

use farside::rdma::Sge;

/// One region: the target registers its arena as a whole, once per device.
#[derive(Debug)]
pub(crate) struct Memory {
    base: *mut u8,
    len: usize,
}

impl Memory {
    /// Whoever calls this upholds the contract of [`farside::rdma::Endpoint::register`] for as long as this lives.
    pub(crate) fn new(base: *mut u8, len: usize) -> Self {
        Self { base, len }
    }

    /// Whether a work request's element lies inside.
    pub(crate) fn holds(&self, sge: &Sge) -> bool {
        let Some(offset) = sge.addr.checked_sub(self.base as u64) else { return false };
        offset <= self.len as u64 && u64::from(sge.len) <= self.len as u64 - offset
    }

    /// Places bytes at the start of a receive's element.
    pub(crate) fn write(&self, sge: &Sge, bytes: &[u8]) {
        assert!(self.holds(sge) && bytes.len() <= sge.len as usize, "{sge:?} is not the target's memory");
        // SAFETY: the range lies inside the region that was registered, which is mapped and writable (contract of `register`), and
        // its owner does not touch the memory of a posted receive.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), sge.addr as *mut u8, bytes.len()) }
    }

    /// The 16 bytes of a response.
    pub(crate) fn response(&self, sge: &Sge) -> [u8; 16] {
        assert!(self.holds(sge) && sge.len == 16, "{sge:?} is no response");
        // SAFETY: inside the region, which is mapped and readable, and its owner does not touch what is being sent.
        unsafe { std::ptr::read_unaligned(sge.addr as *const [u8; 16]) }
    }
}
