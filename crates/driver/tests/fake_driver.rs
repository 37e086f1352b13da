//! The whole crate against a CUDA driver that needs no GPU: `fake_libcuda.c`, compiled here by the system's C
//! compiler. It proves what can be proved without hardware: that functions are taken by name and version,
//! that arguments reach the driver as declared, that statuses become the right errors, and that everything
//! made is given back.

#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // Launches and borrowed handles are unsafe by nature; the fake driver runs no kernel.

mod fake;

use fake::{COUNT_CALLS, Fake, load_error};
use flashcore_driver::*;
use std::ffi::{c_int, c_void};
use std::process::Command;

/// Two parameters: an address and a number.
const PTX: &str = ".version 7.0\n.target sm_80\n// params: 0+8 8+4\n.entry scale(...)\n.entry other(...)\n";

/// The fake's assembler stops at the second word.
const BROKEN: &str = ".version BROKEN";

fn options() -> JitOptions {
    JitOptions::default()
}

// --- loading ----------------------------------------------------------------------------------------

#[test]
fn a_missing_library_is_named_with_the_loaders_reason() {
    // SAFETY: there is no such file, so nothing runs.
    let error = unsafe { Driver::load_from("/nonexistent/libcuda.so.1") }.unwrap_err();
    assert!(error.means_no_gpu());
    let text = error.to_string();
    assert!(text.contains("Install the NVIDIA driver"), "{text}");
    assert!(text.contains("\n  /nonexistent/libcuda.so.1: "), "{text}");
    assert!(text.contains("No such file"), "the loader's own words: {text}");
}

#[test]
fn the_systems_driver_loads_or_says_why_not() {
    match Driver::load() {
        Ok(driver) => {
            println!("a GPU is here: {driver:?}");
            assert!(driver.version() >= CudaVersion::MINIMUM);
        }
        Err(error) => {
            println!("no GPU here: {error}");
            assert!(error.means_no_gpu() || error.status().is_some(), "{error:?}");
            assert_eq!(Driver::load().unwrap_err(), error, "the second answer is the first");
        }
    }
}

#[test]
fn a_driver_of_today_hands_out_functions_by_name_and_version() {
    let Some(fake) = Fake::start(&[]) else { return };
    assert_eq!(fake.driver.symbol_source(), "cuGetProcAddress_v2");
    assert_eq!(fake.driver.version().to_string(), "12.8");
    // These have older or newer signatures under the same name, which the fake records when called.
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let buffer = stream.upload_new(&[1u32, 2, 3]).unwrap();
    assert_eq!(stream.download_all::<u32>(&buffer).unwrap(), [1, 2, 3]);
    context.synchronize().unwrap();
    assert_eq!(context.memory_info().unwrap(), (123, 456));
    stream.capture::<DriverError>(CaptureMode::Relaxed, |_| Ok(())).unwrap();
    link_ptx(&context, "m", PTX, &options()).unwrap();
    assert!(!fake.raw_record().contains(&"WRONG LAYOUT".to_owned()));
}

#[test]
fn a_driver_of_cuda_11_works_and_names_the_version_that_each_missing_feature_needs() {
    let Some(fake) = Fake::start(&["-DVERSION=11040", "-DPROC_ADDRESS=1"]) else { return };
    assert_eq!(fake.driver.symbol_source(), "cuGetProcAddress");
    let context = fake.context();
    assert!(!context.properties().tensor_maps, "an attribute it does not know reads as no");
    let stream = context.stream(StreamOptions::default()).unwrap();
    drop(stream.alloc(16).unwrap());
    let function = Module::from_ptx(&context, "m", PTX, &options()).unwrap().function("scale").unwrap();
    assert_eq!(function.param_bytes(), None, "cuFuncGetParamInfo came with 12.4");
    let plain = LaunchConfig::new([1; 3], [32, 1, 1]);
    // SAFETY: the fake runs no kernel.
    unsafe { function.launch(&stream, &plain, &[0; 12]) }.unwrap();
    let programmatic = LaunchConfig { programmatic: true, ..plain };
    // SAFETY: as above.
    let error = unsafe { function.launch(&stream, &programmatic, &[0; 12]) }.unwrap_err();
    assert_eq!(
        error.to_string(),
        "cuLaunchKernelEx needs a driver for CUDA 11.6 or later; this one is for CUDA 11.4. Update the NVIDIA driver."
    );
}

#[test]
fn a_driver_without_cugetprocaddress_is_read_through_its_exports() {
    let Some(fake) = Fake::start(&["-DVERSION=11010", "-DPROC_ADDRESS=0"]) else { return };
    assert_eq!(fake.driver.symbol_source(), "exported symbols");
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let buffer = stream.upload_new(&[7u8; 5]).unwrap();
    assert_eq!(stream.download_all::<u8>(&buffer).unwrap(), [7; 5]);
}

