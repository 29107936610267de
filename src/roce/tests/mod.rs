//! Engines over a simulated network: seeded, with a fake clock.
mod credit;
mod load;
mod net;
mod recovery;
mod reliable;
mod unsignaled;
mod wire;
