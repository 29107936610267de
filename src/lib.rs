//! farside: a userspace NVMe-oF target for RDMA.

pub mod rdma;