#[test]
fn a_driver_before_cuda_11_is_refused_with_both_versions() {
    let Some(error) = load_error(&["-DVERSION=10020", "-DPROC_ADDRESS=0"]) else { return };
    let expected = DriverError::DriverTooOld {
        what: "FlashCore".into(),
        needs: CudaVersion(11000),
        has: CudaVersion(10020),
    };
    assert_eq!(error, expected);
    assert!(error.means_no_gpu());
}

#[test]
fn a_library_that_lacks_a_function_is_refused_by_that_functions_name() {
    let Some(error) = load_error(&["-DWITHOUT_LINK", "-DPROC_ADDRESS=0"]) else { return };
    assert!(
        matches!(&error, DriverError::MissingSymbol { symbol, .. } if symbol == "cuLinkCreate_v2"),
        "{error}"
    );
}

#[test]
fn a_driver_without_a_gpu_says_so() {
    let Some(error) = load_error(&["-DINIT_STATUS=100"]) else { return };
    assert_eq!(error, DriverError::NoDevice);
    assert!(error.to_string().contains("CUDA_VISIBLE_DEVICES"));
}

#[test]
fn the_toolkits_stub_is_recognised() {
    let Some(error) = load_error(&["-DINIT_STATUS=34"]) else { return };
    assert_eq!(error.status(), Some(Status::STUB_LIBRARY));
    assert!(error.to_string().contains("stubs directory"), "{error}");
}

// --- devices and contexts ---------------------------------------------------------------------------

#[test]
fn properties_are_read_from_the_right_attributes() {
    let Some(fake) = Fake::start(&[]) else { return };
    assert_eq!(fake.driver.device_count(), Ok(2));
    let hopper = fake.driver.device(0).unwrap().properties().unwrap();
    assert_eq!(hopper.name, "Fake GPU 0");
    assert_eq!(hopper.uuid, "GPU-20202020-2020-2020-2020-202020202020", "the layout that knows MIG");
    assert_eq!(hopper.compute_capability, ComputeCapability { major: 9, minor: 0 });
    assert_eq!((hopper.sm_count, hopper.max_threads_per_sm, hopper.registers_per_sm), (132, 2048, 65536));
    assert_eq!((hopper.shared_per_block_optin, hopper.shared_per_sm), (232448, 233472));
    assert_eq!((hopper.l2_bytes, hopper.memory_bytes), (38, 1 << 37));
    assert_eq!((hopper.sm_clock_khz, hopper.memory_clock_khz, hopper.memory_bus_bits), (13, 36, 37));
    assert!(hopper.cluster_launch && hopper.tensor_maps && hopper.memory_pools);
    let ada = fake.driver.device(1).unwrap().properties().unwrap();
    assert_eq!(ada.compute_capability.to_string(), "8.9");
    assert!(!ada.cluster_launch && !ada.tensor_maps);
}

#[test]
fn a_gpu_that_is_not_there_is_an_error_with_the_count() {
    let Some(fake) = Fake::start(&[]) else { return };
    for ordinal in [2, usize::MAX] {
        let error = fake.driver.device(ordinal).unwrap_err();
        assert_eq!(error, DriverError::NoSuchDevice { ordinal, count: 2 });
    }
}

#[test]
fn a_call_leaves_the_threads_own_context_as_it_was() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let other = fake.driver.device(1).unwrap().context().unwrap();
    let _bound = other.bind_to_thread().unwrap();
    let before: *mut c_void = fake.call("fake_current");
    context.synchronize().unwrap();
    fake.fail("cuCtxSynchronize", 700);
    context.synchronize().unwrap_err();
    assert_eq!(fake.call::<*mut c_void>("fake_current"), before);
}

#[test]
fn a_bound_thread_pushes_once_and_pops_at_the_end() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let bound = context.bind_to_thread().unwrap();
    for _ in 0..3 {
        context.synchronize().unwrap();
    }
    drop(bound);
    assert_eq!(fake.raw_record(), ["push", "pop"]);
    context.synchronize().unwrap();
    assert_eq!(fake.raw_record(), ["push", "pop"], "and without it every call does");
}

#[test]
fn everything_made_is_given_back_whatever_the_order() {
    let Some(fake) = Fake::start(&[]) else { return };
    let function = {
        let context = fake.context();
        let stream = context.stream(StreamOptions::default()).unwrap();
        let _buffer = context.alloc(100).unwrap();
        let _ordered = stream.alloc(100).unwrap();
        let _pinned = context.alloc_pinned(100).unwrap();
        let _event = Event::new(&context, EventKind::Timing).unwrap();
        let graph = stream.capture::<DriverError>(CaptureMode::Global, |_| Ok(())).unwrap();
        let _exec = graph.instantiate().unwrap();
        let module = Module::from_ptx(&context, "m", PTX, &options()).unwrap();
        link_ptx(&context, "m", PTX, &options()).unwrap();
        link_ptx(&context, "m", BROKEN, &options()).unwrap_err();
        drop(context);
        module.function("scale").unwrap()
    };
    assert_eq!(fake.live(), 2, "the function keeps its module and its context");
    drop(function);
    assert_eq!(fake.live(), 0);
}

