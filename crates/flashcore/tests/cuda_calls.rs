//! What a call on a GPU costs the host, counted on a driver that needs no GPU: driver calls by name, and allocations.

#![cfg(all(target_os = "linux", feature = "cuda"))]
#![allow(unsafe_code)] // An allocator that counts, and views of raw addresses.

#[path = "../../driver/tests/fake/mod.rs"]
mod fake;

use std::{
    alloc::{GlobalAlloc, Layout as Memory, System},
    cell::Cell,
};

use fake::{COUNT_CALLS, Fake};
use flashcore::{
    Attention, DType, Device, Error, Layout, Place, Tensor,
    cuda::{CubinCache, Cuda, CudaTensor},
};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, counting what each thread asks of it.
struct Counting;

fn count() {
    // A thread that is ending has no counter any more.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Memory) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Memory) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Memory, size: usize) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How many allocations this thread makes while it does something.
fn allocations(work: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

const BATCH: usize = 2;
const SHAPE: [usize; 4] = [BATCH, 4, 64, 64];

/// A GPU of the fake driver with the tensors of one problem on it.
struct Setup {
    fake: Fake,
    cuda: Cuda,
    device: Device,
    q: CudaTensor,
    k: CudaTensor,
    v: CudaTensor,
    o: CudaTensor,
    lse: CudaTensor,
}

fn setup(flags: &[&str]) -> Option<Setup> {
    let fake = Fake::start(flags)?;
    let cache = CubinCache::in_folder(tempfile::tempdir().unwrap().path(), 1 << 20);
    let cuda = Cuda::of_device(fake.driver.device(0).unwrap(), cache).unwrap().on_new_stream().unwrap();
    let tensor = |shape| cuda.empty(DType::F16, Layout::bhsd(shape)).unwrap();
    let [q, k, v, o] = [(); 4].map(|()| tensor(SHAPE));
    let lse = cuda.empty(DType::F32, Layout::bhsd([BATCH, 4, 64, 1])).unwrap();
    Some(Setup { device: Device::cuda_with(cuda.clone()), fake, cuda, q, k, v, o, lse })
}

impl Setup {
    fn run(&mut self, attention: &Attention<'_>) -> Result<(), Error> {
        let (q, k, v) = (self.q.view()?, self.k.view()?, self.v.view()?);
        let mut lse = self.lse.view_mut()?;
        attention.run_into(&self.device, &q, &k, &v, &mut self.o.view_mut()?, Some(&mut lse))
    }

    /// The driver calls of one warm call, without those that ask whose context is current.
    fn warm_calls(&mut self, attention: &Attention<'_>) -> Vec<String> {
        self.run(attention).unwrap();
        self.fake.calls();
        self.run(attention).unwrap();
        let mut calls = self.fake.calls();
        calls.retain(|call| call != "cuCtxGetCurrent");
        calls
    }
}

/// A launch with clusters has a function of its own.
fn assert_one_launch(calls: &[String]) {
    assert!(matches!(calls, [only] if only.starts_with("cuLaunchKernel")), "{calls:?}");
}

/// What makes the fake's first GPU another one than a Hopper.
const AMPERE: &str = "-DCAPABILITY=80";

/// A fake that counts, with one more flag.
fn with(flag: &'static str) -> Vec<&'static str> {
    COUNT_CALLS.iter().copied().chain([flag]).collect()
}

#[test]
fn a_warm_call_is_one_launch_and_nothing_else() {
    for flags in [COUNT_CALLS.to_vec(), with(AMPERE)] {
        let Some(mut setup) = setup(&flags) else { return };
        for attention in [Attention::new(), Attention::new().causal().softcap(20.0)] {
            assert_one_launch(&setup.warm_calls(&attention));
        }
    }
}

#[test]
fn a_call_that_keeps_coming_back_becomes_a_graph_launch() {
    for flags in [COUNT_CALLS.to_vec(), with(AMPERE)] {
        let Some(mut setup) = setup(&flags) else { return };
        let attention = Attention::new();
        for _ in 0..4 {
            setup.run(&attention).unwrap();
        }
        assert_eq!(setup.warm_calls(&attention), ["cuStreamIsCapturing", "cuGraphLaunch"]);
        assert_eq!(allocations(|| setup.run(&attention).unwrap()), 0);
        // Other tensors are another call.
        std::mem::swap(&mut setup.q, &mut setup.k);
        assert_one_launch(&setup.warm_calls(&attention));
        std::mem::swap(&mut setup.q, &mut setup.k);
        assert_eq!(setup.warm_calls(&attention), ["cuStreamIsCapturing", "cuGraphLaunch"]);
    }
}

#[test]
fn a_stream_that_is_recorded_gets_the_kernel_and_not_its_graph() {
    let Some(mut setup) = setup(COUNT_CALLS) else { return };
    let attention = Attention::new();
    for _ in 0..6 {
        setup.run(&attention).unwrap();
    }
    setup.fake.calls();
    let Setup { cuda, q, k, v, o, lse, fake, .. } = &setup;
    let recording = cuda.record(|calls| calls.run(&attention, [q, k, v], o, Some(lse))).unwrap();
    let calls = fake.calls();
    assert!(calls.iter().any(|call| call.starts_with("cuLaunchKernel")), "{calls:?}");
    assert!(!calls.iter().any(|call| call == "cuGraphLaunch"), "{calls:?}");
    drop(recording);
}

#[test]
fn a_graph_that_makes_room_for_another_call_spoils_no_recording() {
    let Some(mut setup) = setup(COUNT_CALLS) else { return };
    let mut destroyed = 0;
    // More calls than are kept.
    for call in 1..=320u16 {
        let attention = Attention::new().scale(f32::from(call) / 1000.0);
        for _ in 0..4 {
            setup.run(&attention).unwrap();
        }
        let calls = setup.fake.calls();
        let gone = calls.iter().enumerate().filter(|(_, call)| *call == "cuGraphExecDestroy");
        for (at, _) in gone {
            let mode = |call: &&String| *call == "cuThreadExchangeStreamCaptureMode";
            assert_eq!(calls[..at].iter().filter(mode).count() % 2, 1, "not relaxed: {calls:?}");
            destroyed += 1;
        }
    }
    assert!(destroyed > 20, "{destroyed}");
}

#[test]
fn a_warm_call_allocates_nothing() {
    for flags in [&[][..], &[AMPERE]] {
        let Some(mut setup) = setup(flags) else { return };
        let attention = Attention::new().causal().scale(0.3);
        setup.run(&attention).unwrap();
        assert_eq!(allocations(|| setup.run(&attention).unwrap()), 0, "{flags:?}");
        let lengths = setup.cuda.upload_lengths(&[64, 7]).unwrap();
        let attention = attention.key_lengths_on_device(lengths.view().unwrap());
        setup.run(&attention).unwrap();
        assert_eq!(allocations(|| setup.run(&attention).unwrap()), 0, "{flags:?}");
    }
}

#[test]
fn calls_that_take_turns_allocate_nothing_and_each_keeps_its_own_parameters() {
    let Some(mut setup) = setup(&[AMPERE]) else { return };
    let attention = Attention::new();
    let queries: Vec<CudaTensor> =
        (0..3).map(|_| setup.cuda.empty(DType::F16, Layout::bhsd(SHAPE)).unwrap()).collect();
    let mut turn = || {
        for q in &queries {
            let (q, k, v) = (q.view().unwrap(), setup.k.view().unwrap(), setup.v.view().unwrap());
            attention.run_into(&setup.device, &q, &k, &v, &mut setup.o.view_mut().unwrap(), None).unwrap();
        }
    };
    // A launch's first parameter is where q lies.
    let parameters = |fake: &Fake| -> Vec<String> {
        fake.record().into_iter().filter(|line| line.starts_with("  params")).collect()
    };
    turn();
    let first = parameters(&setup.fake);
    assert_eq!(allocations(&mut turn), 0);
    assert_eq!(parameters(&setup.fake), first);
    assert_eq!(first.iter().collect::<std::collections::HashSet<_>>().len(), 3, "{first:?}");
}

#[test]
fn key_lengths_on_the_gpu_cost_no_driver_call() {
    let Some(mut setup) = setup(COUNT_CALLS) else { return };
    let lengths = setup.cuda.upload_lengths(&[64, 7]).unwrap();
    let attention = Attention::new().key_lengths_on_device(lengths.view().unwrap());
    assert_one_launch(&setup.warm_calls(&attention));
}

#[test]
fn key_lengths_on_the_host_are_stored_in_stream_order_and_nobody_waits() {
    let Some(mut setup) = setup(COUNT_CALLS) else { return };
    let calls = setup.warm_calls(&Attention::new().key_lengths(&[64, 7]));
    let calls: Vec<&str> =
        calls.iter().map(String::as_str).filter(|call| *call != "cuCtxGetCurrent").collect();
    let [alloc, store, launch, free] = calls[..] else { panic!("{calls:?}") };
    assert_eq!([alloc, store, free], ["cuMemAllocAsync", "cuLaunchKernel", "cuMemFreeAsync"]);
    assert!(launch.starts_with("cuLaunchKernel"), "{launch}");
}

#[test]
fn without_stream_ordered_memory_the_lengths_outlive_the_kernel() {
    let Some(mut setup) = setup(&with("-DWITHOUT_POOLS")) else { return };
    let calls = setup.warm_calls(&Attention::new().key_lengths(&[64, 7]));
    let ends: Vec<&str> =
        calls.iter().map(String::as_str).filter(|call| *call != "cuCtxGetCurrent").collect();
    assert_eq!(ends[ends.len() - 2..], ["cuStreamSynchronize", "cuMemFree_v2"]);
}

#[test]
fn the_stored_lengths_are_the_parameters_of_a_kernel_and_more_than_a_launch_takes_are_split() {
    let Some(fake) = Fake::start(&[]) else { return };
    let cache = CubinCache::in_folder(tempfile::tempdir().unwrap().path(), 1 << 20);
    let cuda = Cuda::of_device(fake.driver.device(0).unwrap(), cache).unwrap();
    let layout = Layout::bhsd([300, 1, 4, 16]);
    let tensor = || cuda.empty(DType::F16, layout).unwrap();
    let (q, k, v, mut o) = (tensor(), tensor(), tensor(), tensor());
    let lengths: Vec<u32> = (0..300).map(|i| i % 5).collect();
    fake.record();
    let attention = Attention::new().key_lengths(&lengths);
    let device = Device::cuda_with(cuda);
    let (q, k, v) = (q.view().unwrap(), k.view().unwrap(), v.view().unwrap());
    attention.run_into(&device, &q, &k, &v, &mut o.view_mut().unwrap(), None).unwrap();
    let record = fake.record();
    let stores: Vec<Vec<&str>> = record
        .iter()
        .zip(&record[1..])
        .filter(|(launch, _)| launch.starts_with("launch flashcore_key_lengths"))
        .map(|(_, params)| params.split_whitespace().skip(1).collect())
        .collect();
    // An address, how many of the lengths are meant, and room for 256 of them.
    let word = |bytes: &[&str]| {
        u32::from_le_bytes(std::array::from_fn(|i| u8::from_str_radix(bytes[i], 16).unwrap()))
    };
    let counts: Vec<u32> = stores.iter().map(|params| word(&params[8..12])).collect();
    assert_eq!(counts, [256, 44]);
    let values = stores.iter().zip(&counts).flat_map(|(params, &count)| {
        params[12..].chunks(4).take(count as usize).map(word).collect::<Vec<u32>>()
    });
    assert_eq!(values.collect::<Vec<u32>>(), lengths);
    assert!(stores.iter().all(|params| params.len() == 8 + 4 + 4 * 256));
    assert_eq!(word(&stores[1][..4]), word(&stores[0][..4]).wrapping_add(1024), "the second part follows");
}

#[test]
fn an_allocation_is_asked_for_once_however_many_tensors_lie_in_it() {
    let Some(mut setup) = setup(COUNT_CALLS) else { return };
    setup.run(&Attention::new()).unwrap();
    let base = setup.q.view().unwrap();
    assert_eq!(base.place(), Place::Cuda(0));
    let address = setup.q.buffer_mut().address();
    let part = |offset: u64| {
        let layout = Layout::bhsd([1, 1, 64, 64]);
        // SAFETY: the part lies in q, which lives as long as the test.
        unsafe {
            Tensor::from_raw_parts((address + offset) as *const u8, 4096, DType::F16, Place::Cuda(0), layout)
        }
        .unwrap()
    };
    let mut out = setup.cuda.empty(DType::F16, Layout::bhsd([1, 1, 64, 64])).unwrap();
    let mut run = |offset: u64| {
        let (q, k, v) = (part(offset), part(8192), part(2 * 8192));
        Attention::new().run_into(&setup.device, &q, &k, &v, &mut out.view_mut().unwrap(), None).unwrap();
    };
    setup.fake.calls();
    run(0);
    let asked = setup.fake.calls().iter().filter(|call| *call == "cuPointerGetAttributes").count();
    assert_eq!(asked, 1, "only the new output's allocation was not known");
    run(3 * 8192);
    let calls = setup.fake.calls();
    assert!(!calls.contains(&"cuPointerGetAttributes".into()), "{calls:?}");
    run(3 * 8192);
    assert_one_launch(&setup.fake.calls());
}

#[test]
fn a_recorded_call_replays_as_one_graph_launch() {
    let Some(setup) = setup(COUNT_CALLS) else { return };
    let Setup { fake, cuda, q, k, v, o, .. } = &setup;
    let recording = cuda
        .record(|calls| {
            calls.run(&Attention::new().causal(), [q, k, v], o, None)?;
            calls.run(&Attention::new().key_lengths(&[3, 64]), [q, k, v], o, None)
        })
        .unwrap();
    assert_eq!(recording.calls(), 2);
    fake.calls();
    recording.replay().unwrap();
    assert_eq!(fake.calls().iter().filter(|call| *call == "cuGraphLaunch").count(), 1);
    let error = cuda.record(|calls| {
        let wrong = Attention::new().key_lengths(&[3]);
        calls.run(&wrong, [q, k, v], o, None)
    });
    assert!(
        matches!(error, Err(Error::KeyLengthCount { given: 1, batch: 2 })),
        "the call's own error comes first"
    );
    recording.replay().unwrap();
}

#[test]
fn a_kernel_is_made_once_for_a_problem_and_once_on_the_disk() {
    let Some(fake) = Fake::start(&with(AMPERE)) else { return };
    let folder = tempfile::tempdir().unwrap();
    // How often code is assembled and loaded by a first and a second call.
    let made = || {
        let cache = CubinCache::in_folder(folder.path(), 1 << 20);
        let cuda = Cuda::of_device(fake.driver.device(0).unwrap(), cache).unwrap();
        let tensor = || cuda.empty(DType::F16, Layout::bhsd(SHAPE)).unwrap();
        let (q, mut o) = (tensor(), tensor());
        let device = Device::cuda_with(cuda.clone());
        [(); 2].map(|()| {
            fake.calls();
            let q = q.view().unwrap();
            Attention::new().run_into(&device, &q, &q, &q, &mut o.view_mut().unwrap(), None).unwrap();
            let calls = fake.calls();
            ["cuLinkComplete", "cuModuleLoadDataEx"]
                .map(|name| calls.iter().filter(|call| *call == name).count())
        })
    };
    assert_eq!(made(), [[1, 1], [0, 0]]);
    assert_eq!(made(), [[0, 1], [0, 0]], "the next process finds it there");
}
