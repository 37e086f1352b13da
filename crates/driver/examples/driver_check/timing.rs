//! What calls cost on the host: what the time of a warm call of the library is made of.

use crate::code::uncached;
use crate::kernels::{BASIC, Kernels};
use crate::report::{Report, Result, Seen};
use flashcore_driver::*;
use std::time::Instant;

/// The median time of one call in nanoseconds. Calls come in batches short enough for the GPU's queue, with a
/// wait in between, so that none of them has to wait for a place.
fn median_ns(stream: &Stream, mut call: impl FnMut() -> std::result::Result<(), DriverError>) -> Result<f64> {
    const BATCH: u32 = 100;
    let mut batches = Vec::new();
    for _ in 0..60 {
        let start = Instant::now();
        for _ in 0..BATCH {
            call()?;
        }
        batches.push(start.elapsed().as_nanos() as f64 / f64::from(BATCH));
        stream.synchronize()?;
    }
    batches.sort_by(f64::total_cmp);
    Ok(batches[batches.len() / 2])
}

pub fn check(report: &mut Report, context: &Context, kernels: &Kernels) {
    let mut numbers = Vec::new();
    report.check("the cost of calls on the host", || {
        numbers = measure(context, kernels)?;
        Ok(Seen::Pass("medians of 60 batches of 100 calls".into()))
    });
    for (name, value) in numbers {
        report.measure(name, value);
    }
}

fn measure(context: &Context, kernels: &Kernels) -> Result<Vec<(&'static str, f64)>> {
    let stream = context.stream(StreamOptions::default())?;
    let mut numbers = Vec::new();
    let plain = LaunchConfig::new([1; 3], [32, 1, 1]);
    let (_, greatest) = context.stream_priorities()?;
    let attributed = LaunchConfig { priority: Some(greatest), ..plain };
    let x = stream.upload_new(&[0.0f32; 256])?;
    let y = stream.upload_new(&[0.0f32; 256])?;

    // SAFETY: the kernel touches nothing.
    let empty = |config: &LaunchConfig| unsafe { kernels.empty.launch(&stream, config, &[]) };
    numbers.push(("launch_ns, context pushed by each call", median_ns(&stream, || empty(&plain))?));
    let bound = context.bind_to_thread()?;
    numbers.push(("launch_ns, bound thread", median_ns(&stream, || empty(&plain))?));
    numbers.push(("launch_with_attribute_ns, bound thread", median_ns(&stream, || empty(&attributed))?));
    let with_params = || kernels.queue_axpy(&stream, &x, &y, 1.0, 256);
    numbers.push(("launch_with_parameters_ns, bound thread", median_ns(&stream, with_params)?));
    let graph = stream.capture::<DriverError>(CaptureMode::ThreadLocal, |_| empty(&plain))?;
    let exec = graph.instantiate()?;
    exec.upload(&stream)?;
    // SAFETY: the graph holds one kernel that touches nothing.
    numbers.push(("graph_launch_ns, bound thread", median_ns(&stream, || unsafe { exec.launch(&stream) })?));
    let event = Event::new(context, EventKind::Timing)?;
    numbers.push(("event_record_ns, bound thread", median_ns(&stream, || event.record(&stream))?));
    let status = || stream.capture_status().map(drop);
    numbers.push(("capture_status_ns, bound thread", median_ns(&stream, status)?));
    let info = || context.require_device_pointer("x", x.address(), 16);
    numbers.push(("pointer_check_ns, bound thread", median_ns(&stream, info)?));
    if context.properties().memory_pools {
        numbers.push((
            "stream_alloc_and_free_ns, bound thread",
            median_ns(&stream, || stream.alloc(4096).map(drop))?,
        ));
    }
    // SAFETY: as above.
    let borrow = || unsafe { Stream::borrow_raw(context, stream.as_raw()) }.map(drop);
    numbers.push(("stream_borrow_ns, bound thread", median_ns(&stream, borrow)?));
    drop(bound);

    let (start, end) = (Event::new(context, EventKind::Timing)?, Event::new(context, EventKind::Timing)?);
    let mut spans = Vec::new();
    for _ in 0..50 {
        start.record(&stream)?;
        empty(&plain)?;
        end.record(&stream)?;
        end.synchronize()?;
        spans.push(f64::from(end.ms_since(&start)?) * 1e3);
    }
    spans.sort_by(f64::total_cmp);
    numbers.push(("empty_kernel_us, between events", spans[spans.len() / 2]));

    let ms = |start: Instant| start.elapsed().as_secs_f64() * 1e3;
    let start = Instant::now();
    let cubin = link_ptx(context, "basic.ptx", &uncached(BASIC), &JitOptions::default())?;
    numbers.push(("link_ms, five small kernels", ms(start)));
    let start = Instant::now();
    let module = Module::from_cubin(context, "basic.cubin", &cubin.bytes)?;
    Kernels::of(&module)?;
    numbers.push(("cubin_load_ms", ms(start)));
    Ok(numbers)
}