#[test]
fn the_driver_crosses_threads() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let buffer =
        std::thread::scope(|scope| scope.spawn(|| stream.upload_new(&[9u16; 4]).unwrap()).join().unwrap());
    assert_eq!(stream.download_all::<u16>(&buffer).unwrap(), [9; 4]);
}

#[test]
fn a_fault_in_a_kernel_is_reported_as_a_lost_context() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    fake.fail("cuCtxSynchronize", 700);
    let error = context.synchronize().unwrap_err();
    assert!(error.context_is_lost());
    let text = error.to_string();
    assert!(
        text.starts_with(
            "cuCtxSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access"
        )
    );
    assert!(text.contains("compute-sanitizer"), "{text}");
}

#[test]
fn a_status_that_the_driver_cannot_name_is_told_by_its_number() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    fake.fail("cuCtxSynchronize", 4711);
    assert!(context.synchronize().unwrap_err().to_string().contains("CUresult 4711"));
}

// --- streams and events -----------------------------------------------------------------------------

#[test]
fn a_stream_is_non_blocking_unless_asked_and_has_its_priority() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    assert_eq!(context.stream_priorities(), Ok((0, -5)));
    let first = context.stream(StreamOptions { priority: -3, ..StreamOptions::default() }).unwrap();
    let _second = context.stream(StreamOptions { waits_for_default: true, priority: 0 }).unwrap();
    assert_eq!(fake.record(), ["stream flags 1 priority -3", "stream flags 0 priority 0"]);
    assert_eq!(first.priority(), Ok(-3));
    assert_eq!(first.is_done(), Ok(true));
}

#[test]
fn a_borrowed_stream_is_used_but_never_destroyed() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let owner = context.stream(StreamOptions { priority: -1, ..StreamOptions::default() }).unwrap();
    let live = fake.live();
    // SAFETY: `owner` outlives the borrow.
    let borrowed = unsafe { Stream::borrow_raw(&context, owner.as_raw()) }.unwrap();
    assert_eq!(borrowed.priority(), Ok(-1));
    drop(borrowed);
    assert_eq!(fake.live(), live);
    // SAFETY: null is the default stream, which always lives.
    unsafe { Stream::borrow_raw(&context, std::ptr::null_mut()) }.unwrap().synchronize().unwrap();
}

#[test]
fn a_stream_of_another_context_is_refused_with_both_gpus() {
    let Some(fake) = Fake::start(&[]) else { return };
    let (here, there) = (fake.context(), fake.driver.device(1).unwrap().context().unwrap());
    let foreign = there.stream(StreamOptions::default()).unwrap();
    // SAFETY: `foreign` lives.
    let error = unsafe { Stream::borrow_raw(&here, foreign.as_raw()) }.unwrap_err();
    assert_eq!(error, DriverError::ForeignStream { stream_device: 1, context_device: 0 });
    let function = Module::from_ptx(&here, "m", PTX, &options()).unwrap().function("scale").unwrap();
    // SAFETY: refused before anything is launched.
    let error =
        unsafe { function.launch(&foreign, &LaunchConfig::new([1; 3], [1; 3]), &[0; 12]) }.unwrap_err();
    assert_eq!(error, DriverError::ForeignStream { stream_device: 1, context_device: 0 });
}

#[test]
fn events_order_streams_and_measure_time() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let (start, end) =
        (Event::new(&context, EventKind::Timing).unwrap(), Event::new(&context, EventKind::Timing).unwrap());
    assert_eq!(start.is_done(), Ok(false), "not recorded yet");
    let mut buffer = context.alloc(8).unwrap();
    start.record(&stream).unwrap();
    stream.fill_bytes(&mut buffer, 0, 8, 1).unwrap();
    stream.fill_bytes(&mut buffer, 0, 8, 2).unwrap();
    end.record(&stream).unwrap();
    end.synchronize().unwrap();
    assert_eq!(end.is_done(), Ok(true));
    assert_eq!(end.ms_since(&start), Ok(2.0), "the fake's clock counts operations");
    stream.wait(&end).unwrap();
    let untimed = Event::new(&context, EventKind::Ordering).unwrap();
    untimed.record(&stream).unwrap();
    assert_eq!(untimed.ms_since(&start).unwrap_err().status(), Some(Status::INVALID_HANDLE));
}

// --- memory -----------------------------------------------------------------------------------------

