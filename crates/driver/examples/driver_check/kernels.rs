//! The kernels that run on every GPU, ready to launch.

use crate::report::{Result, ensure};
use flashcore_driver::*;

pub const BASIC: &str = include_str!("basic.ptx");
pub const HOPPER: &str = include_str!("hopper.ptx");

pub struct Kernels {
    pub axpy: Function,
    pub empty: Function,
    pub spin: Function,
    pub count: Function,
    pub fill_shared: Function,
}

impl Kernels {
    pub fn load(context: &Context) -> std::result::Result<Self, DriverError> {
        Self::of(&Module::from_ptx(context, "basic.ptx", BASIC, &JitOptions::default())?)
    }

    pub fn of(module: &Module) -> std::result::Result<Self, DriverError> {
        Ok(Self {
            axpy: module.function("axpy")?,
            empty: module.function("empty")?,
            spin: module.function("spin")?,
            count: module.function("count")?,
            fill_shared: module.function("fill_shared")?,
        })
    }

    /// Runs `y = a x + y` over a few thousand numbers and compares every one: this shows that copies, launch,
    /// parameters and results work.
    pub fn prove(&self, stream: &Stream) -> Result<()> {
        let n = 5000usize;
        let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let y: Vec<f32> = (0..n).map(|i| (i % 7) as f32).collect();
        let device_x = stream.upload_new(&x)?;
        let device_y = stream.upload_new(&y)?;
        self.queue_axpy(stream, &device_x, &device_y, 3.0, n)?;
        let got = stream.download_all::<f32>(&device_y)?;
        for i in 0..n {
            let want = 3.0 * x[i] + y[i];
            ensure!(got[i] == want, "y[{i}] is {}, not {want}", got[i]);
        }
        Ok(())
    }

    pub fn queue_axpy(
        &self,
        stream: &Stream,
        x: &DeviceBuffer,
        y: &DeviceBuffer,
        a: f32,
        n: usize,
    ) -> std::result::Result<(), DriverError> {
        let params = axpy_params(x, y, a, n)?;
        let config = LaunchConfig::new([n.div_ceil(256) as u32, 1, 1], [256, 1, 1]);
        // SAFETY: the kernel touches n numbers of each buffer; callers wait before dropping them.
        unsafe { self.axpy.launch(stream, &config, params.as_bytes()) }
    }

    pub fn queue_spin(&self, stream: &Stream, nanoseconds: u64) -> std::result::Result<(), DriverError> {
        let mut params = ParamBuffer::new();
        params.push_u64(nanoseconds)?;
        // SAFETY: touches no memory.
        unsafe { self.spin.launch(stream, &LaunchConfig::new([1; 3], [1; 3]), params.as_bytes()) }
    }
}

pub fn axpy_params(
    x: &DeviceBuffer,
    y: &DeviceBuffer,
    a: f32,
    n: usize,
) -> std::result::Result<ParamBuffer, DriverError> {
    let mut params = ParamBuffer::new();
    params.push_u64(x.address())?.push_u64(y.address())?.push_f32(a)?.push_u32(n as u32)?;
    Ok(params)
}
