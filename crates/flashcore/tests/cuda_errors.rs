//! What a GPU call can get wrong below the contract: each is an error that says what to do, and the GPU stays usable.

#![cfg(all(target_os = "linux", feature = "cuda"))]
#![allow(unsafe_code)] // Views of addresses that are wrong on purpose.

#[path = "../../driver/tests/fake/mod.rs"]
mod fake;

use fake::Fake;
use flashcore::{
    Attention, Backward, DType, Device, DeviceLengths, Error, Layout, Name, Place, PointerFault, Tensor,
    TensorMut,
    cuda::{
        CubinCache, Cuda, CudaTensor,
        driver::{DriverError, MemoryKind},
    },
    plan::Kernel,
};

const SHAPE: [usize; 4] = [1, 2, 64, 64];
const ELEMENTS: usize = 2 * 64 * 64;

struct Setup {
    fake: Fake,
    cuda: Cuda,
    q: CudaTensor,
    o: CudaTensor,
}

fn cuda(fake: &Fake, ordinal: usize) -> Cuda {
    let cache = CubinCache::in_folder(tempfile::tempdir().unwrap().path(), 1 << 20);
    Cuda::of_device(fake.driver.device(ordinal).unwrap(), cache).unwrap()
}

/// On a Hopper GPU.
fn setup() -> Option<Setup> {
    setup_with(&[])
}

fn setup_with(flags: &[&str]) -> Option<Setup> {
    let fake = Fake::start(flags)?;
    let cuda = cuda(&fake, 0);
    let tensor = || cuda.empty(DType::F16, Layout::bhsd(SHAPE)).unwrap();
    let (q, o) = (tensor(), tensor());
    Some(Setup { fake, cuda, q, o })
}

/// A view of any address as a tensor on GPU 0.
fn at(address: u64, layout: Layout) -> flashcore::Result<Tensor<'static>> {
    // SAFETY: nothing reads it: the fake runs no kernel, and the call shall refuse it.
    unsafe { Tensor::from_raw_parts(address as *const u8, 1 << 20, DType::F16, Place::Cuda(0), layout) }
}

impl Setup {
    /// Runs with another k.
    fn run_with(&mut self, k: &Tensor<'_>) -> flashcore::Result<()> {
        let device = Device::cuda_with(self.cuda.clone());
        let q = self.q.view()?;
        Attention::new().run_into(&device, &q, k, &q, &mut self.o.view_mut()?, None)
    }

    /// A right call goes through.
    fn still_works(&mut self) {
        let device = Device::cuda_with(self.cuda.clone());
        let q = self.q.view().unwrap();
        let mut o = self.o.view_mut().unwrap();
        Attention::new().run_into(&device, &q, &q, &q, &mut o, None).expect("the GPU stays usable");
        self.cuda.synchronize().unwrap();
    }

    fn fault_of(&mut self, address: u64) -> PointerFault {
        let error = self.run_with(&at(address, Layout::bhsd(SHAPE)).unwrap()).unwrap_err();
        self.still_works();
        match error {
            Error::Pointer { tensor: Name::K, address: named, device, fault } => {
                assert!((address..address + 2 * ELEMENTS as u64).contains(&named));
                assert_eq!(device, "cuda:0");
                fault
            }
            other => panic!("expected a pointer fault, got {other:?}"),
        }
    }
}

#[test]
fn a_null_pointer_is_refused_when_the_view_is_made() {
    assert_eq!(at(0, Layout::bhsd(SHAPE)).unwrap_err(), Error::NullPointer { tensor: Name::Tensor });
    // SAFETY: refused.
    let lengths = unsafe { DeviceLengths::from_raw_parts(std::ptr::null(), 1, 9, 0) };
    assert_eq!(lengths.unwrap_err(), Error::NullPointer { tensor: Name::KeyLengths });
}

#[test]
fn a_host_pointer_is_refused_before_and_after_a_warm_call() {
    let Some(mut setup) = setup() else { return };
    let host = vec![0_u8; 4 * ELEMENTS];
    let address = (host.as_ptr() as u64).next_multiple_of(16);
    assert_eq!(setup.fault_of(address), PointerFault::NotCuda);
    setup.still_works();
    assert_eq!(setup.fault_of(address), PointerFault::NotCuda, "a warm problem is no excuse");
}