#[test]
fn bytes_go_to_the_gpu_and_come_back() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let source: Vec<f32> = (0..64).map(|i| i as f32 * 0.5).collect();
    let buffer = stream.upload_new(&source).unwrap();
    assert_eq!(buffer.len(), 256);
    let mut copy = stream.alloc(256).unwrap();
    stream.copy(&mut copy, 128, &buffer, 0, 128).unwrap();
    stream.fill_words(&mut copy, 0, 32, 2.0f32.to_bits()).unwrap();
    let mut expected = vec![2.0; 32];
    expected.extend(&source[..32]);
    assert_eq!(stream.download_all::<f32>(&copy).unwrap(), expected);
    stream.fill_bytes(&mut copy, 4, 4, 0).unwrap();
    let mut part = [1.0f32; 2];
    stream.download(&copy, 0, &mut part).unwrap();
    assert_eq!(part, [2.0, 0.0]);
    drop(copy);
    assert_eq!(fake.record().last().unwrap(), "free in stream");
}

#[test]
fn page_locked_memory_starts_at_zero_and_copies_beside_the_cpu() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let mut pinned = context.alloc_pinned(32).unwrap();
    assert_eq!(pinned.as_slice::<u64>(), [0; 4]);
    pinned.as_mut_slice::<u64>().copy_from_slice(&[1, 2, 3, 4]);
    let mut buffer = context.alloc(32).unwrap();
    let mut back = context.alloc_pinned(16).unwrap();
    // SAFETY: both pinned buffers outlive the wait.
    unsafe {
        stream.upload_async(&mut buffer, 0, &pinned).unwrap();
        stream.download_async(&buffer, 16, &mut back).unwrap();
    }
    stream.synchronize().unwrap();
    assert_eq!(back.as_slice::<u64>(), [3, 4]);
}

#[test]
fn a_copy_beyond_the_end_is_refused_before_the_driver_is_asked() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let mut buffer = context.alloc(16).unwrap();
    let expected =
        |error: DriverError| assert!(matches!(error, DriverError::OutOfBounds { len: 16, .. }), "{error}");
    expected(stream.upload(&mut buffer, 8, &[0u32; 3]).unwrap_err());
    expected(stream.upload(&mut buffer, usize::MAX, &[0u32; 3]).unwrap_err());
    expected(stream.download(&buffer, 17, &mut [0u8; 0]).unwrap_err());
    expected(stream.fill_words(&mut buffer, 4, usize::MAX / 2, 0).unwrap_err());
    expected(stream.fill_bytes(&mut buffer, 1, 16, 0).unwrap_err());
    let small = context.alloc(8).unwrap();
    assert!(stream.copy(&mut buffer, 0, &small, 0, 16).is_err());
}

#[test]
fn nothing_at_all_can_be_allocated_and_copied() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let mut empty = stream.upload_new::<f32>(&[]).unwrap();
    assert!(empty.is_empty() && empty.address() == 0);
    assert_eq!(stream.download_all::<f32>(&empty).unwrap(), [0f32; 0]);
    stream.fill_bytes(&mut empty, 0, 0, 1).unwrap();
    assert!(stream.alloc(0).unwrap().is_empty());
    assert!(context.alloc_pinned(0).unwrap().as_slice::<u8>().is_empty());
}

#[test]
fn a_shortage_of_memory_says_how_much_there_is_and_leaves_the_context_usable() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    for error in [context.alloc(1 << 40).unwrap_err(), stream.alloc(1 << 40).unwrap_err()] {
        assert_eq!(
            error,
            DriverError::OutOfMemory { place: "GPU", bytes: 1 << 40, free_total: Some((123, 456)) }
        );
        assert!(error.to_string().contains("123 of 456 free"), "{error}");
        assert!(!error.context_is_lost());
    }
    let error = context.alloc_pinned(1 << 40).unwrap_err();
    assert!(error.to_string().starts_with("out of page-locked host memory"), "{error}");
    context.alloc(16).unwrap();
}

#[test]
fn an_address_is_recognised_for_what_it_is() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let other = fake.driver.device(1).unwrap().context().unwrap();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let (own, pooled) = (context.alloc(64).unwrap(), stream.alloc(64).unwrap());
    let (foreign, pinned) = (other.alloc(64).unwrap(), context.alloc_pinned(64).unwrap());
    let host = [0u8; 64];

    let info = context.pointer_info(own.address() + 10).unwrap();
    assert_eq!(
        info,
        PointerInfo {
            kind: MemoryKind::Device,
            device: Some(0),
            in_this_context: true,
            range: Some((own.address(), 64))
        }
    );
    assert!(!context.pointer_info(pooled.address()).unwrap().in_this_context, "pools have no context");
    let check = |address, align| context.require_device_pointer("k", address, align);
    let fault = |result: Result<(), DriverError>| match result {
        Err(DriverError::Pointer { what, fault, .. }) => {
            assert_eq!(what, "k");
            fault
        }
        other => panic!("expected a pointer fault, got {other:?}"),
    };
    assert_eq!(check(own.address(), 16), Ok(()));
    assert_eq!(check(pooled.address(), 16), Ok(()));
    assert_eq!(fault(check(0, 1)), PointerFault::Null);
    assert_eq!(fault(check(own.address() + 8, 16)), PointerFault::Misaligned(16));
    assert_eq!(fault(check(host.as_ptr().addr() as u64, 1)), PointerFault::NotCuda);
    assert_eq!(fault(check(pinned.address(), 16)), PointerFault::PinnedHost);
    assert_eq!(fault(check(foreign.address(), 16)), PointerFault::OtherDevice(1));
}

