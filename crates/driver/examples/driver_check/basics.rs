//! Memory, pointers, streams, events, threads.

use crate::kernels::{Kernels, axpy_params};
use crate::report::{Report, Seen, ensure};
use flashcore_driver::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes in use before anything was allocated.
static USED_AT_START: AtomicUsize = AtomicUsize::new(0);

fn used(context: &Context) -> Result<usize, DriverError> {
    let (free, total) = context.memory_info()?;
    Ok(total - free)
}

pub fn check(report: &mut Report, context: &Context) {
    report.check("the properties make sense", || {
        let p = context.properties();
        let (free, total) = context.memory_info()?;
        ensure!(
            p.sm_count > 0 && p.registers_per_sm >= 65536,
            "{} SMs, {} registers",
            p.sm_count,
            p.registers_per_sm
        );
        ensure!(
            p.shared_per_block_optin >= p.shared_per_block,
            "opt-in shared memory is smaller than the usual"
        );
        ensure!(p.uuid.len() == 40 && !p.uuid.ends_with("000000000000"), "uuid {}", p.uuid);
        ensure!(
            free <= total && total as u64 <= p.memory_bytes,
            "{free} of {total} free, {} in all",
            p.memory_bytes
        );
        ensure!(
            context.driver().symbol_source() == "cuGetProcAddress_v2"
                || context.driver().version().major() < 12,
            "a driver of CUDA 12 or later has cuGetProcAddress_v2"
        );
        USED_AT_START.store(used(context)?, Ordering::Relaxed);
        Ok(Seen::Pass(format!("{free} of {total} bytes free")))
    });

    report.check("bytes survive the way to the GPU and back", || {
        let stream = context.stream(StreamOptions::default())?;
        let mut sizes = 0;
        for n in [1usize, 3, 255, 256, 1 << 20, (1 << 24) + 5] {
            let source: Vec<u8> = (0..n).map(|i| (i * 31 % 251) as u8).collect();
            let buffer = stream.upload_new(&source)?;
            ensure!(buffer.address().is_multiple_of(256), "{n} bytes lie at {:#x}", buffer.address());
            ensure!(stream.download_all::<u8>(&buffer)? == source, "{n} bytes came back changed");
            sizes += 1;
        }
        let empty = stream.upload_new::<u8>(&[])?;
        ensure!(stream.download_all::<u8>(&empty)?.is_empty(), "nothing became something");
        Ok(Seen::Pass(format!("{sizes} sizes")))
    });

    report.check("stream-ordered memory, fills and copies on the GPU", || {
        if !context.properties().memory_pools {
            return Ok(Seen::Skip("this GPU has no memory pools".into()));
        }
        let stream = context.stream(StreamOptions::default())?;
        for round in 0..50u32 {
            let mut a = stream.alloc(4096)?;
            let mut b = stream.alloc(4096)?;
            stream.fill_words(&mut a, 0, 1024, 0xdead_0000 + round)?;
            stream.fill_bytes(&mut a, 4, 4, round as u8)?;
            stream.copy(&mut b, 2048, &a, 0, 2048)?;
            stream.fill_bytes(&mut b, 0, 2048, 0)?;
            let got = stream.download_all::<u32>(&b)?;
            ensure!(got[..512].iter().all(|w| *w == 0), "the fill with zeros is not there");
            ensure!(
                got[512] == 0xdead_0000 + round && got[514] == got[512],
                "round {round}: {:#x}",
                got[512]
            );
            ensure!(got[513] == u32::from_ne_bytes([round as u8; 4]), "round {round}: {:#x}", got[513]);
        }
        Ok(Seen::Pass("50 rounds".into()))
    });

    report.check("page-locked memory copies in both directions", || {
        let stream = context.stream(StreamOptions::default())?;
        let mut there = context.alloc_pinned(1 << 22)?;
        let mut back = context.alloc_pinned(1 << 22)?;
        ensure!(there.as_slice::<u64>().iter().all(|w| *w == 0), "it does not start at zero");
        for (i, word) in there.as_mut_slice::<u32>().iter_mut().enumerate() {
            *word = i as u32;
        }
        let mut buffer = context.alloc(1 << 22)?;
        // SAFETY: both live until the wait below.
        unsafe {
            stream.upload_async(&mut buffer, 0, &there)?;
            stream.download_async(&buffer, 0, &mut back)?;
        }
        stream.synchronize()?;
        ensure!(there.as_slice::<u32>() == back.as_slice::<u32>(), "the bytes came back changed");
        Ok(Seen::Pass("4 MiB".into()))
    });

    report.check("an address is recognised for what it is", || {
        let stream = context.stream(StreamOptions::default())?;
        let own = context.alloc(4096)?;
        let pinned = context.alloc_pinned(4096)?;
        let host = vec![0u8; 4096];
        let gpu = context.device().ordinal();
        let info = context.pointer_info(own.address() + 128)?;
        ensure!(
            info.kind == MemoryKind::Device && info.device == Some(gpu) && info.in_this_context,
            "own: {info:?}"
        );
        ensure!(
            info.range.is_some_and(|(start, size)| start == own.address() && size >= 4096),
            "own: {info:?}, allocated at {:#x}",
            own.address()
        );
        let mut seen = vec![format!("own {info:?}")];
        if context.properties().memory_pools {
            let pooled = stream.alloc(4096)?;
            stream.synchronize()?;
            let info = context.pointer_info(pooled.address())?;
            ensure!(info.kind == MemoryKind::Device && info.device == Some(gpu), "pooled: {info:?}");
            context.require_device_pointer("pooled", pooled.address(), 16)?;
            seen.push(format!("pooled {info:?}"));
        }
        let info = context.pointer_info(pinned.address())?;
        ensure!(info.kind == MemoryKind::PinnedHost, "pinned: {info:?}");
        seen.push(format!("pinned {info:?}"));
        let info = context.pointer_info(host.as_ptr().addr() as u64)?;
        ensure!(info.kind == MemoryKind::Unknown && info.device.is_none(), "host: {info:?}");
        context.require_device_pointer("own", own.address(), 256)?;
        let faults = [
            (0, 16, PointerFault::Null),
            (own.address() + 2, 16, PointerFault::Misaligned(16)),
            (pinned.address(), 16, PointerFault::PinnedHost),
            (host.as_ptr().addr() as u64 & !15, 16, PointerFault::NotCuda),
            (0x10_0000_0000, 16, PointerFault::NotCuda),
        ];
        for (address, align, expected) in faults {
            match context.require_device_pointer("q", address, align) {
                Err(error @ DriverError::Pointer { fault, .. }) if fault == expected => {
                    seen.push(error.to_string());
                }
                other => return Err(format!("{address:#x}: expected {expected:?}, got {other:?}").into()),
            }
        }
        Ok(Seen::Pass(seen.join("\n")))
    });

    report.check("a pointer and a stream of another GPU are refused", || {
        let driver = context.driver();
        let here = context.device().ordinal();
        let Some(there) = (0..driver.device_count()?).find(|ordinal| *ordinal != here) else {
            return Ok(Seen::Skip("there is only one GPU".into()));
        };
        let other = driver.device(there)?.context()?;
        let buffer = other.alloc(256)?;
        let stream = other.stream(StreamOptions::default())?;
        let pointer = context.require_device_pointer("q", buffer.address(), 16);
        ensure!(
            matches!(pointer, Err(DriverError::Pointer { fault: PointerFault::OtherDevice(n), .. }) if n == there),
            "{pointer:?}"
        );
        // SAFETY: the stream lives.
        let borrowed = unsafe { Stream::borrow_raw(context, stream.as_raw()) };
        ensure!(matches!(borrowed, Err(DriverError::ForeignStream { .. })), "{borrowed:?}");
        Ok(Seen::Pass(String::new()))
    });
}

