//! Engines over a simulated network: seeded, with a fake clock.
mod net;
mod reliable;
mod wire;