// --- modules ----------------------------------------------------------------------------------------

#[test]
fn ptx_is_assembled_with_its_options_and_the_log_is_kept() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let wishes =
        JitOptions { max_registers: Some(96), optimization: Some(3), verbose: true, line_info: true };
    let module = Module::from_ptx(&context, "m", PTX, &wishes).unwrap();
    assert_eq!(fake.record(), ["jit max registers 96", "jit level 3", "jit line info 1"]);
    assert_eq!(module.log().info, "ptxas info : Used 8 registers");
    assert_eq!(module.log().wall_ms, Some(1.5));
}

#[test]
fn ptx_that_does_not_assemble_is_an_error_with_the_log() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    for error in [
        Module::from_ptx(&context, "attention.ptx", BROKEN, &options()).unwrap_err(),
        link_ptx(&context, "attention.ptx", BROKEN, &options()).unwrap_err(),
    ] {
        assert_eq!(error.status(), Some(Status::INVALID_PTX));
        let text = error.to_string();
        assert!(text.contains("refused attention.ptx: CUDA_ERROR_INVALID_PTX (218)"), "{text}");
        assert!(
            text.ends_with("\n  ptxas application ptx input, line 3; error : Unknown symbol 'BROKEN'"),
            "{text}"
        );
    }
}

#[test]
fn text_that_is_no_ptx_is_refused_before_the_driver_guesses_what_it_is() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    for error in [
        Module::from_ptx(&context, "m", "", &options()).unwrap_err(),
        link_ptx(&context, "m", "hello", &options()).unwrap_err(),
    ] {
        assert_eq!(error.status(), Some(Status::INVALID_PTX));
        assert!(error.to_string().contains("no .version directive"), "{error}");
    }
}

#[test]
fn text_with_a_nul_byte_never_reaches_the_driver() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let nul = |error| assert!(matches!(error, DriverError::NulByte { .. }), "{error}");
    nul(Module::from_ptx(&context, "m", ".version\0", &options()).unwrap_err());
    nul(link_ptx(&context, "m", ".version\0", &options()).unwrap_err());
    nul(link_ptx(&context, "a\0b", PTX, &options()).unwrap_err());
    nul(Module::from_ptx(&context, "m", PTX, &options()).unwrap().function("a\0b").unwrap_err());
}

#[test]
fn a_cubin_comes_out_of_the_linker_and_loads_again() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let cubin = link_ptx(&context, "m", PTX, &JitOptions { verbose: true, ..options() }).unwrap();
    assert!(cubin.bytes.starts_with(b"\x7fELF"));
    assert_eq!(cubin.log.info, "ptxas info : Used 8 registers");
    let module = Module::from_cubin(&context, "m", &cubin.bytes).unwrap();
    assert_eq!(module.function("scale").unwrap().param_bytes(), Some(12));
    let error = Module::from_cubin(&context, "cache/m.cubin", &cubin.bytes[..40]).unwrap_err();
    assert_eq!(error.status(), Some(Status::INVALID_IMAGE));
    assert!(error.to_string().contains("cache/m.cubin"), "{error}");
}

#[test]
fn a_kernel_that_is_not_there_is_named() {
    let Some(fake) = Fake::start(&[]) else { return };
    let module = Module::from_ptx(&fake.context(), "m", PTX, &options()).unwrap();
    let error = module.function("absent").unwrap_err();
    assert_eq!(error.to_string(), "cannot launch absent: the module has no kernel of that name");
}

#[test]
fn a_kernel_tells_what_it_uses_and_how_many_fit() {
    let Some(fake) = Fake::start(&[]) else { return };
    let function =
        Module::from_ptx(&fake.context(), "m", PTX, &options()).unwrap().function("scale").unwrap();
    let used = function.attributes().unwrap();
    assert_eq!((used.registers, used.static_shared_bytes, used.max_threads_per_block), (8, 1024, 768));
    assert_eq!(
        (used.const_bytes, used.local_bytes, used.ptx_version, used.binary_version),
        (102, 103, 105, 106)
    );
    fake.record();
    let fit = function.occupancy(256, 4096, true).unwrap();
    assert_eq!((fit.blocks_per_sm, fit.threads_per_sm), (8, 2048));
    function.occupancy(256, 4096, false).unwrap();
    assert_eq!(
        fake.record(),
        ["occupancy 256 threads 4096 bytes flags 0", "occupancy 256 threads 4096 bytes flags 1"]
    );
    let pair = LaunchConfig { cluster: Some([2, 1, 1]), ..LaunchConfig::new([132, 1, 1], [128, 1, 1]) };
    assert_eq!(function.max_active_clusters(&pair), Ok(66));
    assert_eq!(function.max_cluster_size(&pair), Ok(8), "asked without a cluster of its own");
}

