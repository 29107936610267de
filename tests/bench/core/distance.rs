//! How far apart two CPUs are at this moment: the time in which a cache line goes from one to the other and back.
//!
//! A hypervisor may move virtual CPUs between near and far cores while measurements run, and all that crosses cores then takes
//! up to twice as long. Whoever compares such figures looks here before and after each, and keeps those of equal distance.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use crate::run::pin;

/// Round trips of one sample; samples.
const TRIPS: u32 = 1000;
const SAMPLES: u32 = 200;

/// Median round trip between two CPUs in nanoseconds.
pub(crate) fn distance(one: usize, other: usize) -> Result<f64, String> {
    let line = AtomicU32::new(0);
    let wait = |value: u32| {
        while line.load(Ordering::Acquire) != value {
            std::hint::spin_loop();
        }
    };
    std::thread::scope(|scope| {
        let echo = scope.spawn(|| {
            let pinned = pin(other);
            for trip in 0..TRIPS * SAMPLES {
                wait(2 * trip + 1);
                line.store(2 * trip + 2, Ordering::Release);
            }
            pinned
        });
        let pinned = pin(one);
        let mut samples: Vec<f64> = (0..SAMPLES)
            .map(|sample| {
                let start = Instant::now();
                for trip in sample * TRIPS..(sample + 1) * TRIPS {
                    line.store(2 * trip + 1, Ordering::Release);
                    wait(2 * trip + 2);
                }
                start.elapsed().as_nanos() as f64 / f64::from(TRIPS)
            })
            .collect();
        pinned.and(echo.join().map_err(|_| "the other thread panicked".to_string())?)?;
        samples.sort_by(f64::total_cmp);
        Ok(samples[samples.len() / 2])
    })
}
