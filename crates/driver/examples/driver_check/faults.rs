//! Mistakes on purpose: each must be an error that says what is wrong, and the context must work afterwards.

use crate::kernels::{BASIC, Kernels};
use crate::report::{Report, Result, Seen, ensure};
use flashcore_driver::*;
use std::process::{Command, ExitCode};

/// Tells this program to lose a context and report how that looked.
pub const CHILD_FLAG: &str = "--lose-the-context";

pub fn check(report: &mut Report, context: &Context, kernels: &Kernels, gpu: usize) {
    let stream = match context.stream(StreamOptions::default()) {
        Ok(stream) => stream,
        Err(error) => return report.check("a stream for what follows", || Err(error.into())),
    };
    let mut mistake = |name: &str, work: &dyn Fn() -> Result<DriverError>| {
        report.check(name, || {
            let error = work()?;
            ensure!(!error.context_is_lost(), "the context is lost: {error}");
            kernels.prove(&stream)?;
            Ok(Seen::Pass(error.to_string()))
        });
    };
    let load = |ptx: &str| Module::from_ptx(context, "wrong.ptx", ptx, &JitOptions::default());
    let refused = |result: std::result::Result<Module, DriverError>| match result {
        Ok(_) => Err("it was loaded".into()),
        Err(error) => Ok(error),
    };

    mistake("PTX with a mistake is refused with the assembler's words", &|| {
        let wrong = BASIC.replace("fma.rn.f32 %y, %a, %x, %y;", "fma.rn.f32 %y, %a, %nonsense;");
        let error = refused(load(&wrong))?;
        ensure!(error.status() == Some(Status::INVALID_PTX), "{error}");
        ensure!(error.to_string().contains("nonsense"), "the log is missing: {error}");
        Ok(error)
    });
    mistake("the linker refuses it likewise", &|| {
        let wrong = BASIC.replace("%globaltimer", "%nonsense");
        match link_ptx(context, "wrong.ptx", &wrong, &JitOptions::default()) {
            Ok(_) => Err("it was linked".into()),
            Err(error) => {
                ensure!(error.to_string().contains("nonsense"), "the log is missing: {error}");
                Ok(error)
            }
        }
    });
    mistake("text that is no PTX is refused", &|| refused(load("hello")));
    mistake("empty text is refused", &|| refused(load("")));
    mistake("PTX of a future ISA is refused with advice", &|| {
        let error = refused(load(&BASIC.replace(".version 7.0", ".version 99.0")))?;
        ensure!(error.status() == Some(Status::UNSUPPORTED_PTX_VERSION), "{error}");
        Ok(error)
    });
    mistake("PTX for another GPU's own features is refused", &|| {
        let target = if context.properties().compute_capability.major == 10 { "sm_90a" } else { "sm_100a" };
        refused(load(&format!(
            ".version 8.6\n.target {target}\n.address_size 64\n.visible .entry k() {{ ret; }}\n"
        )))
    });
    mistake("bytes that are no cubin are refused", &|| {
        refused(Module::from_cubin(context, "wrong.cubin", &[0x7f; 500]))
    });
    mistake("an ELF file of another machine is refused", &|| {
        let own = std::fs::read(std::env::current_exe()?)?;
        refused(Module::from_cubin(context, "driver_check", &own))
    });
    mistake("a kernel that is not there is named", &|| match load(BASIC)?.function("absent") {
        Ok(_) => Err("it was found".into()),
        Err(error) => Ok(error),
    });

    let launch = |kernel: &Function, config: LaunchConfig, params: &[u8]| -> Result<DriverError> {
        // SAFETY: the kernels are given no memory, and are expected to be refused.
        match unsafe { kernel.launch(&stream, &config, params) } {
            Ok(()) => Err("it was launched".into()),
            Err(error) => Ok(error),
        }
    };
    let one = LaunchConfig::new([1; 3], [32, 1, 1]);
    mistake("more shared memory than was asked for is refused", &|| {
        launch(&kernels.fill_shared, LaunchConfig { shared_bytes: 64 << 20, ..one }, &[0; 12])
    });
    mistake("more shared memory than the GPU has is refused", &|| match kernels
        .fill_shared
        .set_max_dynamic_shared(context.properties().shared_per_block_optin + 1)
    {
        Ok(()) => Err("it was allowed".into()),
        Err(error) => Ok(error),
    });
    mistake("a block of too many threads is refused", &|| {
        launch(&kernels.empty, LaunchConfig { block: [1024, 2, 1], ..one }, &[])
    });
    mistake("an empty grid is refused", &|| {
        launch(&kernels.empty, LaunchConfig { grid: [1, 0, 1], ..one }, &[])
    });
    mistake("a grid beyond the hardware's limit is refused by the driver", &|| {
        launch(&kernels.empty, LaunchConfig { grid: [1, 70_000, 1], ..one }, &[])
    });
    mistake("too few parameter bytes are refused", &|| launch(&kernels.count, one, &[0; 4]));
    mistake("too many parameter bytes are refused", &|| launch(&kernels.count, one, &[0; 16]));
    mistake("a null pointer is refused", &|| match context.require_device_pointer("q", 0, 16) {
        Ok(()) => Err("it was accepted".into()),
        Err(error) => Ok(error),
    });
    mistake("a shortage of GPU memory says how much there is", &|| match context.alloc(1 << 46) {
        Ok(_) => Err("64 TiB were allocated".into()),
        Err(error @ DriverError::OutOfMemory { free_total: Some(_), .. }) => Ok(error),
        Err(error) => Err(format!("not told as a shortage: {error}").into()),
    });
    mistake("and so does one in stream order", &|| match stream.alloc(1 << 46) {
        Ok(_) => Err("64 TiB were allocated".into()),
        Err(error @ DriverError::OutOfMemory { .. }) => Ok(error),
        Err(error) => Err(format!("not told as a shortage: {error}").into()),
    });
    mistake("too much page-locked memory is refused", &|| match context.alloc_pinned(1 << 50) {
        Ok(_) => Err("1 PiB was allocated".into()),
        Err(error) => Ok(error),
    });
    mistake("a GPU that is not there is refused", &|| match context.driver().device(999) {
        Ok(_) => Err("it was found".into()),
        Err(error) => Ok(error),
    });

    report.check("a kernel that stores to a wrong address loses its own process's context only", || {
        let child =
            Command::new(std::env::current_exe()?).args([CHILD_FLAG, "--gpu", &gpu.to_string()]).output()?;
        let text = String::from_utf8_lossy(&child.stdout).trim().to_owned();
        ensure!(
            child.status.success(),
            "the child ended with {}:\n{text}\n{}",
            child.status,
            String::from_utf8_lossy(&child.stderr)
        );
        kernels.prove(&stream)?;
        Ok(Seen::Pass(text))
    });
}