#[test]
fn the_attributes_of_a_kernel_are_set_by_their_numbers() {
    let Some(fake) = Fake::start(&[]) else { return };
    let function =
        Module::from_ptx(&fake.context(), "m", PTX, &options()).unwrap().function("scale").unwrap();
    fake.record();
    function.set_max_dynamic_shared(200_000).unwrap();
    function.set_carve_out(CarveOut::Percent(200)).unwrap();
    function.set_carve_out(CarveOut::Default).unwrap();
    function.allow_non_portable_clusters().unwrap();
    assert_eq!(
        fake.record(),
        ["attribute 8 = 200000", "attribute 9 = 100", "attribute 9 = -1", "attribute 14 = 1"]
    );
    let error = function.set_max_dynamic_shared(232_448).unwrap_err();
    assert!(error.to_string().contains("1024 of static shared memory do not fit"), "{error}");
}

// --- launches ---------------------------------------------------------------------------------------

#[test]
fn a_plain_launch_hands_over_its_shape_and_the_packed_parameters() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let function = Module::from_ptx(&context, "m", PTX, &options()).unwrap().function("scale").unwrap();
    let mut params = ParamBuffer::new();
    params.push_u64(0x1122).unwrap().push_u32(0x33).unwrap();
    fake.record();
    let config = LaunchConfig { shared_bytes: 2048, ..LaunchConfig::new([7, 2, 1], [64, 4, 1]) };
    // SAFETY: the fake runs no kernel.
    unsafe { function.launch(&stream, &config, params.as_bytes()) }.unwrap();
    assert_eq!(
        fake.record(),
        ["launch scale grid 7,2,1 block 64,4,1 shared 2048", "  params 22 11 00 00 00 00 00 00 33 00 00 00"]
    );
}

#[test]
fn parameters_can_be_handed_over_by_their_places() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let function = Module::from_ptx(&context, "m", PTX, &options()).unwrap().function("scale").unwrap();
    let bytes: Vec<u8> = (0..32).collect();
    let config = LaunchConfig::new([1, 1, 1], [64, 1, 1]);
    fake.record();
    // SAFETY: the fake runs no kernel.
    unsafe { function.launch_fields(&stream, &config, &bytes, &[16, 4]) }.unwrap();
    assert_eq!(
        fake.record(),
        ["launch scale grid 1,1,1 block 64,1,1 shared 0", "  params 10 11 12 13 14 15 16 17 04 05 06 07"]
    );
    // SAFETY: as above.
    let refused = unsafe { function.launch_fields(&stream, &config, &bytes, &[0, 32]) }.unwrap_err();
    assert!(refused.to_string().contains("2 parameters in 32 bytes"), "{refused}");
}

#[test]
fn a_launch_is_one_call_of_the_driver_from_a_threads_second_on() {
    let Some(fake) = Fake::start(COUNT_CALLS) else { return };
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let function = Module::from_ptx(&context, "m", PTX, &options()).unwrap().function("scale").unwrap();
    let plain = LaunchConfig::new([1; 3], [32, 1, 1]);
    let programmatic = LaunchConfig { programmatic: true, ..plain };
    for (config, call) in [(plain, "cuLaunchKernel"), (programmatic, "cuLaunchKernelEx")] {
        // SAFETY: the fake runs no kernel.
        let launch = || unsafe { function.launch(&stream, &config, &[0; 12]) }.unwrap();
        launch();
        fake.calls();
        launch();
        assert_eq!(fake.calls(), [call]);
    }
}

#[test]
fn a_launch_on_another_gpu_than_the_threads_leaves_the_threads_own() {
    let Some(fake) = Fake::start(&[]) else { return };
    let (here, there) = (fake.context(), fake.driver.device(1).unwrap().context().unwrap());
    let function =
        |context| Module::from_ptx(context, "m", PTX, &options()).unwrap().function("scale").unwrap();
    let config = LaunchConfig::new([1; 3], [32, 1, 1]);
    for (context, kept) in [(&there, false), (&here, true), (&there, true)] {
        // SAFETY: the fake runs no kernel.
        unsafe { function(context).launch(&context.default_stream(), &config, &[0; 12]) }.unwrap();
        let current: *mut c_void = fake.call("fake_current");
        assert_eq!(!current.is_null(), kept, "only the first GPU's context stays, as the runtime's would");
    }
    let _bound = there.bind_to_thread().unwrap();
    let before: *mut c_void = fake.call("fake_current");
    // SAFETY: as above.
    unsafe { function(&here).launch(&here.default_stream(), &config, &[0; 12]) }.unwrap();
    assert_eq!(fake.call::<*mut c_void>("fake_current"), before);
}