#[test]
fn page_locked_memory_and_another_gpus_memory_are_told_apart() {
    let Some(mut setup) = setup() else { return };
    let pinned = setup.cuda.context().alloc_pinned(2 * ELEMENTS).unwrap();
    assert_eq!(setup.fault_of(pinned.address()), PointerFault::PinnedHost);
    let other = setup.fake.driver.device(1).unwrap().context().unwrap();
    let foreign = other.alloc(2 * ELEMENTS).unwrap();
    assert_eq!(setup.fault_of(foreign.address()), PointerFault::OtherDevice(1));
}

#[test]
fn a_tensor_that_reaches_out_of_its_allocation_is_refused() {
    let Some(mut setup) = setup() else { return };
    // The fake's memory is the heap's: find a block behind which there is no other one.
    let context = setup.cuda.context().clone();
    let o = setup.o.buffer_mut().address();
    let blocks: Vec<_> = (0..20).map(|_| context.alloc(ELEMENTS).unwrap()).collect();
    let is_free = |address: u64| context.pointer_info(address).unwrap().kind == MemoryKind::Unknown;
    let behind = |address: u64| address..address + 2 * ELEMENTS as u64;
    let alone = blocks.iter().find(|block| {
        let span = behind(block.address());
        !span.contains(&o) && !behind(o).contains(&block.address()) && is_free(span.end - 1)
    });
    let Some(short) = alone else { return };
    let fault = setup.run_with(&at(short.address(), Layout::bhsd(SHAPE)).unwrap());
    assert!(matches!(fault, Err(Error::Pointer { tensor: Name::K, .. })), "{fault:?}");
    setup.still_works();
}

#[test]
fn a_tensor_of_another_gpu_by_its_own_word_is_refused_by_the_contract() {
    let Some(mut setup) = setup() else { return };
    let address = setup.q.buffer_mut().address();
    let layout = Layout::bhsd(SHAPE);
    // SAFETY: refused before anything is read.
    let k =
        unsafe { Tensor::from_raw_parts(address as *const u8, ELEMENTS, DType::F16, Place::Cuda(1), layout) };
    let error = setup.run_with(&k.unwrap()).unwrap_err();
    let Error::PlaceMismatch { tensor, given, .. } = error else { panic!("{error:?}") };
    assert_eq!((tensor, given), (Name::K, Place::Cuda(1)));
    setup.still_works();
}

#[test]
fn a_misaligned_address_or_stride_is_named_with_what_it_must_be() {
    let Some(mut setup) = setup() else { return };
    let address = setup.q.buffer_mut().address();
    let dense = Layout::bhsd([1, 2, 8, 64]);
    let strided = |dim: usize| {
        let mut layout = Layout::bhsd([1, 2, 8, 64]);
        layout.strides[dim] += 1;
        layout
    };
    let q = setup.cuda.empty(DType::F16, Layout::bhsd([1, 2, 8, 64])).unwrap();
    for (address, layout, what) in [
        (address + 2, dense, "address"),
        (address, strided(0), "batch stride"),
        (address, strided(1), "head stride"),
        (address, strided(2), "row stride"),
    ] {
        let k = at(address, layout).unwrap();
        let hopper = Device::cuda_with(setup.cuda.with_kernel(Kernel::Sm90Fwd));
        let v = at(setup.q.buffer_mut().address(), Layout::bhsd([1, 2, layout.shape[2], 64])).unwrap();
        let q = q.view().unwrap();
        let mut o = setup.cuda.empty(DType::F16, Layout::bhsd([1, 2, 8, 64])).unwrap();
        let error = Attention::new().run_into(&hopper, &q, &k, &v, &mut o.view_mut().unwrap(), None);
        let Err(Error::Alignment { tensor, what: named, needed, .. }) = error else {
            panic!("{what}: {error:?}")
        };
        assert_eq!((tensor, named, needed), (Name::K, what, 16));
        // Whoever leaves the choice to the planner gets the kernel that reads element by element, again and again.
        let planner = Device::cuda_with(setup.cuda.clone());
        for _ in 0..3 {
            let mut o = o.view_mut().unwrap();
            assert_eq!(Attention::new().run_into(&planner, &q, &k, &v, &mut o, None), Ok(()), "{what}");
        }
    }
    setup.still_works();
}

