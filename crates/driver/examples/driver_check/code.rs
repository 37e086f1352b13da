//! PTX in, cubins out, and the attributes of a loaded kernel.

use crate::kernels::{BASIC, Kernels};
use crate::report::{Report, Seen, ensure};
use flashcore_driver::*;
use std::time::{Instant, SystemTime};

/// The same module with a comment that no cache has seen.
pub fn uncached(ptx: &str) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    format!("{ptx}\n// {now}\n")
}

/// A kernel that needs some seventy registers: it loads 64 numbers and uses the last one first.
fn wide_kernel() -> String {
    let line = |text: &dyn Fn(usize) -> String| (0..64).map(text).collect::<String>();
    format!(
        ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry wide(.param .u64 data)\n{{\n\
         .reg .b64 %data;\n.reg .f32 %v<64>, %sum;\nld.param.u64 %data, [data];\n{}mov.f32 %sum, %v63;\n{}\
         st.global.f32 [%data], %sum;\nret;\n}}\n",
        line(&|i| format!("ld.volatile.global.f32 %v{i}, [%data + {}];\n", 4 * i)),
        line(&|i| format!("fma.rn.f32 %sum, %sum, %sum, %v{};\n", 63 - i)),
    )
}

pub fn check(report: &mut Report, context: &Context) {
    report.check("PTX is assembled and its log is kept", || {
        let options = JitOptions { verbose: true, ..JitOptions::default() };
        let start = Instant::now();
        let module = Module::from_ptx(context, "basic.ptx", &uncached(BASIC), &options)?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        let log = module.log();
        ensure!(log.info.contains("axpy"), "the verbose log does not name a kernel: {log:?}");
        let axpy = module.function("axpy")?;
        let used = axpy.attributes()?;
        ensure!(used.registers > 0 && used.local_bytes == 0 && used.max_threads_per_block >= 256, "{used:?}");
        let cc = context.properties().compute_capability;
        ensure!(used.binary_version == cc.major * 10 + cc.minor, "{used:?}");
        Ok(Seen::Pass(format!(
            "{ms:.1} ms by our clock, {:?} by its own\n{used:?}\n{}",
            log.wall_ms,
            log.info.trim()
        )))
    });

    report.check("a limit on registers is kept, at the price of spills", || {
        let ptx = wide_kernel();
        let used = |options: &JitOptions| {
            Module::from_ptx(context, "wide.ptx", &ptx, options)?.function("wide")?.attributes()
        };
        let free = used(&JitOptions::default())?;
        let limited = used(&JitOptions { max_registers: Some(32), ..JitOptions::default() })?;
        ensure!(free.registers > 64 && free.local_bytes == 0, "without a limit {free:?}");
        ensure!(limited.registers <= 32 && limited.local_bytes > 0, "with a limit of 32 {limited:?}");
        let slow = used(&JitOptions { optimization: Some(0), line_info: true, ..JitOptions::default() })?;
        Ok(Seen::Pass(format!("free {free:?}\nlimited {limited:?}\nlevel 0 {slow:?}")))
    });

    report.check("a cubin comes out of the linker, loads, and computes the same", || {
        let options = JitOptions { verbose: true, ..JitOptions::default() };
        let start = Instant::now();
        let cubin = link_ptx(context, "basic.ptx", &uncached(BASIC), &options)?;
        let linked = start.elapsed().as_secs_f64() * 1e3;
        ensure!(cubin.bytes.starts_with(b"\x7fELF"), "the image starts with {:?}", &cubin.bytes[..4]);
        let start = Instant::now();
        let module = Module::from_cubin(context, "basic.cubin", &cubin.bytes)?;
        let kernels = Kernels::of(&module)?;
        let loaded = start.elapsed().as_secs_f64() * 1e3;
        kernels.prove(&context.stream(StreamOptions::default())?)?;
        let mut refused = 0;
        for cut in (0..cubin.bytes.len()).step_by(97) {
            match Module::from_cubin(context, "cut.cubin", &cubin.bytes[..cut]) {
                Err(error) if error.status() == Some(Status::INVALID_IMAGE) => refused += 1,
                other => return Err(format!("{cut} bytes of it were answered with {other:?}").into()),
            }
        }
        Ok(Seen::Pass(format!(
            "{} bytes; linked in {linked:.1} ms (its own clock {:?}), loaded in {loaded:.2} ms; {refused} cuts refused\n{}",
            cubin.bytes.len(),
            cubin.log.wall_ms,
            cubin.log.info.trim()
        )))
    });

    report.check("occupancy follows the block's size and its shared memory", || {
        let kernels = Kernels::load(context)?;
        let p = context.properties();
        let small = kernels.axpy.occupancy(256, 0, true)?;
        ensure!(small.threads_per_sm == p.max_threads_per_sm, "{small:?} of {}", p.max_threads_per_sm);
        kernels.fill_shared.set_max_dynamic_shared(p.shared_per_block_optin)?;
        let one = kernels.fill_shared.occupancy(128, p.shared_per_block_optin as usize, true)?;
        ensure!(one.blocks_per_sm == 1, "{one:?}");
        let none = kernels.fill_shared.occupancy(128, p.shared_per_sm as usize + 1, false);
        ensure!(none.as_ref().map_or(0, |fit| fit.blocks_per_sm) == 0, "too much shared memory: {none:?}");
        kernels.fill_shared.set_carve_out(CarveOut::Percent(100))?;
        kernels.fill_shared.set_carve_out(CarveOut::Default)?;
        Ok(Seen::Pass(format!("256 threads: {small:?}\nall shared memory: {one:?}\ntoo much: {none:?}")))
    });

    report.check("all the opt-in shared memory can be used", || {
        let kernels = Kernels::load(context)?;
        let stream = context.stream(StreamOptions::default())?;
        let bytes = context.properties().shared_per_block_optin;
        kernels.fill_shared.set_max_dynamic_shared(bytes)?;
        let out = stream.upload_new(&[0u32])?;
        let mut params = ParamBuffer::new();
        params.push_u64(out.address())?.push_u32(bytes / 4)?;
        let config = LaunchConfig { shared_bytes: bytes, ..LaunchConfig::new([1; 3], [256, 1, 1]) };
        // SAFETY: the kernel writes the shared memory it was given and one word of `out`.
        unsafe { kernels.fill_shared.launch(&stream, &config, params.as_bytes()) }?;
        let got = stream.download_all::<u32>(&out)?[0];
        ensure!(got == bytes / 4 - 1, "the last word held {got}");
        Ok(Seen::Pass(format!("{bytes} bytes")))
    });
}