#[test]
fn attributes_of_a_launch_reach_the_driver_in_its_layout() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let function = Module::from_ptx(&context, "m", PTX, &options()).unwrap().function("scale").unwrap();
    fake.record();
    let config = LaunchConfig {
        cluster: Some([2, 1, 1]),
        programmatic: true,
        priority: Some(-2),
        ..LaunchConfig::new([4, 1, 1], [128, 1, 1])
    };
    // SAFETY: the fake runs no kernel.
    unsafe { function.launch(&stream, &config, &[0xaa; 12]) }.unwrap();
    assert_eq!(
        fake.record(),
        [
            "launch ex scale grid 4,1,1 block 128,1,1 shared 0",
            "  cluster 2,1,1",
            "  programmatic 1",
            "  priority -2",
            "  params aa aa aa aa aa aa aa aa aa aa aa aa"
        ]
    );
}

#[test]
fn launches_that_cannot_work_are_refused_in_words() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let function = Module::from_ptx(&context, "m", PTX, &options()).unwrap().function("scale").unwrap();
    let good = LaunchConfig::new([4, 1, 1], [128, 1, 1]);
    let refused = |config: LaunchConfig, bytes: usize, words: &str| {
        // SAFETY: refused before anything is launched.
        let error = unsafe { function.launch(&stream, &config, &vec![0; bytes]) }.unwrap_err();
        assert!(matches!(error, DriverError::Launch { .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    };
    refused(LaunchConfig { grid: [0, 1, 1], ..good }, 12, "dimension of 0");
    refused(LaunchConfig { block: [1024, 1, 1], ..good }, 12, "a block of 1024 threads");
    refused(LaunchConfig { cluster: Some([3, 1, 1]), ..good }, 12, "must divide the grid");
    refused(good, 16, "take 12 bytes, and 16 were given");
    refused(good, 0, "take 12 bytes, and 0 were given");
    refused(LaunchConfig { shared_bytes: 60_000, ..good }, 12, "48128 are allowed; set_max_dynamic_shared");
    assert!(fake.record().iter().all(|line| !line.starts_with("launch")));
}

#[test]
fn a_limit_raised_through_one_handle_of_a_kernel_holds_for_all() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let module = Module::from_ptx(&context, "m", PTX, &options()).unwrap();
    let (one, other) = (module.function("scale").unwrap(), module.function("scale").unwrap());
    one.set_max_dynamic_shared(100_000).unwrap();
    let config = LaunchConfig { shared_bytes: 100_000, ..LaunchConfig::new([1; 3], [32, 1, 1]) };
    // SAFETY: the fake runs no kernel.
    unsafe { other.launch(&stream, &config, &[0; 12]) }.unwrap();
}

#[test]
fn clusters_and_tensor_maps_are_refused_on_gpus_before_hopper() {
    let Some(fake) = Fake::start(&[]) else { return };
    let ada = fake.driver.device(1).unwrap().context().unwrap();
    let stream = ada.stream(StreamOptions::default()).unwrap();
    let function = Module::from_ptx(&ada, "m", PTX, &options()).unwrap().function("scale").unwrap();
    let pair = LaunchConfig { cluster: Some([2, 1, 1]), ..LaunchConfig::new([4, 1, 1], [128, 1, 1]) };
    // SAFETY: refused before anything is launched.
    let error = unsafe { function.launch(&stream, &pair, &[0; 12]) }.unwrap_err();
    assert_eq!(error.to_string(), "Fake GPU 1 has no cluster launch; it needs compute capability 9.0");
    let error = SPEC.encode(&ada).unwrap_err();
    assert_eq!(error.to_string(), "Fake GPU 1 has no tensor maps; it needs compute capability 9.0");
}

const SPEC: TensorMapSpec<'static> = TensorMapSpec {
    element: TensorMapElement::Bf16,
    address: 0x7f00_0000_0100,
    dims: &[64, 512, 8],
    strides: &[1024, 524288],
    box_dims: &[64, 128, 1],
    swizzle: Swizzle::Bytes128,
    l2_promotion: L2Promotion::Bytes256,
    out_of_bounds: OutOfBounds::Nan,
};

#[test]
fn a_tensor_map_reaches_the_driver_with_every_number_in_its_place() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let map = SPEC.encode(&context).unwrap();
    assert_eq!(map.as_bytes(), &[0x5a; 128]);
    assert_eq!(
        fake.record(),
        [
            "map type 9 rank 3 address 0x7f0000000100 interleave 0 swizzle 3 promotion 3 fill 1",
            "  64 stride 0 box 64 step 1",
            "  512 stride 1024 box 128 step 1",
            "  8 stride 524288 box 1 step 1"
        ]
    );
    let error = TensorMapSpec { address: 8, ..SPEC }.encode(&context).unwrap_err();
    assert_eq!(error, DriverError::TensorMap(TensorMapError::Address(8)));
    assert!(fake.record().is_empty(), "a bad map never reaches the driver");
}