/// Stores to a wrong address. Succeeds when that is reported as a lost context, later calls say the same, and
/// everything can still be dropped.
pub fn lose_the_context(gpu: usize) -> ExitCode {
    match try_to_lose_the_context(gpu) {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn try_to_lose_the_context(gpu: usize) -> Result<String> {
    let context = Driver::load()?.device(gpu)?.context()?;
    let stream = context.stream(StreamOptions::default())?;
    let buffer = context.alloc(4096)?;
    let module = Module::from_ptx(&context, "basic.ptx", BASIC, &JitOptions::default())?;
    let poke = module.function("poke")?;
    let mut params = ParamBuffer::new();
    params.push_u64(0x10)?.push_u32(1)?;
    // SAFETY: no memory of the host is reachable at that address; the GPU faults, which is what is wanted.
    unsafe { poke.launch(&stream, &LaunchConfig::new([1; 3], [1; 3]), params.as_bytes()) }?;
    let Err(first) = stream.synchronize() else { return Err("the store to 0x10 was not noticed".into()) };
    ensure!(first.context_is_lost(), "not told as a lost context: {first}");
    let Err(second) = context.alloc(4096) else { return Err("the context still allocates".into()) };
    ensure!(second.context_is_lost(), "the second call says something else: {second}");
    drop((buffer, module, stream));
    Ok(format!("{first}\nthen: {second}"))
}