#[test]
fn a_stream_of_another_gpu_is_refused_with_both_named() {
    let Some(mut setup) = setup() else { return };
    let other = cuda(&setup.fake, 1).on_new_stream().unwrap();
    // SAFETY: the stream lives as long as `other`.
    let borrowed = unsafe { setup.cuda.on_stream(other.stream().as_raw()) };
    for error in [borrowed.unwrap_err(), setup.cuda.with_stream(other.stream()).unwrap_err()] {
        assert_eq!(error, Error::ForeignStream { stream_device: 1, device: "cuda:0".into() });
        assert!(error.to_string().contains("call on GPU 1"), "{error}");
    }
    setup.still_works();
}

#[test]
fn a_shortage_of_memory_says_how_much_was_asked_for() {
    let Some(mut setup) = setup() else { return };
    let layout = Layout::bhsd([1 << 10, 1 << 10, 1 << 10, 64]);
    let error = setup.cuda.empty(DType::F16, layout).err().unwrap();
    let Error::OutOfMemory { device, bytes, what, .. } = &error else { panic!("{error:?}") };
    assert_eq!((device.as_str(), *bytes), ("cuda:0", 1 << 37));
    assert!(what.contains("Free memory on the GPU"), "{what}");
    setup.still_works();
    // Staging host tensors can run short too, and nothing that it took stays behind.
    let live = setup.fake.live();
    setup.fake.fail("cuMemAlloc_v2", 2);
    let host = vec![flashcore::half::f16::ZERO; ELEMENTS];
    let x = Tensor::new(&host, &SHAPE).unwrap();
    let error = Attention::new().run(&Device::cuda_with(setup.cuda.clone()), &x, &x, &x).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error:?}");
    assert_eq!(setup.fake.live(), live);
    setup.still_works();
}

#[test]
fn an_unsupported_gpu_is_refused_with_what_is_possible() {
    let Some(fake) = Fake::start(&["-DCAPABILITY=75"]) else { return };
    let device = fake.driver.device(0).unwrap();
    let error = Cuda::of_device(device, CubinCache::of_user()).err().unwrap();
    let Error::Unsupported { device, what, possible, .. } = &error else { panic!("{error:?}") };
    assert_eq!(device, "cuda:0");
    assert!(what.contains("7.5") && what.contains("Fake GPU 0") && possible.contains("8.0"), "{error}");
    assert_eq!(fake.live(), 0, "the context is given back");
}

#[test]
fn a_gpu_that_is_not_there_is_named_with_the_count() {
    let Some(fake) = Fake::start(&[]) else { return };
    assert!(fake.driver.device(7).unwrap_err().to_string().contains("there is no GPU 7"));
}

#[test]
fn key_lengths_on_the_gpu_are_checked_for_number_bound_and_memory() {
    let Some(mut setup) = setup() else { return };
    let lengths = setup.cuda.upload_lengths(&[64, 64]).unwrap();
    let too_long = setup.cuda.upload_lengths(&[65]).unwrap();
    let good = setup.cuda.upload_lengths(&[3]).unwrap();
    let host = [3_u32; 8];
    // SAFETY: the call refuses it.
    let on_host = unsafe { DeviceLengths::from_raw_parts(host.as_ptr(), 1, 8, 0) }.unwrap();
    let device = Device::cuda_with(setup.cuda.clone());
    let mut run = |lengths: DeviceLengths<'_>| {
        let q = setup.q.view()?;
        let attention = Attention::new().key_lengths_on_device(lengths);
        attention.run_into(&device, &q, &q, &q, &mut setup.o.view_mut()?, None)
    };
    assert_eq!(run(lengths.view().unwrap()), Err(Error::KeyLengthCount { given: 2, batch: 1 }));
    assert_eq!(run(too_long.view().unwrap()), Err(Error::KeyLengthBound { given: 65, len_k: 64 }));
    let error = run(on_host).unwrap_err();
    assert!(
        matches!(error, Error::Pointer { tensor: Name::KeyLengths, fault: PointerFault::NotCuda, .. }),
        "{error:?}"
    );
    assert_eq!(run(good.view().unwrap()), Ok(()));
    let data = [0.5_f32; 4];
    let x = Tensor::new(&data, &[1, 1, 2, 2]).unwrap();
    let mut out = [0.0_f32; 4];
    let mut o = TensorMut::new(&mut out, &[1, 1, 2, 2]).unwrap();
    let two = setup.cuda.upload_lengths(&[2]).unwrap();
    let attention = Attention::new().key_lengths_on_device(two.view().unwrap());
    let error = attention.run_into(&Device::cpu(), &x, &x, &x, &mut o, None).unwrap_err();
    assert!(matches!(error, Error::PlaceMismatch { tensor: Name::KeyLengths, .. }), "{error:?}");
}