// --- graphs -----------------------------------------------------------------------------------------

#[test]
fn captured_work_runs_when_replayed_and_not_before() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let function = Module::from_ptx(&context, "m", PTX, &options()).unwrap().function("scale").unwrap();
    let mut buffer = stream.upload_new(&[1u32, 2]).unwrap();
    let graph = stream
        .capture::<DriverError>(CaptureMode::ThreadLocal, |stream| {
            assert_eq!(stream.capture_status(), Ok(CaptureStatus::Active));
            stream.fill_words(&mut buffer, 4, 1, 9)?;
            // SAFETY: the fake runs no kernel.
            unsafe { function.launch(stream, &LaunchConfig::new([1; 3], [32, 1, 1]), &[0; 12]) }
        })
        .unwrap();
    assert!(fake.record().contains(&"capture mode 1".to_owned()));
    assert_eq!(stream.capture_status(), Ok(CaptureStatus::None));
    assert_eq!(graph.node_count(), Ok(2));
    assert_eq!(stream.download_all::<u32>(&buffer).unwrap(), [1, 2]);
    let exec = graph.instantiate().unwrap();
    drop(graph);
    exec.upload(&stream).unwrap();
    // SAFETY: the buffer lives.
    unsafe { exec.launch(&stream) }.unwrap();
    assert_eq!(stream.download_all::<u32>(&buffer).unwrap(), [1, 9]);
}

#[test]
fn a_capture_ends_when_the_work_in_it_fails_or_panics() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let error =
        stream.capture::<DriverError>(CaptureMode::Global, |_| Err(DriverError::NoDevice)).unwrap_err();
    assert_eq!(error, DriverError::NoDevice, "the work's own error comes first");
    assert_eq!(stream.capture_status(), Ok(CaptureStatus::None));
    let live = fake.live();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        stream.capture::<DriverError>(CaptureMode::Global, |_| panic!("on purpose"))
    }));
    assert!(panicked.is_err());
    assert_eq!(stream.capture_status(), Ok(CaptureStatus::None));
    assert_eq!(fake.live(), live);
    let error = context.default_stream().capture::<DriverError>(CaptureMode::Global, |_| Ok(())).unwrap_err();
    assert_eq!(error.status(), Some(Status::STREAM_CAPTURE_UNSUPPORTED));
}

#[test]
fn waiting_inside_a_capture_is_an_error_that_tells_to_warm_up() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let stream = context.stream(StreamOptions::default()).unwrap();
    let error = stream.capture::<DriverError>(CaptureMode::Global, Stream::synchronize).unwrap_err();
    assert!(error.to_string().contains("warm up"), "{error}");
}

#[test]
fn the_relaxed_capture_mode_lasts_as_long_as_the_work() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    let mode = || fake.call::<c_int>("fake_capture_mode");
    assert_eq!(context.with_relaxed_capture(mode), Ok(2));
    assert_eq!(mode(), 0);
}

// --- real machine code ------------------------------------------------------------------------------

/// Assembles a module with `ptxas` ($FLASHCORE_PTXAS, or from the path); `None`, with a reason printed,
/// where there is none.
fn ptxas(source: &str, target: &str) -> Option<Vec<u8>> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let cubin = directory.path().join("out.cubin");
    let program = std::env::var("FLASHCORE_PTXAS").unwrap_or_else(|_| "ptxas".to_owned());
    let file = format!("{}/examples/driver_check/{source}", env!("CARGO_MANIFEST_DIR"));
    match Command::new(&program).arg(format!("-arch={target}")).arg(&file).arg("-o").arg(&cubin).output() {
        Err(error) => {
            println!("skipped: no ptxas ({program}: {error})");
            None
        }
        Ok(output) => {
            assert!(output.status.success(), "{source}: {}", String::from_utf8_lossy(&output.stderr));
            Some(std::fs::read(&cubin).expect("the cubin just made"))
        }
    }
}

#[test]
fn cubins_of_the_examples_kernels_load_whole_and_are_refused_when_cut() {
    let Some(fake) = Fake::start(&[]) else { return };
    let context = fake.context();
    for (source, target) in
        [("basic.ptx", "sm_80"), ("basic.ptx", "sm_89"), ("basic.ptx", "sm_90a"), ("hopper.ptx", "sm_90a")]
    {
        let Some(cubin) = ptxas(source, target) else { return };
        Module::from_cubin(&context, source, &cubin).expect("a whole cubin");
        for length in 0..cubin.len() {
            let error = Module::from_cubin(&context, source, &cubin[..length]).unwrap_err();
            assert_eq!(error.status(), Some(Status::INVALID_IMAGE), "{source} cut to {length}: {error}");
        }
    }
}
