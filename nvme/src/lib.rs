//! The NVMe over Fabrics protocol and controller.
#![forbid(unsafe_code)]