/// The fake's flags for each generation, with how its kernels are loaded.
const GENERATIONS: [(&[&str], &str); 2] =
    [(&[], "cuModuleLoadDataEx"), (&["-DCAPABILITY=80"], "cuLinkComplete")];

#[test]
fn a_failed_launch_is_an_error_and_the_next_call_goes_through() {
    for (flags, _) in GENERATIONS {
        let Some(mut setup) = setup_with(flags) else { return };
        setup.still_works();
        setup.fake.fail("cuLaunchKernel*", 701);
        let q = at(setup.q.buffer_mut().address(), Layout::bhsd(SHAPE)).unwrap();
        let error = setup.run_with(&q).unwrap_err();
        assert!(matches!(&error, Error::Device { what, .. } if what.contains("cuLaunchKernel")), "{error:?}");
        let source =
            std::error::Error::source(&error).and_then(|source| source.downcast_ref::<DriverError>());
        assert_eq!(source.and_then(DriverError::status).map(|status| status.0), Some(701));
        setup.still_works();
    }
}

#[test]
fn code_that_does_not_assemble_is_an_error_and_is_tried_again() {
    for (flags, load) in GENERATIONS {
        let Some(mut setup) = setup_with(flags) else { return };
        setup.fake.fail(load, 218);
        let q = at(setup.q.buffer_mut().address(), Layout::bhsd(SHAPE)).unwrap();
        let error = setup.run_with(&q).unwrap_err();
        assert!(matches!(&error, Error::Device { what, .. } if what.contains("INVALID_PTX")), "{error:?}");
        setup.still_works();
    }
}

#[test]
fn gradients_that_kernels_do_not_compute_are_refused_with_what_to_do() {
    let Some(mut setup) = setup() else { return };
    let device = Device::cuda_with(setup.cuda.clone());
    let run = |given: &Backward<'_>, outputs: [&mut TensorMut<'_>; 3]| {
        let [dq, dk, dv] = outputs;
        Attention::new().backward_into(&device, given, dq, dk, dv)
    };
    // On the GPU: 16 bits are computed, 32 are not.
    for (dtype, right) in [(DType::F16, true), (DType::F32, false)] {
        let tensor = |dtype, shape| setup.cuda.empty(dtype, Layout::bhsd(shape)).unwrap();
        let lse = tensor(DType::F32, [1, 2, 64, 1]);
        let q = tensor(dtype, SHAPE);
        let q = q.view().unwrap();
        let (mut dq, mut dk, mut dv) = (tensor(dtype, SHAPE), tensor(dtype, SHAPE), tensor(dtype, SHAPE));
        let done = run(
            &Backward::new([&q, &q, &q], &q, &lse.view().unwrap(), &q),
            [&mut dq.view_mut().unwrap(), &mut dk.view_mut().unwrap(), &mut dv.view_mut().unwrap()],
        );
        match done {
            Ok(()) => assert!(right),
            Err(Error::Unsupported { what, possible, .. }) if !right => {
                assert!(
                    what.contains("backward pass of f32") && possible.contains("Device::cpu()"),
                    "{possible}"
                );
            }
            other => panic!("{other:?}"),
        }
    }
    // On the host, without a query: dk and dv are to be zeros all the same.
    let (keys, none) = ([1.0_f32; 128], [0.0_f32; 0]);
    let (k, q) = (Tensor::new(&keys, &[1, 2, 8, 8]).unwrap(), Tensor::new(&none, &[1, 2, 0, 8]).unwrap());
    let lse = Tensor::new(&none, &[1, 2, 0, 1]).unwrap();
    let (mut dq, mut dk, mut dv) = (none, keys, keys);
    let done = run(
        &Backward::new([&q, &k, &k], &q, &lse, &q),
        [
            &mut TensorMut::new(&mut dq, &[1, 2, 0, 8]).unwrap(),
            &mut TensorMut::new(&mut dk, &[1, 2, 8, 8]).unwrap(),
            &mut TensorMut::new(&mut dv, &[1, 2, 8, 8]).unwrap(),
        ],
    );
    assert!(matches!(done, Err(Error::Unsupported { .. })), "{done:?}");
    setup.still_works();
}