pub fn check_with_kernels(report: &mut Report, context: &Context, kernels: &Kernels) {
    report.check(
        "a kernel computes what it should, in own, borrowed, default and prioritised streams",
        || {
            let (least, greatest) = context.stream_priorities()?;
            let own = context.stream(StreamOptions::default())?;
            kernels.prove(&own)?;
            // SAFETY: `own` outlives the borrow.
            kernels.prove(&unsafe { Stream::borrow_raw(context, own.as_raw()) }?)?;
            kernels.prove(&context.default_stream())?;
            kernels.prove(&context.stream(StreamOptions { waits_for_default: true, priority: 0 })?)?;
            let urgent = context.stream(StreamOptions { priority: greatest, ..StreamOptions::default() })?;
            ensure!(urgent.priority()? == greatest, "priority {} instead of {greatest}", urgent.priority()?);
            kernels.prove(&urgent)?;
            Ok(Seen::Pass(format!("priorities {least} to {greatest}")))
        },
    );

    report.check("a launch with a priority of its own", || {
        let stream = context.stream(StreamOptions::default())?;
        let (_, greatest) = context.stream_priorities()?;
        let config = LaunchConfig { priority: Some(greatest), ..LaunchConfig::new([1; 3], [32, 1, 1]) };
        // SAFETY: the kernel touches nothing.
        unsafe { kernels.empty.launch(&stream, &config, &[]) }?;
        stream.synchronize()?;
        Ok(Seen::Pass(format!("priority {greatest}, through cuLaunchKernelEx")))
    });

    report.check("the parameters' bytes may lie anywhere on the host", || {
        let stream = context.stream(StreamOptions::default())?;
        let x = stream.upload_new(&[1.0f32; 64])?;
        let y = stream.upload_new(&[2.0f32; 64])?;
        let params = axpy_params(&x, &y, 4.0, 64)?;
        ensure!(
            kernels.axpy.param_bytes().is_none_or(|n| n == params.as_bytes().len()),
            "the driver counts {:?} bytes of parameters",
            kernels.axpy.param_bytes()
        );
        let mut shifted = vec![0u8; 1];
        shifted.extend(params.as_bytes());
        // SAFETY: the kernel touches 64 numbers of each buffer, which live until the download.
        unsafe { kernels.axpy.launch(&stream, &LaunchConfig::new([1; 3], [64, 1, 1]), &shifted[1..]) }?;
        ensure!(stream.download_all::<f32>(&y)? == [6.0; 64], "the parameters did not arrive");
        Ok(Seen::Pass(format!("driver's layout: {:?} bytes", kernels.axpy.param_bytes())))
    });

    report.check("events measure time and order streams", || {
        let stream = context.stream(StreamOptions::default())?;
        let other = context.stream(StreamOptions::default())?;
        let start = Event::new(context, EventKind::Timing)?;
        let end = Event::new(context, EventKind::Timing)?;
        kernels.queue_spin(&stream, 1000)?;
        stream.synchronize()?;
        start.record(&stream)?;
        kernels.queue_spin(&stream, 2_000_000)?;
        end.record(&stream)?;
        let pending = !end.is_done()? && !stream.is_done()?;
        other.wait(&end)?;
        other.synchronize()?;
        ensure!(end.is_done()? && stream.is_done()?, "the second stream did not wait for the first");
        let ms = end.ms_since(&start)?;
        ensure!((1.9..2.6).contains(&ms), "2 ms of waiting took {ms} ms");
        ensure!(pending, "the work was reported done while it could not be");
        let untimed = Event::new(context, EventKind::Ordering)?;
        untimed.record(&stream)?;
        ensure!(untimed.ms_since(&start).is_err(), "an event without time told a time");
        Ok(Seen::Pass(format!("2 ms of waiting took {ms:.3} ms")))
    });

    report.check("eight threads launch into four streams and nothing is lost", || {
        let streams =
            (0..4).map(|_| context.stream(StreamOptions::default())).collect::<Result<Vec<_>, _>>()?;
        let mut counter = streams[0].upload_new(&[0u32])?;
        streams[0].fill_words(&mut counter, 0, 1, 0)?;
        streams[0].synchronize()?;
        let mut params = ParamBuffer::new();
        params.push_u64(counter.address())?;
        let config = LaunchConfig::new([1; 3], [32, 1, 1]);
        let failures: Vec<DriverError> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8usize)
                .map(|thread| {
                    let (streams, params, config) = (&streams, &params, &config);
                    scope.spawn(move || {
                        for i in 0..1000 {
                            let stream = &streams[(thread + i) % 4];
                            // SAFETY: the counter lives until all streams have been waited for.
                            unsafe { kernels.count.launch(stream, config, params.as_bytes()) }?;
                        }
                        Ok(())
                    })
                })
                .collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()?.err()).collect()
        });
        ensure!(failures.is_empty(), "{failures:?}");
        context.synchronize()?;
        let total = streams[0].download_all::<u32>(&counter)?[0];
        ensure!(total == 8 * 1000 * 32, "counted {total} of {}", 8 * 1000 * 32);
        Ok(Seen::Pass(format!("{total} additions")))
    });

    report.check("what is dropped while the GPU works is freed in order", || {
        for _ in 0..20 {
            let stream = context.stream(StreamOptions::default())?;
            let buffer = context.alloc(1 << 20)?;
            let ordered = if context.properties().memory_pools { Some(stream.alloc(1 << 20)?) } else { None };
            kernels.queue_spin(&stream, 200_000)?;
            drop(stream);
            drop(ordered);
            drop(buffer);
        }
        context.synchronize()?;
        Ok(Seen::Pass("20 rounds".into()))
    });

    report.check("a bound thread keeps its context, and a call restores a foreign state", || {
        let bound = context.bind_to_thread()?;
        let stream = context.stream(StreamOptions::default())?;
        kernels.prove(&stream)?;
        drop(bound);
        kernels.prove(&stream)?;
        let from_another_thread = std::thread::scope(|scope| {
            scope.spawn(|| kernels.prove(&stream).map_err(|error| error.to_string())).join()
        });
        ensure!(matches!(from_another_thread, Ok(Ok(()))), "from another thread: {from_another_thread:?}");
        Ok(Seen::Pass(String::new()))
    });
}

pub fn check_nothing_leaks(report: &mut Report, context: &Context) {
    report.check("memory is given back", || {
        context.synchronize()?;
        let (before, after) = (USED_AT_START.load(Ordering::Relaxed), used(context)?);
        let grown = after.saturating_sub(before);
        // Modules, pools and the driver's own queues remain; the checks used gigabytes in passing.
        ensure!(grown < 512 << 20, "{grown} bytes more in use than at the start");
        Ok(Seen::Pass(format!("{grown} bytes more in use than at the start")))
    });
}
