//! What a launch costs when there is nothing to compute: the floor under every call.
#![allow(unsafe_code)] // A launch is unsafe by nature; the kernel here has no parameters and touches nothing.

use std::time::Instant;

use flashcore_driver::{DriverError, Event, EventKind, JitOptions, LaunchConfig, Module};

use super::Cuda;
use crate::Result;

const PTX: &str = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry empty() { ret; }\n";

/// Samples of an empty kernel's launch, in microseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LaunchFloor {
    /// The host's time for a launch.
    pub host_us: Vec<f64>,
    /// From an event before the launch to one after it.
    pub call_us: Vec<f64>,
}

impl Cuda {
    /// Launches an empty kernel so many times, and says how long that took.
    #[doc(hidden)]
    pub fn launch_floor(&self, launches: usize) -> Result<LaunchFloor> {
        self.measure_floor(launches).map_err(|error| self.error(&error))
    }

    fn measure_floor(&self, launches: usize) -> Result<LaunchFloor, DriverError> {
        let context = self.context();
        let kernel = Module::from_ptx(context, "empty", PTX, &JitOptions::default())?.function("empty")?;
        let stream = self.stream();
        let config = LaunchConfig::new([64, 1, 1], [128, 1, 1]);
        // SAFETY: the kernel takes no parameters and touches no memory.
        let launch = || unsafe { kernel.launch(stream, &config, &[]) };
        let (start, end) = (Event::new(context, EventKind::Timing)?, Event::new(context, EventKind::Timing)?);
        launch()?;
        stream.synchronize()?;
        let mut floor = LaunchFloor::default();
        for _ in 0..launches {
            start.record(stream)?;
            let before = Instant::now();
            launch()?;
            floor.host_us.push(before.elapsed().as_secs_f64() * 1e6);
            end.record(stream)?;
            stream.synchronize()?;
            floor.call_us.push(f64::from(end.ms_since(&start)?) * 1e3);
        }
        Ok(floor)
    }
}
