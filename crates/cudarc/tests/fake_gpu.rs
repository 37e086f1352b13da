//! The adapter without a GPU: cudarc and FlashCore both load a fake driver, in a separate process.

#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // The fake driver's harness, and lengths that are not checked.

#[path = "../../driver/tests/fake/mod.rs"]
mod fake;

use std::process::Command;

use cudarc::driver::CudaContext;
use flashcore::{Name, Place};
use flashcore_cudarc::{Attention, Error, Gpu, Input, Output};
use half::f16;

/// The environment variable that is set in the process with the fake driver.
const INSIDE: &str = "FLASHCORE_TEST_INSIDE";

/// Runs one of the tests below where `libcuda` is the fake one.
fn inside(test: &str) {
    let Some(driver) = fake::as_system_driver(&[]) else { return };
    std::os::unix::fs::symlink("libcuda.so.1", driver.path().join("libcuda.so")).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--include-ignored"])
        .env("LD_LIBRARY_PATH", driver.path())
        .env("FLASHCORE_CACHE", "")
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

const SHAPE: [usize; 4] = [2, 4, 64, 64];
const ELEMENTS: usize = 2 * 4 * 64 * 64;

#[test]
fn slices_of_any_layout_are_launched_on_in_cudarcs_stream() {
    if std::env::var_os(INSIDE).is_none() {
        return inside("slices_of_any_layout_are_launched_on_in_cudarcs_stream");
    }
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let q = stream.clone_htod(&vec![f16::ONE; ELEMENTS]).unwrap();
    let mut o = stream.alloc_zeros::<f16>(ELEMENTS).unwrap();
    let mut lse = stream.alloc_zeros::<f32>(2 * 4 * 64).unwrap();
    let gpu = Gpu::new(&stream).unwrap();
    let attention = Attention::new().causal();
    let inputs = || [(); 3].map(|()| Input::bhsd(&q, SHAPE));
    gpu.run_into(&attention, inputs(), Output::bhsd(&mut o, SHAPE), None).unwrap();
    let lse_out = Output::lse(&mut lse, [2, 4, 64]);
    gpu.run_into(&attention, inputs(), Output::bhsd(&mut o, SHAPE), Some(lse_out)).unwrap();
    // A view of a part, and the other layout.
    let part = q.slice(ELEMENTS / 2..);
    let views = [(); 3].map(|()| Input::bshd(&part, [1, 64, 4, 64]));
    let mut half = o.slice_mut(..ELEMENTS / 2);
    gpu.run_into(&attention, views, Output::bshd(&mut half, [1, 64, 4, 64]), None).unwrap();
    // Another stream, the same kernels.
    let other = stream.context().new_stream().unwrap();
    gpu.on(&other).unwrap().run_into(&attention, inputs(), Output::bhsd(&mut o, SHAPE), None).unwrap();
    other.synchronize().unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn gradients_are_launched_in_cudarcs_stream() {
    if std::env::var_os(INSIDE).is_none() {
        return inside("gradients_are_launched_in_cudarcs_stream");
    }
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let q = stream.clone_htod(&vec![f16::ONE; ELEMENTS]).unwrap();
    let lse = stream.clone_htod(&[0.0_f32; 2 * 4 * 64]).unwrap();
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| stream.alloc_zeros::<f16>(ELEMENTS).unwrap());
    let gpu = Gpu::new(&stream).unwrap();
    let mut run = |rows: usize| {
        let given = [(); 5].map(|()| Input::bshd(&q, [2, 64, 4, 64]));
        let lse = Input::bhsd(&lse, [2, 4, rows, 1]);
        let gradients = [&mut dq, &mut dk, &mut dv].map(|slice| Output::bshd(slice, [2, 64, 4, 64]));
        gpu.backward_into(&Attention::new().causal(), &given, &lse, gradients)
    };
    assert_eq!(run(64), Ok(()));
    assert!(matches!(run(63), Err(Error::SizeMismatch { tensor: Name::Lse, .. })));
    assert_eq!(run(64), Ok(()));
    stream.synchronize().unwrap();
}

#[test]
fn key_lengths_are_taken_from_a_slice() {
    if std::env::var_os(INSIDE).is_none() {
        return inside("key_lengths_are_taken_from_a_slice");
    }
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let q = stream.clone_htod(&vec![f16::ONE; ELEMENTS]).unwrap();
    let mut o = stream.alloc_zeros::<f16>(ELEMENTS).unwrap();
    let gpu = Gpu::new(&stream).unwrap();
    let mut run = |lengths: &[u32], most: u32| {
        let lengths = stream.clone_htod(lengths).unwrap();
        let inputs = [(); 3].map(|()| Input::bhsd(&q, SHAPE));
        let out = Output::bhsd(&mut o, SHAPE);
        // SAFETY: the lengths are at most 64.
        unsafe { gpu.run_with_lengths(&Attention::new(), &lengths, most, inputs, out, None) }
    };
    assert_eq!(run(&[64, 3], 64), Ok(()));
    assert_eq!(run(&[64], 64), Err(Error::KeyLengthCount { given: 1, batch: 2 }));
    assert_eq!(run(&[64, 3], 65), Err(Error::KeyLengthBound { given: 65, len_k: 64 }));
}

#[test]
fn what_does_not_fit_is_an_error_and_the_next_call_goes_through() {
    if std::env::var_os(INSIDE).is_none() {
        return inside("what_does_not_fit_is_an_error_and_the_next_call_goes_through");
    }
    let stream = CudaContext::new(0).unwrap().default_stream();
    let q = stream.clone_htod(&vec![f16::ONE; ELEMENTS]).unwrap();
    let mut o = stream.alloc_zeros::<f16>(ELEMENTS).unwrap();
    let gpu = Gpu::new(&stream).unwrap();
    let mut run = |shape: [usize; 4]| {
        let inputs = [(); 3].map(|()| Input::bhsd(&q, shape));
        gpu.run_into(&Attention::new(), inputs, Output::bhsd(&mut o, SHAPE), None)
    };
    assert!(matches!(run([2, 4, 65, 64]), Err(Error::OutOfBounds { .. })));
    assert!(matches!(run([1, 4, 64, 64]), Err(Error::SizeMismatch { .. })));
    assert_eq!(run(SHAPE), Ok(()));
}

#[test]
fn streams_of_another_context_are_refused() {
    if std::env::var_os(INSIDE).is_none() {
        return inside("streams_of_another_context_are_refused");
    }
    let context = CudaContext::new(0).unwrap();
    let gpu = Gpu::new(&context.default_stream()).unwrap();
    let other = CudaContext::new(1).unwrap();
    for stream in [other.new_stream().unwrap(), other.default_stream(), other.per_thread_stream()] {
        assert!(matches!(gpu.on(&stream), Err(Error::ForeignStream { stream_device: 1, .. })));
    }
    // SAFETY: the context lives to the end of the process, and nobody destroys it, because the wrapper is forgotten.
    let own = unsafe { CudaContext::from_raw_context(0, context.cu_device(), context.cu_ctx()) }.unwrap();
    assert!(matches!(gpu.on(&own.default_stream()), Err(Error::ForeignStream { stream_device: 0, .. })));
    std::mem::forget(own);
}

#[test]
fn slices_of_another_gpu_are_refused_and_leave_no_error_behind() {
    if std::env::var_os(INSIDE).is_none() {
        return inside("slices_of_another_gpu_are_refused_and_leave_no_error_behind");
    }
    let [stream, other] = [0, 1].map(|gpu| CudaContext::new(gpu).unwrap().new_stream().unwrap());
    let [q, q_there] = [&stream, &other].map(|stream| stream.clone_htod(&vec![f16::ONE; ELEMENTS]).unwrap());
    let [mut o, mut o_there] = [&stream, &other].map(|stream| stream.alloc_zeros::<f16>(ELEMENTS).unwrap());
    let mut lse_there = other.alloc_zeros::<f32>(2 * 4 * 64).unwrap();
    let gpu = Gpu::new(&stream).unwrap();
    let refused = |result: Result<(), Error>, name: Name| {
        let elsewhere = matches!(&result, Err(Error::PlaceMismatch { tensor, given: Place::Cuda(1), .. }) if *tensor == name);
        assert!(elsewhere, "{name}: {result:?}");
        stream.context().check_err().unwrap();
    };
    let attention = Attention::new();
    for (at, name) in [Name::Q, Name::K, Name::V].into_iter().enumerate() {
        let slices = [0, 1, 2].map(|i| Input::bhsd(if i == at { &q_there } else { &q }, SHAPE));
        refused(gpu.run_into(&attention, slices, Output::bhsd(&mut o, SHAPE), None), name);
    }
    let inputs = || [(); 3].map(|()| Input::bhsd(&q, SHAPE));
    refused(gpu.run_into(&attention, inputs(), Output::bhsd(&mut o_there, SHAPE), None), Name::O);
    let lse = Output::lse(&mut lse_there, [2, 4, 64]);
    refused(gpu.run_into(&attention, inputs(), Output::bhsd(&mut o, SHAPE), Some(lse)), Name::Lse);
    let lengths = other.clone_htod(&[64_u32, 3]).unwrap();
    let out = Output::bhsd(&mut o, SHAPE);
    // SAFETY: the lengths are at most 64.
    refused(unsafe { gpu.run_with_lengths(&attention, &lengths, 64, inputs(), out, None) }, Name::KeyLengths);
    assert_eq!(gpu.run_into(&attention, inputs(), Output::bhsd(&mut o, SHAPE), None), Ok(()));
    stream.synchronize().unwrap();
}
