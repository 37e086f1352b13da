//! Capture and replay.

use crate::kernels::{BASIC, Kernels};
use crate::report::{Report, Seen, ensure};
use flashcore_driver::*;

pub fn check(report: &mut Report, context: &Context, kernels: &Kernels) {
    report.check("captured work runs when replayed, and only then", || {
        let stream = context.stream(StreamOptions::default())?;
        let n = 1000;
        let x = stream.upload_new(&vec![1.0f32; n])?;
        let y = stream.upload_new(&vec![0.0f32; n])?;
        let mut back = context.alloc_pinned(n * 4)?;
        let mut during = CaptureStatus::None;
        let graph = stream.capture::<DriverError>(CaptureMode::ThreadLocal, |stream| {
            during = stream.capture_status()?;
            kernels.queue_axpy(stream, &x, &y, 2.0, n)?;
            kernels.queue_axpy(stream, &x, &y, 0.5, n)?;
            // SAFETY: `back` lives until the last replay has been waited for, and is read only then.
            unsafe { stream.download_async(&y, 0, &mut back) }
        })?;
        ensure!(during == CaptureStatus::Active, "while captured the stream said {during:?}");
        ensure!(stream.capture_status()? == CaptureStatus::None, "the capture did not end");
        ensure!(graph.node_count()? == 3, "{} nodes", graph.node_count()?);
        ensure!(stream.download_all::<f32>(&y)? == vec![0.0; n], "something ran while it was captured");
        let exec = graph.instantiate()?;
        drop(graph);
        exec.upload(&stream)?;
        for _ in 0..100 {
            // SAFETY: the buffers live.
            unsafe { exec.launch(&stream) }?;
        }
        stream.synchronize()?;
        ensure!(
            back.as_slice::<f32>().iter().all(|v| *v == 250.0),
            "after 100 replays: {}",
            back.as_slice::<f32>()[0]
        );
        Ok(Seen::Pass("100 replays of 3 nodes".into()))
    });

    report.check("a launch with attributes can be captured", || {
        if context.properties().compute_capability.major < 9 {
            return Ok(Seen::Skip("programmatic launches need compute capability 9.0".into()));
        }
        let stream = context.stream(StreamOptions::default())?;
        let counter = stream.upload_new(&[0u32])?;
        let mut params = ParamBuffer::new();
        params.push_u64(counter.address())?;
        let config = LaunchConfig { programmatic: true, ..LaunchConfig::new([1; 3], [32, 1, 1]) };
        let graph = stream.capture::<DriverError>(CaptureMode::Global, |stream| {
            for _ in 0..3 {
                // SAFETY: the counter lives until the replays have been waited for.
                unsafe { kernels.count.launch(stream, &config, params.as_bytes()) }?;
            }
            Ok(())
        })?;
        let exec = graph.instantiate()?;
        for _ in 0..10 {
            // SAFETY: as above.
            unsafe { exec.launch(&stream) }?;
        }
        let total = stream.download_all::<u32>(&counter)?[0];
        ensure!(total == 3 * 32 * 10, "counted {total}");
        Ok(Seen::Pass(format!("{} nodes", graph.node_count()?)))
    });

    report.check("a forbidden call spoils a capture, and the stream works again after it", || {
        let stream = context.stream(StreamOptions::default())?;
        let waited = stream.capture::<DriverError>(CaptureMode::Global, Stream::synchronize);
        let Err(waited) = waited else { return Err("waiting inside a capture was allowed".into()) };
        ensure!(stream.capture_status()? == CaptureStatus::None, "the capture did not end");
        let allocated =
            stream.capture::<DriverError>(CaptureMode::Global, |_| context.alloc(1 << 20).map(drop));
        let allocated = match allocated {
            Ok(_) => "allowed".to_owned(),
            Err(error) => error.to_string(),
        };
        ensure!(stream.capture_status()? == CaptureStatus::None, "the capture did not end");
        let default = context.default_stream().capture::<DriverError>(CaptureMode::Relaxed, |_| Ok(()));
        let Err(default) = default else { return Err("the default stream could be captured".into()) };
        kernels.prove(&stream)?;
        Ok(Seen::Pass(format!("waiting: {waited}\nallocating: {allocated}\ndefault stream: {default}")))
    });

    report.check("a module can be loaded and memory allocated beside a capture", || {
        let stream = context.stream(StreamOptions::default())?;
        let x = stream.upload_new(&[1.0f32; 64])?;
        let y = stream.upload_new(&[0.0f32; 64])?;
        let mut made = None;
        let graph = stream.capture::<DriverError>(CaptureMode::Global, |stream| {
            made = Some(context.with_relaxed_capture(|| {
                let module = Module::from_ptx(context, "basic.ptx", BASIC, &JitOptions::default())?;
                Ok::<_, DriverError>((Kernels::of(&module)?, context.alloc(4096)?))
            })??);
            match &made {
                Some((fresh, _)) => fresh.queue_axpy(stream, &x, &y, 5.0, 64),
                None => Ok(()),
            }
        })?;
        let exec = graph.instantiate()?;
        // SAFETY: buffers and module live until the download.
        unsafe { exec.launch(&stream) }?;
        ensure!(stream.download_all::<f32>(&y)? == [5.0; 64], "the replay gave something else");
        Ok(Seen::Pass(String::new()))
    });

    report.check("memory allocated in a capture belongs to the graph", || {
        if !context.properties().memory_pools {
            return Ok(Seen::Skip("this GPU has no memory pools".into()));
        }
        let stream = context.stream(StreamOptions::default())?;
        let mut out = stream.upload_new(&[0u32; 256])?;
        let graph = stream.capture::<DriverError>(CaptureMode::Global, |stream| {
            let mut scratch = stream.alloc(1024)?;
            stream.fill_words(&mut scratch, 0, 256, 77)?;
            stream.copy(&mut out, 0, &scratch, 0, 1024)
        })?;
        let exec = graph.instantiate()?;
        for _ in 0..3 {
            // SAFETY: `out` lives.
            unsafe { exec.launch(&stream) }?;
        }
        ensure!(stream.download_all::<u32>(&out)? == [77; 256], "the replay gave something else");
        Ok(Seen::Pass(format!("{} nodes: allocate, fill, copy, free", graph.node_count()?)))
    });
}
